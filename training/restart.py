"""Restart in a fresh process of the same pid: it gives back all memory of the device, and the launcher notices nothing."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from training.launcher import LAUNCHER, PARENT

FACTS = "GPT2SCRATCH_RESTART"
SHOW_CURSOR = b"\x1b[?25h\n"
# As the launcher gave it. Accelerate and others write into os.environ what a fresh process would take for the user's word.
_ENVIRONMENT = dict(os.environ)


class Restart(Exception):  # noqa: N818 (not an error: the run goes on)
    """Asks whoever runs the process to `execute` it, after everything that is open has been closed."""

    def __init__(self, reason: str, facts: dict[str, Any]):
        """`reason`: one sentence; `facts`: for `restarted`."""
        super().__init__(reason)
        self.facts = facts


def restarting(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Wrap a command: a run that has to resume in a fresh process replaces this one, which has closed everything by then."""

    def run(arguments: list[str]) -> None:
        try:
            main(arguments)
        except Restart as fresh:
            print(fresh, flush=True)
            execute(fresh)

    return run


def restarted() -> dict[str, Any]:
    """Return what the processes before this one left to it, such as `{"micro_batch": 4, "because": "...", "restarts": 1}`; empty
    at the start."""
    return json.loads(os.environ.get(FACTS, "{}"))


def execute(restart: Restart) -> NoReturn:
    """Replace this process by a fresh one with the same command, from any thread, even where the others hang."""
    show_cursor()
    # Files are closed by mark, not by hand: a library's thread that finds its socket closed would abort before the new process.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):  # the listing's own is closed already
                os.set_inheritable(descriptor, False)
    # The blocked signals are inherited (handlers are not); with SIGTERM among them nobody could end the fresh process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    known = restarted()
    facts = {**known, **restart.facts, "because": str(restart), "restarts": known.get("restarts", 0) + 1}
    environment = {**_ENVIRONMENT, LAUNCHER: str(PARENT), FACTS: json.dumps(facts)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def show_cursor() -> None:
    """Show the cursor that a progress bar hid, before a process ends or is replaced from outside its main thread: past Python's
    buffers, whose lock a main thread that hangs in a print holds. All messages of a run are flushed as they are printed."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            with suppress(OSError):
                os.write(descriptor, SHOW_CURSOR)
            break  # both lead to one terminal
