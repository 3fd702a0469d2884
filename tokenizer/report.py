"""What became of the text: `report.md` in a store, and the line at the end."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HUB_CACHE
from tokenizers import Tokenizer

from atomic import write_atomic
from errors import counted
from tokenizer import encode
from tokenizer.corpus import LEFT_OUT, LINK
from tokenizer.store import SPLITS, Metadata, TokenStore

COUNTED_TOKENS = 1 << 22  # evenly spread, for the most frequent ones
COMPARED_TOKENS = 1 << 18  # with GPT-2's
SHOWN = 12
GPT2 = ("openai-community/gpt2", "gpt2")  # both of its names on the Hub


def summary(store: TokenStore) -> str:
    metadata = store.metadata
    train, val = metadata.train, metadata.val
    noted = "; ".join(left_out(metadata))
    return (
        f"{documents(metadata)}, of {metadata.counts['bytes'] / 1e6:,.1f} MB read"
        f"{f' (left out or changed: {noted})' if noted else ''} -> {train.tokens:,} tokens to train on and {val.tokens:,} to "
        f"validate with ({(train.bytes + val.bytes) / (train.tokens + val.tokens):.2f} bytes a token) in {store.folder}"
    )


def documents(metadata: Metadata) -> str:
    """Return how many documents were found, and how many are in the store: their difference is among `left_out`."""
    kept = metadata.train.documents + metadata.val.documents
    if not metadata.counts:  # a store of format 1
        return f"{counted(kept, 'document')} in the store"
    found = sum(metadata.counts[name] for name in ("documents", "blank", "empty_records"))
    return f"{counted(found, 'document')} found, {kept:,} in the store"


def write(store: TokenStore, rust: Tokenizer) -> None:
    metadata = store.metadata
    read = f"{documents(metadata)}; {metadata.counts['bytes']:,} bytes of text were read."
    left_out = [f"- {line}{place}" for line, place in _left_out(metadata)]
    sections = [
        f"# Tokens of {', '.join(metadata.sources)}",
        f"A {tokenizer_kind(metadata)} of {metadata.vocab_size:,} tokens, ids as {metadata.dtype}. Made by",
        f"    {metadata.command}",
        table(metadata),
        f"## What was read\n\n{read}" + (" Left out or changed:\n\n" + "\n".join(left_out) if left_out else ""),
        *_cleaning(metadata),
        f"## Tokens\n\n{_tokens(store, rust)}",
    ]
    write_atomic(store.folder / "report.md", "\n\n".join(sections) + "\n")


def tokenizer_kind(metadata: Metadata) -> str:
    return f"{'BPE' if metadata.tokenizer_type == 'bpe' else metadata.tokenizer_type} tokenizer"


def table(metadata: Metadata) -> str:
    rows = ["| split | tokens | documents | bytes of text | bytes a token |", "|---|--:|--:|--:|--:|"]
    for split in SPLITS:
        info = getattr(metadata, split)
        per_token = info.bytes / max(1, info.tokens)
        rows.append(f"| {split} | {info.tokens:,} | {info.documents:,} | {info.bytes:,} | {per_token:.3f} |")
    return "\n".join(rows)


def left_out(metadata: Metadata) -> list[str]:
    """Return what was left out or changed, one thing a line."""
    return [line for line, _ in _left_out(metadata)]


def _left_out(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """A line, and where the first of it stands."""
    counts = metadata.counts
    for name, words in LEFT_OUT.items():
        if counts.get(name):
            yield counted(counts[name], *words), _place(counts["first"].get(name))
    if counts.get("links"):
        yield counted(counts["links"], *LINK), ""
    dropped = {rule: outcome.documents for rule, outcome in metadata.cleaning.items() if outcome.dropped}
    for rule, number in dropped.items():
        yield f"{counted(number, 'document')} dropped by {rule}", ""
    if repeated := metadata.repeated_documents:
        yield counted(repeated, "document that repeats an earlier one", "documents that repeat an earlier one"), ""
    if not counts:  # a store of format 1
        return
    unique = counts["documents"] - sum(dropped.values()) - repeated
    more = metadata.train.documents + metadata.val.documents - unique
    if more and metadata.settings.get("weights"):
        change = "more" if more > 0 else "fewer"
        yield f"{counted(abs(more), 'document')} {change} after --weights and a split for validation", ""
    elif more:
        yield f"{counted(more, 'document')} split in two, the end for validation", ""


def _place(first: tuple[str, dict] | None) -> str:
    if first is None:
        return ""
    path, place = first
    return f", the first in {path}" + "".join(f", {unit} {number}" for unit, number in place.items())


def _cleaning(metadata: Metadata) -> Iterator[str]:
    if metadata.cleaning:
        yield "## Cleaning"
    for rule, outcome in metadata.cleaning.items():
        did = "dropped" if outcome.dropped else "changed"
        documents, characters = outcome.documents, outcome.characters
        yield f"### {rule}: {counted(documents, 'document')} {did}, {counted(characters, 'character')} less"
        yield "\n".join(f"    {example}" for example in outcome.examples)


def _tokens(store: TokenStore, rust: Tokenizer) -> str:
    texts = encode.token_bytes(rust)
    longest = sorted(range(len(texts)), key=lambda i: -len(texts[i]))[:SHOWN]
    tokens = store.memory_map("train")
    counts = np.bincount(tokens[:: max(1, len(tokens) // COUNTED_TOKENS)], minlength=len(texts))
    frequent = np.argsort(-counts, kind="stable")[:SHOWN].tolist()

    def shown(ids: list[int]) -> str:
        return ", ".join(
            f"`{texts[i].decode('utf-8', 'replace')!r}`" if texts[i] else f"`{rust.id_to_token(i)}`" for i in ids
        )

    seen = "training text" if len(tokens) <= COUNTED_TOKENS else f"{counts.sum():,} tokens of the training text"
    lines = [
        f"longest: {shown(longest)}",
        f"most frequent: {shown(frequent)}",
        f"not used in {seen}: {int((counts == 0).sum()):,} of {len(texts):,}",
        *_compared(tokens[:COMPARED_TOKENS], texts),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _compared(ids: np.ndarray, texts: list[bytes]) -> Iterator[str]:
    """How much text a token holds beside GPT-2's, if that is on this machine: nothing is fetched for a report."""
    folders = [Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" for name in GPT2]
    sample = b"".join(texts[i] for i in ids.tolist())
    try:
        path = next((path for folder in folders for path in folder.glob("snapshots/*/tokenizer.json")), None)
        if path is None:
            return
        rust = encode.load_rust(path)
    except Exception:  # another user's, or damaged: no reason to lose a store. The Rust library raises nothing narrower
        return
    theirs = len(rust.encode(sample.decode("utf-8", "replace"), add_special_tokens=False).ids)
    ratio = f"{len(sample) / len(ids):.3f} bytes a token, GPT-2's {len(sample) / max(1, theirs):.3f}"
    yield f"the first {len(sample):,} bytes: {ratio}"
