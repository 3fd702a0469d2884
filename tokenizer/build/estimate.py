"""Estimate the token store of a large text from a sample, tokenized with the same settings and scaled by bytes."""

import copy
import math
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError, disk_errors
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import StoreBuilder
from tokenizer.build.worker import Workers, most_workers
from tokenizer.corpus import files
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.documents import NO_LIMIT
from tokenizer.corpus.file_finder import TextFile
from tokenizer.corpus.hub import HubDataset
from tokenizer.corpus.units import Corpus, Unit
from tokenizer.store.store import RESUMES, TokenStore

LARGE_BYTES = 50_000_000  # a smaller text is tokenized in seconds
# Approximate size of the sample. A BPE fits the text that it is trained on: for 600 MB of text, samples of 16, 32 and
# 64 MB estimated 3.2, 1.8 and 0.8% too few tokens, in 7.0, 6.3 and 7.8 s.
SAMPLE_BYTES = 32_000_000
CHUNK_BYTES = 1 << 20  # size of one sample of plain text or jsonl
HEAD_BYTES = 4 << 20  # minimum number of bytes read from a file of any other kind


@dataclass(frozen=True)
class Estimate:
    sample: TokenStore
    whole: TokenStore  # the sample's store with the estimated token counts of the whole text
    amount: str  # text that was read, for example 32 of 9,800 MB
    seconds: float  # estimated time to tokenize the whole text


