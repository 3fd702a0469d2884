"""Tokenizer of a store: a byte-level BPE or a character tokenizer built from the corpus, or an existing tokenizer.

All are ordinary fast Transformers tokenizers and load with `AutoTokenizer`.
"""

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common import schema
from common.errors import Problems, UserError
from common.limits import setting
from tokenizer.corpus import hub
from tokenizer.encoding.encode import byte_level_alphabet
from tokenizer.encoding.words import END, WordSplitter, blocks

if TYPE_CHECKING:  # importing it takes 0.6 s
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

DEFAULT_VOCAB_SIZE = 32000
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"  # tokens with ids 0 and 1
TRAINED_WORDS = 2_000_000  # number of word occurrences that the trainer gets
COUNTED_BYTES = 4 << 20  # bytes counted at a time
COUNTED_WORDS = 2_000_000  # maximum number of distinct words in memory
# The trainer's time grows with the square of the length of a word: 80,000 letters took 4.2 s, 400,000 took minutes. Up
# to 4 KB, the time per byte is constant. The trainer needs 100 times the memory of the distinct text; only long words
# make that large.
LONGEST_COUNTED_WORD = 1024  # bytes: the trainer gets longer words in pieces
COUNTED_PIECE = re.compile(rb".{1,%d}(?![\x80-\xBF])" % LONGEST_COUNTED_WORD, re.DOTALL)  # ends with a character
COUNTED_PIECE_BYTES = 8_000_000  # total of these pieces, evenly spread
LARGEST_GAP = 1_000_000  # ids that a tokenizer may leave out below its largest
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # class names in Transformers 5 and 4
# Files that only Transformers reads.
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
FILES += ("additional_chat_templates/*.jinja",)
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")  # of which one names the end token


@dataclass
class VocabularyArguments:
    vocab_size: int | None = setting(
        None,
        "Vocabulary size of a BPE trained on the text (default: 32000). Stores, character tokenizers and existing "
        "tokenizers have a fixed size: a flag with another value is an error, one in a YAML file is ignored.",
        minimum=1,
        maximum=1_048_576,
    )
    tokenizer_type: Literal["bpe", "character"] = setting(
        "bpe", "Kind of tokenizer to build from the text: a byte-level BPE, or one token per character."
    )
    tokenizer: str | None = setting(None, "Existing tokenizer: a folder or a Hub id.")
    sample_bytes: int = setting(
        200_000_000, "Bytes of text that a BPE is trained on: an evenly spread sample, or all text if less.", minimum=1
    )
    pad_token: str = setting(PADDING, "Padding token of a BPE trained on the text, or none.")
    special_tokens: list[str] = setting(
        [], "Additional control tokens of a new BPE. In a text, the same characters stay text."
    )


def build(
    arguments: VocabularyArguments,
    existing: "PreTrainedTokenizerBase | SavedTokenizer | None",
    texts: Callable[[], Iterable[str]],
    chat_tokens: Iterable[str] = (),
    must_fit: bool = True,
) -> "PreTrainedTokenizerBase | SavedTokenizer":
    """Return the `existing` tokenizer, which then adds no tokens to a text, or one built from `texts` according to
    `arguments`.
    Raise a `UserError` if its size differs from `vocab_size` and `must_fit` is true, or `vocab_size` is too small."""
    if existing is not None:
        check_ids(existing, arguments.tokenizer)
        tokenizer = existing if not existing.backend_tokenizer.encode("").ids else _without_added_tokens(existing)
    elif arguments.tokenizer_type == "character":
        tokenizer = character_tokenizer(texts())
    else:
        Problems(problems(arguments, chat_tokens)).refuse()
        size = arguments.vocab_size or DEFAULT_VOCAB_SIZE
        special = [*arguments.special_tokens, *chat_tokens]
        return train_bpe(texts(), size, arguments.pad_token, special)
    if must_fit and arguments.vocab_size not in (None, len(tokenizer)):
        name = arguments.tokenizer or "the character tokenizer of this text"
        size = len(tokenizer)
        raise UserError(f"vocab_size is {arguments.vocab_size} but {name} has {size} tokens; set --vocab_size {size}.")
    return tokenizer


def _without_added_tokens(tokenizer: "PreTrainedTokenizerBase | SavedTokenizer") -> "PreTrainedTokenizerFast":
    """Return a tokenizer without the beginning-of-text token, for example, before each text: the training text has
    none, so that a model would get an unknown token."""
    from transformers import PreTrainedTokenizerFast

    rust, template = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), tokenizer.chat_template
    rust.post_processor = None
    return PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=template, **tokenizer.special_tokens_map)


