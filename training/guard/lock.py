"""One run a folder: whoever trains in it holds a lock, and whoever comes second reads who that is.

The lock belongs to the process: the system frees it when the process ends, however it ends, so a file that was left behind
locks nothing. What the holder notes about itself is read for the sentence alone.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from inspect import signature
from pathlib import Path

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from errors import UserError, disk_errors
from tokenizer import schema
from training.launcher import is_launched

# Not filelock's own fallback, which version 4 lets one switch off: it uses the same file, and the empty one that a lock leaves
# would lock forever there.
NO_FALLBACK = {"fallback_to_soft": False} if "fallback_to_soft" in signature(BaseFileLock.__init__).parameters else {}
NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
POLL_SECONDS = 0.25
# A holder that has just come is about to note its name; one that has taken its name away is about to be gone.
UNNAMED_SECONDS = 1.0
# filelock takes over a soft lock with garbage in it after seeing it unchanged for 2 s.
SOFT_LOCK_SECONDS = 3.0


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    launcher: int
    since: str

    @classmethod
    def this_process(cls) -> "Holder":
        launcher = os.getppid() if is_launched() else 0  # a shell that ends means nothing
        return cls(socket.gethostname(), os.getpid(), launcher, f"{datetime.now():%Y-%m-%d %H:%M}")

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """None where nothing readable is noted."""
        with suppress(OSError, ValueError):
            return schema.read(path, cls)
        return None

    def is_about_to_end(self) -> bool:
        """Whether it lost its launcher, which makes it save and end, or has ended and the note is still there."""
        if self.host != socket.gethostname():
            return False
        try:
            return psutil.Process(self.pid).ppid() != self.launcher != 0
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return True
        except psutil.AccessDenied:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """Held by the main process of a run, from before it looks into the folder until it is done with it.

    A process that replaces itself (`os.execv`) loses the lock and takes it again.
    """

    def __init__(self, folder: str | Path, say: Callable[[str], None] = print, patience: float = 60.0):
        """`patience`: seconds to wait for a holder that is about to end."""
        self.folder, self.say, self.patience = Path(folder), say, patience
        self.path = _place(self.folder)
        self.note = self.path.with_name(f"{self.path.name}.json")
        self.lock: BaseFileLock | None = None

    def acquire(self) -> None:
        """Take the lock; raise a `UserError` where another process has it, or its file cannot be written."""
        with disk_errors(self.path, "name another --output_dir"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock = self._wait_for_lock()
        with suppress(OSError):  # the note is for the sentence alone
            self.note.write_text(json.dumps(asdict(Holder.this_process())) + "\n", encoding="utf-8")

    def release(self, *_: object) -> None:
        if self.lock is not None:
            with suppress(OSError):
                self.note.unlink(missing_ok=True)
            self.lock.release()
            self.lock = None

    __enter__, __exit__ = acquire, release

    def _wait_for_lock(self) -> BaseFileLock:
        """Return the lock; raise a `UserError` where another process holds it and does not seem to end."""
        began, said = time.monotonic(), False
        while True:
            try:
                return _take(self.path)
            except Timeout as refused:
                holder = Holder.read(self.note)
                patience = UNNAMED_SECONDS if holder is None else self.patience * holder.is_about_to_end()
                if time.monotonic() - began >= patience:
                    raise UserError(self._refusal(holder, Path(refused.lock_file))) from None
            if holder is not None and not said:
                self.say(f"{self.folder} is still held by {holder}, which is about to end; waiting for it ...")
                said = True
            time.sleep(POLL_SECONDS)

    def _refusal(self, holder: Holder | None, lock_file: Path) -> str:
        who = holder or "another process"
        sentence = f"{self.folder} is being trained by {who}; wait for it, stop it, or name another --output_dir."
        if lock_file == self.path:
            return sentence
        return f"{sentence} (This disk cannot tell whether a process elsewhere still runs: if it does not, delete {lock_file}.)"


def _place(folder: Path) -> Path:
    """Beside the folder, which may be deleted. In it, where it is a disk of its own: containers share no more than that."""
    folder = folder.resolve()
    is_own_disk = folder.is_dir() and (os.path.ismount(folder) or not os.access(folder.parent, os.W_OK))
    return (folder if is_own_disk else folder.parent) / f".{folder.name}.lock"


def _take(path: Path) -> BaseFileLock:
    """Return the lock, held, in any thread's name; raise `Timeout` where another process holds it.

    On disks without flock it is a file that says who made it. filelock removes it when that process of this host is gone.
    """
    try:
        lock = FileLock(path, timeout=0, thread_local=False, **NO_FALLBACK)
        lock.acquire()
        return lock
    except (NotImplementedError, OSError) as error:  # the first is filelock 3's word for it
        if isinstance(error, OSError) and error.errno not in NO_FLOCK:
            raise
    soft = path.with_name(f"{path.name}.soft")
    lock = SoftFileLock(soft, timeout=SOFT_LOCK_SECONDS, thread_local=False)
    if lock.is_lock_held_by_us:  # by what this process was before it replaced itself
        soft.unlink(missing_ok=True)
    lock.acquire()
    return lock
