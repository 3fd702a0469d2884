"""Log of a run: metrics.jsonl, the screen, and any tracker that Accelerate supports."""

import json
import time
from collections import deque
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import torch

from training.checkpoints.metrics import best_evaluation, read_events, read_metrics
from training.checkpoints.status import hours, record
from training.data.batches import TrainBatches
from training.log.advice import Advisor
from training.log.reference import find_reference
from training.log.screen import Screen
from training.log.speed import Speed
from training.log.trackers import log_to_trackers, open_trackers
from training.plan.run import Run
from training.runtime.hardware import FILLS_A_GPU, device_name, reported_mfu
from training.runtime.price import price_in_log
from training.step.size import size_of

LINES_OF_ETA = 100  # last log lines whose mean speed gives the ETA


class RunLog(AbstractContextManager):
    """Log of a run, used by every process and written by the main process."""

    def __init__(self, run: Run, batches: TrainBatches, evaluation_share: float, settings: dict[str, Any]):
        """`evaluation_share` is the expected fraction of time spent on validation. `settings` are sent to trackers."""
        self.folder, self.accelerator, self.plan = run.folder, run.accelerator, run.plan
        self.compiled = run.setup.torch_compile
        self.speed = Speed(batches, run.plan.model, run.accelerator)
        self.pause, self.waiting = self.speed.pause, self.speed.waiting
        self.evaluation_share = evaluation_share
        self.first_step_is_done = False
        self.unlogged: dict[str, float] = {}  # additional values for the next log line
        self.paces: deque[tuple[int, float]] = deque(maxlen=LINES_OF_ETA)  # (steps, seconds) per log line
        self.main = run.accelerator.is_main_process
        if self.main:
            open_trackers(run.accelerator, run.folder, settings, run.start.step)
            clock = time.monotonic()
            self.began = clock - 3600 * hours(read_events(run.folder.events), datetime.now(UTC), clock)
            device = run.accelerator.device
            usual_mfu = reported_mfu(device_name(device)) if size_of(run.plan.model).products >= FILLS_A_GPU else None
            self.advisor = Advisor(run.folder, run.plan, usual_mfu and usual_mfu[1])
            self.reference = find_reference(run.folder)
            losses = [loss for _, loss in self.advisor.losses]
            price = price_in_log(device_name(device), settings["hourly_price"], run.accelerator.num_processes)
            self.screen = Screen(run.plan.max_steps, run.start.step, losses, self.compiled, price)

    def __exit__(self, *_: object) -> None:
        if self.main:
            self.screen.close()

    def count(self, loss: torch.Tensor) -> None:
        """Count a step without waiting for the device.
        Only the first step of a process is waited for. It compiles, so it is excluded from speed and ETA."""
        if self.main:
            self.screen.steps += 1
            self.screen.max_steps = self.plan.max_steps  # a run with a budget corrects it after a log line
        if self.first_step_is_done:
            self.speed.steps += 1
            return
        self.first_step_is_done = True
        float(loss)  # waits for the device
        seconds = self.speed.seconds
        self.unlogged = {"seconds_to_first_step": round(seconds, 1)}
        if self.main:
            self.screen.waits_for = ""
        self.say(f"First step after {seconds:.1f} s{' (including compilation)' if self.compiled else ''}.")
        self.speed.restart()

    def log(self, step: int, learning_rate: float, reading: dict[str, float]) -> None:
        """Write a log line for the steps since the previous one. `learning_rate`: the last step's. `reading`: see
        health.py."""
        values = reading | {"learning_rate": learning_rate, "tokens": self.plan.after(step).tokens}
        if (scaler := self.accelerator.scaler) is not None:  # fp16
            values["loss_scale"] = scaler.get_scale()
        values |= self.speed.measured(self.plan.tokens_per_step) | self.unlogged
        self.unlogged = {}
        waiting_share, eta = self.speed.waited / self.speed.seconds, None
        if self.speed.steps:
            self.paces.append((self.speed.steps, self.speed.seconds))
        if self.paces:  # the ETA includes the remaining validations
            steps, seconds = map(sum, zip(*self.paces, strict=True))
            eta = (self.plan.max_steps - step) * seconds / steps / (1 - self.evaluation_share)
        self.write(step, values, eta, waiting_share)
        self.speed.restart()

    def write(self, step: int, values: dict[str, float], eta: float | None = None, waiting_share: float = 0.0) -> None:
        """Write an entry of metrics.jsonl, show it, and print advice on problems that it reveals."""
        if not self.main:
            return
        entry = {"step": step, "epoch": round(self.plan.epoch(step), 4), **values}
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        log_to_trackers(self.accelerator, entry, self.say)
        if "eval_loss" in entry:
            reference = self.reference.compared(entry) if self.reference is not None else ""
            self.screen.validated(entry, best_evaluation(read_metrics(self.folder.metrics)), reference)
        else:
            self.screen.show(entry, time.monotonic() - self.began, eta)
        for about, text in self.advisor.look(entry, waiting_share).items():
            self.say(f"ADVICE: {text}")
            record(self.folder.events, "advice", entry["step"], about=about, text=text)

    def show_progress(self, task: str, share: float) -> None:
        if self.main:
            self.screen.show_progress(task, share)

    def say(self, text: str) -> None:
        if self.main:
            self.screen.say(text)
