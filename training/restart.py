"""Going on in a fresh process of the same pid: it gives back all memory of the device, and the launcher notices nothing."""

import json
import os
import signal
import sys
import threading
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

    def __init__(self, environment: dict[str, str], reason: str):
        """`environment`: what changes in it, see `remembering`; `reason`: one sentence."""
        super().__init__(reason)
        self.environment = environment
        self.reason = reason


def restarting(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Wrap a command: a run that has to resume in a fresh process replaces this one, which has closed everything by then."""

    def run(arguments: list[str]) -> None:
        try:
            main(arguments)
        except Restart as fresh:
            print(fresh.reason, flush=True)
            execute(fresh)

    return run


def restarted() -> dict[str, Any]:
    """What the process before this one left to it, such as `{"micro_batch": 4, "restarts": 1}`; empty at the start."""
    return json.loads(os.environ.get(FACTS, "{}"))


def remembering(**facts: Any) -> dict[str, str]:
    """The environment of a restart that is to know `facts`, beside what is known and how many restarts there were."""
    known = restarted()
    return {FACTS: json.dumps({**known, **facts, "restarts": known.get("restarts", 0) + 1})}


def execute(restart: Restart) -> NoReturn:
    """Replaces this process by a fresh one with the same command, from any thread, whatever the others hang in.

    Raises:
        OSError: the command could not be started.
    """
    settle_output()
    # Files are closed by mark, not by hand: a library's thread that finds its socket closed would abort before the new process.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with suppress(OSError):  # the listing's own is closed already
                os.set_inheritable(descriptor, False)
    # The blocked signals are inherited (handlers are not); with SIGTERM among them nobody could end the fresh process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    environment = {**_ENVIRONMENT, LAUNCHER: str(PARENT), **restart.environment}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def settle_output() -> None:
    """Write what is buffered and show the cursor that a progress bar hid, before a process ends or is replaced from outside its
    main thread. A main thread that hangs in a print holds a lock, so this waits 2 seconds at most."""
    thread = threading.Thread(target=_settle_output, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for another thread
        _settle_output()
    else:
        thread.join(2)


def _settle_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # gone, closed, or never there
            stream.flush()
            if os.isatty(stream.fileno()):
                os.write(stream.fileno(), SHOW_CURSOR)
                break  # both lead to one terminal
