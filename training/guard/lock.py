"""One run a folder: a process that trains in it holds a lock, and a second one reads who that is.

The lock belongs to the process: the system frees it when the process ends, however it ends, so a file that was left behind
locks nothing. What the holder notes about itself is read for the sentence alone.
"""

import errno
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from inspect import signature
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from errors import UserError, disk_errors

# Not filelock's own fallback, which version 4 lets one switch off: it uses the same file, and the empty one that a lock leaves
# would lock forever there.
NO_FALLBACK = {"fallback_to_soft": False} if "fallback_to_soft" in signature(BaseFileLock.__init__).parameters else {}
NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# For a holder that is about to end: one that has lost its launcher still saves. filelock takes over a soft lock with garbage in
# it after seeing it unchanged for 2 s.
PATIENCE = 30.0


class RunLock:
    """Held by the main process of a run, from before it looks into the folder until it is done with it.

    A process that replaces itself (`os.execv`) loses the lock and takes it again.
    """

    def __init__(self, folder: str | Path, say: Callable[[str], None] = print, patience: float = PATIENCE):
        """`patience`: seconds to wait for a holder to end."""
        self.folder, self.say, self.patience = Path(folder), say, patience
        place = self.folder.resolve()
        # Beside the folder, which may be deleted. In it, where it is a disk of its own: containers share no more than that.
        is_own_disk = place.is_dir() and (os.path.ismount(place) or not os.access(place.parent, os.W_OK))
        self.path = (place if is_own_disk else place.parent) / f".{place.name}.lock"
        self.note = self.path.with_name(f"{self.path.name}.txt")
        self.lock: BaseFileLock | None = None

    def acquire(self) -> None:
        """Take the lock; raise a `UserError` where another process keeps it, or its file cannot be written."""
        with disk_errors(self.path, "name another --output_dir"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = _take(self.path, 0)
            except Timeout:
                self.say(
                    f"{self.folder} is held by {self._holder()}; waiting up to {self.patience:g} s for its end ..."
                )
                self.lock = self._take_patiently()
        with suppress(OSError):  # the note is for the sentence alone
            since = f"{datetime.now():%Y-%m-%d %H:%M}"
            self.note.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8")

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
            sentence = f"{self.folder} is being trained by {self._holder()}; wait for it, stop it, or name another --output_dir."
            if (file := Path(refused.lock_file)) != self.path:
                sentence += (
                    f" (This disk cannot tell whether a process elsewhere still runs: if it does not, delete {file}.)"
                )
            raise UserError(sentence) from None

    def _holder(self) -> str:
        with suppress(OSError, ValueError):
            if noted := re.fullmatch(r"(process \d+ on \S+ since [\d :-]+)\n", self.note.read_text(encoding="utf-8")):
                return noted[1]
        return "another process"


def _take(path: Path, patience: float) -> BaseFileLock:
    """Return the lock, held, in any thread's name; raise `Timeout` where another process holds it for `patience` seconds.

    On disks without flock it is a file that says who made it. filelock removes it when that process of this host is gone.
    """
    try:
        lock = FileLock(path, timeout=patience, thread_local=False, **NO_FALLBACK)
        lock.acquire(poll_interval=0.25)
        return lock
    except (NotImplementedError, OSError) as error:  # the first is filelock 3's word for it
        if isinstance(error, OSError) and error.errno not in NO_FLOCK:  # as a Timeout
            raise
    soft = path.with_name(f"{path.name}.soft")
    lock = SoftFileLock(soft, timeout=patience, thread_local=False)
    if lock.is_lock_held_by_us:  # by what this process was before it replaced itself
        soft.unlink(missing_ok=True)
    lock.acquire(poll_interval=0.25)
    return lock
