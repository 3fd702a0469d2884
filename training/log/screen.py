"""Run display: lines updated in place on a terminal, one printed line per log entry elsewhere."""

import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from common.errors import counted
from common.progress import IN_NOTEBOOK
from training.checkpoints.metrics import comparable_loss, scores_more
from training.log.speed import in_words
from training.runtime.console import FLUSHED_PRINT, clock, perplexity, say
from training.runtime.price import Price

FRAMES_PER_SECOND = 4
LONG_SILENCE = 60  # seconds without output before progress is printed, if no terminal shows it
BARS = "▁▂▃▄▅▆▇█"
CURVE = 24  # bars of the loss curve


def parts_of(entry: dict[str, Any], seconds: float, eta: float | None, price: Price) -> dict[str, str]:
    """Return the parts of a log line by name. An unknown part is an empty string.
    `entry`: from metrics.jsonl. `seconds`: the run's time so far, including validation and pauses of the speed clock.
    `eta`: estimated seconds until the end, None if unknown."""
    skips, norm = entry.get("skipped_steps"), entry.get("grad_norm")
    note = f"  ({counted(skips, 'step')} skipped: not finite)" if skips else ""
    return {
        "loss": (f"loss {entry['loss']:6.3f}" if "loss" in entry else "no finite loss") + note,
        "norm": "" if norm is None else f"norm {norm:5.2f}",
        "rate": f"lr {entry['learning_rate']:.2e}",
        "speed": in_words(entry),
        "eta": "" if eta is None else f"ETA {clock(eta)}",
        "cost": price.so_far(seconds, eta),
    }


def line_of(*parts: str) -> str:
    return "  ".join(filter(None, parts))


class Screen:
    """Terminal or line output of a run, used by the main process only."""

    def __init__(self, max_steps: int, first_step: int, losses: list[float], compiles: bool, price: Price):
        """`losses` are the training losses of earlier log lines."""
        self.max_steps, self.steps = max_steps, first_step
        self.losses, self.price = array("d", losses), price  # not a list, which takes long to average
        self.rows = dict.fromkeys(("train", "validate", "speed", "time"), "")  # text below the progress bar
        self.left = self.progress = ""  # to the right of the bar; `progress` replaces `left` unless it is empty
        self.waits_for = "compiling" if compiles else "first step"  # empty after the first step
        self.began = self.said_last = time.monotonic()
        self.console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.live = None
        # isatty: with FORCE_COLOR set, rich alone treats a file as a terminal.
        if self.console.file.isatty() and self.console.is_interactive and not IN_NOTEBOOK:
            self.live = Live(console=self.console, get_renderable=self._picture, refresh_per_second=FRAMES_PER_SECOND)
            self.live.start()
        elif compiles:
            self.say("Compiling before the first step; this may take minutes ...")

    def _picture(self) -> Group:
        """Draw the current state. Called by rich's refresh thread."""
        note = self.progress or self.left
        if self.waits_for and not self.progress:
            note = f"{self.waits_for} ... {clock(time.monotonic() - self.began)}"
        # In a narrow terminal, the bar shrinks first.
        bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1, 0, 0), expand=True)
        bar.add_row(Text(f"step {self.steps}/{self.max_steps}"), ProgressBar(self.max_steps, self.steps), Text(note))
        table = Table.grid(Column(style="dim", min_width=8), Column(overflow="fold"), padding=(0, 2, 0, 0))
        for name in filter(self.rows.get, self.rows):
            table.add_row(name, Text(self.rows[name]))
        return Group(bar, table)

    def show(self, entry: dict[str, Any], seconds: float, eta: float | None) -> None:
        """Show a log line. `parts_of` documents the parameters."""
        if "loss" in entry:
            self.losses.append(entry["loss"])
        step, parts = entry["step"], parts_of(entry, seconds, eta, self.price)
        if self.live is None:
            self.say(line_of(f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}", *parts.values()))
            return
        draws = self.console.encoding.startswith("utf") and len(self.losses) > 1
        curve = sparkline(self.losses, CURVE) if draws else ""
        self.rows["train"] = line_of(parts["loss"], curve, parts["norm"], parts["rate"])
        self.rows["speed"] = parts["speed"].strip()
        self.rows["time"] = line_of(f"{clock(seconds)} so far", parts["cost"])
        self.steps, self.left, self.progress = step, parts["eta"], ""

    def validated(self, entry: dict[str, Any], best: dict[str, Any], reference: str) -> None:
        """Show a validation with one comparison: the best of the run if that is another, by the loss on the text that
        all validations score, otherwise `reference` (of another run), if there is one."""
        step, loss = entry["step"], f"loss {entry['eval_loss']:.4f}"
        bits, sample = f"{entry['eval_bits_per_byte']:.3f} bits per byte", " on the sample" * scores_more(entry)
        perplexity_text = perplexity(entry["eval_perplexity"])
        note = reference or f"best{sample}"
        if best["step"] != step:
            sampled_loss = f", now {comparable_loss(entry):.4f}" if sample else ""
            note = f"best{sample}: {comparable_loss(best):.4f} at step {best['step']:,}{sampled_loss}"
        scores = f"{bits} on all held-out text" if sample else bits
        self.say(f"step {step}: validation {loss}, perplexity {perplexity_text}, {scores} ({note})")
        self.rows["validate"], self.progress = f"{loss}, {bits} at step {step:,}", ""

    def show_progress(self, task: str, share: float) -> None:
        self.progress = f"{task}: {share:.0%}"
        if self.live is None and time.monotonic() - self.said_last > LONG_SILENCE:
            self.say(self.progress)

    def say(self, text: str) -> None:
        self.said_last = time.monotonic()
        say(text, FLUSHED_PRINT if self.live is None else self.console.print)

    def close(self) -> None:
        if self.live is not None:
            with suppress(OSError, SystemExit):
                self.live.stop()  # shows the cursor again, also after an error


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as at most `width` bars of eight heights. One bar averages several neighbors."""
    means = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / span) if span else 0] for mean in means)
