"""Published rules that derive vocabulary, model size, tokens, batch and rates from a compute budget. docs/budget.md
compares them with runs.

Symbols: N weights in matrix products (`size.products`), D training tokens, U tokens of the text, B tokens per step.
"""

import math
from typing import NamedTuple

from common.errors import UserError

RATIOS = {"gpt2": 20.0, "modern": 10.5}  # compute-optimal D / N
RATIO_SOURCES = {
    "gpt2": "Hoffmann et al. 2022, table 3, for 70M to 16B parameters",
    "modern": "nanochat, dev/LOG.md, 2026-01-27, for 110M to 382M parameters",
}
BATCH_SOURCE = "Bergsma et al. 2025; nanochat, dev/LOG.md, 2026-02-05, for 1.16B to 9.6B tokens"
EPOCHS_SOURCE = "Muennighoff et al. 2023, equations 5 and 6, for 7M to 8.7B parameters"
PUBLISHED_SIZES, PUBLISHED_TOKENS = (70e6, 16e9), 1.16e9  # N of `expected_loss`, and the lowest D of `best_batch`
# (k, g) of bits per byte = k C^-g for the best size at C FLOPs, fitted to runs on the text of the quickstart, and the
# range of C.
POWER_LAWS, MEASURED_FLOPS = {"gpt2": (18.04, 0.08045), "modern": (19.82, 0.0898)}, (5e12, 6e13)
EPOCHS_AS_NEW = 4  # repeated tokens are worth nearly as much as new ones (Muennighoff et al. 2023, section 6)
EXPONENT = 0.353  # of N and D in the loss (same source, equation 12)
# Decay of the value of repeated tokens, and of parameters beyond the best number for U: published, and the latter
# measured here for texts of at most SMALL_TEXT tokens.
REPEATS, EXCESS = 15.4, 5.3
SMALL_TEXT, SMALL_EXCESS = 1e7, 50
LARGEST_DECAY = 0.5  # runs of few steps would have more; nothing above was tried
TIMESCALES = {"muon": 0.308, "adamw": 0.583}  # B / (rate decay D) of the records that `weight_decay` names
# Up to this N, or with texts that are repeated as in WITH_CIRCUIT, new models of the modern family have second targets,
# and up to that many training tokens an induction circuit. Its gain ends before 10M (four layers) or 20M (two;
# docs/log.md).
SMALL_MODEL, SECOND_TARGET_WEIGHT, CIRCUIT_TOKENS = 4.2e6, 0.5, 5e6
# Of a token for a model of one layer, which cannot have the circuit: with it, two layers are better from 2.8e12 FLOPs
# (Python) or 7e12 (English) on, without it from 8e12 on.
WORTH_WITHOUT_CIRCUIT = 0.7


class Repetition(NamedTuple):
    """How much a text can be repeated."""

    epochs: int  # at most: further ones gain nothing on average, or raise the loss on new text
    parameters: int  # of the largest model, in matrix products, per token of the text
    scale: float  # decay of the value of repeated tokens


# Measured here for texts of 0.07 to 1.6 million tokens, and with an induction circuit for 0.2 to 0.7 million, which is
# applied up to CIRCUIT_TEXT (docs/small_data.md).
WITHOUT_CIRCUIT, WITH_CIRCUIT, CIRCUIT_TEXT = Repetition(8, 10, 8.0), Repetition(4, 20, 1.7), 1e6
# Tao et al. 2024, approach 2: N of the blocks, width, vocabulary size, and exponent of the embedding. Below: vocabulary
# size and N of the blocks, measured here (docs/budget.md).
VOCABULARY_SOURCE = "Tao et al. 2024; docs/budget.md"
LAW_OF_VOCABULARY, SMALLEST_VOCABULARY, SMALL_BLOCKS = (33e6, 512, 6144, 0.835), 2048, 393_216
SMALLEST_BATCH, FEW_TOKENS = 4096, 4e6  # measured here: the best batch of runs with few tokens (docs/log.md)


def best_context(width: int) -> int:
    """Return the context for a width: GPT-2's 1,024 from 768 on, and 256, the best measured here, for small models."""
    return max(256, min(1024, 2 ** int(math.log2(width**2 / 576))))


def effective(amount: float, base: float, scale: float = REPEATS) -> float:
    """Return how many new tokens are worth `amount` tokens from a text of `base` tokens (Muennighoff et al. 2023,
    equation 5). With `scale` EXCESS, the same of parameters, whose best number for the text is `base` (equation 6)."""
    if amount <= base:
        return amount
    return base * (1 + scale * (1 - math.exp(-(amount / base - 1) / scale)))


def repetition(unique: float, has_circuit: bool) -> Repetition:
    """Return how much a text of `unique` tokens can be repeated. `has_circuit`: short runs have a circuit."""
    if has_circuit and unique <= CIRCUIT_TEXT:
        return WITH_CIRCUIT
    return WITHOUT_CIRCUIT if unique <= SMALL_TEXT else WITHOUT_CIRCUIT._replace(scale=REPEATS)


