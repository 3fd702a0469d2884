"""Embeddings with deterministic gradients.

Inductor computes the gradient of a lookup with atomic additions from several threads. Their order, and therefore the
rounding, differs between runs (seen on two CPU threads: different weights from step 4 to 8 on). PyTorch's own kernel
adds the rows of a token in batch order, on CPUs (each thread owns a range of rows) and on GPUs (sorted by token).
"""

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

from modeling_gpt2scratch.modeling_gpt2scratch import GPT2ScratchModel, GPT2ScratchPositionEmbedding


@torch.library.custom_op("gpt2scratch::embedding_gradient", mutates_args=())
def embedding_gradient(grad_output: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the gradient (rows, C) of an embedding table, from the looked-up `ids` (B, T) and `grad_output` (B, T, C).
    This is a custom operator so that the compiler calls it unchanged, without atomic additions."""
    return torch.ops.aten.embedding_dense_backward(grad_output, ids, rows, -1, False)


@embedding_gradient.register_fake
def _(grad_output: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    return grad_output.new_empty(rows, grad_output.shape[-1])


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)  # (V, C), (B, T) -> (B, T, C)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        return embedding_gradient(grad_output.contiguous(), ids, ctx.rows), None


class DeterministicEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Lookup.apply(self.weight, input)


class DeterministicPositionEmbedding(GPT2ScratchPositionEmbedding, DeterministicEmbedding):
    """Position embedding whose lookup is `DeterministicEmbedding`, the next class in the method resolution order."""


def make_embeddings_deterministic(model: GPT2ScratchModel) -> None:
    """Make the embedding gradients of a model deterministic. Parameters, names and forward values do not change."""
    model.wte.__class__ = DeterministicEmbedding
    if model.wpe is not None:
        model.wpe.__class__ = DeterministicPositionEmbedding
