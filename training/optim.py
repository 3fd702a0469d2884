"""AdamW, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from limits import setting


@dataclass
class OptimArguments:
    learning_rate: float = setting(6e-4, "Peak learning rate.", above=0, maximum=100)
    min_learning_rate: float = setting(6e-5, "Learning rate of the last step.", minimum=0, maximum=100)
    warmup_steps: int = setting(100, "Steps over which the rate rises linearly to its peak.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "How the rate falls from its peak to min_learning_rate; constant: it does not."
    )
    weight_decay: float = setting(0.1, "Decoupled weight decay, on matrices only.", minimum=0, maximum=1000)
    adam_beta1: float = setting(0.9, "Decay of AdamW's first moment.", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "Decay of AdamW's second moment.", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "Added to AdamW's denominator.", minimum=1e-20, maximum=1)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm; 0: never.")

    def problems(self) -> list[str]:
        if self.min_learning_rate <= self.learning_rate:
            return []
        return [
            f"min_learning_rate is {self.min_learning_rate}; it must be between 0 and learning_rate, {self.learning_rate}."
        ]


def learning_rate_at(step: int, max_steps: int, arguments: OptimArguments) -> float:
    """The rate of step 0 .. max_steps - 1: linear warm-up to the peak, then down to `min_learning_rate` at the last."""
    peak, floor, warmup = arguments.learning_rate, arguments.min_learning_rate, arguments.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if arguments.lr_scheduler_type == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, max_steps - 1 - warmup))  # 0 .. 1
    if arguments.lr_scheduler_type == "linear":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, arguments: OptimArguments, device: torch.device) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices and leaves biases and LayerNorms alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": arguments.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=device.type in ("cuda", "cpu"),
    )
