"""Checks that the model learns, in the first steps of a process.

A compiler, a driver or a changed line of code can break training without an error: the loss is computed, but the
weights do not change, or change differently in each process. Every check uses values that the host reads anyway, or
runs once.
"""

import math
import statistics
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from common.errors import UserError
from training.guard.health import WINDOW, Health
from training.plan.plan import Plan
from training.step.optim import SCALARS
from training.step.tensors import local
from training.step.train_step import TrainStep

# Until every weight has a gradient: a head and projections that start at zero pass on none in the first steps.
STEPS = 4
LONG = 2 * WINDOW  # steps after which the loss must differ from the first one
SAME = 2e-3  # relative difference of losses that counts as none
# allowed nats between the first loss and that of equal probabilities, without the effect of the initial weights
FAR = 0.5
DISAGREE = 0.1  # distance between the weights of two processes, as a fraction of the distance that training moved them


class LearningCheck:
    """Checks of a process's first steps. All processes come to the same conclusion."""

    def __init__(self, train_step: TrainStep, plan: Plan, is_new: bool):
        """`is_new`: the weights are random, so the first loss is predictable."""
        self.model, self.optimizer = train_step.model, train_step.optimizer.optimizer
        self.accelerator, self.plan = train_step.accelerator, plan
        self.before: torch.Tensor | None = self._columns()  # until the weights have been checked
        self.first_loss: float | None = None
        self.checks_loss = is_new

    def check(self, step: int, health: Health) -> Iterator[str]:
        """Yield a warning about the first loss, if any, after `step` steps, whose losses `health` has read. Raise a
        `UserError` if the model does not learn."""
        losses = [loss for loss in health.losses if loss is not None]
        if health.finite_steps and health.largest_norm == 0 and losses[-1] > 0:  # a loss of 0 leaves nothing to learn
            raise _broken("All gradients are exactly zero")
        if self.before is not None and health.finite_steps >= STEPS and health.largest_norm:
            self._check_weights(self.before)
            self.before = None
        if self.checks_loss and losses:
            yield from self._check_loss(step, losses)

    def _check_loss(self, step: int, losses: list[float]) -> Iterator[str]:
        config = self.model.config
        if self.first_loss is None:
            self.first_loss, lowest = losses[0], math.log(config.vocab_size)
            highest, usual = lowest, f"{lowest:.2f}, their logarithm"
            if config.is_modern and config.tie_word_embeddings:  # predicts the input, which may be the target, too
                own = config.n_embd * config.initializer_range
                highest = own + math.log1p(config.vocab_size * math.exp(-own))
                usual += f", to {highest:.2f}"
            # Logits of variance n_embd * initializer_range^2 add half of it to the loss. Twice as much is allowed.
            distance = FAR + config.n_embd * config.initializer_range**2
            if not lowest - distance <= self.first_loss <= highest + distance:
                yield (
                    f"The first loss is {self.first_loss:.2f}, but a new model with {config.vocab_size:,} tokens "
                    f"starts near {usual}. Check what you changed in the model, or compare with "
                    "--torch_compile false."
                )
        if step >= LONG and self.plan.after(step).tokens >= self.model.num_parameters():
            self.checks_loss, recent = False, statistics.fmean(losses[-WINDOW // 2 :])
            if abs(recent - self.first_loss) < SAME * self.first_loss:
                raise _broken(f"The loss is {recent:.4f} after {step:,} steps, the same as at the first one")

    def _check_weights(self, old: torch.Tensor) -> None:
        """Raise a `UserError` if no weight changed since `old`, if a parameter has no gradient, or if processes have
        different weights."""
        new, averages = self._columns(), {}  # averages of gradients
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                state = self.optimizer.state.get(parameter, {})  # empty: the optimizer got no gradient
                moments = (moment for key, moment in state.items() if key not in SCALARS)
                averages[name] = local(next(moments, torch.zeros(1)))
        signs = torch.stack([(new != old).any(), *(average.any().to(new.device) for average in averages.values())])
        # Summed over processes, because one may have no rows of a sharded matrix.
        has_changed, *has_gradient = self.accelerator.reduce(signs.float()).tolist()
        if not has_changed:
            raise _broken("No weight has changed")
        dead = [name for name, count in zip(averages, has_gradient, strict=True) if not count]
        if 0 < len(dead) < len(averages):  # all: an optimizer without moments, such as SGD without momentum
            raise _broken(f"{len(dead)} of {len(averages)} parameters have no gradient or only zeros ({dead[0]} ...)")
        if self.accelerator.num_processes > 1 and not isinstance(self.model.lm_head.weight, DTensor):
            weights = self.accelerator.gather(torch.stack([old, new])[None])  # (processes, 2, n)
            movement = (weights[0, 1] - weights[0, 0]).norm()
            if (weights[:, 1] - weights[0, 1]).norm(dim=1).max() > DISAGREE * movement:
                raise _broken("The processes have different weights")

    def _columns(self) -> torch.Tensor:
        """Return a copy of the first column of every matrix, (n,): one value per row, so per token of an embedding."""
        matrices = (local(weight.detach()) for weight in self.model.parameters() if weight.dim() >= 2)  # tied ones once
        return torch.cat([matrix[:, 0] for matrix in matrices]).to(self.accelerator.device)


def _broken(problem: str) -> UserError:
    return UserError(
        f"{problem}: the model does not learn. Unless learning_rate is close to 0 or you changed the model, this is "
        f"an error of PyTorch {torch.__version__}, its compiler or the driver: try --torch_compile false, or another "
        "version."
    )
