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

import numpy as np
from filelock import FileLock

from command_line import FlagParser, UserError, run
from tokenizer import vocabulary
from tokenizer.corpus import TOLERATED_SHARE, Corpus, CorpusArguments, Piece
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
    folder = folder if folder.name else folder.absolute()
    corpus = Corpus(inputs, corpus_arguments)
    corpus.leave_out(folder)
    fingerprint = settings_hash(corpus, vocabulary_arguments, seed)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock")).acquire()
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); name another --output.") from error
    with lock:
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
    name = vocabulary_arguments.tokenizer
    theirs = vocabulary.load(name).backend_tokenizer.to_str() if name is not None else None
    settings = [asdict(corpus.arguments), asdict(vocabulary_arguments), theirs, seed]
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
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with StoreWriter(unfinished, tokenizer) as writer:
        lost = _encode(corpus, writer, vocabulary.encoder(tokenizer), corpus.arguments.validation_fraction, seed)
        if lost > TOLERATED_SHARE * corpus.counts["bytes"]:
            raise UserError(
                f"{vocabulary_arguments.tokenizer} cannot express this text: {lost:,} of {corpus.counts['bytes']:,} bytes "
                f"would be lost; use another tokenizer."
            )
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


def _encode(corpus: Corpus, writer: StoreWriter, encode: Encoder, validation_fraction: float, seed: int) -> int:
    """Writes all documents. Returns how many bytes of the text its tokens do not stand for."""
    batch: list[tuple[str, Piece]] = []
    batch_size = 0
    split = "train"
    lengths = np.array([len(piece) for piece in vocabulary.token_bytes(writer.tokenizer)])
    lost = 0

    def flush() -> None:
        nonlocal lost
        for (to_split, piece), ids in zip(batch, encode([piece.text for _, piece in batch]), strict=True):
            n_bytes = len(piece.text.encode())
            writer.add(to_split, ids, n_bytes, piece.ends_document)
            lost += max(0, n_bytes - int(lengths[ids].sum()))
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
    return lost


def split_of(text: str, validation_fraction: float, seed: int) -> str:
    """By the document's own text (the first piece of it), so that copies of a document never stand in both splits."""
    digest = hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest()
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
    pretokenize(door.input, Path(door.output).expanduser(), corpus_arguments, vocabulary_arguments, door.seed)


if __name__ == "__main__":
    run(main)
