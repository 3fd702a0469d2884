"""What the model writes that stands in its training text, word for word.

Texts are sampled from the model as it is (temperature 1, all of the vocabulary), and every span of 50 tokens in them is looked
up in the training split, as Lee et al. (2022) do. Spans of held-out text are looked up as well: what nobody memorized stands
there too, licences for example.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from errors import UserError
from progress import track
from tokenizer.store import TokenStore
from training.compare.ratio import Ratio, ratio
from training.sampling import generation_config

LENGTH = 256  # tokens of a text at most
AT_ONCE = 32  # texts
BLOCK = 1 << 22  # tokens of the store that are looked through together
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
FILTER_BITS = 20


@dataclass(frozen=True)
class Memorization:
    share: Ratio  # of the spans that the model wrote
    spans: int
    held_out_share: Ratio
    held_out_spans: int
    span: int  # tokens
    texts: int  # that the model wrote
    example: dict[str, Any] | None  # text, document, token: where the first that was found stands

    def described(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "span_tokens": self.span,
            "texts": self.texts,
            "spans": self.spans,
            "share": self.share.value,
            "share_stderr": self.share.stderr,
            "held_out_spans": self.held_out_spans,
            "held_out_share": self.held_out_share.value,
            "held_out_share_stderr": self.held_out_share.stderr,
            "example": self.example,
        }


def memorization(
    model: PreTrainedModel, store: TokenStore, texts: int, span: int, seed: int, accelerator: Accelerator
) -> Memorization:
    """By one process.

    Raises:
        UserError: the model ends its texts, or the validation split its documents, before they have a span.
    """
    eos = store.metadata.eos_token_id
    held_out = _held_out(store, texts, seed)
    opening = [row[:1] for row in held_out] if eos is None else [np.array([eos])] * texts
    written = write(model, np.stack(opening), LENGTH, eos, seed, accelerator)
    ours, theirs = (spans([part for row in rows for part in parts(row, eos)], span) for rows in (written, held_out))
    counted = [
        np.array([sum(max(0, len(p) - span + 1) for p in parts(row, eos)) for row in rows])
        for rows in (written, held_out)
    ]
    for what, counts in zip(("the texts that the model wrote", "the validation split"), counted, strict=True):
        if not counts.sum():
            raise UserError(f"No document of {what} has {span} tokens; give a smaller --memorization_span.")
    both = np.concatenate([ours, theirs])
    places = find(store.memory_map("train"), both, accelerator)
    found = np.split(places >= 0, [len(ours)])
    shares = [ratio(_sums(hits, counts), counts) for hits, counts in zip(found, counted, strict=True)]
    example = None
    if found[0].any():
        first = int(np.argmax(found[0]))
        place = int(places[first])
        document = int(np.searchsorted(store.offsets("train"), place, side="right")) - 1
        text = store.load_tokenizer().decode(ours[first].tolist())
        example = {"text": text, "document": document, "token": place}
    return Memorization(shares[0], len(ours), shares[1], len(theirs), span, texts, example)


def _held_out(store: TokenStore, number: int, seed: int) -> list[np.ndarray]:
    """`number` pieces of the validation split, as long as what the model writes."""
    tokens = store.memory_map("val")
    starts = np.random.default_rng(seed).integers(0, max(1, len(tokens) - LENGTH), number)
    return [np.asarray(tokens[start : start + LENGTH], dtype=np.int64) for start in starts]


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(texts,): of `values` in a row, `counts` of them each."""
    return np.bincount(np.repeat(np.arange(len(counts)), counts), weights=values, minlength=len(counts))


@torch.no_grad()
def write(
    model: PreTrainedModel, opening: np.ndarray, length: int, eos: int | None, seed: int, accelerator: Accelerator
) -> list[np.ndarray]:
    """What follows `opening`, (B, 1), up to an end of text or `length` tokens; beyond the context, from its second half on."""
    torch.manual_seed(seed)
    context = model.config.max_position_embeddings
    texts = []
    for at in track(range(0, len(opening), AT_ONCE), "writing", accelerator.is_main_process):
        tokens = torch.from_numpy(opening[at : at + AT_ONCE]).to(model.device)
        while tokens.shape[1] <= length:
            prompt = tokens if tokens.shape[1] < context else tokens[:, -max(1, context // 2) :]
            T = prompt.shape[1]
            config = generation_config(1.0, max_new_tokens=min(context - T, length + 1 - tokens.shape[1]))
            config.eos_token_id = config.pad_token_id = eos
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            tokens = torch.cat([tokens, output[:, T:]], dim=1)
            if eos is not None and (tokens[:, 1:] == eos).any(dim=1).all():
                break
        texts += list(tokens[:, 1:].cpu().numpy())
    return [parts(row, eos)[0] for row in texts]  # behind an end of text there is nothing of worth


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
