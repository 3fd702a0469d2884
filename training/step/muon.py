"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of the blocks, Adam for all other weights."""

from collections import defaultdict
from typing import Any

import torch

from training.step.tensors import local, shard_like, whole_like

# Steepest slope at zero that still converges into [0.7, 1.2] (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
Members = list[tuple[torch.Tensor, dict[str, Any]]]  # parameters, each with its group
MOMENTUM_WARMUP, FIRST_MOMENTUM, MOMENTUM = 300, 0.85, 0.95  # steps, and the momentum before and after them


def momentum_at(step: int) -> float:
    """Return the momentum of a step, a function of the step alone, so that a resumed run has the same."""
    return FIRST_MOMENTUM + (MOMENTUM - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_WARMUP)


def orthogonalize(matrices: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix U V^T of each matrix U S V^T, approximately: singular values are about
    0.7 to 1.2. This is a Newton-Schulz iteration with a polynomial of degree five, which needs matrix products only.
    `matrices`: (n, r, c) with r <= c, in fp32. Their memory is reused. `precision`: dtype of the products. bf16 is
    enough, and faster where the device has instructions for it."""
    a, b, c = COEFFICIENTS
    X = matrices.div_(matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7).to(precision)  # (n, r, c)
    del matrices  # frees the stack in fp32 if the products are in bf16
    for _ in range(ITERATIONS):
        A = X @ X.mT  # (n, r, r)
        A = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, A, X, beta=a)
    return X


class Muon(torch.optim.AdamW):
    """Optimizer with two kinds of parameter groups.

    A group with `rule` "muon" has the keys `lr`, `weight_decay`, `momentum` and `matrices`, the number of matrices that
    its parameters hold one below the other: 3 for the fused query-key-value projection. A group with `rule` "adam" has
    the keys `lr`, `weight_decay`, `betas` and `eps`. Weight decay is decoupled.

    `found_inf` and `grad_scale` are set by a gradient scaler or `skip_if_not_finite`: if `found_inf` is 1, a step
    changes nothing, and the host does not wait for the device. Gradients must be unscaled before.

    With sharded parameters (DTensor), momentum is sharded too. Every process gathers all updates and orthogonalizes all
    of them, with the same kernels, so that all processes compute the weights that a single process would.
    """

    def __init__(self, groups: list[dict[str, Any]], fused: bool, precision: torch.dtype):
        super().__init__(groups, fused=fused)
        self.precision = precision

    def __setstate__(self, state: dict[str, Any]) -> None:  # Adam's own needs a step count of each parameter
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters. Matrices of one shape, (r, c) or (c, r), are updated together."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["rule"] == "adam"]
        super().step()
        self.param_groups = groups
        by_shape = defaultdict(list)
        for group in [group for group in groups if group["rule"] == "muon"]:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                if not self.state[parameter]:
                    self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                rows, columns = parameter.shape[0] // group["matrices"], parameter.shape[1]
                by_shape[frozenset((rows, columns))].append((parameter, group))
        for members in by_shape.values():
            self._update_together(members)

    def _update_together(self, members: Members) -> None:
        """Update parameters, each with its group, whose matrices become one stack (n, r, c) with r <= c."""
        found_inf = getattr(self, "found_inf", None)
        scale = 1.0 if found_inf is None else 1.0 - found_inf  # factor of the update: 0 for a skipped step
        orthogonal = iter(orthogonalize(self._stack_of_updates(members, found_inf), self.precision))
        for parameter, group in members:
            rows, columns = parameter.shape[0] // group["matrices"], parameter.shape[1]
            matrices = [next(orthogonal) for _ in range(group["matrices"])]
            update = torch.cat([matrix if rows <= columns else matrix.mT for matrix in matrices])
            rate, shard = group["lr"] * max(1.0, rows / columns) ** 0.5, local(parameter)
            shard.mul_(1.0 - group["lr"] * group["weight_decay"] * scale)
            shard.sub_(local(shard_like(update, parameter)).to(shard.dtype) * (rate * scale))

    def _stack_of_updates(self, members: Members, found_inf: torch.Tensor | None) -> torch.Tensor:
        """Return Nesterov's updates of all matrices as one stack (n, r, c). Separate copies are freed."""
        updates = zip(members, self._momentum_updates(members, found_inf), strict=True)
        matrices = [matrix for (_, group), update in updates for matrix in update.chunk(group["matrices"])]
        return torch.stack([matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT for matrix in matrices])

    def _momentum_updates(self, members: Members, found_inf: torch.Tensor | None) -> list[torch.Tensor]:
        """Update the momentum and return Nesterov's update of each parameter, whole. A skipped step keeps it."""
        momentum = members[0][1]["momentum"]  # the same in all groups
        buffers = [local(self.state[parameter]["momentum_buffer"]) for parameter, _ in members]
        gradients = [local(parameter.grad) for parameter, _ in members]
        if found_inf is not None:
            pairs = zip(buffers, gradients, strict=True)
            gradients = [torch.where(found_inf.bool(), buffer, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        return [whole_like(update, parameter) for update, (parameter, _) in zip(updates, members, strict=True)]
