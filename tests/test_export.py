"""Export: a Hub dataset, which `datasets` reads, and a packed store, which `tar` unpacks."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import zstandard
from huggingface_hub import DatasetCard
from pyarrow import parquet
from test_merge import ids_of_documents

from conftest import assert_user_error, contents, prose, tokenized
from tokenizer import inspect
from tokenizer.build import export
from tokenizer.corpus.units import Corpus, CorpusArguments
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


def unpacked(archive: Path) -> Path:
    """Unpack a packed store as the printed command does, but decompress it here: not every `tar` has zstandard."""
    folder = archive.with_name("unpacked")
    folder.mkdir()
    content = zstandard.decompress(archive.read_bytes(), 1 << 30)
    subprocess.run(["tar", "-xf", "-", "-C", folder, "--strip-components", "1"], input=content, check=True)
    return folder


def test_each_row_is_a_document(made):
    folder = export.to_parquet(made)
    assert folder == made.folder.with_name("books-parquet")
    for ours, theirs in (("train", "train"), ("val", "validation")):
        assert rows(folder, theirs) == list(enumerate(ids_of_documents(made, ours)))
    assert parquet.read_schema(next(folder.glob("data/train-*"))).field("input_ids").type.value_type == "uint16"


def test_long_documents_span_rows_and_large_splits_span_files(made, monkeypatch):
    monkeypatch.setattr(export, "ROW_TOKENS", 100)
    monkeypatch.setattr(export, "GROUP_TOKENS", 1000)
    n_tokens = made.metadata.train.tokens
    monkeypatch.setattr(export, "SHARD_BYTES", 2 * (n_tokens - 1))  # the last row begins in the first file
    folder = export.to_parquet(made)
    assert len(list(folder.glob("data/train-*"))) == 1
    shutil.rmtree(folder)
    monkeypatch.setattr(export, "SHARD_BYTES", 10_000)
    folder = export.to_parquet(made)
    assert len(list(folder.glob("data/train-*-of-*.parquet"))) == -(-n_tokens // 5000)
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
    assert "to unpack it, run `mkdir " in said[1]
    assert contents(unpacked(tmp_path / "books.tar.zst")) == contents(made.folder)
    assert rows(tmp_path / "books-parquet", "train")
    sentence = "has no files except hidden files, token stores, runs and links"
    assert_user_error(sentence, Corpus, [str(tmp_path / "books-parquet")], CorpusArguments())


def test_uint32_ids_are_exported_unchanged(tmp_path):
    large = vocabulary.character_tokenizer([chr(0x10000 + i) for i in range(70_000)])
    vocabulary.save(large, tmp_path / "large")
    (tmp_path / "a.txt").write_text("".join(chr(0x10000 + i) for i in range(0, 70_000, 7)), encoding="utf-8")
    made = tokenized(tmp_path / "a.txt", tmp_path / "store", clean="none", tokenizer=str(tmp_path / "large"))
    written = rows(export.to_parquet(made), "train") + rows(tmp_path / "store-parquet", "validation")
    assert np.concatenate([ids for _, ids in written]).tolist() == list(range(0, 70_000, 7))


def test_packing_is_deterministic_and_keeps_other_files(made, tmp_path):
    archive = export.to_archive(made)
    before = archive.stat().st_mtime_ns
    assert export.to_archive(made) == archive
    assert archive.stat().st_mtime_ns == before
    original = archive.rename(tmp_path / "original")
    (made.folder / "train.bin").touch()
    assert export.to_archive(made).read_bytes() == original.read_bytes()
    archive.write_bytes(b"mine")
    assert_user_error(r"books\.tar\.zst exists and is not the packed .*books; move it away", export.to_archive, made)
    assert archive.read_bytes() == b"mine"
    archive.unlink()
    (tmp_path / "secret").write_text("a token")
    for link in (made.folder / "tokenizer/notes.json", made.folder / "notes.bin"):
        link.symlink_to(tmp_path / "secret")
        for function in (export.to_archive, export.to_parquet):
            assert_user_error(r"notes\.\w+ is a link out of the store", function, made)
        link.unlink()
    assert not archive.exists()
    (made.folder / "val.bin").rename(tmp_path / "val.bin")
    (made.folder / "val.bin").symlink_to(tmp_path / "val.bin")
    assert export.to_archive(made).read_bytes() == original.read_bytes()
    archive.unlink()
    path = made.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    assert_user_error(r"train\.bin was changed or damaged", export.to_archive, made)
    assert not archive.exists()


def test_packed_store_in_place_of_a_store_or_text_is_refused_with_the_command(made, tmp_path):
    archive = export.to_archive(made)
    unpacking = rf"`mkdir {made.folder} && tar --zstd -xf {archive} -C {made.folder} --strip-components 1`\."
    command = f"if it is a packed token store, unpack it with {unpacking}"
    assert_user_error(rf"{archive} is an archive; {command}", inspect.main, [str(archive)])
    arguments = ["--input", str(archive), "--output", str(tmp_path / "new")]
    assert_user_error(rf"{archive} is a binary file; .*; {command}", main, arguments)
