"""Plain and compressed files as streams of bytes, and checks that they contain text."""

import bz2
import codecs
import csv
import gzip
import io
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from tokenizer.corpus.byte_range import SHORTER

INFLATED_BLOCK = 1 << 18
ZST_BLOCK = 512  # bytes that are decompressed at once: they become 16 MiB in a decompression bomb
ZST_WINDOW = 1 << 31  # window of `zstd --long=31`, which large crawls are packed with
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200  # limits of decompressed text; text compresses by factors of 3 to 10, logs by 50
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
PACKED_STORE = ".tar.zst"
DAMAGE = (ValueError, OSError, EOFError, RecursionError, csv.Error, zlib.error)  # errors of reading damaged files
TOLERATED_SHARE = 0.01  # up to this share, unclean text is replaced or skipped, and counted
ASCII_TEXT = re.compile(rb"[\t\n\r -~]{8,}")
# Binary files whose heads can have little more than text: PDF, Parquet, Avro, NumPy, tar.
SIGNATURES = re.compile(rb"%PDF-|PAR1[^ -~]|Obj\x01|\x93NUMPY|.{257}ustar", re.DOTALL)
NOT_OF_TEXT = bytes({*range(32), 127} - {*b"\a\b\t\n\f\r\x1b"})  # control characters


class UnreadableError(UserError):
    """Error for a damaged file or a wrong file suffix. If the file was found in a folder, it is skipped and counted."""


class BinaryError(UnreadableError):
    """Error for a binary file."""


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of reading `path` into a `UserError`: an `UnreadableError` unless the file was changed or deleted."""
    try:
        yield
    except Exception as error:
        from pyarrow import ArrowException  # only some of these are ValueErrors

        if not isinstance(error, (*DAMAGE, ArrowException)):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:300]
        kind = UserError if isinstance(error, FileNotFoundError) or reason == SHORTER else UnreadableError
        raise kind(f"{path} cannot be read: {reason}; fix it or exclude it.") from error


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(file.read, INFLATED_BLOCK), b"")


def _zst(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a .zst file. zstandard's own stream reader ends silently in a truncated frame."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW)
    frame = decompressor.decompressobj()
    try:
        while block := file.read(ZST_BLOCK):
            while block:
                if frame.eof:  # the next frame follows
                    frame = decompressor.decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data
    except zstandard.ZstdError as error:
        raise ValueError(error) from error
    if not frame.eof:
        raise EOFError("it is truncated")


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": lambda file: _blocks(gzip.GzipFile(fileobj=file)),
    ".bz2": lambda file: _blocks(bz2.BZ2File(file)),
    ".zst": _zst,
}


def is_compressed(path: str) -> bool:
    return os.path.splitext(path.lower())[1] in DECOMPRESSORS


def is_packed(path: str) -> bool:
    """Return whether a file is compressed and therefore smaller than its text."""
    return is_compressed(path) or path.lower().endswith(".parquet")


def suffix(path: str) -> str:
    """Return the suffix of the content: `.jsonl` for `a.jsonl.gz`."""
    root, ending = os.path.splitext(path.lower())
    return os.path.splitext(root)[1] if ending in DECOMPRESSORS else ending


def opened(path: str, limit: int | None = None) -> BinaryIO:
    """Open a file, decompressed according to its suffix. `limit` reads only the lines in about its first `limit` bytes.
    If an archive is truncated, damaged or a decompression bomb, reading it raises an error that `readable` catches."""
    if limit is not None:
        with open(path, "rb") as file:
            head = b"".join(inflated(path, limit)) if is_compressed(path) else file.read(limit)
        return io.BytesIO(head[: head.rfind(b"\n") + 1] or head)
    return io.BufferedReader(_BlockStream(inflated(path)), INFLATED_BLOCK) if is_compressed(path) else open(path, "rb")


def inflated(path: str, limit: float = math.inf) -> Iterator[bytes]:
    """Yield the content of a compressed file until more than `limit` compressed bytes were read."""
    size = 0
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise EOFError("it is empty")
        for block in DECOMPRESSORS[os.path.splitext(path.lower())[1]](file):
            size += len(block)
            if size > max(BOMB_BYTES, BOMB_RATIO * file.tell()):
                raise ValueError(
                    f"it inflates to more than {BOMB_RATIO} times its size, which is unusual for text; if it is text, "
                    f"decompress it first"
                )
            yield block
            if file.tell() > limit:
                return


class _BlockStream(io.RawIOBase):
    """File object that reads from an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self.blocks, self.rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.rest:
            if (block := next(self.blocks, None)) is None:
                return 0
            self.rest = memoryview(block)
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count

    def close(self) -> None:
        self.blocks.close()
        super().close()


def head(path: str) -> bytes:
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def check_text(head: bytes, path: str, may_skip: bool = False) -> None:
    """Raise a `BinaryError` if a file that begins with `head` is binary, and an `UnreadableError` if it is UTF-16, or
    if it may be skipped and too much of `head` is not UTF-8."""
    has_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    even, odd = head[:512:2], head[1:512:2]
    if has_mark or any(not nul.strip(b"\0") and ASCII_TEXT.fullmatch(text) for text, nul in ((even, odd), (odd, even))):
        raise UnreadableError(f"{path} is UTF-16 text; save it as UTF-8.")
    limit = TOLERATED_SHARE * len(head)
    valid, length = codecs.utf_8_decode(head, "ignore", False)  # an incomplete last character does not count
    invalid = 0 if head.isascii() else length - len(valid.encode())
    is_compressed = invalid > limit and len(head) - len(head.translate(None, NOT_OF_TEXT)) > limit
    # The lengths and versions in the first bytes of most binary files have several NUL bytes.
    if is_compressed or SIGNATURES.match(head) or head.count(0) > max(1, limit) or head[:32].count(0) > 2:
        command = f"with {unpack_command(path)}" if path.endswith(PACKED_STORE) else "or convert it to text"
        raise BinaryError(f"{path} is a binary file; unpack it {command}.")
    if may_skip and invalid > limit:
        place = f"{invalid:,} of the first {len(head):,} bytes are invalid, the first in line {first_bad_line(path):,}"
        raise UnreadableError(f"{path} is not UTF-8 text: {place}; convert it to UTF-8.")


def unpack_command(archive: str | Path) -> str:
    """Return the command that unpacks a packed token store next to it."""
    path, folder = shlex.quote(str(archive)), shlex.quote(str(archive).removesuffix(PACKED_STORE))
    return f"`mkdir {folder} && tar --zstd -xf {path} -C {folder} --strip-components 1`"


def line_number(path: str, byte: int) -> int:
    """Return the number of the line, counted from 1, that contains a byte of the content."""
    number = 1
    with opened(path) as file:
        while byte > 0 and (block := file.read(min(byte, BLOCK_BYTES))):
            number += block.count(b"\n")
            byte -= len(block)
    return number


def first_bad_line(path: str) -> int:
    """Return the number of the first line that is not UTF-8, or of the last line if all lines are UTF-8."""
    number = 1
    with io.TextIOWrapper(opened(path), encoding="utf-8", errors="surrogateescape", newline="") as file:
        while (line := file.readline(BLOCK_BYTES)) and not re.search("[\ud800-\udfff]", line):
            number += line.endswith("\n")
    return number
