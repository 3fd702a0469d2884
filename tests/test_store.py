"""Token store: format for nanoGPT, metadata, validation split, and errors for damaged files."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer, Trainer, TrainingArguments

from common.atomic import file_sha256
from conftest import assert_one_sentence, assert_user_error, error_of, flip, prose, tokenized, without_root
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from tokenizer import inspect
from tokenizer.encoding import vocabulary
from tokenizer.encoding.vocabulary import character_tokenizer
from tokenizer.store.store import TokenStore

LINES = "".join(f"Line {i}: naïve 雪 words, don't they?\r\n  and more\n" for i in range(1000))


def make(folder: Path, *texts: str, seed: int = 1, fraction: float = 0.01, **settings) -> TokenStore:
    """Build a store in which each text is one unchanged document."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text.encode())
    output, corpus = folder.with_name(folder.name + "-store"), {"validation_fraction": fraction}
    return tokenized(folder, output, corpus, "none", seed, **{"vocab_size": 300} | settings)


def documents(store: TokenStore, split: str) -> list[str]:
    """Read documents with numpy and transformers only, according to the description of the format."""
    tokens = np.fromfile(store.folder / f"{split}.bin", dtype="<u2")
    ends = np.fromfile(store.folder / f"{split}.bin.index", dtype="<u8").tolist()
    tokenizer = AutoTokenizer.from_pretrained(store.folder / "tokenizer")
    assert ends[-1] == len(tokens)
    return [tokenizer.decode(tokens[start:end]) for start, end in pairwise([0, *ends])]


@pytest.mark.parametrize(("size", "dtype", "itemsize"), [(65_499, "uint16", 2), (65_500, "uint32", 4)])
def test_tokens_are_uint16_below_65500_and_uint32_above(tmp_path, size, dtype, itemsize):
    vocabulary.save(character_tokenizer([chr(0x10000 + i) for i in range(size)]), tmp_path / "theirs")
    ids = [0, 258, size - 1] * 2
    text = "".join(chr(0x10000 + i) for i in ids)
    store = make(tmp_path / "text", text, fraction=0.5, vocab_size=None, tokenizer=str(tmp_path / "theirs"))
    assert (store.metadata.dtype, store.metadata.vocab_size) == (dtype, size)
    assert (store.folder / "train.bin").read_bytes() == b"".join(i.to_bytes(itemsize, "little") for i in ids[:3])
    assert store.memory_map("train").tolist() == store.in_memory("val").tolist() == ids[:3]
    store.check_ids("train")


