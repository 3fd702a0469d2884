"""Corpus: the files and Hub datasets of `--input`, divided into units of work.

One process reads one unit at a time: 16 MiB of a file, some small files, a compressed file, or a shard of a Hub dataset.
Units do not depend on the number of processes, so neither does the store.
"""

import codecs
import difflib
import glob
import hashlib
import itertools
import math
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

from common import schema
from common.errors import Problems, UserError, counted
from common.limits import setting
from tokenizer.corpus import chat, files
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.documents import NO_LIMIT, Counts, Limit, place_words
from tokenizer.corpus.files import TOLERATED_SHARE
from tokenizer.corpus.named_data import dataset_of, find, names
from tokenizer.corpus.records import CHAT_COLUMNS, TEXT_COLUMNS, arrow_batches, parsed, records, text_column

UNIT_BYTES = 16 << 20
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
SKIPPED_SHARE = 0.5  # share of the bytes up to which files that were found are skipped because they cannot be read
SAMPLED_RECORDS = 100  # records read at the head of a file to find its text column
INFLATION = 4.0  # assumed compression ratio of compressed text, for estimates
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}

# Text that every Python installation has: the sources of the standard library, without tests and data tables.
STANDARD_LIBRARY = "python-standard-library"
NOT_LIBRARY_SOURCE = {
    *("test", "tests", "idlelib", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data", "msilib", "entities.py", "stringprep.py", "locale.py"),
}

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
        None, "Column with the text or chat of a record; detected if it is named `text` or is the only text column."
    )
    exclude: list[str] = setting(
        [], "Skip files found in folders or by globs that match a pattern: '*.csv' node_modules 'tables/*.json'."
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
        "document longer than both 1 MiB and this share of all text. If there is only one document, its end. If a dataset has "
        "a split `validation`, that split is used and nothing is held out.",
        above=0,
        below=1,
    )
    revision: str | None = setting(None, "Commit, tag or branch of the Hub datasets, instead of the newest commit.")
    max_bytes: str | None = setting(None, "Use only the first so many bytes of text, such as 500MB or 2GB.")
    max_documents: int | None = setting(None, "Use only the first so many documents.", minimum=1)
    strict: bool = setting(False, "Refuse unclean text. Otherwise up to 1 percent is fixed or skipped, and counted.")

    @property
    def limit(self) -> Limit:
        size = SIZE.fullmatch(self.max_bytes or "")
        number = (
            float(size[1]) * (1024 if size[3] else 1000) ** " kmgt".index(size[2].lower() or " ") if size else math.inf
        )
        return Limit(number, self.max_documents or math.inf)

    def problems(self) -> Iterator[str]:
        if self.max_bytes is not None and not 1 <= self.limit.bytes < math.inf:
            yield f"max_bytes is {self.max_bytes!r}; it must be a number above 0 with or without a unit, such as 500MB or 2GB."


@dataclass(frozen=True)
class Unit:
    copies: float  # number of times that its documents are used for training
    ranges: tuple[ByteRange, ...]
    val: bool | None = None  # whether it is validation text; None: decided by the hash of each document


@dataclass(frozen=True, slots=True)
class TextFile:
    path: str
    size: int  # in bytes
    modified: int  # time in nanoseconds
    is_named: bool = False  # given on the command line, not found in a folder or by a glob
    val: bool = False  # of the split `validation` of a `DatasetDict`

    @staticmethod
    def at(path: str | Path, is_named: bool = False, val: bool = False) -> "TextFile":
        """Return the file at `path`. Raise a `UserError` if it cannot be read twice (a broken link, a pipe)."""
        try:
            status = os.stat(path)
        except OSError as error:
            what = "is a broken link" if os.path.islink(path) else f"cannot be read: {error.strerror}"
            raise UserError(f"{path} {what}; fix it or exclude it.") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is a pipe or a device, but the text is read twice; save it as a file first.")
        return TextFile(str(path), status.st_size, status.st_mtime_ns, is_named, val)


class NoTextColumnError(UserError):
    """Error for a file of records whose text column cannot be determined."""


