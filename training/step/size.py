"""Sizes of a model, counted on the model itself, on the meta device, which holds no weights."""

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM


class ModelSize(NamedTuple):
    parameters: int  # a tied head counts once
    products: int  # weights in matrix products, with the head, tied or not
    block_products: int  # of these, the weights of the blocks
    mlp_products: int  # of these, the weights of the MLPs


_SIZES: dict[str, ModelSize] = {}  # a choice for --budget asks for the same sizes many times


def size_of(config: GPT2ScratchConfig) -> ModelSize:
    """Return the sizes of a model, whose blocks all have the size of the first."""
    key = str(vars(config))
    if key not in _SIZES:
        single = deepcopy(config)
        single.n_layer = 1
        with torch.device("meta"):
            model = GPT2ScratchForCausalLM(single)
        block, L = model.transformer.h[0], config.n_layer
        parameters = model.num_parameters() + (L - 1) * sum(parameter.numel() for parameter in block.parameters())
        products = L * _products(block)
        _SIZES[key] = ModelSize(parameters, products + _products(model.lm_head), products, L * _products(block.mlp))
    return _SIZES[key]


def _products(module: nn.Module) -> int:
    """Return the number of weights of the linear layers in a module."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
