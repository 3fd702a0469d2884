"""Weights, gradients and moments divided among the processes (FSDP2), for models that outgrow one device.

Accelerate's own configuration asks for it (`distributed_type: FSDP`, `fsdp_version: 2`; see launch/fsdp2.yaml). Accelerate
would leave a CPU unsharded and compile before it shards, which no single graph survives; so the sharding is done here, on
every device alike, and Accelerate launches, scales, accumulates and logs as it does for any group of processes.

Each process keeps its share of every tensor: the rows that `torch.chunk` gives to its rank. A block is gathered when it
computes, and let go of again (Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP").
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training.loss import NextTokenLoss

ASKED = "ACCELERATE_USE_FSDP"


@dataclass(frozen=True)
class Sharding:
    """Sharding settings of the launcher."""

    offload: bool = False  # shares and optimizer live in the memory of the CPU


def sharding_asked(notes: list[str]) -> Sharding | None:
    """Return what the environment asks for, if anything; add to `notes` what of it is not used. Raise a `UserError` for FSDP1."""
    if not _is_set(ASKED):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"The launcher's fsdp_version is {version}; set it to 2, as launch/fsdp2.yaml does.")
    if _is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        notes.append("The launcher's fsdp_activation_checkpointing is not used: gradient_checkpointing decides it.")
    if os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        notes.append("The launcher's fsdp_reshard_after_forward is not used: a block is let go of after its forward.")
    return Sharding(offload=_is_set("FSDP_OFFLOAD_PARAMS"))


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1", "yes")


def keep_accelerate_from_sharding() -> None:
    """What was asked is known by now. Transformers reads this variable too, and would load weights in one process only."""
    os.environ[ASKED] = "false"


class ShardedLoss(nn.Module):
    """`NextTokenLoss` over a sharded model, with what `Accelerator.accumulate` looks for in any other."""

    def __init__(self, loss: NextTokenLoss):
        super().__init__()
        self.loss = loss

    def forward(self, *batch: torch.Tensor | int | None) -> torch.Tensor:
        return self.loss.model.next_token_loss(*batch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches but a step's last: their gradients add up where they are, whole and in fp32, instead of
        being divided each time. Saves transfers and costs 4 bytes a parameter."""
        self.loss.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.loss.model.set_requires_gradient_sync(True)


def shard(
    loss: NextTokenLoss, accelerator: Accelerator, sharding: Sharding, compile_settings: dict[str, Any] | None = None
) -> ShardedLoss:
    """Replace the parameters of `loss.model` by shares of themselves, on the device. Every process comes with the same
    weights. An optimizer is built afterwards. `compile_settings`: arguments of `torch.compile`; None: not compiled."""
    model = loss.model
    mesh, offload = _mesh(accelerator, sharding), _offload(accelerator, sharding)
    # Gathered in the precision to compute in, which halves the transfers; autocast would keep a cast copy of every weight
    # until the backward pass. Shares, the sums of gradients and the loss stay fp32.
    compute = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # What remains is one group, so that a tied head shares its tensor. Left to itself, it would stay gathered after a
    # validation, and the model's parameters would not be those of the optimizer.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
    # Gathered around the model's `forward`, and around the loss, which goes to the model's parts.
    model.next_token_loss = loss.forward
    register_fsdp_forward_method(model, "next_token_loss")
    if compile_settings is not None:
        _compile(loss, compile_settings)
    return ShardedLoss(loss)


def _mesh(accelerator: Accelerator, sharding: Sharding) -> DeviceMesh:
    device = accelerator.device.type
    if not sharding.offload or device == "cpu":
        return init_device_mesh(device, (accelerator.num_processes,))
    # NCCL cannot sum what lies in the CPU's memory, such as the norm of offloaded gradients.
    group = torch.distributed.new_group(backend=f"cpu:gloo,{device}:{torch.distributed.get_backend()}")
    return DeviceMesh.from_group(group, device)


def _offload(accelerator: Accelerator, sharding: Sharding) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda") if sharding.offload else OffloadPolicy()


def _compile(loss: NextTokenLoss, settings: dict[str, Any]) -> None:
    """Gathering breaks the graph of a model between its blocks, so each block is one graph, and the loss is another.

    After `fully_shard`, which replaces the class of a block, and with it the `forward` that is compiled here.
    """
    for block in loss.model.transformer.h:
        block.forward = torch.compile(block.forward, **settings)
    loss.linear_cross_entropy = torch.compile(loss.linear_cross_entropy, **settings)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextmanager
def generating(model: GPT2ScratchForCausalLM) -> Iterator[None]:
    """Inside, all processes generate from a sharded model together, with the same prompts and seed.

    Each of them sees the first one's logits: did two devices round differently, one would end its text while the other
    waits for it. Not compiled, because every length would be a graph of its own.
    """
    if not is_sharded(model):
        yield
        return

    group = model.lm_head.weight.device_mesh.get_group()

    def share(_model: nn.Module, _arguments: tuple, outputs) -> None:
        torch.distributed.broadcast(outputs.logits, src=0, group=group)

    hook = model.register_forward_hook(share)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        hook.remove()