def deficit(parameters: float, tokens: float, unique: float, ratio: float, scale: float = REPEATS) -> float:
    """Return the part of the loss that falls with N and D, up to a factor: (ratio N')^-a + D'^-a.

    N' and D' are the effective N and D for the text, with the decay `scale` of the value of repeated tokens. Without
    repetition, constant N D is best at D = ratio N.
    """
    size = effective(parameters, unique / ratio, EXCESS if unique > SMALL_TEXT else SMALL_EXCESS)
    return (ratio * size) ** -EXPONENT + effective(tokens, unique, scale) ** -EXPONENT


def best_batch(tokens: float) -> int:
    """Return tokens per step, a power of two. Below `PUBLISHED_TOKENS`, the exponent is the one that leads to the
    batch measured here for `FEW_TOKENS`."""
    published, exponent = 2.0**19, 0.383
    if tokens < PUBLISHED_TOKENS:
        exponent = math.log(published / SMALLEST_BATCH) / math.log(PUBLISHED_TOKENS / FEW_TOKENS)
    exact = published * (tokens / PUBLISHED_TOKENS) ** exponent
    return max(SMALLEST_BATCH, 2 ** round(math.log2(exact)))


def best_vocabulary(parameters: float, width: int) -> int:
    """Return the vocabulary size for N `parameters` of the blocks, a power of two: the embedding grows with N^0.835
    (Tao et al. 2024, approach 2). Below its range, the size falls to the one measured here for SMALL_BLOCKS."""
    blocks, reference_width, reference_size, exponent = LAW_OF_VOCABULARY
    if parameters >= blocks:
        size = reference_size * (parameters / blocks) ** exponent * reference_width / width
    else:
        share = math.log(parameters / SMALL_BLOCKS) / math.log(blocks / SMALL_BLOCKS)
        size = SMALLEST_VOCABULARY * (reference_size / SMALLEST_VOCABULARY) ** share
    return max(SMALLEST_VOCABULARY, 2 ** round(math.log2(size)))


CONTINUATION_RATE = 1e-4  # peak rate for a pretrained model, as in presets/continued.yaml


def adam_rate(width: int) -> float:
    """Return AdamW's peak rate for all parameters: 1.8e-3 sqrt(768 / width). The rate for width 768 is that of
    modded-nanogpt's record track_1_short/2024-06-06_AdamW; the factor is nanochat's."""
    return 1.8e-3 * math.sqrt(768 / width)


def weight_decay(optimizer: str, rate: float, batch: float, tokens: float) -> float:
    """Return the decay that keeps the timescale B / (rate decay D) constant (Wang and Aitchison 2024), at that of
    modded-nanogpt's records track_3_optimization, 36, for Muon, and track_1_short/2024-06-06_AdamW for AdamW."""
    if optimizer not in TIMESCALES:
        raise UserError(
            f"optimizer is {optimizer}, for which --budget and --depth have no rates; use {' or '.join(TIMESCALES)}, "
            "or leave out --budget and --depth."
        )
    return min(LARGEST_DECAY, batch / (TIMESCALES[optimizer] * rate * tokens))


def average_horizon(steps: int, epochs: float) -> int | None:
    """Return the steps over which the weights are averaged, a tenth of a run that repeats its text, or None."""
    return max(2, steps // 10) if epochs > 1 and steps > 1 else None


def expected_loss(family: str, parameters: float, tokens: float) -> tuple[float, float] | None:
    """Return the lowest and highest loss, in nats per token of web text with about 32,000 tokens in the vocabulary, or
    None for a model outside of the range of the fits, or with less than a token per parameter.

    Two fits of the same runs: Hoffmann et al. 2022, equation 10, and Besiroglu et al. 2024. A modern model of
    12 layers needs half of GPT-2's tokens for a loss (docs/tokens_to_loss.md): its lowest is that of twice the tokens.
    """
    if not PUBLISHED_SIZES[0] <= parameters <= min(PUBLISHED_SIZES[1], tokens):
        return None
    fits = ((1.69, 406.4, 0.34, 410.7, 0.28), (1.8172, 482.01, 0.3478, 2085.43, 0.3658))
    amounts = (tokens, 2 * tokens) if family == "modern" else (tokens,)
    losses = [e + a / parameters**alpha + b / D**beta for e, a, alpha, b, beta in fits for D in amounts]
    return min(losses), max(losses)


def measured_bits_per_byte(family: str, flops: float) -> tuple[float, float] | None:
    """Return the lowest and highest bits per byte on the text of the quickstart, 5% below and above the law of
    `POWER_LAWS`, or None outside of its range."""
    (k, g), (lowest, highest) = POWER_LAWS[family], MEASURED_FLOPS
    bits = k * flops**-g
    return (0.95 * bits, 1.05 * bits) if lowest <= flops <= highest else None
