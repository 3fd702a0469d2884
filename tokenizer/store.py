"""The token store: a folder of tokens with metadata that describe it.

train.bin, val.bin              ids, little-endian uint16 (uint32 from 65,500 tokens on), nanoGPT reads them as they are;
                                every document ends with the end-of-text id, if there is one
train.bin.index, val.bin.index  uint64, where each document ends, in tokens: as datatrove has it
train.idx, val.idx              the same for Megatron's IndexedDataset
tokenizer/                      loads with AutoTokenizer
report.md                       what was read, changed and left out, with examples
inputs.json                     the files it was made from: name, size, time of change
metadata.json                   what all of that is, written last: without it there is no store

Format 1 is read as well. It has {train,val}.offsets.bin (int64, where each document starts, and the end) in place of the
indexes, no report.md and no inputs.json, and its metadata state neither settings nor counts.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atomic import file_sha256, write_atomic
from errors import UserError, check_format, disk_errors
from tokenizer import schema
from tokenizer.cleaning import RuleStats

if TYPE_CHECKING:  # workers write stores too, and start at once without transformers
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 2
SPLITS = ("train", "val")
MAX_UINT16_VOCAB = 65_500  # Megatron's limit, so that its reader agrees with us about the dtype
SETTINGS = {"input": list[str], "weights": list[float], "tokenizer": str | None, "chat_template": str | None}  # in use
OTHER_STORE = "correct that, or name another store"
RESUMES = "correct that, and the same command resumes"
# Patterns, see `removal.discard`.
STORE_FILES = (
    "*.bin",
    "*.bin.index",
    "*.idx",
    "*.json*",
    "report.md*",
    "tokenizer/*",
    "tokenizer/additional_chat_templates/*",
)
SHA256 = re.compile("[0-9a-f]{64}")
SCAN_TOKENS = 1 << 24
BLOCK_DOCUMENTS = 1 << 18


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the text; end-of-text tokens count as none
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Metadata:
    """`metadata.json`, which every reader of a store reads first."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer_type: str
    tokenizer_sha256: str
    eos_token_id: int | None
    train: Split
    val: Split
    sources: list[str]
    settings: dict[str, Any]  # it was made with
    counts: dict[str, Any]  # what was read, changed, left out
    cleaning: dict[str, RuleStats]  # what each rule changed or dropped, with examples
    repeated_documents: int  # left out
    command: str
    hub_datasets: list[str] = field(default_factory=list)  # those of the sources that are on the Hub, not on a disk
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """Changes whenever the tokens do."""
        return hashlib.sha256((self.train.sha256 + self.val.sha256).encode()).hexdigest()

    @property
    def files(self) -> dict[str, tuple[str, int | None]]:
        """SHA-256 and bytes by the name of the file; the bytes of the tokenizer are not stated."""
        files = {"tokenizer/tokenizer.json": (self.tokenizer_sha256, None)}
        for split in SPLITS:
            info: Split = getattr(self, split)
            files[self.index_file(split)] = (info.index_sha256, (info.documents + (self.format_version == 1)) * 8)
            files[tokens_file(split)] = (info.sha256, info.tokens * np.dtype(self.dtype).itemsize)
        return files

    def index_file(self, split: str) -> str:
        return f"{split}.offsets.bin" if self.format_version == 1 else index_file(split)


