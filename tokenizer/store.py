"""The token store: a folder of tokens that says what it is.

train.bin, val.bin                  ids, little-endian uint16 (uint32 from 65,500 tokens on), nanoGPT reads them as
                                    they are; every document ends with the end-of-text id, if there is one
train.offsets.bin, val.offsets.bin  int64, where each document starts, and the end: documents + 1 numbers
tokenizer/                          loads with AutoTokenizer
metadata.json                       what all of that is, written last: without it there is no store
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from command_line import UserError
from tokenizer import vocabulary

FORMAT_VERSION = 1
SPLITS = ("train", "val")
MAX_UINT16_VOCAB = 65_500  # Megatron's limit, so that its reader agrees with us about the dtype
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the text; end-of-text tokens count as none
    sha256: str
    offsets_sha256: str


@dataclass(frozen=True)
class Metadata:
    """`metadata.json`. Whoever reads a store reads this and assumes nothing."""

    dtype: str
    vocab_size: int
    tokenizer_type: str
    tokenizer_sha256: str
    eos_token_id: int | None
    train: Split
    val: Split
    sources: list[str]
    fingerprint: str  # of the text and the settings it was made with
    command: str
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """Changes whenever the tokens do."""
        return hashlib.sha256((self.train.sha256 + self.val.sha256).encode()).hexdigest()


class TokenStore:
    """A finished store, opened for reading."""

    def __init__(self, folder: str | Path):
        """
        Raises:
            UserError: not a store, an unfinished or damaged one, of a newer format, or its tokenizer was exchanged.
        """
        self.folder = Path(folder)
        self.metadata = _read_metadata(self.folder)
        problems = [problem for split in SPLITS for problem in self._wrong_sizes(split)]
        if not (self.folder / "tokenizer" / "tokenizer.json").is_file():
            problems.append(f"{self.folder} has lost its tokenizer/tokenizer.json.")
        elif vocabulary.sha256(self.folder / "tokenizer") != self.metadata.tokenizer_sha256:
            problems.append(
                f"{self.folder / 'tokenizer'} is another tokenizer than the one these tokens were made with."
            )
        if problems:
            raise UserError("\n".join(f"{problem} Delete it and make it anew." for problem in problems))

    @staticmethod
    def is_store(folder: str | Path) -> bool:
        return (Path(folder) / "metadata.json").is_file()

    def _wrong_sizes(self, split: str) -> list[str]:
        info: Split = getattr(self.metadata, split)
        itemsize = np.dtype(self.metadata.dtype).itemsize
        wrong = []
        for path, items, size in (
            (self.folder / f"{split}.bin", info.tokens, itemsize),
            (self.folder / f"{split}.offsets.bin", info.documents + 1, 8),
        ):
            if not path.is_file():
                wrong.append(f"{path} is missing.")
            elif path.stat().st_size != items * size:
                wrong.append(
                    f"{path} is {path.stat().st_size:,} bytes long, but {items:,} items of {size} bytes each are "
                    f"{items * size:,}: it is truncated or was changed."
                )
        return wrong

    def memory_map(self, split: str) -> np.ndarray:
        """(tokens,) read from disk as needed."""
        return np.memmap(self.folder / f"{split}.bin", dtype=np.dtype(self.metadata.dtype).newbyteorder("<"), mode="r")

    def in_memory(self, split: str) -> np.ndarray:
        """(tokens,) in RAM."""
        return np.fromfile(self.folder / f"{split}.bin", dtype=np.dtype(self.metadata.dtype).newbyteorder("<"))

    def offsets(self, split: str) -> np.ndarray:
        """(documents + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]."""
        return np.fromfile(self.folder / f"{split}.offsets.bin", dtype="<i8")

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return vocabulary.load(self.folder / "tokenizer")

    def check_ids(self, split: str) -> None:
        """
        Raises:
            UserError: an id that the vocabulary does not have.
        """
        tokens = self.memory_map(split)
        for start in range(0, len(tokens), SCAN_TOKENS):
            largest = int(tokens[start : start + SCAN_TOKENS].max())
            if largest >= self.metadata.vocab_size:
                raise UserError(
                    f"{self.folder / f'{split}.bin'} holds token id {largest}, beyond its vocabulary of "
                    f"{self.metadata.vocab_size}; the file or metadata.json was changed. Delete it and make it anew."
                )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_metadata(folder: Path) -> Metadata:
    path = folder / "metadata.json"
    if not path.is_file():
        unfinished = folder.is_dir() and any((folder / f"{split}.bin").exists() for split in SPLITS)
        what = "an unfinished token store" if unfinished else "not a token store"
        raise UserError(
            f"{folder} is {what}: it has no metadata.json. Make one with "
            f"`python -m tokenizer.pretokenize --input TEXT --output {folder}`."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version > FORMAT_VERSION:
            raise UserError(
                f"{folder} is a store of format {version}; this version reads up to {FORMAT_VERSION}. Update."
            )
        if content["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"its dtype is {content['dtype']}")
        splits = {split: Split(**content.pop(split)) for split in SPLITS}
        return Metadata(**content, **splits)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the metadata of a token store ({error}). Delete it and make it anew."
        ) from error


class StoreWriter:
    """Writes a store document by document. Nothing counts until `finish` has written the metadata."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase):
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = np.dtype("<u2" if len(tokenizer) < MAX_UINT16_VOCAB else "<u4")
        self.eos = tokenizer.eos_token_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metadata.json").unlink(missing_ok=True)
        self.files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.bytes = dict.fromkeys(SPLITS, 0)
        self.offsets: dict[str, list[int]] = {split: [0] for split in SPLITS}

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_) -> None:
        for file in self.files.values():
            file.close()

    def add(self, split: str, ids: np.ndarray, n_bytes: int, ends_document: bool) -> None:
        """Appends a piece of a document: `ids` (n,), which stand for `n_bytes` of text."""
        ids.astype(self.dtype).tofile(self.files[split])
        self.tokens[split] += len(ids)
        self.bytes[split] += n_bytes
        if ends_document:
            if self.eos is not None:
                np.array([self.eos], dtype=self.dtype).tofile(self.files[split])
                self.tokens[split] += 1
            self.offsets[split].append(self.tokens[split])

    def finish(self, validation_fraction: float, sources: list[str], fingerprint: str, command: str) -> TokenStore:
        """Closes the files, makes sure that both splits hold text, and writes the tokenizer and the metadata."""
        for file in self.files.values():
            file.close()
        if self.tokens["train"] == 0:  # the only document fell to validation
            self._exchange_splits()
        if self.tokens["val"] == 0:
            self._cut_off_tail(validation_fraction)
        for split in SPLITS:
            np.array(self.offsets[split], dtype="<i8").tofile(self.folder / f"{split}.offsets.bin")
        vocabulary.save(self.tokenizer, self.folder / "tokenizer")
        metadata = Metadata(
            dtype={2: "uint16", 4: "uint32"}[self.dtype.itemsize],
            vocab_size=len(self.tokenizer),
            tokenizer_type="character" if vocabulary.is_character(self.tokenizer) else "bpe",
            tokenizer_sha256=vocabulary.sha256(self.folder / "tokenizer"),
            eos_token_id=self.eos,
            **{split: self._described(split) for split in SPLITS},
            sources=sources,
            fingerprint=fingerprint,
            command=command,
        )
        unfinished = self.folder / "metadata.json.tmp"
        unfinished.write_text(json.dumps(asdict(metadata), indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, self.folder / "metadata.json")
        return TokenStore(self.folder)

    def _described(self, split: str) -> Split:
        return Split(
            tokens=self.tokens[split],
            documents=len(self.offsets[split]) - 1,
            bytes=self.bytes[split],
            sha256=file_sha256(self.folder / f"{split}.bin"),
            offsets_sha256=file_sha256(self.folder / f"{split}.offsets.bin"),
        )

    def _exchange_splits(self) -> None:
        os.replace(self.folder / "val.bin", self.folder / "train.bin")
        (self.folder / "val.bin").touch()
        for of_split in (self.tokens, self.bytes, self.offsets):
            of_split["train"], of_split["val"] = of_split["val"], of_split["train"]

    def _cut_off_tail(self, fraction: float) -> None:
        """No document fell to validation: the end of the text does, about `fraction` of all bytes, from the start of a
        line or of a document on where there is one nearby, else from that of a character.

        Raises:
            UserError: not enough text for two splits.
        """
        pieces = vocabulary.token_bytes(self.tokenizer)
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        starts_character = np.array([bool(piece) and not 0x80 <= piece[0] < 0xC0 for piece in pieces])
        ends_line = np.array([piece.endswith(b"\n") for piece in pieces])
        path = self.folder / "train.bin"
        tokens, offsets = self.tokens["train"], np.array(self.offsets["train"])
        wanted = fraction * self.bytes["train"]
        first = max(0, tokens - int(2 * fraction * tokens) - 1024)
        window = np.fromfile(path, dtype=self.dtype, offset=first * self.dtype.itemsize)
        from_end = lengths[window][::-1].cumsum()[::-1]  # bytes from token i to the end
        has_text_before = from_end < self.bytes["train"]
        cuts = np.flatnonzero(starts_character[window] & has_text_before)
        if not len(cuts):
            raise UserError(
                f"The text is too short: {self.bytes['train']} bytes in {tokens} tokens cannot be split into text to "
                f"train on and text to validate with."
            )
        opens = ends_line[window[cuts - 1]] | np.isin(cuts + first, offsets)
        opens &= (from_end[cuts] > wanted / 2) & (from_end[cuts] < 2 * wanted)
        cuts = cuts[opens] if opens.any() else cuts
        tail = window[cuts[np.abs(from_end[cuts] - wanted).argmin()] :]
        tail.tofile(self.folder / "val.bin")
        kept = tokens - len(tail)
        os.truncate(path, kept * self.dtype.itemsize)
        tail_bytes = int(lengths[tail].sum())
        self.tokens = {"train": kept, "val": len(tail)}
        self.bytes = {"train": self.bytes["train"] - tail_bytes, "val": tail_bytes}
        self.offsets["train"] = [*offsets[offsets < kept], kept]
        self.offsets["val"] = [0, *(offsets[offsets > kept] - kept)]
