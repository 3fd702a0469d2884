"""Checks and runs of test_several_processes.py, all in one group of processes, because starting a group takes long.

accelerate launch --config_file launch/two_cpu_processes.yaml tests/several_processes.py RUNS.json
"""

import json
import math
import os
import sys
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch._dynamo.backends.distributed
import torch._dynamo.testing
from accelerate import Accelerator
from torch import _dynamo
from torch.profiler import ProfilerActivity, profile

import train_accelerate
from common.errors import UserError
from conftest import leave_out_plots, reset_accelerate
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.budget.throughput import measure_speed
from training.checkpoints.checkpoint import TrainState
from training.config import read_config
from training.data.batches import START, BatchPlan, TrainBatches, WindowOrder
from training.data.run_data import open_store
from training.data.tokens import Tokens
from training.guard import run_guard
from training.guard.health import Health, HealthArguments
from training.guard.learning import LearningCheck
from training.preflight import make_plan, setup_of
from training.runtime import distributed
from training.runtime.device import SHARDING, Setup
from training.step.loss import NextTokenLoss
from training.step.optim import OptimArguments, build_optimizer
from training.step.sharding import generating, shard
from training.step.tensors import shard_like, whole
from training.step.train_step import TrainStep, build_train_step

# 51 rows are divided into 26 and 25.
CONFIG = GPT2ScratchConfig(vocab_size=51, n_positions=16, n_embd=18, n_layer=3, n_head=2)
CPU = torch.device("cpu")


def sharded(
    accelerator: Accelerator, compile_settings: dict[str, Any] | None = None
) -> tuple[GPT2ScratchForCausalLM, torch.nn.Module]:
    """Return a sharded model and its loss, with the same weights at each call."""
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(deepcopy(CONFIG))
    return model, shard(NextTokenLoss(model), accelerator, "device", compile_settings)


def learn(accelerator: Accelerator, loss: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """Run forward and backward on this process's own batch; return the loss."""
    generator = torch.Generator().manual_seed(100 * seed + accelerator.process_index)
    windows = torch.randint(0, 51, (2, 12), generator=generator)
    value = loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), 22)
    accelerator.backward(value)
    return value


def check_a_tensor_is_divided_and_whole_again(accelerator: Accelerator) -> None:
    model, _ = sharded(accelerator)
    torch.manual_seed(0)
    plain = dict(GPT2ScratchForCausalLM(model.config).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), plain[name])
        share = shard_like(plain[name].detach(), parameter).to_local()
        assert torch.equal(share, parameter.to_local())
        assert share.untyped_storage().nbytes() == share.nbytes  # not a view of the whole


def check_gradients_are_divided_once_a_step(accelerator: Accelerator) -> None:
    _, loss = sharded(accelerator)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for micro_step in range(3):
            with accelerator.no_sync(loss) if micro_step < 2 else torch.enable_grad():
                learn(accelerator, loss, micro_step)
    sums = [event.name for event in profiled.events() if event.name.startswith("c10d::_reduce_scatter")]
    assert len(sums) == CONFIG.n_layer + 1, sums  # one per block, and one for the other parameters


def check_a_loss_that_is_not_finite_on_one_process_skips_the_step_on_all(accelerator: Accelerator) -> None:
    plan, order = BatchPlan(16, 2, 1, 2), WindowOrder(3000, 16, seed=0)
    setup, batches = Setup("no", False, "eager", ()), TrainBatches(Tokens(torch.zeros(3000), CPU), order, plan, 0)
    train_step = build_train_step(deepcopy(CONFIG), None, batches, OptimArguments(), setup, accelerator)
    model = train_step.model
    for bad in (False, True, False):
        ids = torch.zeros(3000, dtype=torch.int16)
        if bad and accelerator.process_index == 1:
            ids += 50  # only this process reads the token whose embedding is not finite
        with torch.no_grad():
            model.transformer.wte.weight[50] = math.inf
        batches.tokens = Tokens(ids, CPU)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        train_step(0, 1.0)
        same = [torch.equal(a, b.detach()) for a, b in zip(start, model.parameters(), strict=True)]
        assert all(same) is bad
        everyone = accelerator.gather(model.lm_head.weight.detach()[None])
        assert torch.equal(everyone[0], everyone[1])


def check_a_process_of_another_command_is_refused(accelerator: Accelerator) -> None:
    distributed.check_same_command({"seed": 1})
    with pytest.raises(UserError, match=r"^Rank 1 has other settings than rank 0 \(\w+\):"):
        distributed.check_same_command({"seed": accelerator.process_index})


