"""Saved tensors: whole, in fp32, and verified on reading."""

from collections.abc import Iterator, Mapping
from pathlib import Path

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


def read_tensors(path: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file with their names, one at a time, so that callers can keep only a shard.
    Raise a `UserError` if the file cannot be read, or if names, shapes, types or values are not those of a saved run
    with these `shapes`."""
    try:
        with safe_open(path, framework="pt") as file:
            if wrong := sorted(set(file.keys()) ^ shapes.keys()):
                names = ", ".join(wrong[:5])
                raise UserError(f"{path} does not fit the model of config.json and its optimizer: {names}.")
            for name, shape in shapes.items():
                tensor = file.get_tensor(name)
                if tensor.shape != shape or tensor.dtype != torch.float32:
                    problem = f"{tuple(tensor.shape)} of {tensor.dtype} instead of {tuple(shape)} of torch.float32"
                    raise UserError(f"{path}: {name} is {problem}; resume from another checkpoint.")
                if not tensor.sum().isfinite() and not tensor.isfinite().all():
                    raise UserError(f"{path}: {name} is not finite; resume from another checkpoint.")
                yield name, tensor
    except (SafetensorError, OSError) as error:  # OSError: another run may have pruned it meanwhile
        raise UserError(f"{path} cannot be read ({error}); resume from another checkpoint.") from error


@torch.no_grad()
def load_checkpoint_weights(path: Path, model: nn.Module) -> None:
    """Load a safetensors file into `model`, which is not yet sharded. Raise a `UserError` like `read_tensors`."""
    parameters = dict(model.named_parameters())  # without a tied head
    for name, tensor in read_tensors(path, {name: parameter.shape for name, parameter in parameters.items()}):
        parameters[name].copy_(tensor)
