"""Atomic writes: a file or folder appears whole under its name, or not at all. Imports nothing large."""

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from removal import discard

# What drives answer that cannot be told to write now; what they were given is with them all the same.
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EISDIR}
PIECE_BYTES = 1 << 20


def write_atomic(path: Path, text: str) -> None:
    """Write a text file, force it to disk, and rename it into place."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(text.encode(errors="backslashreplace"))  # in names of files that are not UTF-8
        fsync(file)
    os.replace(unfinished, path)


def fsync(file: BinaryIO) -> None:
    """Force what was written to disk, so that it survives a power cut, where the drive can."""
    file.flush()
    with _where_possible():
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force a closed file, or the names in a folder, to disk, where the drive can."""
    with _where_possible():
        descriptor = os.open(path, os.O_RDONLY)  # some drives open no folders
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _where_possible() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path) -> str:
    """Copy a file, force the copy to disk, and return the SHA-256 of what was read. Raise an OSError also where the copy is
    shorter than it should be, which some drives do not report."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(PIECE_BYTES):
            digest.update(piece)
            size += writer.write(piece)
        fsync(writer)
    if (written := target.stat().st_size) != size:
        raise OSError(f"{target} has {written:,} bytes after {size:,} were written")
    return digest.hexdigest()


@contextmanager
def unfinished_path(path: Path, suffix: str = ".unfinished", known: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a name next to `path` for unfinished work, which replaces `path` by a rename, or is deleted where something fails.

    `known`: of a folder, the names of its files, see `discard`; the folder is made.
    """
    unfinished = path.with_name(f".{path.name}{suffix}")
    discard(unfinished, known)
    try:
        if known:
            unfinished.mkdir()  # without parents: the way to a drive that is gone must not be built on the disk below it
        yield unfinished
        for part in (*unfinished.glob("*/"), unfinished):
            fsync_path(part)
        if known:
            discard(path, known, replacement=unfinished)
        else:
            os.replace(unfinished, path)  # which refuses to replace a folder
        fsync_path(path.parent)
    except BaseException:
        with suppress(OSError):  # what failed above is the reason
            discard(unfinished, known)
        raise
