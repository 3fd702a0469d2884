"""Lock of a run folder: only one process trains in it, and a second process reports the holder of the lock.

The lock belongs to the process: the system releases it when the process ends in any way, so a leftover file locks
nothing. The note of the holder is used only in the error message.
"""

import errno
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from common.atomic import write_atomic
from common.errors import UserError, disk_errors

NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
PATIENCE = 30.0  # seconds for a holder that is about to end: after losing its launcher, it still saves


class RunLock:
    """Lock that the main process of a run holds for as long as it uses the folder.
    A process that replaces itself (`os.execv`) loses the lock and acquires it again."""

    def __init__(self, folder: str | Path, say: Callable[[str], None] = print, patience: float = PATIENCE):
        """`patience` is the number of seconds to wait for the holder to end."""
        self.folder, self.say, self.patience = Path(folder), say, patience
        place = self.folder.resolve()
        # Next to the folder, which may be deleted; inside it if it is a disk, which may be all that containers share.
        is_own_disk = place.is_dir() and (os.path.ismount(place) or not os.access(place.parent, os.W_OK))
        self.path = (place if is_own_disk else place.parent) / f".{place.name}.lock"
        self.note = self.path.with_name(f"{self.path.name}.txt")
        # Without filelock's fallback to a lock that is a file: a killed process would leave it.
        self.lock = FileLock(self.path, thread_local=False, fallback_to_soft=False)

    def acquire(self) -> None:
        """Acquire the lock. Raise a `UserError` if another process keeps it, or its file cannot be written."""
        with disk_errors(self.path, "use another --output_dir"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._acquire_patiently()
            except Timeout:
                problem = f"{self.folder} is in use by {self._holder()}"
                raise UserError(f"{problem}; wait for it, stop it, or use another --output_dir.") from None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                self.say(f"WARNING: The disk of {self.folder} has no locks: a second run in it would not be refused.")
        with suppress(OSError):  # the note is used only in messages
            since = f"{datetime.now():%Y-%m-%d %H:%M}"
            write_atomic(self.note, f"process {os.getpid()} on {socket.gethostname()} since {since}\n")

    def _acquire_patiently(self) -> None:
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            self.say(
                f"{self.folder} is in use by {self._holder()}; waiting up to {self.patience:g} s for it to end ..."
            )
            self.lock.acquire(timeout=self.patience, poll_interval=0.25)

    def release(self, *_: object) -> None:
        if self.lock.is_locked:
            with suppress(OSError):
                self.note.unlink(missing_ok=True)
            self.lock.release()

    __enter__, __exit__ = acquire, release

    def _holder(self) -> str:
        with suppress(OSError, ValueError):
            note = self.note.read_text(encoding="utf-8") if self.note.is_file() else ""
            if match := re.fullmatch(r"(process \d+ on \S+ since [\d :-]+)\n", note):
                return match[1]
        return "another process"
