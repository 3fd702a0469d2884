"""Health of a run: loss and gradient norm of every step, checked before a log line, a checkpoint or a validation.

Between two checks the values stay on the device, so the host does not wait for it. A step with a non-finite loss or
gradient does not change the model (see train_step.py), so it can be counted later.
"""

import math
import statistics
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch
from accelerate import Accelerator

from common.limits import free
from training.checkpoints.checkpoint import TrainState
from training.step.loss import DivergenceError

WINDOW = 128  # previous losses that a new loss is compared with, as in OLMo's SkipStepOptimizer
MIN_LOSSES = WINDOW // 2  # minimum number of previous losses


@dataclass
class HealthArguments:
    max_nonfinite_steps: int = free(
        20, "Stop after this many consecutive steps with a non-finite loss or gradient.", minimum=1
    )
    spike_z_score: float = free(
        6.0, "A loss this many standard deviations above the mean of the last 128 is a spike.", above=0
    )
    on_spike: Literal["log", "rollback"] = free(
        "log",
        "Action on a loss spike: log it, or roll back to the checkpoint before it and skip its batches (keeps at least "
        "two checkpoints).",
    )


@dataclass(frozen=True)
class Spike:
    step: int  # first step with a loss that is too high, counted from 1
    last: int  # last step of the spike
    loss: float  # highest loss of the spike
    mean: float  # mean of the losses before the spike
    deviation: float  # standard deviation of these losses

    @property
    def z_score(self) -> float:
        return (self.loss - self.mean) / self.deviation

    def __str__(self) -> str:
        place = f"at step {self.step:,}" if self.step == self.last else f"from step {self.step:,} to {self.last:,}"
        return (
            f"The loss rose to {self.loss:.3f} {place}, {self.z_score:.1f} standard deviations above "
            f"its mean of {self.mean:.3f}"
        )


class Health:
    """Health monitor of a run. Every process reads the same values and reaches the same conclusions."""

    def __init__(self, accelerator: Accelerator, arguments: HealthArguments, start: TrainState):
        self.accelerator = accelerator
        self.arguments = arguments
        self.losses = list(start.losses)  # losses of the last steps, oldest first; None for a skipped step
        self.unlogged = start.unlogged
        self.unread: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.grad_norm = math.nan  # norm of the last step, before clipping
        self.largest_norm = 0.0  # of the finite steps of this process
        self.finite_steps = 0  # steps of this process that changed the weights
        self.lost_since: int | None = None  # start of the latest consecutive steps with a non-finite loss

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Record the loss and the gradient norm of one step, which stay on the device."""
        self.unread.append((loss, grad_norm))

    def read(self, step: int) -> Spike | None:
        """Read all values recorded up to `step` and return a spike in them, if any. Waits for the device.
        Raise a `DivergenceError` if too many steps in a row were not finite."""
        if not self.unread:
            return None
        numbers = torch.stack([number.float() for pair in self.unread for number in pair])
        numbers = self.accelerator.reduce(numbers, reduction="mean").tolist()  # waits here
        self.unread = []
        spike, first_step = None, step - len(numbers) // 2 + 1
        for number, (loss, norm) in enumerate(zip(numbers[::2], numbers[1::2], strict=True), start=first_step):
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            if is_finite and (candidate := self._spike(number, loss)) is not None:
                spike = candidate if spike is None else replace(spike, last=number, loss=max(spike.loss, loss))
            if is_finite:
                self.finite_steps, self.largest_norm = self.finite_steps + 1, max(self.largest_norm, norm)
            self.losses.append(loss if is_finite else None)
            self.unlogged += 1
            self.grad_norm = norm
            self.lost_since = None if math.isfinite(loss) else self.lost_since or number
        self.losses = self.losses[-max(WINDOW, self.unlogged, self.arguments.max_nonfinite_steps) :]
        in_a_row = len(list(takewhile(lambda loss: loss is None, reversed(self.losses))))
        if in_a_row >= self.arguments.max_nonfinite_steps:
            last_step = self.lost_since - 1 if self.lost_since is not None else None
            problem = f"Loss or gradient was not finite in {in_a_row} consecutive steps, up to step {step:,}"
            raise DivergenceError(problem, last_step)
        return spike

    def _spike(self, step: int, loss: float) -> Spike | None:
        window = [value for value in self.losses[-WINDOW:] if value is not None]
        if len(window) < MIN_LOSSES:
            return None
        mean = statistics.fmean(window)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in window) / (len(window) - 1))
        if loss <= mean + self.arguments.spike_z_score * deviation or deviation == 0:
            return None
        return Spike(step, step, loss, mean, deviation)

    @property
    def is_lost(self) -> bool:
        """True if the last step's loss was not finite. The weights are then not worth saving."""
        return self.lost_since is not None

    def take_reading(self) -> dict[str, float]:
        """Return metrics since the last log line, by name: mean loss of finite steps, gradient norm, skipped steps."""
        recent = self.losses[len(self.losses) - self.unlogged :]
        finite = [loss for loss in recent if loss is not None]
        self.unlogged = 0
        reading = {"loss": statistics.fmean(finite)} if finite else {}
        if math.isfinite(self.grad_norm):
            reading["grad_norm"] = self.grad_norm
        return reading | ({"skipped_steps": len(recent) - len(finite)} if len(finite) < len(recent) else {})
