"""Processes of a job that die or hang: named in one sentence, in bounded time, wherever the others are waiting for them.

Each process has a thread that says in the group's store, every second, that it is alive and what it is at, and listens for
the next process's word. What it finds wrong becomes an order in the store, which all obey: `end`, or `restart`.
"""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
from torch import distributed

from training.guard.stopping import leave, say
from training.launcher import PARENT
from training.restart import Restart, execute, settle_output
from training.run_folder import RunFolder
from training.saver import wait_for_writing
from training.status import mark_failed

PREFIX = "gpt2scratch/watchdog"
PATIENCE = 60.0  # seconds of silence
FAREWELL = 5.0  # seconds that an error or a death may take to become known
BEFORE_LEAVING = 30.0  # seconds for a checkpoint that is being written
ALL_READY = 30.0  # seconds for all to answer to a restart
LEAVING = 120.0  # seconds for anything on the way out, all together
REMEDY = "The run ends; resume it with the same command."


@dataclass(frozen=True)
class Pulse:
    """What a process says of itself."""

    rank: int
    host: str
    machine: str  # where `pid` means something: the host, and the container in it
    pid: int
    beat: int = 0
    phase: str = "start"
    phases: int = 0  # how many it has begun
    error: str = ""  # of the group, which it is explaining
    failure: str = ""  # of its own, of which it ends
    left: bool = False  # in order

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def is_gone(self) -> bool:
        """It has ended, and this is certain; False for a process on another machine."""
        return self._status() in (None, psutil.STATUS_ZOMBIE)

    def is_stopped(self) -> bool:
        return self._status() == psutil.STATUS_STOPPED

    def _status(self) -> str | None:
        """As the system has it; None: there is no such process; empty: on another machine."""
        if self.machine != _machine():
            return ""
        try:
            return psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return None


