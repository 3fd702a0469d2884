"""Memorization: text of the model that occurs in its training text, word for word.

Texts are sampled from the model as it is (temperature 1, all of the vocabulary), and every span of 50 tokens in them is looked
up in the training split, as Lee et al. (2022) do. Spans of held-out text are looked up as well: text that is not memorized occurs
there too, licences for example.
"""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from errors import UserError
from progress import track
from tokenizer.store import TokenStore
from training.compare.ratio import ratio
from training.sampling import continue_tokens, generation_config

LENGTH = 256  # tokens of a text at most
AT_ONCE = 32  # texts
BLOCK = 1 << 22  # tokens of the store that are looked through together
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
FILTER_BITS = 20


def memorization(
    model: PreTrainedModel, store: TokenStore, texts: int, span: int, seed: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Return the share of spans that are found, for JSON. Called by one process.

    Raises:
        UserError: the model ends its texts, or the validation split its documents, before they have a span.
    """
    eos = store.metadata.eos_token_id
    held_out = _held_out(store, texts, seed)
    opening = [row[:1] for row in held_out] if eos is None else [np.array([eos])] * texts
    written = write(model, np.stack(opening), LENGTH, eos, seed, accelerator)
    looked_up, counts = [], []
    for what, rows in (("the texts that the model wrote", written), ("the validation split", held_out)):
        pieces = [parts(row, eos) for row in rows]
        counts.append(np.array([sum(max(0, len(piece) - span + 1) for piece in row) for row in pieces]))
        looked_up.append(spans([piece for row in pieces for piece in row], span))
        if not len(looked_up[-1]):
            raise UserError(f"No document of {what} has {span} tokens; give a smaller --memorization_span.")
    places = find(store.memory_map("train"), np.concatenate(looked_up), accelerator)
    found = np.split(places >= 0, [len(looked_up[0])])
    share, held_out_share = (ratio(_sums(hits, n), n) for hits, n in zip(found, counts, strict=True))
    example = None  # the first that was found
    if found[0].any():
        first = int(np.argmax(found[0]))
        place = int(places[first])
        document = int(np.searchsorted(store.offsets("train"), place, side="right")) - 1
        text = store.load_tokenizer().decode(looked_up[0][first].tolist())
        example = {"text": text, "document": document, "token": place}
    return {
        "span_tokens": span,
        "texts": texts,
        "spans": len(looked_up[0]),
        "share": share.value,
        "share_stderr": share.stderr,
        "held_out_spans": len(looked_up[1]),
        "held_out_share": held_out_share.value,
        "held_out_share_stderr": held_out_share.stderr,
        "example": example,
    }


def _held_out(store: TokenStore, number: int, seed: int) -> list[np.ndarray]:
    """`number` pieces of the validation split, as long as what the model writes."""
    tokens = store.memory_map("val")
    starts = np.random.default_rng(seed).integers(0, max(1, len(tokens) - LENGTH), number)
    return [np.asarray(tokens[start : start + LENGTH], dtype=np.int64) for start in starts]


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(texts,): of `values` in a row, `counts` of them each."""
    return np.bincount(np.repeat(np.arange(len(counts)), counts), weights=values, minlength=len(counts))


def write(
    model: PreTrainedModel, opening: np.ndarray, length: int, eos: int | None, seed: int, accelerator: Accelerator
) -> list[np.ndarray]:
    """Return what the model writes after `opening` (B, 1), up to an end of text or `length` tokens."""
    torch.manual_seed(seed)
    config = generation_config(1.0)
    config.eos_token_id = config.pad_token_id = eos
    texts = []
    for at in track(range(0, len(opening), AT_ONCE), "writing", accelerator.is_main_process):
        tokens = torch.from_numpy(opening[at : at + AT_ONCE]).to(model.device)
        texts += continue_tokens(model, tokens, length, config)
    return [np.array(text, dtype=np.int64) for text in texts]


def parts(tokens: np.ndarray, eos: int | None) -> list[np.ndarray]:
    """The documents in a piece of text, without the token that ends them."""
    ends = np.flatnonzero(tokens == eos)  # no token is None
    return [part[part != eos] for part in np.split(tokens, ends)]


def spans(pieces: list[np.ndarray], span: int) -> np.ndarray:
    """(n, span): all of each piece, in order."""
    long = [np.lib.stride_tricks.sliding_window_view(piece, span) for piece in pieces if len(piece) >= span]
    return np.concatenate(long) if long else np.empty((0, span), dtype=np.int64)


def find(tokens: np.ndarray, wanted: np.ndarray, accelerator: Accelerator) -> np.ndarray:
    """(n,) int64: where each of `wanted`, (n, span), first stands in `tokens`, -1 where it does not.

    One pass over `tokens`, in bounded memory: their rolling hashes (Karp and Rabin 1987) pass a filter of bits, then a sorted
    table, and what is left is compared token by token.
    """
    span = wanted.shape[1]
    distinct, inverse = np.unique(wanted, axis=0, return_inverse=True)
    hashes = hash_spans(distinct.ravel(), span)[::span]
    order = np.argsort(hashes)
    hashes, distinct = hashes[order], distinct[order]
    passes = np.zeros(1 << FILTER_BITS, dtype=bool)
    shift = np.uint64(64 - FILTER_BITS)
    passes[hashes >> shift] = True
    places = np.full(len(distinct), -1, dtype=np.int64)
    for start in track(range(0, len(tokens) - span + 1, BLOCK), "searching", accelerator.is_main_process):
        block = np.asarray(tokens[start : start + BLOCK + span - 1])
        here = hash_spans(block, span)
        candidates = np.flatnonzero(passes[here >> shift])
        which = np.minimum(np.searchsorted(hashes, here[candidates]), len(hashes) - 1)
        same = (hashes[which] == here[candidates]) & (places[which] < 0)
        which, first = np.unique(which[same], return_index=True)
        at = candidates[same][first]
        equal = (block[at[:, None] + np.arange(span)] == distinct[which]).all(axis=1)
        places[which[equal]] = start + at[equal]
    found = np.empty_like(places)
    found[order] = places
    return found[inverse.reshape(-1)]


def hash_spans(tokens: np.ndarray, span: int) -> np.ndarray:
    """(n - span + 1,) uint64: the polynomial of each span in BASE, modulo 2**64, from the differences of running sums."""
    powers = np.full(len(tokens), BASE, dtype=np.uint64).cumprod()
    inverses = np.full(len(tokens), pow(BASE, -1, 1 << 64), dtype=np.uint64).cumprod()
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), ((tokens.astype(np.uint64) + np.uint64(1)) * powers).cumsum()])
    return (sums[span:] - sums[:-span]) * inverses[: len(tokens) - span + 1]
