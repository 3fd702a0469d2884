"""Saved tensors: whole, in fp32, and verified on reading."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import UserError

STATE_FOLDER = "training_state"  # folder in a checkpoint
WEIGHTS, OPTIMIZER = "model.safetensors", f"{STATE_FOLDER}/optimizer.safetensors"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor as a full one. All processes must call this. A plain tensor is returned as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of `full`, placed and divided like `parameter`. Every process must pass the same
    `full`. If the parameter is plain or `full` is a scalar (AdamW's step count), `full` is returned as is."""
    if not isinstance(parameter, DTensor) or full.dim() == 0:
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to(parameter.device)


def whole_like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a `shard` that is divided like `parameter`. All processes must call this."""
    if not isinstance(parameter, DTensor):
        return shard
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(shard, parameter.device_mesh, parameter.placements, **layout).full_tensor()


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raise a `UserError` if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}); resume from another checkpoint.") from error


def verified(tensor: torch.Tensor, name: str, shape: torch.Size, path: Path) -> torch.Tensor:
    """Return the tensor. Raise a `UserError` if its shape, type or values are not those of a saved run."""
    problem = None
    if tensor.shape != shape or tensor.dtype != torch.float32:
        problem = f"{tuple(tensor.shape)} of {tensor.dtype} instead of {tuple(shape)} of torch.float32"
    elif not tensor.sum().isfinite() and not tensor.isfinite().all():
        problem = "not finite"
    if problem is not None:
        raise UserError(f"{path}: {name} is {problem}; resume from another checkpoint.")
    return tensor


def load_checkpoint_weights(path: Path, model: nn.Module) -> None:
    """Load a safetensors file into `model`, which is not yet sharded. Raise a `UserError` if they do not match."""
    parameters = dict(model.named_parameters())  # without a tied head
    with open_tensors(path) as file, torch.no_grad():
        if wrong := sorted(set(file.keys()) ^ parameters.keys()):
            raise UserError(f"{path} does not fit its config.json: {', '.join(wrong[:5])}.")
        for name, parameter in parameters.items():
            parameter.copy_(verified(file.get_tensor(name), name, parameter.shape, path))
