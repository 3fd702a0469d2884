"""Text on a terminal."""

import os
import sys
from contextlib import suppress
from typing import TextIO

# All but tab and line breaks: names in the files of others may contain escape codes, and a model can generate them.
CONTROL = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


def printable(text: str, output: TextIO | None) -> str:
    """Return `text` for `output`, on a terminal with U+FFFD in place of control characters."""
    return text.translate(CONTROL) if output is not None and output.isatty() else text


def show(text: str) -> None:
    print(printable(text, sys.stdout))


def discard_stdout() -> None:
    """Discard all output from now on, because stdout has no reader or its disk is full."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
