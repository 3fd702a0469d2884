"""Documents, read in pieces of about a megabyte, so that no document has to fit in memory.

A document is a plain text file, or each of its lines or paragraphs, or a record of a jsonl, json, csv, parquet or arrow
file or of a Hub dataset. Broken text is replaced or skipped, and counted.
"""

import codecs
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.errors import UserError
from tokenizer.corpus import files
from tokenizer.corpus.byte_range import ByteRange, bounds, last_cut
from tokenizer.corpus.chat import ChatTemplate
from tokenizer.corpus.records import records

PIECE_BYTES = 1 << 20
FILES_PER_PROBLEM = 20  # number of files that a store names for each problem
LONGEST_RUN = 16 << 20  # characters; text without a place to cut stays one piece up to this length
SURROGATES = re.compile("[\ud800-\udfff]")
COPY = re.compile(r".*\.unfinished/text/(.*)\.jsonl")  # of a dataset, in the folder of unfinished work


class Piece(NamedTuple):
    """Piece of one document. Pieces come in order, one document after the other."""

    text: str
    starts_document: bool
    ends_document: bool
    control: str | None = None  # control token after the text, in a chat
    chat: str | None = None  # text of the whole chat, in its first piece


@dataclass
class Counts:
    """Counts of text that was read, replaced and left out."""

    documents: int = 0
    bytes: int = 0  # size of the documents' text as read, in UTF-8
    blank: int = 0  # number of blank documents
    binary_files: int = 0
    bad_bytes: int = 0  # bytes that are not UTF-8, and lone surrogates, all replaced by U+FFFD
    empty_records: int = 0  # broken records, and records without text
    cut_words: int = 0  # cuts in runs without a place to cut, which may change tokens
    first: dict[str, Any] = field(default_factory=dict)  # number and first place, by problem and path
    tables: int = 0  # number of files of records without a text column
    unreadable_files: int = 0  # number of unreadable files, or parts of files
    unreadable_bytes: int = 0  # total size of these files or parts, or of their records without text

    def note(self, name: str, number: int, path: str, **place: Any) -> None:
        if number:
            setattr(self, name, getattr(self, name) + number)
            self.first.setdefault(name, {}).setdefault(path, [0, place])[0] += number

    def note_unreadable(self, path: str, n_bytes: int, error: UserError) -> None:
        if name := {files.BinaryError: "binary_files", files.NoTextColumnError: "tables"}.get(type(error)):
            self.note(name, 1, path)
        else:
            self.note("unreadable_files", 1, path, why=str(error).removesuffix(".").removeprefix(f"{path} "))
            self.unreadable_bytes += n_bytes

    def add(self, counts: "Counts") -> "Counts":
        for name, value in vars(counts).items():
            if name != "first":
                setattr(self, name, getattr(self, name) + value)
        for name, places in counts.first.items():  # older versions recorded one path and place
            for path, (number, place) in (places if isinstance(places, dict) else {places[0]: (1, places[1])}).items():
                self.first.setdefault(name, {}).setdefault(path, [0, place])[0] += number
        return self

    def worst(self) -> dict[str, list]:
        """Return, by problem, the file with the most, its first place and `number`, and the places in all `files`."""
        worst = {}
        for name, places in self.first.items():
            path, (number, place) = max(places.items(), key=lambda item: item[1][0])
            words = dict(name_and_place(file, places[file][1]) for file in [*places][:FILES_PER_PROBLEM])
            worst[name] = [path, place | {"number": number, "files": words}]
        return worst


def name_and_place(path: str, place: dict[str, Any], with_lines: bool = False) -> tuple[str, str]:
    """Return the name of a file, and a place in it as the end of a sentence: `, line 3 (broken)`. `with_lines`: a byte
    becomes a line. The copy of a dataset that a program gave is named after the dataset, and its lines are records."""
    copy = COPY.fullmatch(path)
    if "byte" in place and (with_lines or copy):
        place = {"line": files.line_number(path, place["byte"]), **place}
    words = next((f", {unit} {place[unit]:,}" for unit in ("line", "byte", "record") if unit in place), "")
    words += f" ({place['why']})" if "why" in place else ""
    return (path, words) if copy is None else (copy[1], words.replace(", line", ", record", 1))


