"""Messages of a run, printed by one process, wrapped to the terminal width, with consistent number formats."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import partial

from accelerate import Accelerator

from common.progress import IN_NOTEBOOK
from common.terminal import discard_stdout, printable

LABEL = re.compile(r"[A-Z][a-z]+: +| *")  # its length is the indentation of continuation lines
FLUSHED_PRINT = partial(print, flush=True)


def printer(accelerator: Accelerator) -> Callable[[str], None]:
    """Return `say` on the main process, and a function that prints nothing on the others."""
    return say if accelerator.is_main_process else lambda text: None


def say(text: str, through: Callable[[str], object] = FLUSHED_PRINT) -> None:
    """Print a message, wrapped to the terminal width. A closed output (terminal or pipe) does not end the run."""
    try:
        is_shown = sys.stdout is not None and sys.stdout.isatty() and not IN_NOTEBOOK  # None: it is closed
        through(wrapped(printable(text, sys.stdout), shutil.get_terminal_size().columns) if is_shown else text)
    except (OSError, SystemExit):  # rich raises SystemExit
        discard_stdout()


def wrapped(text: str, width: int) -> str:
    """Wrap lines at words, aligned after a label (`Memory:  `). Commands, indented by two spaces, stay whole."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or re.match(r"  \S", line):
            lines.append(line)
            continue
        indent = " " * LABEL.match(line).end()
        indent = indent if len(indent) < width // 2 else ""
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """Format a duration: 3661 -> 1:01:01, 61 -> 1:01."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"
