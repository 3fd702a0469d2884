"""Deduplication: documents that repeat an earlier one, word for word or nearly.

The reader of a document computes its keys: a digest of the text and, for near-duplicates, the bands of its MinHash
signature (Broder 1997). One merge pass then looks at all keys in document order and marks every document that shares a
key with an earlier one. So the result depends on the documents and their order alone, not on the processes.
"""

import struct
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from errors import UserError
from limits import setting
from tokenizer.characters import UNSPACED

# FineWeb's numbers (Penedo et al. 2024, arXiv:2406.17557): 112 hashes of 5-word shingles in 14 bands of 8. Documents of
# Jaccard similarity s share a band with probability 1 - (1 - s^8)^14: 0.05 at 0.5, 1/2 at 0.685, 0.92 at 0.8, 0.9996 at
# 0.9.
BANDS, ROWS = 14, 8
SHINGLE_WORDS = 5

DIGEST_COLUMNS = slice(0, 2)
BAND_COLUMNS = [slice(2 + band, 3 + band) for band in range(BANDS)]

ALONE = 1 << 31  # marks a character that is a word

# Multipliers and seed: bits without a pattern, odd, so that they have inverses modulo 2^64.
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's fraction
PI = 0x243F6A8885A308D3  # pi's fraction

# Characters that are cut into words at a time: their arrays stay in the processor's cache. A word across a cut counts as
# two: one word in some ten thousand.
BLOCK_CHARACTERS = 1 << 16


@dataclass
class DedupArguments:
    dedup: Literal["no", "exact", "near"] = setting(
        "no",
        "Leave out documents that repeat an earlier one: `exact`, word for word; `near`, also those that share about "
        "70 percent or more of their 5-word sequences with it.",
    )


def keys_per_document(kind: str) -> int:
    """Return the length of a document's row of uint64 keys: the digest's two halves, then the bands."""
    return {"no": 0, "exact": 2, "near": 2 + BANDS}[kind]


def key_columns(kind: str) -> list[slice]:
    """Return the columns of each key in a document's row, as `repeated` takes them."""
    return {"no": [], "exact": [DIGEST_COLUMNS], "near": [DIGEST_COLUMNS, *BAND_COLUMNS]}[kind]


class MinHasher:
    """Keys that near-duplicates share; raises a `UserError` where rensa is not installed.

    A word is a run of letters, marks and digits, its case ignored; where a script puts no blank between words, it is a
    character. A text's shingles are its sequences of five words; fewer words than five are one shingle. The same text
    has the same keys on every machine; what counts as a letter follows the Unicode version of Python.
    """

    def __init__(self):
        import xxhash  # comes with datasets; training from a store needs neither

        try:
            from rensa import RMinHash  # an extra: only near-duplicates need it
        except ImportError as error:
            raise UserError(
                "Finding near-duplicates needs rensa, which is not installed: pip install -e '.[dedup]' installs it; "
                "--dedup exact works without."
            ) from error
        self._signatures = RMinHash.digest_matrix_from_flat_token_hashes
        self._hash = xxhash.xxh3_64_intdigest
        self._letters = _letters()
        self._powers = np.full(BLOCK_CHARACTERS, PI, np.uint64).cumprod()
        self._inverses = np.full(BLOCK_CHARACTERS, pow(PI, -1, 1 << 64), np.uint64).cumprod()

    def bands(self, text: str) -> np.ndarray:
        """Return (BANDS,) uint64. Two texts of Jaccard similarity s share each with probability s^ROWS; a text without words
        shares them with the same text only."""
        shingles = self._shingles(text)
        [signature] = self._signatures(shingles, [0, len(shingles)], BANDS * ROWS, GOLDEN).to_rows()
        rows = struct.iter_unpack(f"{4 * ROWS}s", struct.pack(f"<{BANDS * ROWS}I", *signature))
        return np.array([self._hash(row, seed=band) for band, [row] in enumerate(rows)], np.uint64)

    def _shingles(self, text: str) -> np.ndarray:
        """Return (at least one,) uint64: the hash of each shingle."""
        words = np.concatenate(
            [self._words(text[i : i + BLOCK_CHARACTERS]) for i in range(0, len(text) or 1, BLOCK_CHARACTERS)]
        )
        if len(words) == 0:
            return np.array([self._hash(text.encode())], np.uint64)
        if len(words) < SHINGLE_WORDS:
            words = np.concatenate([words, np.zeros(SHINGLE_WORDS - len(words), np.uint64)])
        count = len(words) - SHINGLE_WORDS + 1
        return sum(words[i : i + count] * self._powers[i] for i in range(SHINGLE_WORDS))

    def _words(self, text: str) -> np.ndarray:
        """Return (words,) uint64: the hash of each word, a polynomial in its letters modulo 2^64, then mixed."""
        letters = self._letters[np.frombuffer(text.encode("utf-32-le"), "<u4")]  # (characters,), 0 between words
        starts = letters != 0
        alone = letters >= ALONE
        starts[1:] &= (letters[:-1] == 0) | alone[1:] | alone[:-1]
        starts = starts.nonzero()[0]
        if len(starts) == 0:
            return np.zeros(0, np.uint64)
        # Each letter counts by its place in the text, each sum is moved back by the place of its first letter.
        words = np.add.reduceat(letters * self._powers[: len(letters)], starts) * self._inverses[starts]
        words ^= words >> 32
        words *= GOLDEN
        words ^= words >> 32
        return words


