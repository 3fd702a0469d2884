"""Sharding of weights, gradients and moments across processes (FSDP2), for models that exceed the memory of one device.

It is enabled in Accelerate's configuration (`distributed_type: FSDP`, `fsdp_version: 2`; see launch/fsdp2.yaml).
Accelerate itself would not shard on a CPU, and would compile before it shards, which breaks the single graph. Therefore
the sharding is done here, the same way on every device; Accelerate launches, scales, accumulates and logs as for any
group of processes.

Each process keeps its shard of every tensor: the rows that `torch.chunk` assigns to its rank. A block is gathered for
its computation and then freed (Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training.step.loss import NextTokenLoss


def shard(
    loss: NextTokenLoss, accelerator: Accelerator, place: str, compile_settings: dict[str, Any] | None
) -> NextTokenLoss:
    """Replace the parameters of `loss.model` with their shards, which stay in `place`, "device" or "cpu". All processes
    must have the same weights. Build the optimizer afterwards. `compile_settings`: those of `torch.compile`. The loss
    gathers the weights, and gets the `no_sync` that `Accelerator.accumulate` calls."""
    model, device = loss.model, accelerator.device.type
    if place == "device" or device == "cpu":
        mesh = init_device_mesh(device, (accelerator.num_processes,))
    else:  # NCCL cannot sum tensors in CPU memory, such as the norm of offloaded gradients
        group = torch.distributed.new_group(backend=f"cpu:gloo,{device}:{torch.distributed.get_backend()}")
        mesh = DeviceMesh.from_group(group, device)
    offload = fsdp.CPUOffloadPolicy(pin_memory=device == "cuda") if place == "cpu" else fsdp.OffloadPolicy()
    # Weights are gathered in the compute precision, which halves the transfers; autocast would keep a cast copy of
    # every weight until the backward pass. Shards, gradient sums and the loss stay fp32.
    compute = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # All other parameters form one group, so that a tied head shares its tensor. By default, the group would stay
    # gathered after a validation, and the model's parameters would not be those of the optimizer.
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
    # Weights are gathered for the model's `forward`, and for the loss, which calls parts of the model.
    model.next_token_loss = loss.forward
    fsdp.register_fsdp_forward_method(model, "next_token_loss")
    loss.forward, loss.no_sync = model.next_token_loss, partial(_no_sync, model)
    if compile_settings is not None:
        # Each block and the loss are separate graphs, because gathering breaks the graph of a model between its blocks.
        # This follows `fully_shard`, which replaces the class of a block and its `forward`.
        for block in model.transformer.h:
            block.forward = torch.compile(block.forward, **compile_settings)
        loss.linear_cross_entropy = torch.compile(loss.linear_cross_entropy, **compile_settings)
    return loss


@contextmanager
def _no_sync(model: fsdp.FSDPModule) -> Iterator[None]:
    """Accumulate full fp32 gradients locally, without reducing them across processes. Used for every micro-batch of
    a step except the last. Saves transfers and costs 4 bytes per parameter."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def generating(model: GPT2ScratchForCausalLM) -> Iterator[None]:
    """Context in which all processes generate from a sharded model together, with the same prompts and seed.
    All of them use the logits of rank 0: if two devices rounded differently, one would end its text while the other
    waits for it. Generation is not compiled, because every length would be a separate graph."""
    if not isinstance(model, fsdp.FSDPModule):
        yield
        return
    group = model.lm_head.weight.device_mesh.get_group()

    def share(_model: nn.Module, _arguments: tuple, outputs) -> None:
        torch.distributed.broadcast(outputs.logits, src=0, group=group)

    with model.register_forward_hook(share), torch.compiler.set_stance("force_eager"):
        yield
