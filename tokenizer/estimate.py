"""Estimate of a large text's token store: a sample of the text becomes a store with the same settings, scaled by bytes."""

import copy
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from errors import UserError, disk_errors
from tokenizer import files, records
from tokenizer.byte_range import ByteRange, bounds
from tokenizer.corpus import UNIT_BYTES, Corpus, TextFile, kind_of
from tokenizer.files import UnreadableError
from tokenizer.hub import HubDataset
from tokenizer.recipe import Recipe
from tokenizer.store import RESUMES, TokenStore
from tokenizer.store_builder import StoreBuilder, cores
from tokenizer.worker import Workers

LARGE_BYTES = 50_000_000  # of text: less is tokenized in seconds
# Of text, about. A BPE fits the text that it is made from: of 600 MB, 16, 32 and 64 MB said 3.2, 1.8 and 0.8% too few
# tokens, in 7.0, 6.3 and 7.8 s.
SAMPLE_BYTES = 32_000_000
CHUNK_BYTES = 1 << 20  # of plain text and jsonl, read at one place
HEAD_BYTES = 4 << 20  # at least, of a file of another kind


@dataclass(frozen=True)
class Estimate:
    sample: TokenStore
    factor: float  # how many times larger the whole text is
    read: str  # 32 of 9,800 MB
    seconds: float  # that tokenizing the whole should take

    @property
    def whole(self) -> TokenStore:
        """The sample's store with the number of tokens of the whole; the tokens are still those of the sample."""
        store, metadata = copy.copy(self.sample), self.sample.metadata
        tokens = self.factor * (metadata.train.tokens + metadata.val.tokens)
        for_validation = round(tokens * metadata.settings["validation_fraction"])
        store.metadata = replace(
            metadata,
            train=replace(metadata.train, tokens=round(tokens) - for_validation),
            val=replace(metadata.val, tokens=max(1, for_validation)),
        )
        return store


