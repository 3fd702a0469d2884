"""Progress display for long tasks: a bar on a terminal, otherwise a line every 30 seconds."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0
# A notebook gives commands a terminal, but keeps everything written to it: print lines there, not frames.
IN_NOTEBOOK = "JPY_PARENT_PID" in os.environ  # set by Jupyter for its kernels
Item = TypeVar("Item")


class Progress(AbstractContextManager):
    """Progress bar on stderr if that is a terminal and `is_shown`. Otherwise `say` receives a line every 30 seconds."""

    def __init__(self, label: str, total: int, is_shown: bool = True, say: Callable[[str], None] = lambda line: None):
        console = Console(stderr=True)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        is_hidden = IN_NOTEBOOK or not (is_shown and console.is_terminal)
        self.bar = progress.Progress(TextColumn(label), *columns, console=console, transient=True, disable=is_hidden)
        self.task = self.bar.add_task("", total=total, note="")
        self.total, self.say, self.done = total, say, 0
        self.started = self.said = time.monotonic()
        self.bar.start()

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def advance(self, note: str = "") -> None:
        """Count one more item of `total`. `note` is shown next to the bar or in the line."""
        self.done += 1
        self.bar.update(self.task, advance=1, note=note)
        moment = time.monotonic()
        if self.bar.disable and moment - self.said > SECONDS_BETWEEN_LINES:
            self.said = moment
            minutes = (moment - self.started) / self.done * (self.total - self.done) / 60
            self.say(f"{self.done:,} of {self.total:,} units, {note}, about {minutes:.0f} minutes left")


def track(items: Iterable[Item], label: str, is_shown: bool) -> Iterable[Item]:
    """Return `items` with a progress bar on stderr, if that is a terminal and `is_shown`."""
    console = Console(stderr=True)
    return progress.track(
        items, label, console=console, transient=True, disable=IN_NOTEBOOK or not (is_shown and console.is_terminal)
    )
