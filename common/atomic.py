"""Atomic writes: a file or folder appears complete under its name, or not at all. Imports nothing large."""

import errno
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.removal import discard

# Errors of drives that do not support fsync. They are ignored, and the written data is accepted.
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EISDIR}
PIECE_BYTES = 1 << 20


def write_atomic(path: Path, text: str) -> None:
    """Write a text file, force it to disk, and rename it into place."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)  # a link would be followed
    draft.write_bytes(text.encode(errors="backslashreplace"))  # file names may not be UTF-8
    fsync(draft)
    os.replace(draft, path)


def fsync(path: Path) -> None:
    """Force a closed file, or the entries of a folder, to disk, if the drive supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)  # some drives cannot open folders
        try:
            if sys.platform == "darwin":  # where fsync leaves data in the drive's cache
                import fcntl  # Windows lacks it

                with suppress(OSError):  # not every drive can empty it
                    fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def set_default_permissions(folder: Path) -> None:
    """Give every file in a folder the user's default permissions. Only the owner can read safetensors' files."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError):  # some drives have no permissions
                path.chmod(0o666 & ~umask)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path) -> str:
    """Copy a file, force the copy to disk, and return the SHA-256 of the source.
    Raise an OSError also if the copy is too short, which some drives do not report."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(PIECE_BYTES):
            digest.update(piece)
            size += writer.write(piece)
    fsync(target)
    if (length := target.stat().st_size) != size:
        raise OSError(f"{target} has {length:,} bytes after {size:,} were written")
    return digest.hexdigest()


@contextmanager
def unfinished_path(path: Path, suffix: str = ".unfinished", patterns: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary name next to `path` for unfinished work. It is renamed to `path` on success and deleted on
    failure. `patterns`: for a folder, patterns of the names of its files (see `discard`); the folder is created."""
    draft = path.with_name(f".{path.name}{suffix}")
    discard(draft, patterns)
    try:
        if patterns:
            draft.mkdir()  # no parents: if a drive is unmounted, they would be created on the local disk
        yield draft
        for part in (*draft.glob("*/"), draft):
            fsync(part)
        if patterns:
            discard(path, patterns, replacement=draft)
        else:
            os.replace(draft, path)  # refuses to replace a folder
        fsync(path.parent)
    except BaseException:
        with suppress(OSError):  # the first failure is the one to report
            discard(draft, patterns)
        raise
