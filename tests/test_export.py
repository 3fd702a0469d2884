"""Export as a Hub dataset, which `datasets` reads, and indexes for Megatron, byte for byte those of its IndexedDataset."""

import struct
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import DatasetCard
from pyarrow import parquet
from test_merge import ids_of_documents

from conftest import assert_user_error, prose, tokenized
from tokenizer.build import export, megatron
from tokenizer.encoding import vocabulary
from tokenizer.pretokenize import main
from tokenizer.store.store import TokenStore


@pytest.fixture
def made(tmp_path) -> TokenStore:
    (tmp_path / "secret place").mkdir()
    for i in range(40):
        (tmp_path / "secret place" / f"{i:02}.txt").write_text(prose(i, 40 * (i + 1)))
    corpus = {"validation_fraction": 0.2}
    return tokenized(tmp_path / "secret place", tmp_path / "books", corpus, seed=1337, vocab_size=300)


def rows(folder: Path, split: str) -> list[tuple[int, list[int]]]:
    files = sorted((folder / "data").glob(f"{split}-*.parquet"))
    return [(row["document"], row["input_ids"]) for file in files for row in parquet.read_table(file).to_pylist()]


def test_each_row_is_a_document(made):
    folder = export.to_parquet(made)
    assert folder == made.folder.with_name("books-parquet")
    for ours, theirs in (("train", "train"), ("val", "validation")):
        assert rows(folder, theirs) == list(enumerate(ids_of_documents(made, ours)))
    assert parquet.read_schema(next(folder.glob("data/train-*"))).field("input_ids").type.value_type == "uint16"


def test_long_documents_span_rows_and_large_splits_span_files(made, monkeypatch):
    monkeypatch.setattr(export, "ROW_TOKENS", 100)
    monkeypatch.setattr(export, "GROUP_TOKENS", 1000)
    monkeypatch.setattr(export, "SHARD_BYTES", 10_000)
    folder = export.to_parquet(made)
    assert len(list(folder.glob("data/train-*-of-*.parquet"))) == -(-made.metadata.train.tokens // 5000)
    joined: dict[int, list[int]] = {}
    for document, ids in rows(folder, "train"):
        assert 0 < len(ids) <= 100
        joined.setdefault(document, []).extend(ids)
    assert list(joined.items()) == list(enumerate(ids_of_documents(made, "train")))


def test_datasets_loads_both_splits_and_the_card_names_no_local_folder(launch, made, tmp_path):
    folder = export.to_parquet(made)
    program = (
        "import os, sys, datasets; loaded = datasets.load_dataset(sys.argv[1], streaming=True); "
        "print({split: sum(len(row['input_ids']) for row in rows) for split, rows in loaded.items()}, flush=True); "
        "os._exit(0)"  # pyarrow's threads, which read ahead, abort an interpreter that exits normally
    )
    done = launch("-c", program, folder)
    assert done.returncode == 0, done.stderr
    tokens = {"train": made.metadata.train.tokens, "validation": made.metadata.val.tokens}
    assert done.stdout.strip() == str(tokens)
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "unknown"
    assert [entry["split"] for entry in card.data.configs[0]["data_files"]] == ["train", "validation"]
    assert "- secret place\n" in card.text
    command = "python -m tokenizer.pretokenize --input 'secret place' --validation_fraction 0.2 --vocab_size 300"
    assert command in card.text
    for file in folder.rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file.name


def test_exporting_again_keeps_the_existing_export(made):
    taken = made.folder.with_name("books-parquet")
    (taken / "data").mkdir(parents=True)
    (taken / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert_user_error(r"books-parquet exists and is not an export of .*books; move it away", export.to_parquet, made)
    assert len(list(taken.rglob("*"))) == 2
    taken.rename(made.folder.with_name("elsewhere"))
    assert export.to_parquet(made) == taken
    (taken / "README.md").write_text("mine")
    assert export.to_parquet(made) == taken
    assert (taken / "README.md").read_text() == "mine"


def test_command_exports_and_packs_new_and_existing_stores(made, tmp_path, capsys):
    arguments = ["--input", str(tmp_path / "secret place"), "--output", str(made.folder), "--vocab_size", "300"]
    main([*arguments, "--validation_fraction", "0.2", "--export", "parquet", "--compress"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("already contains these tokens.")
    assert (tmp_path / "books.tar.zst").is_file()
    assert rows(tmp_path / "books-parquet", "train")


def test_uint32_ids_are_exported_unchanged(tmp_path):
    large = vocabulary.character_tokenizer([chr(0x10000 + i) for i in range(70_000)])
    vocabulary.save(large, tmp_path / "large")
    (tmp_path / "a.txt").write_text("".join(chr(0x10000 + i) for i in range(0, 70_000, 7)), encoding="utf-8")
    made = tokenized(tmp_path / "a.txt", tmp_path / "store", clean="none", tokenizer=str(tmp_path / "large"))
    written = rows(export.to_parquet(made), "train") + rows(tmp_path / "store-parquet", "validation")
    assert np.concatenate([ids for _, ids in written]).tolist() == list(range(0, 70_000, 7))


def with_ends(folder, ends: list[int]):
    for split in ("train", "val"):
        np.array(ends, dtype="<u8").tofile(folder / f"{split}.bin.index")
    return folder


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("uint16", 8, 2), ("uint32", 4, 4)])
def test_index_matches_megatron_to_the_byte(tmp_path, dtype, code, itemsize):
    megatron.write_indexes(with_ends(tmp_path, [3, 10, 12]), dtype)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    expected += struct.pack("<3i", 3, 7, 2)  # lengths
    expected += struct.pack("<3q", 0, 3 * itemsize, 10 * itemsize)  # first bytes
    expected += struct.pack("<4q", 0, 1, 2, 3)  # documents
    assert (tmp_path / "train.idx").read_bytes() == (tmp_path / "val.idx").read_bytes() == expected


def test_documents_beyond_int32_become_several_sequences(tmp_path, monkeypatch):
    megatron.write_indexes(with_ends(tmp_path, [5, 2**32 + 5, 2**32 + 6]), "uint16")
    content = (tmp_path / "train.idx").read_bytes()
    sequences, documents = struct.unpack_from("<QQ", content, 18)
    assert (sequences, documents) == (5, 4)
    lengths = struct.unpack_from("<5i", content, 34)
    assert lengths == (5, 2**31 - 1, 2**31 - 1, 2, 1)
    assert struct.unpack_from("<5q", content, 54) == (0, 10, 2**32 + 8, 2**33 + 6, 2**33 + 10)
    assert struct.unpack_from("<4q", content, 94) == (0, 1, 4, 5)
    ends = np.cumsum(np.arange(1, 50)).tolist()
    megatron.write_indexes(with_ends(tmp_path, ends), "uint16")
    whole = (tmp_path / "train.idx").read_bytes()
    monkeypatch.setattr("tokenizer.store.store.BLOCK_DOCUMENTS", 7)
    megatron.write_indexes(tmp_path, "uint16")
    assert (tmp_path / "train.idx").read_bytes() == whole
    assert megatron.is_index(tmp_path, "train", "uint16")
