"""Report of a token store: `report.md` and the command's last line list text that was read, changed and left out."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from common.atomic import write_atomic
from common.errors import counted, first_of
from tokenizer.corpus.units import LEFT_OUT
from tokenizer.encoding import encode
from tokenizer.store.store import Metadata, TokenStore, dtype_of, finish


def summary(store: TokenStore, is_cache: bool) -> str:
    """Return the last line about the text. A run prints the size of its cached store itself."""
    metadata = store.metadata
    train, val = metadata.train, metadata.val
    note = "; ".join(left_out(metadata, names=3))
    source = f" from {', '.join(metadata.validation_splits)}" if metadata.validation_splits else ""
    note = f" (left out or changed: {note})" if note else ""
    if is_cache:
        return f"{documents(metadata)}{note}"
    bytes_per_token = (train.bytes + val.bytes) / (train.tokens + val.tokens)
    return (
        f"{documents(metadata)}, {metadata.counts['bytes'] / 1e6:,.1f} MB read{note} -> {train.tokens:,} tokens for "
        f"training and {val.tokens:,} for validation{source} ({bytes_per_token:.2f} bytes per token) in {store.folder}"
    )


def documents(metadata: Metadata) -> str:
    """Return the number of documents found and in the store, as words. `left_out` explains the difference."""
    number = metadata.train.documents + metadata.val.documents
    if not metadata.counts:  # a store of format 1 has no counts
        return f"{counted(number, 'document')} in the store"
    total = sum(metadata.counts[name] for name in ("documents", "blank", "empty_records"))
    return f"{counted(total, 'document')} found, {number:,} in the store"


def describe(
    folder: Path, rust: Tokenizer, splits: dict[str, tuple[int, int, int]], inputs: list[list], **about: Any
) -> None:
    """Write inputs, metadata and `report.md` of a store with its tokens, indexes and tokenizer (see `store.finish`)."""
    write_atomic(folder / "inputs.json", json.dumps(inputs))
    finish(
        folder,
        splits,
        dtype=dtype_of(rust.get_vocab_size()),
        vocab_size=rust.get_vocab_size(),
        tokenizer_type="character" if encode.is_character(rust) else type(rust.model).__name__.lower(),
        command=shlex.join(["python", *sys.orig_argv[1:]]),
        **about,
    )
    write_atomic(folder / "report.md", render("report.md.j2", {"metadata": TokenStore(folder).metadata}))


def render(template: str, data: dict[str, Any]) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    layout = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **layout)
    environment.filters |= {"as": format, "counted": counted, "first_of": first_of}
    environment.filters |= {"tokenizer_kind": tokenizer_kind, "documents": documents, "left_out": left_out}
    return environment.get_template(template).render(data)


def tokenizer_kind(metadata: Metadata) -> str:
    return f"{'BPE' if metadata.tokenizer_type == 'bpe' else metadata.tokenizer_type} tokenizer"


def left_out(metadata: Metadata, names: int = 0, with_places: bool = False) -> list[str]:
    """Return left-out or changed text, one item per line. Each names up to `names` files, and the places in them."""
    counts, lines = metadata.counts, []
    for name, words in LEFT_OUT.items():
        if counts.get(name):
            path, place = counts["first"].get(name, ("", {}))
            files = [path + words * with_places for path, words in place.get("files", {path: ""}).items()]
            listing = ", ".join(files[:names]) + " ..." * (len(files) > names)
            lines.append(counted(counts[name], *words) + (f" ({listing})" if names and path else ""))
    drops = {rule: outcome.documents for rule, outcome in metadata.cleaning.items() if outcome.dropped}
    lines += [f"{counted(number, 'document')} dropped by {rule}" for rule, number in drops.items()]
    if repeats := metadata.repeated_documents:
        lines.append(counted(repeats, "document that repeats an earlier one", "documents that repeat an earlier one"))
    if counts:  # a store of format 1 has no counts
        unique = counts["documents"] - sum(drops.values()) - repeats
        surplus = metadata.train.documents + metadata.val.documents - unique
        if surplus and metadata.settings.get("weights"):
            change = "more" if surplus > 0 else "fewer"
            lines.append(f"{counted(abs(surplus), 'document')} {change} after --weights and the validation split")
        elif surplus:
            lines.append(f"{counted(surplus, 'document')} split in two, with the end held out for validation")
    return lines
