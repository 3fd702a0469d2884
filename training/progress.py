"""How far something long is: a bar on a terminal, nothing elsewhere."""

from collections.abc import Iterable
from typing import TypeVar

import rich.progress
from accelerate import Accelerator
from rich.console import Console

Item = TypeVar("Item")


def track(items: Iterable[Item], what: str, accelerator: Accelerator, total: int | None = None) -> Iterable[Item]:
    """`items` as they are gone through; the main process shows it on stderr."""
    console = Console(stderr=True)
    hidden = not (accelerator.is_main_process and console.is_terminal)
    return rich.progress.track(items, what, total, console=console, transient=True, disable=hidden)
