"""Corpus: the files and Hub datasets of `--input`, divided into units of work.

One process reads one unit at a time: 16 MiB of a file, some small files, a compressed file, or a shard of a Hub
dataset. Units do not depend on the number of processes, so neither does the store.
"""

import codecs
import hashlib
import itertools
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from common.errors import Problems, UserError, counted, first_of
from common.limits import setting
from tokenizer.corpus import chat, files
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.documents import NO_LIMIT, Counts, Limit, Reader, name_and_place
from tokenizer.corpus.file_finder import FileFinder, TextFile
from tokenizer.corpus.given import GivenDataset
from tokenizer.corpus.hub import HubDataset
from tokenizer.corpus.named_data import dataset_of, find
from tokenizer.corpus.records import CHAT_COLUMNS, TEXT_COLUMNS, arrow_batches, parsed, records, text_column

UNIT_BYTES = 16 << 20
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
SAMPLED_RECORDS = 100  # records read at the head of a file to find its text column
INFLATION = 4  # assumed compression ratio of compressed text, for estimates
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SKIPPED_SHARE = 0.5  # share of the bytes up to which files that were found are skipped because they cannot be read
LEFT_OUT = {
    "blank": ("blank document", None),
    "binary_files": ("binary file", None),
    "tables": ("table without a text column", "tables without a text column"),
    "unreadable_files": ("file that cannot be read in full", "files that cannot be read in full"),
    "bad_bytes": ("byte that is not UTF-8", "bytes that are not UTF-8"),
    "empty_records": ("record without text", "records without text"),
    "cut_words": ("text run cut without a word boundary", "text runs cut without a word boundary"),
    "links": ("link that was not followed", "links that were not followed"),
}


@dataclass
class CorpusArguments:
    text_column: str | None = setting(
        None, "Column of the text or chat; default: text, content, messages, conversations, or the only text column."
    )
    exclude: list[str] = setting(
        [], "Skip files in folders, globs and packages that match a pattern: '*.csv' node_modules 'tables/*.json'."
    )
    sample_by: Literal["document", "paragraph", "line"] = setting(
        "document", "One document of a plain text file: the whole file, a paragraph, or a line."
    )
    chat_template: str | None = setting(
        None, "Template that renders chats as text: a Jinja file, or chatml; by default the tokenizer's own template."
    )
    validation_fraction: float = setting(
        0.01,
        "Share of the text held out for validation, above 0 and below 1: whole documents, and the end of each "
        "document longer than both 1 MiB and this share of all text. If there is only one document, its end. If a "
        "dataset has a split `validation`, that split is used and nothing is held out.",
        above=0,
        below=1,
    )
    revision: str | None = setting(None, "Commit, tag or branch of Hub datasets without `@`, in place of the newest.")
    max_bytes: str | None = setting(None, "Use only the first so many bytes of text, such as 500MB or 2GB.")
    max_documents: int | None = setting(None, "Use only the first so many documents.", minimum=1)
    strict: bool = setting(False, "Refuse unclean text. Otherwise up to 1 percent is fixed or skipped, and counted.")

    @property
    def limit(self) -> Limit:
        number, size = math.inf, SIZE.fullmatch(self.max_bytes or "")
        if size:
            number = float(size[1]) * (1024 if size[3] else 1000) ** " kmgt".index(size[2].lower() or " ")
        return Limit(number, self.max_documents or math.inf)

    def problems(self) -> Iterator[str]:
        if self.max_bytes is not None and not 1 <= self.limit.bytes < math.inf:
            yield f"max_bytes is {self.max_bytes!r}; it must be a number above 0, with a unit or none: 500MB or 2GB."


@dataclass(frozen=True)
class Unit:
    copies: float  # number of times that its documents are used for training
    ranges: tuple[ByteRange, ...]
    val: bool | None = None  # whether it is validation text; None: decided by the hash of each document


def stream(units: list[Unit], reader: Reader) -> Iterable[dict[str, Any]]:
    """Return the text of units as an `IterableDataset` with one shard per unit. Its examples are the fields of `Piece`,
    and the `path` of their file. `reader` divides documents into pieces and counts them."""
    from datasets.iterable_dataset import ExamplesIterable, IterableDataset  # takes a second

    # `IterableDataset.from_generator` would leave a lock file in the cache for each unit.
    return IterableDataset(ExamplesIterable(_examples, {"units": units, "reader": reader}))


