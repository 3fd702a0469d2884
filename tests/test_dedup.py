"""Documents that repeat earlier ones: literal keys, repeats against a dictionary, near-duplicates that are found."""

import random
import sys
import tracemalloc

import numpy as np
import pytest

from errors import UserError
from tokenizer.dedup import BANDS, BLOCK_CHARACTERS, ROWS, MinHasher, key_columns, keys_per_document, repeated

FOX = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
CHINESE = "春天来了。公园里的花都开了。孩子们在草地上奔跑。老人们坐在长椅上晒太阳。大家都觉得这一天十分美好。" * 2
THAI = "ฤดูใบไม้ผลิมาถึงแล้ว ดอกไม้ในสวนบานสะพรั่ง เด็กๆ วิ่งเล่นบนสนามหญ้า คนชรานั่งอาบแดดบนม้านั่งยาว ทุกคนรู้สึกว่าวันนี้งดงามมาก"


@pytest.fixture(scope="module")
def hasher():
    pytest.importorskip("rensa")
    return MinHasher()


def essay(seed: int, words: int = 300) -> list[str]:
    choice = random.Random(seed).choice
    return ["".join(choice("abcdefghijklmnop") for _ in range(4)) for _ in range(words)]


def near(hasher: MinHasher, first: str, second: str) -> bool:
    return bool((hasher.bands(first) == hasher.bands(second)).any())


def repeats_of(rows: np.ndarray, block: int = 1000, **settings) -> np.ndarray:
    settings = {"memory": 128 << 20, **settings}
    return repeated(lambda: (rows[i : i + block] for i in range(0, len(rows), block)), len(rows), **settings)


def test_each_key_has_its_columns():
    for kind in ("no", "exact", "near"):
        columns = [i for key in key_columns(kind) for i in range(key.start, key.stop)]
        assert columns == list(range(keys_per_document(kind)))
    assert keys_per_document("near") == 2 + BANDS


def test_bands_are_these_numbers(hasher):
    assert hasher.bands(FOX)[:3].tolist() == [10785064068555023202, 14965718624359287907, 2082176215953572380]
    assert hasher.bands(CHINESE)[:2].tolist() == [13011511918108775046, 12533474677868480444]
    assert hasher.bands("?!")[:2].tolist() == [10184276088777479603, 15594927824249659844]


@pytest.mark.parametrize("memory", [1, 2_000, 20_000])
@pytest.mark.parametrize("block", [1, 97, 2000])
@pytest.mark.parametrize("width", [1, 2])
def test_repeats_are_those_of_a_dictionary(memory, block, width):
    rng = np.random.default_rng(width)
    distinct = rng.integers(0, 1 << 64, (300, 2), dtype=np.uint64)
    distinct[:100, 0] = distinct[100:200, 0]  # half a key in common is nothing in common
    keys = np.concatenate([distinct, distinct[rng.integers(0, 300, 250)], np.repeat(distinct[:1], 150, axis=0)])
    rows = np.column_stack([rng.integers(0, 9, len(keys), np.uint64), rng.permutation(keys)])
    columns = slice(1, 1 + width)
    seen: set[tuple] = set()
    expected = [key in seen or seen.add(key) is not None for key in map(tuple, rows[:, columns].tolist())]
    assert repeats_of(rows, block, columns=columns, memory=memory).tolist() == expected


def test_keys_that_are_no_hashes_are_told_apart_and_the_first_of_a_chain_alone_stays():
    rows = np.random.default_rng(0).integers(0, 50, (3000, 1), np.uint64)
    marked = repeats_of(rows, columns=slice(0, 1), memory=1000)
    assert np.flatnonzero(~marked).tolist() == sorted(np.unique(rows, return_index=True)[1].tolist())
    assert repeats_of(rows[:0], columns=slice(0, 1)).tolist() == []
    a, b, c = 1 << 62, 2 << 62, 3 << 62
    rows = np.array([[a, 1], [a, b], [2, b], [c, 3], [4, 5], [c, 5]], np.uint64)
    marked = repeats_of(rows, columns=slice(0, 1)) | repeats_of(rows, columns=slice(1, 2))
    assert marked.tolist() == [False, True, True, False, False, True]


@pytest.mark.parametrize("identical", [False, True])
def test_repeats_are_found_within_the_memory_allowed(identical):
    rows = np.random.default_rng(0).integers(0, 1 << 64, (300_000, 2), dtype=np.uint64)
    if identical:
        rows[:] = rows[0]
    tracemalloc.start()
    marked = repeats_of(rows, columns=slice(0, 2), memory=4 << 20)
    peak = tracemalloc.get_traced_memory()[1] - marked.nbytes
    tracemalloc.stop()
    assert marked.sum() == (len(rows) - 1 if identical else 0)
    assert peak < (8 << 20 if identical else 4 << 20)


def test_a_few_changes_make_a_near_duplicate(hasher):
    """Words, boilerplate, case and layout."""
    for seed in range(20):
        words = essay(seed)
        text = " ".join(words)
        for changed in (1, 3, 10):
            assert near(hasher, text, " ".join([*words[:100], *essay(seed + 1000, changed), *words[100 + changed :]]))
        scattered = " ".join("other" if i in (20, 150, 280) else word for i, word in enumerate(words))
        assert near(hasher, text, scattered)
        assert near(hasher, text, text + "\n\nShare this page. Subscribe to our newsletter. All rights reserved.")
    assert np.array_equal(hasher.bands(text), hasher.bands("\n".join(words).upper() + "!"))


def test_texts_match_as_often_as_their_similarity_says_and_unrelated_ones_never(hasher):
    """`ROWS` hashes in a band: at a Jaccard similarity of 0.685 half of all pairs share one of the `BANDS`."""
    hits = 0
    for seed in range(400):
        words = essay(seed, 2004)  # 2000 shingles, 374 of which differ
        hits += near(hasher, " ".join(words), " ".join([*words[:1630], *essay(seed + 1000, 374)]))
    similarity = 1626 / 2374
    assert hits / 400 == pytest.approx(1 - (1 - similarity**ROWS) ** BANDS, abs=0.08)
    bands = np.stack([hasher.bands(" ".join(essay(seed))) for seed in range(200)])
    assert all(len(np.unique(bands[:, band])) == 200 for band in range(BANDS))


@pytest.mark.parametrize("text", [CHINESE, THAI])
def test_scripts_without_blanks_have_near_duplicates(hasher, text):
    assert near(hasher, text, text[:40] + text[41:])
    assert near(hasher, text, text.replace(" ", "").replace("。", " "))
    assert not near(hasher, text, text[::-1])


def test_short_texts_are_one_shingle_those_without_words_match_themselves_and_long_ones_are_cut(hasher):
    assert np.array_equal(hasher.bands("Good morning!"), hasher.bands("good  morning"))
    for other in ("morning good", "good", "good morning you", "goodmorning"):
        assert not near(hasher, "good morning", other)
    texts = ["", " ", "?!", "!?", "—", "...", "....", "🙂", "🙃"]
    bands = np.stack([hasher.bands(text) for text in texts])
    assert len(np.unique(bands)) == len(texts) * BANDS
    assert near(hasher, "🙂", "🙂")
    words = essay(0, 3 * BLOCK_CHARACTERS // 5)
    assert near(hasher, " ".join(words), " ".join(["One", "more", *words]))


def test_a_missing_rensa_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match=r"needs rensa, which is not installed: pip install -e '\.\[dedup\]'"):
        MinHasher()