class Corpus:
    """Text of `inputs`.
    `files` has one list per input. `links` counts links in folders, which are not followed. `has_chats` and `skipped` are
    complete after `units`. `left_out` is the store's own folder, which is not read as text."""

    def __init__(
        self, inputs: list[str], arguments: CorpusArguments, weights: Iterable[float] = (), left_out: Path | None = None
    ):
        self.inputs, self.arguments = inputs, arguments
        self.weights = list(weights) or [1.0] * len(inputs)
        self.hub = [dataset_of(entry) for entry in inputs]
        if arguments.revision is not None:
            self.hub = [hub and replace(hub, revision=arguments.revision) for hub in self.hub]
        self.files: list[list[TextFile]] = []
        self.links, self.has_chats, self.skipped = 0, False, Counts()
        own = os.path.join(os.path.abspath(left_out), "") if left_out is not None else None
        seen: dict[str, str] = {}
        for entry, hub in zip(inputs, self.hub, strict=True):
            self.files.append([])
            for file in self._find(entry) if hub is None else ():
                path = os.path.abspath(file.path)
                if own is not None and path.startswith(own):
                    continue
                if path in seen:
                    raise UserError(
                        f"{file.path} is given twice, by {seen[path]} and by {entry}; give it once, with --weights 2 to use "
                        f"it twice."
                    )
                seen[path] = entry
                self.files[-1].append(file)

    @property
    def all_files(self) -> list[TextFile]:
        return [file for of_entry in self.files for file in of_entry]

    @cached_property
    def size(self) -> int:
        """Total bytes of all local files."""
        return sum(file.size for file in self.all_files)

    @cached_property
    def text_sizes(self) -> list[int]:
        """Bytes of text per input, estimated for compressed files."""
        return [
            sum(int(file.size * (INFLATION if files.is_packed(file.path) else 1)) for file in of_entry)
            for of_entry in self.files
        ]

    @property
    def text_size(self) -> int:
        return sum(self.text_sizes)

    @property
    def most_bytes(self) -> float:
        """Upper bound of the bytes of text. It is infinite if the size is unknown before the text is read."""
        is_known = not any(self.hub) and not any(files.is_packed(file.path) for file in self.all_files)
        return min(self.text_size if is_known else math.inf, self.arguments.limit.bytes)

    def check(self, counts: Counts, is_all: bool = True) -> None:
        """Raise a `UserError` if too much text is unclean. If `is_all` is false, more text follows, and its size counts, too."""
        where, left_out = ", ".join(self.inputs), self.left_out_words(counts)
        or_exclude = " or skip it with --exclude" * any(not file.is_named for file in self.all_files)
        unclean = [name for name in LEFT_OUT if name in counts.first]  # no place is recorded for blank documents
        if self.arguments.strict and (unclean or self.links):
            raise UserError(f"{where} is not clean ({left_out}), which --strict refuses{_worst(counts, *unclean)}.")
        if counts.unreadable_bytes > SKIPPED_SHARE * self.size:
            raise UserError(
                f"{where}: {counted(counts.unreadable_files, 'file')} of {counts.unreadable_bytes:,} bytes cannot be read in full, "
                f"more than half of {self.size:,} bytes{_worst(counts, 'unreadable_files')}; correct that, or skip the file with --exclude."
            )
        if counts.documents == 0 and is_all:
            raise UserError(f"{where} contains no text: {left_out or 'nothing was found'}{_worst(counts, *unclean)}.")
        size = max(counts.bytes - 2 * counts.bad_bytes, 0 if is_all else self.most_bytes)  # U+FFFD takes three bytes
        if counts.bad_bytes > TOLERATED_SHARE * size:
            raise UserError(
                f"{where} is not UTF-8 text: {counts.bad_bytes:,} of {size:,} bytes are invalid{_worst(counts, 'bad_bytes')}; "
                f"convert it to UTF-8{or_exclude}."
            )
        if is_all and counts.empty_records > TOLERATED_SHARE * (counts.documents + counts.empty_records):
            is_broken = counts.worst()["empty_records"][1].get("why") == "broken"
            remedy = "correct that" if is_broken else "name the right column with --text_column"
            raise UserError(
                f"{where}: {counts.empty_records:,} records have no text and {counts.documents:,} have text"
                f"{_worst(counts, 'empty_records')}; {remedy}{or_exclude}."
            )

    def left_out_words(self, counts: Counts) -> str:
        numbers = vars(counts) | {"links": self.links}
        return ", ".join(counted(numbers[name], *words) for name, words in LEFT_OUT.items() if numbers[name])

    def fingerprint(self) -> str:
        """Read all text and return a hash of its content, order and kind."""
        digest = hashlib.sha256()
        for file in self.all_files:
            try:
                with files.readable(file.path), open(file.path, "rb") as content:
                    while block := content.read(files.BLOCK_BYTES):
                        digest.update(block)
                    kind = kind_of(file.path)
            except files.UnreadableError:
                if file.is_named:
                    raise
                kind = "unreadable"
            digest.update(f"\xff{kind}{'validation' * file.val}".encode())
        for hub in filter(None, self.hub):
            digest.update(str(hub.pinned()).encode())
        return digest.hexdigest()

    def identity(self) -> list[list]:
        """Return name, size and modification time of every file, to compare before interrupted work resumes."""
        return [[file.path, file.size, file.modified] for file in self.all_files]

    def units(self) -> list[Unit]:
        """Divide the text into units. The text of validation splits comes first: of repeated documents, the first is kept.
        Raise a `UserError` if the text column of files is ambiguous (one line per file), or a Hub dataset cannot be read."""
        problems, tables, units, validation = [], [], [], []
        for entry, of_entry, hub, copies in zip(self.inputs, self.files, self.hub, self.weights, strict=True):
            ranges: list[tuple[int, ByteRange]] = []
            for file in of_entry:
                try:
                    (validation if file.val else ranges).extend(self._ranges(file))
                except NoTextColumnError as error:
                    (problems if file.is_named else tables).append(str(error))
                    self.skipped.note("tables", 1, file.path)
                except files.UnreadableError as error:
                    if file.is_named:
                        problems.append(str(error))
                    self.skipped.note_unreadable(file.path, file.size, error)
            if hub is not None:
                pinned = hub.pinned()
                wanted = self.arguments.text_column or getattr(find(entry), "text_column", None)
                splits = [pinned, replace(pinned, split="validation")][: len(pinned.streams)]
                for dataset, found in zip(splits, (ranges, validation), strict=False):
                    column = self._column(str(hub), dataset.records(), wanted)
                    shards = range(dataset.streams[0].num_shards if column is not None else 0)
                    found += [(UNIT_BYTES, ByteRange(str(dataset), "hub", shard, column=column)) for shard in shards]
            units += [Unit(copies, group) for group in _grouped(ranges)]
        if validation:  # with a limit, which applies to all validation text together, it is one unit
            is_limited = self.arguments.limit != NO_LIMIT
            groups = _grouped((0 if is_limited else size, part) for size, part in validation)
            units = [*(Unit(1.0, group, True) for group in groups), *(replace(unit, val=False) for unit in units)]
        if not problems and not units:  # every file is a table
            problems = tables
        Problems(problems[:20]).refuse()
        self.check(self.skipped, is_all=False)
        return units

    def _ranges(self, file: TextFile) -> list[tuple[int, ByteRange]]:
        """Return the sizes and ranges of the parts of a file that are read separately."""
        name, size = file.path, file.size
        kind, column = kind_of(name, self.arguments.text_column), None
        if kind != "text":
            found = (record for record, _ in records(ByteRange(name, kind, may_skip=not file.is_named)))
            column = self._column(name, found, self.arguments.text_column)
            if column is None:
                return []
        elif file.is_named or (
            size > UNIT_BYTES and not files.is_compressed(name)
        ):  # others are checked when they are read
            with files.readable(name):
                files.check_text(files.head(name), name, not file.is_named)
        parts = [(size, 0, None)]
        if kind in ("parquet", "arrow"):
            parts = _row_groups(name, kind)
        elif kind in ("text", "jsonl") and not files.is_compressed(name):
            bounds = [*range(0, size or 1, UNIT_BYTES), None]
            parts = [(min(UNIT_BYTES, size), start, stop) for start, stop in itertools.pairwise(bounds)]
        return [(n, ByteRange(name, kind, start, stop, column, not file.is_named)) for n, start, stop in parts]

    def _column(self, label: str, records: Iterable[dict[str, Any] | None], wanted: str | None) -> str | None:
        """Return the text column, or None if there are no records."""
        head = list(itertools.islice(records, SAMPLED_RECORDS))
        known = list(filter(None, head))
        for record in known:
            if column := text_column(record, wanted):
                self.has_chats |= any(chat.normalized(each.get(column)) for each in known)
                return column
        if not known:
            return TEXT_COLUMNS[0] if head else None
        missing = f"has no column {wanted!r}" if wanted else "has no obvious text column"
        # In csv, None is the key of the values beyond the header.
        names = ", ".join(" ".join(str(name).split()) for name in known[0] if name is not None)
        raise NoTextColumnError(
            f"{label} {missing}; its columns are {names[:300] or 'none'}: choose one with --text_column."
        )

    def _find(self, entry: str) -> list[TextFile]:
        """Return the files of one entry of `--input` in a fixed order. Raise a `UserError` if there are none."""
        if entry == STANDARD_LIBRARY:
            return list(map(TextFile.at, _library_sources(Path(sysconfig.get_path("stdlib")))))
        path = Path(entry).expanduser()
        is_one = os.path.lexists(path)
        named = [str(path)] if is_one else sorted(glob.glob(str(path), recursive=True), key=lambda p: Path(p).parts)
        if "**" in entry:  # `**` matches folders, and also all files in them
            named = [match for match in named if os.path.isfile(match)]
        root = os.path.dirname(re.split(r"[*?[]", str(path))[0])
        found = []
        for match in named:
            if not is_one and self._is_excluded(os.path.relpath(match, root or ".")):
                continue
            if os.path.isdir(match):
                found += self._walk(match)
            elif is_one or os.path.isfile(match):
                found.append(TextFile.at(match, is_one))
            elif os.path.islink(match):
                self.skipped.note_unreadable(match, 0, UserError("it is a broken link"))
        if not found:
            what = "matches no local file or folder and is neither a Hub dataset nor a name in `python -m tokenizer.pretokenize --list`"
            if named:
                what = "has no files except hidden files and links (only a glob follows them)"
                what += ", and files that --exclude matches" * bool(self.arguments.exclude)
            near = difflib.get_close_matches(entry, names(), n=1)
            raise UserError(f"{entry} {what}; {f'did you mean {near[0]}?' if near else 'check the path.'}")
        return found

    def _is_excluded(self, path: str) -> bool:
        """Return whether a pattern of --exclude matches the end of `path`, relative to its input, or of a parent folder."""
        paths = [PurePath(path), *PurePath(path).parents]
        return any(each.match(pattern) for pattern in self.arguments.exclude for each in paths)

    def _walk(self, folder: str, below: str = "", val: bool = False) -> Iterator[TextFile]:
        """Yield the files in a folder. `below` is the folder's path relative to the input."""
        try:
            with os.scandir(folder) as inside:
                entries = [entry for entry in inside if not entry.name.startswith(".")]
        except OSError as error:
            problem = UserError(f"{folder} cannot be read: {error.strerror}; fix it or exclude it.")
            if not below:
                raise problem from error
            self.skipped.note_unreadable(folder, 0, problem)
            return
        saved = _saved_by_datasets(folder, {entry.name for entry in entries})
        for entry in sorted(entries, key=lambda entry: entry.name):
            if saved is not None and entry.name not in saved:
                continue
            path = os.path.join(below, entry.name)
            if self._is_excluded(path):
                continue
            if entry.is_symlink():
                self.links += 1
            elif entry.is_dir():
                yield from self._walk(entry.path, path, val or (saved is not None and entry.name == "validation"))
            elif entry.is_file():
                yield TextFile.at(entry.path, val=val)


