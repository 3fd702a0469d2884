"""Training data: the token store of a run, its cache, and the placement of tokens in memory."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from common import schema
from common.atomic import write_atomic
from common.errors import NONSENSE, UserError, counted
from common.limits import free, setting
from common.machine import free_memory
from tokenizer.build.output import acquired
from tokenizer.build.recipe import Recipe
from tokenizer.corpus.units import Corpus
from tokenizer.store.store import TokenStore, read_metadata
from training.data.tokens import Tokens

CACHE = Path(__file__).parents[2] / "data"  # tokenized raw text: one folder per text and settings
TEXT_HASHES = ".text_hashes.json"  # in CACHE: hash of a text by a hash of the names, sizes and times of its files
# A file that changed so recently may change again without a new time: drives record times in steps of two seconds.
CLOCK_STEP = 2 * 10**9  # nanoseconds
# Tokens on the device leave less memory for the micro-batch. They save only the copy of each batch, which is not worth
# a smaller micro-batch; at a twentieth of the memory, they shrink it by at most that fraction.
LARGEST_SHARE_OF_DEVICE = 1 / 20
LOCAL_WORLD_SIZE = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


@dataclass
class DataArguments:
    data: str | None = setting(None, "A token store, or text: file, folder, glob, Hub id.", resume="derived")
    data_placement: Literal["auto", "device", "ram", "mmap"] = free(
        "auto",
        "Where to keep the tokens: on the GPU, in RAM, or memory-mapped. auto: on the GPU if they use at most a "
        "twentieth of its free memory, otherwise in RAM if they use less than half of the free RAM.",
    )


@dataclass(frozen=True)
class Placement:
    where: Literal["device", "ram", "mmap"]
    n_bytes: int  # bytes that the tokens of a process use in the memory that it trains in

    def __str__(self) -> str:
        return {"device": "on the device", "ram": "in RAM", "mmap": "memory-mapped"}[self.where]


@dataclass(frozen=True)
class RunData:
    """A token store, opened for training."""

    store: TokenStore
    tokenizer: PreTrainedTokenizerBase
    train: Tokens
    val: Tokens


def open_store(recipe: Recipe, say: Callable[[str], None], recorded: str | None = None) -> TokenStore:
    """Open the recipe's token store, which for text is built first and cached by content and settings. A token store
    must be the recipe's only input. Raise a `UserError` if the input does not exist or is invalid. `recorded`: identity
    of the tokens of a continued run: if cached, they are used, even if the Hub has a new commit or the text is gone."""
    folder = _folder_of(recipe, recorded)
    if is_store(str(folder)):
        return TokenStore(folder)
    from tokenizer.build.store_builder import pretokenize

    return pretokenize(recipe, folder, say, is_cache=True)


def find_store(recipe: Recipe, recorded: str | None = None) -> TokenStore | None:
    """Return the complete token store of `open_store` if it exists, otherwise None. Create nothing."""
    [data] = recipe.inputs
    with suppress(UserError):  # the text is not read if no cached store has its name
        if is_store(data) or any(CACHE.glob(f"{name_of(data)}-*/metadata.json")):
            return TokenStore(_folder_of(recipe, recorded))
    return None


def find_recorded_store(data: str, identity: str) -> TokenStore | None:
    """Return the token store `data`, or if it is text, the cached store with the tokens of this identity. The text is
    not read. Return None if the store is damaged or no longer exists."""
    folder = Path(os.path.expanduser(data)) if is_store(data) else find_cached(identity)
    with suppress(UserError):
        if folder and read_metadata(folder).identity == identity:  # a store may have been built again
            return TokenStore(folder)
    return None


def find_cached(identity: str, settings: dict[str, Any] | None = None) -> Path | None:
    """Return the cached token store with the tokens of this identity, and made with these settings of a recipe."""
    for path in CACHE.glob("*/metadata.json"):
        with suppress(UserError):
            metadata = read_metadata(path.parent)
            if metadata.identity == identity and settings in (None, metadata.settings):
                return path.parent
    return None


def _folder_of(recipe: Recipe, recorded: str | None) -> Path:
    """Return the recipe's only input if it is a token store, otherwise the cache folder for that text. Raise a
    `UserError` if the text does not exist."""
    [data] = recipe.inputs
    if is_store(data):
        return Path(os.path.expanduser(data))
    if recorded is not None and (folder := find_cached(recorded, recipe.settings())) is not None:
        return folder
    content = f"{_text_hash(Corpus([data], recipe.corpus))} {recipe.settings()}"
    return CACHE / f"{name_of(data)}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _text_hash(corpus: Corpus) -> str:
    """Return the hash of a text. One process reads the text, and again only if name, size or time of a file changed."""
    if not corpus.all_files:  # a Hub dataset: the hash is that of its name and commit
        return corpus.fingerprint()
    path, start = CACHE / TEXT_HASHES, time.time_ns()
    files = [
        [os.path.abspath(file.path), os.access(file.path, os.R_OK), file.size, file.modified, file.is_named, file.val]
        for file in corpus.all_files
    ]
    key = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{TEXT_HASHES}.lock"))
        with acquired(lock, f"reading text and holds {lock.lock_file}"):
            hashes = {}
            with suppress(OSError, *NONSENSE):  # missing or damaged: the text is read again
                hashes = schema.read(path, dict[str, str])
            if key not in hashes:
                hashes[key] = corpus.fingerprint()
                if all(file.modified < start - CLOCK_STEP for file in corpus.all_files):
                    write_atomic(path, schema.sealed(hashes))
            return hashes[key]
    except OSError:  # the cache cannot be written
        return corpus.fingerprint()


def name_of(data: str) -> str:
    """Return a short name for a text or a store: `books/*.txt` and `books/` are both `books`."""
    folder = Path(os.path.expanduser(data))
    while set(str(folder)) & set("*?[") and not os.path.lexists(folder):
        folder = folder.parent
    return re.sub(r"[^\w.-]+", "-", folder.resolve().stem).strip(".-") or "run"


def is_store(data: str) -> bool:
    """Return whether `data` is a token store, even a damaged one, rather than text."""
    folder = Path(os.path.expanduser(data))
    has_metadata = TokenStore.is_store(data)  # as a folder of text may have
    return (folder / "train.bin").is_file() or (has_metadata and (folder / "tokenizer").is_dir())


def choose_placement(choice: str, n_bytes: int, device: torch.device, local_processes: int) -> Placement:
    """Decide where to keep `n_bytes` of tokens. Raise a `UserError` if the requested memory is too small.
    Every process of this machine holds its own copy, except of a memory map. Only NVIDIA and AMD GPUs have separate
    memory: on other devices, the device's memory is RAM."""
    if device.type == "cuda" and choice in ("auto", "device"):
        free, _ = torch.cuda.mem_get_info(device)
        if choice == "device" and n_bytes > free:
            raise UserError(
                f"data_placement is device, but the tokens need {n_bytes / 1e9:.1f} GB and the device has "
                f"{free / 1e9:.1f} GB free; use ram, mmap or auto."
            )
        if choice == "device" or n_bytes <= free * LARGEST_SHARE_OF_DEVICE:
            return Placement("device", n_bytes)
    total, free = n_bytes * local_processes, free_memory()
    if choice in ("device", "ram") and total > free:
        raise UserError(
            f"data_placement is {choice}, but the tokens need {total / 1e9:.1f} GB of RAM for "
            f"{counted(local_processes, 'process', 'processes')} and {free / 1e9:.1f} GB are free; use mmap or auto."
        )
    if choice in ("device", "ram") or (choice == "auto" and total < free / 2):
        return Placement("ram", 0 if device.type == "cuda" else n_bytes)
    return Placement("mmap", 0)


def bytes_of(store: TokenStore, *splits: str) -> int:
    tokens = sum(getattr(store.metadata, split).tokens for split in splits)
    return tokens * np.dtype(store.metadata.dtype).itemsize


def processes_of_this_machine(accelerator: Accelerator) -> int:
    """Return the local process count set by torchrun, Accelerate or MPI, or the number of all processes."""
    return get_int_from_env(LOCAL_WORLD_SIZE, accelerator.num_processes)


def place_tokens(store: TokenStore, split: str, place: str, device: torch.device, mask_documents: bool) -> Tokens:
    """Load a split into its place. Raise a `UserError` for an id outside the vocabulary, which is not
    searched in a memory map."""
    has_eos = store.metadata.eos_token_id is not None
    segments = store.offsets(split) - has_eos if mask_documents else None
    if place == "mmap":
        return Tokens.mapped(store.memory_map(split), device, segments)
    store.check_ids(split)
    tokens = store.in_memory(split)
    values = torch.from_numpy(tokens.view(f"<i{tokens.itemsize}"))
    return Tokens(values.to(device) if place == "device" else values, device, segments)