def test_metadata_describes_the_store(tmp_path):
    texts = [f"Document {i} of ü 雪 <|endoftext|>\n" * (i + 1) for i in range(50)]
    store = make(tmp_path / "text", *texts, fraction=0.2)
    found = documents(store, "train") + documents(store, "val")
    assert Counter(found) == Counter(text + "<|endoftext|>" for text in texts)
    files = "inputs.json metadata.json report.md tokenizer train.bin train.bin.index val.bin val.bin.index"
    assert sorted(path.name for path in store.folder.iterdir()) == files.split()
    metadata = json.loads((store.folder / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["format_version"] == 2
    assert (metadata["dtype"], metadata["vocab_size"], metadata["eos_token_id"]) == ("uint16", 300, 0)
    assert (metadata["tokenizer_type"], metadata["sources"]) == ("bpe", [str(tmp_path / "text")])
    assert metadata["tokenizer_sha256"] == file_sha256(store.folder / "tokenizer" / "tokenizer.json")
    for split in ("train", "val"):
        texts_of_split = documents(store, split)
        path = store.folder / f"{split}.bin"
        assert metadata[split] == {
            "tokens": path.stat().st_size // 2,
            "documents": len(texts_of_split),
            "bytes": len("".join(text.removesuffix("<|endoftext|>") for text in texts_of_split).encode()),
            "sha256": file_sha256(path),
            "index_sha256": file_sha256(store.folder / f"{split}.bin.index"),
        }
        tokens, offsets = store.memory_map(split), store.offsets(split)
        assert np.flatnonzero(tokens == 0).tolist() == (offsets[1:] - 1).tolist()  # only at the ends of documents
    assert metadata["train"]["documents"] + metadata["val"]["documents"] == 50
    assert metadata["train"]["bytes"] + metadata["val"]["bytes"] == len("".join(texts).encode())


def test_long_lines_are_cut_between_characters(tmp_path):
    for name, text, settings in (
        ("words", "My title\n" + "a word or two and then more of it " * 100, {}),  # the cut is not after the title
        ("emoji", "🙂" * 1000, {"vocab_size": 258, "fraction": 0.0123}),  # no cut within a character
    ):
        store = make(tmp_path / name, text, **settings)
        assert "".join(documents(store, "train") + documents(store, "val")) == text + "<|endoftext|>"
        assert 0 < store.metadata.val.bytes < len(text.encode()) / 10


def test_a_name_that_begins_like_the_home_of_an_unknown_user_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not TokenStore.is_store("~no_such_user/text")
    Path("~notes.txt").write_text(prose(1, 999))
    assert tokenized(Path("~notes.txt"), tmp_path / "store", vocab_size=300).metadata.counts["documents"] == 1


def test_text_too_short_to_split_is_refused(tmp_path):
    character = {"tokenizer_type": "character", "vocab_size": None}
    for settings in ({}, character):
        assert_one_sentence("too short", make, tmp_path / "text", "a", **settings)
        assert not TokenStore.is_store(tmp_path / "text-store")
    store = make(tmp_path / "three", "abc", **character)  # one token to predict
    assert (documents(store, "train"), documents(store, "val")) == (["a"], ["bc"])


@pytest.fixture
def finished(tmp_path):
    return make(tmp_path / "text", LINES[:5000]).folder


def test_keys_that_older_versions_refuse_are_written_only_with_a_value(finished):
    keys = json.loads((finished / "metadata.json").read_text()).keys()
    assert not {"validation_splits", "licenses", "commits"} & keys


def shorten(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-n_bytes])


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def edit(folder: Path, **values) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: shorten(f / "train.bin", 20), r"train\.bin is [\d,]+ bytes long, not [\d,]+: it is truncated"),
        (lambda f: shorten(f / "train.bin.index", 8), r"train\.bin\.index is 0 bytes long, not 8: it is truncated"),
        (lambda f: (f / "val.bin").unlink(), r"val\.bin is missing"),
        (lambda f: (f / "tokenizer" / "tokenizer.json").unlink(), r"tokenizer/tokenizer\.json is missing"),
        (lambda f: vocabulary.save(character_tokenizer(["ab"]), f / "tokenizer"), r"is not the tokenizer that these"),
        (lambda f: edit(f, dtype="floating"), r"metadata\.json is not the metadata of a token store .*floating"),
        (lambda f: edit(f, tokenizer_sha256="0"), r"is not the tokenizer that these"),
        (lambda f: edit(f, repeated_documents=float("nan")), r"it contains NaN"),
        (lambda f: replaced(f / "val.bin", os.mkfifo), r"val\.bin is not a regular file"),
        (lambda f: replaced(f / "val.bin.index", lambda p: p.symlink_to(p)), r"val\.bin\.index is not a regular file"),
    ],
)
def test_damaged_stores_are_refused_with_the_remedy(finished, damage, sentence):
    damage(finished)
    assert_one_sentence(sentence + r".* [Dd]elete .* and build it again\.$", TokenStore, finished)


def test_metadata_of_another_tokenizer_are_refused(finished):
    sentence = "its tokenizer has 300 tokens and end-of-text id 0: one of them was changed"
    for size, end in ((299, 0), (70_000, 0), (300, 300)):
        edit(finished, vocab_size=size, eos_token_id=end)
        assert_user_error(sentence, TokenStore(finished).load_tokenizer)


@pytest.mark.parametrize("name", ["metadata.json", "train.bin", "tokenizer"])
def test_store_without_read_permission_is_refused(finished, name):
    (finished / name).chmod(0)
    for folder in list(finished.parents)[:-2]:
        folder.chmod(folder.stat().st_mode | 0o555)
    with without_root():
        assert_user_error(r"^\S+ cannot be read or written \(Permission denied\); .*$", inspect.main, [str(finished)])
    (finished / name).chmod(0o700)


def test_damage_is_reported_together_and_missing_metadata_has_a_remedy(finished):
    edit(finished, dtype="uint32")
    assert error_of(TokenStore, finished).count(" bytes long, not ") == 2
    edit(finished, dtype="uint16")
    (finished / "val.bin").unlink()
    shorten(finished / "train.bin", 2)
    assert len(error_of(TokenStore, finished).splitlines()) == 2
    edit(finished, format_version=3, something_new=1)
    assert_user_error(r"newer version .* \(format 3; this version reads formats up to 2\)", TokenStore, finished)
    (finished / "metadata.json").unlink()
    assert not TokenStore.is_store(finished)
    sentence = "has token ids, but no metadata.json: copy the whole token store, .* --import_tokens"
    assert_user_error(sentence, TokenStore, finished)