def _library_sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_LIBRARY_SOURCE or path.name.startswith("_sysconfigdata"):
            continue
        if path.is_dir():
            yield from _library_sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _saved_by_datasets(folder: str, names: set[str]) -> set[str] | None:
    """Return the names in a folder of `Dataset.save_to_disk` that hold its records, or None for another folder. Of a `DatasetDict`, these
    are the splits `train` and `validation`."""
    is_dict = "dataset_dict.json" in names
    if not is_dict and not {"state.json", "dataset_info.json"} <= names:
        return None
    with suppress(ValueError, LookupError, TypeError):
        content = schema.read(Path(folder) / ("dataset_dict.json" if is_dict else "state.json"))
        if is_dict:
            return {"train", "validation"} & {*content["splits"]}
        return {part["filename"] for part in content["_data_files"]}
    return {"train"} if is_dict else None


def kind_of(path: str, text_column: str | None = None) -> str:
    """Return the kind of a file. A .json file that has neither records nor a list, such as a configuration, is text."""
    suffix = files.suffix(path)
    if suffix != ".json":
        return KINDS.get(suffix, "text")
    with files.readable(path), files.opened(path) as file:
        head = b"".join(file.readline(files.BLOCK_BYTES) for _ in range(SAMPLED_RECORDS))
    head = head.removeprefix(codecs.BOM_UTF8).strip()
    if re.match(rb'\[\s*["{\]]', head):
        return "json"
    first, *more = head.split(b"\n")
    record = parsed(first) or {}
    known = {text_column, *TEXT_COLUMNS, *CHAT_COLUMNS}
    return "jsonl" if record and (more or known & record.keys()) else "text"


def _row_groups(name: str, kind: str) -> Iterator[tuple[int, int, int]]:
    """Yield (bytes, first, end) of consecutive row groups, or record batches of an arrow file, that together have about one unit."""
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


def _worst(counts: Counts, *names: str) -> str:
    """Return the file with the most of the first of `names`, and the place of its first one, as the end of a sentence."""
    if not names or names[0] not in (worst := counts.worst()):
        return ""
    path, place = worst[names[0]]
    if names[0] == "bad_bytes" and "byte" not in place:
        place = place | {"line": files.first_bad_line(path)}
    words = place_words(place, path)
    if len(place["files"]) == 1 or place["number"] == 1:
        return f"; the first in {path}{words}"
    return f"; {place['number']:,} of them in {path}{words.replace(', ', ', the first in ', 1)}"
