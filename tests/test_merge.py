"""Merging parts into a store: weights, deduplication, splits, and identical bytes after any kill."""

import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_corpus import write, write_records

from conftest import assert_user_error, prose, tokenized
from tokenizer.build import merge
from tokenizer.build.merge import Merger
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import StoreBuilder
from tokenizer.build.worker import Part, UnitProcessor, Workers, share
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.byte_range import place_to_cut
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding import encode
from tokenizer.encoding.vocabulary import VocabularyArguments
from tokenizer.store.store import SPLITS, TokenStore

SEED = 1
DOCUMENTS = [f"Document {i}, {'naïve 雪 ' * (i % 7)}and so on.\n" for i in range(200)]
LINES = "".join(f"Line {i}: naïve 雪 words, don't they?\r\n" for i in range(600))  # 25 kB


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 2000)
    monkeypatch.setattr(merge, "LONG_BYTES", merge.LONG_BYTES)  # restored after tests that set it


def written(folder: Path, *inputs: list[str]) -> list[str]:
    """Write one file of records per input, with one document per text."""
    records = ([{"text": text} for text in texts] for texts in inputs)
    return [str(write_records(folder / f"{i}.jsonl", each)) for i, each in enumerate(records)]


def builder_of(paths, output, weights=(), dedup="no", fraction=0.1, tokenizer_type="bpe", seed=SEED) -> StoreBuilder:
    """Return a builder whose work is planned and not started. A token is a byte, or the end of a document."""
    corpus, cleaning = CorpusArguments(validation_fraction=fraction), CleaningArguments(["none"])
    vocabulary = VocabularyArguments(258 if tokenizer_type == "bpe" else None, tokenizer_type)
    recipe = Recipe(paths, corpus, vocabulary, cleaning, DedupArguments(dedup), seed, list(weights))
    builder = StoreBuilder(recipe, output, lambda text: None, Workers(1))
    assert builder.plan.units
    return builder


def with_parts(builder: StoreBuilder) -> StoreBuilder:
    """Process all units without merging them."""
    processor = UnitProcessor(builder.work)
    for number in range(len(processor.units)):
        processor.process(number)
    return builder


def finished(builder: StoreBuilder) -> TokenStore:
    return with_parts(builder).finish(is_merge=True)


def store_of(folder: Path, *inputs: list[str], **settings) -> TokenStore:
    number = len(list(folder.iterdir()))
    paths = written(folder / f"texts{number}", *inputs)
    return finished(builder_of(paths, folder / f"store{number}", **settings))


def documents(store: TokenStore, split: str) -> list[str]:
    pieces = encode.token_bytes(encode.load_rust(store.folder / "tokenizer" / "tokenizer.json"))
    texts = [b"".join(map(pieces.__getitem__, ids)) for ids in ids_of_documents(store, split)]
    assert getattr(store.metadata, split).bytes == len(b"".join(texts))
    return [text.decode() for text in texts]


def ids_of_documents(store: TokenStore, split: str) -> list[list[int]]:
    tokens, offsets = store.in_memory(split), store.offsets(split)
    assert offsets[-1] == len(tokens) == getattr(store.metadata, split).tokens
    assert len(offsets) - 1 == getattr(store.metadata, split).documents
    return [tokens[start:end].tolist() for start, end in pairwise(offsets)]


def trained_on(store: TokenStore) -> list[str]:
    return documents(store, "train")


def held_out(store: TokenStore) -> list[str]:
    return documents(store, "val")


def for_training(texts: list[str], fraction: float = 0.1) -> list[str]:
    return [text for text in texts if share(text.encode(), SEED) >= fraction]


