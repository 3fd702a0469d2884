"""What a run says: metrics.jsonl, the screen, and any tracker that Accelerate knows."""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from tokenizer.store import write_whole
from training.health import Reading
from training.speed import Speed, in_words

ALL_OF_A_LINE = 100  # columns of a terminal in which the bar has room beside it
# A notebook gives its commands a terminal, but keeps all that they ever wrote to it: lines, not ten pictures of a bar a second.
IN_NOTEBOOK = "JPY_PARENT_PID" in os.environ  # as Jupyter tells its kernels


@dataclass
class JournalArguments:
    logging_steps: int = field(
        default=10, metadata={"help": "Steps between log lines; each waits for the device once."}
    )
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "Trackers of Accelerate to log to: tensorboard, wandb, ... or all."}
    )

    def trackers(self) -> list[str] | None:
        """Those that Accelerate can open; what is wrong with the others is told with all other problems."""
        return [name for name in self.report_to if _tracker_problem(name) is None] or None

    def problems(self) -> list[str]:
        return [problem for name in self.report_to if (problem := _tracker_problem(name)) is not None]


def _tracker_problem(name: str) -> str | None:
    """What Accelerate would drop without a word, or end in a traceback for."""
    known = [str(tracker) for tracker in LoggerType]
    if name not in known:
        return f"report_to names {name!r}; the trackers are {', '.join(known)}."
    if name != "all" and name not in map(str, get_available_trackers()):
        return f"report_to names {name}, which is not installed: pip install {name}."
    return None


class Journal:
    """Used by every process; only the main one writes."""

    def __init__(
        self,
        metrics: Path,
        accelerator: Accelerator,
        max_steps: int,
        first_step: int,
        compiled: bool,
        speed: Speed,
        hourly_price: float | None = None,
    ):
        self.metrics = metrics
        self.accelerator = accelerator
        self.max_steps = max_steps
        self.compiled = compiled
        self.speed = speed
        self.hourly_price = hourly_price
        self.first_step_is_done = False
        self.unlogged: dict[str, float] = {}  # what the next log line tells besides
        self.tenths_shown = first_step * 10 // max_steps
        self.main = accelerator.is_main_process
        self.console = Console(highlight=False, soft_wrap=True, markup=False)
        self.bar = self._bar(first_step) if self.main and self.console.is_terminal and not IN_NOTEBOOK else None

    def _bar(self, first_step: int) -> Progress:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # in a narrow terminal, the bar yields first
            BarColumn(bar_width=None),
            TextColumn("{task.fields[line]}"),
        )
        bar = Progress(*columns, console=self.console, expand=True)
        bar.add_task("train", total=self.max_steps, completed=first_step, line="first step ...")
        bar.start()
        return bar

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            with suppress(OSError, SystemExit):
                self.bar.stop()  # gives the terminal its cursor back, whatever happened

    def count(self, loss: torch.Tensor, tokens: int) -> None:
        """Counts a step, without waiting for it (but for the first step of a run)."""
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0])
        if self.first_step_is_done:
            self.speed.count(tokens)
        else:
            self._first_step_done(loss)

    def _first_step_done(self, loss: torch.Tensor) -> None:
        """The first step warms everything up and compiles; it counts as neither speed nor ETA."""
        self.first_step_is_done = True
        float(loss)  # waits for the device, once
        compilation = " (compilation included)" if self.compiled else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], line="")
        self.unlogged = {"seconds_to_first_step": round(self.speed.seconds, 1)}
        self.say(f"First step after {self.speed.seconds:.1f} s{compilation}.")
        self.speed.restart()

    def log(self, step: int, epoch: float, learning_rate: float, reading: Reading, tokens: int) -> None:
        """One log line, about the steps since the last one."""
        measured = self.speed.measured()
        entry: dict[str, Any] = {"step": step, "epoch": round(epoch, 4)}
        line = "no finite loss"
        if reading.loss is not None:
            entry["loss"] = reading.loss
            line = f"loss {reading.loss:.3f}"
        entry |= {"learning_rate": learning_rate, "tokens": tokens}
        if math.isfinite(reading.grad_norm):
            entry["grad_norm"] = reading.grad_norm
        if reading.skipped:
            entry["skipped_steps"] = reading.skipped
            line += f"  ({reading.skipped} skipped: not finite)"
        entry |= measured | self.unlogged
        self.unlogged = {}
        if self.bar is not None and self.console.width < ALL_OF_A_LINE:
            del measured["peak_memory_gb"]
        line += f"  {in_words(measured)}"
        if self.speed.steps:
            left = (self.max_steps - step) * self.speed.seconds / self.speed.steps
            line += f"  ETA {clock(left)}"
            if self.hourly_price is not None:
                line += f", {left / 3600 * self.hourly_price:,.2f} $"
        self._write(entry, step)
        self._show(step, line, f"lr {learning_rate:.2e}")
        self.speed.restart()

    def log_evaluation(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        self._write({"step": step, "epoch": round(epoch, 4), **metrics}, step)
        self.say(
            f"step {step}: validation loss {metrics['eval_loss']:.4f}, perplexity {metrics['eval_perplexity']:.2f}, "
            f"{metrics['eval_bits_per_byte']:.3f} bits per byte"
        )

    def say(self, text: str) -> None:
        if self.main:
            say(text, self.console.print if self.bar is not None else print)

    def pause(self) -> AbstractContextManager[None]:
        """What happens inside does not count as training time."""
        return self.speed.pause()

    def start_trackers(self, name: str, settings: dict[str, Any]) -> None:
        """Opens the trackers of `report_to`, and gives them every setting that has a value."""
        plain = {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in settings.items()}
        self.accelerator.init_trackers(name, config=plain)

    def _show(self, step: int, line: str, more: str) -> None:
        numbered = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  {line}"
        if self.bar is None:
            self.say(f"{numbered}  {more}")
            return
        self.bar.update(self.bar.task_ids[0], completed=step, line=line)
        if step * 10 // self.max_steps > self.tenths_shown:  # the bar forgets; these lines stay
            self.tenths_shown = step * 10 // self.max_steps
            self.say(numbered)

    def _write(self, entry: dict[str, Any], step: int) -> None:
        if self.main:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        numbers = {name: value for name, value in entry.items() if name != "step"}
        self.accelerator.log(numbers, step=step)


def voice(accelerator: Accelerator) -> Callable[[str], None]:
    """Through which the main process speaks, and the others are silent."""
    return say if accelerator.is_main_process else lambda text: None


def say(text: str, through: Callable[[str], object] = print) -> None:
    """Whoever read the output (a terminal, a pipe into `tee`) may be gone: that is no reason to lose a run."""
    try:
        through(text)
        sys.stdout.flush()
    except (OSError, SystemExit):  # the latter from rich
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl, up to a line that is none, such as a last one cut off by a crash."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            break
        entries.append(entry)
    return entries


def forget_after(path: Path, step: int) -> None:
    """Takes out what was logged after the checkpoint that a run resumes from, so that the file reads as one run."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= step]
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def has_evaluation(path: Path, step: int) -> bool:
    return any(entry["step"] == step and "eval_loss" in entry for entry in read_metrics(path))


def best_step(path: Path) -> int | None:
    """The step with the lowest validation loss."""
    scored = [entry for entry in read_metrics(path) if "eval_loss" in entry]
    return min(scored, key=lambda entry: entry["eval_loss"])["step"] if scored else None


def clock(seconds: float) -> str:
    """3661 -> 1:01:01; 61 -> 1:01"""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