def check_what_the_main_process_finds_all_know(accelerator: Accelerator) -> None:
    def fail() -> None:
        raise UserError("It cannot be.")

    main = accelerator.is_main_process
    assert distributed.on_main(accelerator, lambda: ["found", time.sleep(1)] if main else None) == ["found", None]
    with pytest.raises(UserError, match=r"^It cannot be\.$") as message:
        distributed.on_main(accelerator, fail)
    assert message.value.is_reported is not main


def check_the_scaler_of_fp16_sees_what_another_process_found(accelerator: Accelerator) -> None:
    for kind in ("adamw", "muon"):
        model, loss = sharded(accelerator)
        optimizer = build_optimizer(model, OptimArguments(kind, learning_rate=0.1), accelerator.device)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        start = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        windows = torch.zeros(1, 4, dtype=torch.int64)
        scaler.scale(loss(windows, windows, 4)).backward()
        if accelerator.process_index == 1:
            model.lm_head.weight.grad.to_local().fill_(math.inf)
        scaler.unscale_(optimizer)  # as gradient clipping does
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(a, whole(b.detach())) for a, b in zip(start, model.parameters(), strict=True))


def check_processes_with_different_weights_end_the_run(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(CONFIG)
    optimizer = build_optimizer(model, OptimArguments(), accelerator.device)
    prepared = SimpleNamespace(optimizer=optimizer)
    health = Health(accelerator, HealthArguments(), TrainState(START, {}))
    for synchronized in (True, False):
        learning = LearningCheck(TrainStep(accelerator, model, None, prepared, None, 1.0), None, is_new=False)
        learn(accelerator, NextTokenLoss(model))
        if synchronized:
            for parameter in model.parameters():
                parameter.grad = accelerator.reduce(parameter.grad)
        optimizer.step()
        for _ in range(4):
            health.add(torch.tensor(3.0), torch.tensor(1.0))
        health.read(4)
        if synchronized:
            assert list(learning.check(4, health)) == []
    with pytest.raises(UserError, match=r"^The processes have different weights: the model does not learn\."):
        list(learning.check(4, health))


def check_all_write_the_same_text(accelerator: Accelerator) -> None:
    """The texts are equal even though the processes compute different logits."""
    model, _ = sharded(accelerator)

    def disturb(_model, _arguments, outputs):
        outputs.logits.add_(torch.randn(51, generator=noise), alpha=3.0)

    noise = torch.Generator().manual_seed(accelerator.process_index)
    model.register_forward_hook(disturb)
    torch.manual_seed(0)
    with generating(model), torch.no_grad():
        text = model.eval().generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=12, do_sample=True)
    texts = accelerator.gather(text)
    assert torch.equal(texts[0], texts[1])


def check_speed_is_measured_over_as_many_steps_by_all(accelerator: Accelerator) -> None:
    """The clocks of processes differ; a process with more steps would wait for the gradients of the other."""
    config = read_config(json.loads(Path(sys.argv[1]).read_text())[0]["arguments"])
    store, setup = open_store(config.recipe, lambda _: None), setup_of(config)
    plan = make_plan(config, store, store.load_tokenizer(), accelerator, setup)
    seconds = 0.001 if accelerator.is_main_process else 0.5
    assert measure_speed(config, plan, accelerator, store, 2, seconds).source.startswith("measured over 1 step;")


def check_each_block_is_the_same_graph(accelerator: Accelerator) -> None:
    torch._dynamo.reset()
    plain_model, plain = sharded(accelerator)
    counter = torch._dynamo.testing.CompileCounter()
    model, loss = sharded(accelerator, {"backend": counter, "fullgraph": True, "dynamic": False})
    for seed in range(2):
        reference, compiled = learn(accelerator, plain, seed), learn(accelerator, loss, seed)
        torch.testing.assert_close(compiled, reference, rtol=0, atol=1e-6)
    for one, variant in zip(plain_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), variant.grad.to_local(), rtol=0, atol=1e-6)
    assert counter.frame_count == 2, counter.frame_count  # one for the blocks, one for the loss
    with generating(model), torch.no_grad():
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    assert counter.frame_count == 2


if __name__ == "__main__":
    os.environ[SHARDING] = "false"
    checks = [check for name, check in list(globals().items()) if name.startswith("check_")]
    for check in checks:
        reset_accelerate()
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        check(accelerator)
        accelerator.print(f"passed: {check.__name__}", flush=True)
    leave_out_plots()
    # A graph of DDP is divided at buckets of gradients. The first of 1 MB would contain a model as small as these.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
    _dynamo.backends.distributed.pretty_print_buckets = lambda buckets, _: print(f"{len(buckets)} buckets", flush=True)
    run_guard.stop_accelerator = lambda accelerator: accelerator.wait_for_everyone()  # the group stays in use
    for run in json.loads(Path(sys.argv[1]).read_text()):
        reset_accelerate()
        os.environ.update(run["environment"])
        train_accelerate.main(run["arguments"])