def test_documents_keep_their_order_and_inputs_have_their_own_weights(tmp_path):
    store = store_of(tmp_path, DOCUMENTS, DOCUMENTS)
    assert trained_on(store) == for_training(DOCUMENTS) * 2
    assert (len(trained_on(store)), len(held_out(store))) == (2 * 179, 2 * 21)
    assert [ids[-1] for split in SPLITS for ids in ids_of_documents(store, split)] == [0] * 400
    assert store.metadata.repeated_documents == 0
    first, second, third = DOCUMENTS[:70], DOCUMENTS[70:150], DOCUMENTS[150:]
    store = store_of(tmp_path, first, second, third, weights=(2, 1, 3))
    assert trained_on(store) == for_training([*first, *second, *third, *first, *third, *third])
    assert Counter(held_out(store)).most_common(1)[0][1] == 1


def test_the_head_of_a_held_out_end_is_separated_from_copies_of_another_input(tmp_path):
    """No hash holds out one of the six documents, so the end of the last one is held out."""
    first, second = ([f"{letter} {i} {'word ' * 40}\n" for i in range(3)] for letter in "ab")
    store = store_of(tmp_path, first, second, weights=(2, 1), fraction=0.001)
    ends = [ids[-1] for ids in ids_of_documents(store, "train")]
    assert (ends[:8], len(ends)) == ([0] * 8, 9)


def test_copies_of_a_long_document_in_files_of_two_kinds_are_in_one_split(tmp_path, monkeypatch):
    """The first piece of a text file and that of a record have other lengths."""
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 1 << 24)
    texts = [f"Document {i} {'naïve words, ' * 90_000}" for i in range(3)]
    for i, text in enumerate(texts):
        write(tmp_path / f"{i}.txt", text)
    write_records(tmp_path / "all.jsonl", [{"text": text} for text in texts])
    store = tokenized(tmp_path, tmp_path / "store", {"validation_fraction": 0.5}, seed=3, tokenizer_type="character")
    in_train, in_val = (Counter(text[:10] for text in documents(store, split)) for split in SPLITS)
    assert in_train + in_val == Counter(dict.fromkeys(["Document 0", "Document 1", "Document 2"], 2))
    assert 0 < in_train.total() < 6
    assert not in_train & in_val


def test_weight_one_half_selects_the_same_half_every_time(tmp_path):
    once, half, again = (store_of(tmp_path, DOCUMENTS, weights=weights) for weights in ((), (0.5,), (0.5,)))
    chosen = trained_on(half)
    assert len(chosen) == 90
    assert chosen == trained_on(again)
    assert chosen == [text for text in trained_on(once) if text in set(chosen)]
    assert len(held_out(half)) == 9
    mixed = store_of(tmp_path, ["another\n"] * 9, DOCUMENTS[::-1], weights=(1, 0.5))
    assert set(trained_on(mixed)) - {"another\n"} == set(chosen)
    assert trained_on(store_of(tmp_path, DOCUMENTS, weights=(2.5,))) == for_training(DOCUMENTS) * 2 + chosen


def test_document_of_several_units_has_one_weight(tmp_path):
    texts = [f"{i}\n{LINES[: 700 * i]}" for i in range(12)]
    paths = [str(write(tmp_path / f"{i:02}.txt", text)) for i, text in enumerate(texts)]
    once, store = (
        finished(builder_of(paths, tmp_path / f"store{weight}", weights=(weight,) * 12, fraction=0.2))
        for weight in (1, 1.5)
    )
    train = trained_on(once)
    assert sorted(train + held_out(once)) == sorted(texts)
    assert trained_on(store)[: len(train)] == train
    more = trained_on(store)[len(train) :]
    assert 2 < len(more) < 10
    assert more == [text for text in train if text in more]


