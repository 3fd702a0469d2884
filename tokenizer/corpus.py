"""Where text comes from: files, folders, globs and Hub datasets, as a stream of documents in pieces.

A plain text file is one document; a record of a jsonl, csv or parquet file or of a Hub dataset is one document.
Documents arrive in pieces of about a megabyte, so that none has to fit in memory.
"""

import codecs
import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from command_line import UserError

PIECE_BYTES = 1 << 20
# Text that is not quite clean is mended and counted up to this share; beyond, it is something else than text.
TOLERATED_SHARE = 0.01
RECORD_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_COLUMNS = ("text", "content")

# The text every Python machine has: the standard library's sources, without tests and without tables of data.
STANDARD_LIBRARY = "python-standard-library"
NOT_LIBRARY_SOURCE = {"test", "tests", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data"}


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
            digest.update(b"\xff")
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
            if path.suffix in RECORD_FORMATS:
                yield from self._records(RECORD_FORMATS[path.suffix], data_files=str(path))
            elif _is_binary(path):
                self.counts["binary_files"] += 1
            else:
                yield from self._counted(_decoded(path, self.counts))
        for repository in self.hub_datasets:
            yield from self._records(repository)
        self._check()

    def _records(self, name: str, **where) -> Iterator[Piece]:
        import datasets

        label = where.get("data_files", name)
        try:
            records = datasets.load_dataset(name, split="train", streaming=True, **where)
            column = self._text_column(next(iter(records.take(1)), {}), label)
            for record in records:
                text = record.get(column)
                if isinstance(text, str):
                    yield from self._counted(_in_pieces([text]))
                else:
                    self.counts["empty_records"] += 1
        except (ValueError, TypeError, OSError, StopIteration, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"{label} cannot be read: {' '.join(str(error).split())[:300] or 'it is empty'}."
            ) from error

    def _text_column(self, record: dict, label: str) -> str:
        wanted = self.arguments.text_column
        if wanted is not None and wanted in record:
            return wanted
        strings = [name for name, value in record.items() if isinstance(value, str)]
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
        if bad.get("bad_bytes", 0) > TOLERATED_SHARE * self.counts["bytes"]:
            raise UserError(
                f"{where} is not UTF-8 text: {bad['bad_bytes']:,} of {self.counts['bytes']:,} bytes are invalid."
            )
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
        if path.is_dir() and path.name not in NOT_LIBRARY_SOURCE:
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
    except (HfHubHTTPError, OSError) as error:
        reason = "has no such dataset" if isinstance(error, RepositoryNotFoundError) else "cannot be reached to look"
        raise UserError(f"{repository} is no file or folder here, and the Hub {reason}.") from error


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


def _decoded(path: Path, counts: dict[str, int]) -> Iterator[Piece]:
    """A file as pieces of one document, bytes that are not UTF-8 replaced by U+FFFD and counted."""

    def blocks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
        with path.open("rb") as file:
            while True:
                block = file.read(PIECE_BYTES)
                text = decoder.decode(block, final=not block)
                mended = text.encode("utf-8", errors="surrogateescape")  # valid text comes back byte for byte
                if mended != text.encode("utf-8", errors="replace"):
                    bad = sum("\udc80" <= character <= "\udcff" for character in text)
                    counts["bad_bytes"] += bad
                    text = "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text)
                yield text
                if not block:
                    return

    yield from _in_pieces(blocks())


def _in_pieces(blocks: Iterator[str] | list[str]) -> Iterator[Piece]:
    """Cuts a document before line breaks that follow something visible: there the pre-tokenizer of GPT-2 always ends a
    word, so that pieces encode to the same tokens as the whole. Always yields at least one piece, the last one marked."""
    rest, first = "", True
    for block in blocks:
        rest += block
        while len(rest) > PIECE_BYTES:
            cut = _safe_cut(rest)
            if cut is None:
                break
            yield Piece(rest[:cut], starts_document=first, ends_document=False)
            rest, first = rest[cut:], False
    yield Piece(rest, starts_document=first, ends_document=True)


def _safe_cut(text: str) -> int | None:
    cut = len(text)
    while (cut := text.rfind("\n", 0, cut)) > 0:
        if not text[cut - 1].isspace():
            return cut
    return None
