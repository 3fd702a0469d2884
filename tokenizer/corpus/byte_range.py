"""Byte ranges: parts of files that are read separately, and places at which a document can be cut.

A document is cut only at a byte that ends a word in the patterns of GPT-2, Llama 3 (cl100k) and o200k. Its parts
therefore encode to the same tokens as the whole.
"""

import codecs
import os
import re
from dataclasses import dataclass
from typing import BinaryIO, Literal

WINDOW_BYTES = 1 << 20  # size of the block that is searched for a place to cut

BETWEEN_WORDS = r"(?:\S(?= \S)|[^\W\d_](?=[,.;:!?，。、；：！？])|[A-Za-z](?=[0-9])|[^\W_](?=\r?\n))"  # noqa: RUF001
BEFORE_LINE_BREAK = r"\S(?=\r?\n)"  # ends a word only in GPT-2's pattern, which our own BPE uses
LAST_CUTS = [re.compile(f".*{place}", re.DOTALL) for place in (BETWEEN_WORDS, BEFORE_LINE_BREAK)]
FIRST_CUTS = [re.compile(place) for place in (BETWEEN_WORDS, BEFORE_LINE_BREAK)]
SEPARATORS = {"line": re.compile(rb"\n"), "paragraph": re.compile(rb"\n[ \t\r]*\n")}


@dataclass(frozen=True)
class ByteRange:
    """File, part of a file, or shard of a Hub dataset.
    `start` and `stop` count bytes, row groups of a parquet file, or record batches of an arrow file. For a shard,
    `start` is its number. A compressed or csv file is read whole. `limit`, for samples, reads only the lines in about
    the first `limit` bytes of such a file, or `limit` rows of a parquet file."""

    path: str
    kind: Literal["text", "jsonl", "json", "csv", "parquet", "arrow", "hub"]
    start: int = 0
    stop: int | None = None  # None means the end of the file
    column: str | None = None  # column with the text or chat of a record
    may_skip: bool = False  # an unreadable file is skipped: it was found in a folder, not given by name
    limit: int | None = None

    @property
    def n_bytes(self) -> int:
        """Size in bytes. A part of a parquet or arrow file has the size of the whole file."""
        size = os.path.getsize(self.path)
        return size if self.kind in ("parquet", "arrow") else (size if self.stop is None else self.stop) - self.start


def last_cut(text: str, start: int) -> int:
    """Return the last place to cut after `start`, or 0 if there is none."""
    return next((match.end() for pattern in LAST_CUTS if (match := pattern.match(text, start))), 0)


def bounds(part: ByteRange, by: str) -> tuple[int, int | None, bool]:
    """Return the actual first byte and end of a part, and whether it begins between words. `by`: see `place_to_cut`.
    Each nominal bound moves to the next place to cut, which is the same for the parts on both sides of it."""
    start, is_between_words = place_to_cut(part.path, part.start, by, part.stop) if part.start else (0, True)
    if start is None:
        return part.stop, part.stop, True
    return start, part.stop and place_to_cut(part.path, part.stop, by)[0], is_between_words


def place_to_cut(path: str, offset: int, by: str, limit: int | None = None) -> tuple[int | None, bool]:
    """Return the first byte at or after `offset` at which a document can be cut, and True.
    If `by` is `line` or `paragraph`, the byte is the beginning of one. Without a place to cut in the window, return the
    byte of the next character and False. The byte is None if no line or paragraph begins before `limit`: otherwise each
    part of a line of several gigabytes would read the rest of the line."""
    with open(path, "rb") as file:
        file.seek(offset - 1)
        if by != "document":
            return _end_of(SEPARATORS[by], file, limit), True
        window = file.read(WINDOW_BYTES)
    lead = re.match(rb".?[\x80-\xbf]{0,3}", window, re.DOTALL).end()  # number of bytes before the first character
    lead += window[lead - 1 : lead + 1] == b"\r\n"  # never cut within a line break
    text = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode(window[lead:])  # whole characters
    match = next(filter(None, (pattern.search(text) for pattern in FIRST_CUTS)), None)
    if match is None and len(window) < WINDOW_BYTES:
        return offset - 1 + len(window), True  # no place before the end of the file
    size = len(text[: match.end()].encode("utf-8", errors="surrogateescape")) if match else 0
    return offset - 1 + lead + size, match is not None


def _end_of(separator: re.Pattern, file: BinaryIO, limit: int | None) -> int | None:
    """Return the end of the next separator or of the file, or None if no separator begins before `limit`."""
    position, window = file.tell(), b""
    while block := file.read(WINDOW_BYTES):
        window += block
        if match := separator.search(window):
            return position + match.end()
        tail = window[-1024:]  # a separator can span two blocks
        position, window = position + len(window) - len(tail), tail
        if limit is not None and position > limit:
            return None
    return position + len(window)
