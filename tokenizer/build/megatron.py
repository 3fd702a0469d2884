"""Index files that let Megatron's IndexedDataset read a store's unchanged token files with the prefixes `train` and `val`."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.atomic import fsync
from tokenizer.store.store import SPLITS, index_file, sequences

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {"uint16": 8, "uint32": 4}  # Megatron's dtype codes; 4 is int32, the same bytes for ids below 2^31
LONGEST_SEQUENCE = 2**31 - 1  # in tokens, because Megatron counts in int32


def write_indexes(folder: Path, dtype: str) -> None:
    """Write train.idx and val.idx from the indexes of the store."""
    for split in SPLITS:
        with (folder / f"{split}.idx").open("wb") as file:
            for block in _index(folder, split, dtype):
                file.write(block)
            fsync(file)


def is_index(folder: Path, split: str, dtype: str) -> bool:
    """Return whether the `.idx` of a split agrees with the split's `.bin.index`."""
    with (folder / f"{split}.idx").open("rb") as file:
        same = all(file.read(len(block)) == block for block in _index(folder, split, dtype))
        return same and not file.read(1)


def _index(folder: Path, split: str, dtype: str) -> Iterator[bytes]:
    """Yield the bytes of an `.idx`.
    Header: magic, version, dtype code, number of sequences, number of document bounds. Then lengths, int32; first bytes,
    int64; and the number of the first sequence of each document, with the end, int64. A document is one sequence, unless
    its length exceeds int32."""
    index, itemsize = folder / index_file(split), np.dtype(dtype).itemsize
    count = sum(len(starts) for _, starts, _ in sequences(index, LONGEST_SEQUENCE))
    yield struct.pack("<9sQBQQ", MAGIC, VERSION, DTYPES[dtype], count, index.stat().st_size // 8 + 1)
    for _, starts, ends in sequences(index, LONGEST_SEQUENCE):
        yield (ends - starts).astype("<i4").tobytes()
    for _, starts, _ in sequences(index, LONGEST_SEQUENCE):
        yield (starts * itemsize).astype("<i8").tobytes()
    before = 0
    for document, starts, _ in sequences(index, LONGEST_SEQUENCE):
        yield (before + np.flatnonzero(np.diff(document, prepend=-1))).astype("<i8").tobytes()
        before += len(starts)
    yield struct.pack("<q", count)
