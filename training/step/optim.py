"""Optimizer: parameter groups, state per parameter, learning rate schedule, and skipped steps.

All code that depends on the kind of optimizer is here and in muon.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from common.limits import setting
from modeling_gpt2scratch import GPT2ScratchConfig
from training.step.model import ModelArguments
from training.step.muon import Muon, momentum_at
from training.step.size import ModelSize, size_of
from training.step.tensors import local, read_tensors, shard_like


@dataclass
class OptimArguments:
    """The defaults are those of AdamW; `with_defaults` replaces them for Muon."""

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for the matrices of the blocks, Adam for all other parameters.", resume="fixed"
    )
    learning_rate: float = setting(6e-4, "Peak learning rate; with muon 0.02, of the blocks.", above=0, maximum=100)
    embedding_learning_rate: float | None = setting(
        None, "Peak rate of the embeddings. Default: learning_rate; with muon by width.", above=0, maximum=100
    )
    head_learning_rate: float | None = setting(
        None, "Peak rate of the head, with muon also of vectors and positions. Defaults as above.", above=0, maximum=100
    )
    min_learning_rate: float = setting(
        6e-5, "learning_rate of the last step, with muon 0; other rates fall alike.", minimum=0, maximum=100
    )
    warmup_steps: int = setting(100, "Steps of linear learning rate warm-up to the peak; with muon 0.")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = setting(
        "cosine", "Decay of the rates. warmup_stable_decay, the default with muon: constant, then linear."
    )
    cooldown_fraction: float = setting(0.6, "Share of steps in which warmup_stable_decay decays.", minimum=0, maximum=1)
    weight_decay: float = setting(
        0.1, "Decoupled weight decay of matrices; with muon 0.05, of the blocks only.", minimum=0, maximum=1000
    )
    adam_beta1: float = setting(0.9, "Decay of Adam's first moment; with muon 0.8.", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "Decay of Adam's second moment.", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "Added to Adam's denominator; with muon 1e-10.", minimum=1e-20, maximum=1)
    max_grad_norm: float = setting(1.0, "Maximum gradient norm for clipping; 0 disables clipping.")
    second_target_weight: float | None = setting(
        None, "Weight of the token after the next as a second target; it falls linearly to 0.", minimum=0, maximum=1
    )
    second_target_steps: int | None = setting(
        None, "Steps after which the weight of second targets is 0. Default: 60% of the steps.", minimum=1
    )
    induction_init: bool = setting(
        False,
        "Start with two attention heads that find what followed the current token before.",
        resume="refused",
    )
    weight_average: int | None = setting(
        None,
        "Average the weights over about so many last steps; validations and the saved model use the average.",
        minimum=2,
        maximum=10**9,
        resume="fixed",
    )

    def problems(self) -> Iterator[str]:
        lowest, peak = self.min_learning_rate, self.learning_rate
        if lowest > peak and self.lr_scheduler_type != "constant":
            yield f"min_learning_rate is {lowest}; it must be between 0 and learning_rate, {peak}."


SECOND_TARGET_SHARE = 0.6  # share of the steps in which second targets have a weight

# Settings of modded-nanogpt's plain recipe for Muon (track_3_optimization, record 36, for 12 layers of width 768).
MUON_RATES = {"learning_rate": 0.02, "embedding_learning_rate": 0.3, "head_learning_rate": 0.004}
MUON_DEFAULTS = {
    "min_learning_rate": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "warmup_stable_decay",
    "weight_decay": 0.05,
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-10,
}


def with_defaults(
    arguments: OptimArguments,
    given: set[str],
    tokens_per_step: int,
    model: ModelArguments | GPT2ScratchConfig,
    is_pretrained: bool = False,
) -> OptimArguments:
    """Return the arguments with Muon's defaults for the settings that are not `given`. AdamW's arguments are returned
    as they are. Muon's rate does not depend on the width. Adam's rates are those of width 768 times sqrt(768 / width).
    For a larger global batch B than 2^19, all rates are multiplied by sqrt(B / 2^19), as in nanochat; for smaller ones,
    the rule does not hold (docs/log.md). Those of a pretrained model are as much lower as the given rate, or a
    sixth, as in presets/continued.yaml. An embedding that is a head too, or is not normalized, has small values and
    therefore the head's rate."""
    if arguments.optimizer != "muon":
        return arguments
    scale = max(1.0, math.sqrt(tokens_per_step / 2**19))
    if is_pretrained:
        scale = arguments.learning_rate / MUON_RATES["learning_rate"] if "learning_rate" in given else 1 / 6
    rates = {name: rate * scale for name, rate in MUON_RATES.items()}
    for name in ("embedding_learning_rate", "head_learning_rate"):
        rates[name] *= math.sqrt(768 / model.n_embd)
    if not model.has_large_embedding:
        rates["embedding_learning_rate"] = arguments.head_learning_rate or rates["head_learning_rate"]
    defaults = {name: value for name, value in (rates | MUON_DEFAULTS).items() if name not in given}
    return replace(arguments, **defaults)


