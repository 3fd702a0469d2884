"""The view of a run: on a terminal a few lines that stay in place, elsewhere one line for each log line."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from training.console import AT_ONCE, clock, perplexity, say
from training.metrics import comparable_loss, scores_more
from training.speed import in_words

# A notebook gives its commands a terminal, but keeps all that they ever wrote to it: lines, not four pictures a second.
IN_NOTEBOOK = "JPY_PARENT_PID" in os.environ  # as Jupyter tells its kernels
PICTURES_A_SECOND = 4
LONG_SILENCE = 60  # seconds, where no terminal shows that a run is alive
BARS = "▁▂▃▄▅▆▇█"
CURVE = 24  # bars of the loss curve
MANY = 10_000  # losses, of which some are enough for it


@dataclass(frozen=True)
class View:
    """A run at a log line."""

    entry: dict[str, Any]  # of metrics.jsonl
    seconds: float  # that the run has taken so far, validation and stops of the clock included
    left: float | None  # seconds that it will still take
    hourly_price: float | None

    def loss(self) -> str:
        skipped = self.entry.get("skipped_steps")
        note = f"  ({skipped} skipped: not finite)" if skipped else ""
        return (f"loss {self.entry['loss']:.3f}" if "loss" in self.entry else "no finite loss") + note

    def speed(self) -> str:
        return in_words(self.entry)

    def dollars(self) -> str:
        """Return the cost so far, and of the whole run where that is known."""
        if self.hourly_price is None:
            return ""
        so_far = self.seconds / 3600 * self.hourly_price
        if self.left is None:
            return f"{so_far:,.2f} $"
        return f"{so_far:,.2f} of {so_far + self.left / 3600 * self.hourly_price:,.2f} $"

    def line(self) -> str:
        parts = [self.loss()]
        if "grad_norm" in self.entry:
            parts.append(f"norm {self.entry['grad_norm']:.2f}")
        parts += [f"lr {self.entry['learning_rate']:.2e}", self.speed()]
        if self.left is not None:
            parts.append(f"ETA {clock(self.left)}")
        return "  ".join(filter(None, [*parts, self.dollars()]))


class Stopwatch:
    """Its text is `compiling ... 0:37`, counting: the thread that redraws the picture formats it each time."""

    def __init__(self, what: str):
        self.what, self.since = what, time.monotonic()

    def __str__(self) -> str:
        return f"{self.what} ... {clock(time.monotonic() - self.since)}"


class Screen:
    """Used by the main process."""

    def __init__(self, max_steps: int, first_step: int, losses: list[float], compiles: bool = False):
        self.max_steps = max_steps
        self.losses = losses  # of the log lines
        self.tenths_shown = first_step * 10 // max_steps
        self.console = Console(highlight=False, soft_wrap=True, markup=False)
        self.live = None
        self.said_last = time.monotonic()
        # rich alone takes a file for a terminal where FORCE_COLOR is set.
        if self.console.file.isatty() and self.console.is_interactive and not IN_NOTEBOOK:
            self._go_live(first_step, compiles)
        elif compiles:
            self.say("Compiling for the first step, which may take minutes ...")

    def _go_live(self, first_step: int, compiles: bool) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # in a narrow terminal, the bar yields first
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
        )
        self.bar = Progress(*columns, console=self.console, expand=True)
        self.left = Stopwatch("compiling" if compiles else "first step")  # on its right
        self.task = self.bar.add_task("train", total=self.max_steps, completed=first_step, left=self.left)
        self.rows: dict[str, str] = {}  # below it
        self.live = Live(self._picture(), console=self.console, refresh_per_second=PICTURES_A_SECOND)
        self.live.start()

    def _picture(self) -> Group:
        table = Table.grid(Column(style="dim", min_width=8), Column(overflow="fold"), padding=(0, 2, 0, 0))
        for name in filter(self.rows.get, ("train", "validate", "speed", "time")):
            table.add_row(name, Text(self.rows[name]))
        return Group(self.bar, table)

    def step(self) -> None:
        if self.live is not None:
            self.bar.advance(self.task)

    def first_step_done(self) -> None:
        if self.live is not None:
            self.left = ""
            self.bar.update(self.task, left="")

    def show(self, step: int, view: View) -> None:
        if "loss" in view.entry:
            self.losses.append(view.entry["loss"])
        numbered = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        if self.live is None:
            self.say(f"{numbered}  {view.line()}")
            return
        if step * 10 // self.max_steps > self.tenths_shown:  # the picture forgets; these lines stay
            self.tenths_shown = step * 10 // self.max_steps
            self.say(f"{numbered}  {view.loss()}  {view.speed().strip()}")
        self._redraw(step, view)

    def _redraw(self, step: int, view: View) -> None:
        entry, curve = view.entry, f"  {sparkline(self.losses, CURVE)}" if self._draws() else ""
        norm = f"  gradient norm {entry['grad_norm']:.2f}" if "grad_norm" in entry else ""
        self.rows["train"] = f"{view.loss()}{curve}{norm}  learning rate {entry['learning_rate']:.2e}"
        self.rows["speed"] = view.speed().strip()
        self.rows["time"] = "  ".join(filter(None, [f"{clock(view.seconds)} so far", view.dollars()]))
        self.left = "" if view.left is None else f"ETA {clock(view.left)}"
        self.bar.update(self.task, completed=step, left=self.left)
        self.live.update(self._picture())

    def _draws(self) -> bool:
        return self.console.encoding.startswith("utf") and len(self.losses) > 1

    def validated(self, entry: dict[str, Any], best: dict[str, Any]) -> None:
        """Show a validation and whether it is the best, by the loss that all validations of a run have in common."""
        step, loss = entry["step"], f"loss {entry['eval_loss']:.4f}, perplexity {perplexity(entry['eval_perplexity'])}"
        loss += f", {entry['eval_bits_per_byte']:.3f} bits per byte"
        if scores_more(entry):
            loss += f" on all held-out text, loss {comparable_loss(entry):.4f} on the sample"
        note = "the best so far"
        if best["step"] != step:
            note = f"the best was {comparable_loss(best):.4f} at step {best['step']:,}"
        self.say(f"step {step}: validation {loss} ({note})")
        if self.live is not None:
            self.bar.update(self.task, left=self.left)
            self.rows["validate"] = f"{loss}, at step {step:,} ({note})"
            self.live.update(self._picture())

    def show_progress(self, what: str, share: float) -> None:
        if self.live is not None:
            self.bar.update(self.task, left=f"{what}: {share:.0%}")
        elif time.monotonic() - self.said_last > LONG_SILENCE:
            self.say(f"{what}: {share:.0%}")

    def say(self, text: str) -> None:
        self.said_last = time.monotonic()
        say(text, AT_ONCE if self.live is None else self.console.print)

    def close(self) -> None:
        if self.live is not None:
            with suppress(OSError, SystemExit):
                self.live.stop()  # gives the terminal its cursor back, whatever happened


def sparkline(values: list[float], width: int) -> str:
    """Draw `values` as bars of eight heights, from left to right; neighbors share one where there are more than `width`."""
    some = np.array(values[:: 1 + len(values) // MANY])
    means = [part.mean() for part in np.array_split(some, min(width, len(some)))]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / span) if span else 0] for mean in means)
