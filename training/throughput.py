"""Throughput of training: measured in a few steps, or assumed from published results."""

import time
from dataclasses import dataclass

from accelerate import Accelerator

from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import TokenStore
from training.batches import TrainBatches, WindowOrder
from training.config import TrainConfig
from training.data import place_tokens
from training.device import Setup
from training.distributed import on_main
from training.hardware import FILLS_A_GPU, MFU_OF_OTHERS, peak_flops, reported_mfu
from training.plan import Plan
from training.speed import Speed, flops_per_token, product_parameters
from training.step import build_train_step

SCORING = 1 / 3  # cost of scoring a token in a validation, as a fraction of training on it: only the forward pass
AFTER_VALIDATION = 1.0  # seconds of samples, plots and a checkpoint after each validation, measured for the quickstart
WARM = 3  # steps after the first that allocate memory
REPORTING = 50_000_000  # bytes of code that a run loads for sampling and plots


@dataclass(frozen=True)
class Throughput:
    """Estimated tokens per second of all processes together, with the source of the estimate."""

    tokens_per_second: float
    known: str  # the source: "measured over 10 steps ...", "assumed ..."
    mfu: float | None = None
    peak_bytes: float | None = None  # peak memory; None if no steps were measured
    first_step: float = 0.0  # seconds until the first step is done


def measure_speed(
    config: TrainConfig,
    plan: Plan,
    setup: Setup,
    accelerator: Accelerator,
    store: TokenStore,
    steps: int,
    seconds: float = 3.0,
) -> Throughput:
    """Measure training steps at a learning rate of 0, `steps` at a time and for at least `seconds`, after the first step, which
    compiles. Called by every process. No result is kept."""
    tokens = place_tokens(store, "train", plan.placement.where, accelerator.device, config.batch.mask_documents)
    order = WindowOrder(store.metadata.train.tokens, plan.batches.context, config.run.seed)
    began = time.perf_counter()
    batches = TrainBatches(tokens, order, plan.batches, accelerator.process_index)
    train_step = build_train_step(plan.model, None, batches, config.optim, setup, accelerator)
    speed = Speed(batches, plan.model, accelerator)

    def do(first: int, number: int) -> None:
        for step in range(first, first + number):
            step_loss, _ = train_step(step, rate_factor=0.0)
            speed.count(plan.tokens_per_step)
        float(step_loss)  # waits for the device

    do(0, 1)
    first_step = time.perf_counter() - began
    do(1, WARM)
    speed.restart()
    while on_main(accelerator, lambda: speed.seconds < seconds):  # no clock of its own: each step needs all processes
        do(1 + WARM + speed.steps, steps)
    measured = speed.measured()
    known = f"measured over {speed.steps} steps; the first step was done after {first_step:.1f} s"
    peak = 1e9 * measured["peak_memory_gb"]
    if not plan.memory.on_gpu:  # these steps do not save, sample or plot
        peak += plan.memory.fixed()["checkpoint copy"] + REPORTING
    return Throughput(measured["tokens_per_second"], known, measured.get("mfu"), peak, first_step)


def assumed_speed(device: str, model: GPT2ScratchConfig, mixed_precision: str, devices: int) -> Throughput | None:
    """Return the throughput assumed for a device from published results, or None if its peak is unknown or the model too small."""
    peak = peak_flops(device, mixed_precision)
    if peak is None or product_parameters(model) < FILLS_A_GPU:
        return None
    at_peak = peak * devices / flops_per_token(model)
    least, usual, most = reported_mfu(device) or MFU_OF_OTHERS
    known = (
        f"assumed: {usual:.0%} of its peak; others report {least:.0%} to {most:.0%}, which is "
        f"{least * at_peak:,.0f} to {most * at_peak:,.0f} tokens/s"
    )
    return Throughput(usual * at_peak, known, usual)