def test_repeated_documents_are_left_out_and_the_first_used_one_sets_the_weight(tmp_path):
    texts = [*DOCUMENTS[:90], *DOCUMENTS[:5], *DOCUMENTS[90:], *DOCUMENTS[50:60]]
    store = store_of(tmp_path, texts, [*DOCUMENTS[::-1], "One more.\n"], dedup="exact")
    assert trained_on(store) == for_training([*DOCUMENTS, "One more.\n"])
    assert len(trained_on(store)) + len(held_out(store)) == 201
    assert store.metadata.repeated_documents == 215
    store = store_of(tmp_path, DOCUMENTS[:80], DOCUMENTS[60:100], weights=(1, 2), dedup="exact")
    assert trained_on(store) == for_training([*DOCUMENTS[:100], *DOCUMENTS[80:100]])  # the first sets the weight
    assert store.metadata.repeated_documents == 20
    store = store_of(tmp_path, DOCUMENTS[60:100], DOCUMENTS[:80], weights=(2, 1), dedup="exact")
    assert trained_on(store) == for_training([*DOCUMENTS[60:100], *DOCUMENTS[:60], *DOCUMENTS[60:100]])
    store = store_of(tmp_path, DOCUMENTS, DOCUMENTS, weights=(0.5, 1), dedup="exact")
    first = trained_on(store_of(tmp_path, DOCUMENTS, weights=(0.5,)))
    assert trained_on(store) == first + [text for text in for_training(DOCUMENTS) if text not in first]
    assert store.metadata.repeated_documents == 99  # the documents that the first input uses


def test_long_documents_repeat_only_as_a_whole(tmp_path):
    others = [LINES[:-9] + "otherwise", "O" + LINES[1:], LINES + "more"]
    texts = dict(zip("abcdef", [LINES, LINES, *others, LINES], strict=True))
    paths = [str(write(tmp_path / f"{name}.txt", text)) for name, text in texts.items()]
    builder = builder_of(paths, tmp_path / "store", dedup="exact", fraction=1e-9)
    assert len(builder.plan.units) == 13 * 6
    store = finished(builder)
    assert "".join(trained_on(store) + held_out(store)) == "".join([LINES, *others])
    assert store.metadata.repeated_documents == 2


@pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is not installed")
def test_near_duplicates_are_left_out_at_any_position(tmp_path):
    texts = [prose(i, 240) for i in range(20)]
    near = [text.replace("\n", " \n", 3).replace("Of", "For", 1) for text in texts[::2]]
    store = store_of(tmp_path, texts, [*near, prose(99, 240)], weights=(1, 2), dedup="near")
    assert trained_on(store) == for_training([*texts, prose(99, 240), prose(99, 240)])
    assert store.metadata.repeated_documents == 10


def seed_apart(texts: list[str], fraction: float, to_validation: bool = False) -> int:
    """Return a seed that assigns all texts to one split."""
    splits = ((seed, {share(text.encode(), seed) < fraction for text in texts}) for seed in itertools.count())
    return next(seed for seed, split in splits if split == {to_validation})


def seed_of_long(path: Path, fraction: float, to_validation: bool) -> int:
    """Write LINES; return a seed that assigns them to one split. The first piece of a long document decides."""
    path.write_bytes(LINES.encode())
    start = LINES.encode()[: place_to_cut(str(path), 2000, "document")[0]].decode()
    return seed_apart([start], fraction, to_validation)


@pytest.mark.parametrize(
    ("weight", "to_validation", "tokenizer_type"), [(1, False, "bpe"), (3, True, "bpe"), (3, False, "character")]
)
def test_end_of_a_single_document_is_held_out(tmp_path, weight, to_validation, tokenizer_type):
    seed = seed_of_long(tmp_path / "a.txt", 0.3, to_validation)
    builder = builder_of([str(tmp_path / "a.txt")], tmp_path / "store", (weight,), "no", 0.3, tokenizer_type, seed)
    assert len(builder.plan.units) == 13
    store = finished(builder)
    [tail] = held_out(store)
    head = LINES.removesuffix(tail)
    assert trained_on(store) == [head] * weight
    if weight > 1 and tokenizer_type == "bpe":
        assert {ids[-1] for ids in ids_of_documents(store, "train")} == {store.load_tokenizer().eos_token_id}
    assert head + tail == LINES
    assert head.endswith("\n")
    assert 0.29 < len(tail) / len(LINES) < 0.31


FIRST, SECOND = DOCUMENTS[1:7], DOCUMENTS[7:13]


