"""Advice on likely problems in the log of a run. docs/training.md explains it. Advice on a plan: forecast.py."""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from training.checkpoints.checkpoint import folder_name
from training.checkpoints.metrics import comparable_evaluations, comparable_loss, read_events, read_metrics
from training.checkpoints.run_folder import RunFolder
from training.plan.plan import Plan

IN_A_ROW = 5  # log lines that must show a problem before it is reported
SLOW = 0.5  # fraction of the MFU that others reach on the device
IDLE = 0.1  # fraction of the time in which the device waits for data
LONG = 40  # minimum number of log lines, or a fifth of all lines if more, over which the loss trend is measured
TREND_INTERVAL = 20  # log lines between two such measurements
RISE = 0.01  # relative rise of the loss; it must also exceed three standard errors
SWING = 0.015  # standard deviation of the loss around its trend, relative to the loss, of a loss that oscillates
WAVES = 0.4  # correlation of neighboring deviations; without one, they are noise of the batches
FALL = 0.003  # relative fall of the loss, plus two standard errors; a smaller fall is flat
VALIDATION_RISE = 0.005  # relative rise above the lowest validation loss, twice in a row


class Advisor:
    """Advisor of one run: checks each line of metrics.jsonl as it is written, and gives each piece of advice once."""

    def __init__(self, folder: RunFolder, plan: Plan, usual_mfu: float | None):
        """`usual_mfu` is a typical MFU that others report for the device, or None if unknown."""
        self.folder, self.plan, self.usual_mfu = folder, plan, usual_mfu
        self.given = {event["about"] for event in read_events(folder.events) if event["event"] == "advice"}
        self.losses: list[tuple[int, float]] = []  # (step, training loss)
        self.evaluations: list[dict[str, Any]] = []
        self.lines: deque[dict[str, Any]] = deque(maxlen=IN_A_ROW)  # of this process
        for entry in read_metrics(folder.metrics):
            self._take(entry)

    def look(self, entry: dict[str, Any], waiting_share: float = 0.0) -> dict[str, str]:
        """Return new advice by subject. `waiting_share` is the fraction of time spent waiting for the device."""
        self._take(entry)
        if "eval_loss" in entry:
            advices = self._validation_advice()
        else:
            self.lines.append(entry | {"idle": max(0.0, entry.get("data_share", 0.0) - waiting_share)})
            advices = chain(self._speed_advice(), self._scale_advice(entry), self._loss_advice(entry["learning_rate"]))
        new = {about: text for about, text in advices if about not in self.given}
        self.given |= new.keys()
        return new

    def _take(self, entry: dict[str, Any]) -> None:
        if "eval_loss" in entry:
            self.evaluations.append(entry)
        elif "loss" in entry:
            self.losses.append((entry["step"], entry["loss"]))

    def _speed_advice(self) -> Iterator[tuple[str, str]]:
        if len(self.lines) < IN_A_ROW:
            return
        idle, mfu = [line["idle"] for line in self.lines], [line.get("mfu", 1.0) for line in self.lines]
        if min(idle) >= IDLE:
            hint = {
                "mmap": "they are read from disk, so use --data_placement ram if they fit in RAM, or a faster disk",
                "ram": "other processes use the CPU, so stop them or give the run more cores",
                "device": "each batch is too little work, so use a larger micro-batch",
            }[self.plan.placement.where]
            yield "data", f"The device waits for its batches {statistics.median(idle):.0%} of the time: {hint}."
        if self.usual_mfu is not None and max(mfu) <= SLOW * self.usual_mfu:
            text = (
                f"MFU is {statistics.median(mfu):.0%}, but others reach about {self.usual_mfu:.0%} on this device; "
                "check the Device line for a cause (not compiled, fp32), report.md for its attention (math), and use "
                "--profile to see where the time goes."
            )
            yield "mfu", text

    def _scale_advice(self, entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
        scale = entry.get("loss_scale", 1.0)
        if scale < 1:  # it starts at 65,536 and halves at each overflow
            text = (
                f"The loss scale of fp16 fell to {scale:g}: gradients overflow again and again, and small ones become "
                "0. Use --mixed_precision bf16 on a GPU that has it, otherwise no, or lower learning_rate."
            )
            yield "loss_scale", text

    def _loss_advice(self, learning_rate: float) -> Iterator[tuple[str, str]]:
        recent = self.losses[-max(LONG, len(self.losses) // 5) :]
        if len(recent) < LONG or len(self.losses) % TREND_INTERVAL or recent[-1][0] > 0.9 * self.plan.max_steps:
            return
        older, newer = np.array_split(np.array([loss for _, loss in recent]), 2)
        fall = older.mean() - newer.mean()
        error = math.sqrt(older.var(ddof=1) / len(older) + newer.var(ddof=1) / len(newer))
        steps, means = recent[-1][0] - recent[0][0], f"{older.mean():.3f}, then {newer.mean():.3f}"
        if -fall > max(RISE * older.mean(), 3 * error):
            remedy = "lower learning_rate and resume from an earlier checkpoint."
            yield "rising", f"The loss is rising: mean {means} over the last {steps:,} steps; {remedy}"
        elif (swing := _swing([loss for _, loss in recent])) > max(SWING * older.mean(), fall):
            text = (
                f"The loss oscillates: over the last {steps:,} steps it swings by ± {swing:.3f} around its trend, more "
                f"than it falls: mean {means}. Divide learning_rate by 3, to {learning_rate / 3:.1e} at this step, and "
                "resume from an earlier checkpoint."
            )
            yield "oscillating", text
        elif fall + 2 * error < FALL * older.mean():
            text = (
                f"The loss is flat over the last {steps:,} steps: mean {means} (± {error:.3f}). More of the same "
                f"steps will hardly help: check whether learning_rate ({learning_rate:.1e}) is far too high or too "
                "low; otherwise use more text or a larger model."
            )
            yield "flat", text

    def _validation_advice(self) -> Iterator[tuple[str, str]]:
        losses = {entry["step"]: comparable_loss(entry) for entry in comparable_evaluations(self.evaluations)}
        if len(losses) < 3:
            return
        step, best = min(losses.items(), key=lambda item: item[1])
        previous, newest = [*losses.values()][-2:]
        if newest > previous > (1 + VALIDATION_RISE) * best:
            hint = "Its checkpoint is kept"
            if step == 0:
                hint = "That is the model it started from: divide learning_rate by 3"
            elif not (self.folder.checkpoints / folder_name(step)).is_dir():
                hint = "No checkpoint was saved then: save with each validation (save_strategy, save_steps)"
            text = (
                f"The validation loss is rising, from {best:.4f} at step {step:,} to {newest:.4f}: the model "
                f"overfits. {hint}; use more text, or fewer epochs (docs/small_data.md)."
            )
            yield "overfitting", text


def _swing(losses: list[float]) -> float:
    """Return the standard deviation of the losses around a parabola, in nats, or 0 if neighboring losses deviate
    independently, as they do if batches differ."""
    steps = np.linspace(-1, 1, len(losses))
    deviations = losses - np.polyval(np.polyfit(steps, losses, 2), steps)
    correlation = np.corrcoef(deviations[1:], deviations[:-1])[0, 1] if deviations.any() else 0.0
    return deviations.std() if abs(correlation) > WAVES else 0.0