def _examples(units: list[Unit], reader: Reader) -> Iterator[tuple[int, dict[str, Any]]]:
    for part in itertools.chain.from_iterable(unit.ranges for unit in units):
        for i, piece in enumerate(reader.pieces(part)):
            yield i, piece._asdict() | {"path": part.path}


class TextError(UserError):
    """Error for text that cannot be used as it is: with the same text and settings, each command ends in it."""


@dataclass
class Source:
    """One input: local files, a dataset on the Hub, or a dataset of a Python program, which is copied to files."""

    entry: str
    copies: float  # its weight
    given: GivenDataset | None
    hub: HubDataset | None
    files: list[TextFile] = field(default_factory=list)


class Corpus:
    """Text of `inputs`.
    `has_chats` and `finder.skipped` are complete after `units`. `left_out` is the store's own folder, which is not
    read as text."""

    def __init__(
        self,
        inputs: list[str],
        arguments: CorpusArguments,
        weights: Iterable[float] = (),
        left_out: Path | None = None,
        given: Mapping[str, GivenDataset] = {},
    ):
        self.inputs, self.arguments = inputs, arguments
        self.sources = [
            Source(entry, copies, given.get(entry), None if entry in given else dataset_of(entry))
            for entry, copies in zip(inputs, list(weights) or [1.0] * len(inputs), strict=True)
        ]
        if revision := arguments.revision:
            unpinned = [source for source in self.sources if source.hub and source.hub.revision is None]
            if not unpinned:
                raise UserError(f"revision is {revision}, but no input is a Hub dataset without its own; leave it out.")
            for source in unpinned:
                source.hub = replace(source.hub, revision=revision)
        self.finder, self.has_chats = FileFinder(arguments.exclude), False
        own = os.path.abspath(left_out) if left_out is not None else None
        entries: dict[str, str] = {}  # by path
        for source in self.sources:
            entry, is_local = source.entry, source.hub is None and source.given is None
            for file in self.finder.find(entry) if is_local else ():
                path = os.path.abspath(file.path)
                is_own = own is not None and (path.startswith(f"{own}/") or path == f"{own}{files.PACKED_STORE}")
                if is_own and path != os.path.abspath(os.path.expanduser(entry)):
                    continue
                if path in entries:
                    raise UserError(
                        f"{file.path} is given twice, by {entries[path]} and by {entry}; give it once, with "
                        f"--weights 2 to use it twice."
                    )
                entries[path] = entry
                source.files.append(file)

    @property
    def all_files(self) -> list[TextFile]:
        return [file for source in self.sources for file in source.files]

    @property
    def hub(self) -> list[HubDataset]:
        """Datasets on the Hub."""
        return [source.hub for source in self.sources if source.hub is not None]

    @cached_property
    def size(self) -> int:
        """Total bytes of all local files."""
        return sum(file.size for file in self.all_files)

    @cached_property
    def text_sizes(self) -> list[int]:
        """Bytes of text per input, estimated for compressed files."""
        return [
            sum(file.size * (INFLATION if files.is_packed(file.path) else 1) for file in source.files)
            for source in self.sources
        ]

    @property
    def text_size(self) -> int:
        return sum(self.text_sizes)

    @cached_property
    def is_of_any_size(self) -> bool:
        """Whether the size of the text is unknown before it is read."""
        return bool(self.hub) or any(files.is_packed(file.path) for file in self.all_files)

    @property
    def most_bytes(self) -> float:
        """Upper bound of the bytes of text, infinite if it is of any size."""
        return min(math.inf if self.is_of_any_size else self.text_size, self.arguments.limit.bytes)

    @cached_property
    def has_unnamed_files(self) -> bool:
        return any(not file.is_named for file in self.all_files)

    def fingerprint(self) -> str:
        """Read all text and return a hash of its content, order and kind, and of how its files are read.
        Raise a `UserError` if a file changes meanwhile."""
        digest = hashlib.sha256()
        for file in self.all_files:
            try:
                with files.readable(file.path), open(file.path, "rb") as content:
                    hashlib.file_digest(content, lambda: digest)
                    kind = kind_of(file.path) + files.reading_suffix(file.path)
            except files.UnreadableError:
                if file.is_named:
                    raise
                kind = "unreadable"
            digest.update(f"\xff{kind}{'validation' * file.val}".encode())
        for hub in self.hub:
            digest.update(str(hub.pinned()).encode())
        self.refuse_changes("Run the command")
        return digest.hexdigest()

    def identity(self) -> list[list]:
        """Return name, size and modification time of every file, to compare before interrupted work resumes."""
        given = (source.given for source in self.sources if source.given is not None)
        datasets = itertools.chain.from_iterable(dataset.identity() for dataset in given)
        return [[file.path, file.size, file.modified] for file in self.all_files] + [*datasets]

    def refuse_changes(self, remedy: str) -> None:
        """Raise a `UserError` with `remedy` if a file was changed since it was found."""
        for file in self.all_files:
            current = TextFile.at(file.path)
            if (current.size, current.modified) != (file.size, file.modified):
                raise UserError(
                    f"{file.path} was changed while it was read: it had {file.size:,} bytes and now has "
                    f"{current.size:,}. {remedy} on a copy that does not change."
                )

    def write_given(self, folder: Path) -> None:
        """Write the text of the given datasets to files in `folder`, which `units` divides.
        Raise a `UserError` if a dataset fails, or its text column is ambiguous."""
        for source in self.sources:
            if (dataset := source.given) is None:
                continue
            for split in dataset.splits:
                with closing(dataset.records(split)) as records:
                    column = self._column(dataset.name, records, self.arguments.text_column)
                path = folder / dataset.name / f"{split}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                dataset.write(split, column or TEXT_COLUMNS[0], path, self.arguments.limit)
                with closing(dataset.records(split)) as records:
                    if path.stat().st_size and next(records, None) is None:  # nor were the first ones copied
                        raise UserError(
                            f"{dataset.name} has no records when it is read again, for example from a pipe; give a "
                            "file, or a dataset that can be read several times."
                        )
                source.files.append(TextFile.at(path, is_named=True, val=split == "validation"))

    def units(self) -> list[Unit]:
        """Divide the text into units. Text of validation splits comes first: of repeated documents, the first is kept.
        Raise a `UserError` if the text column of files is ambiguous (one line per file), or a Hub dataset is broken."""
        problems, tables, text, validation = [], {}, [], []  # tables: bytes, by what is wrong with them
        for source in self.sources:
            ranges: list[tuple[int, ByteRange]] = []
            is_one = len(source.files) == 1 and source.copies < 1 and self.arguments.sample_by == "document"
            name = self.arguments.text_column or getattr(find(source.entry), "text_column", None)
            if is_one and kind_of(source.files[0].path, name) == "text":
                problems.append(
                    f"{source.files[0].path} is one document, of which the weight {source.copies:g} uses all or "
                    "nothing; add --sample_by paragraph, or use a whole number."
                )
            for file in source.files:
                try:
                    (validation if file.val else ranges).extend(self._ranges(file, name))
                except files.UnreadableError as error:
                    if file.is_named:
                        problems.append(str(error))
                    elif isinstance(error, files.NoTextColumnError):
                        tables[f"{str(error)[:-1]}, or skip the file with --exclude."] = file.size
                    self.finder.skipped.note_unreadable(file.path, file.size, error)
            if source.hub is not None:
                for shards, result in zip(self._shards(source.hub, name), (ranges, validation), strict=False):
                    result += shards
            # Text of a packed file may be many times as large as the file.
            input_alone = source.entry if any(files.is_packed(file.path) for file in source.files) else None
            text += [((source.copies, input_alone), entry) for entry in ranges]
        units = [  # small files of several inputs are grouped, too: a shell expands *.txt to one input per file
            Unit(copies, group)
            for (copies, _), entries in itertools.groupby(text, key=operator.itemgetter(0))
            for group in _grouped(entry for _, entry in entries)
        ]
        if validation:  # with a limit, which applies to all validation text together, it is one unit
            is_limited = self.arguments.limit != NO_LIMIT
            groups = _grouped((0 if is_limited else size, part) for size, part in validation)
            units = [*(Unit(1.0, group, True) for group in groups), *(replace(unit, val=False) for unit in units)]
        if not problems and (not units or sum(tables.values()) > SKIPPED_SHARE * self.size):
            problems = [*tables]
        column, parts = self.arguments.text_column, [part for unit in units for part in unit.ranges]
        if not problems and column is not None and not any(part.column for part in parts):
            no_records = f"text_column is {column}, but {first_of(self.inputs)} has no records; leave it out."
            problems = [*tables] or [no_records]
        Problems(problems[:20]).refuse()
        self.check(self.finder.skipped, is_all=False)
        return units

    def check(self, counts: Counts, is_all: bool = True) -> None:
        """Raise a `TextError` if too much text is unclean. If `is_all` is false, more text follows, which counts."""
        inputs, left_out = first_of(self.inputs), self.left_out_words(counts)
        or_exclude = " or skip it with --exclude" * self.has_unnamed_files
        unclean = [name for name in LEFT_OUT if name in counts.first]  # no place is recorded for blank documents
        if self.arguments.strict and (unclean or self.finder.links):
            raise TextError(f"{inputs} is not clean ({left_out}), which --strict refuses{_worst(counts, *unclean)}.")
        if counts.unreadable_bytes > SKIPPED_SHARE * self.size:
            raise TextError(
                f"{inputs}: {counted(counts.unreadable_files, 'file')} of {counts.unreadable_bytes:,} bytes cannot be "
                f"read in full, more than half of {self.size:,} bytes{_worst(counts, 'unreadable_files')}; correct "
                f"that, or skip the file with --exclude."
            )
        if counts.documents == 0 and is_all:
            is_table = counts.empty_records and files.suffix(counts.worst()["empty_records"][0]) == ".csv"
            remedy = "; texts that contain separators need quotes" if is_table else ""
            raise TextError(
                f"{inputs} contains no text: {left_out or 'nothing was found'}{_worst(counts, *unclean)}{remedy}."
            )
        size = max(counts.bytes - 2 * counts.bad_bytes, 0 if is_all else self.most_bytes)  # U+FFFD takes three bytes
        if counts.bad_bytes > files.TOLERATED_SHARE * size:
            raise TextError(
                f"{inputs} is not UTF-8 text: {counts.bad_bytes:,} of {size:,} bytes are invalid"
                f"{_worst(counts, 'bad_bytes')}; convert it to UTF-8{or_exclude}."
            )
        if is_all and counts.empty_records > files.TOLERATED_SHARE * (counts.documents + counts.empty_records):
            is_broken = counts.worst()["empty_records"][1].get("why") == "broken"
            remedy = "correct that" if is_broken else "remove them, or name the right column with --text_column"
            raise TextError(
                f"{inputs}: {counts.empty_records:,} records have no text and {counts.documents:,} have text"
                f"{_worst(counts, 'empty_records')}; {remedy}{or_exclude}."
            )

    def left_out_words(self, counts: Counts) -> str:
        numbers = vars(counts) | {"links": self.finder.links}
        return ", ".join(counted(numbers[name], *words) for name, words in LEFT_OUT.items() if numbers[name])

    def _ranges(self, file: TextFile, text_column: str | None) -> list[tuple[int, ByteRange]]:
        """Return the sizes and ranges of the parts of a file that are read separately."""
        name, size, is_whole = file.path, file.size, files.is_compressed(file.path)
        kind, column = kind_of(name, text_column), None
        if kind != "text":
            head = (record for record, _ in records(ByteRange(name, kind, may_skip=not file.is_named)))
            column = self._column(name, head, text_column)
            if column is None:
                return []
        elif file.is_named or (size > UNIT_BYTES and not is_whole):  # others are checked when they are read
            with files.readable(name):
                files.check_text(files.head(name), name, not file.is_named)
        parts = [(size, 0, None)]
        if kind in ("parquet", "arrow"):
            parts = _row_groups(name, kind)
        elif kind in ("text", "jsonl") and not is_whole:
            bounds = [*range(0, size or 1, UNIT_BYTES), None]
            parts = [(min(UNIT_BYTES, size), start, stop) for start, stop in itertools.pairwise(bounds)]
        return [(n, ByteRange(name, kind, start, stop, column, not file.is_named)) for n, start, stop in parts]

    def _shards(self, hub: HubDataset, text_column: str | None) -> Iterator[list[tuple[int, ByteRange]]]:
        """Yield the sizes and ranges of the shards of a Hub dataset: of its text, then of its split `validation`."""
        snapshot = hub.pinned()
        for dataset in [snapshot, replace(snapshot, split="validation")][: len(snapshot.streams)]:
            column = self._column(str(hub), dataset.records(), text_column)
            shards = range(dataset.streams[0].num_shards if column is not None else 0)
            yield [(UNIT_BYTES, ByteRange(str(dataset), "hub", shard, column=column)) for shard in shards]

    def _column(self, label: str, records: Iterable[dict[str, Any] | None], name: str | None) -> str | None:
        """Return the text column, or None if there are no records."""
        head = list(itertools.islice(records, SAMPLED_RECORDS))
        valid = list(filter(None, head))
        if column := text_column(valid, name):
            self.has_chats |= any(chat.normalized(record.get(column)) for record in valid)
            return column
        if not valid:
            return TEXT_COLUMNS[0] if head else None
        problem = f"has no column {name!r}" if name else "has no obvious text column"
        # In csv, None is the key of the values beyond the header.
        names = ", ".join(" ".join(str(key).split()) for key in valid[0] if key is not None)
        raise files.NoTextColumnError(
            f"{label} {problem}; its columns are {names[:300] or 'none'}: choose one with --text_column."
        )


