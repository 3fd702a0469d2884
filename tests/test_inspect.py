"""Inspection of a token store: its content, and errors for changed files."""

import json
import re
import shutil
from pathlib import Path

import pytest

from conftest import assert_user_error, error_of, flip, prose, tokenized
from tokenizer import inspect
from tokenizer.store.store import TokenStore


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> TokenStore:
    folder = tmp_path_factory.mktemp("inspected")
    records = [{"text": f"{i}: {prose(i, 80)} naïve 雪 <|endoftext|> and \u200bmore"} for i in range(300)]
    lines = [*(json.dumps(record) for record in records), '{"text": null}', "{"]
    (folder / "a.jsonl").write_text("\n".join(lines))
    corpus = {"validation_fraction": 0.1}
    return tokenized(folder / "a.jsonl", folder / "store", corpus, "lenient", seed=1337, vocab_size=400)


@pytest.fixture
def store(original, tmp_path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "store"))


def test_inspect_shows_the_content(store, original, capsys):
    inspect.main([str(store)])
    shown = capsys.readouterr().out
    assert "BPE tokenizer with 400 tokens, ids stored as uint16" in shown
    for split in (original.metadata.train, original.metadata.val):
        for number in (split.tokens, split.documents, split.bytes):
            assert f" {number:,} " in shown
    assert original.metadata.train.documents + original.metadata.val.documents == 300
    assert "302 documents found, 300 in the store\nleft out or changed: 2 records without text; examples in" in shown
    assert shown.endswith("All hashes and indexes are correct, and every token id is in the vocabulary.\n")


def test_changed_byte_in_any_file_is_found(store):
    names = ["train.bin", "val.bin", "train.bin.index", "val.bin.index"]
    for number, name in enumerate(names, start=1):
        flip(store / name)
        sentences = error_of(inspect.main, [str(store)]).splitlines()
        assert {sentence.split(" was ")[0] for sentence in sentences} == {str(store / one) for one in names[:number]}
        for sentence in sentences:
            assert re.search(r" was changed or damaged: its SHA-256 is \w+, but metadata.json .* again\.$", sentence)


def test_missing_stores_and_documents_are_reported(store):
    assert_user_error("Name a store", inspect.main, [])
    assert_user_error("Document 300 does not exist", inspect.main, [str(store), "--document", "300"])


def test_report_lists_left_out_text_and_tokens_with_examples(store):
    text = (store / "report.md").read_text(encoding="utf-8")
    assert "302 documents found, 300 in the store; " in text
    assert re.search(r"- 2 records without text \(\S*/a\.jsonl, byte [\d,]+\)\n", text)
    assert "### lenient.invisible: 300 documents changed, 300 characters removed" in text
    section = text.split("### lenient.invisible")[1].split("\n\n")[1]
    examples = section.splitlines()
    assert len(examples) == 3
    assert all(r"\u200b" in example and " → " in example for example in examples)
    tokens = text.split("## Tokens\n\n")[1].splitlines()
    assert tokens[0].startswith("- longest: ")
    assert tokens[1].startswith("- most frequent: ")
    assert "`' the'`" in tokens[1] or "`'.'`" in tokens[1]
    assert tokens[2].endswith(" of 400")
