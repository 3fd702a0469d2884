"""Throughput of training: measured in a few steps, or assumed from published results."""

import math
import time
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch._dynamo.exc import BackendCompilerFailed

from common.errors import UserError, counted
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store.store import TokenStore
from training.config import TrainConfig
from training.data.batches import TrainBatches, WindowOrder
from training.data.run_data import place_tokens
from training.guard.faults import compiler_error, is_out_of_memory
from training.log.speed import Speed, flops_per_token, peak_memory
from training.plan.plan import Plan
from training.runtime.distributed import on_main
from training.runtime.hardware import DEFAULT_MFU, FILLS_A_GPU, peak_flops, reported_mfu
from training.step.optim import second_target_weight, step_work
from training.step.size import size_of
from training.step.train_step import build_train_step

SCORING_COST = 1 / 3  # cost of scoring a token in a validation, as a fraction of training on it: only the forward pass
AFTER_VALIDATION = 1.0  # seconds of samples, plots and a checkpoint after each validation, measured for the quickstart
WARM = 3  # steps after the first that allocate memory
PROBE_FLOPS = 1e11  # of a micro-batch on a CPU, for each thread: a second or two
PROBE_TOKENS = 4096  # of a micro-batch on a CPU, where more are hardly faster
PROBE_CONTEXT = 1024  # longest of a model that is measured in place of a larger one
PROBE_WIDTH = 128  # smallest of such a model
REPORTING_BYTES = 50_000_000  # bytes of code that a run loads for sampling and plots


@dataclass(frozen=True)
class Throughput:
    """Estimated tokens per second of all processes together, with the source of the estimate."""

    tokens_per_second: float
    source: str  # "measured over 10 steps ...", "assumed ..."
    mfu: float | None = None
    peak_bytes: float | None = None  # peak memory; None if no steps were measured
    startup: float = 0.0  # seconds until the first step is done

    def seconds(self, tokens: float, validations: float, validation_tokens: float) -> float:
        """Return the seconds of a run that trains on `tokens` and scores `validation_tokens` in its `validations`,
        which also write samples, plots and checkpoints."""
        training = (tokens + SCORING_COST * validation_tokens) / self.tokens_per_second
        return self.startup + AFTER_VALIDATION * validations + training


def validation_tokens(validations: int, sample: int, split: int) -> int:
    """Return the number of tokens that all validations of a run score: each a `sample`, except the last, which scores
    the whole `split`."""
    return split + (validations - 1) * min(sample, split)


def measure_speed(
    config: TrainConfig, plan: Plan, accelerator: Accelerator, store: TokenStore, steps: int, seconds: float
) -> Throughput:
    """Measure training steps at a learning rate of 0, on a GPU `steps` at a time, for at least `seconds`, after the
    first step, which compiles. Called by every process. No result is kept.

    The steps have one micro-batch, on a CPU of few operations. The speed of the plan follows from the operations, and
    from steps of one and of two micro-batches, whose difference excludes the optimizer."""
    try:
        return _measured(config, plan, accelerator, store, steps, seconds)
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"Out of memory with a micro-batch of {counted(plan.batches.micro_batch, 'sequence')} while the speed "
                "was measured; use a smaller --per_device_train_batch_size, or a smaller model."
            ) from error
        if isinstance(error, BackendCompilerFailed):
            raise compiler_error(error, " while the speed was measured", "run the same command again") from error
        raise
    finally:
        accelerator.free_memory()  # it would keep the measured model, which mixed precision puts into a cycle
        clear_device_cache(garbage_collection=True)  # gc.freeze() would keep that for the whole run
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the run reports its own


