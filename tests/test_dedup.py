"""Deduplication: literal keys, repeats compared with a dictionary, and near-duplicates."""

import random
import sys

import numpy as np
import pytest

from conftest import assert_user_error
from tokenizer.cleaning.dedup import BANDS, BLOCK_CHARACTERS, ROWS, MinHasher, repeated

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


def blocks(keys: np.ndarray, block: int):
    return (keys[i : i + block] for i in range(0, len(keys), block))


def test_bands_have_expected_values(hasher):
    assert hasher.bands(FOX)[:3].tolist() == [10785064068555023202, 14965718624359287907, 2082176215953572380]
    assert hasher.bands(CHINESE)[:2].tolist() == [13011511918108775046, 12533474677868480444]
    assert hasher.bands("?!")[:2].tolist() == [10184276088777479603, 15594927824249659844]


@pytest.mark.parametrize("block", [1, 97, 2000])
def test_repeats_match_a_dictionary(block):
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 1 << 64, (300, 2), dtype=np.uint64)
    digests[:100, 0] = digests[100:200, 0]  # documents that share only half a digest are different
    rows = np.concatenate([digests, digests[rng.integers(0, 300, 250)], np.repeat(digests[:1], 150, axis=0)])
    rows = rng.permutation(rows)
    for kind, keys in (("exact", rows), ("near", np.column_stack([rows, rng.permutation(rows), *[rows] * 6]))):
        seen, expected = set(), []
        for row in keys.tolist():
            named = {("digest", *row[:2]), *enumerate(row[2:])}
            expected.append(bool(named & seen))
            seen |= named
        found = repeated(kind, lambda column, keys=keys: blocks(keys[:, column], block))
        assert found.tolist() == expected


def test_slightly_changed_documents_are_near_duplicates(hasher):
    """The changes are to words, boilerplate, case and layout."""
    for seed in range(20):
        words = essay(seed)
        text = " ".join(words)
        for changed in (1, 3, 10):
            assert near(hasher, text, " ".join([*words[:100], *essay(seed + 1000, changed), *words[100 + changed :]]))
        scattered = " ".join("other" if i in (20, 150, 280) else word for i, word in enumerate(words))
        assert near(hasher, text, scattered)
        assert near(hasher, text, text + "\n\nShare this page. Subscribe to our newsletter. All rights reserved.")
    assert np.array_equal(hasher.bands(text), hasher.bands("\n".join(words).upper() + "!"))


def test_match_rate_follows_similarity(hasher):
    """At a Jaccard similarity of 0.685, half of all pairs share one of the `BANDS`, which have `ROWS` hashes each."""
    hits = 0
    for seed in range(400):
        words = essay(seed, 2004)  # 2000 shingles, 374 of which differ
        hits += near(hasher, " ".join(words), " ".join([*words[:1630], *essay(seed + 1000, 374)]))
    similarity = 1626 / 2374
    assert hits / 400 == pytest.approx(1 - (1 - similarity**ROWS) ** BANDS, abs=0.08)
    bands = np.stack([hasher.bands(" ".join(essay(seed))) for seed in range(200)])
    assert all(len(np.unique(bands[:, band])) == 200 for band in range(BANDS))


@pytest.mark.parametrize("text", [CHINESE, THAI])
def test_near_duplicates_in_scripts_without_spaces(hasher, text):
    assert near(hasher, text, text[:40] + text[41:])
    assert near(hasher, text, text.replace(" ", "").replace("。", " "))
    assert not near(hasher, text, text[::-1])


def test_bands_of_short_wordless_and_long_texts(hasher):
    assert np.array_equal(hasher.bands("Good morning!"), hasher.bands("good  morning"))
    for other in ("morning good", "good", "good morning you", "goodmorning"):
        assert not near(hasher, "good morning", other)
    texts = ["", " ", "?!", "!?", "—", "...", "....", "🙂", "🙃"]
    bands = np.stack([hasher.bands(text) for text in texts])
    assert len(np.unique(bands)) == len(texts) * BANDS
    assert near(hasher, "🙂", "🙂")
    words = essay(0, 3 * BLOCK_CHARACTERS // 5)
    assert near(hasher, " ".join(words), " ".join(["One", "more", *words]))


def test_missing_rensa_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert_user_error(r"which is not installed: install it with pip install -e '\.\[dedup\]'", MinHasher)