# Keys of the fp32 tensors in the optimizer's state of a parameter, by the rule of its group.
MOMENTS = {"adam": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
SCALARS = {"step"}  # a single number instead of one per weight
WEIGHT = "weight"  # key of the weight itself, if the checkpoint's model is an average of weights
# Temporary bytes of Muon's step per weight of its largest stack, with products in (fp32, bf16): X, the next X and A, or
# the updates and their stack. Counted for 12 layers of width 768 and 1,024 (tests/fake_cuda).
MUON_BYTES = (9, 8)


def build_optimizer(
    model: nn.Module, arguments: OptimArguments, device: torch.device, precision: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """Build the optimizer of a model. `precision`: dtype of Muon's matrix products."""
    groups, fused = parameter_groups(model, arguments), device.type in ("cuda", "cpu")
    if arguments.optimizer == "muon":
        return Muon(groups, fused, precision)
    return torch.optim.AdamW(groups, fused=fused)  # Loshchilov and Hutter 2019


def parameter_groups(model: nn.Module, arguments: OptimArguments) -> list[dict[str, Any]]:
    """Return the optimizer's groups. `initial_lr` of a group is its peak learning rate, and `rule` the key in
    `MOMENTS`. Weight decay applies to matrices; with Muon, only to those of the blocks. A tied head is an embedding."""
    uses_muon = arguments.optimizer == "muon"
    embedding, head = arguments.embedding_learning_rate, arguments.head_learning_rate
    peaks = {"wte": embedding, "wpe": head if uses_muon else embedding, "lm_head": head}  # positions: not normalized
    adam = {"rule": "adam", "betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    muon = {"rule": "muon", "momentum": momentum_at(0)}
    groups: dict[tuple, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix, matrices = parameter.dim() >= 2, 3 if name.endswith("attn.c_attn.weight") else 1
        by_muon = uses_muon and is_matrix and ".h." in name
        peak = peaks.get(name.split(".")[-2], head if uses_muon and not by_muon else None) or arguments.learning_rate
        decay = arguments.weight_decay if is_matrix and (by_muon or not uses_muon) else 0.0
        rule = muon | {"matrices": matrices} if by_muon else adam
        group = {"params": [], "weight_decay": decay, "lr": peak, "initial_lr": peak, **rule}
        groups.setdefault((by_muon and matrices, peak, decay), group)["params"].append(parameter)
    return list(groups.values())


def schedule(step: int, max_steps: int, arguments: OptimArguments) -> float:
    """Return the factor of each group's peak learning rate at step 0 .. max_steps - 1.
    It rises linearly to 1 in the warm-up, then decays to `min_learning_rate / learning_rate` at the last step."""
    floor, warmup = arguments.min_learning_rate / arguments.learning_rate, arguments.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    kind = arguments.lr_scheduler_type
    if kind == "constant":
        return 1.0
    start = max(warmup, cooldown_start(max_steps, arguments))
    progress = min(1.0, max(0, step - start) / max(1, max_steps - 1 - start))  # 0 .. 1
    if kind == "cosine":
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 + (floor - 1.0) * progress


def second_target_weight(step: int, max_steps: int, arguments: OptimArguments) -> float | None:
    """Return the weight of the second targets at step 0 .. max_steps - 1, or None if the run has none.

    Multi-token prediction (Gloeckle et al. 2024) without more heads: the weight falls to 0, so that only the next token
    counts at the end.
    """
    peak, end = arguments.second_target_weight, arguments.second_target_steps or SECOND_TARGET_SHARE * max_steps
    return peak * max(0.0, 1.0 - step / end) if peak else None


def cooldown_start(max_steps: int, arguments: OptimArguments) -> int:
    """Return the number of steps of `warmup_stable_decay` before the rates fall. 0 for other schedules."""
    stable = arguments.lr_scheduler_type == "warmup_stable_decay"
    return round(max_steps * (1.0 - arguments.cooldown_fraction)) if stable else 0


def set_rates(optimizer: torch.optim.Optimizer, step: int, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its peak, and Muon's momentum to that of the step."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        if group["rule"] == "muon":
            group["momentum"] = momentum_at(step)


def skip_if_not_finite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Make the next `step` change nothing, including moments and their step count, if the gradient is not finite.
    PyTorch's fused kernels read `found_inf` on the device. In fp16, the scaler sets it instead."""
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = None, (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():  # waits for the device, but only on Apple GPUs, where Adam is not fused
        optimizer.zero_grad()


def moment_bytes(optimizer: str, size: ModelSize) -> int:
    """Return the bytes of the moments of a model, without the scalars per tensor."""
    return 4 * (2 * size.parameters - (size.block_products if optimizer == "muon" else 0))


def step_bytes(optimizer: str, size: ModelSize, in_bf16: bool) -> int:
    """Return the temporary bytes of an optimizer's step: for Muon's largest stack of matrices, usually the MLPs'."""
    largest = max(size.mlp_products, size.block_products - size.mlp_products)
    return MUON_BYTES[in_bf16] * largest if optimizer == "muon" else 0


def step_work(optimizer: str, model: GPT2ScratchConfig) -> int:
    """Return the operations of an optimizer's step, up to a factor. Muon's grow with the width, too."""
    return size_of(model).parameters * (model.n_embd if optimizer == "muon" else 1)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the name in a checkpoint, such as `transformer.wte.weight/exp_avg`, parameter and key of each moment."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key in MOMENTS[group["rule"]]:
                yield f"{names[parameter]}/{key}", parameter, key


def moment_shapes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Size]:
    """Return the shape of each moment, unsharded, by its name in a checkpoint. No step is needed before."""
    moments = _moments(model, optimizer)
    return {name: torch.Size() if key in SCALARS else parameter.shape for name, parameter, key in moments}


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the optimizer's state with its name in a checkpoint."""
    for name, parameter, key in _moments(model, optimizer):
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter][key]


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights with their names among the moments of a checkpoint whose model is an average of weights."""
    return {f"{name}/{WEIGHT}": parameter for name, parameter in model.named_parameters()}


def load_moments(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, is_averaged: bool = False) -> None:
    """Load the moments of a safetensors file into `optimizer`, built for `model`. Its hyperparameters do not change.
    `is_averaged`: the file also has the weights. Raise a `UserError` like `read_tensors`."""
    weights = named_weights(model) if is_averaged else {}
    shapes = moment_shapes(model, optimizer) | {name: weight.shape for name, weight in weights.items()}
    places = {name: (parameter, key) for name, parameter, key in _moments(model, optimizer)}
    for name, full in read_tensors(path, shapes):
        if name in weights:
            local(weights[name]).data.copy_(local(shard_like(full, weights[name])))
        else:  # a copy: on a CPU, the tensor is a map of the file, which may be deleted during the run
            parameter, key = places[name]
            is_counted_on_host = key in SCALARS and not optimizer.defaults.get("fused")
            device = "cpu" if is_counted_on_host else parameter.device
            optimizer.state[parameter][key] = shard_like(full, parameter).to(device, copy=True)


def usual_learning_rate(parameters: int) -> float:
    """Return the usual peak learning rate of Adam (Kaplan et al. 2020, appendix D.6): 6.4e-4 for 124M parameters. From
    1.5 billion parameters on, it is that of these, the largest of its source."""
    return 0.003239 - 0.0001395 * math.log(min(parameters, 1.5e9))
