"""Training step: the hot path. Nothing here waits for the device."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.profiler import record_function

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.data.batches import TrainBatches, mix
from training.runtime.compilation import prepare_compiler
from training.runtime.device import Setup, computes_bf16
from training.step.average import WeightAverage
from training.step.induction import add_induction
from training.step.loss import NextTokenLoss
from training.step.model import build_model
from training.step.optim import OptimArguments, build_optimizer, load_moments, set_rates, skip_if_not_finite
from training.step.sharding import shard
from training.step.tensors import OPTIMIZER, WEIGHTS, load_checkpoint_weights, whole


@dataclass
class TrainStep:
    """Model, loss and optimizer, prepared by Accelerate, with their training batches."""

    accelerator: Accelerator
    model: GPT2ScratchForCausalLM
    loss: nn.Module  # the prepared `NextTokenLoss` of the model
    optimizer: AcceleratedOptimizer  # around `optimizer.optimizer`, PyTorch's own
    batches: TrainBatches
    max_grad_norm: float
    average: WeightAverage | None = None

    def __call__(
        self, step: int, rate_factor: float, second_weight: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on global batch `step`, at `rate_factor` times the peak learning rates, with second targets of weight
        `second_weight`. Return this process's mean loss and the gradient norm before clipping, as tensors on the
        device."""
        accumulation, device = self.batches.plan.accumulation, self.accelerator.device
        # Dropout is a function of (seed, step, rank), like the data: no generator state to save or restore.
        seed = mix(mix(self.batches.order.seed, step), self.accelerator.process_index) >> 1
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` records a traceback, which takes 0.3 ms
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        set_rates(self.optimizer.optimizer, step, rate_factor)
        total = torch.zeros((), device=device)
        # A tensor, because the compiled graph would have a number as a constant.
        second = () if second_weight is None else (torch.full((), second_weight, device=device),)
        for micro_step in range(accumulation):
            with record_function("data"):  # for --profile; costs 5 us when not recording
                inputs, targets, positions = self.batches(step, micro_step)  # (B, T) each
            with self.accelerator.accumulate(self.loss):
                with record_function("forward"):
                    loss = self.loss(inputs, targets, targets.numel(), positions, *second)
                with record_function("backward"):
                    # A factor of exactly 1. If the loss is not finite, every gradient becomes not finite, on all
                    # processes.
                    self.accelerator.backward(loss * (1 + 0 * loss.detach()))
                    total += loss.detach()
        # Accelerate has counted the micro-batches: these calls follow the last one of the step.
        with record_function("optimizer"):
            norm = whole(self.accelerator.clip_grad_norm_(self.loss.parameters(), self.max_grad_norm or math.inf))
            if self.accelerator.scaler is None:
                skip_if_not_finite(self.optimizer.optimizer, norm)  # both may be offloaded
            self.optimizer.step()
            if self.average is not None:
                self.average.update(step)
            self.optimizer.zero_grad()
        return total / accumulation, norm.to(device)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model has the averages of its weights, if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()


def build_train_step(
    config: GPT2ScratchConfig,
    checkpoint: Path | None,
    batches: TrainBatches,
    arguments: OptimArguments,
    setup: Setup,
    accelerator: Accelerator,
    initializer: Callable[[nn.Module], None] | None = None,
) -> TrainStep:
    """Build, compile and distribute the model, and create its optimizer. Weights and moments are new or from a
    checkpoint. Raise a `UserError` if the checkpoint's tensors do not fit the model, or hold values that no run writes.
    `initializer` writes the initial weights of a run without a checkpoint; by default they are random."""
    load = partial(load_checkpoint_weights, checkpoint / WEIGHTS) if checkpoint is not None else initializer
    model = build_model(config, setup, batches.order.seed, load)
    if arguments.induction_init and load is None:
        add_induction(model)
    # The count of micro-batches starts at 0, so that a measurement before the run does not shift the run's global
    # batches.
    accelerator.gradient_accumulation_steps, accelerator.step = batches.plan.accumulation, 0
    loss = _prepare_loss(NextTokenLoss(model).train(), accelerator, setup)
    precision = torch.bfloat16 if setup.mixed_precision == "bf16" and computes_bf16() else torch.float32
    optimizer = accelerator.prepare(build_optimizer(model, arguments, accelerator.device, precision))
    horizon = arguments.weight_average
    average = None if horizon is None else WeightAverage(model, horizon)
    if checkpoint is not None:  # its model is the average
        load_moments(checkpoint / OPTIMIZER, model, optimizer.optimizer, is_averaged=average is not None)
    return TrainStep(accelerator, model, loss, optimizer, batches, arguments.max_grad_norm, average)


def _prepare_loss(loss: NextTokenLoss, accelerator: Accelerator, setup: Setup) -> nn.Module:
    """Compile `loss` and wrap it for the run's processes, as one process, DDP, or FSDP2 if the launcher requests it.
    It is compiled in place before DDP wraps it: Accelerate wraps first and compiles the wrapper, whose forward cannot
    be one graph (huggingface/accelerate#3991). The graph contains Accelerate's autocast either way."""
    if setup.torch_compile:
        prepare_compiler()
    if setup.shards(accelerator):
        return shard(loss, accelerator, setup.sharding, setup.compile_settings)
    if setup.compile_settings is not None:
        loss.compile(**setup.compile_settings)
    return accelerator.prepare(loss)
