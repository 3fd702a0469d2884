"""Byte-pair encoding (Sennrich et al. 2016) of many words at once in numpy, identical to the results of `tokenizers`.

Each round merges, in every word, the pair of tokens that comes first in the list of merges. A word without such a pair is
finished.
"""

import json

import numpy as np
from tokenizers import Tokenizer, models

NONE = np.int32(2**31 - 1)  # rank of a pair that is not merged
PLAIN = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}


def byte_level_alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to bytes. Printable Latin-1 maps to itself, U+0100 and up to the other bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def is_plain(rust: Tokenizer) -> bool:
    """Return whether the model is a BPE whose vocabulary has every byte and whose tokens depend on merges alone."""
    if not isinstance(rust.model, models.BPE):
        return False
    plain = all(getattr(rust.model, name) in (value, "" if value is None else value) for name, value in PLAIN.items())
    return plain and byte_level_alphabet().keys() <= rust.get_vocab(with_added_tokens=False).keys()


class Merges:
    """Merges of a plain byte-level BPE. `made`, (merges,), contains the token that each merge produces."""

    def __init__(self, rust: Tokenizer):
        """Read the merges of `rust`.
        Raise a `ValueError` if the model is not plain or uses a token before the last merge that produces it. Training never
        does that, and one round could then not merge all pairs of a rank."""
        if not is_plain(rust):
            raise ValueError("tokens depend on more than merges of bytes")
        model = json.loads(rust.to_str())["model"]
        vocab = model["vocab"]
        self.of_byte = np.zeros(256, dtype=np.int32)
        for character, byte in byte_level_alphabet().items():
            self.of_byte[byte] = vocab[character]
        named = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        parts = [*zip(*named, strict=True)] or [(), ()]
        left, right, self.made = (
            np.array([vocab[token] for token in tokens], dtype=np.int32) for tokens in (*parts, map("".join, named))
        )
        self.lengths = np.zeros(max(vocab.values()) + 1, dtype=np.int64)  # bytes of each token
        self.lengths[list(vocab.values())] = list(map(len, vocab))
        first_used = np.full(len(self.lengths), NONE, dtype=np.int32)
        ranks = np.arange(len(named), dtype=np.int32)
        for part in (left, right):
            np.minimum.at(first_used, part, ranks)
        if (first_used[self.made] <= ranks).any():
            raise ValueError("a merge uses a token before the merge that produces it")
        self.ranks = PairTable(left, right, small=max(vocab.values()) < 0xFFFF)
        pairs = np.arange(1 << 16)
        self.rank_of_bytes = self.ranks(self.of_byte[pairs >> 8], self.of_byte[pairs & 0xFF])

    def encode(self, text: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode the words of `text`, (n,) uint8. They begin at `bounds`, (words + 1,) with the end. No word is empty.
        Returns ids, (m,) int32, and the number of ids per word, (words,) int32."""
        # The result stores each token at the position of its first byte.
        tokens, begins = self.of_byte.take(text), np.ones(len(text), dtype=bool)
        # Unfinished words, in order: tokens, their first bytes, whether a token is a word's last, rank with the next token.
        token, place, last = tokens.copy(), np.arange(len(text), dtype=np.int32), np.zeros(len(text), dtype=bool)
        last[bounds[1:] - 1] = True
        rank = np.full(len(text), NONE, dtype=np.int32)
        rank[:-1] = self.rank_of_bytes.take(text[:-1].astype(np.uint16) << 8 | text[1:])
        rank[last] = NONE
        sizes = np.diff(bounds)
        gone = np.zeros(len(text), dtype=bool)
        while True:
            least = np.minimum.reduceat(rank, np.cumsum(sizes) - sizes) if len(sizes) else NONE
            works = least != NONE  # (words,)
            if not works.any():
                return tokens[begins], np.add.reduceat(begins, bounds[:-1], dtype=np.int32)
            kept = np.flatnonzero(~gone & np.repeat(works, sizes))
            token, place, rank, last = token.take(kept), place.take(kept), rank.take(kept), last.take(kept)
            sizes = np.diff(np.flatnonzero(last), prepend=-1)
            first = np.flatnonzero(rank == np.repeat(least[works], sizes))  # first token of each pair that is merged
            follows = np.diff(first, prepend=-2) == 1
            if follows.any():  # overlapping pairs, as in aaaa: merge every second one
                nth = np.arange(len(first))
                first = first[(nth - np.maximum.accumulate(np.where(follows, 0, nth))) % 2 == 0]
            token[first] = tokens[place.take(first)] = self.made.take(rank.take(first))
            begins[place.take(first + 1)] = False
            gone = np.zeros(len(token), dtype=bool)
            gone[first + 1] = True
            last[first] = last.take(first + 1)
            rank[first] = rank[first + 1] = NONE
            before = first[first > 0] - 1
            changed = np.concatenate([first, before - gone.take(before)])
            changed = changed[~last.take(changed)]
            after = changed + 1
            rank[changed] = self.ranks(token.take(changed), token.take(after + gone.take(after)))


class PairTable:
    """Hash table of the ranks of token pairs, for many lookups at once."""

    def __init__(self, left: np.ndarray, right: np.ndarray, small: bool):
        """Build the table. `small`: true if all ids are below 2^16 - 1."""
        self.dtype, self.half, factor = (np.uint32, 16, 0x9E3779B1) if small else (np.uint64, 32, 0x9E3779B97F4A7C15)
        self.factor = self.dtype(factor)
        bits = (8 * len(left)).bit_length()
        self.shift = self.dtype(2 * self.half - bits)
        self.free = np.iinfo(self.dtype).max  # marks a free entry: it is not a pair of tokens
        self.pairs = np.full((1 << bits) + len(left), self.free, dtype=self.dtype)
        self.rank = np.full(len(self.pairs), NONE, dtype=np.int32)
        pairs = self._pairs(left, right)
        _, latest = np.unique(pairs[::-1], return_index=True)  # if a merge is listed twice, the last counts
        todo = len(pairs) - 1 - latest
        slots = self._slots(pairs[todo])
        while len(todo):
            _, first = np.unique(slots, return_index=True)
            fits = np.zeros(len(todo), dtype=bool)
            fits[first] = self.pairs[slots[first]] == self.free
            self.pairs[slots[fits]], self.rank[slots[fits]] = pairs[todo[fits]], todo[fits]
            todo, slots = todo[~fits], slots[~fits] + 1

    def _pairs(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left.astype(self.dtype) << self.dtype(self.half) | right.astype(self.dtype)

    def _slots(self, pairs: np.ndarray) -> np.ndarray:
        return (pairs * self.factor >> self.shift).astype(np.int64)

    def __call__(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the ranks of the pairs, (n,) int32."""
        pairs = self._pairs(left, right)
        slots = self._slots(pairs)
        found = self.pairs.take(slots)
        rank = np.where(found == pairs, self.rank.take(slots), NONE)
        again = np.flatnonzero((found != pairs) & (found != self.free))
        while len(again):
            slots[again] += 1
            found = self.pairs[slots[again]]
            hit = found == pairs[again]
            rank[again[hit]] = self.rank[slots[again[hit]]]
            again = again[~hit & (found != self.free)]
        return rank
