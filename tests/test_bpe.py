"""Byte-pair encoding of many words at once: identical to `tokenizers` for all merges and words."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenizer.encoding import encode
from tokenizer.encoding.bpe import NONE, Merges, PairTable, byte_level_alphabet, is_plain

ALPHABET = byte_level_alphabet()


def byte_level(merges: list[tuple[str, str]], first_id: int = 0, **settings) -> Tokenizer:
    tokens = list(dict.fromkeys([*ALPHABET, *map("".join, merges)]))
    vocab = {token: first_id + i for i, token in enumerate(tokens)}
    rust = Tokenizer(models.BPE(vocab, merges, **settings))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return rust


def encoded(merges: Merges, words: list[bytes]) -> list[list[int]]:
    bounds = np.cumsum([0, *map(len, words)], dtype=np.int32)
    ids, counts = merges.encode(np.frombuffer(b"".join(words), dtype=np.uint8), bounds)
    return [ids[start:end].tolist() for start, end in pairwise([0, *counts.cumsum().tolist()])]


def in_rust(rust: Tokenizer, words: list[bytes]) -> list[list[int]]:
    shown = {byte: character for character, byte in ALPHABET.items()}
    return [[token.id for token in rust.model.tokenize("".join(map(shown.get, word)))] for word in words]


def words_of(letters: str, count: int, longest: int, seed: int) -> list[bytes]:
    pick = random.Random(seed)
    return ["".join(pick.choices(letters, k=pick.randint(1, longest))).encode() for _ in range(count)]


def random_merges(pick: random.Random, letters: str, longest: int) -> tuple[list[str], list[tuple[str, str]]]:
    tokens, merges = list(letters), []
    for _ in range(60):
        pair = (pick.choice(tokens), pick.choice(tokens))
        if "".join(pair) not in tokens and len("".join(pair)) < longest:
            merges.append(pair)
            tokens.append("".join(pair))
    return tokens, merges


@pytest.mark.parametrize("first_id", [0, 70_000], ids=["uint16", "uint32"])
@pytest.mark.parametrize("seed", range(8))
def test_random_merges_match_tokenizers(seed, first_id):
    _, merges = random_merges(random.Random(seed), "abcd", 9)
    rust = byte_level(merges, first_id)
    words = words_of("abcd", 3000, 40, seed) + words_of("ab", 1000, 30, seed)
    assert encoded(Merges(rust), words) == in_rust(rust, words)


@pytest.mark.parametrize("seed", range(40))
def test_long_words_encoded_in_windows_match_whole_words(seed, monkeypatch):
    pick = random.Random(seed)
    monkeypatch.setattr(encode, "WINDOW", pick.choice([20, 64, 300]))
    monkeypatch.setattr(encode, "OVERLAP", pick.choice([2, 7, 16]))
    tokens, merges = random_merges(pick, "abcd"[: pick.choice([1, 2, 4])], 30)
    rust = byte_level(merges)
    encoder = encode.WordEncoder(rust, np.dtype("<u4"))
    words = [*words_of("ab", 10, 2000, seed), *words_of("abcd", 10, 2000, seed), b"a" * 999, b"abb" * 500]
    words.append("".join(pick.choices(tokens, k=500)).encode())
    for word, ids in zip(words, in_rust(rust, words), strict=True):
        assert encoder([word], [encode.NOTHING])[0].tolist() == ids


def test_duplicate_merges_use_the_last_rank_and_pair_lookup_handles_collisions():
    rust = byte_level([("a", "b"), ("b", "c")])
    content = json.loads(rust.to_str())
    content["model"]["merges"].append(["a", "b"])
    rust = Tokenizer.from_str(json.dumps(content))
    assert encoded(Merges(rust), [b"abc"]) == in_rust(rust, [b"abc"])
    table = PairTable(*np.divmod(np.arange(3000, dtype=np.int32), 60), small=True)
    left, right = np.divmod(np.arange(3600, dtype=np.int32), 60)
    assert table(left, right).tolist() == [*range(3000), *[NONE] * 600]


def test_models_with_other_encoding_rules_are_rejected():
    assert is_plain(byte_level([]))
    others = {"dropout": 0.1, "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "ignore_merges": True}
    for name, value in others.items():
        assert not is_plain(byte_level([], **{name: value})), name
    assert not is_plain(Tokenizer(models.BPE({"a": 0}, [])))
    assert not is_plain(Tokenizer(models.WordLevel(dict(ALPHABET), unk_token="a")))
    for merges in ([("bc", "a"), ("b", "c")], [("a", "b"), ("b", "c"), ("abc", "ab"), ("ab", "c"), ("a", "bc")]):
        used_before_made = byte_level(merges)
        with pytest.raises(ValueError, match="a merge uses a token before the merge that produces it"):
            Merges(used_before_made)
        ids, _ = encode.encoder(used_before_made, np.dtype("<u4"))([b"abcabc"], [encode.NOTHING])
        assert ids.tolist() == in_rust(used_before_made, [b"abcabc"])[0]
