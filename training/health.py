"""Whether a run is well: the loss and the gradient of every step, read where a line is logged or a checkpoint is saved.

Between two readings the numbers stay on the device, and nothing waits for it. A step whose loss or gradient is not finite
changes nothing (see step.py), so it can be counted later.
"""

import math
import statistics
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch
from accelerate import Accelerator

from limits import setting
from training.checkpoint import TrainState
from training.loss import DivergenceError

WINDOW = 128  # losses that a new one is compared with, as in OLMo's SkipStepOptimizer
ENOUGH = WINDOW // 2  # to compare with


@dataclass
class HealthArguments:
    max_nonfinite_steps: int = setting(
        20, "Stop after this many steps in a row whose loss or gradient is not finite.", minimum=1, resume="free"
    )
    spike_z_score: float = setting(
        6.0, "A loss this many standard deviations above the mean of the last 128 is a spike.", above=0, resume="free"
    )
    on_spike: Literal["log", "rollback"] = setting(
        "log",
        "At a spike: log it, or go back to the checkpoint before it and pass its batches over (at least two "
        "checkpoints are kept then).",
        resume="free",
    )


@dataclass(frozen=True)
class Spike:
    step: int  # the first whose loss was too high, counted from 1
    last: int  # the last such step
    loss: float  # the highest
    mean: float  # of the losses before
    z_score: float

    def __str__(self) -> str:
        return (
            f"The loss rose to {self.loss:.3f} at step {self.step:,}, {self.z_score:.1f} standard deviations above its mean of "
            f"{self.mean:.3f}"
        )


class Health:
    """Every process reads the same numbers and comes to the same conclusions."""

    def __init__(self, accelerator: Accelerator, arguments: HealthArguments, start: TrainState):
        self.accelerator = accelerator
        self.arguments = arguments
        self.losses = list(start.losses)  # of the last steps, oldest first; None: skipped
        self.unlogged = start.unlogged
        self.unread: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.grad_norm = math.nan  # of the last step, before clipping
        self.lost_since: int | None = None  # the first of the last steps in a row whose loss was not finite

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Of one step, on the device."""
        self.unread.append((loss, grad_norm))

    def read(self, step: int) -> Spike | None:
        """Reads what `step` steps have left, and tells of a spike in it. Waits for the device.

        Raises:
            DivergenceError: too many steps in a row were not finite.
        """
        if not self.unread:
            return None
        numbers = torch.stack([number.float() for pair in self.unread for number in pair])
        numbers = self.accelerator.reduce(numbers, reduction="mean").tolist()  # waits here
        self.unread = []
        spike, first = None, step - len(numbers) // 2 + 1
        for number, (loss, norm) in enumerate(zip(numbers[::2], numbers[1::2], strict=True), start=first):
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            if is_finite and (found := self._spike(number, loss)) is not None:
                spike = found if spike is None else replace(spike, last=number, loss=max(loss, spike.loss))
            self.losses.append(loss if is_finite else None)
            self.unlogged += 1
            self.grad_norm = norm
            self.lost_since = None if math.isfinite(loss) else self.lost_since or number
        self.losses = self.losses[-max(WINDOW, self.unlogged) :]
        in_a_row = len(list(takewhile(lambda loss: loss is None, reversed(self.losses))))
        if in_a_row >= self.arguments.max_nonfinite_steps:
            weights_after = self.lost_since - 1 if self.lost_since is not None else None
            what = f"Loss or gradient were not finite in {in_a_row} steps in a row, until step {step:,}"
            raise DivergenceError(what, weights_after)
        return spike

    def _spike(self, step: int, loss: float) -> Spike | None:
        window = [value for value in self.losses[-WINDOW:] if value is not None]
        if len(window) < ENOUGH:
            return None
        mean = statistics.fmean(window)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in window) / (len(window) - 1))
        if loss <= mean + self.arguments.spike_z_score * deviation or deviation == 0:
            return None
        return Spike(step, step, loss, mean, (loss - mean) / deviation)

    @property
    def is_lost(self) -> bool:
        """Whether the last step's loss was not finite: the weights, which it did not change, are not worth saving."""
        return self.lost_since is not None

    def take_reading(self) -> dict[str, float]:
        """Return the steps since the last log line, by the names of metrics.jsonl: their mean loss, if any counted, and how many did not."""
        recent = self.losses[len(self.losses) - self.unlogged :]
        counted = [loss for loss in recent if loss is not None]
        self.unlogged = 0
        found = {"loss": statistics.fmean(counted)} if counted else {}
        if math.isfinite(self.grad_norm):
            found["grad_norm"] = self.grad_norm
        return found | ({"skipped_steps": len(recent) - len(counted)} if len(counted) < len(recent) else {})
