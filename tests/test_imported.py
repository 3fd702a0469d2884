"""Token stores made of the files of other programs: nanoGPT's, with types and metadata files of several kinds."""

import json
from pathlib import Path

import numpy as np
import pytest

import conftest
from conftest import REPOSITORY, assert_one_sentence, contents, trained
from tokenizer import pretokenize
from tokenizer.build import export
from tokenizer.build.output import locked
from tokenizer.store.store import TokenStore


@pytest.fixture
def flags(store, tmp_path) -> list[str]:
    """Flags for a headerless file of the ids of `store`, as nanoGPT writes it."""
    path, tokenizer = tmp_path / "train.bin", store.folder / "tokenizer" / "tokenizer.json"
    store.memory_map("train").tofile(path)
    return conftest.flags(tokenizer=tokenizer, import_tokens=path, output=tmp_path / "x")


def test_command_imports_train_and_val_files_of_nanogpt(store, flags, tmp_path):
    pretokenize.main([*flags, "--dtype", "uint16", "--val", str(store.folder / "val.bin")])
    imported, original = contents(tmp_path / "x"), contents(store.folder)
    for name in ("train.bin", "val.bin", "train.bin.index", "val.bin.index"):
        assert imported[name] == original[name], name
    metadata = TokenStore(tmp_path / "x").metadata
    assert (metadata.train, metadata.val) == (store.metadata.train, store.metadata.val)
    card = (export.to_parquet(TokenStore(tmp_path / "x")) / "README.md").read_text()
    command = "--import_tokens train.bin --dtype uint16 --val val.bin --tokenizer tokenizer.json\n"
    assert f"\n    python -m tokenizer.pretokenize {command}" in card
    assert str(tmp_path) not in card
    assert (trained(TokenStore(tmp_path / "x"), tmp_path / "run", max_steps=2) / "model" / "config.json").is_file()


@pytest.mark.parametrize("dtype", ["int16", "uint32", "int64"])
def test_types_and_metadata_files_are_read_and_the_end_is_held_out(store, flags, tmp_path, dtype, capsys):
    ids = store.memory_map("train")
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    (tmp_path / "train_metadata.json").write_text(json.dumps({"dtype": dtype, "tokenizer_type": "bpe"}))
    pretokenize.main([*flags, "--validation_fraction", "0.2"])
    imported = TokenStore(tmp_path / "x")
    both = np.concatenate([imported.memory_map("train"), imported.memory_map("val")])
    assert np.array_equal(both, ids)
    eos = store.metadata.eos_token_id
    assert imported.memory_map("train")[-1] == eos
    assert imported.metadata.val.documents >= 1
    assert imported.offsets("val")[-1] == len(imported.memory_map("val"))
    capsys.readouterr()
    pretokenize.main([*flags, "--validation_fraction", "0.2"])
    assert capsys.readouterr().out == f"{tmp_path / 'x'} already contains these tokens.\n"


def test_file_without_document_ends_is_one_document(store, flags, tmp_path):
    np.full(1000, 65, dtype="<u2").tofile(tmp_path / "train.bin")
    pretokenize.main([*flags, "--dtype", "uint16", "--validation_fraction", "0.1"])
    metadata = TokenStore(tmp_path / "x").metadata
    assert (metadata.train.tokens, metadata.val.tokens, metadata.train.documents) == (900, 100, 1)
    np.full(42, 65, dtype="<u2").tofile(tmp_path / "train.bin")
    pretokenize.main([*flags[:-1], str(tmp_path / "y"), "--dtype", "uint16"])
    metadata = TokenStore(tmp_path / "y").metadata
    assert (metadata.train.tokens, metadata.val.tokens) == (40, 2)  # one held-out token has no target


@pytest.mark.parametrize(
    ("content", "more", "sentence"),
    [
        (b"\1\0" * 50 + b"\1", ["--dtype", "uint16"], r"has 101 bytes, which are not ids of 2 bytes each; check"),
        (b"", ["--dtype", "uint16"], r"has 0 bytes"),
        (b"\x93NUMPY" + b"\1\0" * 61, ["--dtype", "uint16"], r"begins with a header of NumPy; write its ids with"),
        (b"\1\0\xff\xff", ["--dtype", "uint16"], r"id 65,535 at place 1, but the tokenizer has 300 tokens; check"),
        (b"\1\0\xff\xff", ["--dtype", "int16"], r"id -1 at place 1, but the tokenizer has 300 tokens"),
        (b"\1\0\0\0" * 50, ["--dtype", "uint16"], r"Every second id of .* is 0, .* larger type than uint16; check"),
        (b"\1\0" * 50, [], r"--import_tokens needs --dtype \(uint16, int16, uint32, int32, int64\)"),
        (b"\1\0" * 50, ["--dtype", "float32"], r"invalid choice: 'float32'"),
        (b"\1\0" * 50, ["--dtype", "uint16", "--cleaning", "none"], r"cleaning cannot be combined with import_tokens"),
        (b"\1\0" * 2, ["--dtype", "uint16"], r"has 2 tokens, too few to hold out two; give --val"),
        (b"\1\0", ["--dtype", "uint16", "--val", "train.bin"], r"train.bin has one token, but validation needs two"),
        (None, ["--dtype", "uint16"], r"train\.bin cannot be read: No such file"),
    ],
)
def test_wrong_files_end_in_one_sentence(flags, tmp_path, content, more, sentence, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.bin"
    path.unlink() if content is None else path.write_bytes(content)
    assert_one_sentence(sentence, pretokenize.main, [*flags, *more])
    assert not (tmp_path / "x").exists()


def test_other_mistakes_end_in_one_sentence(store, flags, tmp_path):
    assert_one_sentence("--import_tokens needs --tokenizer", pretokenize.main, flags[2:] + ["--dtype", "uint16"])
    (tmp_path / "train_metadata.json").write_text('{"dtype": "int32"}')
    assert_one_sentence(r"but the metadata .* state int32", pretokenize.main, [*flags, "--dtype", "uint16"])
    (tmp_path / "train_metadata.json").unlink()
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04.")
    wrong = ["--tokenizer", str(tmp_path / "meta.pkl"), *flags[2:], "--dtype", "uint16"]
    assert_one_sentence(r"meta\.pkl is not a tokenizer\.json", pretokenize.main, wrong)
    sentence = "--dtype and --val apply only to --import_tokens"
    text = conftest.flags(input=REPOSITORY / "README.md", output=tmp_path / "y", dtype="uint16", val="v")
    assert_one_sentence(sentence, pretokenize.main, text)
    with locked(tmp_path / "x", "", wait=False):
        assert_one_sentence("Another process is writing", pretokenize.main, [*flags, "--dtype", "uint16"])
    (Path(tmp_path / "x")).mkdir()
    (tmp_path / "x" / "mine").write_text("mine")
    assert_one_sentence("is not an empty folder", pretokenize.main, [*flags, "--dtype", "uint16"])
