"""Baselines for comparison: n-grams fitted on the training split, and compressors."""

import bz2
import gzip
import lzma

import numpy as np

from tokenizer.store.store import TokenStore

DISCOUNT = 0.75  # as in Jurafsky and Martin: close to the result of Ney's formula for most counts
FITTED_TOKENS = 20_000_000  # trigrams of more tokens would take minutes and gigabytes
PIECES = 20  # evenly spaced pieces of a larger split that contain these tokens
COMPRESSORS = {
    "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
    "bzip2 -9": lambda data: bz2.compress(data, 9),
    "xz -9": lambda data: lzma.compress(data, preset=9),
}


class NGram:
    """Interpolated Kneser-Ney model (Kneser and Ney 1995; Chen and Goodman 1999, 2.7) with one discount. Unigrams are
    interpolated with a uniform distribution over the vocabulary. Order 1 is a unigram model."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int):
        """Fit the model to `tokens` (n,) in O(n log n)."""
        self.vocab_size = vocab_size
        # Of the (k + 1)-grams (grams,): sorted keys, int64, number of the context * vocab_size + last token; and counts
        # of occurrences. A context has the number of its key on the previous level.
        self.levels: list[tuple[np.ndarray, np.ndarray]] = []
        tokens = tokens.astype(np.int64)
        rank = np.zeros(len(tokens) + 1, dtype=np.int64)
        for k in range(min(order, len(tokens))):
            lower_rank, context = rank, rank[:-1]  # (n - k,): number of the context before each token
            keys, rank, counts = np.unique(context * vocab_size + tokens[k:], return_inverse=True, return_counts=True)
            if k:  # a gram of the previous level counts once per distinct preceding token
                end = np.empty(len(keys), dtype=np.int64)
                end[rank] = lower_rank[1:]
                lower_keys, _ = self.levels[-1]
                self.levels[-1] = (lower_keys, np.bincount(end, minlength=len(lower_keys)))
            self.levels.append((keys, counts))

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Return the probability of each token given the tokens before it in `tokens` (n,), as (n,) float64."""
        tokens = tokens.astype(np.int64)
        result = np.full(len(tokens), 1 / self.vocab_size)
        context, n_contexts = np.zeros(len(tokens), dtype=np.int64), 1  # -1 for an unseen context
        for keys, counts in self.levels:
            # Of each context, (contexts,): sum of the counts, and number of counts above 0.
            totals_of_contexts = np.bincount(keys // self.vocab_size, weights=counts, minlength=n_contexts)
            kinds = np.bincount(keys[counts > 0] // self.vocab_size, minlength=n_contexts)
            n_contexts = len(keys)
            grams = context * self.vocab_size + tokens
            place = np.minimum(np.searchsorted(keys, grams), len(keys) - 1)
            is_seen = (keys[place] == grams) & (context >= 0)
            totals = np.where(context >= 0, totals_of_contexts[context], 0)
            mass = np.where(is_seen, np.maximum(counts[place] - DISCOUNT, 0), 0)
            lower_mass = DISCOUNT * kinds[context] * result
            result = np.where(totals > 0, (mass + lower_mass) / np.maximum(totals, 1), result)
            context = np.concatenate([[-1], np.where(is_seen, place, -1)[:-1]])
        return result


def fitted_on(store: TokenStore) -> np.ndarray:
    """Return the training split, or FITTED_TOKENS tokens of a larger split, in evenly spaced pieces."""
    tokens = store.memory_map("train")
    if len(tokens) <= FITTED_TOKENS:
        return np.asarray(tokens)
    size = FITTED_TOKENS // PIECES
    starts = np.linspace(0, len(tokens) - size, PIECES).astype(np.int64)
    return np.concatenate([tokens[start : start + size] for start in starts])


def compressed_bits(data: bytes) -> dict[str, float]:
    """Return the bits per byte of `data` for each compressor."""
    return {name: 8 * len(compress(data)) / len(data) for name, compress in COMPRESSORS.items()}
