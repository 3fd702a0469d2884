"""One step of training: the hot path. Nothing here waits for the device."""

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.profiler import record_function

from training.batches import TrainBatches, mix
from training.compilation import remove_incomplete_libraries
from training.device import Setup
from training.loss import NextTokenLoss
from training.sharding import shard, whole


def prepare_loss(loss: NextTokenLoss, accelerator: Accelerator, setup: Setup) -> nn.Module:
    """Compile `loss` and wrap it for the processes of the run: alone, DDP, or FSDP2 where the launcher asks for it.

    Compiled in place before DDP wraps it: Accelerate wraps first and compiles the wrapper, whose forward cannot be one
    graph (huggingface/accelerate#3991). The autocast that Accelerate puts on `forward` is part of the graph either way.
    """
    if setup.torch_compile:
        remove_incomplete_libraries()
    if setup.shards(accelerator):
        return shard(loss, accelerator, setup.sharding, setup.compile_settings)
    if setup.compile_settings is not None:
        loss.compile(**setup.compile_settings)
    return accelerator.prepare(loss)


@dataclass
class Trainer:
    """What a step needs, prepared by Accelerate."""

    accelerator: Accelerator
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    batches: TrainBatches
    max_grad_norm: float
    seed: int

    def step(self, step: int, learning_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Trains on global batch `step`. Returns this process's mean loss and the gradient norm before clipping, as
        tensors on the device."""
        plan = self.batches.plan
        # Dropout is a function of (seed, step, rank), as the data is: nothing to save, nothing to restore.
        self._seed(mix(mix(self.seed, step), self.accelerator.process_index) >> 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self.accelerator.device)
        for micro_step in range(plan.accumulation):
            with record_function("data"):  # for --profile; 5 us where nothing records
                inputs, targets, positions = self.batches(step, micro_step)  # (B, T) each
            with self.accelerator.accumulate(self.loss):
                with record_function("forward"):
                    loss = self.loss(inputs, targets, targets.numel(), positions)
                with record_function("backward"):
                    # A factor of exactly 1; where the loss is not finite, it makes every gradient so, on all processes.
                    self.accelerator.backward(loss * (1 + 0 * loss.detach()))
                    total += loss.detach()
                with record_function("optimizer"):
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.loss.parameters(), self.max_grad_norm or math.inf)
                        norm = whole(norm)
                        self._skip_if_not_finite(norm)  # where the optimizer is: offloaded, not where the loss is
                        grad_norm = norm.to(total.device)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return total / plan.accumulation, grad_norm

    def _seed(self, seed: int) -> None:
        """Only the generators that draw: `torch.manual_seed` tells those of GPUs too, and where there are none it makes a
        traceback each time, for them to read one day: 0.3 ms."""
        torch.default_generator.manual_seed(seed)
        if self.accelerator.device.type != "cpu":
            torch.get_device_module(self.accelerator.device).manual_seed(seed)

    def _skip_if_not_finite(self, grad_norm: torch.Tensor) -> None:
        """Makes the coming `optimizer.step` change nothing, moments and their count included, if the gradient is bad.

        AdamW's fused kernel reads `found_inf` on the device, where fp16's scaler writes it; ours is for other precisions.
        """
        if self.accelerator.scaler is not None:
            return
        inner = self.optimizer.optimizer  # inside Accelerate's wrapper
        if inner.defaults["fused"]:
            inner.grad_scale, inner.found_inf = None, (~grad_norm.isfinite()).float()
        elif not grad_norm.isfinite():  # waits for the device: Apple's, where AdamW is not fused
            inner.zero_grad()