def test_folders_without_a_store_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    folders = {"empty": "empty --output data/empty", "nowhere": "TEXT --output nowhere"}
    for name, end in (folders | {"file": "file --output data/file"}).items():
        words = rf"{name} is not a token store.*python -m tokenizer\.pretokenize.*{end}`; .* add --tokenizer MODEL\.$"
        assert_user_error(words, TokenStore, name)


def test_id_beyond_the_vocabulary_is_found(finished):
    tokens = np.memmap(finished / "val.bin", dtype=np.uint16, mode="r+")
    tokens[5] = 300
    tokens.flush()
    store = TokenStore(finished)
    store.check_ids("train")
    sentence = r"val\.bin contains token id 300, but its vocabulary has only 300 tok.* again"
    assert_user_error(sentence, store.check_ids, "val")


def test_dataset_is_a_view_of_the_memory_map_that_trainer_reads(store, tmp_path):
    tokens = store.memory_map("train")
    allocated = pa.total_allocated_bytes()
    view = store.dataset("train", block_size=64)
    assert pa.total_allocated_bytes() == allocated, "the tokens were copied"
    assert len(view) == len(tokens) // 64
    assert view[3]["input_ids"] == view[3]["labels"] == tokens[3 * 64 : 4 * 64].tolist()
    assert view._fingerprint == store.dataset("train", 64)._fingerprint != store.dataset("train", 32)._fingerprint
    assert_user_error(r"has [\d,]+ tokens in val, and block_size is 1,000,000\.", store.dataset, "val", 1_000_000)
    assert_user_error("block_size is 0", store.dataset, "val", 0)
    config = GPT2ScratchConfig(vocab_size=store.metadata.vocab_size, n_layer=1, n_head=2, n_embd=16, n_positions=64)
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    assert 0 < Trainer(GPT2ScratchForCausalLM(config), arguments, train_dataset=view).train().training_loss < 10


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> TokenStore:
    folder = tmp_path_factory.mktemp("inspected")
    records = [{"text": f"{i}: {prose(i, 80)} naïve 雪 <|endoftext|> and \u200bmore"} for i in range(300)]
    (text := folder / "a.jsonl").write_text("\n".join([*map(json.dumps, records), '{"text": null}', "{"]))
    return tokenized(text, folder / "store", {"validation_fraction": 0.1}, "lenient", seed=1337, vocab_size=400)


@pytest.fixture
def inspected(original, tmp_path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "store"))


def test_inspect_shows_the_content(inspected, original, capsys):
    inspect.main([str(inspected)])
    shown = capsys.readouterr().out
    assert "BPE tokenizer with 400 tokens, ids stored as uint16" in shown
    for split in (original.metadata.train, original.metadata.val):
        for number in (split.tokens, split.documents, split.bytes):
            assert f" {number:,} " in shown
    assert original.metadata.train.documents + original.metadata.val.documents == 300
    assert "302 documents found, 300 in the store\nleft out or changed: 2 records without text; examples in" in shown
    assert shown.endswith("All hashes and indexes are correct, and every token id is in the vocabulary.\n")


def test_changed_byte_in_any_file_is_found(inspected):
    changed = set()
    for name in ("train.bin", "val.bin", "train.bin.index", "val.bin.index"):
        flip(inspected / name)
        changed.add(str(inspected / name))
        sentences = error_of(inspect.main, [str(inspected)]).splitlines()
        assert {sentence.split(" was ")[0] for sentence in sentences} == changed
        for sentence in sentences:
            assert re.search(r" was changed or damaged: its SHA-256 is \w+, but metadata.json .* again\.$", sentence)


def test_missing_stores_and_documents_are_reported(inspected):
    assert_user_error("Name a store", inspect.main, [])
    assert_user_error("Document 300 does not exist", inspect.main, [str(inspected), "--document", "300"])


def test_report_lists_left_out_text_with_examples(inspected):
    text = (inspected / "report.md").read_text(encoding="utf-8")
    assert "302 documents found, 300 in the store; " in text
    assert re.search(r"- 2 records without text \(\S*/a\.jsonl, byte [\d,]+\)\n", text)
    assert "### lenient.invisible: 300 changes, 300 characters removed" in text
    examples = text.split("### lenient.invisible")[1].split("\n\n")[1].splitlines()
    assert [r"\u200b" in example and " → " in example for example in examples] == [True] * 3
