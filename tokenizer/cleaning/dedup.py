"""Deduplication: find documents that repeat an earlier one, exactly or nearly.

The process that reads a document computes its keys: a digest of the text and, for near-duplicates, the bands of its
MinHash signature (Broder 1997). One merge pass then reads all keys in document order and marks every document that
shares a key with an earlier one. So the result depends only on the documents and their order, not on the processes.
"""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.errors import UserError
from common.limits import setting
from tokenizer.cleaning.characters import UNSPACED_SCRIPTS

# FineWeb's values (Penedo et al. 2024, arXiv:2406.17557): 112 hashes of 5-word shingles in 14 bands of 8. Documents
# with Jaccard similarity s share a band with probability 1 - (1 - s^8)^14: 0.05 at 0.5, 1/2 at 0.685, 0.92 at 0.8,
# 0.9996 at 0.9.
BANDS, ROWS = 14, 8
SHINGLE_WORDS = 5

# Columns of a document's uint64 keys: the two halves of its digest, then the bands.
DIGEST_KEYS = 2
KEYS = {"no": 0, "exact": DIGEST_KEYS, "near": DIGEST_KEYS + BANDS}

ALONE = 1 << 31  # marks a character that is a word by itself

# Multipliers and seed: bits without a pattern. They are odd, so that they have inverses modulo 2^64.
GOLDEN = 0x9E3779B97F4A7C15  # 64 bits of the golden ratio's fraction
PI = 0x243F6A8885A308D3  # 64 bits of pi's fraction

# Number of characters split at a time, so that their arrays stay in the CPU cache. A word across a cut counts as two
# words, which affects about one word in ten thousand.
BLOCK_CHARACTERS = 1 << 16


@dataclass
class DedupArguments:
    dedup: Literal["no", "exact", "near"] = setting(
        "no",
        "Leave out documents that repeat an earlier one: `exact`, identical text; `near`, also documents that share "
        "about 70 percent or more of their 5-word sequences with it.",
    )


class MinHasher:
    """MinHash keys, which near-duplicates share. The constructor raises a `UserError` if rensa is not installed.
    A word is a run of letters, marks and digits; case is ignored. In scripts without spaces, each character is a word.
    The shingles of a text are its sequences of five words; a text with fewer words is one shingle. The same text has
    the same keys on every machine with the same Unicode version of Python, which defines the letters."""

    def __init__(self):
        import xxhash  # training from a store does not need it

        try:
            from rensa import RMinHash  # optional extra, needed only for --dedup near
        except ImportError as error:
            raise UserError(
                "Finding near-duplicates needs rensa, which is not installed: install it with pip install -e "
                "'.[dedup]', or use --dedup exact."
            ) from error
        self._signatures = RMinHash.digest_matrix_from_flat_token_hashes
        self._hash = xxhash.xxh3_64_intdigest
        self._letters = _letters()
        self._powers = np.full(BLOCK_CHARACTERS, PI, np.uint64).cumprod()
        self._inverses = np.full(BLOCK_CHARACTERS, pow(PI, -1, 1 << 64), np.uint64).cumprod()

    def bands(self, text: str) -> np.ndarray:
        """Return the bands of a text, (BANDS,) uint64.
        Two texts with Jaccard similarity s share each band with probability s^ROWS. A text without words shares its
        bands only with identical texts."""
        shingles = self._shingles(text)
        [signature] = self._signatures(shingles, [0, len(shingles)], BANDS * ROWS, GOLDEN).to_rows()
        rows = np.array(signature, "<u4").reshape(BANDS, ROWS)
        return np.array([self._hash(row.tobytes(), seed=band) for band, row in enumerate(rows)], np.uint64)

    def _shingles(self, text: str) -> np.ndarray:
        """Return the hash of each shingle, (shingles,) uint64. There is at least one."""
        starts = range(0, len(text) or 1, BLOCK_CHARACTERS)
        words = np.concatenate([self._words(text[i : i + BLOCK_CHARACTERS]) for i in starts])
        if len(words) == 0:
            return np.array([self._hash(text.encode())], np.uint64)
        if len(words) < SHINGLE_WORDS:
            words = np.concatenate([words, np.zeros(SHINGLE_WORDS - len(words), np.uint64)])
        count = len(words) - SHINGLE_WORDS + 1
        return sum(words[i : i + count] * self._powers[i] for i in range(SHINGLE_WORDS))

    def _words(self, text: str) -> np.ndarray:
        """Return the hash of each word, (words,) uint64: a polynomial in its letters modulo 2^64, then mixed."""
        letters = self._letters[np.frombuffer(text.encode("utf-32-le"), "<u4")]  # (characters,), 0 between words
        starts = letters != 0
        is_single = letters >= ALONE
        starts[1:] &= (letters[:-1] == 0) | is_single[1:] | is_single[:-1]
        starts = starts.nonzero()[0]
        if len(starts) == 0:
            return np.zeros(0, np.uint64)
        # Each letter is weighted by its place in the text; each sum is divided by the weight of its first letter.
        words = np.add.reduceat(letters * self._powers[: len(letters)], starts) * self._inverses[starts]
        words ^= words >> 32
        words *= GOLDEN
        words ^= words >> 32
        return words


def _letters() -> np.ndarray:
    """Return each character in lower case, (code points,) uint32, or 0 if it is not part of a word."""
    letters = np.zeros(0x110000, np.uint32)
    for code in range(0x40000):  # no letters are above this code point
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            letters[code] = ord(character.lower()[0])
    for start, end in UNSPACED_SCRIPTS:
        letters[start : end + 1] |= np.where(letters[start : end + 1] > 0, ALONE, 0).astype(np.uint32)
    return letters


def repeated(kind: str, columns: Callable[[int], Iterator[np.ndarray]]) -> np.ndarray:
    """Return a mask of repeated documents, (documents,) bool: an earlier document has the same digest or shares a band.
    A document is dropped if any earlier document is near it, even if that document is itself dropped. In a chain in
    which each document resembles only the previous one, only the first stays. If two different documents come first and
    a third resembles both, the first two stay; a search for clusters would keep one.
    `columns` yields a column of keys in order of documents, in blocks (n,) uint64."""
    import pandas  # installed with datasets; training from a store needs neither

    masks = (pandas.Series(np.concatenate([*columns(i)])).duplicated().to_numpy() for i in range(KEYS[kind]))
    mask = next(masks) & next(masks)  # a repeated digest repeats both halves
    for band in masks:
        mask |= band
    return mask
