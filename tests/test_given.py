"""Datasets of a Python program: the same store as from files, resuming, and datasets that cannot be used."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    interleave_datasets,
)
from huggingface_hub import constants

from conftest import assert_one_sentence, contents, prose, wait_until
from tokenizer import pretokenize
from tokenizer.corpus import given, units
from tokenizer.corpus.hub import unreachable
from tokenizer.store.store import TokenStore

TEXTS = [f"{i}: naïve 雪 {prose(i, 40)}" for i in range(400)]
ROWS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
SETTINGS = {"vocab_size": 300, "validation_fraction": 0.1, "quiet": True}
TOKENS = ("train.bin", "val.bin", "train.bin.index", "val.bin.index", "tokenizer/tokenizer.json")


def iterable(rows: list[dict]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def tokens(folder: Path) -> list[bytes]:
    content = contents(folder)
    return [content[name] for name in TOKENS]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("expected")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pretokenize(folder / "texts.jsonl", folder / "store", **SETTINGS)
    return tokens(folder / "store")


def test_a_wrong_tokenizer_is_refused_before_text_is_copied_and_the_program_stays_online(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    unreachable.cache_clear()
    settings = {"tokenizer": "someone/typo", "quiet": True}
    sentence = "the Hub cannot be reached"
    assert_one_sentence(sentence, pretokenize, Dataset.from_list(ROWS), tmp_path / "store", **settings)
    assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (False, "0")
    assert [*tmp_path.rglob("*.jsonl")] == []


@pytest.mark.parametrize("num_proc", [1, 3])
@pytest.mark.parametrize("kind", ["Dataset", "IterableDataset"])
def test_dataset_gives_the_same_store_as_the_command(expected, tmp_path, monkeypatch, kind, num_proc):
    monkeypatch.setattr(units, "UNIT_BYTES", 10_000)
    data = Dataset.from_list(ROWS) if kind == "Dataset" else iterable(ROWS)
    store = pretokenize(data, tmp_path / "store", num_proc=num_proc, **SETTINGS)
    assert tokens(tmp_path / "store") == expected
    assert store.metadata.sources == [kind]
    assert {*os.listdir(tmp_path)} <= {".store.lock", "store"}


def test_own_filters_splits_paths_and_lists_are_used(tmp_path):
    odd = iterable(ROWS).filter(lambda row: row["id"] % 2).map(lambda row: {"text": row["text"].upper()})
    store = pretokenize(odd, tmp_path / "odd", **SETTINGS)
    assert store.metadata.counts["documents"] == 200
    # Pictures which cannot be decoded.
    media = {"picture": Image(), "pictures": List(Image()), "parts": {"picture": Image()}}
    features = Features({**media, "id": Value("int32"), "text": Value("string")})
    picture = {"bytes": b"", "path": None}
    values = {"picture": picture, "pictures": [picture], "parts": {"picture": picture}}
    pictures = Dataset.from_list([values | row for row in ROWS[:9]], features)
    for data in (pictures, pictures.to_iterable_dataset()):
        assert pretokenize(data, tmp_path / type(data).__name__, **SETTINGS).metadata.counts["documents"] == 9
    contents_of = ([{"type": "text", "text": text, "image": None}] for text in TEXTS)
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents_of]
    part = {"type": Value("string"), "text": Value("string"), "image": Image()}
    chats = Dataset.from_list(rows, Features({"messages": List({"role": Value("string"), "content": List(part)})}))
    store = pretokenize(chats, tmp_path / "chats", chat_template="chatml", **SETTINGS)  # with nested pictures
    assert store.metadata.counts["documents"] == 400
    both = interleave_datasets([iterable(ROWS[:100]), iterable(ROWS[100:200])])
    assert pretokenize(both, tmp_path / "both", **SETTINGS).metadata.counts["documents"] == len([*both])
    splits = IterableDatasetDict({"train": iterable(ROWS[:300]), "validation": iterable(ROWS[300:]), "other": both})
    assert pretokenize(splits, tmp_path / "splits", **SETTINGS).metadata.val.documents == 100
    (tmp_path / "a.txt").write_text(prose(1))
    data = [tmp_path / "a.txt", Dataset.from_list(ROWS), Dataset.from_list(ROWS)]
    store = pretokenize(data, tmp_path / "list", weights=[1, 1, 2], dedup="no", **SETTINGS)
    assert store.metadata.sources == [str(tmp_path / "a.txt"), "Dataset 2", "Dataset 3"]


def test_transforms_and_chosen_columns_are_kept(tmp_path):
    data = Dataset.from_list([{"raw": text, "text": text.upper()} for text in TEXTS])
    upper = Dataset.from_list([{"raw": text} for text in TEXTS]).with_transform(
        lambda rows: {"text": [text.upper() for text in rows["raw"]]}
    )
    stores = [data.with_format(columns=["text"]), upper, data.with_format("numpy", columns=["raw"])]
    stores.append(data.with_format("numpy", columns=["raw"], output_all_columns=True))  # hides none
    starts = []
    for i, part in enumerate(stores):
        store = pretokenize(part, tmp_path / f"store{i}", **SETTINGS)
        starts.append(store.load_tokenizer().decode(store.memory_map("train")[:40])[:8])
    assert starts == ["0: NAÏVE", "0: NAÏVE", "0: naïve", "0: NAÏVE"]


def test_the_address_of_an_object_is_not_part_of_a_dataset():
    first, second = ({"train": iterable([{"text": "a", "image": object()}])} for _ in range(2))
    assert given.GivenDataset("x", first).identity() == given.GivenDataset("x", second).identity()


def test_chats_are_rendered(tmp_path):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    data = Dataset.from_list([{"messages": chat, "n": i} for i in range(100)])
    store = pretokenize(data, tmp_path / "chat", chat_template="chatml", vocab_size=300, quiet=True)
    assert "<|im_start|>assistant\nHi.<|im_end|>" in store.load_tokenizer().decode(store.memory_map("train")[:60])


def test_empty_texts_are_blank_documents_as_in_files(expected, tmp_path):
    data = Dataset.from_list([{"text": text} for row in ROWS for text in (row["text"], "")])
    assert pretokenize(data, tmp_path / "store", **SETTINGS).metadata.counts["blank"] == len(ROWS)
    assert tokens(tmp_path / "store") == expected


def test_limits_end_infinite_datasets(tmp_path, monkeypatch):
    endless = iterable(ROWS).repeat(None)
    store = pretokenize(endless, tmp_path / "documents", max_documents=1000, **SETTINGS)
    assert store.metadata.counts["documents"] == 1000
    assert pretokenize(endless, tmp_path / "bytes", max_bytes="100kB", **SETTINGS).metadata.counts["bytes"] < 100_001
    chats = Dataset.from_list([{"messages": [{"role": "user", "content": "Hello"}]}] * 500)
    given.GivenDataset("chats", {"train": chats}).write(
        "train", "messages", tmp_path / "chats", units.Limit(bytes=1000)
    )
    assert len((tmp_path / "chats").read_text().splitlines()) == 201
    monkeypatch.setattr(given, "FREE_BYTES", shutil.disk_usage(tmp_path).free)
    monkeypatch.setattr(given, "CHECKED_CHARACTERS", 100_000)
    sentence = r"IterableDataset has more than .* GB free; set max_bytes or max_documents, or name an output"
    assert_one_sentence(sentence, pretokenize, endless, tmp_path / "disk", **SETTINGS)


@pytest.mark.parametrize("kind", ["Dataset", "IterableDataset"])
def test_killed_program_resumes_and_another_dataset_is_refused(expected, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(units, "UNIT_BYTES", 10_000)

    def build(rows: list[dict] = ROWS) -> None:
        data = Dataset.from_list(rows) if kind == "Dataset" else iterable(rows)
        pretokenize(data, tmp_path / "store", num_proc=2, **SETTINGS | {"quiet": False})

    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    wait_until(lambda: list(tmp_path.glob(".store.unfinished/parts/*.json")) or not process.is_alive())
    process.kill()
    process.join()
    sentence = rf"store was started with other text or settings \({kind}/train was changed\); undo"
    assert_one_sentence(sentence, build, [{"id": 0, "text": "changed"}, *ROWS[1:]])
    build()
    said = capsys.readouterr().out
    assert "Resuming " in said
    assert "Copying" not in said
    assert tokens(tmp_path / "store") == expected


ONCE = iter(ROWS)


def failing():
    yield from ROWS[:200]
    raise ConnectionError("the line is cut")


@pytest.mark.parametrize(
    ("data", "settings", "sentence"),
    [
        (Dataset.from_dict({"n": [1, 2]}), {}, r"Dataset has no obvious text column; its columns are n: choose one"),
        (Dataset.from_dict({"a": ["x y", "z"], "b": ["u", "v"]}), {}, r"its columns are a, b: choose one with"),
        (Dataset.from_dict({"text": []}), {}, r"Dataset has no rows; give a dataset with text"),
        *((Dataset.from_dict({"text": [value] * 5}), {}, r"no text") for value in (None, [["a"]], 1)),
        (DatasetDict({"test": Dataset.from_list(ROWS)}), {}, r"DatasetDict has no split train, only test; give one"),
        (dict.fromkeys(("train", "val"), Dataset.from_list(ROWS)), {}, r"dict has a split val, .* name it validation"),
        (IterableDataset.from_generator(failing), {}, r"Reading IterableDataset stopped: the line is cut\. Correct"),
        (iterable([]), {}, r"no text"),
        (IterableDataset.from_generator(lambda: ONCE), {}, r"no records when it is read again"),
        (["some text " * 100], {}, r"some text [^;]{,300}; check the path"),
        (
            iterable([*ROWS[:50], *({"body": "x"} for _ in range(50))]),
            {},
            r"50 records .* and 50 .* first in IterableDataset/train, record 51;",
        ),
        ({"train": "x"}, {}, r"The data are of the type dict; give a Dataset"),
        (Dataset.from_list(ROWS), {"vocab_siz": 300}, r"Unknown flag --vocab_siz\. Did you mean --vocab_size\?"),
        (Dataset.from_list(ROWS), {"tokenizer": object()}, r"tokenizer is of the type object; give a name"),
        (Dataset.from_list(ROWS), {"validation_fraction": 2}, r"validation_fraction is 2\.0; it must be above 0 and"),
        (Dataset.from_list(ROWS), {"text_column": "body"}, r"Dataset has no column 'body'; its columns are id, text"),
    ],
)
def test_unusable_datasets_end_in_one_sentence(tmp_path, data, settings, sentence):
    assert_one_sentence(sentence, pretokenize, data, tmp_path / "store", quiet=True, **settings)
    assert not (tmp_path / "store").exists()


def test_the_same_call_opens_the_finished_store(tmp_path, capsys):
    data = Dataset.from_list(ROWS)
    pretokenize(data, tmp_path / "store", **SETTINGS)
    settings = {"vocab_size": np.int64(300), "validation_fraction": np.float64(0.1), "exclude": []}
    assert isinstance(pretokenize(data, tmp_path / "store", **settings), TokenStore)
    assert capsys.readouterr().out == f"{tmp_path / 'store'} already contains these tokens.\n"
