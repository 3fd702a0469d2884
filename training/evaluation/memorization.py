"""Memorization test: verbatim training text in the output of a model.

Texts are sampled from the unmodified distribution of the model (temperature 1, whole vocabulary). Every span of 50
tokens in them is searched in the training split, as in Lee et al. (2022). Spans of held-out text are searched too, as a
baseline: some text that is not memorized also repeats, for example licenses.
"""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common.errors import UserError
from common.progress import track
from tokenizer.store.store import TokenStore
from training.evaluation.sampling import continue_tokens, generation_config
from training.evaluation.scoring import ratio

LENGTH = 256  # maximum tokens per text
BATCH_SIZE = 32  # texts per batch
BLOCK = 1 << 22  # tokens of the store that are searched together
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
FILTER_BITS = 20


def memorization(model: PreTrainedModel, store: TokenStore, texts: int, span: int, seed: int) -> dict[str, Any]:
    """Return the share of spans that occur in the training split, as JSON data. Only one process calls this. Raise a
    `UserError` if the validation split, before the model writes, or the model's texts have no span."""
    eos, val = store.metadata.eos_token_id, store.memory_map("val")
    pieces = held_out_pieces(val, store.offsets("val"))
    order = np.random.default_rng(seed).permutation(len(pieces))[:texts]
    held_out = [np.asarray(pieces[i], dtype=np.int64) for i in order]
    if not any(len(spans(piece, eos, span)) for piece in held_out):
        raise UserError(
            f"No piece of the validation split has {span} tokens of one document; use a smaller --memorization_span."
        )
    opening = [held_out[i % len(held_out)][:1] if eos is None else np.array([eos]) for i in range(texts)]
    texts_of_model = generate_texts(model, np.stack(opening), eos, seed)
    of_texts = [spans(text, eos, span) for text in (*texts_of_model, *held_out)]
    counts = np.array([len(rows) for rows in of_texts])  # of spans: first of the model's texts, then of held-out ones
    if not (n_spans := counts[:texts].sum()):
        raise UserError(f"No text that the model wrote has at least {span} tokens; use a smaller --memorization_span.")
    looked_up = np.concatenate(of_texts)
    places = find_spans(store.memory_map("train"), looked_up)
    hits = np.array([part.sum() for part in np.split(places >= 0, counts.cumsum()[:-1])])
    share, stderr = ratio(hits[:texts], counts[:texts])
    held_out_share, held_out_stderr = ratio(hits[texts:], counts[texts:])
    example, hit = None, int(np.argmax(places[:n_spans] >= 0))  # the first span found
    if share:
        document = int(np.searchsorted(store.offsets("train"), places[hit], side="right")) - 1
        text = store.load_tokenizer().decode(looked_up[hit].tolist())
        example = {"text": text, "document": document, "token": int(places[hit])}
    return {
        "span_tokens": span,
        "texts": texts,
        "held_out_texts": len(held_out),
        "spans": int(n_spans),
        "share": share,
        "share_stderr": stderr,
        "held_out_spans": int(counts[texts:].sum()),
        "held_out_share": held_out_share,
        "held_out_share_stderr": held_out_stderr,
        "example": example,
    }


def held_out_pieces(tokens: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """Return disjoint parts of held-out text, as independent as the texts of the model: `LENGTH` tokens each. A split
    with fewer than two of these is divided into its documents, or one document into halves."""
    if len(tokens) >= 2 * LENGTH:
        return np.split(tokens, np.arange(LENGTH, len(tokens) + 1, LENGTH))[:-1]
    return np.split(tokens, offsets[1:-1] if len(offsets) > 2 else [len(tokens) // 2])


def generate_texts(model: PreTrainedModel, opening: np.ndarray, eos: int | None, seed: int) -> list[np.ndarray]:
    """Return the continuations of `opening` (B, 1), up to an end of text or `LENGTH` tokens."""
    torch.manual_seed(seed)
    config = generation_config(1.0)
    config.eos_token_id = config.pad_token_id = eos
    texts = []
    for at in track(range(0, len(opening), BATCH_SIZE), "writing", is_shown=True):
        tokens = torch.from_numpy(opening[at : at + BATCH_SIZE]).to(model.device)
        texts += continue_tokens(model, tokens, LENGTH, config)
    return [np.array(text, dtype=np.int64) for text in texts]


def spans(tokens: np.ndarray, eos: int | None, span: int) -> np.ndarray:
    """Return all spans of a text that are within one document, (n, span)."""
    if len(tokens) < span:
        return np.empty((0, span), dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, span)
    return windows[(windows != eos).all(axis=1)]  # if eos is None, all tokens differ from it


def find_spans(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the first position in `tokens` of each span in `targets` (n, span), as (n,) int64, or -1 if a span does
    not occur. One pass over `tokens`, in bounded memory: rolling hashes (Karp and Rabin 1987) are matched with a bit
    filter, then with a sorted table. Of the remaining spans, the first of each hash and block is compared."""
    span = targets.shape[1]
    hashes = np.unique(hash_spans(targets.ravel(), span)[::span])
    passes = np.zeros(1 << FILTER_BITS, dtype=bool)
    shift = np.uint64(64 - FILTER_BITS)
    passes[hashes >> shift] = True
    places: dict[bytes, int] = {}
    for start in track(range(0, len(tokens) - span + 1, BLOCK), "searching", is_shown=True):
        block = np.asarray(tokens[start : start + BLOCK + span - 1])
        block_hashes = hash_spans(block, span)
        candidates = np.flatnonzero(passes[block_hashes >> shift])
        candidates = candidates[np.isin(block_hashes[candidates], hashes)]
        _, occurrences = np.unique(block_hashes[candidates], return_index=True)
        for at in candidates[occurrences].tolist():
            places.setdefault(block[at : at + span].tobytes(), start + at)
    return np.array([places.get(row.tobytes(), -1) for row in targets.astype(tokens.dtype)], dtype=np.int64)


def hash_spans(tokens: np.ndarray, span: int) -> np.ndarray:
    """Return the polynomial hash of each span in BASE, modulo 2**64, as (n - span + 1,) uint64, from running sums."""
    powers = np.full(len(tokens), BASE, dtype=np.uint64).cumprod()
    inverses = np.full(len(tokens), pow(BASE, -1, 1 << 64), dtype=np.uint64).cumprod()
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), ((tokens.astype(np.uint64) + np.uint64(1)) * powers).cumsum()])
    return (sums[span:] - sums[:-span]) * inverses[: len(tokens) - span + 1]
