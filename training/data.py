"""Where a run's tokens come from, and where they lie while it trains."""

import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from command_line import UserError
from tokenizer.corpus import Corpus, CorpusArguments
from tokenizer.pretokenize import PretokenizeArguments, check, pretokenize, settings_hash
from tokenizer.store import TokenStore
from tokenizer.vocabulary import VocabularyArguments

CACHE = Path(__file__).parent.parent / "data"  # raw text, tokenized: one folder for each text and its settings
SPLIT_SEED = PretokenizeArguments.seed  # not the run's: runs that differ in seed are scored on the same text


@dataclass
class DataArguments:
    data: str | None = field(
        default=None,
        metadata={"help": "What to train on: a token store, or text (file, folder, glob, Hub dataset id)."},
    )
    data_placement: Literal["auto", "ram", "mmap"] = field(
        default="auto",
        metadata={
            "help": "Where the tokens lie: in RAM, or memory-mapped. auto: RAM where they fit half of what is free."
        },
    )


def open_store(
    data: str, corpus: CorpusArguments, vocabulary: VocabularyArguments, say: Callable[[str], None]
) -> TokenStore:
    """The store at `data`; or, where `data` is text, the store made from it, cached by its content and the settings.

    Raises:
        UserError: there is neither, or the text or the store is bad.
    """
    if is_store(data):
        return TokenStore(data)
    check(corpus)
    fingerprint = settings_hash(Corpus([data], corpus), vocabulary, SPLIT_SEED)
    folder = CACHE / f"{name_of(data)}-{fingerprint[:12]}"
    return pretokenize([data], folder, corpus, vocabulary, SPLIT_SEED, say)


def name_of(data: str) -> str:
    """A plain name for a text or a store: `books/*.txt` and `books/` are both `books`."""
    path = Path(data).expanduser()
    named = path.parent if set(path.name) & set("*?[") else path
    return re.sub(r"[^\w.-]+", "-", named.resolve().stem).strip(".-") or "run"


def is_store(data: str) -> bool:
    """Whether `data` is a token store, be it a damaged one, and not text."""
    return TokenStore.is_store(data) or (Path(data) / "train.bin").is_file()


def place_tokens(store: TokenStore, split: str, placement: str, local_processes: int) -> tuple[np.ndarray, str]:
    """(tokens,) and a word on where they lie. Every process of this machine holds its own copy in RAM.

    Raises:
        UserError: `ram` was asked for and there is not enough, or an id is beyond the vocabulary.
    """
    store.check_ids(split)
    size = (store.folder / f"{split}.bin").stat().st_size
    needed, free = size * local_processes, psutil.virtual_memory().available
    if placement == "ram" and needed > free:
        raise UserError(
            f"data_placement is ram, but {split}.bin needs {needed / 1e9:.1f} GB for {local_processes} processes and "
            f"{free / 1e9:.1f} GB are free; use mmap or auto."
        )
    if placement == "ram" or (placement == "auto" and needed < free / 2):
        return store.in_memory(split), "in RAM"
    tokens = store.memory_map(split)
    if hasattr(mmap, "MADV_RANDOM"):  # read-ahead of megabytes a window stalls a cold file for 100 ms and more
        tokens._mmap.madvise(mmap.MADV_RANDOM)
    return tokens, "memory-mapped"
