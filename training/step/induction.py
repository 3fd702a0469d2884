"""Initial weights of an induction circuit: two attention heads that find what followed the current token before.

A new model has such heads (Olsson et al. 2022) only after hundreds of steps. With them, it only has to learn how to use
what they find. As in mimetic initialization (Trockman and Kolter 2023), the architecture does not change.

1. All embeddings have a common direction, from which the first head of block 0 makes one query and one key for all
   tokens. The key is rotated by one position more, so that the head attends to the previous token. Only the pairs of
   channels that rotate fast take part, because slow ones hardly distinguish neighbors.
2. The same head copies a part of the previous token's embedding to other channels of the residual stream.
3. The first head of block 1 compares this part of the current token with the copies, in pairs that rotate slowly, so
   that the distance hardly counts. It therefore attends to the positions after earlier occurrences of the token.
"""

from collections.abc import Iterator

import torch

from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training.step.model import ModelArguments

COPY = 2.0  # size of the copied channels in the stream, in standard deviations of the embedding


def induction_problems(model: ModelArguments) -> Iterator[str]:
    has_heads = model.n_layer > 1 and 1 < model.n_head <= model.n_embd / 4
    if not (model.rope_theta and model.has_large_embedding and has_heads):
        yield (
            "induction_init needs normalization rms_norm, rope_theta, tie_word_embeddings false, 2 layers, and 2 heads "
            "of at least 4 channels; change these, or leave it out."
        )


@torch.no_grad()
def add_induction(model: GPT2ScratchForCausalLM) -> None:
    """Write the circuit into a new model, with the random numbers that follow those of its initialization."""
    config, (first, second, *_) = model.config, model.transformer.h
    C, hs = config.n_embd, config.n_embd // config.n_head
    half, fast, slow = hs // 2, max(1, hs // 16), hs // 4  # pairs of channels (i, i + half)
    # Orthogonal directions (C, 1 + 4 slow): the common one, those that are compared, and those that hold the copies.
    common = torch.randint(0, 2, (C, 1)) * 2.0 - 1
    basis = torch.linalg.qr(torch.cat([common, torch.randn(C, 4 * slow)], dim=1)).Q
    token, copy = basis[:, 1:].T.split(2 * slow)  # (2 slow, C) each
    norm = config.initializer_range * (C * hs) ** 0.5  # of the random weights of a head's query, key or value

    model.transformer.wte.weight += common.T  # (V, C); its standard deviation is 1

    theta = config.rope_parameters["rope_theta"]
    angle = theta ** (-torch.arange(fast) / half)  # by which the pairs rotate per position
    query, key, value = (part[:hs] for part in first.attn.c_attn.weight.chunk(3))  # (hs, C) each
    scale = norm / (C * fast) ** 0.5
    query.zero_()[:fast] = scale * common.T  # keys stay random elsewhere: weights that are zero in both never change
    key[:fast] = scale * angle.cos()[:, None] * common.T
    key[half : half + fast] = scale * angle.sin()[:, None] * common.T
    value[: 2 * slow] = COPY**0.5 * token
    first.attn.c_proj.weight[:, : 2 * slow] = COPY**0.5 * copy.T  # (C, 2 slow)

    query, key, _ = (part[:hs] for part in second.attn.c_attn.weight.chunk(3))
    rows = torch.cat([torch.arange(half - slow, half), torch.arange(hs - slow, hs)])
    scale = norm / (2 * slow) ** 0.5
    query.zero_()[rows], key[rows] = scale * token, scale * copy
