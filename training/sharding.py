"""stub"""

import torch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def part_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return full
