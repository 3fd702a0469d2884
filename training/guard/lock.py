"""Lock of a run folder: only one process trains in it, and a second process reports the holder of the lock.

The lock belongs to the process: the system releases it when the process ends in any way, so a leftover file locks nothing.
The note of the holder is used only in the error message.
"""

import errno
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from common.atomic import write_atomic
from common.errors import UserError, disk_errors

NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Seconds for a holder that is about to end: after losing its launcher, it still saves. filelock takes over a soft lock with
# invalid content after seeing it unchanged for 2 s.
PATIENCE = 30.0


class RunLock:
    """Lock that the main process of a run holds for as long as it uses the folder.
    A process that replaces itself (`os.execv`) loses the lock and acquires it again."""

    def __init__(self, folder: str | Path, say: Callable[[str], None] = print, patience: float = PATIENCE):
        """`patience` is the number of seconds to wait for the holder to end."""
        self.folder, self.say, self.patience = Path(folder), say, patience
        place = self.folder.resolve()
        # Next to the folder, which may be deleted; inside it if it is a separate disk, which may be all that containers share.
        is_own_disk = place.is_dir() and (os.path.ismount(place) or not os.access(place.parent, os.W_OK))
        self.path = (place if is_own_disk else place.parent) / f".{place.name}.lock"
        self.note = self.path.with_name(f"{self.path.name}.txt")
        self.lock: BaseFileLock | None = None

    def acquire(self) -> None:
        """Acquire the lock. Raise a `UserError` if another process keeps it, or its file cannot be written."""
        with disk_errors(self.path, "use another --output_dir"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = _take(self.path, 0)
            except Timeout:
                self.say(
                    f"{self.folder} is in use by {self._holder()}; waiting up to {self.patience:g} s for it to end ..."
                )
                self.lock = self._take_patiently()
        with suppress(OSError):  # the note is used only in messages
            since = f"{datetime.now():%Y-%m-%d %H:%M}"
            write_atomic(self.note, f"process {os.getpid()} on {socket.gethostname()} since {since}\n")

    def release(self, *_: object) -> None:
        if self.lock is not None:
            with suppress(OSError):
                self.note.unlink(missing_ok=True)
            self.lock.release()
            self.lock = None

    __enter__, __exit__ = acquire, release

    def _take_patiently(self) -> BaseFileLock:
        try:
            return _take(self.path, self.patience)
        except Timeout as refused:
            text = f"{self.folder} is in use by {self._holder()}; wait for it, stop it, or use another --output_dir."
            if (file := Path(refused.lock_file)) != self.path:
                text += (
                    f" (This disk does not show whether a process elsewhere still runs: if it does not, delete {file}.)"
                )
            raise UserError(text) from None

    def _holder(self) -> str:
        with suppress(OSError, ValueError):
            written = self.note.read_text(encoding="utf-8") if self.note.is_file() else ""
            if noted := re.fullmatch(r"(process \d+ on \S+ since [\d :-]+)\n", written):
                return noted[1]
        return "another process"


def _take(path: Path, patience: float) -> BaseFileLock:
    """Acquire and return the lock, not bound to a thread. Raise `Timeout` if another process holds it for `patience` seconds.
    On disks without flock, the lock is a file that names its process. filelock removes it if that process of this host has ended."""
    try:
        # filelock's own fallback uses the same file: an empty file left by a normal lock would then lock forever.
        lock = FileLock(path, timeout=patience, thread_local=False, fallback_to_soft=False)
        lock.acquire(poll_interval=0.25)
        return lock
    except OSError as error:  # Timeout is also an OSError
        if error.errno not in NO_FLOCK:
            raise
    soft = path.with_name(f"{path.name}.soft")
    lock = SoftFileLock(soft, timeout=patience, thread_local=False)
    if lock.is_lock_held_by_us:  # left by this process before it replaced itself
        soft.unlink(missing_ok=True)
    lock.acquire(poll_interval=0.25)
    return lock
