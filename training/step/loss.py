"""Next-token loss, computed from hidden states in chunks: the full logits are never materialized."""

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training.data.tokens import IGNORE_INDEX

CHUNKS = 8  # chunks of the batch's rows; logits exist for one chunk at a time
COMPILED_CHUNKS = 4  # on a GPU, where a chunk's logits exist only in bf16 and each chunk costs five kernel launches
ENOUGH_ROWS = 1024  # minimum rows per chunk, for efficient matrix products
MULTIPLE = 128  # columns are padded to a multiple of this for fast matrix kernels: 50257 -> 50304, as in nanoGPT


class DivergenceError(UserError):
    """Error for diverged training: the weights after `weights_after` steps compute a non-finite loss."""

    def __init__(self, problem: str, weights_after: int | None = None):
        super().__init__(f"{problem}: training has diverged. Lower learning_rate or raise warmup_steps, and resume.")
        self.weights_after = weights_after


class NextTokenLoss(nn.Module):
    """Model and loss in one module, so that they compile into one graph."""

    def __init__(self, model: GPT2ScratchForCausalLM):
        super().__init__()
        self.model = model
        self.linear_cross_entropy = linear_cross_entropy  # an attribute, so that a caller can compile it separately

    def forward(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        divisor: int,
        positions: torch.Tensor | None = None,
        second_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cross-entropy of `targets` (B, T) after `inputs` (B, T), summed and divided by `divisor`. -100 is
        ignored. If `positions` (B, T) restart within a row, attention restarts too. In eager mode, Transformers then
        checks whether any do, which waits for the device. `second_weight`: weight, (), of the second targets in the
        gradient."""
        outputs = self.model.transformer(input_ids=inputs, position_ids=positions, use_cache=False)
        hidden_states = outputs.last_hidden_state.flatten(0, 1)  # (B * T, C)
        second = () if second_weight is None else (second_targets(targets, positions).flatten(), second_weight)
        head = self.model.lm_head.weight
        return self.linear_cross_entropy(hidden_states, head, targets.flatten(), *second) / divisor


def second_targets(targets: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return the target after each of `targets` (B, T): -100 at the end of a row, and where the target between is the
    start of another document."""
    following = F.pad(targets[:, 1:], (0, 1), value=IGNORE_INDEX)
    if positions is None:
        return following
    crosses = F.pad(positions[:, 1:] == 0, (0, 1))
    return following.masked_fill(crosses, IGNORE_INDEX)


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    second: torch.Tensor | None = None,
    second_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the summed cross-entropy of `targets` (N,) under the logits of `hidden_states` (N, C) @ `weight` (V, C).T.
    Matrix products use autocast's precision, everything else fp32. The gradient is that of the cross-entropy plus
    `second_weight`, (), times the cross-entropy of `second` (N,) under the same logits; the returned value is not."""
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden_states, weight, targets, second, second_weight)
    states, matrix = _operands(hidden_states, weight)
    total = torch.zeros((), device=targets.device)
    for rows in _chunks(states):
        total += _nats(_log_probabilities(states[rows], matrix, len(weight)), targets[rows])
    return total


@torch.no_grad()
def token_nats(hidden_states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token in nats, (N,) in fp32, as summed by `linear_cross_entropy`; 0 if ignored."""
    states, matrix = _operands(hidden_states, weight)
    parts = []
    for rows in _chunks(states):
        log_probabilities = _log_probabilities(states[rows], matrix, len(weight))
        parts.append(F.nll_loss(log_probabilities, targets[rows], reduction="none", ignore_index=IGNORE_INDEX))
    return torch.cat(parts)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients in the forward pass, per chunk, as in Liger Kernel (Hsu et al. 2024).
    The logits exist at that time, so no tensor of size (N, V) is kept, and nothing is recomputed."""

    @staticmethod
    def forward(
        ctx,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        second: torch.Tensor | None,
        second_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        (states, matrix), V = _operands(hidden_states, weight), len(weight)
        columns = torch.arange(V, device=targets.device)
        total = torch.zeros((), device=targets.device)
        grad_states = torch.empty_like(states)
        grad_matrix = torch.zeros(matrix.shape, device=matrix.device)  # in fp32, because it sums over chunks
        for rows in _chunks(states):
            log_probabilities = _log_probabilities(states[rows], matrix, V)
            # Not in place: with a result that was changed in place, torch 2.11 compiles all gradients to zero.
            total = total + _nats(log_probabilities, targets[rows])
            labels = targets[rows, None]
            scale, hits = (labels != IGNORE_INDEX).float(), (columns == labels).float()  # (n, 1), (n, V)
            if second_weight is not None:
                labels = second[rows, None]
                scale = scale + second_weight * (labels != IGNORE_INDEX)
                hits = hits + torch.where(columns == labels, second_weight, 0.0)
            # Gradient of the logits, unscaled: its values are between -2 and 2, which fp16 can represent.
            gradient = log_probabilities.exp() * scale - hits
            gradient = gradient.to(states.dtype)
            if len(matrix) > V:
                gradient = F.pad(gradient, (0, len(matrix) - V))
            grad_states[rows] = gradient @ matrix
            grad_matrix += gradient.T @ states[rows]
        ctx.save_for_backward(grad_states.to(hidden_states.dtype), grad_matrix[:V].to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        grad_hidden_states, grad_weight = ctx.saved_tensors
        return grad_hidden_states * grad_output, grad_weight * grad_output, None, None, None


def _operands(hidden_states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states (N, C) and the weight (V, C) in autocast's precision. The weight is zero-padded to a
    number of rows that matrix kernels prefer, if the padding is small."""
    device, V = weight.device.type, len(weight)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    matrix = weight.to(dtype)
    if V % MULTIPLE and V > 8 * MULTIPLE:
        matrix = F.pad(matrix, (0, 0, 0, -V % MULTIPLE))
    return hidden_states.to(dtype), matrix


def rows_of_chunk(N: int, compiled_for_gpu: bool) -> int:
    """Return the number of rows per chunk for N rows."""
    return min(N, max(ENOUGH_ROWS, -(-N // (COMPILED_CHUNKS if compiled_for_gpu else CHUNKS))))


def _chunks(states: torch.Tensor) -> list[slice]:
    """Return the row slices of the chunks."""
    N = len(states)
    size = rows_of_chunk(N, states.is_cuda and torch.compiler.is_compiling())
    return [slice(start, start + size) for start in range(0, N, size)]


def _log_probabilities(states: torch.Tensor, matrix: torch.Tensor, V: int) -> torch.Tensor:
    """Return log-probabilities (n, V) in fp32."""
    return (states @ matrix.T)[:, :V].float().log_softmax(dim=-1)


def _nats(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss in nats of `targets` (n,) under `log_probabilities` (n, V)."""
    if log_probabilities.is_cuda:
        return _nats_of_one_kernel(log_probabilities, targets)
    return F.nll_loss(log_probabilities, targets, reduction="sum", ignore_index=IGNORE_INDEX)


def _nats_of_one_kernel(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the value of `_nats`, computed as a sum over all columns, which Inductor fuses into the kernel that reads
    the logits. A gather would be fused across chunks instead, which keeps all logits: 2.1 GB for 64 x 512 x 32,000."""
    is_target = torch.arange(log_probabilities.shape[1], device=targets.device) == targets[:, None]
    return -torch.where(is_target, log_probabilities, 0.0).sum()