@pytest.mark.parametrize(("weights", "fraction"), [((2, 2), 0.02), ((1, 2), 0.2), ((2, 1), 0.4), ((1, 3), 0.2)])
def test_no_copy_passes_the_cut_if_no_document_is_held_out(tmp_path, weights, fraction):
    """The end of the text is held out: part of a document, or whole documents."""
    settings = {"fraction": fraction, "seed": seed_apart(FIRST + SECOND, fraction)}
    once, store = (store_of(tmp_path, FIRST, SECOND, weights=some, **settings) for some in ((), weights))
    assert "".join(trained_on(once) + held_out(once)) == "".join(FIRST + SECOND)
    assert held_out(store) == held_out(once)
    first, second = trained_on(once)[:6], trained_on(once)[6:]
    copies = [texts for nth in (1, 2) for texts, weight in zip((first, second), weights, strict=True) if nth < weight]
    assert trained_on(store) == [*first, *second, *itertools.chain.from_iterable(copies)]
    half = store_of(tmp_path, FIRST, SECOND, weights=(2.5, 2.5), **settings)
    train = trained_on(once)
    assert held_out(half) == held_out(once)
    more = trained_on(half)[2 * len(train) :]
    assert trained_on(half) == [*train, *train, *more]
    assert 0 < len(more) < len(train)
    assert more == [text for text in train if text in more]


def test_tail_can_include_whole_inputs_and_small_documents_stay_whole(tmp_path):
    settings = {"fraction": 0.6, "seed": seed_apart(FIRST + SECOND, 0.6)}
    store = store_of(tmp_path, FIRST, SECOND, weights=(1, 3), **settings)
    assert "".join(trained_on(store) + held_out(store)) == "".join(FIRST + SECOND)
    assert 0.55 < store.metadata.val.bytes / len("".join(FIRST + SECOND).encode()) < 0.65
    assert set(held_out(store)) >= set(SECOND)
    texts = [prose(i, 400) for i in range(30)]  # of 1.4 kB: smaller than a tenth of the text, or than `LONG_BYTES`
    for merge.LONG_BYTES, fraction in ((100, 0.1), (2000, 0.02)):
        store = store_of(tmp_path, texts, fraction=fraction, seed=2)
        assert sorted(trained_on(store) + held_out(store)) == sorted(texts)


@pytest.mark.parametrize("to_validation", [False, True])
def test_end_of_a_long_document_is_held_out_once_for_any_hash(tmp_path, to_validation):
    """The text has one document of 24,490 bytes in 13 units and 200 short ones."""
    merge.LONG_BYTES = 5000
    seed = seed_of_long(tmp_path / "long.txt", 0.1, to_validation)
    paths = [str(tmp_path / "long.txt"), *written(tmp_path, DOCUMENTS)]
    store = finished(builder_of(paths, tmp_path / "store", seed=seed))
    (head, *train), (tail, *val) = trained_on(store), held_out(store)
    assert head + tail == LINES
    assert (len(head.encode()), len(tail.encode())) == (22_030, 2_460)
    assert tail.startswith("Line 540: ")
    assert [text for text in DOCUMENTS if text in train] == train
    assert Counter(train + val) == Counter(DOCUMENTS)
    assert [ids[-1] for split in SPLITS for ids in ids_of_documents(store, split)] == [0] * 202
    assert json.loads((store.folder / "metadata.json").read_text())["counts"]["tails"] == 1
    assert "1 document split in two, with the end held out for validation" in (store.folder / "report.md").read_text()
    thrice = finished(builder_of(paths, tmp_path / "thrice", (3, 1), seed=seed))
    assert held_out(thrice) == [tail, *val]
    assert trained_on(thrice) == [head, *train, head, head]


INPUTS = {
    "weights and dedup": ([*DOCUMENTS[:25], *DOCUMENTS[:9]], DOCUMENTS[20:40] + ["One more.\n"] * 2),
    "a tail that is cut off": (DOCUMENTS[1:7], DOCUMENTS[7:25]),
    "dedup and long documents": ([LINES[:1500], *DOCUMENTS[:9], LINES[1000:2800]], DOCUMENTS[20:30]),
}


