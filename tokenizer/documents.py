"""Reading: stretches of files and Hub datasets as documents in pieces of about a megabyte, so that none has to fit in memory.

A plain text file is one document, or each of its lines or paragraphs is; so is each record of a jsonl, json, csv or parquet
file or of a Hub dataset. What is broken is mended or skipped, and counted. Local files are read here, because one broken
line or byte ends the readers of `datasets`; Hub datasets are streamed through it.
"""

import codecs
import csv
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TextIO

from errors import UserError
from tokenizer import files
from tokenizer.chat import ChatTemplate
from tokenizer.files import UnreadableError

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 1 << 20
LONGEST_RUN = (
    16 << 20
)  # characters; text without any place to cut is one piece up to this, and beyond it is cut and counted
LONGEST_RECORD = 128 << 20  # bytes of a line of jsonl, or of a json file: it has to fit in memory
HEAD_BYTES = 8192
NUL_SHARE = 0.01  # more of them, and a file is no text
TEXT_COLUMNS, CHAT_COLUMNS = ("text", "content"), ("messages", "conversations")
SHORTER = "it has become shorter since its parts were planned"
NUMBER = re.compile(r"[-+.\d]+")

# Places where the word patterns of GPT-2, Llama 3 (cl100k) and o200k all end a word.
BETWEEN_WORDS = r"(?:\S(?= \S)|[^\W\d_](?=[,.;:!?，。、；：！？])|[A-Za-z](?=[0-9])|[^\W_](?=\r?\n))"  # noqa: RUF001
BEFORE_LINE_BREAK = r"\S(?=\r?\n)"  # a word's end in GPT-2's pattern only, and so for our own BPE
LAST_CUTS = [re.compile(f".*{place}", re.DOTALL) for place in (BETWEEN_WORDS, BEFORE_LINE_BREAK)]
FIRST_CUTS = [re.compile(place) for place in (BETWEEN_WORDS, BEFORE_LINE_BREAK)]
SURROGATES = re.compile("[\ud800-\udfff]")
ASCII_TEXT = re.compile(rb"[\t\n\r -~]{8,}")


class Piece(NamedTuple):
    """A stretch of one document. Pieces of a document come in order, one document after the other."""

    text: str
    starts_document: bool
    ends_document: bool
    control: str | None = None  # a control token that follows the text, in a chat


@dataclass(frozen=True)
class Stretch:
    """What is read at a time: a file or a part of it, or a shard of a Hub dataset.

    `start` and `stop` are bytes; row groups of a parquet file; `start` alone is the number of a shard.
    """

    path: str
    kind: Literal["text", "jsonl", "json", "csv", "parquet", "hub"]
    start: int = 0
    stop: int | None = None  # None: to the end
    column: str | None = None  # of a record, which holds its text or its chat
    may_skip: bool = False  # where it cannot be read: it was found in a folder, not named

    @property
    def n_bytes(self) -> int:
        """Of a stretch of a text; of a parquet file, all of it."""
        size = os.path.getsize(self.path)
        return size if self.kind == "parquet" else (size if self.stop is None else self.stop) - self.start


@dataclass
class Counts:
    """What was read, and what was mended or left out."""

    documents: int = 0
    bytes: int = 0  # of their text, in UTF-8, as it was read
    blank: int = 0  # documents
    binary_files: int = 0
    bad_bytes: int = 0  # bytes that are not UTF-8, and lone surrogates: now U+FFFD
    empty_records: int = 0  # broken ones, and those without text
    cut_words: int = 0  # runs without any place to cut, which may have become other tokens for that
    first: dict[str, list] = field(default_factory=dict)  # where the first of each stands: a path, and a byte or a line
    tables: int = 0  # files of records without a column of text
    unreadable_files: int = 0  # or parts of them
    unreadable_bytes: int = 0  # of the files

    def note(self, name: str, number: int, path: str, **place: Any) -> None:
        if number:
            setattr(self, name, getattr(self, name) + number)
            self.first.setdefault(name, [path, place])

    def note_unreadable(self, path: str, n_bytes: int, error: UserError) -> None:
        self.note("unreadable_files", 1, path, why=str(error).removesuffix("."))
        self.unreadable_bytes += n_bytes

    def add(self, later: "Counts") -> None:
        for name, value in vars(later).items():
            if name != "first":
                setattr(self, name, getattr(self, name) + value)
        self.first = later.first | self.first


