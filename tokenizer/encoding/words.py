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
        import pyarrow as pa  # training from a store does not need it

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
        above_ascii = np.flatnonzero((text >= 0x80) & (text < 0xFF))  # bytes of characters above ASCII
        if len(above_ascii):
            classes = classes.copy()
            classes[above_ascii] = self._classes_of(text[above_ascii].tobytes().decode())
        begins = np.empty(len(text), dtype=bool)
        begins[0] = True
        np.not_equal(classes[1:], classes[:-1], out=begins[1:])
        begins |= classes == ENDS
        last_space = classes == SPACE  # marks the last space of a run before visible text
        last_space[:-1] &= classes[1:] < SPACE
        if len(above_ascii):  # a space of two or three bytes is marked at its last byte; the word begins at its first
            last_bytes = np.flatnonzero(last_space & (text >= 0x80))
            last_space[last_bytes] = False
            last_space[last_bytes - np.where(text[last_bytes - 1] < 0xC0, 2, 1)] = True
        begins |= last_space
        joins = last_space & (text == 0x20)  # a space joins the word that follows it
        np.greater(begins[1:], joins[:-1], out=begins[1:])
        self._split_english_endings(text, classes, begins)
        return np.flatnonzero(begins).astype(np.int32)

    def _classes_of(self, characters: str) -> np.ndarray:
        """Return the classes of all bytes of characters above ASCII, (bytes,) uint8."""
        points = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")  # (characters,)
        for point in np.unique(points[self.classes[points] == UNKNOWN]).tolist():
            self.classes[point] = self._probed(chr(point))
        return np.repeat(self.classes[points], 2 + (points >= 0x800) + (points >= 0x10000))

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
