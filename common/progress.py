"""Progress bar for long tasks."""

import os
from collections.abc import Iterable
from typing import TypeVar

from rich import progress
from rich.console import Console

# A notebook gives commands a terminal, but keeps everything written to it: print lines there, not frames.
IN_NOTEBOOK = "JPY_PARENT_PID" in os.environ  # set by Jupyter for its kernels
Item = TypeVar("Item")


def track(items: Iterable[Item], label: str, is_shown: bool, total: int | None = None) -> Iterable[Item]:
    """Return `items` with a progress bar on stderr, if that is a terminal and `is_shown`. `total`: their number, if
    they have no length."""
    console = Console(stderr=True)
    is_terminal = console.is_terminal and console.file.isatty()  # rich takes any file for one if FORCE_COLOR is set
    is_hidden = IN_NOTEBOOK or not (is_shown and is_terminal)
    return progress.track(items, label, total, console=console, transient=True, disable=is_hidden)
