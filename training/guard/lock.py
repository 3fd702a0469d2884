"""Lock of a run folder: only one process trains in it, and a second process reports the holder of the lock.

The lock belongs to the process: the system releases it when the process ends in any way, so a leftover file locks
nothing. The note of the holder is used only in the error message.
"""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from common.atomic import write_atomic
from common.errors import UserError, disk_errors

NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
PATIENCE = 30.0  # seconds for a holder that is about to end: after losing its launcher, it still saves


@contextmanager
def locked(folder: str | Path, say: Callable[[str], None] = print, patience: float = PATIENCE) -> Iterator[None]:
    """Lock a folder inside the `with` block. The holder of the lock has `patience` seconds to end. Raise a `UserError`
    if it does not, or if the file of the lock cannot be written.
    A process that replaces itself (`os.execve`) loses the lock and acquires it again."""
    place = Path(folder).resolve()
    # Next to the folder, which may be deleted; inside it if it is a disk, which may be all that containers share.
    is_own_disk = place.is_dir() and (os.path.ismount(place) or not os.access(place.parent, os.W_OK))
    path = (place if is_own_disk else place.parent) / f".{place.name}.lock"
    note = path.with_name(f"{path.name}.txt")
    # Without filelock's fallback to a lock that is a file: a killed process would leave it.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with disk_errors(path, "use another --output_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(Timeout):
                lock.acquire(timeout=0)
            if not lock.is_locked:
                say(f"{folder} is in use by {_holder(note)}; waiting up to {patience:g} s for it to end ...")
                lock.acquire(timeout=patience, poll_interval=0.25)
        except Timeout:
            problem = f"{folder} is in use by {_holder(note)}"
            raise UserError(f"{problem}; wait for it, stop it, or use another --output_dir.") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            say(f"WARNING: The disk of {folder} has no locks: a second run in it would not be refused.")
    with suppress(OSError):  # the note is used only in messages
        since = f"{datetime.now():%Y-%m-%d %H:%M}"
        write_atomic(note, f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                note.unlink(missing_ok=True)
            lock.release()


def _holder(note: Path) -> str:
    """Return the text that the holder of a lock left in its note."""
    with suppress(OSError, ValueError):  # the holder has not written it yet
        return note.read_text(encoding="utf-8").strip() or "another process"
    return "another process"
