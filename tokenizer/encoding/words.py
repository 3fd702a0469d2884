"""Word boundaries of GPT-2's pattern (Radford et al. 2019), found in bytes without regular expressions.

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

A word ends where the class of the bytes changes (letter, number, white space, other), with two exceptions. The last
white space character of a run begins a new word, which includes the following text if the character is a space. Each of
the seven English endings is a separate word. Texts are joined by the byte 0xFF, which UTF-8 never contains; each 0xFF
is a separate word.
"""

import itertools
import string
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

END = b"\xff"
BLOCK_BYTES = 1 << 20
LETTER, NUMBER, OTHER, SPACE, ENDS, UNKNOWN = range(6)  # LETTER, NUMBER and OTHER are visible characters
CLASS_OF_BYTE = {
    **dict.fromkeys(string.ascii_letters.encode(), LETTER),
    **dict.fromkeys(string.digits.encode(), NUMBER),
    **dict.fromkeys(string.whitespace.encode(), SPACE),
    **dict.fromkeys(range(0xC2, 0xF5), UNKNOWN),  # lead bytes, whose class depends on the code point
    0xFF: ENDS,
}
BYTE_CLASSES = bytes(CLASS_OF_BYTE.get(byte, OTHER) for byte in range(256))


def blocks(texts: Iterable[bytes], n_bytes: int) -> Iterator[list[bytes]]:
    """Group texts into blocks of slightly more than `n_bytes`."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size > n_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


class WordSplitter:
    """Splitter with the results of `tokenizers`' ByteLevel, which determines the class of every new code point."""

    def __init__(self):
        self.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.classes = np.full(0x110000, UNKNOWN, dtype=np.uint8)  # classes of all code points

    def words(self, texts: Iterable[bytes]) -> Any:
        """Return all words of all texts as one Arrow array of binaries, with the word 0xFF after each text."""
        import pyarrow as pa  # installed with datasets; training from a store needs neither

        parts = [END.join([*block, b""]) for block in blocks(texts, BLOCK_BYTES)]  # each fits in the CPU cache
        bounds = itertools.accumulate(map(len, parts), initial=0)
        starts = [self.starts(part) + np.int32(start) for part, start in zip(parts, bounds, strict=False)]
        data = b"".join(parts)
        offsets = np.concatenate([*starts, np.array([len(data)], dtype=np.int32)])
        return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])

    def starts(self, data: bytes) -> np.ndarray:
        """Return the first byte of each word of `data` (n bytes, the last one 0xFF), (words,) int32."""
        text = np.frombuffer(data, dtype=np.uint8)  # (n,)
        classes = np.frombuffer(data.translate(BYTE_CLASSES), dtype=np.uint8)  # (n,)
        lead_bytes = np.flatnonzero(classes == UNKNOWN)  # lead bytes of code points above ASCII
        if len(lead_bytes):
            classes = classes.copy()
            self._settle_code_points(text, lead_bytes, classes)
        begins = np.empty(len(text), dtype=bool)
        begins[0] = True
        np.not_equal(classes[1:], classes[:-1], out=begins[1:])
        begins |= classes == ENDS
        last_space = classes == SPACE  # marks the last space of a run before visible text
        last_space[:-1] &= classes[1:] < SPACE
        if len(lead_bytes):  # a space of two or three bytes is marked at its last byte; the word begins at its first
            last_bytes = np.flatnonzero(last_space & (text >= 0x80))
            last_space[last_bytes] = False
            last_space[last_bytes - np.where(text[last_bytes - 1] < 0xC0, 2, 1)] = True
        begins |= last_space
        joins = last_space & (text == 0x20)  # a space joins the word that follows it
        np.greater(begins[1:], joins[:-1], out=begins[1:])
        self._split_english_endings(text, classes, begins)
        return np.flatnonzero(begins).astype(np.int32)

    def _settle_code_points(self, text: np.ndarray, starts: np.ndarray, classes: np.ndarray) -> None:
        """Write the classes of all bytes of the code points that begin at `starts`, (m,), into `classes`."""
        lead = text[starts].astype(np.uint32)
        length = 2 + (lead >= 0xE0).astype(np.uint8) + (lead >= 0xF0)
        points = np.where(length == 2, lead & 0x1F, np.where(length == 3, lead & 0x0F, lead & 0x07))
        for i in (1, 2, 3):
            has = length > i
            points[has] = (points[has] << 6) | (text[starts[has] + i] & 0x3F)
        kinds = self.classes[points]
        if (kinds == UNKNOWN).any():
            for point in np.unique(points[kinds == UNKNOWN]).tolist():
                self.classes[point] = self._probed(chr(point))
            kinds = self.classes[points]
        for i in (0, 1, 2, 3):
            has = length > i
            classes[starts[has] + i] = kinds[has]

    def _probed(self, character: str) -> int:
        for probe, kind in (("a", LETTER), ("1", NUMBER), ("!", OTHER)):
            if len(self.pre_tokenizer.pre_tokenize_str(probe + character)) == 1:
                return kind
        return SPACE

    @staticmethod
    def _split_english_endings(text: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
        """Split off 's 't 'm 'd 're 've 'll as separate words if the apostrophe begins a word."""
        at = np.flatnonzero(text == 0x27)
        at = at[begins[at] & (at + 2 < len(text))]
        if not len(at):
            return
        one, two = text[at + 1], text[at + 2]
        short = np.isin(one, list(b"stmd"))
        pairs = [(one == pair[0]) & (two == pair[1]) for pair in (b"re", b"ve", b"ll")]
        for mask, length in ((short, 2), (np.logical_or.reduce(pairs), 3)):
            begins[at[mask] + 1] = False
            ends = at[mask] + length
            begins[ends[classes[ends] == LETTER]] = True
