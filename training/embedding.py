"""Embeddings whose gradient is the same in every run.

Inductor computes the gradient of a lookup by atomic additions from several threads, whose order differs from run to run,
and so does the rounding (seen on two CPU threads: other weights from step 4 to 8 on). PyTorch's own kernel adds up
the rows of a token in the order of the batch, on CPUs (each thread owns a range of rows) and on GPUs (sorted by token).
"""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody gives it
from torch import nn

from modeling_gpt2scratch.modeling_gpt2scratch import GPT2ScratchModel, GPT2ScratchPositionEmbedding


@torch.library.custom_op("gpt2scratch::embedding_gradient", mutates_args=())
def embedding_gradient(grad_output: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the gradient (rows, C) of a table of which `ids` (B, T) were looked up, from `grad_output` (B, T, C).

    An operator of its own, which the compiler calls as it is instead of decomposing it into atomic additions.
    """
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
    """Adds positions looked up by `DeterministicEmbedding`, which comes next in the order of resolution."""


def make_embeddings_deterministic(model: GPT2ScratchModel) -> None:
    """Change how gradients are computed; parameters, their names and the values of the forward pass stay."""
    model.wte.__class__ = DeterministicEmbedding
    model.wpe.__class__ = DeterministicPositionEmbedding
