"""Encoding of text to token ids with the fastest exact method for each kind of tokenizer.

Imports nothing large, so that worker processes start fast.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.errors import UserError
from tokenizer.encoding.words import END, WordSplitter, blocks

NO_TOKEN = -1  # no token follows the text
TEXT_BYTES = 1024  # of words that are encoded together: the fastest of 256 to 16,000
REMEMBERED_WORDS, REMEMBERED_IDS = 500_000, 4_000_000  # words and ids in memory, at most about 100 MB
PLAIN = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
UNKNOWN = 0xFFFFFFFF
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte token


# An encoder takes texts (UTF-8), the id that follows each text, or NO_TOKEN, and whether each text begins a document
# (by default, all do). Returns the ids of all texts in one array, (n,) of the store's dtype, and the number of ids of
# each text including the id that follows, (texts,) int64.
Encoder = Callable[..., tuple[np.ndarray, np.ndarray]]


def load_rust(file: Path) -> Tokenizer:
    """Load a `tokenizer.json` to encode plain text, in which control tokens stay text."""
    rust = Tokenizer.from_file(str(file))
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()
    return rust


@cache
def within_text(rust: Tokenizer) -> Tokenizer:
    """Return the tokenizer for text that does not begin a document: Llama's puts a space only before the first text."""
    content = rust.to_str()
    if (changed := content.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')) == content:
        return rust
    other = Tokenizer.from_str(changed)
    other.encode_special_tokens = rust.encode_special_tokens
    return other


def encoder(rust: Tokenizer, dtype: np.dtype) -> Encoder:
    if is_character(rust):
        return CharacterEncoder(rust, dtype)
    if has_gpt2_words(rust) and is_plain(rust) and has_separate_words(rust):
        return WordEncoder(rust, dtype)
    return RustEncoder(rust, dtype)


def byte_level_alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to bytes. Printable Latin-1 maps to itself, U+0100 and up to the other bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def is_plain(rust: Tokenizer) -> bool:
    """Return whether the model is a BPE whose vocabulary has every byte and whose tokens depend on merges alone."""
    if not isinstance(rust.model, models.BPE):
        return False
    plain = all(getattr(rust.model, name) in (value, "" if value is None else value) for name, value in PLAIN.items())
    return plain and has_all_bytes(rust)


def has_all_bytes(rust: Tokenizer) -> bool:
    return all(token_id is not None for token_id in map(rust.model.token_to_id, byte_level_alphabet()))


def has_separate_words(rust: Tokenizer) -> bool:
    """Return whether a BPE uses each token only after the last merge that produces it, and never merges the byte 0xFF,
    which UTF-8 does not contain. Training ensures both."""
    merges = json.loads(rust.to_str())["model"]["merges"]
    ranks = {"".join(merge): rank for rank, merge in enumerate(merges)}
    is_ordered = all(ranks.get(token, -1) < rank for rank, merge in enumerate(merges) for token in merge)
    return is_ordered and not any(END.decode("latin-1") in token for token in ranks)


def is_character(rust: Tokenizer) -> bool:
    """Return whether every token except special ones is one character, and unknown characters are errors."""
    if not isinstance(rust.model, models.WordLevel) or rust.normalizer is not None or rust.pre_tokenizer is None:
        return False
    special = {token.content for token in rust.get_added_tokens_decoder().values() if token.special}
    tokens, is_split = rust.get_vocab(), len(rust.pre_tokenizer.pre_tokenize_str("a \n")) == 3
    return is_split and rust.model.unk_token not in tokens and all(len(it) == 1 or it in special for it in tokens)


def has_gpt2_words(rust: Tokenizer) -> bool:
    """Return whether the tokenizer encodes text word by word with GPT-2's pattern."""
    words, added_tokens = rust.pre_tokenizer, rust.get_added_tokens_decoder().values()
    pattern = isinstance(words, pre_tokenizers.ByteLevel) and words.use_regex and not words.add_prefix_space
    return pattern and rust.normalizer is None and all(token.special for token in added_tokens)


class WordEncoder:
    """Encoder for a BPE with GPT-2's words (Radford et al. 2019): `tokenizers` encodes each distinct word once.
    The ids are those of `encode_batch_fast`, an order of magnitude faster: few of them pass through Python objects."""

    def __init__(self, rust: Tokenizer, dtype: np.dtype):
        self.dtype = dtype
        # Without a pattern: it receives words that END separates, which never merges.
        self.words = Tokenizer(rust.model)
        self.splitter = WordSplitter()
        self.names = {byte: character for character, byte in byte_level_alphabet().items()}
        self.end = rust.model.token_to_id(self.names[END[0]])
        self.known = {END: b""}  # ids of each word
        self.size = 0  # number of these ids

    def __call__(
        self, texts: list[bytes], followed_by: list[int], starts: Sequence[bool] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        import pyarrow as pa  # training from a store does not need it

        words = self.splitter.words(texts).dictionary_encode()
        distinct = words.dictionary.to_pylist()
        ids_of_distinct = pa.array(self._ids_of(distinct), pa.binary())
        ids = ids_of_distinct.take(words.indices)  # (words,) binaries; four arrays of numpy take twice the time
        indices = np.frombuffer(words.indices.buffers()[1], dtype=np.int32, count=len(words))
        ends = np.flatnonzero(indices == distinct.index(END))  # (texts,) positions of the words 0xFF
        until = np.frombuffer(ids.buffers()[1], dtype=np.int32)[ends + 1] // self.dtype.itemsize  # (texts,) in `ids`
        ids = np.frombuffer(ids.buffers()[2], dtype=self.dtype)
        return _with_followers(ids, np.diff(until, prepend=0), followed_by)

    def _ids_of(self, distinct: list[bytes]) -> list[bytes]:
        """Return the ids of each word, after encoding the new ones."""
        if len(self.known) > REMEMBERED_WORDS or self.size > REMEMBERED_IDS:
            self.known, self.size = {END: b""}, 0
        known = list(map(self.known.get, distinct))
        new = [word for word, ids in zip(distinct, known, strict=True) if ids is None]
        encoded = self._encode(new)
        self.known |= zip(new, encoded, strict=True)
        self.size += sum(map(len, encoded)) // self.dtype.itemsize
        encoded = iter(encoded)
        return [next(encoded) if ids is None else ids for ids in known]

    def _encode(self, words: list[bytes]) -> list[bytes]:
        """Encode words. Some kilobytes of them become one `Encoding`: one per word would double the time."""
        texts = [END.join([*block, b""]).decode("latin-1").translate(self.names) for block in blocks(words, TEXT_BYTES)]
        encodings = self.words.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.concatenate([np.zeros(0, self.dtype), *(np.array(encoding.ids, self.dtype) for encoding in encodings)])
        data, size = ids.tobytes(), ids.itemsize
        bounds = [0, *((np.flatnonzero(ids == self.end) + 1) * size).tolist()]  # each word ends with END
        return [data[start : stop - size] for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class RustEncoder:
    """Encoder that uses the library `tokenizers`, for all other tokenizers."""

    rust: Tokenizer
    dtype: np.dtype

    def __call__(
        self, texts: list[bytes], followed_by: list[int], starts: Sequence[bool] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts. Raise a `UserError` for unknown text if the tokenizer has no token for it."""
        try:
            strings, starts = [text.decode() for text in texts], starts or [True] * len(texts)
            encodings = [None] * len(texts)
            for rust, is_start in ((self.rust, True), (within_text(self.rust), False)):
                places = [i for i, start in enumerate(starts) if start == is_start]
                part = rust.encode_batch_fast([strings[i] for i in places], add_special_tokens=False)
                for i, encoding in zip(places, part, strict=True):
                    encodings[i] = encoding
        except Exception as error:  # the Rust library raises no narrower class
            raise UserError(f"The tokenizer cannot encode this text ({error}); use another tokenizer.") from error
        arrays = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
        return _with_followers(np.concatenate(arrays), np.array([*map(len, arrays)]), followed_by)


class CharacterEncoder:
    """Encoder with one id per character, from a table."""

    def __init__(self, rust: Tokenizer, dtype: np.dtype):
        self.dtype = dtype
        self.table = np.full(0x110000, UNKNOWN, dtype=np.uint32)  # code point -> id
        characters = {token: i for token, i in rust.get_vocab().items() if len(token) == 1}
        self.table[[ord(character) for character in characters]] = [*characters.values()]
        self.size = len(characters)

    def __call__(
        self, texts: list[bytes], followed_by: list[int], starts: Sequence[bool] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts. Raise a `UserError` for a character that the tokenizer does not know."""
        strings = [text.decode() for text in texts]
        points = np.frombuffer("".join(strings).encode("utf-32-le"), dtype="<u4")
        ids = self.table[points]
        if (ids == UNKNOWN).any():
            character = chr(points[ids == UNKNOWN][0])
            raise UserError(
                f"The character {character!r} (U+{ord(character):04X}) is not among the {self.size} that this "
                f"character tokenizer knows; remove it, or build the tokenizer from text that contains it."
            )
        return _with_followers(ids.astype(self.dtype), np.array([*map(len, strings)]), followed_by)


def _with_followers(ids: np.ndarray, counts: np.ndarray, followed_by: list[int]) -> tuple[np.ndarray, np.ndarray]:
    lengths, follower = counts.astype(np.int64), np.array(followed_by, dtype=np.int64)
    follows = follower != NO_TOKEN
    return np.insert(ids, np.cumsum(lengths)[follows], follower[follows].astype(ids.dtype)), lengths + follows


def token_bytes(rust: Tokenizer) -> list[bytes]:
    """Return the text of each id in UTF-8. It is empty for special tokens and the unknown token."""
    added_tokens, byte_of = rust.get_added_tokens_decoder(), byte_level_alphabet()
    byte_level = isinstance(rust.decoder, decoders.ByteLevel)
    unknown, tokens = getattr(rust.model, "unk_token", None), {i: token for token, i in rust.get_vocab().items()}

    def of(i: int) -> bytes:
        token = tokens.get(i)
        if token is None or token == unknown or (i in added_tokens and added_tokens[i].special):
            return b""
        if i in added_tokens:
            return token.encode()
        if byte_level and all(map(byte_of.__contains__, token)):
            return bytes(map(byte_of.get, token))
        # Decode the id twice and use the second text, because many decoders strip the space at the beginning.
        single, double = rust.decode([i], skip_special_tokens=False), rust.decode([i, i], skip_special_tokens=False)
        fallback = FALLBACK.fullmatch(token)
        return bytes.fromhex(fallback[1]) if fallback and single != token else double[len(single) :].encode()

    return [of(i) for i in range(max(tokens) + 1)]


def text_lengths(rust: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text of each id, (vocab_size,) int64, or None if the tokenizer cannot lose text.
    A BPE with a token for every byte cannot, nor can a character tokenizer, which refuses unknown characters."""
    if is_character(rust) or (isinstance(rust.decoder, decoders.ByteLevel) and has_all_bytes(rust)):
        return None
    return np.array([len(text) for text in token_bytes(rust)], dtype=np.int64)


class LossCounter:
    """Counter of the bytes of text that a tokenizer has no tokens for."""

    def __init__(self, rust: Tokenizer):
        self.lengths, self.normalizer = text_lengths(rust), rust.normalizer

    def lost_bytes(self, texts: list[bytes], ids: np.ndarray) -> int:
        """Return the bytes of texts that their ids do not contain."""
        if self.lengths is None:
            return 0
        n_bytes, size = int(self.lengths[ids].sum()), sum(map(len, texts))
        if n_bytes < size and self.normalizer is not None:  # normalizing a second time takes long
            size = min(size, self._normalized_size(texts))
        return max(0, size - n_bytes)

    def _normalized_size(self, texts: list[bytes]) -> int:
        """Return the bytes of texts as the tokenizer normalizes them, such as `,` for a wide comma of three bytes, with
        the characters that it deletes, except blanks and accents."""
        normalize, size = self.normalizer.normalize_str, 0
        for text in map(bytes.decode, texts):
            size += len(normalize(text).replace("▁", " ").encode())
            deleted = (c for c in {*text} if not (c.isspace() or unicodedata.combining(c) or normalize(c)))
            size += sum(len(c.encode()) * text.count(c) for c in deleted)
        return size
