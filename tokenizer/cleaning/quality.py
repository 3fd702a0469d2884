"""Quality filters from Gopher and FineWeb that drop documents without prose."""

# ruff: noqa: RUF001  this file contains look-alike characters on purpose

import re
from collections.abc import Callable
from functools import cached_property
from itertools import filterfalse

import numpy as np

from tokenizer.cleaning.characters import BLANKS, UNSPACED_CHARACTER, UNSPACED_CLASS

# Gopher's range, 3 to 10, is for English. Pages of translated program messages, 20 messages each, have means of 5.6 to
# 9.8 in German, 6.1 to 11.2 in Finnish, 7.9 to 10.3 in Malayalam and 2.7 to 6.6 in Korean. Lists of URLs and hashes and
# tables of digits are outside the range.
MEAN_WORD_LENGTH = (2, 15)
# Gopher, table A1: maximum share of text in the most frequent sequence of n words, and in all repeated sequences.
MOST_IN_TOP_SEQUENCE = {2: 0.20, 3: 0.18, 4: 0.16}
MOST_IN_REPEATED_SEQUENCES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
# In scripts in which each character counts as a word, a sequence of n words has 3 n characters: a word has roughly two
# characters in Chinese and four, with their marks, in Thai.
CHARACTERS_A_WORD = 3

# Matches a character of an unspaced script with the marks around it, or a run of characters without spaces.
UNSPACED_WORD = re.compile(rf"[^\w\s]*+[{UNSPACED_CLASS}][^\w\s]*+|[^\s{UNSPACED_CLASS}]+")
BULLETS = {*"•‣⁃∙▪▫◦●○■□◆◇►▶➢➤·・*+-"}
LETTER = re.compile(r"[^\W\d_]")
ELLIPSES = ("...", "…")
# Unicode's sentence terminals (property STerm), those of Sinhala and Tibetan, ellipses, closing quotes; and any letter
# of Thai and Lao, which end a sentence with a space.
ENDS = {
    *"!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿․‼‽⁇⁈⁉⳹⳺⳻⸮⸼⹓⹔。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫︒︕︖﹒﹖﹗！．？｡",
    *"෴།༎…‥\"'”’»›」』〉》",
    *map(chr, range(0x0E01, 0x0EE0)),
}
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Page:
    """Document in the form that the quality filters use. Expensive views are computed on first use."""

    def __init__(self, text: str):
        self.text = text
        self.lines = [line for line in map(str.strip, text.split("\n")) if line]
        self.paragraphs = [paragraph for paragraph in map(str.strip, text.split("\n\n")) if paragraph]
        if text.isascii() or not UNSPACED_CHARACTER.search(text):
            self.words = self.spaced_words = text.split()
        else:
            self.words = UNSPACED_WORD.findall(text)
            self.spaced_words = list(filterfalse(UNSPACED_CHARACTER.search, self.words))
        self.is_spaced = 2 * len(self.spaced_words) > len(self.words)  # most words are separated by spaces

    @cached_property
    def ends(self) -> np.ndarray:
        """Characters up to the end of each word, without spaces, (words + 1,)."""
        return np.concatenate([[0], np.cumsum(np.fromiter(map(len, self.words), np.int64, len(self.words)))])

    @cached_property
    def numbers(self) -> np.ndarray:
        """Number of each word, the same for equal words, (words,)."""
        number = {word: i for i, word in enumerate(dict.fromkeys(self.words), start=1)}
        return np.fromiter(map(number.__getitem__, self.words), np.uint64, len(self.words))

    def sequences(self, n: int) -> tuple[np.ndarray, int]:
        """Return a number for each sequence of n words, the same for equal sequences, and the words per sequence."""
        length = n if self.is_spaced else n * CHARACTERS_A_WORD
        count = max(0, len(self.words) - length + 1)
        keys = np.zeros(count, np.uint64)
        for i in range(length if count else 0):
            keys = keys * MULTIPLIER + self.numbers[i : i + count]  # rolling hash, modulo 2^64
        return keys, length

    def share_of_top_sequence(self, n: int) -> float:
        """Return the share of characters in the most frequent sequence of n words (of several, in the longest)."""
        keys, length = self.sequences(n)
        _, positions, counts = np.unique(keys, return_index=True, return_counts=True)
        if counts.max(initial=1) == 1:
            return 0.0  # no repetition; in a short text, a single sequence can be a large share
        top = positions[counts == counts.max()]
        return float(counts.max() * (self.ends[top + length] - self.ends[top]).max() / self.ends[-1])

    def share_of_repeated_sequences(self, n: int) -> float:
        """Return the share of characters in sequences of n words that occur earlier, each character counted once."""
        keys, length = self.sequences(n)
        order = np.argsort(keys, kind="stable")
        repeats = order[1:][keys[order[1:]] == keys[order[:-1]]]
        depth = np.zeros(len(self.words) + 1, np.int64)
        depth[repeats] += 1
        depth[repeats + length] -= 1
        is_repeat = np.cumsum(depth)[:-1] > 0
        return float(np.diff(self.ends)[is_repeat].sum() / self.ends[-1])

    @cached_property
    def has_repeated_sequences(self) -> bool:
        """Return whether the shortest repeated sequences exceed the smallest limit.
        Long repeated sequences contain short ones, so this one check decides most documents for all filters."""
        fewest = min(MOST_IN_REPEATED_SEQUENCES)
        return self.share_of_repeated_sequences(fewest) > min(MOST_IN_REPEATED_SEQUENCES.values())


