"""Make a token store of tokens that another program wrote: headerless binaries, such as nanoGPT's `train.bin`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from common import schema
from common.atomic import unfinished_path
from common.errors import NONSENSE, Problems, UserError, disk_errors
from common.limits import setting
from tokenizer.build import output, report
from tokenizer.build.recipe import SEED
from tokenizer.corpus.documents import Counts
from tokenizer.corpus.file_finder import TextFile
from tokenizer.encoding import encode, vocabulary
from tokenizer.store.store import RESUMES, STORE_FILES, TokenStore, dtype_of, index_file, tokens_file

BLOCK_TOKENS = 1 << 24
SCANNED_IDS = 100_000  # to recognize a wrong type
Dtype = Literal["uint16", "int16", "uint32", "int32", "int64"]


@dataclass
class ImportArguments:
    import_tokens: str | None = setting(
        None, "Make a store of a headerless file of token ids instead of text, such as nanoGPT's train.bin."
    )
    dtype: Dtype | None = setting(
        None, "Type of these ids; by default that in NAME_metadata.json next to NAME.bin, if there is one."
    )
    val: str | None = setting(None, "File of ids for validation; by default the end of --import_tokens.")

    def problems(self, tokenizer: str | None) -> Iterator[str]:
        """Yield what is wrong, one sentence each."""
        if self.import_tokens is None:
            names = [f"--{name}" for name in ("dtype", "val") if getattr(self, name) is not None]
            if names:
                yield f"{' and '.join(names)} apply only to --import_tokens."
            return
        if tokenizer is None:
            yield "--import_tokens needs --tokenizer: the folder, tokenizer.json or Hub id that the ids belong to."
        dtype = recorded_dtype(Path(self.import_tokens))
        if None not in (self.dtype, dtype) and self.dtype != dtype:
            yield f"--dtype is {self.dtype}, but the metadata next to {self.import_tokens} state {dtype}."
        if self.dtype is dtype is None:
            types = ", ".join(get_args(Dtype))
            yield f"--import_tokens needs --dtype ({types}): the file itself does not state its type."


def recorded_dtype(path: Path) -> str | None:
    """Return the type that `NAME_metadata.json` states for `NAME.bin`, or None."""
    try:
        dtype = schema.read(path.with_name(f"{path.stem}_metadata.json"), dict[str, Any]).get("dtype")
    except (OSError, *NONSENSE):
        return None
    return dtype if dtype in get_args(Dtype) else None


class ImportedSplit:
    """Ids of one file, and the ends of its documents."""

    def __init__(self, path: Path, dtype: str, vocab_size: int, eos: int | None):
        """Read all ids once. Raise a `UserError` if the file is not made of ids of this type and vocabulary."""
        itemsize, size = np.dtype(dtype).itemsize, TextFile.at(path).size
        if size == 0 or size % itemsize:
            raise UserError(f"{path} has {size:,} bytes, which are not ids of {itemsize} bytes each; check --dtype.")
        self.path, self.ids = path, np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")  # (n,)
        if self.ids[:3].tobytes().startswith(b"\x93NUMPY"):
            raise UserError(f"{path} begins with a header of NumPy; write its ids with `numpy.load(...).tofile(...)`.")
        if itemsize < 8 and len(self.ids) > 2 and not self.ids[1:SCANNED_IDS:2].any():
            raise UserError(
                f"Every second id of {path} is 0, as in a file of a larger type than {dtype}; check --dtype."
            )
        ends = [np.array([len(self.ids)])]  # the last document may have no end-of-text token
        for start in range(0, len(self.ids), BLOCK_TOKENS):
            block = self.ids[start : start + BLOCK_TOKENS]
            wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
            if len(wrong):
                raise UserError(
                    f"{path} contains id {int(block[wrong[0]]):,} at place {start + wrong[0]:,}, but the tokenizer has "
                    f"{vocab_size:,} tokens; check --dtype and --tokenizer."
                )
            if eos is not None:
                ends.append(start + 1 + np.flatnonzero(block == eos))
        self.ends = np.unique(np.concatenate(ends))  # (documents,) in tokens

    def divided_at(self, fraction: float) -> int:
        """Return the first token of the end that is held out: about `fraction` of all, from the start of a document if
        one is near. Raise a `UserError` for fewer than three tokens: validation needs two."""
        if (last := len(self.ids) - 2) < 1:
            raise UserError(f"{self.path} has {len(self.ids)} tokens, too few to hold out two; give --val.")
        target = min(last, max(1, round(len(self.ids) * (1 - fraction))))
        nearest = int(self.ends[np.argmin(np.abs(self.ends - target))])
        is_near = abs(nearest - target) < len(self.ids) * fraction / 2
        return nearest if is_near and nearest <= last else target

    def write(self, folder: Path, split: str, start: int, stop: int, lengths: np.ndarray) -> tuple[int, int, int]:
        """Write a part of the ids and its index. Return its numbers of tokens, documents and bytes of text.
        `lengths`: bytes of text per token, (vocab_size,)."""
        ends = self.ends[(self.ends > start) & (self.ends < stop)]
        n_bytes, dtype = 0, np.dtype(dtype_of(len(lengths))).newbyteorder("<")
        with (folder / tokens_file(split)).open("wb") as file:
            for position in range(start, stop, BLOCK_TOKENS):
                block = self.ids[position : min(position + BLOCK_TOKENS, stop)]
                n_bytes += int(lengths[block].sum())
                file.write(block.astype(dtype))  # `tofile` does not report why it fails
        index = np.append(ends, stop).astype("<u8") - np.uint64(start)
        (folder / index_file(split)).write_bytes(index)
        return stop - start, len(index), n_bytes


def import_store(
    arguments: ImportArguments, name: str, fraction: float, folder: Path, say: Callable[[str], None]
) -> TokenStore:
    """Make the store in `folder`, or open it if it was made of the same files. `name` is the tokenizer.
    Raise a `UserError` if files, types or ids are wrong, or `folder` contains something else or is in use."""
    paths = [Path(os.path.expanduser(path)) for path in (arguments.import_tokens, arguments.val) if path is not None]
    inputs = [[file.path, file.size, file.modified] for file in map(TextFile.at, paths)]
    dtype = arguments.dtype or recorded_dtype(paths[0])
    settings = {**vars(arguments), "dtype": dtype, "tokenizer": name, "cleaning": [], "dedup": "no", "seed": SEED}
    settings["validation_fraction"] = fraction
    folder = output.resolved(folder)
    if TokenStore.is_store(folder):
        return output.open_finished(folder, settings, inputs, say)
    output.check_writable(folder)
    tokenizer = vocabulary.load(name)
    vocabulary.check_ids(tokenizer, name)
    size, eos, problems = len(tokenizer), tokenizer.eos_token_id, Problems()
    splits = [problems.add_of(ImportedSplit, path, dtype, size, eos) for path in paths]
    problems.refuse()
    train, val = splits[0], splits[-1]  # the same file, if it is divided
    if len(val.ids) < 2:
        raise UserError(f"{paths[-1]} has one token, but validation needs two.")
    lengths = np.array([len(text) for text in encode.token_bytes(tokenizer.backend_tokenizer)], dtype=np.int64)
    end = train.divided_at(fraction) if val is train else len(train.ids)
    bounds = {"train": (train, 0, end), "val": (val, end if val is train else 0, len(val.ids))}
    with output.locked(folder, "", wait=False):
        if TokenStore.is_store(folder):  # another process has just written it
            return output.open_finished(folder, settings, inputs, say)
        with disk_errors(folder, RESUMES), unfinished_path(folder.resolve(), ".importing", STORE_FILES) as draft:
            vocabulary.save(tokenizer, draft / "tokenizer")
            sizes = {name: split.write(draft, name, *ends, lengths) for name, (split, *ends) in bounds.items()}
            counts = Counts(
                documents=sum(len(part.ends) for part in splits), bytes=sum(part[2] for part in sizes.values())
            )
            report.describe(
                draft,
                tokenizer.backend_tokenizer,
                sizes,
                inputs,
                eos_token_id=eos,
                sources=[str(path) for path in paths],
                validation_splits=[str(paths[1])] if len(paths) == 2 else [],
                settings=settings,
                counts=asdict(counts) | {"links": 0, "tails": 0},
                cleaning={},
                repeated_documents=0,
            )
    store = TokenStore(folder)
    say(report.summary(store, is_cache=False))
    return store