class SampledCorpus(Corpus):
    """Evenly spread sample of the files of one input. `size` counts all; `text_sizes`, after `units`, the sample."""

    quota = sample_size = skipped_size = 0.0  # bytes of files so far
    missing_documents = 0.0  # shares of the files, each one document, that the sample leaves out

    def units(self) -> list[Unit]:
        parts = [part for unit in super().units() for part in unit.ranges]
        self.text_sizes = [self.text_size * self.sample_size / (self.size - self.skipped_size or 1)]
        number = math.ceil(len(parts) / most_workers()) or 1  # keep all processes busy, as with the whole text
        return [Unit(1.0, tuple(parts[i : i + number])) for i in range(0, len(parts), number)]

    def _ranges(self, file: TextFile, text_column: str | None) -> list[tuple[int, ByteRange]]:
        """Return the parts of a file to sample, about `quota` bytes.
        Plain text and jsonl: chunks, including the first and last. Parquet: rows of row groups. Arrow: record batches.
        Json: the whole file. Others: the head."""
        share = file.size * SAMPLE_BYTES / self.text_size
        try:
            parts = [part for _, part in super()._ranges(file, text_column)] if self.quota + share > 0 else []
            if parts and parts[0].kind == "text":  # a binary file has no bytes and no document to count
                with files.readable(file.path):
                    files.check_text(files.head(file.path), file.path, not file.is_named)
        except UserError:  # the file is skipped
            self.skipped_size += file.size
            raise
        self.quota += share
        if not parts:
            return []
        part = parts[0]
        is_plain = part.kind in ("text", "jsonl") and not files.is_compressed(part.path)
        n_bytes = max(self.quota, 2 * CHUNK_BYTES if is_plain else HEAD_BYTES)
        if n_bytes >= file.size or part.kind == "json":  # a json list cannot be divided
            n_bytes = file.size
        elif part.kind == "parquet":
            n_bytes, parts = _rows(part, n_bytes, file.size)
        elif part.kind == "arrow":
            count = math.ceil(len(parts) * n_bytes / file.size)
            n_bytes, parts = file.size * count / len(parts), [parts[len(parts) * i // count] for i in range(count)]
        elif is_plain:
            count = math.ceil(n_bytes / CHUNK_BYTES)
            n_bytes, last_start = count * CHUNK_BYTES, file.size - CHUNK_BYTES
            starts = [last_start * i // (count - 1) for i in range(count)]
            parts = [replace(part, start=at, stop=at + CHUNK_BYTES if at < last_start else None) for at in starts]
        else:
            parts = [replace(part, limit=int(n_bytes))]
        if part.kind == "text" and self.arguments.sample_by == "document":
            self.missing_documents += 1 - n_bytes / file.size
        self.quota, self.sample_size = self.quota - n_bytes, self.sample_size + n_bytes
        return [(0, part) for part in parts]


def _rows(part: ByteRange, n_bytes: float, size: int) -> tuple[float, list[ByteRange]]:
    """Return the size of a sample of about `n_bytes` of a parquet file of `size` bytes, and its parts of row groups."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(part.path)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    target = len(groups) * n_bytes / size
    count = math.ceil(target)
    indices, share = [len(groups) * i // count for i in range(count)], target / count
    chosen_bytes = sum(groups[i].total_byte_size for i in indices) / sum(group.total_byte_size for group in groups)
    parts = [replace(part, start=i, stop=i + 1, limit=math.ceil(share * groups[i].num_rows)) for i in indices]
    return size * share * chosen_bytes, parts


def estimate(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Estimate | None:
    """Estimate the store of the recipe's only input, from a sample in the empty `folder`. Return None for a small text.
    Raise a `UserError` if the text is missing or bad, or a Hub dataset does not state its size."""
    [data] = recipe.inputs
    limit = recipe.corpus.limit
    recipe = replace(recipe, corpus=replace(recipe.corpus, max_bytes=None, max_documents=None))
    corpus: Corpus = SampledCorpus([data], recipe.corpus)
    dataset = corpus.sources[0].hub
    if limit.bytes <= LARGE_BYTES or (dataset is None and corpus.text_size <= LARGE_BYTES):
        return None
    say(f"Reading a sample of {data} ...")
    workers = Workers()
    with disk_errors(folder, RESUMES), closing(workers):
        if dataset is not None:
            recipe = replace(recipe, corpus=replace(recipe.corpus, max_bytes=str(SAMPLE_BYTES)))
            corpus = Corpus([data], recipe.corpus)
        builder = StoreBuilder(recipe, folder / "store", lambda line: None, workers, corpus=corpus)
        start = time.perf_counter()
        try:
            _ = builder.plan
            planned = time.perf_counter()
            store = builder.finish(is_merge=False)
        except UserError as error:
            problem = re.sub(f"^{re.escape(recipe.inputs[0])}", "it", str(error))
            raise UserError(f"In a sample of {data}: {problem}") from error
        planning_seconds, work_seconds = planned - start, time.perf_counter() - planned
    metadata, counts, documents = store.metadata, store.metadata.counts, store.metadata.counts["documents"]
    if dataset is None:
        size = corpus.size - corpus.skipped_size
        documents -= corpus.missing_documents
        factor, amount = size / corpus.sample_size, f"{corpus.sample_size / 1e6:,.0f} of {size / 1e6:,.0f} MB"
    elif counts["bytes"] < 0.9 * SAMPLE_BYTES:  # a cut text ends at the last place to cut before the limit
        return None
    else:
        total, number = _records(dataset), sum(counts[name] for name in ("documents", "blank", "empty_records"))
        factor, amount = total / number, f"{number:,} of {total:,} records"
    factor = min(factor, limit.bytes / counts["bytes"], limit.documents / documents)
    tokens = factor * (metadata.train.tokens + metadata.val.tokens)
    of_split = sum(file.size for file in corpus.all_files if file.val) if limit == NO_LIMIT else 0
    held_out = round(tokens * (of_split / corpus.size if of_split else recipe.corpus.validation_fraction))
    whole = copy.copy(store)
    train = replace(metadata.train, tokens=round(tokens) - held_out)
    whole.metadata = replace(metadata, train=train, val=replace(metadata.val, tokens=max(1, held_out)))
    return Estimate(store, whole, amount, planning_seconds + factor * work_seconds)


def _records(dataset: HubDataset) -> int:
    """Return the number of records of a Hub dataset. Raise a `UserError` if the dataset does not state it."""
    facts = dataset.pinned().facts
    if facts is None or not facts.num_examples:
        raise UserError(
            f"{dataset} does not state its number of records, so its size cannot be estimated; tokenize it first "
            f"(python -m tokenizer.pretokenize --input {dataset} --output data/{dataset.name.split('/')[1]}, with this "
            "command's settings of text and tokenizer), and use that store as --data, without these settings."
        )
    return facts.num_examples
