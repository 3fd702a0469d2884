"""Being asked to stop: by a signal, by the clock, or by the launcher's death; all processes at the same step."""

import math
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import psutil
import torch
from torch import distributed

from limits import setting
from training.distributed import waits_for_main
from training.launcher import PARENT, die_with_launcher, is_launched
from training.restart import show_cursor
from training.saver import wait_for_writing

# What a process ends with after it has stopped and saved, as a shell would report the signal. The later one wins where
# processes have different reasons.
LAUNCHER_DIED = "the launcher died"
NOT_SAVED = "a checkpoint could not be written"
EXIT_CODES = {"max_hours": 0, "SIGHUP": 129, LAUNCHER_DIED: 143, "SIGINT": 130, "SIGTERM": 143, NOT_SAVED: 1}
_REASONS = list(EXIT_CODES)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

GRACE = 60.0  # seconds that the main thread has for a step and the way out
SAVING = 600.0  # seconds on top of it, while a checkpoint is being written
TICK = 0.5  # seconds between looks at the launcher and the clock


@dataclass
class StoppingArguments:
    max_hours: float | None = setting(
        None,
        "Stop and save after this many hours, counted from the start of the process.",
        above=0,
        maximum=10**6,
        resume="free",
    )
    ddp_timeout: int = setting(
        600,
        "Seconds that processes wait for one that hangs, before the job ends.",
        minimum=1,
        maximum=604_800,
        resume="free",
    )


class Stopper:
    """Within it, a request to stop is only noted; the loop asks at each step boundary whether to leave.

    A thread receives the signals, so that they count also while the main thread hangs in a collective or waits for the
    device, where Python runs no handlers.
    """

    def __init__(self, arguments: StoppingArguments, processes: int = 1, grace: float = GRACE):
        """`grace`: seconds to leave in; a process that writes a checkpoint, or waits for one that does, is given more."""
        self.arguments, self.processes, self.grace = arguments, processes, grace
        self.requested: str | None = None  # in this process; the others may not know yet
        self._decided: str | None = None  # by all processes
        self._pending: tuple[distributed.Work, torch.Tensor] | None = None
        self._group: distributed.ProcessGroup | None = None
        self._over = self._said = False
        self._longest_step = 0.0
        # Of the monotonic clock, once there is one.
        self._boundary = self._first_interrupt = self._hours_end = self._leave_at = math.inf

    def __enter__(self) -> "Stopper":
        if self.processes > 1:
            # On CPU and of its own: asking must neither wait for the device nor mix with the gradients' collectives.
            timeout = timedelta(seconds=self.arguments.ddp_timeout)
            self._group = distributed.new_group(backend="gloo", timeout=timeout)
        if self.arguments.max_hours is not None:
            # The creation time survives a restart by exec; from here on no change of the clock counts.
            age = time.time() - psutil.Process().create_time()
            self._hours_end = time.monotonic() + self.arguments.max_hours * 3600 - age
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        self._handlers = {}
        if threading.current_thread() is threading.main_thread():  # Python sets handlers there only
            # No place for a thread to look: the interpreter itself writes the number there at any moment.
            self._wakeup = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
            is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            self._handlers = {number: signal.signal(number, _only_note) for number in SIGNALS[: 2 if is_nohup else 3]}
        self._thread = threading.Thread(target=self._watch, name="stopper", daemon=True)
        self._thread.start()
        die_with_launcher(False)  # from here on, what has been trained is saved first
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._group is not None and kind is not None:
            return  # where one process has failed, the launcher sends a SIGTERM to all, which have yet to say why they end
        try:
            if self._pending is not None:
                self._decide()  # a group must not be destroyed while it is at work
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._handlers:
                signal.set_wakeup_fd(self._wakeup)
            self._over = True
            with suppress(BlockingIOError):
                self._sent.send(b"\0")
            self._thread.join()
            self._received.close()
            self._sent.close()

    def agreed(self, now: bool = False) -> str | None:
        """Asked by every process at each step boundary: why to stop, the same for all at the same boundary, or None.

        With several processes this is what they said at the boundary before: the answers travel during the step. `now` waits
        for what they say now: for the end of a phase, such as a validation.
        """
        self._longest_step = max(self._longest_step, time.monotonic() - self._boundary)
        self._boundary = time.monotonic()
        if self._group is None:
            self._decided = self._decided or self.requested
        else:
            if self._pending is not None:
                self._decide()
            if self._decided is None:
                code = 0 if self.requested is None else _REASONS.index(self.requested) + 1
                codes = torch.tensor([code], dtype=torch.int32)
                work = distributed.all_reduce(codes, distributed.ReduceOp.MAX, self._group, async_op=True)
                self._pending = work, codes
                if now:
                    self._decide()
        self._announce(self._decided)
        return self._decided

    def _decide(self) -> None:
        """Read the answers that are on their way."""
        (work, codes), self._pending = self._pending, None
        work.wait()
        self._decided = _REASONS[int(codes) - 1] if codes else None

    def request(self, reason: str) -> None:
        """Asks for a stop, for one of the reasons of `EXIT_CODES`; the first one stays."""
        self.requested = self.requested or reason
        self._announce(self.requested)

    def _announce(self, reason: str | None) -> None:
        if reason in (None, NOT_SAVED) or self._said:  # of the latter, an error tells
            return
        self._said = True
        if os.environ.get("RANK", "0") == "0":
            more = " Ctrl-C once more ends the run at once, without saving." if reason == "SIGINT" else ""
            say(f"Stopping after this step ({reason}), and saving.{more}")

    # The thread.

    def _watch(self) -> None:
        while not self._over:
            ready, _, _ = select.select([self._received], [], [], TICK)
            for number in self._received.recv(64) if ready else b"":
                if number in SIGNALS:
                    self._receive(signal.Signals(number))
            if is_launched() and os.getppid() != PARENT:
                self._allow_grace()
                self.request(LAUNCHER_DIED)
            now = time.monotonic()
            if now > self._hours_end:
                self.request("max_hours")
            saving = wait_for_writing(0) or waits_for_main()  # where another process may be saving
            if now > self._leave_at and not (saving and now < self._leave_at + SAVING) and not self._over:
                leave(EXIT_CODES[self.requested or LAUNCHER_DIED])

    def _receive(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            # torchrun passes on a Ctrl-C that the terminal has sent to everybody: not a second one.
            if time.monotonic() - self._first_interrupt >= 1:
                leave(EXIT_CODES["SIGINT"], "interrupted")
            self._first_interrupt = min(self._first_interrupt, time.monotonic())
        else:
            self._allow_grace()
        self.request(number.name)

    def _allow_grace(self) -> None:
        """A process that nobody waits for must not keep the device, stuck in a collective whose peer is dead. But where
        steps take long, so does the way out: up to two of them."""
        self._leave_at = min(self._leave_at, time.monotonic() + max(self.grace, 3 * self._longest_step))


def _only_note(*_: object) -> None:
    """Keeps the signal from ending the process; the thread hears of it by the wakeup descriptor."""


def _forget_in_child() -> None:
    """A forked child shares the socket: ending it by SIGTERM would look like a SIGTERM to this process."""
    for number in SIGNALS:
        if signal.getsignal(number) is _only_note:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


def say(line: str) -> None:
    """To stderr, past Python's buffers: from a thread, whatever the main thread is doing."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def leave(code: int, last_words: str = "") -> NoReturn:
    """Ends the process from any thread, even where the others hang."""
    show_cursor()
    if last_words and os.environ.get("RANK", "0") == "0":
        say(last_words)
    os._exit(code)
