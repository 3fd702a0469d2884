"""The log of a run: metrics.jsonl, the screen, and any tracker that Accelerate knows."""

import json
import math
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import torch

from training.advice import Advice, Advisor
from training.batches import TrainBatches
from training.hardware import name_of, usual_mfu
from training.health import Reading
from training.metrics import best_evaluation, read_events, read_metrics
from training.run import Run
from training.screen import Screen, View
from training.speed import Speed
from training.status import hours, record
from training.trackers import log_to_trackers, open_trackers

LINES_OF_ETA = 100  # whose mean speed it goes by


class RunLog:
    """Used by every process; only the main one writes."""

    def __init__(self, run: Run, batches: TrainBatches, evaluation_share: float, hourly_price: float | None):
        """`evaluation_share`: the fraction of the time that validation is expected to take."""
        self.folder, self.accelerator, self.plan = run.folder, run.accelerator, run.plan
        self.start, self.compiled = run.start, run.setup.torch_compile
        self.speed = Speed(batches, run.plan.model, run.accelerator)
        self.pause, self.waiting = self.speed.pause, self.speed.waiting
        self.evaluation_share, self.hourly_price = evaluation_share, hourly_price
        self.first_step_is_done = False
        self.unlogged: dict[str, float] = {}  # what the next log line holds besides
        self.paces: deque[tuple[int, float]] = deque(maxlen=LINES_OF_ETA)  # steps and seconds
        self.main = run.accelerator.is_main_process
        if self.main:
            self.began = time.monotonic() - 3600 * hours(read_events(run.folder.events), datetime.now(UTC))
            device = run.accelerator.device
            usual = usual_mfu(name_of(device), run.plan.memory.parameters)
            self.advisor = Advisor(run.folder, run.plan, device.type == "cuda", usual)
            losses = [loss for _, loss in self.advisor.losses]
            self.screen = Screen(run.plan.max_steps, run.start.step, losses, self.compiled)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.main:
            self.screen.close()

    def count(self, loss: torch.Tensor) -> None:
        """Count a step, without waiting for it (but for the first step of a run)."""
        if self.main:
            self.screen.step()
        if self.first_step_is_done:
            self.speed.count(self.plan.tokens_per_step)
        else:
            self._first_step_done(loss)

    def _first_step_done(self, loss: torch.Tensor) -> None:
        """The first step warms everything up and compiles; it counts as neither speed nor ETA."""
        self.first_step_is_done = True
        float(loss)  # waits for the device, once
        compilation = " (compilation included)" if self.compiled else ""
        self.unlogged = {"seconds_to_first_step": round(self.speed.seconds, 1)}
        if self.main:
            self.screen.first_step_done()
        self.say(f"First step after {self.speed.seconds:.1f} s{compilation}.")
        self.speed.restart()

    def log(self, step: int, learning_rate: float, reading: Reading) -> None:
        """Write a log line about the steps since the last one. `learning_rate`: of the last of them."""
        entry: dict[str, Any] = {"step": step, "epoch": round(self.plan.epoch(step), 4)}
        if reading.loss is not None:
            entry["loss"] = reading.loss
        entry |= {"learning_rate": learning_rate, "tokens": self.plan.after(step).tokens}
        if math.isfinite(reading.grad_norm):
            entry["grad_norm"] = reading.grad_norm
        if reading.skipped:
            entry["skipped_steps"] = reading.skipped
        entry |= self.speed.measured() | self.unlogged
        self.unlogged = {}
        waited = self.speed.waited_share
        if self.speed.steps:
            self.paces.append((self.speed.steps, self.speed.seconds))
        self._write(entry, step)
        if self.main:
            so_far = time.monotonic() - self.began
            self.screen.show(step, View(entry, so_far, self._left(step), self.hourly_price))
            self._advise(step, self.advisor.look(entry, waited))
        self.speed.restart()

    def _left(self, step: int) -> float | None:
        """Seconds, with the validations to come."""
        if not self.paces:
            return None
        steps, seconds = map(sum, zip(*self.paces, strict=True))
        return (self.plan.max_steps - step) * seconds / steps / (1 - self.evaluation_share)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        entry = {"step": step, "epoch": round(self.plan.epoch(step), 4), **metrics}
        self._write(entry, step)
        if self.main:
            self.screen.validated(entry, best_evaluation(read_metrics(self.folder.metrics)))
            self._advise(step, self.advisor.look(entry))

    def show_progress(self, what: str, share: float) -> None:
        if self.main:
            self.screen.show_progress(what, share)

    def _advise(self, step: int, found: list[Advice]) -> None:
        for advice in found:
            self.say(f"ADVICE: {advice.text}")
            record(self.folder.events, "advice", step, **advice._asdict())

    def say(self, text: str) -> None:
        if self.main:
            self.screen.say(text)

    def start_trackers(self, project: str, settings: dict[str, Any]) -> None:
        """Open the trackers of `report_to`, and send them every setting that has a value."""
        if self.main:
            open_trackers(self.accelerator, self.folder, project, settings, self.start.step)

    def _write(self, entry: dict[str, Any], step: int) -> None:
        if not self.main:
            return
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        log_to_trackers(self.accelerator, entry, step)
