"""The tokenizer of a store: a byte-level BPE or a character tokenizer made from the corpus, or an existing one.

Whatever it is, it is an ordinary fast Transformers tokenizer and loads with `AutoTokenizer`.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from command_line import UserError
from tokenizer.corpus import Corpus

DEFAULT_VOCAB_SIZE = 32000
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
SMALLEST_BPE = 2 + 256  # the special tokens and one token a byte
TRAINING_BYTES = 200_000_000  # more text hardly helps: a fifth of 120 MB cost 0.8% in compression

# Texts in, token ids out, one array a text.
Encoder = Callable[[list[str]], list[np.ndarray]]


@dataclass
class VocabularyArguments:
    vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens. From text: what the BPE is trained to (32000). Of a store: must be its own."
        },
    )
    tokenizer_type: Literal["bpe", "character"] = field(
        default="bpe", metadata={"help": "What to make from text: a byte-level BPE, or one token a character."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Use this tokenizer (a folder or a Hub id) instead of making one."}
    )


def build(arguments: VocabularyArguments, corpus: Corpus) -> PreTrainedTokenizerBase:
    """The tokenizer that `arguments` ask for.

    Raises:
        UserError: a vocabulary too small for any byte, of another size than asked for, or a tokenizer that is not there.
    """
    if arguments.tokenizer is not None:
        tokenizer = load(arguments.tokenizer)
    elif arguments.tokenizer_type == "character":
        tokenizer = character_tokenizer(piece.text for piece in corpus.pieces())
    else:
        size = DEFAULT_VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
        return train_bpe(_sample(corpus), size)  # may end smaller, said aloud
    if arguments.vocab_size not in (None, len(tokenizer)):
        of_what = arguments.tokenizer or f"the characters of {', '.join(corpus.inputs)}"
        raise UserError(
            f"vocab_size is {arguments.vocab_size} but {of_what} make {len(tokenizer)} tokens; "
            f"set --vocab_size {len(tokenizer)}."
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Radford et al. 2019) with GPT-2's word pattern; lossless on any Unicode text.

    Its size is `vocab_size`, or less where the text does not hold that many pairs worth merging.
    """
    if vocab_size < SMALLEST_BPE:
        raise UserError(
            f"vocab_size {vocab_size} is too small for a byte-level BPE: it needs {SMALLEST_BPE} "
            f"(256 bytes and 2 special tokens) before the first merge."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # without it, unseen bytes would be lost
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING
    )


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each character that occurs, in code point order, and nothing else."""
    characters = set()
    for text in texts:
        characters.update(text)
    words = Tokenizer(models.WordLevel({character: i for i, character in enumerate(sorted(characters))}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def load(name: str | Path) -> PreTrainedTokenizerBase:
    """A fast tokenizer from a folder or the Hub.

    Raises:
        UserError: there is none, or only a slow one.
    """
    folder = Path(name)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():  # AutoTokenizer would make up an empty one
        raise UserError(f"{name} holds no tokenizer.json, so there is no fast tokenizer to load.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # the Rust library raises nothing narrower
        raise UserError(f"No tokenizer can be loaded from {name}: {' '.join(str(error).split())[:200]}.") from error
    if not tokenizer.is_fast:
        raise UserError(f"{name} is a slow tokenizer; only fast ones (tokenizer.json) are supported.")
    return tokenizer


def is_character(tokenizer: PreTrainedTokenizerBase) -> bool:
    words = isinstance(tokenizer.backend_tokenizer.model, models.WordLevel)
    return words and all(len(token) == 1 for token in tokenizer.get_vocab())


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The fastest exact way from text to ids for this tokenizer. Text that contains `<|endoftext|>` stays text.

    Raises (when called):
        UserError: a character that a character tokenizer does not know.
    """
    return _character_encoder(tokenizer) if is_character(tokenizer) else _batch_encoder(tokenizer)


def _batch_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()

    def encode(texts: list[str]) -> list[np.ndarray]:
        encodings = rust.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode


def _character_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    unknown = np.uint32(0xFFFFFFFF)
    table = np.full(0x110000, unknown, dtype=np.uint32)  # code point -> id
    for character, token_id in tokenizer.get_vocab().items():
        table[ord(character)] = token_id

    def encode(texts: list[str]) -> list[np.ndarray]:
        encoded = []
        for text in texts:
            points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
            ids = table[points]
            if (ids == unknown).any():
                character = chr(points[ids == unknown][0])
                raise UserError(
                    f"The character {character!r} (U+{ord(character):04X}) is not among the {len(tokenizer)} that this "
                    f"character tokenizer knows; leave it out, or make the tokenizer from text that has it."
                )
            encoded.append(ids)
        return encoded

    return encode


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """What each id stands for in UTF-8; special tokens stand for nothing."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special, added = set(tokenizer.all_special_tokens), set(tokenizer.get_added_vocab())
    if isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        to_byte = _byte_level_alphabet()
        return [
            b"" if token in special else token.encode() if token in added else bytes(to_byte[c] for c in token)
            for token in tokens
        ]
    return [b"" if token in special else tokenizer.decode([i]).encode() for i, token in enumerate(tokens)]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def sha256(folder: Path) -> str:
    """Identity of a saved tokenizer: the hash of its `tokenizer.json`."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def save(tokenizer: PreTrainedTokenizerBase, folder: Path, context: int | None = None) -> None:
    """Writes the tokenizer, telling it the model's context length where there is a model."""
    if context is not None:
        tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)


def _sample(corpus: Corpus) -> Iterable[str]:
    """All of the text, or an even sample of its pieces where there is more than a BPE needs."""
    stride = max(1, -(-corpus.size // TRAINING_BYTES))
    seen = 0
    for position, piece in enumerate(corpus.pieces()):
        if position % stride == 0:
            seen += len(piece.text)
            yield piece.text
        if seen > 2 * TRAINING_BYTES:  # a Hub stream, whose size is not known before
            return
