"""What the store of a large text will be, without reading all of it: a small text is copied from everywhere in the large
one and made into a store with the same settings, and what that has is scaled by bytes."""

import copy
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from errors import UserError, disk_errors
from tokenizer import files
from tokenizer.byte_range import ByteRange, bounds
from tokenizer.corpus import UNIT_BYTES, Corpus, TextFile, kind_of
from tokenizer.files import UnreadableError
from tokenizer.hub import HubDataset
from tokenizer.recipe import Recipe
from tokenizer.store import RESUMES, SPLITS, TokenStore
from tokenizer.store_builder import StoreBuilder, cores
from tokenizer.worker import Workers

LARGE_BYTES = 50_000_000  # of text: less is tokenized in seconds
# Of text, about. A BPE fits the text that it is made from: of 600 MB, 16, 32 and 64 MB said 3.2, 1.8 and 0.8% too few
# tokens, in 7.0, 6.3 and 7.8 s.
SAMPLE_BYTES = 32_000_000
CHUNK_BYTES = 1 << 20  # of a file, taken at a time from wherever in it
PACKED_BYTES = 4 << 20  # the same of files that are only read from their beginning
HEAD_CHUNKS = 2  # come first: the head of a document decides whether it is for validation
ROWS = 256  # of parquet, copied at a time
HUB_SHARDS = 8  # at most, are read from


@dataclass(frozen=True)
class Estimate:
    sample: TokenStore
    factor: float  # how much more there is of the whole
    read: str  # 32 of 9,800 MB
    seconds: float  # that tokenizing the whole should take

    @property
    def whole(self) -> TokenStore:
        """The sample's store with the numbers of the whole; its tokens are still those of the sample."""
        store = copy.copy(self.sample)
        splits = {name: self._scaled(getattr(store.metadata, name)) for name in SPLITS}
        store.metadata = replace(store.metadata, **splits)
        return store

    def _scaled(self, split):
        numbers = {name: round(getattr(split, name) * self.factor) for name in ("tokens", "documents", "bytes")}
        return replace(split, **numbers)


