"""Text -> token store.

python -m tokenizer.pretokenize --input my.txt --output data/my
python -m tokenizer.pretokenize --input books/ notes.jsonl --output data/books --vocab_size 16000
python -m tokenizer.pretokenize --input user/dataset --tokenizer openai-community/gpt2 --output data/theirs
"""

import hashlib
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from command_line import FlagParser, UserError, run
from tokenizer import vocabulary
from tokenizer.corpus import Corpus, CorpusArguments, Piece
from tokenizer.store import StoreWriter, TokenStore
from tokenizer.vocabulary import Encoder, VocabularyArguments

BATCH_BYTES = 4 << 20  # enough for the encoder's threads, little enough for memory


@dataclass
class PretokenizeArguments:
    input: list[str] = field(
        default_factory=list, metadata={"help": "Text: files, folders, globs, jsonl, csv, parquet, or Hub dataset ids."}
    )
    output: str | None = field(default=None, metadata={"help": "Folder of the token store to write."})
    seed: int = field(default=1337, metadata={"help": "Decides which documents are held out for validation."})


def pretokenize(
    inputs: list[str],
    folder: Path,
    corpus_arguments: CorpusArguments,
    vocabulary_arguments: VocabularyArguments,
    seed: int,
    say: Callable[[str], None] = print,
) -> TokenStore:
    """Reads `inputs`, makes the tokenizer and writes the store to `folder`; opens it where it is there already.

    Any number of processes may ask for the same store at once: one writes it, the others wait.

    Raises:
        UserError: bad input (see `Corpus` and `vocabulary.build`), or `folder` holds something else.
    """
    check(corpus_arguments)
    corpus = Corpus(inputs, corpus_arguments)
    fingerprint = settings_hash(corpus, vocabulary_arguments, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if TokenStore.is_store(folder):
            store = TokenStore(folder)
            if store.metadata.fingerprint != fingerprint:
                raise UserError(
                    f"{folder} is a store of other text or other settings; name another --output or delete it."
                )
            say(f"{folder} holds these tokens already.")
            return store
        _check_writable(folder)
        return _write(corpus, folder, vocabulary_arguments, seed, fingerprint, say)


def settings_hash(corpus: Corpus, vocabulary_arguments: VocabularyArguments, seed: int) -> str:
    """Changes whenever the tokens might."""
    settings = [asdict(corpus.arguments), asdict(vocabulary_arguments), seed]
    return hashlib.sha256(f"{corpus.fingerprint()} {settings}".encode()).hexdigest()


def check(arguments: CorpusArguments) -> None:
    if not 0 < arguments.validation_fraction < 1:
        raise UserError(f"validation_fraction is {arguments.validation_fraction}; it must be above 0 and below 1.")


def _write(
    corpus: Corpus,
    folder: Path,
    vocabulary_arguments: VocabularyArguments,
    seed: int,
    fingerprint: str,
    say: Callable[[str], None],
) -> TokenStore:
    say(f"Reading {', '.join(corpus.inputs)} ({len(corpus.files):,} files, {corpus.size / 1e6:.1f} MB) ...")
    tokenizer = vocabulary.build(vocabulary_arguments, corpus)
    _say_vocabulary(vocabulary_arguments, len(tokenizer), say)
    # A crash leaves this folder, never one that looks finished.
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    writer = StoreWriter(unfinished, tokenizer)
    _encode(corpus, writer, vocabulary.encoder(tokenizer), corpus.arguments.validation_fraction, seed)
    command = shlex.join(["python", *sys.orig_argv[1:]])
    writer.finish(corpus.arguments.validation_fraction, corpus.inputs, fingerprint, command)
    if folder.exists():
        folder.rmdir()
    unfinished.rename(folder)
    store = TokenStore(folder)
    train, val = store.metadata.train, store.metadata.val
    say(
        f"{corpus.summary()} -> {train.tokens:,} tokens to train on and {val.tokens:,} to validate with "
        f"({(train.bytes + val.bytes) / (train.tokens + val.tokens):.2f} bytes a token) in {folder}"
    )
    return store


def _say_vocabulary(arguments: VocabularyArguments, size: int, say: Callable[[str], None]) -> None:
    if arguments.tokenizer is not None:
        say(f"Tokenizer: {arguments.tokenizer}, {size:,} tokens.")
        return
    wanted = arguments.vocab_size or vocabulary.DEFAULT_VOCAB_SIZE
    short = f" (of {wanted:,} asked for: the text holds no more pairs to merge)" if size < wanted else ""
    kind = {"bpe": f"byte-level BPE, {size:,} tokens{short}", "character": f"{size:,} characters"}
    say(f"Tokenizer: {kind[arguments.tokenizer_type]}.")


def _encode(corpus: Corpus, writer: StoreWriter, encode: Encoder, validation_fraction: float, seed: int) -> None:
    batch: list[tuple[str, Piece]] = []
    batch_size = 0
    split = "train"

    def flush() -> None:
        for (to_split, piece), ids in zip(batch, encode([piece.text for _, piece in batch]), strict=True):
            writer.add(to_split, ids, len(piece.text.encode()), piece.ends_document)
        batch.clear()

    for piece in corpus.pieces():
        if piece.starts_document:
            split = split_of(piece.text, validation_fraction, seed)
        batch.append((split, piece))
        batch_size += len(piece.text)
        if batch_size >= BATCH_BYTES:
            flush()
            batch_size = 0
    flush()


def split_of(text: str, validation_fraction: float, seed: int) -> str:
    """By the document's own text (the first piece of it), so that copies of a document never stand in both splits."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(8, "little", signed=True)).digest()
    return "val" if int.from_bytes(digest, "little") < validation_fraction * 2**64 else "train"


def _check_writable(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name another --output.")


def main(arguments: list[str]) -> None:
    parser = FlagParser((PretokenizeArguments, CorpusArguments, VocabularyArguments), __doc__.splitlines()[0])
    (door, corpus_arguments, vocabulary_arguments), _ = parser.parse(arguments)
    missing = [f"--{name}" for name in ("input", "output") if not getattr(door, name)]
    if missing:
        raise UserError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed. See --help.")
    pretokenize(door.input, Path(door.output), corpus_arguments, vocabulary_arguments, door.seed)


if __name__ == "__main__":
    run(main)
