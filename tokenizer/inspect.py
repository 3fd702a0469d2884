"""Shows what is in a token store, checks every hash, and decodes documents.

python -m tokenizer.inspect data/my
python -m tokenizer.inspect data/my --split val --document 3
"""

from dataclasses import dataclass, field

import numpy as np

from command_line import FlagParser, UserError, run
from tokenizer.store import SPLITS, Split, TokenStore, file_sha256


@dataclass
class InspectArguments:
    store: str | None = field(default=None, metadata={"help": "Folder of the store; may be given without its flag."})
    split: str = field(default="train", metadata={"help": "Split of the document to decode: train or val."})
    document: int | None = field(default=None, metadata={"help": "Number of a document to decode, from 0."})


def main(arguments: list[str]) -> None:
    parser = FlagParser((InspectArguments,), __doc__.splitlines()[0], positional="store")
    (options,), _ = parser.parse(arguments)
    if options.store is None:
        raise UserError("Name a store: python -m tokenizer.inspect data/my")
    store = TokenStore(options.store)
    if options.document is not None:
        print(decode(store, options.split, options.document))
        return
    metadata = store.metadata
    print(
        f"{store.folder}: {metadata.tokenizer_type} tokenizer of {metadata.vocab_size:,} tokens, ids as {metadata.dtype}"
    )
    for split in SPLITS:
        info: Split = getattr(metadata, split)
        print(
            f"  {split:5}  {info.tokens:>15,} tokens  {info.documents:>10,} documents  {info.bytes:>15,} bytes of text"
        )
    print(f"  made from {', '.join(metadata.sources)} by: {metadata.command}")
    problems = [problem for split in SPLITS for problem in wrong_hashes(store, split)]
    if problems:
        raise UserError("\n".join(problems))
    for split in SPLITS:
        store.check_ids(split)
    print("  every hash is right, every id is in the vocabulary")


def decode(store: TokenStore, split: str, document: int) -> str:
    """The text of one document.

    Raises:
        UserError: no such split or document.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split!r}; a store has train and val.")
    offsets = store.offsets(split)
    if not 0 <= document < len(offsets) - 1:
        raise UserError(f"{split} has documents 0 to {len(offsets) - 2:,}; there is no {document}.")
    ids: np.ndarray = store.memory_map(split)[offsets[document] : offsets[document + 1]]
    return store.load_tokenizer().decode(ids.tolist(), skip_special_tokens=True)


def wrong_hashes(store: TokenStore, split: str) -> list[str]:
    info: Split = getattr(store.metadata, split)
    expected = {f"{split}.bin": info.sha256, f"{split}.offsets.bin": info.offsets_sha256}
    return [
        f"{store.folder / name} was changed: its hash is not the one in metadata.json. Delete the store and make it anew."
        for name, sha256 in expected.items()
        if file_sha256(store.folder / name) != sha256
    ]


if __name__ == "__main__":
    run(main)
