"""Stop requests by a signal, a time limit or the launcher's death. All processes stop at the same step."""

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from torch import distributed

from common.command_line import reports_for_all
from common.limits import free
from common.progress import IN_NOTEBOOK
from training.checkpoints.saver import wait_for_writing
from training.runtime.distributed import waits_for_main
from training.runtime.launcher import PARENT, die_with_launcher, is_launched
from training.runtime.restart import leave, print_unbuffered

# Exit code after stopping and saving, as a shell would report the signal. If processes have different reasons, the
# later one in this order wins.
LAUNCHER_DEATH = "the launcher died"
SAVE_FAILURE = "a checkpoint could not be written"
EXIT_CODES = {"max_hours": 0, "SIGHUP": 129, LAUNCHER_DEATH: 143, "SIGINT": 130, "SIGTERM": 143, SAVE_FAILURE: 1}
_REASONS = list(EXIT_CODES)
if sys.platform == "win32":
    sys.exit("error: Training needs Unix signals, which Windows lacks: use WSL2 (docs/installation.md).")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

GRACE = 60.0  # seconds that the main thread has to finish its step and exit
SAVING = 600.0  # additional seconds while a checkpoint is being written
TICK = 0.5  # seconds between checks of the launcher and the clock


@dataclass
class StoppingArguments:
    max_hours: float | None = free(
        None, "Save and stop after this many hours, counted from the start of the process.", above=0, maximum=10**6
    )
    ddp_timeout: int = free(
        600, "Seconds that processes wait for a hung process before the job ends.", minimum=1, maximum=604_800
    )


class Stopper:
    """Context that turns signals into stop requests. The training loop checks for a request at each step boundary.
    A thread receives the signals. They therefore work even if the main thread hangs in a collective or waits for the
    device, where Python runs no handlers."""

    def __init__(self, arguments: StoppingArguments, processes: int = 1):
        self.arguments, self.processes = arguments, processes
        self.requested: str | None = None  # request in this process, which the others may not know yet
        # Records the end of a process that has completed no step and has nothing to save: a signal ends it at once.
        self.end_without_saving: Callable[[str], None] | None = None
        self._decided: str | None = None  # decision of all processes
        self._pending: tuple[distributed.Work, torch.Tensor] | None = None
        self._group: distributed.ProcessGroup | None = None
        self._over = self._said = False
        self._longest_step = 0.0
        # Times of the monotonic clock; infinite until set.
        self._boundary = self._first_interrupt = self._hours_end = self._leave_at = math.inf

    def __enter__(self) -> "Stopper":
        if self.processes > 1:
            # A separate group on the CPU: a check must not wait for the device or mix with gradients' collectives.
            timeout = timedelta(seconds=self.arguments.ddp_timeout)
            self._group = distributed.new_group(backend="gloo", timeout=timeout)
        if self.arguments.max_hours is not None:
            # The creation time survives a restart by exec. From here on, changes of the system clock have no effect.
            age = time.time() - psutil.Process().create_time()
            self._hours_end = time.monotonic() + self.arguments.max_hours * 3600 - age
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        # The interpreter itself writes the signal number to this socket at any time, so no handler has to run.
        self._wakeup = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        # nohup ignores SIGHUP, and a script's `&` Ctrl-C, which is for another program.
        numbers = [number for number in SIGNALS[1:] if signal.getsignal(number) != signal.SIG_IGN]
        # The handlers only keep a signal from ending the process.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (SIGNALS[0], *numbers)}
        self._thread = threading.Thread(target=self._watch, name="stopper", daemon=True)
        self._thread.start()
        die_with_launcher(False)  # from here on, progress is saved first
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._group is not None and kind is not None:
            return  # if one process fails, the launcher sends SIGTERM to all, which still have to report why they end
        try:
            if self._pending is not None:
                self._decide()  # a group must not be destroyed during a collective
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            self._over = True
            with suppress(BlockingIOError):
                self._sent.send(b"\0")
            self._thread.join()
            self._received.close()
            self._sent.close()

    def agreed(self, now: bool = False) -> str | None:
        """Return the reason to stop, or None. All processes call this at each step boundary and get the same result.
        With several processes, the result is from the previous boundary, because the answers travel during the step.
        `now` waits for the current answers, for use at the end of a phase such as a validation."""
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
        """Wait for the pending answers and read them."""
        (work, codes), self._pending = self._pending, None
        work.wait()
        self._decided = _REASONS[int(codes) - 1] if codes else None

    def request(self, reason: str) -> None:
        """Request a stop for one of the reasons in `EXIT_CODES`. The first request is kept."""
        end = self.end_without_saving if reason not in ("max_hours", SAVE_FAILURE) else None
        self._said = self._said or end is not None  # first: the main thread may announce a request as soon as it is set
        self.requested = self.requested or reason
        if end is not None:
            end(reason)
            leave(EXIT_CODES[reason], f"Stopped ({reason}). There was nothing to save; the same command starts again.")
        self._announce(self.requested)

    def _announce(self, reason: str | None) -> None:
        if reason in (None, SAVE_FAILURE) or self._said:  # SAVE_FAILURE has its own error message
            return
        self._said = True
        if reports_for_all():
            hint = " Press Ctrl-C again to end the run immediately, without saving." if reason == "SIGINT" else ""
            room = "\n" * (6 if sys.stderr.isatty() and not IN_NOTEBOOK else 0)  # a live display redraws these lines
            print_unbuffered(f"{room[:1]}Stopping after this step ({reason}) and saving.{hint}{room[1:]}")

    # Methods that run in the thread.

    def _watch(self) -> None:
        while not self._over:
            ready, _, _ = select.select([self._received], [], [], TICK)
            for number in self._received.recv(64) if ready else b"":
                if number in SIGNALS:
                    self._receive(signal.Signals(number))
            if is_launched() and os.getppid() != PARENT:
                self._allow_grace()
                self.request(LAUNCHER_DEATH)
            seconds = time.monotonic()
            if seconds > self._hours_end:
                self.request("max_hours")
            saving = wait_for_writing(0) or waits_for_main()  # another process may be saving
            if seconds > self._leave_at and not (saving and seconds < self._leave_at + SAVING) and not self._over:
                leave(EXIT_CODES[self.requested or LAUNCHER_DEATH])

    def _receive(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            # The terminal sends Ctrl-C to all processes, and torchrun forwards it again: both signals count once.
            if time.monotonic() - self._first_interrupt >= 1:
                leave(EXIT_CODES["SIGINT"], "interrupted")
            self._first_interrupt = min(self._first_interrupt, time.monotonic())
        else:
            self._allow_grace()
        self.request(number.name)

    def _allow_grace(self) -> None:
        """Set the deadline to exit, because a process stuck in a collective with a dead peer must not keep the device.
        Slow steps get more time, because the exit may take up to two steps."""
        self._leave_at = min(self._leave_at, time.monotonic() + max(GRACE, 3 * self._longest_step))
