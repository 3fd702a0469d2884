"""Byte-pair encoding of words: identical to the model of `tokenizers`, whole or in windows."""

import itertools
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenizer.encoding import encode
from tokenizer.encoding.encode import RustEncoder, WordEncoder, byte_level_alphabet, has_separate_words, is_plain

ALPHABET = byte_level_alphabet()


def byte_level(merges: list[tuple[str, str]], first_id: int = 0, **settings) -> Tokenizer:
    tokens = list(dict.fromkeys([*ALPHABET, *map("".join, merges)]))
    vocab = {token: first_id + i for i, token in enumerate(tokens)}
    rust = Tokenizer(models.BPE(vocab, merges, **settings))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return rust


def in_rust(rust: Tokenizer, words: list[bytes]) -> list[list[int]]:
    names = {byte: character for character, byte in ALPHABET.items()}
    return [[token.id for token in rust.model.tokenize("".join(map(names.get, word)))] for word in words]


def assert_encodes(rust: Tokenizer, words: list[bytes]) -> None:
    ids, counts = WordEncoder(rust, np.dtype("<u4"))(words, [encode.NOTHING] * len(words))
    expected = in_rust(rust, words)
    assert counts.tolist() == list(map(len, expected))
    assert ids.tolist() == [*itertools.chain(*expected)]


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
    assert_encodes(byte_level(merges, first_id), words_of("abcd", 3000, 40, seed) + words_of("ab", 1000, 30, seed))


@pytest.mark.parametrize("seed", range(40))
def test_long_words_encoded_in_windows_match_whole_words(seed, monkeypatch):
    pick = random.Random(seed)
    monkeypatch.setattr(encode, "WINDOW", pick.choice([20, 64, 300]))
    monkeypatch.setattr(encode, "OVERLAP", pick.choice([2, 7, 16]))
    tokens, merges = random_merges(pick, "abcd"[: pick.choice([1, 2, 4])], 30)
    words = [*words_of("ab", 10, 2000, seed), *words_of("abcd", 10, 2000, seed), b"a" * 999, b"abb" * 500]
    words.append("".join(pick.choices(tokens, k=500)).encode())
    assert_encodes(byte_level(merges), words)


def test_models_with_other_encoding_rules_are_rejected():
    assert is_plain(byte_level([]))
    others = {"dropout": 0.1, "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "ignore_merges": True}
    for name, value in others.items():
        assert not is_plain(byte_level([], **{name: value})), name
    assert not is_plain(Tokenizer(models.BPE({"a": 0}, [])))
    assert not is_plain(Tokenizer(models.WordLevel(dict(ALPHABET), unk_token="a")))
    for merges in (
        [("ÿ", "a")],
        [("bc", "a"), ("b", "c")],
        [("a", "b"), ("b", "c"), ("abc", "ab"), ("ab", "c"), ("a", "bc")],
    ):
        unusual = byte_level(merges)
        assert not has_separate_words(unusual)
        assert isinstance(encode.encoder(unusual, np.dtype("<u4")), RustEncoder)