def estimate(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Estimate | None:
    """Estimate the store of the recipe's one input; `folder`, an empty one, gets the sample. None where there is little text.

    Raises:
        UserError: there is no text, it is bad, or a Hub dataset does not state its size.
    """
    [data] = recipe.inputs
    corpus, text = Corpus([data], recipe.corpus), folder / "text"
    if not any(corpus.hub) and corpus.text_size <= LARGE_BYTES:
        return None
    say(f"Reading a sample of {data} ...")
    with disk_errors(folder, RESUMES):
        text.mkdir()
        sampled = _sample_files(corpus, text) if corpus.all_files else _sample_hub(corpus.hub[0], text)
        if sampled is None:
            return None
        factor, read = sampled
        try:
            store, seconds = _build(replace(recipe, inputs=[str(text)]), folder / "store", factor)
        except UserError as error:
            message = str(error).replace(os.path.join(text, ""), "").replace(str(text), "it")
            raise UserError(f"In a sample of {data}: {message}") from error
    return Estimate(store, factor, read, seconds)


def _build(recipe: Recipe, folder: Path, factor: float) -> tuple[TokenStore, float]:
    """Return the store, and the seconds that `factor` times as much text would take on this machine."""
    with Workers() as workers:
        builder = StoreBuilder(recipe, folder, lambda line: None, workers, cores())
        workers.start(min(cores(), 1 + builder.corpus.text_size // UNIT_BYTES))  # which takes time, but once
        times = [time.perf_counter()]
        units = list(range(len(builder.plan.units)))
        times.append(time.perf_counter())
        builder.do_units(units)
        times.append(time.perf_counter())
        store = builder.finish(merge_only=True)
        times.append(time.perf_counter())
    planning, encoding, merging = (after - before for before, after in itertools.pairwise(times))
    busy = len(units) / math.ceil(len(units) / cores())  # processes at a time
    busy_with_whole = max(busy, min(cores(), builder.corpus.text_size * factor / UNIT_BYTES))
    return store, planning + factor * (encoding * busy / busy_with_whole + merging)


def _sample_files(corpus: Corpus, folder: Path) -> tuple[float, str]:
    """Copy parts of the files, evenly spread, to `folder`; return how many times larger the whole is, and what was read."""
    owed = read = 0
    for number, file in enumerate(corpus.all_files):
        owed += file.size * SAMPLE_BYTES / corpus.text_size
        if owed <= 0:
            continue
        try:
            taken = _copy_part(file, int(owed), corpus, folder / f"{number:08}-{Path(file.path).name[-40:]}")
        except UnreadableError as error:  # of a file in a folder: skipped and counted when all is read
            if file.is_named:
                raise
            skipped = error
            continue
        owed -= taken
        read += taken
    if not read:
        raise skipped
    return corpus.size / read, f"{read / 1e6:,.0f} of {corpus.size / 1e6:,.0f} MB"


def _copy_part(file: TextFile, n_bytes: int, corpus: Corpus, to: Path) -> int:
    """Copy about `n_bytes` of a file: places in plain text and jsonl, otherwise its head. Return the bytes that were read."""
    kind, compressed = kind_of(file.path, corpus.arguments.text_column), files.is_compressed(file.path)
    is_plain = kind in ("text", "jsonl") and not compressed
    n_bytes = max(n_bytes, CHUNK_BYTES if is_plain else HEAD_BYTES)
    if n_bytes >= file.size or kind == "json":  # one list, which has no parts
        shutil.copyfile(file.path, to)
        return file.size
    with files.readable(file.path):
        if kind == "parquet":
            return _copy_rows(file, n_bytes, to.with_suffix(".jsonl"))
        if is_plain:
            count = math.ceil(n_bytes / CHUNK_BYTES)
            starts = (file.size * i // count for i in range(count))
            return to.write_bytes(b"".join(_chunk(file, kind, start, corpus.arguments.sample_by) for start in starts))
        head = b"".join(files.inflated_head(file.path, n_bytes))
        (to.with_suffix("") if compressed else to).write_bytes(head[: head.rfind(b"\n") + 1] or head)
    return n_bytes


def _chunk(file: TextFile, kind: str, start: int, sample_by: str) -> bytes:
    stop = start + CHUNK_BYTES
    start, stop, _ = bounds(ByteRange(file.path, kind, start, stop if stop < file.size else None), sample_by)
    with open(file.path, "rb") as whole:
        whole.seek(start)
        return whole.read(-1 if stop is None else stop - start)


def _copy_rows(file: TextFile, n_bytes: int, to: Path) -> int:
    """Copy the first rows of some row groups of a parquet file."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(file.path)
    if not metadata.num_rows:
        return n_bytes
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    wanted = len(groups) * n_bytes / file.size
    count = math.ceil(wanted)
    chosen, share = [len(groups) * i // count for i in range(count)], wanted / count
    for i in chosen:
        rows = (record for record, _ in records.records(ByteRange(file.path, "parquet", i, i + 1)))
        _copy_records(itertools.islice(rows, math.ceil(share * groups[i].num_rows)), math.inf, to)
    size = sum(groups[i].total_byte_size for i in chosen) / sum(group.total_byte_size for group in groups)
    return math.ceil(file.size * share * size)


def _sample_hub(dataset: HubDataset, folder: Path) -> tuple[float, str] | None:
    """Copy the first records to `folder`; return what `_sample_files` does, or None where these are all records.

    Raises:
        UserError: the dataset does not state how many records it has.
    """
    pinned = dataset.pinned()
    rows = pinned.head(sys.maxsize)
    copied = _copy_records(rows, SAMPLE_BYTES, folder / "records.jsonl")
    if next(rows, None) is None:
        return None
    split = (pinned.stream.info.splits or {}).get(pinned.split or "train")
    if split is None or not split.num_examples:
        raise UserError(
            f"{dataset} does not say how much text it has, so nothing can be planned before it was read; tokenize it first "
            f"(python -m tokenizer.pretokenize --input {dataset} --output data/{dataset.name.split('/')[1]}), and plan with "
            f"that as --data."
        )
    return split.num_examples / copied, f"{copied:,} of {split.num_examples:,} records"


def _copy_records(rows: Iterator[dict], n_bytes: float, to: Path) -> int:
    """Write the first records as jsonl, about `n_bytes`; return their number."""
    size = count = 0
    with to.open("a", encoding="utf-8") as file:
        while size < n_bytes and (record := next(rows, None)) is not None:
            size += file.write(json.dumps(record, default=str) + "\n")
            count += 1
    return count