def problems(arguments: VocabularyArguments, chat_tokens: Iterable[str] = ()) -> list[str]:
    """Return the settings that are impossible or would be ignored, one sentence each."""
    if arguments.tokenizer is not None or arguments.tokenizer_type != "bpe":
        remedy = "leave out special_tokens, or tokenizer and tokenizer_type"
        problem = f"special_tokens apply only to a BPE trained on the text; {remedy}."
        return [problem] if arguments.special_tokens else []
    special = _special_tokens(arguments.pad_token, [*arguments.special_tokens, *chat_tokens])
    sentences = [
        f"{token!r} cannot be a special token, because the BPE may create a token of text with the same name; use a "
        f"name that is not a single word, such as <|{token or 'mark'}|>."
        for token in special
        if _may_be_text(token)
    ]
    minimum = 256 + len(special)
    if arguments.vocab_size is not None and arguments.vocab_size < minimum:
        sentences.append(
            f"vocab_size {arguments.vocab_size} is too small for a byte-level BPE: it needs {minimum} (256 bytes and "
            f"{len(special)} special tokens) before the first merge."
        )
    return sentences


def _may_be_text(token: str) -> bool:
    """Return whether `token` can be a BPE's name for a piece of text, in which printable characters represent bytes."""
    byte_of = byte_level_alphabet()
    if not byte_of.keys() >= set(token):
        return False
    text = bytes(map(byte_of.get, token)).decode(errors="replace")
    return len(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)) <= 1


def _special_tokens(pad_token: str, tokens: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([END_OF_TEXT, *([] if pad_token == "none" else [pad_token]), *tokens]))


def train_bpe(
    texts: Iterable[str], vocab_size: int, pad_token: str = PADDING, special_tokens: Iterable[str] = ()
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE (Radford et al. 2019) with GPT-2's word pattern. It is lossless on any Unicode text.
    Its size is `vocab_size`, or less if the text does not have enough pairs to merge. The same text gives the same
    tokenizer on any machine."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = _special_tokens(pad_token, special_tokens)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # without it, unseen bytes would be lost
        show_progress=False,
    )
    from transformers import PreTrainedTokenizerFast

    counts = count_words(texts)
    for least in (0, 1):  # a large vocabulary needs the pairs of rare words, too
        words = _thinned(counts, least)  # each word is a separate text; they are passed in batches of thousands
        bpe.train_from_iterator(iter(lambda words=words: list(itertools.islice(words, 10_000)), []), trainer)
        if bpe.get_vocab_size() == vocab_size or counts.total() < 2 * TRAINED_WORDS:  # none of them was dropped
            break
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=None if pad_token == "none" else pad_token,
        extra_special_tokens=[token for token in special if token not in (END_OF_TEXT, pad_token)],
    )


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """Count the words of GPT-2's pattern. Words that are too long for the trainer are counted in pieces.
    Above COUNTED_WORDS distinct words, words that occurred once are dropped. Above COUNTED_PIECE_BYTES, only every
    second, fourth ... piece is counted."""
    splitter, counts = WordSplitter(), Counter()
    pieces, number_of_pieces, step = [], 0, 1
    for batch in blocks(itertools.chain(map(str.encode, texts), [b""]), COUNTED_BYTES):
        if len(counts) > COUNTED_WORDS:
            counts = Counter({word: number for word, number in counts.items() if number > 1})
        distinct = splitter.words(batch).value_counts()
        for word, number in zip(distinct.field(0).to_pylist(), distinct.field(1).to_pylist(), strict=True):
            if len(word) <= LONGEST_COUNTED_WORD:
                counts[word] += number
                continue
            for piece in COUNTED_PIECE.findall(word):
                if number_of_pieces % step == 0:
                    pieces.append((piece, number))
                number_of_pieces += 1
        while sum(len(piece) for piece, _ in pieces) > COUNTED_PIECE_BYTES:
            pieces, step = pieces[::2], 2 * step
    del counts[END]
    for piece, number in pieces:
        counts[piece] += number * step  # the kept pieces also represent the dropped ones
    return counts