def _share(items: list[str], holds: Callable[[str], object]) -> float:
    return sum(1 for item in items if holds(item)) / len(items)


def _repeated(items: list[str]) -> float:
    """Return the share of items that occur earlier."""
    return (len(items) - len(set(items))) / len(items)


def _in_repeated(items: list[str]) -> float:
    """Return the share of characters in items that occur earlier."""
    characters = sum(map(len, items))
    return (characters - sum(map(len, set(items)))) / characters


def _has_odd_words(page: Page) -> bool:
    shortest, longest = MEAN_WORD_LENGTH
    words = page.spaced_words
    return page.is_spaced and not shortest <= sum(map(len, words)) / len(words) <= longest


def _is_ended(line: str) -> bool:
    """Return whether a line ends a sentence. Direction marks and zero-width spaces after its last character count as
    blanks."""
    return line.rstrip(f"\u061c\u200b\u200e\u200f\u202c\u2069\ufeff{BLANKS}")[-1:] in ENDS


# The first filter that returns true drops the document; slow filters come last. Limits are from Gopher (Rae et al.
# 2021, arXiv:2112.11446, appendix A.1.1 and table A1) or, if marked, from FineWeb (Penedo et al. 2024,
# arXiv:2406.17557, section 3.6).
FILTERS: dict[str, Callable[[Page], bool]] = {
    "quality.short": lambda page: len(page.words) < 50,
    "quality.word_length": _has_odd_words,
    "quality.hash_signs": lambda page: page.text.count("#") / len(page.words) > 0.1,
    "quality.ellipses": lambda page: sum(map(page.text.count, ELLIPSES)) / len(page.words) > 0.1,
    "quality.bullets": lambda page: _share(page.lines, lambda line: line[0] in BULLETS) > 0.9,
    "quality.ellipsis_lines": lambda page: _share(page.lines, lambda line: line.endswith(ELLIPSES)) > 0.3,
    "quality.unended_lines": lambda page: _share(page.lines, _is_ended) < 0.12,  # FineWeb's limit
    "quality.letters": lambda page: _share(page.words, LETTER.search) < 0.8,
    "quality.repeated_paragraphs": lambda page: _repeated(page.paragraphs) > 0.3,
    "quality.in_repeated_paragraphs": lambda page: _in_repeated(page.paragraphs) > 0.2,
    "quality.repeated_lines": lambda page: _repeated(page.lines) > 0.3,
    "quality.in_repeated_lines": lambda page: _in_repeated(page.lines) > 0.1,  # FineWeb's limit; Gopher's is 0.2
    **{
        f"quality.top_{n}_words": lambda page, n=n, limit=limit: page.share_of_top_sequence(n) > limit
        for n, limit in MOST_IN_TOP_SEQUENCE.items()
    },
    **{
        f"quality.repeated_{n}_words": lambda page, n=n, limit=limit: (
            page.has_repeated_sequences and page.share_of_repeated_sequences(n) > limit
        )
        for n, limit in MOST_IN_REPEATED_SEQUENCES.items()
    },
}


def failed_filter(text: str) -> str | None:
    """Return the name of the first filter that drops a document, or None if no filter does."""
    page = Page(text)
    return next((name for name, drops in FILTERS.items() if drops(page)), None)
