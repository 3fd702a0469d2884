"""Devices: peak FLOP/s for model FLOPs utilization (MFU), and rental prices. hardware.yaml holds the figures."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from common import schema
from common.errors import UserError
from common.limits import free

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PRICES_OF, DOLLARS_PER_COLAB_UNIT = _DATA["prices_of"], _DATA["dollars_per_colab_unit"]
DEFAULT_MFU = _DATA["reported_mfu"]["others"]
FILLS_A_GPU = 30e6  # weights in matrix products: the MFU that others report does not apply to smaller models
# Lowest compute capability of PyTorch's builds for CUDA 13. Torch 2.14 is the last for CUDA 12.6 (pytorch#190385).
OLDEST_CAPABILITY = (7, 5)
# Words in a device's name that do not affect its speed. Any other word, as in `RTX 4090 Laptop GPU` or
# `A100-SXM4-40GB MIG 1g.5gb`, makes it a different device.
NOT_THE_MODEL = re.compile(r"NVIDIA|AMD|TESLA|GEFORCE|INSTINCT|GENERATION|OAM|SXM\d?|HBM3E?|\d+GB")


@dataclass(frozen=True)
class Rental:
    """Device that can be rented."""

    name: str
    datasheet: str  # key in `datasheets`
    gigabytes: float  # size of the memory
    dollars: tuple[float, float] | None = None  # per hour: lowest and highest price
    colab_units: float | None = None  # per hour, if Colab offers it


RENTALS = {key: schema.build(rental, Rental) for key, rental in _DATA["rentals"].items()}


@dataclass
class CostArguments:
    hourly_price: float | None = free(None, "Dollars per hour for all devices, for plan, budget, log, report and card.")
    plan: bool = free(False, "Estimate memory, time, cost and disk use, and report problems, without training.")
    plan_device: str | None = free(
        None,
        f"With --plan: estimate for this device, from its datasheet, instead of this machine: {', '.join(RENTALS)}.",
    )
    plan_steps: int = free(
        10,
        "With --plan: 0 measures no steps; otherwise, a GPU measures so many at a time, for seconds. No effect on a "
        "--budget of time or money.",
        maximum=10_000,
    )

    def problems(self) -> Iterator[str]:
        if self.plan_device is not None and self.plan_device not in RENTALS:
            yield f"plan_device is {self.plan_device!r}; it must be one of {', '.join(RENTALS)}."
        elif self.plan_device is not None and not self.plan:
            yield f"plan_device is {self.plan_device}, which only applies with --plan; add --plan or leave it out."


def device_model(name: str) -> str:
    """Return the model in a device's name: `NVIDIA A100-SXM4-80GB` -> `A100`."""
    return " ".join(word for word in re.split("[ -]", name.upper()) if not NOT_THE_MODEL.fullmatch(word))


def check_kernels() -> None:
    """Raise a `UserError` with the remedy if this build of PyTorch has no kernels for the GPU: the first would fail."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability()
    if has_kernels(torch.cuda.get_arch_list(), capability):
        return
    remedy = "update torch"
    if capability < OLDEST_CAPABILITY:
        remedy = "install a build for CUDA 12.6, which PyTorch publishes up to 2.14 (pytorch.org/get-started)"
    raise UserError(
        f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name()} (compute capability "
        f"{'.'.join(map(str, capability))}): {remedy}, or put CUDA_VISIBLE_DEVICES= before the command to use the CPU."
    )


def has_kernels(built_for: list[str], capability: tuple[int, int]) -> bool:
    """Return whether a device can run code built for targets such as `sm_90` or `compute_90`.
    Binaries (sm_) run on later devices of the major version; compute_ targets are compiled for any later device."""
    targets = re.findall(r"(sm|compute)_(\d+)(\d)[af]?\b", " ".join(built_for))
    return any(
        (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0])
        for kind, major, minor in targets
    )


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or an empty string for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak_flops(name: str, mixed_precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its name, or None if unknown. `mixed_precision` is no, bf16 or fp16."""
    tensor_cores, single = _DATA["datasheets"].get(device_model(name), (None, None))
    teraflops = single if mixed_precision == "no" else tensor_cores
    return None if teraflops is None else teraflops * 1e12


def reported_mfu(name: str) -> list[float] | None:
    """Return the lowest, a typical and the highest MFU that others report for GPT-2 on a device, or None without
    reports. The models have 124M to 135M parameters."""
    return _DATA["reported_mfu"].get(device_model(name).partition(" ")[0])