def _thinned(counts: Counter[bytes], least: int) -> Iterator[str]:
    """Yield words as often as they occur, or proportionally less often, at least `least` times, if the trainer needs
    fewer.
    The trainer would need 40 s to count the words of 115 MB. With an eighth of each count it takes 9 s, and each token
    has 0.1% less text on average. With all words of a fifth of the text, each token had 2.6% less."""
    times = max(1, counts.total() // TRAINED_WORDS)
    for word, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield from itertools.repeat(word.decode(), max(least, (number + times // 2) // times))


def character_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per character of `texts`, in code point order, and no other tokens."""
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(itertools.chain.from_iterable(texts)))
    words = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@dataclass
class SavedTokenizer:
    """Tokenizer folder that Transformers 5 wrote, with Transformers' names for what a store needs."""

    folder: Path
    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the tokenizer, or None if it needs Transformers: no local folder, another form, or damaged."""
        with suppress(Exception):  # the Rust library raises no narrower class
            config = schema.read(folder / "tokenizer_config.json")
            is_generic = config["backend"] == "tokenizers" and config["tokenizer_class"] in GENERIC_CLASSES
            special = {name: token for name, token in config.items() if name.endswith("_token") and token}
            is_plain = all(isinstance(token, str) for token in special.values())
            file, template = folder / "tokenizer.json", folder / "chat_template.jinja"
            is_other = any((folder / name).exists() for name in OTHER_FILES) or any(_links_out(folder))
            if is_generic and is_plain and file.is_file() and not is_other:
                source = template.read_text(encoding="utf-8") if template.is_file() else None
                return cls(folder, Tokenizer.from_file(str(file)), special, source)
        return None

    @property
    def eos_token_id(self) -> int | None:
        return self.backend_tokenizer.token_to_id(self.special_tokens_map.get("eos_token", ""))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self.folder / name, folder / name)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def load(name: str | Path) -> "PreTrainedTokenizerBase":
    """Load a fast tokenizer from a folder, a `tokenizer.json` or the Hub. In a file, or a folder that names no end
    token, `<|endoftext|>` ends documents. Raise a `UserError` if there is none, or only a slow one."""
    folder = Path(name)
    if folder.is_file():
        return _from_file(folder)
    if not folder.exists():
        hub.require(str(name), "a tokenizer", "tokenizer.json", "tokenizer_config.json", "vocab.json")
    files = ("tokenizer.json", "vocab.json")  # without both, AutoTokenizer would return an empty one
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        model = folder / "model"
        hint = f" Did you mean {model}?" if (model / files[0]).is_file() else ""
        raise UserError(f"{name} has neither tokenizer.json nor vocab.json, so no tokenizer can be loaded.{hint}")
    if link := next(_links_out(folder), None):
        raise UserError(f"{link} is a link out of the folder, whose content would be copied; replace it by the file.")
    from transformers import AutoTokenizer, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a tokenizer does not depend on its model, which may have code of its own
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
        tokenizer.encode("")  # the first call that fails if a setting has a wrong type
    except Exception as error:  # the Rust library raises no narrower class
        needs_code = "trust_remote_code" in str(error)
        reason = "it needs its own code, which is not executed" if needs_code else hub.shortened(error)
        raise UserError(f"No tokenizer can be loaded from {name}: {reason}.") from error
    finally:
        logging.set_verbosity(verbosity)
    if not tokenizer.is_fast:
        raise UserError(f"{name} is a slow tokenizer; only fast ones (tokenizer.json) are supported.")
    names_no_end = folder.is_dir() and not any((folder / config).exists() for config in CONFIGS)
    if names_no_end and tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.eos_token = END_OF_TEXT
    return tokenizer


def _links_out(folder: Path) -> Iterator[Path]:
    """Return the files of a tokenizer that are links out of its folder, but not into the Hub's cache."""
    files = (path for name in (*FILES, *OTHER_FILES) for path in folder.glob(name) if path.is_file())
    return (path for path in files if leads_out(path, folder))


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a file of a folder is a link out of it, but not into the Hub's cache."""
    home, target = folder.resolve(), path.resolve()
    blobs = next((part.parent / "blobs" for part in home.parents if part.name == "snapshots"), home)
    return not target.is_relative_to(home) and target.parent != blobs


def _from_file(path: Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    try:
        rust = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises no narrower class
        raise UserError(f"{path} is not a tokenizer.json: {hub.shortened(error)}.") from error
    eos = END_OF_TEXT if rust.token_to_id(END_OF_TEXT) is not None else None
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=eos)


def check_ids(tokenizer: "PreTrainedTokenizerBase | SavedTokenizer", name: object) -> None:
    """Raise a `UserError` if a text may have an id that is not below the number of tokens, or another id is far above
    it: tables have an entry for each id."""
    vocabularies = map(tokenizer.backend_tokenizer.get_vocab, (False, True))
    of_text, largest = (max(vocabulary.values(), default=-1) for vocabulary in vocabularies)
    if max(of_text, tokenizer.eos_token_id or 0) >= len(tokenizer) or largest >= len(tokenizer) + LARGEST_GAP:
        raise UserError(f"{name} has {len(tokenizer):,} tokens, but the id {largest:,}; use another tokenizer.")


def save(tokenizer: "PreTrainedTokenizerBase | SavedTokenizer", folder: Path, context: int | None = None) -> None:
    """Write the tokenizer, with the model's context length if given. On a full disk, the Rust library raises its own
    kind of error, see `errors.as_os_error`."""
    if context is not None:
        tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)
