"""Heartbeat watchdog that reports dead, frozen and hung processes of a job in one sentence, in bounded time.

Each process has a thread that writes its heartbeat (a `Pulse`) to the store of the process group every second, and
reads orders there. Rank 0 judges the other ranks, and they judge rank 0. The judge orders all processes to end and
reports the reason; a process that ran out of memory orders all processes to restart.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import Any, NoReturn

import psutil
from torch import distributed

from common.command_line import LONGEST_ERROR
from common.errors import first_of
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.saver import wait_for_writing
from training.checkpoints.status import read_status, write_status
from training.guard.faults import is_out_of_memory
from training.runtime.launcher import PARENT, is_launched
from training.runtime.restart import Restart, execute, leave, print_unbuffered, show_cursor

TIMEOUT = re.compile("time[d ]*out|timing out", re.IGNORECASE)  # in errors of gloo and NCCL
PATIENCE = 60.0  # seconds of silence after which a process counts as lost, or ddp_timeout if less
INTERVAL = 1.0  # seconds between two pulses
FAREWELL = 5.0  # seconds until the cause of an error must be known
MUTE = 3.0  # seconds of silence after a connection failed
HEARD = 3.0  # seconds for all processes to confirm that they end
ALL_READY = 30.0  # seconds for all processes to confirm a restart
SAVE_TIMEOUT = 30.0  # seconds for a checkpoint that is being written
EXIT_TIMEOUT = 120.0  # seconds for the whole exit


@dataclass(frozen=True)
class Pulse:
    """Heartbeat of a process, with fields added by its judge."""

    rank: int
    host: str
    machine: str  # scope of `pid`: the host and its container
    pid: int
    beat: int = 0
    phase: str = "start"
    error: str = ""  # error of the process group that ended the work of this process
    failure: str = ""  # error of this process itself that ended its work
    left: bool = False  # true if the process ended normally
    silence: float = 0.0  # seconds without a new beat
    state: str = ""  # state of the process, see `state_now`

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def state_now(self) -> str:
        """Return psutil's state of the process, such as `stopped` or `dead`, or an empty string on another machine."""
        if self.machine != _machine():
            return ""
        try:
            state = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD
        return psutil.STATUS_DEAD if state == psutil.STATUS_ZOMBIE else state


def find_fault(judge: int, pulses: list[Pulse], trouble: float, ddp_timeout: float) -> str | None:
    """Return the fault of the processes that rank `judge` judges, or None. `trouble`: seconds since the first error or
    failure."""
    patience = min(PATIENCE, ddp_timeout)
    active_pulses = [pulse for pulse in pulses if not pulse.left]
    candidates = [pulse for pulse in active_pulses if (pulse.rank == 0) == (judge != 0)]
    errors = [pulse for pulse in active_pulses if pulse.error]
    for pulse in candidates:
        # Other processes may have failed in the same way; they get time to report their own message.
        if pulse.failure and (errors or trouble >= FAREWELL):
            return f"{pulse} failed at {pulse.phase}: {pulse.failure.rstrip('.')}"
    candidates = [pulse for pulse in candidates if not pulse.failure]
    # Processes advance together, so the judge's phase is theirs too. Their last pulse is up to a second old.
    place = next((pulse.phase for pulse in pulses if pulse.rank == judge), "start")
    if dead := [pulse for pulse in candidates if pulse.state == psutil.STATUS_DEAD]:
        return f"{first_of(dead)} {'has' if len(dead) == 1 else 'have'} died at {place}"
    for pulse in candidates:
        if pulse.silence >= patience:
            note = " (its process is stopped)" if pulse.state == psutil.STATUS_STOPPED else ""
            return f"{pulse} has been silent for {patience:g} s at {place}{note}"
    if not errors or trouble < FAREWELL:
        return None
    if mute := [pulse for pulse in candidates if pulse.silence >= MUTE]:
        return f"{first_of(mute)} no longer answers, last seen at {place}"
    if judge != 0:
        return None
    laggards = [pulse for pulse in active_pulses if not pulse.error and not pulse.failure]
    if laggards and any(TIMEOUT.search(pulse.error) for pulse in errors):
        phases = first_of([f"rank {pulse.rank} is at {pulse.phase}" for pulse in laggards + errors])
        return f"{first_of(laggards)} kept the others waiting for {ddp_timeout:g} s (ddp_timeout): {phases}"
    return f"the processes lost their connection at {errors[0].phase}: {errors[0].error.rstrip('.')}"


