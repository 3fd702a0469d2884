"""Files, plain or compressed, as streams of bytes."""

import bz2
import gzip
import io
import math
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, TextIO

from errors import UserError


class UnreadableError(UserError):
    """A file that is damaged, or is something else than its name says. Found in a folder, it is skipped and counted."""


INFLATED_BLOCK = 1 << 18
ZST_BLOCK = 512  # bytes, all of which inflate at once: to 16 MiB in a bomb
ZST_WINDOW = 1 << 31  # of `zstd --long=31`, by which large crawls are packed
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200  # text packs 3 to 10 times smaller, logs 50 times


def _gz(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(gzip.GzipFile(fileobj=file).read, INFLATED_BLOCK), b"")


def _bz2(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(bz2.BZ2File(file).read, INFLATED_BLOCK), b"")


def _zst(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW)
    frame = decompressor.decompressobj()
    try:
        while block := file.read(ZST_BLOCK):
            while block:
                if frame.eof:  # one after the other
                    frame = decompressor.decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data
    except zstandard.ZstdError as error:
        raise ValueError(error) from error
    if not frame.eof:
        raise EOFError("it ends too early")


INFLATERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {".gz": _gz, ".bz2": _bz2, ".zst": _zst}


def is_compressed(path: str) -> bool:
    return os.path.splitext(path.lower())[1] in INFLATERS


def is_packed(path: str) -> bool:
    """Whether a file is smaller than its text."""
    return is_compressed(path) or path.lower().endswith(".parquet")


def suffix(path: str) -> str:
    """What the content of a file is by its name: `.jsonl` of `a.jsonl.gz`."""
    root, last = os.path.splitext(path.lower())
    return os.path.splitext(root)[1] if last in INFLATERS else last


def opened(path: str) -> BinaryIO:
    """The content of a file, decompressed where its name says so.

    Raises:
        UnreadableError, when read: a truncated or damaged archive, or one that inflates without end.
    """
    if not is_compressed(path):
        return open(path, "rb")
    return io.BufferedReader(_Stream(_inflated(path)), INFLATED_BLOCK)


def text(path: str) -> TextIO:
    return io.TextIOWrapper(opened(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def inflated_head(path: str, n_bytes: int) -> Iterator[bytes]:
    """What the first `n_bytes` of a file hold, about, decompressed where its name says so.

    Raises:
        UnreadableError, when read: as `opened`.
    """
    if is_compressed(path):
        return _inflated(path, n_bytes)
    with open(path, "rb") as file:
        return iter([file.read(n_bytes)])


def _inflated(path: str, most: float = math.inf) -> Iterator[bytes]:
    """All of it, or what the first `most` bytes become, up to the block for which more had to be read."""
    inflated = 0
    with open(path, "rb") as file:
        try:
            if not os.fstat(file.fileno()).st_size:
                raise EOFError("it is empty")
            for block in INFLATERS[os.path.splitext(path.lower())[1]](file):
                inflated += len(block)
                if inflated > max(BOMB_BYTES, BOMB_RATIO * file.tell()):
                    raise UnreadableError(
                        f"{path} inflates to more than {BOMB_RATIO} times its size, which text does not; if it is text all "
                        f"the same, decompress it first."
                    )
                yield block
                if file.tell() > most:
                    return
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise UnreadableError(
                f"{path} is truncated or damaged ({error}); fetch it again or leave it out."
            ) from error


class _Stream(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]):
        self.blocks = blocks
        self.rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.rest:
            block = next(self.blocks, None)
            if block is None:
                return 0
            self.rest = memoryview(block)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count

    def close(self) -> None:
        self.blocks.close()
        super().close()