def _measured(
    config: TrainConfig, plan: Plan, accelerator: Accelerator, store: TokenStore, steps: int, seconds: float
) -> Throughput:
    model, micro = _bounded(plan, math.inf if plan.memory.on_gpu else PROBE_FLOPS * torch.get_num_threads())
    number = plan.tokens_per_step / (micro * model.n_positions * plan.batches.processes)  # of micro-batches
    tokens = place_tokens(store, "train", plan.placement.where, accelerator.device, config.batch.mask_documents)
    order = WindowOrder(store.metadata.train.tokens, model.n_positions, config.run.seed)
    start = time.perf_counter()
    single = replace(plan.batches, context=model.n_positions, micro_batch=micro, accumulation=1)
    batches = TrainBatches(tokens, order, single, accelerator.process_index)
    optim = replace(config.optim, induction_init=False)  # which needs two heads, and has no effect on the speed
    train_step = build_train_step(model, None, batches, optim, plan.memory.setup, accelerator)
    speed = Speed(batches, plan.model, accelerator)

    def do(steps: int) -> None:
        for step in range(speed.steps, speed.steps + steps):
            step_loss, _ = train_step(step, 0.0, second_target_weight(0, 1, config.optim))
            speed.steps += 1
        float(step_loss)  # waits for the device

    def seconds_per_step(warm: int) -> float:
        do(warm)
        speed.restart()
        # One clock: each step needs all processes.
        while speed.steps == 0 or on_main(accelerator, lambda: speed.seconds < seconds):
            do(steps if plan.memory.on_gpu else 1)
        return speed.seconds / speed.steps

    do(1)
    first_step = time.perf_counter() - start
    total, source, peak = seconds_per_step(WARM), f"measured over {counted(speed.steps, 'step')}", None
    if (model, micro) == (plan.model, plan.batches.micro_batch):
        peak = peak_memory(accelerator.device)
        if not plan.memory.on_gpu:  # these steps do not save, sample or plot
            peak += plan.memory.fixed()["checkpoint copy"] + REPORTING_BYTES
    if number > 1 or model != plan.model:
        batches.plan = replace(single, accumulation=2)
        accelerator.gradient_accumulation_steps, accelerator.step = 2, 0
        slope = min(total, max(0.0, seconds_per_step(1) - total))  # seconds of a micro-batch, without the optimizer
        of_optimizer = step_work(config.optim.optimizer, plan.model) / step_work(config.optim.optimizer, model)
        of_model = flops_per_token(plan.model) / flops_per_token(model)
        total = number * of_model * slope + of_optimizer * (total - slope)
        layers = f"{counted(model.n_layer, 'layer')} of width {model.n_embd}"
        source += f" of {micro * model.n_positions:,} tokens with {layers}, scaled by operations"
    source += f"; the first step was done after {first_step:.1f} s"
    pace = plan.tokens_per_step / total
    return Throughput(pace, source, speed.at_peak and pace / speed.at_peak, peak, startup=first_step)


def _bounded(plan: Plan, flops: float) -> tuple[GPT2ScratchConfig, int]:
    """Return the model and the micro-batch of a step with at most `flops` operations: with fewer tokens, layers,
    sequences and heads, in this order. Both are the plan's if `flops` is infinite."""
    model, micro = deepcopy(plan.model), plan.batches.micro_batch
    if flops < math.inf:
        model.n_positions = min(model.n_positions, PROBE_CONTEXT)
        micro = min(micro, PROBE_TOKENS // model.n_positions)
    while micro * model.n_positions * flops_per_token(model) > flops:
        if model.n_layer > 2:
            model.n_layer = max(2, model.n_layer // 2)
        elif micro > 1:
            micro //= 2
        elif model.n_embd > PROBE_WIDTH:
            size = min(PROBE_WIDTH, model.n_embd // model.n_head)
            model.n_head = max(1, model.n_head // 2)
            model.n_embd, model.n_inner = model.n_head * size, None
        else:
            break
    return model if model.to_dict() != plan.model.to_dict() else plan.model, micro


def assumed_speed(device: str, model: GPT2ScratchConfig, mixed_precision: str, devices: int) -> Throughput | None:
    """Return the throughput assumed from published results, or None for an unknown device or a small model."""
    peak = peak_flops(device, mixed_precision)
    if peak is None or size_of(model).products < FILLS_A_GPU:
        return None
    at_peak = peak * devices / flops_per_token(model)
    reports = reported_mfu(device)
    lowest, usual, highest = reports or DEFAULT_MFU
    whose = "others report" if reports else "no reports for it, so a guess of"
    source = (
        f"assumed: {usual:.0%} of its peak; {whose} {lowest:.0%} to {highest:.0%}, which is "
        f"{lowest * at_peak:,.0f} to {highest * at_peak:,.0f} tokens/s"
    )
    return Throughput(usual * at_peak, source, usual)
