"""Token store: format and reader. A store is a folder of token ids with metadata.

train.bin, val.bin              ids, little-endian uint16 (uint32 for vocabularies of 65,500 tokens and more), as
                                nanoGPT reads; every document ends with the end-of-text id, if the tokenizer has one
train.bin.index, val.bin.index  end of each document in tokens, uint64, in datatrove's format
tokenizer/                      loads with AutoTokenizer
report.md                       text that was read, changed and left out, with examples
inputs.json                     source files: name, size, modification time
metadata.json                   description of the store: without it, the store does not exist

Format 1 can also be read. Instead of the indexes it has {train,val}.offsets.bin (int64, the start of each document, and
the end). It has no report.md and no inputs.json, and its metadata contain neither settings nor counts. Older stores of
format 2 also have {train,val}.idx, indexes for Megatron, which are not read.
"""

import hashlib
import itertools
import json
import os
import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from common import schema
from common.atomic import file_sha256, write_atomic
from common.errors import Problems, UserError, check_format, disk_errors
from tokenizer.cleaning.cleaning import RuleStats
from tokenizer.corpus.files import PACKED_STORE, unpack_command

if TYPE_CHECKING:  # importing them takes a second
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

HUB_SPLITS = {"train": "train", "val": "validation"}  # names of the splits in `datasets`
FORMAT_VERSION = 2
SPLITS = ("train", "val")
MAX_UINT16_VOCAB = 65_500  # Megatron's limit for uint16
OTHER_STORE = "correct that, or choose another store"
RESUMES = "correct that, and the same command resumes"
# Patterns of file names, see `removal.discard`.
STORE_FILES = (
    *("*.bin", "*.bin.index", "*.idx", "*.json*", "report.md*"),
    *("tokenizer/*", "tokenizer/additional_chat_templates/*"),
)


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the text; end-of-text tokens count as 0
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Metadata:
    """Content of `metadata.json`, which every reader of a store reads first."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer_type: str
    tokenizer_sha256: str
    eos_token_id: int | None
    train: Split
    val: Split
    sources: list[str]
    settings: dict[str, Any]  # all settings of the recipe
    counts: dict[str, Any]  # text that was read, changed and left out
    cleaning: dict[str, RuleStats]  # changes and drops by rule, with examples
    repeated_documents: int  # documents left out by --dedup
    command: str
    hub_datasets: list[str] = field(default_factory=list)  # sources that are on the Hub, not on a local disk
    commits: dict[str, str] = field(default_factory=dict)  # of these sources, by name
    validation_splits: list[str] = field(default_factory=list)  # source of the validation text if none was held out
    licenses: dict[str, str] = field(default_factory=dict)  # of the installed packages whose files were read
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """Hash of the tokens of both splits."""
        return hashlib.sha256((self.train.sha256 + self.val.sha256).encode()).hexdigest()

    @property
    def files(self) -> dict[str, tuple[str, int | None]]:
        """SHA-256 and size in bytes by file name. The size of the tokenizer is None."""
        files = {"tokenizer/tokenizer.json": (self.tokenizer_sha256, None)}
        for split in SPLITS:
            info: Split = getattr(self, split)
            files[self.index_file(split)] = (info.index_sha256, (info.documents + (self.format_version == 1)) * 8)
            files[tokens_file(split)] = (info.sha256, info.tokens * np.dtype(self.dtype).itemsize)
        return files

    def index_file(self, split: str) -> str:
        return f"{split}.offsets.bin" if self.format_version == 1 else index_file(split)


class TokenStore:
    """Finished token store, opened for reading."""

    def __init__(self, folder: str | Path):
        """Open the store in `folder`.
        Raise a `UserError` if none exists, or it is unfinished, damaged, of a newer format or has another tokenizer."""
        self.folder = Path(os.path.expanduser(folder))
        self.metadata = read_metadata(self.folder)
        problems = []
        with disk_errors(self.folder, OTHER_STORE):
            for name, (sha256, size) in self.metadata.files.items():
                path = self.folder / name
                if not path.is_file():
                    problems.append(f"{path} is {'not a regular file' if os.path.lexists(path) else 'missing'}.")
                elif size is None:
                    if file_sha256(path) != sha256:
                        problems.append(f"{path.parent} is not the tokenizer that these tokens were encoded with.")
                elif (length := path.stat().st_size) != size:
                    problems.append(f"{path} is {length:,} bytes long, not {size:,}: it is truncated or was changed.")
        Problems(f"{problem} Delete {self.folder} and build it again." for problem in problems).refuse()

    @staticmethod
    def is_store(folder: str | Path) -> bool:
        with disk_errors(folder, OTHER_STORE):
            return (Path(os.path.expanduser(folder)) / "metadata.json").is_file()

    def memory_map(self, split: str) -> np.ndarray:
        """Return the tokens of a split, (tokens,), which are read from disk as needed."""
        return np.memmap(self.folder / tokens_file(split), np.dtype(self.metadata.dtype).newbyteorder("<"), mode="r")

    def in_memory(self, split: str) -> np.ndarray:
        """Return the tokens of a split, (tokens,), in RAM."""
        return np.fromfile(self.folder / tokens_file(split), np.dtype(self.metadata.dtype).newbyteorder("<"))

    def dataset(self, split: str, block_size: int) -> "Dataset":
        """Return a split as a `datasets.Dataset` of `input_ids` and equal `labels`, (tokens // block_size rows,
        block_size), for `Trainer`, TRL and other programs. Its Arrow table is the memory map, which is not copied. The
        last tokens that do not fill a block are left out. Raise a `UserError` if the split is shorter than a block."""
        import datasets
        import pyarrow as pa

        tokens = self.memory_map(split)
        rows = len(tokens) // block_size if block_size > 0 else 0
        if not rows:
            raise UserError(f"{self.folder} has {len(tokens):,} tokens in {split}, and block_size is {block_size:,}.")
        values = pa.Array.from_buffers(
            pa.from_numpy_dtype(tokens.dtype.newbyteorder("=")), rows * block_size, [None, pa.py_buffer(tokens)]
        )
        blocks = pa.FixedSizeListArray.from_arrays(values, block_size)
        table = pa.table({"input_ids": blocks, "labels": blocks})
        name = f"{getattr(self.metadata, split).sha256}-{block_size}-labels"  # otherwise, all tokens would be hashed
        fingerprint = hashlib.sha256(name.encode()).hexdigest()[:16]
        return datasets.Dataset(table, split=HUB_SPLITS[split], fingerprint=fingerprint)

    def offsets(self, split: str) -> np.ndarray:
        """Return the offsets of documents, (documents + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]."""
        index = np.fromfile(self.folder / self.metadata.index_file(split), dtype="<i8")
        return index if self.metadata.format_version == 1 else np.concatenate([[0], index])

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer. Raise a `UserError` if it cannot be loaded or differs from the metadata."""
        from tokenizer.encoding import vocabulary

        tokenizer = vocabulary.load(self.folder / "tokenizer")
        size, eos = self.metadata.vocab_size, self.metadata.eos_token_id
        if (size, eos) != (len(tokenizer), tokenizer.eos_token_id):
            raise UserError(
                f"{self.folder / 'metadata.json'} states {size:,} tokens and end-of-text id {eos}, but its tokenizer "
                f"has {len(tokenizer):,} tokens and end-of-text id {tokenizer.eos_token_id}: one of them was changed. "
                f"Delete {self.folder} and build it again."
            )
        return tokenizer

    def check_ids(self, split: str) -> None:
        """Raise a `UserError` if a token id is outside the vocabulary."""
        if (largest := int(self.memory_map(split).max())) >= self.metadata.vocab_size:
            raise UserError(
                f"{self.folder / tokens_file(split)} contains token id {largest}, but its vocabulary has only "
                f"{self.metadata.vocab_size} tokens; the file or metadata.json was changed. Delete {self.folder} "
                "and build it again."
            )

    def check_hashes(self, *splits: str) -> None:
        """Compare the hashes of tokens and indexes with the metadata, for `splits` or for all splits.
        Raise a `UserError` if files were changed, or cannot be read."""
        problems = []
        for split, name_of in itertools.product(splits or SPLITS, (self.metadata.index_file, tokens_file)):
            path, (recorded_sha256, _) = self.folder / name_of(split), self.metadata.files[name_of(split)]
            with disk_errors(path, "check its disk"):
                sha256 = file_sha256(path)
            if sha256 != recorded_sha256:
                problems.append(
                    f"{path} was changed or damaged: its SHA-256 is {sha256}, but metadata.json states "
                    f"{recorded_sha256}. Restore the original, or delete {self.folder} and build it again."
                )
        Problems(problems).refuse()


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size < MAX_UINT16_VOCAB else "uint32"


