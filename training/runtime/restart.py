"""End of this process, or its restart with the same pid, from any thread.

A restart releases all device memory, and the launcher does not notice.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from common.command_line import reports_for_all
from training.runtime.launcher import LAUNCHER, PARENT

FACTS = "GPT2SCRATCH_RESTART"
SHOW_CURSOR = b"\x1b[?25h\n"
# As set by the launcher. Others change os.environ, which a fresh process would mistake for the user's choice.
_ENVIRONMENT = dict(os.environ)


class Restart(Exception):  # noqa: N818 (not an error: the run resumes)
    """Request to `execute` a restart after all open resources have been closed."""

    def __init__(self, reason: str, facts: dict[str, Any]):
        """`reason` is one sentence. In the fresh process, `restarted` returns `facts`."""
        super().__init__(reason)
        self.facts = facts


def restarting(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Wrap a command so that, on a `Restart`, a fresh process replaces this one after `main` has closed everything."""

    def run(arguments: list[str]) -> None:
        try:
            main(arguments)
        except Restart as fresh:
            print(fresh, flush=True)
            execute(fresh)

    return run


def restarted() -> dict[str, Any]:
    """Return the facts left by earlier processes, or an empty dictionary in the first process.
    An example is `{"micro_batch": 4, "because": "...", "restarts": 1}`."""
    return json.loads(os.environ.get(FACTS, "{}"))


def execute(restart: Restart) -> NoReturn:
    """Replace this process with a fresh one of the same command, from any thread, even if other threads hang."""
    show_cursor()
    # Descriptors are marked to close at exec, not closed now: a library's thread would abort without its socket.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):  # the descriptor of the listing itself is already closed
                os.set_inheritable(descriptor, False)
    # Blocked signals are inherited (handlers are not): if SIGTERM stayed blocked, it could not end the fresh process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    old_facts = restarted()
    facts = {**old_facts, **restart.facts, "because": str(restart), "restarts": old_facts.get("restarts", 0) + 1}
    environment = {**_ENVIRONMENT, LAUNCHER: str(PARENT), FACTS: json.dumps(facts)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def show_cursor() -> None:
    """Show the cursor hidden by a progress bar, before a thread other than the main one ends or replaces the process.
    Bypass Python's buffers, whose lock a main thread that hangs in a print holds. All messages of a run are flushed."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            with suppress(OSError):
                os.write(descriptor, SHOW_CURSOR)
            break  # both descriptors are the same terminal


def print_unbuffered(line: str) -> None:
    """Print to stderr from any thread, bypassing Python's buffers, which the main thread may have locked."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def leave(code: int, last_words: str = "") -> NoReturn:
    """End the process from any thread, even if other threads hang."""
    show_cursor()
    if last_words and reports_for_all():
        print_unbuffered(last_words)
    os._exit(code)
