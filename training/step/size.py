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
        _SIZES[key] = _count(config)
    return _SIZES[key]


def _count(config: GPT2ScratchConfig) -> ModelSize:
    single = deepcopy(config)
    single.n_layer = 1
    with torch.device("meta"):
        model = GPT2ScratchForCausalLM(single)
    block, L = model.transformer.h[0], config.n_layer
    block_products = L * _products(block)
    return ModelSize(
        parameters=model.num_parameters() + (L - 1) * sum(parameter.numel() for parameter in block.parameters()),
        products=block_products + _products(model.lm_head),
        block_products=block_products,
        mlp_products=L * _products(block.mlp),
    )


def _products(module: nn.Module) -> int:
    """Return the number of weights of the linear layers in a module."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