class Limit(NamedTuple):
    """Upper limits of the text to use: bytes in UTF-8, and documents, both without blank documents."""

    bytes: float = math.inf
    documents: float = math.inf

    def after(self, counts: Counts) -> "Limit":
        """Return what is left after the text of `counts`."""
        return Limit(self.bytes - counts.bytes, self.documents - counts.documents)

    def of_validation(self, fraction: float) -> "Limit":
        """Return the limit of the text of validation splits, which is used in addition to the training text."""
        return Limit(self.bytes * fraction, max(1, self.documents * fraction))


NO_LIMIT = Limit()


@dataclass
class Reader:
    """Reader that divides files into documents and updates `counts`. `is_cut`: the limit was reached."""

    sample_by: str = "document"  # unit of a plain text file that becomes a document: document, paragraph or line
    chat: ChatTemplate | None = None
    counts: Counts = field(default_factory=Counts)
    limit: Limit = NO_LIMIT
    is_cut: bool = False

    def pieces(self, part: ByteRange) -> Iterator[Piece]:
        """Yield the pieces of all documents that are not blank.
        Raise a `UserError` if the file cannot be read to its end. A file that may be skipped ends there instead. If too
        many of its records have no text, such a file counts as unreadable, by their share of its bytes."""
        if self.is_cut:
            return
        counts = self.counts
        empty, others = counts.empty_records, counts.documents + counts.blank  # before this part
        is_complete, bad, number = True, 1, 1  # the share of an unreadable file: bad of number
        try:
            for piece in self._of_text(part) if part.kind == "text" else self._of_records(part):
                is_whole = piece.starts_document and piece.ends_document and piece.control is None
                if is_whole and (not piece.text or piece.text.isspace()):
                    counts.blank += 1
                    continue
                if (counted := self._counted(piece)) is not None:
                    yield counted
                if self.is_cut:
                    return
                is_complete = piece.ends_document
            bad = counts.empty_records - empty
            number = bad + counts.documents + counts.blank - others
            if part.may_skip and bad > files.TOLERATED_SHARE * number:
                _, place = counts.first["empty_records"][part.path]
                _, words = name_and_place(part.path, place, not part.start)  # later parts would read the lines before
                raise files.UnreadableError(
                    f"{part.path} has no text in {bad:,} of {number:,} records, the first in{words[1:]}."
                )
        except files.UnreadableError as error:
            if not part.may_skip:
                raise
            if counts.empty_records > empty:  # the damage explains them
                counts.empty_records = empty
                del counts.first["empty_records"][part.path]
                counts.first = {name: places for name, places in counts.first.items() if places}
            counts.note_unreadable(part.path, part.n_bytes * bad // number, error)
            if not is_complete:
                yield Piece("", False, True)

    def _counted(self, piece: Piece) -> Piece | None:
        """Count and return a piece, or None if the limit leaves nothing of its document. The piece at the limit is cut
        between words and ends its document."""
        text, starts = piece.text, piece.starts_document
        size, remainder = len(text) if text.isascii() else len(text.encode()), self.limit.after(self.counts)
        if size > remainder.bytes:
            text = text.encode()[: int(remainder.bytes)].decode(errors="ignore")
            text = text[: last_cut(text, 0) or (0 if self.counts.bytes else len(text))]
            piece = piece._replace(text=text, ends_document=True, control=None)
            size, self.is_cut = len(text.encode()), True
        if starts and (remainder.documents < 1 or (self.is_cut and not text)):
            self.is_cut = True
            return None
        self.counts.documents += starts
        self.counts.bytes += size
        return piece

    def _of_text(self, part: ByteRange) -> Iterator[Piece]:
        texts = SPLITTERS[self.sample_by](self._blocks(part))
        is_part = self.sample_by == "document"  # false for lines and paragraphs, which are not divided
        return self._in_pieces(texts, part.path, not (is_part and part.start), not is_part or part.stop is None)

    def _of_records(self, part: ByteRange) -> Iterator[Piece]:
        path = part.path
        for record, place in records(part):
            value = record.get(part.column) if record is not None else None
            if isinstance(value, bytes):
                value = value.decode("utf-8", errors="surrogateescape")
            try:
                segments = [(value, None)] if isinstance(value, str) else self.chat.segments(value) if self.chat else []
            except ValueError as error:
                segments, place = [], place | {"why": str(error)}
            if record is None:
                place = place | {"why": "broken"}
            if not segments:
                self.counts.note("empty_records", 1, path, **place)
            segments = [(self._valid(text, path, **place), control) for text, control in segments]
            pieces = self._of_segments(segments, path)
            if len(segments) > 1:
                yield next(pieces)._replace(chat="".join(text for text, _ in segments))
            yield from pieces

    def _of_segments(self, segments: list[tuple[str, str | None]], path: str) -> Iterator[Piece]:
        """Yield the pieces of one document from pairs: text, and the control token after it or None."""
        final = len(segments) - 1
        for i, (text, control) in enumerate(segments):
            if len(text) > PIECE_BYTES:
                places = range(0, len(text), PIECE_BYTES)
                blocks = ((text[at : at + PIECE_BYTES], at == places[-1]) for at in places)
                *long, end = self._in_pieces(blocks, path, i == 0)
                yield from long
                yield end._replace(ends_document=i == final, control=control)
            else:
                yield Piece(text, i == 0, i == final, control)

    def _in_pieces(
        self, texts: Iterable[tuple[str, bool]], path: str, starts: bool = True, stops: bool = True
    ) -> Iterator[Piece]:
        """Yield pieces, cut between words, from pairs (text, whether a document ends with it).
        `starts`: whether the first text begins a document. `stops`: whether the last text ends one."""
        head, ends, position = "", True, 0
        for text, ends in texts:
            head += text
            if ends:
                yield Piece(head, starts, True)
                head, starts, position = "", True, 0
            elif len(head) > PIECE_BYTES:
                end = last_cut(head, position)
                if not end and len(head) > LONGEST_RUN:
                    self.counts.note("cut_words", 1, path)
                    end = len(head) - head.endswith("\r")  # never cut within a line break
                if end:
                    yield Piece(head[:end], starts, False)
                    head, starts = head[end:], False
                position = 0 if end else len(head) - 2  # a cut at the last two characters depends on the next text
        if not ends:
            yield Piece(head, starts, stops)

    def _blocks(self, part: ByteRange) -> Iterator[str]:
        """Yield the text of a part of a file in quarters of a piece."""
        path = part.path
        with files.readable(path):
            start, stop, is_between_words = bounds(part, self.sample_by)
            self.counts.note("cut_words", not is_between_words, path)
            decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")(errors="surrogateescape")
            with files.opened(path, part.limit) as file:
                position, size = file.seek(start) if start else 0, PIECE_BYTES // 4
                while block := file.read(size if stop is None else min(size, stop - position)):
                    if position == 0:
                        files.check_text(block[: files.HEAD_BYTES], path, part.may_skip)
                    position += len(block)
                    yield self._valid(decoder.decode(block), path)
                yield self._valid(decoder.decode(b"", final=True), path)

    def _valid(self, text: str, path: str, **place: Any) -> str:
        """Replace surrogates with U+FFFD. Surrogates also represent bytes that are not UTF-8."""
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            text, bad = SURROGATES.subn("\ufffd", text)
            self.counts.note("bad_bytes", bad, path, **place)
        return text


# ---- splitters of plain text: blocks -> (text, whether a document ends with it) -----------------------------------


def _lines(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield lines without line ends. A line of more than a megabyte comes in several parts."""
    tail, is_within = "", False
    for block in blocks:
        *lines, tail = (tail + block).split("\n")
        for line in lines:
            yield line.removesuffix("\r"), True
        is_within = is_within and not lines
        if len(tail) > PIECE_BYTES:
            end = -1 if tail.endswith("\r") else len(tail)  # \r may belong to the line end
            yield tail[:end], False
            tail, is_within = tail[end:], True
    if tail or is_within:
        yield tail, True


def _paragraphs(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield paragraphs, which are separated by blank lines."""
    in_paragraph = in_line = False
    for line, ends in _lines(blocks):
        if ends and not in_line and not line.strip():
            if in_paragraph:
                yield "", True
            in_paragraph = False
        else:
            yield ("\n" + line if in_paragraph and not in_line else line), False
            in_paragraph = True
        in_line = not ends
    if in_paragraph:
        yield "", True


SPLITTERS = {"document": lambda blocks: ((block, False) for block in blocks), "line": _lines, "paragraph": _paragraphs}