def estimate(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Estimate | None:
    """Of the recipe's one input, by a sample and its store in `folder`, an empty one; None where there is little text.

    Raises:
        UserError: there is no text, it is bad, or nobody knows how much there is.
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
            store, seconds = _make(replace(recipe, inputs=[str(text)]), folder / "store", factor)
        except UserError as error:
            told = str(error).replace(os.path.join(text, ""), "").replace(str(text), "it")
            raise UserError(f"In a sample of {data}: {told}") from error
    return Estimate(store, factor, read, seconds)


def _make(recipe: Recipe, folder: Path, factor: float) -> tuple[TokenStore, float]:
    """The store, and the seconds that one of `factor` times as much text would take on this machine."""
    with Workers() as workers:
        builder = StoreBuilder(recipe, folder, lambda line: None, workers, cores())
        workers.start(min(cores(), 1 + builder.corpus.text_size // UNIT_BYTES))  # which takes time, but once
        times = [time.perf_counter()]
        for work in (lambda: builder.plan(is_cache=True), lambda: builder.do_shard(0, 1)):
            work()
            times.append(time.perf_counter())
        store = builder.finish(merge_only=True)
        times.append(time.perf_counter())
    tokenizer, encoding, merging = (after - before for before, after in itertools.pairwise(times))
    units = len(builder.units)
    busy = units / math.ceil(units / cores())  # processes at a time
    of_whole = max(busy, min(cores(), builder.corpus.text_size * factor / UNIT_BYTES))
    return store, tokenizer + factor * (encoding * busy / of_whole + merging)


# ---- files --------------------------------------------------------------------------------------------------------------


def _sample_files(corpus: Corpus, folder: Path) -> tuple[float, str]:
    """Copies a sample to `folder`; returns how many times as much there is in all, and how much was read."""
    share, sample_by = SAMPLE_BYTES / corpus.text_size, corpus.arguments.sample_by
    passed = taken = read = 0
    for number, file in enumerate(corpus.all_files):
        kind = _kind(file, corpus.arguments.text_column)
        if kind is None:
            continue
        n_bytes = _taken_at_a_time(file, kind)
        chosen = []
        for chunk, start in enumerate(range(0, file.size, n_bytes)):
            size = min(n_bytes, file.size - start)
            if taken <= passed * share:
                chosen.append(chunk)
                taken += size
            passed += size
        if not chosen:
            continue
        name = Path(file.path).name
        name = os.path.splitext(name)[0] if files.is_compressed(name) else name
        to = folder / f"{number:08}-{name[-40:]}"
        try:
            read += _copy_sample(file, kind, chosen, n_bytes, sample_by, to)
        except UnreadableError:  # which is skipped and counted when all is read
            if file.is_named:
                raise
    return corpus.size / read, f"{read / 1e6:,.0f} of {corpus.size / 1e6:,.0f} MB"


def _kind(file: TextFile, text_column: str | None) -> str | None:
    """None for a file in a folder that cannot be read."""
    try:
        return kind_of(file.path, text_column)
    except UnreadableError:
        if file.is_named:
            raise
        return None


def _copy_sample(file: TextFile, kind: str, chosen: list[int], n_bytes: int, sample_by: str, to: Path) -> int:
    """Writes the chosen parts, of `n_bytes` each, to a file of their own; returns the bytes of `file` that they are."""
    if kind == "parquet":
        return _copy_rows(file, len(chosen) * n_bytes, to)
    with files.readable(file.path):
        if n_bytes == CHUNK_BYTES:
            sample = _chunks(file, kind, chosen, sample_by)
            read = len(sample)
        else:
            sample = _head(file, len(chosen) * n_bytes)
            read = min(len(chosen) * n_bytes, file.size)
    to.write_bytes(sample)
    return read


def _taken_at_a_time(file: TextFile, kind: str) -> int:
    """Bytes of a file on the disk."""
    if kind == "json":  # one list, which has no parts
        return file.size
    return CHUNK_BYTES if kind in ("text", "jsonl") and not files.is_compressed(file.path) else PACKED_BYTES


def _chunks(file: TextFile, kind: str, chosen: list[int], sample_by: str) -> bytes:
    """Cut where documents may be."""
    parts = []
    with open(file.path, "rb") as whole:
        for chunk in [*range(HEAD_CHUNKS), *chosen[HEAD_CHUNKS:]][: len(chosen)]:
            start, stop = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
            part = ByteRange(file.path, kind, start, stop if stop < file.size else None)
            start, stop, _ = bounds(part, sample_by)
            whole.seek(start)
            parts.append(whole.read(-1 if stop is None else stop - start))
    return b"".join(parts)


def _head(file: TextFile, n_bytes: int) -> bytes:
    """What the first `n_bytes` hold, decompressed, up to the end of a line."""
    head = b"".join(files.inflated_head(file.path, n_bytes))
    return head if n_bytes >= file.size else head[: head.rfind(b"\n") + 1] or head


def _copy_rows(file: TextFile, n_bytes: int, to: Path) -> int:
    """The first rows, as many as have about `n_bytes` of the file; returns the bytes."""
    import pyarrow
    from pyarrow import parquet

    with files.readable(file.path), parquet.ParquetFile(file.path) as whole:
        number, rows = whole.metadata.num_rows, 0
        batches = []
        for batch in whole.iter_batches(ROWS):
            batches.append(batch)
            rows += len(batch)
            if rows >= number * n_bytes / file.size:
                break
        sample = pyarrow.Table.from_batches(batches, whole.schema_arrow)
    parquet.write_table(sample, to)
    return round(file.size * rows / max(1, number))


# ---- the Hub ------------------------------------------------------------------------------------------------------------


def _sample_hub(dataset: HubDataset, folder: Path) -> tuple[float, str] | None:
    """The same with the first records of some shards; None where these are all records.

    Raises:
        UserError: the dataset does not say how many records it has.
    """
    pinned = dataset.pinned()
    shards = pinned.stream.num_shards
    chosen = range(0, shards, math.ceil(shards / HUB_SHARDS))
    records = ended = 0
    for shard in chosen:
        size = 0
        with (folder / f"{shard:08}.jsonl").open("w", encoding="utf-8") as part:
            for record in pinned.shard(shard):
                size += part.write(json.dumps(record, default=str) + "\n")
                records += 1
                if size > SAMPLE_BYTES / len(chosen):
                    break
            else:
                ended += 1
    if ended == shards:
        return None
    split = (pinned.stream.info.splits or {}).get(pinned.split or "train")
    if split is None or not split.num_examples:
        raise UserError(
            f"{dataset} does not say how much text it has, so nothing can be planned before it was read; tokenize it first "
            f"(python -m tokenizer.pretokenize --input {dataset} --output data/{dataset.name.split('/')[1]}), and plan with "
            f"that as --data."
        )
    return split.num_examples / records, f"{records:,} of {split.num_examples:,} records"