class TokenStore:
    """A finished store, opened for reading."""

    def __init__(self, folder: str | Path):
        """Raise a `UserError` where it is no store, unfinished, damaged, of a newer format, or has another's tokenizer."""
        self.folder = Path(folder)
        self.metadata = read_metadata(self.folder)
        problems = []
        with disk_errors(self.folder, OTHER_STORE):
            for name, (sha256, size) in self.metadata.files.items():
                path = self.folder / name
                if not path.is_file():
                    problems.append(f"{path} is {'not a regular file' if os.path.lexists(path) else 'missing'}.")
                elif size is None:
                    if file_sha256(path) != sha256:
                        problems.append(f"{path.parent} is another tokenizer than the one these tokens were made with.")
                else:
                    with path.open("rb") as file:  # which may be forbidden
                        found = file.seek(0, os.SEEK_END)
                    if found != size:
                        problems.append(
                            f"{path} is {found:,} bytes long, not {size:,}: it is truncated or was changed."
                        )
        if problems:
            raise UserError("\n".join(f"{problem} Delete it and make it again." for problem in problems))

    @staticmethod
    def is_store(folder: str | Path) -> bool:
        with disk_errors(folder, OTHER_STORE):
            return (Path(folder) / "metadata.json").is_file()

    def memory_map(self, split: str) -> np.ndarray:
        """(tokens,) read from disk as needed."""
        return np.memmap(self.folder / tokens_file(split), np.dtype(self.metadata.dtype).newbyteorder("<"), mode="r")

    def in_memory(self, split: str) -> np.ndarray:
        """(tokens,) in RAM."""
        return np.fromfile(self.folder / tokens_file(split), np.dtype(self.metadata.dtype).newbyteorder("<"))

    def offsets(self, split: str) -> np.ndarray:
        """Return (documents + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]; raise a `UserError` for an index that
        does not divide the tokens."""
        path, tokens = self.folder / self.metadata.index_file(split), getattr(self.metadata, split).tokens
        index = np.fromfile(path, dtype="<i8")
        offsets = index if self.metadata.format_version == 1 else np.concatenate([[0], index])
        if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
            raise UserError(
                f"{path} is not the index of {tokens:,} tokens: it was changed. Delete {self.folder} and make it again."
            )
        return offsets

    def require_indexes(self) -> None:
        """Raise a `UserError` where the store's format lacks the index files that other programs read."""
        if self.metadata.format_version == 1:
            raise UserError(
                f"{self.folder} is a store of format 1, which can be read but not packed or exported; make it again with "
                f"another --output. It was made by: {self.metadata.command}"
            )

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer; raise a `UserError` where it cannot be loaded or is not the one that the metadata describe."""
        from tokenizer import vocabulary

        tokenizer = vocabulary.load(self.folder / "tokenizer")
        stated = self.metadata.vocab_size, self.metadata.eos_token_id
        found = len(tokenizer), tokenizer.eos_token_id
        if stated != found:
            raise UserError(
                f"{self.folder / 'metadata.json'} states {stated[0]:,} tokens and end-of-text id {stated[1]}, its tokenizer has "
                f"{found[0]:,} tokens and end-of-text id {found[1]}: one of them was changed. Delete {self.folder} and make it again."
            )
        return tokenizer

    def check_ids(self, split: str) -> None:
        """Raise a `UserError` for an id that the vocabulary does not have."""
        tokens = self.memory_map(split)
        for start in range(0, len(tokens), SCAN_TOKENS):
            largest = int(tokens[start : start + SCAN_TOKENS].max())
            if largest >= self.metadata.vocab_size:
                raise UserError(
                    f"{self.folder / f'{split}.bin'} holds token id {largest}, beyond its vocabulary of "
                    f"{self.metadata.vocab_size}; the file or metadata.json was changed. Delete it and make it again."
                )

    def check_hashes(self, *splits: str) -> None:
        """Compare the hashes of tokens and index, of all splits where none is named, with those in the metadata; raise a
        `UserError` for files that were changed, or cannot be read."""
        problems = []
        for split, name_of in itertools.product(splits or SPLITS, (self.metadata.index_file, tokens_file)):
            path, (stated, _) = self.folder / name_of(split), self.metadata.files[name_of(split)]
            with disk_errors(path, "check its disk"):
                found = file_sha256(path)
            if found != stated:
                problems.append(
                    f"{path} was changed or damaged: its SHA-256 is {found}, and metadata.json states {stated}. Put the "
                    f"original back, or delete {self.folder} and make it again."
                )
        if problems:
            raise UserError("\n".join(problems))


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size < MAX_UINT16_VOCAB else "uint32"


def tokens_file(split: str) -> str:
    return f"{split}.bin"


def index_file(split: str) -> str:
    return f"{split}.bin.index"


def sequences(index: Path, longest: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield every document in pieces of at most `longest` tokens, some hundred thousand documents at a time.

    Each item is (n,) int64 three times: the number of the document of a piece, its start and its end, in tokens.
    """
    number = start = 0
    with index.open("rb") as file:
        while len(ends := np.fromfile(file, dtype="<i8", count=BLOCK_DOCUMENTS)):
            starts = np.concatenate([[start], ends[:-1]])
            pieces = -(-(ends - starts) // longest)  # of each document
            document = np.repeat(np.arange(len(ends)), pieces)
            nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            first = starts[document] + nth * longest
            yield number + document, first, np.minimum(first + longest, ends[document])
            number, start = number + len(ends), int(ends[-1])


def read_metadata(folder: Path) -> Metadata:
    path = folder / "metadata.json"
    if not TokenStore.is_store(folder):
        unfinished = folder.is_dir() and any((folder / f"{split}.bin").exists() for split in SPLITS)
        what = "an unfinished token store" if unfinished else "not a token store"
        raise UserError(
            f"{folder} is {what}: it has no metadata.json. Make one with "
            f"`python -m tokenizer.pretokenize --input TEXT --output {folder}`."
        )
    try:
        with disk_errors(path, OTHER_STORE):
            content = schema.read(path, dict[str, Any])
        version = content.get("format_version")
        check_format(folder, schema.build(version, int, "format_version"), FORMAT_VERSION)
        metadata = schema.build(_from_format_1(content) if version == 1 else content, Metadata)
        _check_metadata(metadata)
        return metadata
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not the metadata of a token store ({error}). Delete it and make it again."
        ) from error


