"""Comparison of models, n-grams and compressors by bits per byte of the same text.

A model scores documents one by one, as its own tokenizer cuts them, each after the token that begins a text (bos, or eos where
there is no bos; without either, the first token costs as much as any of the vocabulary). Windows of its context overlap by
half: all but the first tokens of a document are predicted from half a context or more. The token that ends a document is no
text and is not scored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody gives it
from accelerate import Accelerator
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from errors import UserError, counted
from progress import track
from tokenizer.store import TokenStore
from training.compare.baselines import FITTED_TOKENS, NGram, compressed_bits, fitted_on
from training.compare.ratio import ratio, units
from training.loading import find_model, load_with_tokenizer
from training.scoring import sum_of_processes

LONGEST_WINDOW = 2048  # tokens: few documents are longer, and few machines have room for more
BYTES_OF_LOGITS = 1 << 27  # at once, in fp32
ORDERS = {"unigram": 1, "trigram": 3}
DOCUMENTS_AT_ONCE = 256
Encoded = list[
    tuple[np.ndarray, np.ndarray]
]  # of each document: ids of one tokenizer, and the unit that each begins in


@dataclass(frozen=True)
class HeldOut:
    """Documents of the validation split, as text."""

    texts: list[str]
    starts: np.ndarray  # (documents + 1,): where each begins, in characters
    edges: np.ndarray  # (units + 1,): the same of the units of the standard error
    units: str  # what those are
    bytes: np.ndarray  # (units,)


def held_out(store: TokenStore, most: int | None) -> HeldOut:
    """All of the split, or `most` of its documents, evenly spread."""
    tokens, offsets, rust = store.memory_map("val"), store.offsets("val"), store.load_tokenizer().backend_tokenizer
    chosen = np.arange(len(offsets) - 1)
    if most is not None and most < len(chosen):
        chosen = np.linspace(0, len(chosen) - 1, most).astype(np.int64)
    ends = offsets[1:] - (store.metadata.eos_token_id is not None)
    texts = [rust.decode(tokens[offsets[i] : ends[i]].tolist(), skip_special_tokens=False) for i in chosen]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    edges, what = units(starts)
    whole = "".join(texts)
    sizes = [len(whole[a:b].encode()) for a, b in pairwise(edges)]
    return HeldOut(texts, starts, edges, what, np.array(sizes, dtype=np.int64))


def encoded(text: HeldOut, tokenizer: PreTrainedTokenizerBase, name: str) -> Encoded:
    """Encode the text; raise a `UserError` where the tokenizer does not know all of the text."""
    rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rust.encode_special_tokens = True  # what reads like a control token stays text
    rust.no_truncation()
    rust.no_padding()
    unknown = getattr(rust.model, "unk_token", None)
    unknown = rust.token_to_id(unknown) if unknown else None
    problem = f"{name} cannot be compared: its tokenizer does not know every character of the text; leave it out."
    documents = []
    for first in range(0, len(text.texts), DOCUMENTS_AT_ONCE):
        try:
            batch = rust.encode_batch(text.texts[first : first + DOCUMENTS_AT_ONCE], add_special_tokens=False)
        except Exception as error:  # the Rust library raises nothing narrower
            raise UserError(problem) from error
        for document, encoding in enumerate(batch, first):
            begins = text.starts[document] + np.array([start for start, _ in encoding.offsets], dtype=np.int64)
            places = np.searchsorted(text.edges, begins, side="right") - 1
            documents.append((np.array(encoding.ids, dtype=np.int64), places))
            if unknown in encoding.ids:
                raise UserError(problem)
    return documents


def windows(targets: int, context: int) -> Iterator[tuple[int, int]]:
    """Where each window begins, and its first target that none before it scored, counted in the document."""
    start = scored = 0
    while scored < targets:
        yield start, scored
        scored = start + context
        start += max(1, context // 2)


@torch.no_grad()
def nats_of_model(
    model: PreTrainedModel, first: int | None, text: Encoded, n_units: int, accelerator: Accelerator, name: str
) -> np.ndarray:
    """(units,) float64: what the text costs the model, computed by all processes together. `first` begins each document."""
    context = min(getattr(model.config, "max_position_embeddings", LONGEST_WINDOW), LONGEST_WINDOW)
    sums = np.zeros(n_units)
    streams, places = map(list, zip(*text, strict=True))
    if first is None:
        if accelerator.is_main_process:
            np.add.at(sums, [unit[0] for unit in places if len(unit)], math.log(model.config.vocab_size))
        places = [unit[1:] for unit in places]
    else:
        streams = [np.concatenate([[first], ids]) for ids in streams]
    cut = [(i, *window) for i, unit in enumerate(places) for window in windows(len(unit), context)]
    cut.sort(key=lambda window: window[1] - len(streams[window[0]]))  # the longest first: less padding, and no surprise
    rows = max(1, BYTES_OF_LOGITS // (context * model.config.vocab_size * 4))
    batches = [cut[at : at + rows] for at in range(0, len(cut), rows)][
        accelerator.process_index :: accelerator.num_processes
    ]
    for batch in track(batches, name, accelerator.is_main_process):
        pieces = [torch.from_numpy(streams[i][start : start + context + 1]) for i, start, _ in batch]
        padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(model.device)  # behind: nothing sees it
        with accelerator.autocast():
            logits = model(input_ids=padded[:, :-1], use_cache=False).logits
        targets = padded[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        nats = nats.double().cpu().numpy()
        for row, (i, start, new) in enumerate(batch):
            unit = places[i][new : start + context]
            np.add.at(sums, unit, nats[row, new - start :][: len(unit)])
    return sum_of_processes(sums, accelerator)


def compare(
    model: PreTrainedModel,
    name: str,
    others: list[str],
    store: TokenStore,
    most_documents: int | None,
    accelerator: Accelerator,
) -> dict[str, Any] | None:
    """Return the rows of the panel, best first, and how they were made, for JSON; None on all processes but the main one,
    which fits n-grams and compresses.

    Raises:
        UserError: a model cannot be loaded, or its tokenizer does not know the text.
    """
    text = held_out(store, most_documents)
    nats: dict[str, np.ndarray] = {}

    def add(title: str, scored: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        cut = encoded(text, tokenizer, title)
        nats[title] = nats_of_model(scored, begins(tokenizer), cut, len(text.bytes), accelerator, title)
        return cut

    ours = add(name, model, store.load_tokenizer())
    for other in others:
        another, tokenizer = load_with_tokenizer(find_model(other), torch.float32)
        add(other, another.to(accelerator.device), tokenizer)
        del another
    if not accelerator.is_main_process:
        return None
    fitted, eos = fitted_on(store), store.metadata.eos_token_id
    for title, order in track(ORDERS.items(), "n-grams", accelerator.is_main_process):
        nats[title] = nats_of_ngram(NGram(fitted, store.metadata.vocab_size, order), eos, ours, len(text.bytes))
    rows = [
        {"name": title, "kind": "compressor", "bits_per_byte": value}
        for title, value in compressed_bits("".join(text.texts).encode()).items()
    ]
    bits = {title: values / math.log(2) for title, values in nats.items()}
    for title, values in bits.items():
        mean, difference = ratio(values, text.bytes), ratio(values - bits[name], text.bytes)
        row = {"name": title, "kind": "n-gram" if title in ORDERS else "model", "bits_per_byte": mean.value}
        if not math.isnan(mean.stderr):  # which JSON does not know
            row["bits_per_byte_stderr"] = mean.stderr
        if title != name:  # unit by unit
            row |= {"difference": difference.value, "difference_stderr": difference.stderr}
        rows.append(row)
    return {"rows": sorted(rows, key=lambda row: row["bits_per_byte"]), "how": _how_it_was_made(store, text)}


def begins(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that begins a text."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def nats_of_ngram(ngram: NGram, eos: int | None, text: Encoded, n_units: int) -> np.ndarray:
    """(units,) float64. Each document follows an end of text, as in the store."""
    before = [] if eos is None else [eos]
    stream = np.concatenate([part for ids, _ in text for part in (before, ids)]).astype(np.int64)
    nats = -np.log(ngram.probabilities(stream))
    is_text = np.concatenate([np.arange(len(before) + len(ids)) >= len(before) for ids, _ in text])
    return np.bincount(np.concatenate([units for _, units in text]), weights=nats[is_text], minlength=n_units)


def _how_it_was_made(store: TokenStore, text: HeldOut) -> str:
    """What a reader has to know of the panel."""
    split = store.metadata.train
    fitted = f"the training split's {split.tokens:,} tokens"
    if split.tokens > FITTED_TOKENS:
        fitted = f"{FITTED_TOKENS:,} of the training split's {split.tokens:,} tokens, evenly spread"
    return (
        f"The same {text.bytes.sum():,} bytes of {counted(len(text.texts), 'document')} for all. Models score documents one by one, in windows "
        f"of their context that overlap by half. ±: standard error over {text.units}; that of a difference is paired. N-grams "
        f"(Kneser-Ney) are fitted on {fitted}; compressors see the documents on end."
    )
