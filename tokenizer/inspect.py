"""Show the content of a token store, decode its documents, and verify every hash.

python -m tokenizer.inspect data/my
python -m tokenizer.inspect data/my --split val --document 3
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import sys
from dataclasses import dataclass
from typing import Literal

from common.command_line import FlagParser, run
from common.errors import Problems, UserError, first_of
from common.limits import setting
from common.terminal import printable
from tokenizer.build import report
from tokenizer.store.store import SPLITS, TokenStore


@dataclass
class InspectArguments:
    store: str | None = setting(None, "Folder of the store.", needed=("a store", "python -m tokenizer.inspect data/my"))
    split: Literal["train", "val"] = setting("train", "Split of the document to decode.")
    document: int | None = setting(None, "Number of a document to decode, from 0.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((InspectArguments,), __doc__, positional="store").parse(arguments)
    store = TokenStore(options.store)
    if options.document is not None:
        print(printable(decode(store, options.split, options.document), sys.stdout))
        return
    show(store)
    store.check_hashes()
    problems = Problems()
    for split in SPLITS:
        problems.add_of(store.check_ids, split)
    problems.refuse()
    print("All hashes and indexes are correct, and every token id is in the vocabulary.")


def show(store: TokenStore) -> None:
    metadata = store.metadata
    kind = report.tokenizer_kind(metadata)
    print(f"{store.folder}: {kind} with {metadata.vocab_size:,} tokens, ids stored as {metadata.dtype}\n")
    print(report.render("splits.md.j2", {"metadata": metadata}))
    print(printable(f"source: {first_of(metadata.sources)}\ncommand: {metadata.command}", sys.stdout))
    print(report.documents(metadata))
    if left_out := report.left_out(metadata):
        print(f"left out or changed: {'; '.join(left_out)}; examples in {store.folder / 'report.md'}")


def decode(store: TokenStore, split: str, document: int) -> str:
    """Return the text of one document. Raise a `UserError` if no document has that number."""
    offsets = store.offsets(split)
    if not 0 <= document < len(offsets) - 1:
        raise UserError(f"Document {document} does not exist: {split} has documents 0 to {len(offsets) - 2:,}.")
    ids = store.memory_map(split)[offsets[document] : offsets[document + 1]]
    if len(ids) and ids[-1] == store.metadata.eos_token_id:
        ids = ids[:-1]
    return store.load_tokenizer().decode(ids.tolist())


if __name__ == "__main__":
    run(main)