def _letters() -> np.ndarray:
    """Return (code points,) uint32: each character in lower case; 0 for those that are part of no word."""
    letters = np.zeros(0x110000, np.uint32)
    for code in range(0x40000):  # beyond lie no letters
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            letters[code] = ord(character.lower()[0])
    for first, last in UNSPACED:
        letters[first : last + 1] |= np.where(letters[first : last + 1] > 0, ALONE, 0).astype(np.uint32)
    return letters


def repeated(read: Callable[[], Iterator[np.ndarray]], documents: int, columns: slice, memory: int) -> np.ndarray:
    """Return (documents,) bool: True where an earlier document has the same key.

    The first document with a key is kept, even if another of its keys marks it. So a document is dropped if any earlier one
    is near it, even one that is itself dropped: of a chain in which each resembles only the one before, the first alone
    stays. Where two unlike documents come first and a third resembles both, both stay; a search for clusters would keep one.

    Args:
        read: gives all keys in document order, in blocks (any number, columns) uint64, every time it is called.
        columns: those of the key; hashes, of which the first is spread evenly over 64 bits.
        memory: bytes to work in, besides the result and one block; up to 1.6 times as many where most keys are the
            same. Keys that do not fit are looked at in several passes over ranges of their first 64 bits.
    """
    width = columns.stop - columns.start
    # A key takes 36 or 44 bytes (one column or two) while keys are sorted; where all are the same, 60 or 84.
    capacity = max(4, memory // (16 * width + 24))
    passes = documents // (capacity - capacity // 4) + 1  # a quarter of the room is for repeats and for chance
    marked = np.zeros(documents, bool)
    for number in range(passes):
        low, end = ((n << 64) // passes for n in (number, number + 1))
        _mark_range(marked, (block[:, columns] for block in read()), low, end - 1, capacity)
    return marked


def _mark_range(marked: np.ndarray, blocks: Iterator[np.ndarray], low: int, high: int, capacity: int) -> None:
    """Mark the repeats among the keys whose first 64 bits are in `low` to `high`."""
    step = min(capacity, 1 << 16)  # small arrays stay in the processor's cache
    dtype = np.min_scalar_type(len(marked))
    held, owners = [], []  # keys in document order, and their documents
    count, limit, start = 0, capacity, 0

    def mark_held() -> None:
        """Mark the repeats among the held keys, and let go of them."""
        keys, documents = np.concatenate(held), np.concatenate(owners)
        held.clear()  # the room is needed for sorting
        owners.clear()
        repeats = _repeats(keys, low, high)
        marked[documents[repeats]] = True
        held.append(keys.compress(~repeats, axis=0))
        owners.append(documents[~repeats])

    for block in blocks:
        for i in range(0, len(block), step):
            keys = block[i : i + step]
            inside = (keys[:, 0] - low <= high - low).nonzero()[0]
            held.append(keys.take(inside, axis=0))
            owners.append((inside + (start + i)).astype(dtype))
            count += len(inside)
            if count > limit:
                mark_held()
                count = len(held[0])
                limit = max(capacity, 2 * count)
        start += len(block)
    if held:
        mark_held()


def _repeats(keys: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return (keys,) bool: True for a row equal to an earlier one; the first column lies in `low` to `high`."""
    count = len(keys)
    # The leading bits of a key and, below them, its row: one sort of plain numbers, which keeps equal keys in their
    # order and is many times faster than a stable argsort.
    bits = count.bit_length()
    order = keys[:, 0] - low
    order <<= 64 - (high - low).bit_length()
    order >>= bits
    order <<= bits
    order |= np.arange(count, dtype=np.uint64)
    order.sort()
    follows = np.zeros(count + 1, bool)  # has the leading bits of the row before
    follows[1:count] = (order[1:] ^ order[:-1]) >> bits == 0
    together = follows[:-1] | follows[1:]
    heads = ~follows[:-1][together]
    rows = (order[together] & ((1 << bits) - 1)).astype(np.intp)
    repeats = np.zeros(count, bool)
    while len(rows):
        group = heads.cumsum() - 1
        equal = (keys.take(rows, axis=0) == keys.take(rows[heads][group], axis=0)).all(axis=1)
        repeats[rows[equal & ~heads]] = True
        # A row may share the leading bits alone with the head of its group; such rows are a group of their own.
        rows, group = rows[~equal], group[~equal]
        heads = np.diff(group, prepend=-1) != 0
    return repeats
