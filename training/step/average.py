"""Exponential moving average of the weights (Polyak and Juditsky 1992, with a horizon)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from training.step.tensors import local, whole_like


class WeightAverage:
    """Average of a model's weights in fp32, as large as the weights, sharded like them."""

    def __init__(self, model: nn.Module, horizon: int):
        """`horizon`: steps after which a weight counts 1 / e in the average. Before that many, all count alike."""
        self.horizon = horizon
        self.parameters = dict(model.named_parameters())
        self.averages = {name: local(parameter).detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after step `step`, counted from 0. Nothing here waits for the device."""
        share = max(1 / self.horizon, 1 / (step + 1))
        torch._foreach_lerp_([*self.averages.values()], self._weights(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averages as its weights, and this object has the weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full average of each weight with its name. All processes must call this."""
        for name, parameter in self.parameters.items():
            yield name, whole_like(self.averages[name], parameter)

    def _weights(self) -> list[torch.Tensor]:
        return [local(parameter).detach() for parameter in self.parameters.values()]

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._weights(), self.averages.values(), strict=True):
            copy = weight.clone()
            weight.copy_(average)
            average.copy_(copy)
