"""Where text comes from: files, folders, globs and Hub datasets, as a stream of documents in pieces.

A plain text file is one document; a record of a jsonl, csv or parquet file or of a Hub dataset is one document.
Documents arrive in pieces of about a megabyte, so that none has to fit in memory. Hub datasets are streamed through
`datasets`; local files are read here, because one broken line or byte ends its readers, and here it is counted.
"""

import codecs
import csv
import glob
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from command_line import UserError

PIECE_BYTES = 1 << 20
# Text that is not quite clean is mended and counted up to this share; beyond, it is something else than text.
TOLERATED_SHARE = 0.01
TEXT_COLUMNS = ("text", "content")
NUMBER = re.compile(r"[-+.\d]+")

# The text every Python machine has: the standard library's sources, without tests and without tables of data.
STANDARD_LIBRARY = "python-standard-library"
NOT_LIBRARY_SOURCE = {
    *("test", "tests", "idlelib", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data", "msilib", "entities.py", "stringprep.py", "locale.py"),
}


@dataclass
class CorpusArguments:
    text_column: str | None = field(
        default=None, metadata={"help": "Column of a record that holds the text; found where it is `text` or alone."}
    )
    validation_fraction: float = field(
        default=0.01,
        metadata={
            "help": "Share of the documents held out for validation, above 0 and below 1; of a lone document, its tail."
        },
    )
    strict: bool = field(
        default=False,
        metadata={"help": "Refuse text that is not clean instead of mending and counting up to 1 percent."},
    )


@dataclass(frozen=True)
class Piece:
    """A stretch of one document. Pieces of a document come in order, one document after the other."""

    text: str
    starts_document: bool
    ends_document: bool


@dataclass
class Corpus:
    """Documents of all `inputs`, readable any number of times.

    `counts` holds, after a pass, what was read and what was mended or left out in that pass.
    """

    inputs: list[str]
    arguments: CorpusArguments
    files: list[Path] = field(init=False)
    counts: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.files = [path for entry in self.inputs for path in _find(entry)]

    def leave_out(self, folder: Path) -> None:
        """A store that lies among its own text is no text."""
        self.files = [path for path in self.files if folder.absolute() not in path.absolute().parents]

    @property
    def hub_datasets(self) -> list[str]:
        return [entry for entry in self.inputs if _is_hub_id(entry)]

    @property
    def size(self) -> int:
        """Bytes of all local files."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """Changes whenever the content, the order or the source of the text changes."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(PIECE_BYTES):
                    digest.update(block)
            digest.update(b"\xff" + str(_record_reader(path) is not None).encode())
        for repository in self.hub_datasets:
            digest.update(f"{repository}@{_revision(repository)}".encode())
        digest.update(repr(self.arguments.text_column).encode())
        return digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """Every document that is not blank.

        Raises:
            UserError: nothing but blank text, or more than 1% of it is not UTF-8.
        """
        self.counts = {"documents": 0, "bytes": 0, "blank": 0, "binary_files": 0, "bad_bytes": 0, "empty_records": 0}
        for path in self.files:
            if (reader := _record_reader(path)) is not None:
                yield from self._records(reader(path), str(path))
            elif _is_binary(path):
                self.counts["binary_files"] += 1
            else:
                yield from self._counted(_decoded(path, self.counts))
        for repository in self.hub_datasets:
            yield from self._records(_hub_records(repository), repository)
        self._check()

    def _records(self, records: Iterator[dict | None], label: str) -> Iterator[Piece]:
        """Documents of records; None stands for a broken one."""
        column = None
        try:
            for record in records:
                if record is not None and column is None:
                    column = self._text_column(record, label)
                text = record.get(column) if record is not None else None
                if isinstance(text, str):
                    text = _mended(text, self.counts)
                    starts = range(0, len(text), PIECE_BYTES)
                    yield from self._counted(_in_pieces(text[i : i + PIECE_BYTES] for i in starts))
                else:
                    self.counts["empty_records"] += 1
        except (ValueError, TypeError, OSError, csv.Error) as error:
            raise UserError(f"{label} cannot be read: {' '.join(str(error).split())[:300]}.") from error

    def _text_column(self, record: dict, label: str) -> str:
        wanted = self.arguments.text_column
        if wanted is not None and wanted in record:
            return wanted
        strings = [name for name, value in record.items() if isinstance(value, str) and not NUMBER.fullmatch(value)]
        found = [name for name in TEXT_COLUMNS if name in record] or strings
        if wanted is None and (len(found) == 1 or any(name in TEXT_COLUMNS for name in found)):
            return found[0]
        missing = f"has no column {wanted!r}" if wanted else "does not say which column holds the text"
        raise UserError(f"{label} {missing}; its columns are {', '.join(record) or 'none'}: give one as --text_column.")

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Passes on a document, unless all of it is blank."""
        held: list[Piece] = []  # blank pieces at the head, until something follows
        for piece in pieces:
            held.append(piece)
            if piece.text.strip():
                break
        else:
            self.counts["blank"] += 1
            return
        self.counts["documents"] += 1
        for source in (held, pieces):
            for piece in source:
                self.counts["bytes"] += len(piece.text.encode())
                yield piece

    def _check(self):
        where = ", ".join(self.inputs)
        if self.counts["documents"] == 0:
            raise UserError(f"{where} holds no text: {self._left_out() or 'nothing was found'}.")
        bad = {name: self.counts[name] for name in ("bad_bytes", "empty_records", "binary_files") if self.counts[name]}
        if self.arguments.strict and bad:
            raise UserError(f"{where} is not clean ({self._left_out()}), and --strict allows nothing else.")
        read = self.counts["bytes"] - 2 * self.counts["bad_bytes"]  # U+FFFD takes three bytes
        if bad.get("bad_bytes", 0) > TOLERATED_SHARE * read:
            raise UserError(f"{where} is not UTF-8 text: {bad['bad_bytes']:,} of {read:,} bytes are invalid.")
        if bad.get("empty_records", 0) > TOLERATED_SHARE * (self.counts["documents"] + bad.get("empty_records", 0)):
            raise UserError(
                f"{where}: {bad['empty_records']:,} records hold no text against {self.counts['documents']:,} that do; "
                f"name the right column with --text_column."
            )

    def _left_out(self) -> str:
        words = {"blank": "blank documents", "binary_files": "binary files", "bad_bytes": "bytes that are not UTF-8"}
        words["empty_records"] = "records without text"
        return ", ".join(f"{self.counts[name]:,} {word}" for name, word in words.items() if self.counts[name])

    def summary(self) -> str:
        left_out = self._left_out()
        mended = f" ({left_out} left out or replaced)" if left_out else ""
        return f"{self.counts['documents']:,} documents, {self.counts['bytes'] / 1e6:.1f} MB{mended}"


def _find(entry: str) -> list[Path]:
    """The files an entry of `--input` names, in a fixed order; none for a Hub id."""
    if entry == STANDARD_LIBRARY:
        return list(_library_sources(Path(sysconfig.get_path("stdlib"))))
    path = Path(entry).expanduser()
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if p.is_file())
        files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    if not files and not _is_hub_id(entry):
        what = "an empty folder" if path.is_dir() else "no file, folder, glob or Hub dataset"
        raise UserError(f"{entry} is {what}; nothing to read there.")
    return files


def _library_sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_LIBRARY_SOURCE or path.name.startswith("_sysconfigdata"):
            continue
        if path.is_dir():
            yield from _library_sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _is_hub_id(entry: str) -> bool:
    """`user/name`: two plain parts, and nothing of that name on this disk."""
    parts = entry.split("/")
    plain = all(part and part.strip(".") and not set(part) & set("*?[~\\ ") for part in parts)
    return len(parts) == 2 and plain and not Path(entry).exists() and not Path(parts[0]).exists()


def _revision(repository: str) -> str:
    """The commit a Hub dataset stands at.

    Raises:
        UserError: there is no such dataset, or the Hub cannot be reached.
    """
    try:
        return HfApi().dataset_info(repository).sha
    except Exception as error:  # the HTTP library behind the Hub, and its exceptions, differ by version
        reason = "has no such dataset" if isinstance(error, RepositoryNotFoundError) else "cannot be reached to look"
        raise UserError(f"{repository} is no file or folder here, and the Hub {reason}.") from error


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8192)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16 text; save it as UTF-8.")
    return b"\0" in head


def _decoded(path: Path, counts: dict[str, int]) -> Iterator[Piece]:
    """A file as pieces of one document, bytes that are not UTF-8 replaced by U+FFFD and counted."""

    def blocks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
        with path.open("rb") as file:
            while True:
                block = file.read(PIECE_BYTES)
                text = decoder.decode(block, final=not block)
                text = _mended(text, counts)
                yield text
                if not block:
                    return

    yield from _in_pieces(blocks())


def _mended(text: str, counts: dict[str, int]) -> str:
    """`text` with U+FFFD for what is no character: surrogates, which also stand for bytes that are not UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        text, bad = re.subn("[\ud800-\udfff]", "\ufffd", text)
        counts["bad_bytes"] += bad
    return text


def _json_records(path: Path) -> Iterator[dict | None]:
    """One record a line; of a .json file also one list of records or texts."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        is_list = path.suffix.lower() == ".json" and file.read(4096).lstrip().startswith("[")
        file.seek(0)
        for record in json.load(file) if is_list else (_loaded(line) for line in file if line.strip()):
            if is_list and isinstance(record, str):
                record = {"text": record}
            yield record if isinstance(record, dict) else None


def _loaded(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _csv_records(path: Path) -> Iterator[dict | None]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        yield from csv.DictReader(file)


def _parquet_records(path: Path) -> Iterator[dict | None]:
    from pyarrow import parquet  # comes with datasets; training from a store needs neither

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1000):
            yield from batch.to_pylist()


def _hub_records(repository: str) -> Iterator[dict | None]:
    import datasets

    try:
        yield from datasets.load_dataset(repository, split="train", streaming=True)
    except datasets.exceptions.DatasetsError as error:
        raise OSError(str(error)) from error


RECORDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json_records),
    ".csv": _csv_records,
    ".parquet": _parquet_records,
}


def _record_reader(path: Path) -> Callable[[Path], Iterator[dict | None]] | None:
    """How to read a file of records; None for a file that is one document."""
    suffix = path.suffix.lower()
    if (
        suffix == ".json"
    ):  # records, a line each or in one list; or something else, a configuration say: then it is text
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            first_line = file.readline(PIECE_BYTES)
        if not first_line.startswith("[") and not isinstance(_loaded(first_line), dict):
            return None
    return RECORDS.get(suffix)


def _in_pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """Cuts a document between words, so that pieces encode to the same tokens as the whole. Always yields at least one
    piece, the last one marked."""
    rest, first, enough = "", True, PIECE_BYTES
    for block in blocks:
        rest += block
        if len(rest) > enough:
            cut = _safe_cut(rest)
            if cut is None:
                enough = 2 * len(rest)  # looked at again only when there is as much again
                continue
            yield Piece(rest[:cut], starts_document=first, ends_document=False)
            rest, first, enough = rest[cut:], False, PIECE_BYTES
    yield Piece(rest, starts_document=first, ends_document=True)


# A letter, a space, a letter: there the word patterns of GPT-2, Llama 3 (cl100k) and o200k all end a word. Where a text
# has no such place: something visible before a line break, which is exact for GPT-2's pattern, and so for our own BPE.
BETWEEN_WORDS = re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL)
BEFORE_LINE_BREAK = re.compile(r".*\S(?=\r?\n)", re.DOTALL)


def _safe_cut(text: str) -> int | None:
    found = BETWEEN_WORDS.match(text) or BEFORE_LINE_BREAK.match(text)
    return found.end() if found else None
