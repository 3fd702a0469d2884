"""Memory estimates compared with counted and measured memory."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx

from common import machine
from conftest import MODERN, assert_user_error
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.checkpoints import saver
from training.plan.memory import Memory
from training.runtime.device import Setup
from training.step.loss import NextTokenLoss

GIB = 2**30
HALF = Setup("bf16", False, "sdpa", ())


def test_a_gpu_run_is_refused_if_the_copy_for_checkpoints_does_not_fit(monkeypatch):
    monkeypatch.setattr(saver, "free_memory", lambda: 4095)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("memory was allocated"))
    of_a_gpu = SimpleNamespace(n_bytes=4096, accelerator=SimpleNamespace(device=torch.device("cuda")))
    assert_user_error(r"too little memory \(not GPU memory\) for the copy", saver.Saver._make_room, of_a_gpu, {})


def partition(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
    """Compile like Inductor up to the division into forward and backward graph, which are then interpreted."""
    return compile_fx(graph, inputs, inner_compile=lambda graph, _inputs, **_: make_boxed_func(graph.forward))


def kept_for_backward(
    config: GPT2ScratchConfig, attention: str, is_half: bool, compiles: bool, rows: int, masks: bool = False
) -> int:
    """Return the bytes that a forward pass of `rows` sequences keeps for the backward pass, without parameters.
    `masks`: each sequence has two documents."""
    torch._dynamo.reset()
    model = GPT2ScratchForCausalLM._from_config(config, attn_implementation=attention)
    loss = NextTokenLoss(model).train()
    loss = torch.compile(loss, backend=partition, fullgraph=True) if compiles else loss
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, config.vocab_size, (rows, config.n_positions))
    positions = (torch.arange(config.n_positions) % (config.n_positions // 2)).expand_as(ids) if masks else None
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
    ):
        loss(ids, ids, ids.numel(), positions)
    return sum(sizes.values())


ROPE = {"rope_parameters": MODERN["rope_parameters"]}
FAMILIES = {"gpt2": {}, "modern": MODERN, "rope": ROPE}
UNCOMPILED = [(*each, False) for each in itertools.product(FAMILIES, ("sdpa", "eager"), (False, True))]
COMPILED = [("gpt2", "sdpa", True), ("modern", "sdpa", True), ("gpt2", "eager", False), ("modern", "eager", False)]
COMPILED = [(*each, True) for each in (*COMPILED, ("rope", "sdpa", False))]
WITH_DROPOUT = [("gpt2", "sdpa", False, False), ("modern", "eager", True, False), ("gpt2", "sdpa", False, True)]


@pytest.mark.parametrize(
    ("family", "attention", "is_half", "compiles", "dropout"),
    [(*each, 0.0) for each in UNCOMPILED + COMPILED] + [(*each, 0.1) for each in WITH_DROPOUT],
)
def test_estimated_activations_match_the_bytes_kept_for_the_backward_pass(
    family, attention, is_half, compiles, dropout
):
    """With so many rows that weights in half precision and tables of positions, which are also kept, do not count."""
    shape = {"vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 1 if compiles else 2, "n_head": 2}
    shape |= {"n_inner": 512 if attention == "sdpa" else None, "attn_pdrop": dropout}
    config = GPT2ScratchConfig(**shape, **FAMILIES[family])
    memory = Memory(config, Setup("bf16" if is_half else "no", compiles, attention, ()), on_gpu=False)
    count = kept_for_backward(config, attention, is_half, compiles, rows=64)
    assert memory.parts(64)["activations"] == pytest.approx(count, rel=0.1)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("is_half", [False, True])
def test_estimated_activations_include_the_mask_of_documents(is_half, compiles):
    config = GPT2ScratchConfig(vocab_size=64, n_positions=512, n_embd=64, n_layer=3, n_head=2)
    memory = Memory(config, Setup("bf16" if is_half else "no", compiles, "sdpa", (), mask_documents=True), on_gpu=False)
    count = kept_for_backward(config, "sdpa", is_half, compiles, rows=8, masks=True)
    assert memory.parts(8)["activations"] == pytest.approx(count, rel=0.1)


def test_tanh_gelu_keeps_as_many_bytes_as_exact_gelu():
    """Transformers' own gelu_new keeps three more tensors of the MLP's width: 7.5 MB here, 4.4 MB with one kernel."""
    shape = {"vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 2}
    configs = (GPT2ScratchConfig(**shape, activation_function=name) for name in ("gelu", "gelu_new"))
    exact, tanh = (kept_for_backward(config, "sdpa", False, False, rows=4) for config in configs)
    assert tanh == exact


def test_memory_components_of_gpt2_small_seed():
    """134,601,216 parameters in bf16, 64 sequences of 512 tokens. Sizes in megabytes."""
    parts = Memory(GPT2ScratchConfig(), HALF, on_gpu=False).parts(64)
    sizes = {"weights": 538, "gradients": 538, "optimizer": 1077, "weights in half precision": 269}
    sizes |= {"checkpoint copy": 1615, "activations": 11194, "logits": 3637}
    assert {name: round(size / 1e6) for name, size in parts.items()} == sizes


def test_largest_micro_batch_fits_and_sharded_model_keeps_full_gradients():
    memory = Memory(GPT2ScratchConfig(), HALF, on_gpu=True)
    free = int(24e9)
    largest = memory.largest_micro_batch(free)
    constant = sum(memory.fixed().values())
    assert memory.total(largest) - constant <= 0.8 * (free - constant) < memory.total(largest + 1) - constant
    assert memory.largest_micro_batch(0) == 1  # the minimum, which is then tried
    sharded = replace(HALF, sharding="device")
    single, eighth = (Memory(GPT2ScratchConfig(), sharded, True, processes=n).fixed() for n in (1, 8))
    assert eighth["optimizer"] == single["optimizer"] // 8
    assert eighth["gradients"] == single["gradients"] // 8 + single["gradients"]
    replicated = Memory(GPT2ScratchConfig(), HALF, True, processes=8).fixed()  # buckets, and gradients that accumulate
    assert replicated == single | {"gradients": 2 * single["gradients"]}


# Peaks counted by the allocator on the fake CUDA runtime (tests/fake_cuda), including gradients of an earlier
# micro-batch: layers, width, sequences, context, vocabulary, half precision, checkpointing, compiled, GB.
PEAKS = [
    (3, 768, 64, 512, 32_000, True, False, False, 6.78),
    (12, 768, 64, 512, 32_000, True, False, False, 16.13),
    (12, 768, 64, 512, 32_000, False, False, False, 24.60),
    (4, 256, 64, 256, 65, True, False, False, 0.86),
    (4, 256, 64, 256, 65, False, False, False, 1.31),
    (3, 768, 64, 512, 32_000, True, True, False, 4.36),
    (12, 768, 64, 512, 32_000, True, True, False, 6.43),
    (4, 256, 64, 256, 65, True, True, False, 0.44),
    (3, 768, 64, 512, 32_000, True, False, True, 5.41),
    (3, 768, 64, 512, 32_000, False, False, True, 8.52),
    (4, 256, 64, 256, 65, True, False, True, 0.80),
]
PEAKS_OF_MODERN = [
    (12, 768, 64, 512, 32_000, True, False, False, 24.67),
    (12, 768, 64, 512, 32_000, False, False, False, 27.11),
    (4, 256, 64, 256, 65, True, False, False, 1.47),
    (4, 256, 64, 256, 65, True, True, False, 0.71),
    (3, 768, 64, 512, 32_000, False, False, True, 9.11),
]
PEAKS_IN_MUONS_STEP = [(12, 768, 1, 64, 65, True, False, False, 1.55), (12, 768, 1, 64, 65, False, False, False, 1.61)]


@pytest.mark.parametrize(
    ("fields", "optimizer", "peaks"),
    [({}, "adamw", PEAKS), (MODERN, "adamw", PEAKS_OF_MODERN), (MODERN, "muon", PEAKS_IN_MUONS_STEP)],
)
def test_estimated_gpu_peak_is_within_ten_percent(fields, optimizer, peaks):
    for layers, width, rows, context, vocabulary, is_half, checkpoints, compiles, peak in peaks:
        shape = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": context, "vocab_size": vocabulary}
        config = GPT2ScratchConfig(**shape, **fields, tie_word_embeddings=False)
        setup = Setup("bf16" if is_half else "no", compiles, "sdpa", (), gradient_checkpointing=checkpoints)
        assert Memory(config, setup, on_gpu=True, optimizer=optimizer).total(rows) / 1e9 == pytest.approx(peak, rel=0.1)


@pytest.fixture
def membership(monkeypatch, tmp_path):
    """File with the control groups of the process, which are folders of `tmp_path`."""
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    return tmp_path / "membership"


OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.mark.parametrize(("controller", "files"), [("", ("memory.max", "memory.current", "")), ("memory", OLD)])
def test_free_memory_is_at_most_that_of_every_control_group(monkeypatch, membership, tmp_path, controller, files):
    """As in a Slurm job: the limit is on the group of the job, and the process is in a group of its step."""
    membership.write_text(f"3:cpu:/other\n1:{controller}:/job/step\n")
    (tmp_path / controller / "job" / "step").mkdir(parents=True)
    stat = f"anon 1\n{files[2]}inactive_file {GIB // 2}\n{files[2]}active_file {GIB // 2}"
    for group, limit, usage in (("job", 4 * GIB, 3 * GIB), ("job/step", "max", 2 * GIB)):
        for name, value in zip((*files[:2], "memory.stat"), (limit, usage, stat), strict=True):
            (tmp_path / controller / group / name).write_text(f"{value}\n")
    assert [*machine.memory_limits()] == [(4 * GIB, 2 * GIB)]
    assert machine.free_memory() == 2 * GIB
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "absent")
    assert machine.free_memory() > 0


def test_an_apple_gpu_keeps_the_scores_of_attention(monkeypatch):
    sizes = []
    for attention, has_mps in (("sdpa", False), ("eager", False), ("sdpa", True)):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda has_mps=has_mps: has_mps)
        memory = Memory(GPT2ScratchConfig(), Setup("no", False, attention, ()), on_gpu=False)
        sizes.append(memory.parts(8)["activations"])
    assert sizes[0] < sizes[1] == sizes[2]


def test_efficiency_cores_of_a_mac_do_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [machine.cores(logical) for logical in (True, False)] == [8, 8]  # Intel: sysctl does not know
    (tmp_path / "sysctl").write_text("#!/bin/sh\n[ $2 = hw.perflevel0.physicalcpu ] && echo 4\n")
    (tmp_path / "sysctl").chmod(0o755)
    assert [machine.cores(logical) for logical in (True, False)] == [8, 4]


@pytest.mark.parametrize(
    ("controller", "limits"),
    [
        ("", {"job/cpu.max": "max 100000", "cpu.max": "250000 100000"}),
        ("cpu,cpuacct", {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000", "job/cpu.cfs_quota_us": "-1"}),
    ],
)
def test_cores_are_at_most_those_of_a_container(monkeypatch, membership, tmp_path, controller, limits):
    (tmp_path / controller / "job").mkdir(parents=True)
    for name, value in limits.items():
        (tmp_path / controller / name).write_text(value + "\n")
    membership.write_text(f"1:{controller}:/job\n")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: 64 if logical else 32)
    assert [machine.cores(logical) for logical in (True, False)] == [3, 3]
    membership.write_text("")
    assert [machine.cores(logical) for logical in (True, False)] == [64, 32]