def parts_of(folder: Path, name: str) -> StoreBuilder:
    paths = written(folder / "texts", *INPUTS[name])
    merge.LONG_BYTES = 1000 if "long" in name else merge.LONG_BYTES
    seed = SEED if "dedup" in name else seed_apart(list(itertools.chain(*INPUTS[name])), 0.1)
    return with_parts(builder_of(paths, folder / "store", (1, 2.5), "exact", seed=seed))


def merger_of(builder: StoreBuilder, work: Path) -> Merger:
    return Merger(work, work / "store", builder.plan.settings, builder.plan.units, encode.token_bytes(builder.rust))


def merged(builder: StoreBuilder, work: Path) -> dict[str, bytes]:
    merger_of(builder, work).merge()
    return {path.name: path.read_bytes() for path in (work / "store").glob("*.bin*")}


def is_killed_at(step: int, builder: StoreBuilder, work: Path) -> bool:
    """Merge in a process that is killed before `step`; return whether there are that many steps."""
    process = multiprocessing.get_context("fork").Process(target=merge_until, args=(step, merger_of(builder, work)))
    process.start()
    process.join(600)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode != 0


def merge_until(last: int, merger: Merger) -> None:
    """Merge until step `last`; a step reads a block or changes a file."""
    steps = itertools.count(1)

    def counted(do):
        def step(*arguments, **more):
            if next(steps) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*arguments, **more)

        return step

    owners = {os: ["fsync", "truncate", "replace"], np: ["fromfile"], Path: ["unlink", "write_bytes"]}
    for owner, names in (owners | {Merger: ["_append"]}).items():
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))
    merger.merge()


@pytest.mark.parametrize("name", INPUTS)
def test_merge_killed_at_any_step_resumes_to_the_same_bytes(tmp_path, monkeypatch, name):
    builder = parts_of(tmp_path, name)
    shutil.copytree(builder.work, tmp_path / "whole")
    expected = merged(builder, tmp_path / "whole")
    assert sum(map(len, expected.values())) > 1000
    assert not [*(tmp_path / "whole").glob("parts/*.train"), *(tmp_path / "whole").glob("parts/*.val")]
    monkeypatch.setattr(merge, "BLOCK_TOKENS", 300)
    monkeypatch.setattr(merge, "BYTES_BETWEEN_RECORDS", 3000)
    for killed_at in itertools.count(1 + len(name) % 3, 3):
        work = tmp_path / f"killed at {killed_at}"
        shutil.copytree(builder.work, work)
        if not is_killed_at(killed_at, builder, work):
            break
        assert merged(builder, work) == expected
        shutil.rmtree(work)
    assert killed_at > 50
    steps = itertools.count(20, 5)  # repeated kills
    while is_killed_at(next(steps), builder, builder.work):
        pass
    assert next(steps) > 25
    for _ in range(2):  # again after everything is done
        assert merged(builder, builder.work) == expected


@pytest.mark.parametrize("name", ["train", "val", "rows", "json"])
@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: b"\0" * len(content)])
def test_damaged_part_is_written_again(tmp_path, name, damage):
    builder = parts_of(tmp_path, "weights and dedup")
    expected = merged(builder, shutil.copytree(builder.work, tmp_path / "copy"))
    path = next(path for path in sorted(builder.work.glob(f"parts/*.{name}")) if path.stat().st_size)
    path.write_bytes(damage(path.read_bytes()))
    if name == "json":
        assert Part.read(builder.work, int(path.stem)) is None
    else:
        sentence = rf"{path.name} was damaged, by a power failure or a broken disk; the same command"
        assert_user_error(sentence, merged, builder, builder.work)
    UnitProcessor(builder.work).process(int(path.stem))
    assert merged(builder, builder.work) == expected
