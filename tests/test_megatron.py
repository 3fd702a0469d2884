"""Indexes for Megatron, byte for byte in the format of its IndexedDataset."""

import struct

import numpy as np
import pytest

from tokenizer import megatron


def store_of(folder, ends: list[int]):
    for split in ("train", "val"):
        np.array(ends, dtype="<u8").tofile(folder / f"{split}.bin.index")
    return folder


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("uint16", 8, 2), ("uint32", 4, 4)])
def test_index_matches_megatron_to_the_byte(tmp_path, dtype, code, itemsize):
    megatron.write_indexes(store_of(tmp_path, [3, 10, 12]), dtype)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    expected += struct.pack("<3i", 3, 7, 2)  # lengths
    expected += struct.pack("<3q", 0, 3 * itemsize, 10 * itemsize)  # first bytes
    expected += struct.pack("<4q", 0, 1, 2, 3)  # documents
    assert (tmp_path / "train.idx").read_bytes() == (tmp_path / "val.idx").read_bytes() == expected


def test_documents_beyond_int32_become_several_sequences(tmp_path, monkeypatch):
    megatron.write_indexes(store_of(tmp_path, [5, 2**32 + 5, 2**32 + 6]), "uint16")
    content = (tmp_path / "train.idx").read_bytes()
    sequences, documents = struct.unpack_from("<QQ", content, 18)
    assert (sequences, documents) == (5, 4)
    lengths = struct.unpack_from("<5i", content, 34)
    assert lengths == (5, 2**31 - 1, 2**31 - 1, 2, 1)
    assert struct.unpack_from("<5q", content, 54) == (0, 10, 2**32 + 8, 2**33 + 6, 2**33 + 10)
    assert struct.unpack_from("<4q", content, 94) == (0, 1, 4, 5)
    ends = np.cumsum(np.arange(1, 50)).tolist()
    megatron.write_indexes(store_of(tmp_path, ends), "uint16")
    whole = (tmp_path / "train.idx").read_bytes()
    monkeypatch.setattr("tokenizer.store.BLOCK_DOCUMENTS", 7)
    megatron.write_indexes(tmp_path, "uint16")
    assert (tmp_path / "train.idx").read_bytes() == whole
    assert megatron.is_index(tmp_path, "train", "uint16")
