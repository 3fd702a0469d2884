"""How far pretokenizing is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts text as it is read. `total` bytes, 0 where that is not known, of which `done` were read before."""

    def __init__(self, total: int, done: int, units: int, say: Callable[[str], None]):
        self.total, self.read, self.units, self.say = total, done, units, say
        self.units_done = self.tokens = self.new_bytes = 0
        self.stack = ExitStack()
        self.bar: Bar | None = None

    def __enter__(self) -> "Progress":
        self.started = self.said = time.monotonic()
        console = Console()
        if console.is_terminal and self.say is print and self.units > 1:
            columns = (
                TextColumn("Encoding"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self.bar = self.stack.enter_context(Bar(*columns, console=console, transient=True))
            self.task = self.bar.add_task("", total=self.units, rate="")
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def advance(self, n_bytes: int, tokens: int) -> None:
        self.units_done += 1
        self.tokens += tokens
        self.new_bytes += n_bytes
        if self.bar is not None:
            self.bar.update(self.task, completed=self.units_done, rate=self._rate())
        elif time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            left = (self.said - self.started) / self.units_done * (self.units - self.units_done)
            self.say(f"{self.units_done:,} of {self.units:,} units, {self._rate()}, about {left / 60:.0f} minutes left")

    def _rate(self) -> str:
        seconds = time.monotonic() - self.started
        return f"{self.new_bytes / 1e6:,.0f} MB, {self.new_bytes / 1e6 / seconds:.1f} MB/s, {self.tokens / 1e6:,.1f}M tokens"