def _check_metadata(metadata: Metadata) -> None:
    """Raise a `ValueError` for what types do not say: values that exclude each other, counts that reports need."""
    size, eos, dtype = metadata.vocab_size, metadata.eos_token_id, metadata.dtype
    problems = {
        f"its format_version is {metadata.format_version}": metadata.format_version < 1,
        f"its dtype is {dtype} and its vocab_size {size:,}": dtype != dtype_of(size),
        f"its eos_token_id is {eos} and its vocab_size {size:,}": eos is not None and eos >= size,
    }
    for name, (sha256, _) in metadata.files.items():
        problems[f"its SHA-256 of {name} is {sha256!r:.80}"] = not SHA256.fullmatch(sha256)
    for name, split in (("train", metadata.train), ("val", metadata.val)):
        problems[f"it counts {split.tokens} tokens and {split.documents} documents for {name}"] = (
            split.tokens < 1 or split.documents < 1
        )
    if metadata.format_version != 1:
        counts = dict(metadata.counts)
        schema.build(counts.pop("first", None), dict[str, tuple[str, dict[str, Any]]], "counts.first")
        schema.build(counts, dict[str, int], "counts")
        for name in ("documents", "bytes", "blank", "empty_records"):
            problems[f"it has no counts.{name}"] = name not in counts
        for name, kind in SETTINGS.items():
            if name in metadata.settings:
                schema.build(metadata.settings[name], kind, f"settings.{name}")
    for problem, is_found in problems.items():
        if is_found:
            raise ValueError(problem)


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata under today's names; what format 1 did not record stays empty."""
    splits = {split: {"index_sha256": content[split].pop("offsets_sha256")} | content[split] for split in SPLITS}
    content.pop("fingerprint", None)
    empty = {"settings": {"cleaning": [], "dedup": "no"}, "counts": {}, "cleaning": {}, "repeated_documents": 0}
    return content | splits | empty


def finish(folder: Path, splits: dict[str, tuple[int, int, int]], **about: Any) -> None:
    """Write the metadata of a store whose files and tokenizer exist. `splits`: tokens, documents, bytes of each."""
    described = {
        split: Split(*numbers, file_sha256(folder / tokens_file(split)), file_sha256(folder / index_file(split)))
        for split, numbers in splits.items()
    }
    metadata = Metadata(**described, tokenizer_sha256=file_sha256(folder / "tokenizer" / "tokenizer.json"), **about)
    write_atomic(folder / "metadata.json", json.dumps(asdict(metadata), indent=2, ensure_ascii=False) + "\n")