@dataclass
class Reader:
    """Reads stretches. `counts` grows with what is read."""

    sample_by: str = "document"  # what is a document in a plain text: document, paragraph or line
    chat: ChatTemplate | None = None
    counts: Counts = field(default_factory=Counts)

    def pieces(self, stretch: Stretch) -> Iterator[Piece]:
        """Every document of a stretch that is not blank.

        Raises:
            UserError: a file that cannot be read to its end, unless it may be skipped: then its documents end there.
        """
        ended = True
        try:
            pieces = self._of_text(stretch) if stretch.kind == "text" else self._of_records(stretch)
            for piece in self._not_blank(pieces):
                ended = piece.ends_document
                yield piece
        except UnreadableError as error:
            if not stretch.may_skip:
                raise
            self.counts.note_unreadable(stretch.path, stretch.n_bytes, error)
            if not ended:
                yield Piece("", False, True)

    def _not_blank(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        counts = self.counts
        held: list[Piece] = []  # the blank head of a document, until something visible follows
        blank = False  # so far; what continues a document from an earlier stretch is not
        for piece in pieces:
            text, starts, ends, control = piece
            blank = (blank or starts) and control is None and (not text or text.isspace())
            if blank and ends:
                counts.blank += 1
                held = []
            elif blank:
                held.append(piece)
            else:
                if held:
                    yield from self._counted(held)
                    held = []
                counts.documents += starts
                counts.bytes += len(text) if text.isascii() else len(text.encode())
                yield piece
        yield from self._counted(held)  # the next stretch goes on with it

    def _counted(self, blank: list[Piece]) -> list[Piece]:
        self.counts.documents += bool(blank)
        self.counts.bytes += sum(len(piece.text.encode()) for piece in blank)
        return blank

    def _of_text(self, stretch: Stretch) -> Iterator[Piece]:
        texts = BY[self.sample_by](self._blocks(stretch))
        if self.sample_by == "document":
            return self._in_pieces(texts, stretch.path, stretch.start == 0, stretch.stop is None)
        return self._in_pieces(texts, stretch.path)

    def _in_pieces(
        self, texts: Iterable[tuple[str, bool]], path: str, starts: bool = True, stops: bool = True
    ) -> Iterator[Piece]:
        """(text, whether a document ends with it) -> pieces, cut between words, so that they encode to the tokens of the
        whole. `starts` and `stops`: whether the first and the last text are the ends of a document."""
        rest, ends, searched = "", True, 0
        for text, ends in texts:
            rest += text
            if ends:
                yield Piece(rest, starts, True)
                rest, starts, searched = "", True, 0
            elif len(rest) > PIECE_BYTES:
                cut = self._cut(rest, searched, path)
                if cut:
                    yield Piece(rest[:cut], starts, False)
                    rest, starts = rest[cut:], False
                searched = 0 if cut else len(rest) - 2  # whether the last two are a place depends on what follows
        if not ends:
            yield Piece(rest, starts, stops)

    def _cut(self, text: str, searched: int, path: str) -> int:
        """How much to cut off: up to the last place between words; nothing where there is none; all where that is too long."""
        found = next(filter(None, (pattern.match(text, searched) for pattern in LAST_CUTS)), None)
        if found or len(text) <= LONGEST_RUN:
            return found.end() if found else 0
        self.counts.note("cut_words", 1, path)
        return len(text) - text.endswith("\r")  # a line break is not torn

    def _blocks(self, stretch: Stretch) -> Iterator[str]:
        """The text of a stretch of a file, a quarter of a piece at a time; nothing of a binary file."""
        path = stretch.path
        with readable(path):
            if stretch.start and is_binary(head(path), path):
                return
            start, stop, is_between_words = bounds(stretch, self.sample_by)
            self.counts.note("cut_words", not is_between_words, path)
            decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")(errors="surrogateescape")
            with files.opened(path) as file:
                position, size = file.seek(start) if start else 0, PIECE_BYTES // 4
                while block := file.read(size if stop is None else min(size, stop - position)):
                    if position == 0 and is_binary(block[:HEAD_BYTES], path):
                        self.counts.note("binary_files", 1, path)
                        return
                    position += len(block)
                    yield self._mended(decoder.decode(block), path)
                yield self._mended(decoder.decode(b"", final=True), path)

    def _mended(self, text: str, path: str, **place: Any) -> str:
        """`text` with U+FFFD for what is no character: surrogates, which also stand for bytes that are not UTF-8."""
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            text, bad = SURROGATES.subn("\ufffd", text)
            self.counts.note("bad_bytes", bad, path, **place)
        return text

    def _of_records(self, stretch: Stretch) -> Iterator[Piece]:
        path, column = stretch.path, stretch.column
        for record, place in records(stretch):
            value = record.get(column) if record is not None else None
            if isinstance(value, bytes):
                value = value.decode("utf-8", errors="surrogateescape")
            if isinstance(value, str):
                text = self._mended(value, path, **place)
                if len(text) <= PIECE_BYTES:
                    yield Piece(text, True, True)
                else:
                    yield from self._in_pieces(_in_blocks(text), path)
                continue
            if self.chat is None:
                self.counts.note("empty_records", 1, path, **place)
                continue
            try:
                segments = self.chat.segments(value)
            except ValueError as error:
                self.counts.note("empty_records", 1, path, **place, why=str(error))
                continue
            last = len(segments) - 1
            for i, (text, control) in enumerate(segments):
                *long, end = self._in_pieces(_in_blocks(self._mended(text, path, **place)), path, i == 0)
                yield from long
                yield end._replace(ends_document=i == last, control=control)


def _in_blocks(text: str) -> Iterator[tuple[str, bool]]:
    for start in range(0, len(text) or 1, PIECE_BYTES):
        yield text[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(text)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """
    Raises:
        UserError: what stands within fails to read `path`; an `UnreadableError` unless the file was changed meanwhile.
    """
    try:
        yield
    except (ValueError, OSError, RecursionError, csv.Error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:300]
        kind = UserError if isinstance(error, FileNotFoundError) or reason == SHORTER else UnreadableError
        raise kind(f"{path} cannot be read: {reason}; mend it or leave it out.") from error


# ---- what is a document in a plain text: blocks -> (text, whether a document ends with it) ----------------------------


def _whole(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    return ((block, False) for block in blocks)


def _lines(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Lines without their ends; one of more than a megabyte in several parts."""
    rest, within = "", False
    for block in blocks:
        *lines, rest = (rest + block).split("\n")
        for line in lines:
            yield line.removesuffix("\r"), True
        within = within and not lines
        if len(rest) > PIECE_BYTES:
            kept = -1 if rest.endswith("\r") else len(rest)  # which the line may end with
            yield rest[:kept], False
            rest, within = rest[kept:], True
    if rest or within:
        yield rest, True


def _paragraphs(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """What stands between blank lines."""
    open_, within = False, False  # a paragraph; a line
    for line, ends in _lines(blocks):
        if ends and not within and not line.strip():
            if open_:
                yield "", True
            open_ = False
        else:
            yield ("\n" + line if open_ and not within else line), False
            open_ = True
        within = not ends
    if open_:
        yield "", True


BY = {"document": _whole, "line": _lines, "paragraph": _paragraphs}
ENDS = {"line": re.compile(rb"\n"), "paragraph": re.compile(rb"\n[ \t\r]*\n")}


# ---- parts of files -----------------------------------------------------------------------------------------------------


def bounds(stretch: Stretch, sample_by: str) -> tuple[int, int | None, bool]:
    """Where the stretch of a file really begins and ends: its nominal bounds, moved on to the next place to cut. The two
    stretches that share a bound find the same place. Also whether no word is cut at its beginning.

    Raises:
        ValueError: the file has become shorter.
    """
    by = "line" if stretch.kind == "jsonl" else sample_by
    if max(stretch.start, stretch.stop or 0) > os.path.getsize(stretch.path):
        raise ValueError(SHORTER)
    start, is_between_words = (
        place_to_cut(stretch.path, stretch.start, by, stretch.stop) if stretch.start else (0, True)
    )
    if start is None:
        return stretch.stop, stretch.stop, True
    stop = stretch.stop and place_to_cut(stretch.path, stretch.stop, by)[0]
    return start, stop, is_between_words


def place_to_cut(path: str, offset: int, by: str, limit: int | None = None) -> tuple[int | None, bool]:
    """The first byte at or after `offset` where a document may be cut, or, where it is not to be cut, one begins; and True.
    False where there is no such place for a megabyte: the byte is that of the next character.

    None where no line or paragraph begins up to `limit`: each part of a line of gigabytes would read all that follows."""
    with open(path, "rb") as file:
        file.seek(offset - 1)
        if by != "document":
            return _end_of(ENDS[by], file, limit), True
        window = file.read(PIECE_BYTES)
    lead = 1  # bytes before the first character
    while lead < min(4, len(window)) and 0x80 <= window[lead] < 0xC0:
        lead += 1
    lead += window[lead - 1 : lead + 1] == b"\r\n"  # a line break is not torn
    text = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode(window[lead:])  # whole characters
    found = next(filter(None, (pattern.search(text) for pattern in FIRST_CUTS)), None)
    if found is None and len(window) < PIECE_BYTES:
        return offset - 1 + len(window), True  # the end of the file
    cut = len(text[: found.end()].encode("utf-8", errors="surrogateescape")) if found else 0
    return offset - 1 + lead + cut, found is not None


def _end_of(separator: re.Pattern, file: BinaryIO, limit: int | None) -> int | None:
    """The end of the next separator in `file`, or the end of the file; None where none begins up to `limit`."""
    position, held = file.tell(), b""
    while block := file.read(PIECE_BYTES):
        held += block
        if found := separator.search(held):
            return position + found.end()
        kept = held[-1024:]  # a separator may lie across blocks
        position, held = position + len(held) - len(kept), kept
        if limit is not None and position > limit:
            return None
    return position + len(held)


def head(path: str) -> bytes:
    with files.opened(path) as file:
        return file.read(HEAD_BYTES)


def is_binary(head: bytes, path: str) -> bool:
    """Whether a file that begins so is something else than text.

    Raises:
        UnreadableError: it is text of another encoding that is easily told.
    """
    refuse_utf16(head, path)
    return head.count(0) > NUL_SHARE * len(head)


def refuse_utf16(head: bytes, path: str) -> None:
    marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    halves = head[::2], head[1::2]
    if marked or any(not nul.strip(b"\0") and ASCII_TEXT.fullmatch(text) for text, nul in (halves, halves[::-1])):
        raise UnreadableError(f"{path} is UTF-16 text; save it as UTF-8.")


# ---- records: (a record or None for a broken one, where it stands) ------------------------------------------------------


def records(stretch: Stretch) -> Iterator[tuple[dict[str, Any] | None, dict[str, int]]]:
    """Yield records; raise a `UserError` for a file that cannot be read to its end, or a record that is too large."""
    with readable(stretch.path):
        if stretch.kind in ("jsonl", "json", "csv") and stretch.start == 0:
            refuse_utf16(head(stretch.path), stretch.path)
        yield from RECORDS[stretch.kind](stretch)


def _jsonl(stretch: Stretch) -> Iterator[tuple[dict | None, dict[str, int]]]:
    start, stop, _ = bounds(stretch, "line")
    with files.opened(stretch.path) as file:
        position = file.seek(start) if start else 0
        while (stop is None or position < stop) and (line := file.readline(LONGEST_RECORD)):
            if len(line) == LONGEST_RECORD:
                number = line_number(stretch.path, position)
                raise ValueError(f"line {number:,} is longer than {LONGEST_RECORD >> 20} MiB, too long for one record")
            record = line if position else line.removeprefix(codecs.BOM_UTF8)
            if record and not record.isspace():
                yield parsed(record), {"byte": position}
            position += len(line)


def line_number(path: str, byte: int) -> int:
    """The number of the line, from 1 on, in which a byte of the content of `path` stands."""
    number = 1
    with files.opened(path) as file:
        while byte > 0 and (block := file.read(min(byte, PIECE_BYTES))):
            number += block.count(b"\n")
            byte -= len(block)
    return number


def parsed(line: bytes) -> dict | None:
    try:
        record = json.loads(line.decode("utf-8", errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _json(stretch: Stretch) -> Iterator[tuple[dict | None, dict[str, int]]]:
    """One list of records or texts."""
    with files.opened(stretch.path) as file:
        content = file.read(LONGEST_RECORD)
    if len(content) == LONGEST_RECORD:
        raise ValueError(f"it is a list of more than {LONGEST_RECORD >> 20} MiB; write it as jsonl, a record a line")
    listed = json.loads(content.decode("utf-8-sig", errors="surrogateescape"))
    for i, record in enumerate(listed):
        record = {stretch.column or TEXT_COLUMNS[0]: record} if isinstance(record, str) else record
        yield (record if isinstance(record, dict) else None), {"record": i + 1}


def _csv(stretch: Stretch) -> Iterator[tuple[dict | None, dict[str, int]]]:
    csv.field_size_limit(LONGEST_RECORD)
    with files.text(stretch.path) as file:
        lines = _csv_lines(file)
        header = next(lines, "")
        delimiter = next((mark for mark in "\t,;" if mark in header), ",")
        reader = csv.DictReader(itertools.chain([header], lines), delimiter=delimiter)
        try:
            for record in reader:
                yield record, {"line": reader.line_num}
        except csv.Error as error:
            raise ValueError(f"{error}, in line {reader.line_num + 1:,}") from error


def _csv_lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST_RECORD):
        if len(line) == LONGEST_RECORD:
            raise csv.Error(f"it is longer than {LONGEST_RECORD >> 20} Mi characters, too long for one record")
        yield line


def _parquet(stretch: Stretch) -> Iterator[tuple[dict | None, dict[str, int]]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(stretch.path) as file:
            if max(stretch.start, stretch.stop or 0) > file.num_row_groups:
                raise ValueError(SHORTER)
            groups = list(range(stretch.start, file.num_row_groups if stretch.stop is None else stretch.stop))
            row = sum(file.metadata.row_group(i).num_rows for i in range(stretch.start))
            columns = stretch.column and [stretch.column]
            for batch in file.iter_batches(_rows_at_once(file.metadata, groups), row_groups=groups, columns=columns):
                for record in _rows(batch):
                    row += 1
                    yield record, {"record": row}
    except ArrowException as error:  # of which only some are ValueErrors
        raise ValueError(error) from error


def _rows_at_once(metadata: Any, groups: Iterable[int]) -> int:
    """Some megabytes of them."""
    parts = [metadata.row_group(i) for i in groups]
    bytes_, rows = sum(part.total_byte_size for part in parts), sum(part.num_rows for part in parts)
    return max(1, min(1024, 4 * PIECE_BYTES * rows // max(1, bytes_)))


def _rows(batch: "pa.RecordBatch") -> list[dict[str, Any]]:
    import pyarrow as pa

    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # the file promised UTF-8
        as_bytes = [
            column.cast(pa.large_binary())
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            else column
            for column in batch.columns
        ]
        return pa.RecordBatch.from_arrays(as_bytes, names=batch.schema.names).to_pylist()


def _hub(stretch: Stretch) -> Iterator[tuple[dict | None, dict[str, int]]]:
    from tokenizer import hub

    for i, record in enumerate(hub.opened(stretch.path).shard(stretch.start)):
        yield record, {"record": i + 1}


RECORDS = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet, "hub": _hub}


def text_column(record: dict[str, Any], wanted: str | None) -> str | None:
    """The column of a record that holds its text, or its chat; None where that cannot be told."""
    if wanted is not None:
        return wanted if wanted in record else None
    named = [name for name in TEXT_COLUMNS if name in record]
    chats = [name for name in CHAT_COLUMNS if isinstance(record.get(name), list)]
    if named or chats:
        return [*named, *chats][0]
    strings = [name for name, value in record.items() if isinstance(value, str) and not NUMBER.fullmatch(value)]
    return strings[0] if len(strings) == 1 else None
