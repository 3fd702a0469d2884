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
    """Return the sizes of a model."""
    key = str(vars(config))
    if key not in _SIZES:
        with torch.device("meta"):
            model = GPT2ScratchForCausalLM(deepcopy(config))
        blocks = model.transformer.h
        products, mlp_products = _products(blocks), sum(_products(block.mlp) for block in blocks)
        _SIZES[key] = ModelSize(model.num_parameters(), products + _products(model.lm_head), products, mlp_products)
    return _SIZES[key]


def _products(module: nn.Module) -> int:
    """Return the number of weights of the linear layers in a module."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