def _worst(counts: Counts, *names: str) -> str:
    """Return the file with the most of the first of `names`, and its first place, as the end of a sentence."""
    if not names or names[0] not in (worst := counts.worst()):
        return ""
    path, place = worst[names[0]]
    if names[0] == "bad_bytes" and not {"byte", "record"} & place.keys():
        place = place | {"line": files.first_bad_line(path)}
    name, words = name_and_place(path, place, with_lines=True)
    if len(place["files"]) == 1 or place["number"] == 1:
        return f"; the first in {name}{words}"
    return f"; {place['number']:,} of them in {name}{words.replace(', ', ', the first in ', 1)}"


def kind_of(path: str, text_column: str | None = None) -> str:
    """Return the kind of a file. A .json file that has neither records nor a list, such as a configuration, is text. An
    object on several lines is a record if it has the given column, or text, a chat or nothing in a usual column."""
    suffix = files.suffix(path)
    if suffix != ".json":
        return KINDS.get(suffix, "text")
    with files.readable(path), files.opened(path) as file:
        head = b"".join(file.readline(files.BLOCK_BYTES) for _ in range(SAMPLED_RECORDS)).removeprefix(codecs.BOM_UTF8)
        columns = {text_column, *TEXT_COLUMNS, *CHAT_COLUMNS}
        first_line, *lines = head.strip().split(b"\n")
        if record := parsed(first_line):
            return "jsonl" if lines or columns & record.keys() else "text"
        record = (parsed(head + file.read(files.LONGEST_RECORD)) if first_line.startswith(b"{") else None) or {}
    is_list = re.match(rb'\s*\[\s*["{\]]', head)
    values = [record[name] for name in columns & record.keys()]
    is_text = any(isinstance(value, str) or value in (None, []) or chat.normalized(value) for value in values)
    return "json" if is_list or is_text or text_column in record else "text"


def _row_groups(name: str, kind: str) -> Iterator[tuple[int, int, int]]:
    """Yield (bytes, first, end) of consecutive row groups, or record batches, that together have about one unit."""
    from pyarrow import parquet

    with files.readable(name):
        if kind == "arrow":
            sizes = [batch.nbytes for batch in arrow_batches(name)]
        else:
            with parquet.ParquetFile(name) as file:
                sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    start = size = 0
    for i, of_group in enumerate(sizes):
        size += of_group
        if size >= UNIT_BYTES or i == len(sizes) - 1:
            yield size, start, i + 1
            start, size = i + 1, 0


def _grouped(ranges: Iterable[tuple[int, ByteRange]]) -> Iterator[tuple[ByteRange, ...]]:
    """Yield ranges in order, with small ones grouped into one unit."""
    group, size = [], 0
    for n_bytes, part in ranges:
        if group and size + n_bytes > UNIT_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += n_bytes
    if group:
        yield tuple(group)
