"""Plain and compressed files as streams of bytes, and checks that they contain text."""

import bz2
import codecs
import csv
import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError

INFLATED_BLOCK, SAMPLE_BLOCK = 1 << 18, 1 << 9
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
LONGEST_RECORD = 128 << 20  # bytes; a jsonl line or a json file must fit in memory
PACKED_STORE = ".tar.zst"
# Errors of reading damaged files, or parts of files that became shorter.
DAMAGE = (ValueError, OSError, EOFError, IndexError, RecursionError, csv.Error, zlib.error)
TOLERATED_SHARE = 0.01  # up to this share, unclean text is replaced or skipped, and counted
# Binary files whose heads can have little more than text: PDF, Parquet, Avro, NumPy, tar.
SIGNATURES = re.compile(rb"%PDF-|PAR1[^ -~]|Obj\x01|\x93NUMPY|.{257}ustar", re.DOTALL)
JAPANESE = re.compile(rb"\x1b\$[B@][\n -~]*")  # in ISO-2022-JP, whose bytes are all ASCII
NOT_OF_TEXT = bytes({*range(32), 127} - {*b"\a\b\t\n\f\r\x1b"})  # control characters


class UnreadableError(UserError):
    """Error for a damaged file or a wrong file suffix. If the file was found in a folder, it is skipped and counted."""


class BinaryError(UnreadableError):
    """Error for a binary file."""


class NoTextColumnError(UnreadableError):
    """Error for a file of records whose text column cannot be determined."""


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of reading `path` into an `UnreadableError`."""
    try:
        yield
    except Exception as error:
        from pyarrow import ArrowException  # only some of these are ValueErrors

        if not isinstance(error, (*DAMAGE, ArrowException)):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:300]
        remedy = "fix it, decompress it or exclude it" if is_compressed(path) else "fix it or exclude it"
        raise UnreadableError(f"{path} cannot be read: {reason}; {remedy}.") from error


def _zst(file: str | BinaryIO) -> BinaryIO:
    """Open a .zst file. zstandard's own reader ends silently in a truncated frame."""
    import pyarrow as pa

    return pa.CompressedInputStream(file, "zstd")


DECOMPRESSORS: dict[str, Callable[[str | BinaryIO], BinaryIO]] = {".gz": gzip.open, ".bz2": bz2.open, ".zst": _zst}


def is_compressed(path: str) -> bool:
    return os.path.splitext(path.lower())[1] in DECOMPRESSORS


def is_packed(path: str) -> bool:
    """Return whether a file is compressed and therefore smaller than its text."""
    return is_compressed(path) or path.lower().endswith(".parquet")


def reading_suffix(path: str) -> str:
    """Return the suffix if it also decides how a file is read: decompressed, or with other separators."""
    return os.path.splitext(path.lower())[1] if is_compressed(path) or suffix(path) == ".tsv" else ""


def suffix(path: str) -> str:
    """Return the suffix of the content: `.jsonl` for `a.jsonl.gz`."""
    root, ending = os.path.splitext(path.lower())
    return os.path.splitext(root)[1] if ending in DECOMPRESSORS else ending


def opened(path: str, limit: int | None = None) -> BinaryIO:
    """Open a file, decompressed according to its suffix. `limit` reads only the lines in about its first `limit` bytes.
    If an archive is truncated or damaged, reading it raises an error that `readable` catches."""
    decompressed = DECOMPRESSORS.get(os.path.splitext(path.lower())[1])
    if decompressed and not os.path.getsize(path):
        raise EOFError("it is empty")
    if limit is None:
        return io.BufferedReader(decompressed(path), INFLATED_BLOCK) if decompressed else open(path, "rb")
    with open(path, "rb") as file:
        head = file.read(limit)
    if decompressed:
        file, head = decompressed(io.BytesIO(head)), bytearray()
        try:
            while block := file.read1(SAMPLE_BLOCK):
                head += block
        except (EOFError, OSError) as error:  # the archive ends at the limit, or is damaged
            if not isinstance(error, EOFError) and "Truncated" not in str(error):
                raise
    return io.BytesIO(head[: head.rfind(b"\n") + 1] or head)


def head(path: str) -> bytes:
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def check_text(head: bytes, path: str, may_skip: bool = False) -> None:
    """Raise a `BinaryError` if a file that begins with `head` is binary, and an `UnreadableError` if it is UTF-16 with
    its mark or ISO-2022-JP, or if it may be skipped and too much of `head` is not UTF-8."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnreadableError(f"{path} is UTF-16 text; save it as UTF-8.")
    limit = TOLERATED_SHARE * len(head)
    valid, length = codecs.utf_8_decode(head, "ignore", False)  # an incomplete last character does not count
    invalid = 0 if head.isascii() else length - len(valid.encode())
    looks_compressed = invalid > limit and len(head) - len(head.translate(None, NOT_OF_TEXT)) > limit
    # The lengths and versions in the first bytes of most binary files have several NUL bytes.
    if looks_compressed or SIGNATURES.match(head) or head.count(0) > max(1, limit) or head[:32].count(0) > 2:
        remedy = "unpack it or convert it to text"
        if path.endswith(PACKED_STORE):
            remedy += f"; if it is a packed token store, unpack it with {unpack_command(path)}"
        raise BinaryError(f"{path} is a binary file; {remedy}.")
    if sum(map(len, JAPANESE.findall(head))) > limit:
        raise UnreadableError(f"{path} is ISO-2022-JP text; save it as UTF-8.")
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
