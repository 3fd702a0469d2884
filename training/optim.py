"""Optimizer: parameter groups, state per parameter, learning rate schedule, and skipped steps.

All code that depends on the optimizer is here; checkpoints, memory estimates and the training step use `OPTIMIZER`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from errors import UserError
from limits import setting
from training.tensors import opened, shard_like, verified


@dataclass
class OptimArguments:
    learning_rate: float = setting(6e-4, "Peak learning rate.", above=0, maximum=100)
    min_learning_rate: float = setting(6e-5, "Learning rate of the last step.", minimum=0, maximum=100)
    warmup_steps: int = setting(100, "Steps of linear learning rate warm-up to the peak.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "Decay of the learning rate from its peak to min_learning_rate; constant: no decay."
    )
    weight_decay: float = setting(0.1, "Decoupled weight decay, applied to matrices only.", minimum=0, maximum=1000)
    adam_beta1: float = setting(0.9, "Decay of AdamW's first moment.", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "Decay of AdamW's second moment.", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "Added to AdamW's denominator.", minimum=1e-20, maximum=1)
    max_grad_norm: float = setting(1.0, "Maximum gradient norm for clipping; 0 disables clipping.")

    def problems(self) -> list[str]:
        if self.min_learning_rate <= self.learning_rate:
            return []
        return [
            f"min_learning_rate is {self.min_learning_rate}; it must be between 0 and learning_rate, {self.learning_rate}."
        ]


class Moment(NamedTuple):
    """Tensor in fp32 that the optimizer stores for each parameter."""

    key: str  # key in the optimizer's state; in a checkpoint, it follows the parameter's name
    at_least: float = -math.inf  # lower bound of the values
    is_scalar: bool = False  # a single number instead of one per weight


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019)."""

    moments = (Moment("step", 0.0, is_scalar=True), Moment("exp_avg"), Moment("exp_avg_sq", 0.0))

    @classmethod
    def build(cls, groups: list[dict[str, Any]], arguments: OptimArguments, device: torch.device) -> "AdamW":
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        return cls(groups, betas=betas, eps=arguments.adam_epsilon, fused=device.type in ("cuda", "cpu"))


OPTIMIZER = AdamW


def build_optimizer(model: nn.Module, arguments: OptimArguments, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer. Weight decay applies to matrices only. `initial_lr` of a group is its peak learning rate."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": arguments.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    peak = arguments.learning_rate
    return OPTIMIZER.build([{**group, "lr": peak, "initial_lr": peak} for group in groups], arguments, device)


def schedule(step: int, max_steps: int, arguments: OptimArguments) -> float:
    """Return the factor of each group's peak learning rate at step 0 .. max_steps - 1.
    It rises linearly to 1 in the warm-up, then decays to `min_learning_rate` at the last step."""
    floor, warmup = arguments.min_learning_rate / arguments.learning_rate, arguments.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if arguments.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, max_steps - 1 - warmup))  # 0 .. 1
    if arguments.lr_scheduler_type == "linear":
        return 1.0 + (floor - 1.0) * progress
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def skip_if_not_finite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Make the next `step` change nothing, including moments and their step count, if the gradient is not finite.

    PyTorch's fused kernels read `found_inf` on the device. In fp16, the scaler sets it; this function is for other precisions.
    """
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = None, (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():  # waits for the device, but only on Apple GPUs, where AdamW is not fused
        optimizer.zero_grad()


def moment_shapes(shape: torch.Size) -> dict[str, torch.Size]:
    return {moment.key: torch.Size() if moment.is_scalar else shape for moment in OPTIMIZER.moments}


def moment_bytes(parameters: int) -> int:
    """Return the bytes of the moments of `parameters` parameters, without the scalars per tensor."""
    return 4 * parameters * sum(not moment.is_scalar for moment in OPTIMIZER.moments)


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the optimizer's state with its name in a checkpoint, such as `transformer.wte.weight/exp_avg`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            yield f"{names[parameter]}/{key}", value


def load_moments(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the moments of a safetensors file into `optimizer`, built for `model`. Its hyperparameters do not change. Raise a
    `UserError` if the file's tensors do not match the optimizer, or hold values that no run writes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with opened(path) as file:  # one tensor at a time: only this process's shard is kept
        wanted = {f"{names[parameter]}/{moment.key}" for parameter in parameters for moment in OPTIMIZER.moments}
        if wrong := sorted(set(file.keys()) ^ wanted):
            raise UserError(f"{path} does not fit the model: {', '.join(wrong[:5])}.")
        for index, parameter in enumerate(parameters):
            state[index] = {}
            for key, at_least, is_scalar in OPTIMIZER.moments:
                name, shape = f"{names[parameter]}/{key}", torch.Size() if is_scalar else parameter.shape
                moment = verified(file.get_tensor(name), name, shape, path, at_least)
                state[index][key] = shard_like(moment, parameter)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def usual_learning_rate(parameters: int) -> float:
    """Return the usual peak learning rate of Adam (Kaplan et al. 2020, appendix D.6): 6.4e-4 for 124M parameters."""
    return 0.003239 - 0.0001395 * math.log(parameters)