class Watchdog:
    """Within it, a process of several is watched and watches; one process alone needs neither.

    On the way out by an error of the process group it explains the error, says the sentence and ends the process.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        ddp_timeout: float = 600,
        folder: RunFolder | None = None,
        patience: float | None = None,
        interval: float = 1.0,
    ):
        """
        Args:
            folder: whose status says why the processes ended.
            patience: seconds of silence after which a process is given up; 60, or `ddp_timeout` if that is less.
            interval: seconds between two signs of life.
        """
        self.rank = rank
        self.processes = processes
        self.ddp_timeout = ddp_timeout
        self.folder = folder
        self.patience = min(PATIENCE, ddp_timeout) if patience is None else patience
        self.interval = interval
        # Who has the store: after a restart, rank 0.
        self._rank_0_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # What the main thread says; each is replaced whole.
        self._phase, self._phases = "start", 0
        self._error, self._failure, self._over = "", "", False
        self._explaining_since: int | None = None
        self._wish: dict[str, Any] | None = None  # an order of this process, to be given
        # What the thread knows.
        self._beats = 0
        self._peers: dict[int, Pulse] = {}  # as last heard of
        self._silence = 0  # of the next process, in beats of this one
        self._failed_since = 0  # likewise, since it told of an error
        self._me = Pulse(rank, socket.gethostname(), _machine(), os.getpid())
        self._answers = 0  # of the store; it hangs where the process that hosts it does
        self._explained = threading.Event()
        self._sentence: str | None = None
        self._leaving = threading.Lock()
        self._wake = threading.Event()
        self._deaf = False  # the store is gone

    @property
    def phase(self) -> str:
        """What the main thread is at, such as `step 12`; it reads best after `at`."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase, self._phases = phase, self._phases + 1

    def __enter__(self) -> "Watchdog":
        if self.processes > 1:
            # A clone has a connection of its own: the main thread may wait on the other one for minutes.
            self._store = distributed.PrefixStore(PREFIX, distributed.distributed_c10d._get_default_store().clone())
            self._store.set_timeout(timedelta(seconds=FAREWELL))
            self._talker = threading.Thread(target=self._talk, name="watchdog", daemon=True)
            self._talker.start()
            if self.rank != 0 and self._rank_0_hosts:
                threading.Thread(target=self._watch_host, name="watchdog of the store", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.processes == 1:
            return
        sentence = self.explain(error) if isinstance(error, Exception) else None
        if sentence is not None:
            # At once, past the interpreter's own end: it would wait for the group's threads, which wait for a dead peer.
            self._leave(sentence)
        if isinstance(error, Exception):
            self._failure = f"{kind.__name__}: {error}".strip().splitlines()[0]
        self._over = True
        self._wake.set()
        self._talker.join(FAREWELL)

    def explain(self, error: BaseException) -> str | None:
        """Called where an error has ended the main thread's work, inside the watchdog's `with`.

        Returns:
            None where the error is not one of the process group: it deserves its traceback. Otherwise the sentence to
            end with, with exit code 1; empty in all processes but one.
        """
        if self.processes == 1 or self._deaf or not is_of_the_group(error):
            return None
        self._error = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._explaining_since = self._beats
        self._wake.set()
        for _ in range(int(LEAVING / self.interval)):
            if self._explained.wait(self.interval):
                return self._sentence
            if self._deaf:
                break
        return None

    def order_restart(self, environment: dict[str, str], reason: str) -> NoReturn:
        """All processes go on as fresh ones, also those that hang in a collective. `environment` and `reason` are those of
        `Restart`, which one process alone raises.

        Raises:
            Restart: there is one process.
        """
        if self.processes > 1:
            self._wish = {"what": "restart", "environment": environment, "sentence": reason}
            self._wake.set()
            self._talker.join()  # it ends with the process, or without its store
            self._leave(f"{reason} The processes could not agree on a restart. {REMEDY}")
        raise Restart(environment, reason)

    # The thread. All that is said and heard goes through it: a store that hangs must not take the main thread with it.

    def _talk(self) -> None:
        try:
            self._beat()
            with suppress(distributed.DistStoreError):  # it takes long to begin
                self._store.wait(["pulse/0"])
                self._peers[0] = self._hear(0)  # to know whom to name, should the store be gone with it
            while not self._over:
                if not self._rank_0_hosts and os.getppid() != PARENT:
                    return self._store_is_gone()  # to find out by asking it would print the library's stack
                self._beat()
                if (order := self._hear_order()) is not None:
                    self._obey(order)
                if self._wish is None:
                    self._wish = self._complaint()
                if self._wish is not None:
                    self._store.compare_set("order", "", json.dumps(self._wish))  # the first one counts
                    continue
                self._wake.wait(self.interval)
                self._wake.clear()
            self._beat()
            if not self._failure:
                self._store.add("left", 1)
                if self.rank == 0 and self._rank_0_hosts:  # the store goes with this process
                    self._wait_for("left", self.processes, FAREWELL)
        except (RuntimeError, OSError):
            self._store_is_gone()

    def _beat(self) -> None:
        self._beats += 1
        pulse = replace(
            self._me,
            beat=self._beats,
            phase=self._phase,
            phases=self._phases,
            error=self._error,
            failure=self._failure,
            left=self._over and not self._failure,
        )
        self._store.set(f"pulse/{self.rank}", json.dumps(asdict(pulse)))
        self._answers += 1

    def _hear_order(self) -> dict[str, Any] | None:
        return json.loads(self._store.get("order")) if self._store.check(["order"]) else None

    def _hear(self, rank: int) -> Pulse | None:
        if not self._store.check([f"pulse/{rank}"]):
            return None
        return Pulse(**json.loads(self._store.get(f"pulse/{rank}")))

    def _complaint(self) -> dict[str, Any] | None:
        """An order to end, where there is a reason to."""
        found = self._what_is_wrong_with((self.rank + 1) % self.processes)
        since = self._explaining_since
        if found is None and since is not None and (self._beats - since) * self.interval >= FAREWELL:
            found = self._who_is_missing()
        return found

    def _what_is_wrong_with(self, rank: int) -> dict[str, Any] | None:
        peer, before = self._hear(rank), self._peers.get(rank)
        if peer is None or peer.left:
            return None
        self._peers[rank] = peer
        if not peer.failure and peer.is_gone():
            peer = self._hear(rank)  # its last word may have come in between
            if not peer.left and not peer.failure:
                return self._end(f"{peer} has died at {self._place_of(peer)}", {rank})
        if peer.failure:
            # The others may have failed likewise, each in its own words; so they are given time to.
            self._failed_since += 1
            if self._explaining_since is None and self._failed_since * self.interval < FAREWELL:
                return None
            # Rank 0 says it for any other; what ails itself it has said already.
            return _end(f"{peer} failed at {peer.phase}: {peer.failure.rstrip('.')}. {REMEDY}", speaker=0)
        # Counted in beats of this process: a machine that was suspended has not been silent.
        self._silence = self._silence + 1 if before is not None and before.beat == peer.beat else 0
        if self._silence * self.interval < self.patience:
            return None
        stopped = peer.is_stopped()
        if stopped:
            with suppress(OSError):
                os.kill(peer.pid, signal.SIGCONT)  # to hear the order, and finish what it is saving
        why = " (its process is stopped)" if stopped else ""
        return self._end(f"{peer} has been silent for {self.patience:g} s at {self._place_of(peer)}{why}", {rank})

    def _who_is_missing(self) -> dict[str, Any]:
        """All are alive as far as their neighbours know, and yet a collective has failed in this process."""
        before = [self._hear(rank) for rank in range(self.processes)]
        for _ in range(3):
            time.sleep(self.interval)
            self._beat()
        peers = [self._hear(rank) or old for rank, old in enumerate(before)]
        gone = [new for new in peers if new and new.is_gone() and not new.left]
        silent = [new for new, old in zip(peers, before, strict=True) if new and old and new.beat == old.beat]
        silent = [peer for peer in silent if not peer.left and peer.rank != self.rank]
        waiting = [peer for peer in peers if peer and not peer.error and not peer.left]  # they have not come yet
        accused = {peer.rank for peer in gone or silent or waiting}
        if gone:
            found = f"{_listed(gone)} died at {self._place_of(gone[0])}"
        elif silent:
            found = f"{_listed(silent)} does not answer any more, last heard of at {self._place_of(silent[0])}"
        elif waiting:
            found = (
                f"{_listed(waiting)} kept the others waiting for {self.ddp_timeout:g} s (ddp_timeout): "
                f"{_phases([peer for peer in peers if peer])}"
            )
        else:
            found = f"the processes lost each other at {self.phase}: {self._error.rstrip('.')}"
        return self._end(found, accused)

    def _place_of(self, peer: Pulse) -> str:
        """Its last word is up to a beat old. Processes go in step: where this one is, that one was, or just before."""
        return peer.phase if peer.phases >= self._phases else self.phase

    def _end(self, found: str, accused: set[int]) -> dict[str, Any]:
        speaker = min(set(range(self.processes)) - accused, default=self.rank)
        return _end(f"{found}. {REMEDY}", speaker)

    def _store_is_gone(self) -> None:
        """With the launcher that hosts it (`Stopper` sees to that), or with rank 0."""
        if self._rank_0_hosts and self.rank != 0:
            end = time.monotonic() + FAREWELL
            while time.monotonic() < end and self._explaining_since is None and not self._over:
                time.sleep(0.1)
            if not self._over:  # else rank 0 was just the first to leave
                first = self._peers.get(0, "rank 0")
                self._finish(f"{first} has died; this process is at {self.phase}. {REMEDY}", speaker=1)
        self._deaf = True

    def _watch_host(self) -> None:
        """Against a store that does not answer, which no timeout of its own ends."""
        answers, silence = -1, 0
        while not self._over and not self._deaf:
            time.sleep(self.interval)
            silence = silence + 1 if answers == self._answers else 0
            answers = self._answers
            if silence * self.interval > self.patience + self.interval and not self._leaving.locked():
                self._give_up_host()

    def _give_up_host(self) -> None:
        first = self._peers.get(0)
        sentence = f"{first or 'rank 0'} has been silent for {self.patience:g} s at {self.phase}. {REMEDY}"
        if first is not None and first.is_stopped():
            self._wish = _end(sentence, speaker=1)  # once it goes on, its store answers, and it hears of its end
            with suppress(OSError):
                os.kill(first.pid, signal.SIGCONT)
            time.sleep(3 * self.interval)
        self._finish(sentence, speaker=1)

    # Orders.

    def _obey(self, order: dict[str, Any]) -> None:
        if order["what"] == "restart":
            self._restart(order)
        with suppress(RuntimeError):  # rank 0, and the store with it, may be the first to go
            self._store.add("heard", 1)
            if self.rank in (0, order["speaker"]):  # the launcher ends the others as soon as one has ended
                self._wait_for("heard", self.processes, 3)
            if self.rank == 0 and self._rank_0_hosts:
                time.sleep(0.5)
        self._finish(order["sentence"], order["speaker"])

    def _finish(self, sentence: str, speaker: int) -> None:
        """Ends the process; by way of the main thread, where that waits for an explanation."""
        if not self._leaving.acquire(blocking=False):
            time.sleep(LEAVING)
        if self.rank == speaker:
            self._note(sentence)
        self._sentence = sentence if self.rank == speaker else ""
        if self._explaining_since is None:
            self._leave(self._sentence)
        self._explained.set()
        time.sleep(LEAVING)
        os._exit(1)

    def _leave(self, sentence: str) -> NoReturn:
        settle_output()
        if sentence:
            say(f"error: {sentence}")
        wait_for_writing(BEFORE_LEAVING)
        if sentence:
            self._note(sentence)  # again: what was being saved has noted that it is
        leave(1)

    def _note(self, sentence: str) -> None:
        if self.folder is not None:
            mark_failed(self.folder.status, self.folder.newest_step(), sentence)

    def _restart(self, order: dict[str, Any]) -> None:
        """Returns where not all have answered."""
        if self.rank == 0:
            self._store.set("port", str(_free_port()))
        self._store.add("ready", 1)
        if not self._wait_for("ready", self.processes, ALL_READY):
            order["sentence"] += f" Not all processes answered within {ALL_READY:g} s. {REMEDY}"
            order["speaker"] = 0
            return
        self._leaving.acquire(blocking=False)
        # The launcher's store still knows the old processes. The fresh ones meet in one of rank 0.
        meeting = {"MASTER_PORT": self._store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        if self.rank == 0:
            say(order["sentence"])
        wait_for_writing(BEFORE_LEAVING)
        self._store.add("gone", 1)
        if self.rank == 0 and self._rank_0_hosts:
            self._wait_for("gone", self.processes, BEFORE_LEAVING + FAREWELL)
        try:
            execute(Restart({**order["environment"], **meeting}, order["sentence"]))
        except OSError as error:
            self._leave(f"{sys.executable} could not be started again: {error}. {REMEDY}")

    def _wait_for(self, counter: str, count: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._store.add(counter, 0) < count:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
            self._answers += 1
        return True


def _end(sentence: str, speaker: int) -> dict[str, Any]:
    return {"what": "end", "sentence": sentence, "speaker": speaker}


def _machine() -> str:
    """A pid means something only in its own namespace; containers may share a host's name."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_of_the_group(error: BaseException) -> bool:
    """gloo's errors are plain RuntimeErrors."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup", "process group")
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return told or isinstance(error, distributed.DistError)


def _listed(peers: list[Pulse], most: int = 4) -> str:
    more = f" and {len(peers) - most} more" if len(peers) > most else ""
    return ", ".join(str(peer) for peer in peers[:most]) + more


def _phases(peers: list[Pulse], most: int = 8) -> str:
    """Those that are furthest behind first."""
    ordered = sorted(peers, key=lambda peer: (bool(peer.error), peer.phases, peer.rank))
    more = f" and {len(peers) - most} more" if len(peers) > most else ""
    return ", ".join(f"rank {peer.rank} is at {peer.phase}" for peer in ordered[:most]) + more


def _free_port() -> int:
    """Outside the range from which the system gives ports to outgoing connections: it must stay free for some seconds."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