class Watchdog:
    """Context in which the processes of a job are watched. A single process is not watched.
    An error of the process group ends the process on exit, as soon as the process that caused it is known."""

    def __init__(self, rank: int, processes: int, ddp_timeout: float, folder: RunFolder):
        """The status in `folder` records why the processes ended."""
        self.rank, self.processes, self.ddp_timeout, self.folder = rank, processes, ddp_timeout, folder
        self.phase = "start"  # phase of the main thread, such as `step 12`; follows `at` in messages
        self.is_ending = False  # while the main thread cleans up after an error, which others may have too
        self._own_pulse = Pulse(rank, socket.gethostname(), _machine(), os.getpid())
        self._final_fields: dict[str, Any] = {}  # of the pulse, set by the main thread when it ends
        self._own_order: dict[str, Any] | None = None  # that this process wants to give to all
        self._pulses: dict[int, Pulse] = {}  # pulses of this process and of those that it judges, by rank
        self._trouble_seconds = 0.0
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.processes > 1:
            # The launcher's store. A clone has its own connection: the main thread may block the other one for minutes.
            store = distributed.distributed_c10d._get_default_store().clone()
            self._store = distributed.PrefixStore("gpt2scratch/watchdog", store)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_connection, name="connection", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.processes == 1:
            return
        if not isinstance(error, Exception):
            self._final_fields = {"left": True}
        else:
            line = " ".join(str(error).split())[:LONGEST_ERROR] or kind.__name__
            if is_of_the_group(error):
                # The thread ends the process without the interpreter's shutdown, which would wait for the group's
                # threads, which wait for a dead peer. If the thread has no store, the error gets its traceback.
                self._final_fields = {"error": line}
                self._thread.join(EXIT_TIMEOUT)
            self._final_fields = {"failure": f"{kind.__name__}: {line}"}
        self._over.set()
        self._thread.join(FAREWELL)

    def order(self, restart: Restart) -> NoReturn:
        """Replace all processes, even those that hang in a collective. A single process raises the `Restart`."""
        if self.processes > 1:
            self._own_order = {"sentence": str(restart), "reporter": 0, "facts": restart.facts}
            self._thread.join()  # ends with the process, or when its store is gone
            self._leave(f"{restart} The processes could not agree on a restart")
        raise restart

    # Methods that run in the thread. Only the thread accesses the store, which may hang.

    def _watch(self) -> None:
        with suppress(RuntimeError, OSError):  # the store is gone with its launcher: `Stopper` ends the process
            while not self._over.is_set():
                if is_launched() and os.getppid() != PARENT:
                    return  # accessing the store would print the library's stack trace
                self._beat()
                if self._store.check(["order"]):
                    self._follow(json.loads(self._store.get("order")))
                if (order := self._own_order or self._judge()) is not None:
                    self._store.compare_set("order", "", json.dumps(order))  # only the first order counts
                    continue
                self._over.wait(INTERVAL)
            self._beat()

    def _watch_connection(self) -> None:
        """End the process if the store does not answer, as if rank 0 has lost its power or network. The time is counted
        in rounds, so that a suspended machine does not count. Nor does a launcher that Ctrl-Z has stopped, with the
        store, while the processes train on."""
        last, silence = None, 0.0
        while self._thread.is_alive() and not self._over.wait(INTERVAL):
            place = self._own_pulse.beat, self.phase
            with suppress(psutil.Error):
                is_silent = place == last and psutil.Process(PARENT).status() != psutil.STATUS_STOPPED
                last, silence = place, silence + INTERVAL if is_silent else 0.0
            if silence >= EXIT_TIMEOUT:
                self._leave(f"rank 0's machine has not answered for {silence:g} s at {self.phase}")

    def _beat(self) -> None:
        beat = self._own_pulse.beat + 1
        self._own_pulse = replace(self._own_pulse, beat=beat, phase=self.phase, **self._final_fields)
        self._store.set(f"pulse/{self.rank}", json.dumps(asdict(self._own_pulse)))

    def _judge(self) -> dict[str, Any] | None:
        """Return the order to end if there is a fault, or None."""
        states = {rank: pulse.state_now() for rank, pulse in self._pulses.items()}  # first: a final pulse may follow
        keys = [f"pulse/{rank}" for rank in (range(self.processes) if self.rank == 0 else (0, self.rank))]
        for content in self._store.multi_get([key for key in keys if self._store.check([key])]):
            pulse = Pulse(**json.loads(content))
            last_pulse = self._pulses.get(pulse.rank)
            # Counted in beats of this process, so that a suspended machine does not count as silent.
            silence = last_pulse.silence + INTERVAL if last_pulse is not None and last_pulse.beat == pulse.beat else 0.0
            self._pulses[pulse.rank] = replace(pulse, silence=silence, state=states.get(pulse.rank, ""))
        pulses = [self._pulses[rank] for rank in sorted(self._pulses)]
        self._trouble_seconds += INTERVAL * any(pulse.error or pulse.failure for pulse in pulses)
        fault = None if self.is_ending else find_fault(self.rank, pulses, self._trouble_seconds, self.ddp_timeout)
        if fault is None:
            return None
        for pulse in pulses:
            if pulse.state_now() == psutil.STATUS_STOPPED:  # after SIGCONT, it receives the order and finishes saving
                with suppress(OSError):
                    os.kill(pulse.pid, signal.SIGCONT)
        has_reported = 0 in self._pulses and self._pulses[0].failure  # if so, rank 0 has reported it itself
        return {"sentence": fault, "reporter": 0 if has_reported else self.rank}

    def _follow(self, order: dict[str, Any]) -> NoReturn:
        """Restart or end this process."""
        sentence, facts = order["sentence"], order.get("facts")
        have_all_heard = self._wait_for_all(HEARD if facts is None else ALL_READY)
        if facts is not None and not have_all_heard:
            sentence += f" Not all processes answered within {ALL_READY:g} s"
        elif facts is not None:
            if self.rank == 0:
                print_unbuffered(sentence)
            wait_for_writing(SAVE_TIMEOUT)
            try:
                execute(Restart(sentence, facts))
            except OSError as error:
                self._leave(f"{sys.executable} could not be started again: {error}")
        self._leave(sentence if self.rank == order["reporter"] else "")

    def _wait_for_all(self, seconds: float) -> bool:
        """Confirm an order and return whether all processes confirm it in time."""
        end = time.monotonic() + seconds
        with suppress(RuntimeError):
            count = self._store.add("heard", 1)
            while count < self.processes and time.monotonic() < end:
                time.sleep(0.1)
                count = self._store.add("heard", 0)
            return count >= self.processes
        return False

    def _leave(self, fault: str) -> NoReturn:
        """End the process, from any thread. `fault` is empty if another process reports it."""
        show_cursor()
        if fault:
            resume = f"--resume_from_checkpoint {quote(str(self.folder.path))}"  # the disk may hang
            fault += f". The run ends; resume it with {resume}, or, without a checkpoint, run the same command again."
            print_unbuffered(f"error: {fault}")
        for seconds in (0, SAVE_TIMEOUT):  # marked twice: a save in progress writes the status `running`
            wait_for_writing(seconds)
            if fault and read_status(self.folder.status).get("state") == "running":
                write_status(self.folder.status, "failed", self.folder.newest_step(), fault)
        leave(1)


def _machine() -> str:
    """Return the scope of a pid: the host and the pid namespace, because containers may share a host name."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_of_the_group(error: BaseException) -> bool:
    """Return whether an error comes from the process group. Gloo raises plain RuntimeErrors."""
    if is_out_of_memory(error):  # also NCCL's
        return False
    words = ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup", "process group")
    is_named = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_named or isinstance(error, distributed.DistError)