def tokens_file(split: str) -> str:
    return f"{split}.bin"


def index_file(split: str) -> str:
    return f"{split}.bin.index"


def read_metadata(folder: Path) -> Metadata:
    path = folder / "metadata.json"
    if not TokenStore.is_store(folder):
        if folder.name.endswith(PACKED_STORE) and folder.is_file():
            raise UserError(
                f"{folder} is an archive; if it is a packed token store, unpack it with {unpack_command(folder)}."
            )
        if folder.is_dir() and any((folder / tokens_file(split)).exists() for split in SPLITS):
            raise UserError(
                f"{folder} has token ids, but no metadata.json: copy the whole token store, or convert ids of another "
                "program with `python -m tokenizer.pretokenize --import_tokens`."
            )
        text = folder if folder.exists() else "TEXT"
        output = f"data/{folder.resolve().stem}" if folder.exists() else folder  # a store is written to a new folder
        raise UserError(
            f"{folder} is not a token store: it has no metadata.json. Create a store with "
            f"`python -m tokenizer.pretokenize --input {shlex.quote(str(text))} --output {shlex.quote(str(output))}`; "
            "to evaluate a model, add --tokenizer MODEL."
        )
    try:
        with disk_errors(path, OTHER_STORE):
            content = schema.read(path, dict[str, Any])
        version = content.get("format_version")
        check_format(folder, schema.build(version, int, "format_version"), FORMAT_VERSION)
        if version != 1 and (unknown := content.keys() - {part.name for part in fields(Metadata)}):
            raise UserError(
                f"{path} has the unknown key {min(unknown)}. If a newer version of GPT2Scratch wrote it, update with "
                "`git pull`."
            )
        return schema.build(_from_format_1(content) if version == 1 else content, Metadata)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not the metadata of a token store ({error}). Choose another folder or, if {folder} was one, "
            "delete it and build it again."
        ) from error


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of format 1 with the current names. Values that format 1 did not record are empty."""
    splits = {split: {"index_sha256": content[split].pop("offsets_sha256")} | content[split] for split in SPLITS}
    content.pop("fingerprint", None)
    empty = {"settings": {"cleaning": [], "dedup": "no"}, "counts": {}, "cleaning": {}, "repeated_documents": 0}
    return content | splits | empty


def finish(folder: Path, splits: dict[str, tuple[int, int, int]], **about: Any) -> None:
    """Write the metadata of a store whose files and tokenizer exist. `splits`: (tokens, documents, bytes) per split."""
    parts = {
        split: Split(*numbers, file_sha256(folder / tokens_file(split)), file_sha256(folder / index_file(split)))
        for split, numbers in splits.items()
    }
    metadata = Metadata(**parts, tokenizer_sha256=file_sha256(folder / "tokenizer" / "tokenizer.json"), **about)
    # Older versions refuse newer keys.
    newer = ("validation_splits", "licenses", "commits")
    content = {name: value for name, value in asdict(metadata).items() if value or name not in newer}
    write_atomic(folder / "metadata.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
