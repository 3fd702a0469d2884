"""Advice: what a plan (see forecast.py) or the log of a run shows to be wrong, and what would help. docs/training.md describes the limits."""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from training.checkpoint import folder_name
from training.metrics import comparable_loss, read_events, read_metrics
from training.plan import Plan
from training.run_folder import RunFolder

IN_A_ROW = 5  # log lines, before something is taken for a habit
SLOW = 0.5  # of the MFU that others reach on the device
IDLE = 0.1  # of the time, spent on nothing but data
ROOM = 0.8  # of a device's memory, to be filled without fear
LONG = 40  # log lines at least, or a fifth of them all, over which the loss is looked at
OFTEN = 20  # log lines between two such looks
RISE = 0.01  # of the loss, beyond three standard errors
FALL = 0.003  # of the loss, two standard errors included: less is flat
VALIDATION_RISE = 0.005  # of the lowest validation loss, twice in a row
EXPLODES = 5  # times the median of the gradient's norm, twice in a row
NORMS = 100  # log lines that the median is of


class Advice(NamedTuple):
    about: str
    text: str


class Advisor:
    """Looks at each line of metrics.jsonl as it is written. Each advice is given once in a run."""

    def __init__(self, folder: RunFolder, plan: Plan, on_gpu: bool, usual_mfu: float | None):
        """`usual_mfu`: what others report of the device; None if unknown."""
        self.folder, self.plan, self.on_gpu, self.usual_mfu = folder, plan, on_gpu, usual_mfu
        self.given = {event["about"] for event in read_events(folder.events) if event["event"] == "advice"}
        self.losses: list[tuple[int, float]] = []  # after steps
        self.evaluations: list[tuple[int, float]] = []  # the same of validations
        self.lines: deque[dict[str, Any]] = deque(maxlen=NORMS)
        for entry in read_metrics(folder.metrics):
            self._take(entry)

    def look(self, entry: dict[str, Any], waited: float = 0.0) -> list[Advice]:
        """Return new advice. `waited`: the fraction of time in which the program waited for the device."""
        if "eval_loss" in entry:
            self._take(entry)
            found = self._of_validations()
        else:
            self._take(entry | {"idle": max(0.0, entry.get("data_share", 0.0) - waited)})
            found = chain(self._of_speed(), self._of_gradients(), self._of_losses(entry["learning_rate"]))
        new = [advice for advice in found if advice.about not in self.given]
        self.given |= {advice.about for advice in new}
        return new

    def _take(self, entry: dict[str, Any]) -> None:
        if "eval_loss" in entry:
            self.evaluations.append((entry["step"], comparable_loss(entry)))
            return
        self.lines.append(entry)
        if "loss" in entry:
            self.losses.append((entry["step"], entry["loss"]))

    def _of_speed(self) -> Iterator[Advice]:
        last = [line for line in list(self.lines)[-IN_A_ROW:] if "idle" in line]  # since the program was started
        if len(last) < IN_A_ROW:
            return
        idle, mfu = [line["idle"] for line in last], [line.get("mfu", 1.0) for line in last]
        if min(idle) >= IDLE:
            remedy = {
                "mmap": "they are read from a disk: --data_placement ram, where they fit, or a faster disk",
                "ram": "something else takes the processor: end it, or give the run more cores",
                "device": "its work is too small: a larger micro-batch gives it more at a time",
            }[self.plan.placement.where]
            text = f"The device waits for its batches {statistics.median(idle):.0%} of the time; {remedy}."
            yield Advice("data", text)
        if self.usual_mfu is not None and max(mfu) <= SLOW * self.usual_mfu:
            text = (
                f"MFU is {statistics.median(mfu):.0%}, and others reach about {self.usual_mfu:.0%} on this device; the line Device says "
                f"what is not as usual (not compiled, fp32, attention: math), and --profile where the time goes."
            )
            yield Advice("mfu", text)
        size, number, available = self.plan.batches.micro_batch, self.plan.batches.accumulation, self.plan.available
        peak = last[-1]["peak_memory_gb"] * 1e9
        fits = [k for k in range(2, number + 1) if number % k == 0 and k * peak < ROOM * available]
        if self.on_gpu and fits:
            text = (
                f"A micro-batch of {size:,} sequences takes {peak / 1e9:.1f} of {available / 1e9:.1f} GB, and {number:,} are done one "
                f"after the other; --per_device_train_batch_size {fits[-1] * size} fills the device better, for the same steps."
            )
            yield Advice("micro_batch", text)

    def _of_gradients(self) -> Iterator[Advice]:
        norms = [line["grad_norm"] for line in self.lines if "grad_norm" in line]
        if len(norms) < LONG:
            return
        *before, last, this = norms
        usual = statistics.median(before)
        if min(last, this) > EXPLODES * usual:  # both are 0 where there is nothing to learn
            text = (
                f"The gradient's norm is {this:.2f}, {this / usual:.0f} times what it was; if it stays so, lower learning_rate or raise "
                f"warmup_steps, and resume from a checkpoint before."
            )
            yield Advice("gradient", text)

    def _of_losses(self, learning_rate: float) -> Iterator[Advice]:
        recent = self.losses[-max(LONG, len(self.losses) // 5) :]
        if len(recent) < LONG or len(self.losses) % OFTEN or recent[-1][0] > 0.9 * self.plan.max_steps:
            return
        before, after = np.array_split(np.array([loss for _, loss in recent]), 2)
        fall = before.mean() - after.mean()
        error = math.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
        steps, means = recent[-1][0] - recent[0][0], f"{before.mean():.3f}, then {after.mean():.3f}"
        if -fall > max(RISE * before.mean(), 3 * error):
            remedy = "lower learning_rate, and resume from a checkpoint before."
            yield Advice("rising", f"The loss rises: {means} over the last {steps:,} steps; {remedy}")
        elif fall + 2 * error < FALL * before.mean():
            text = (
                f"The loss is flat over the last {steps:,} steps: {means} (± {error:.3f}). More steps of this kind will hardly "
                f"help: see whether learning_rate ({learning_rate:.1e}) is far too high or too low; else it takes more text or a "
                f"larger model."
            )
            yield Advice("flat", text)

    def _of_validations(self) -> Iterator[Advice]:
        if len(self.evaluations) < 3:
            return
        (step, best), (_, before), (_, now) = min(self.evaluations, key=lambda pair: pair[1]), *self.evaluations[-2:]
        if now > before > (1 + VALIDATION_RISE) * best:
            is_saved = (self.folder.checkpoints / folder_name(step)).is_dir()
            kept = (
                "Its checkpoint is kept" if is_saved else "No checkpoint was saved there: let save_steps be eval_steps"
            )
            text = (
                f"The validation loss rises, from {best:.4f} at step {step:,} to {now:.4f}: the model learns its text by heart. {kept}; "
                f"more text or a smaller model helps, or dropout (resid_pdrop, attn_pdrop, embd_pdrop)."
            )
            yield Advice("overfitting", text)
