import json
import os
import re
import socket
import sys
import warnings

import psutil
import pytest
import torch

import generate
from conftest import assert_user_error, error_of, flags
from modeling_gpt2scratch import GPT2ScratchConfig
from publishing import demo
from training import evaluate
from training.config import read_config
from training.preflight import setup_of
from training.runtime.device import DeviceArguments, Setup, decide, kernel_of_sdpa, memory_of_others
from training.runtime.distributed import interface_to
from training.runtime.hardware import has_kernels
from training.step.loss import NextTokenLoss
from training.step.model import build_model

CONFIG = GPT2ScratchConfig(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="tests CPU behavior")
@pytest.mark.parametrize(
    ("precision", "context", "attention"), [("bf16", 512, "eager"), ("bf16", 1024, "sdpa"), ("no", 512, "sdpa")]
)
def test_auto_chooses_eager_attention_on_a_cpu_if_faster(precision, context, attention):
    assert decide(DeviceArguments(mixed_precision=precision), context).attention(context) == attention
    choice = DeviceArguments(mixed_precision=precision, attn_implementation="eager")
    assert decide(choice, context).attention(context) == "eager"
    flex = DeviceArguments(attn_implementation="flex_attention")
    assert_user_error("flex_attention, which needs an NVIDIA GPU; use sdpa", decide, flex, context)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests CPU behavior")
def test_a_precision_of_the_launcher_is_refused_with_its_source(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    sentence = r"accelerate config wrote\) is fp16, .*; use bf16, no or accelerate launch --config_file launch/one_gpu"
    assert_user_error(sentence, decide, DeviceArguments(), 16)
    assert_user_error("^mixed_precision is fp16, .* no or auto", decide, DeviceArguments(mixed_precision="fp16"), 16)


@pytest.mark.parametrize(("bf16_residual", "expectation"), [(False, torch.float32), (True, torch.bfloat16)])
def test_bf16_residual_changes_the_residual_stream_but_not_the_weights(bf16_residual, expectation):
    model = build_model(CONFIG, Setup("bf16", False, "sdpa", (), bf16_residual=bf16_residual), 0)
    streams = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda _module, _inputs, stream: streams.append(stream.dtype))
    windows = torch.randint(0, 50, (2, 17))
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        loss = NextTokenLoss(model)(inputs, targets, 32)
    loss.backward()
    assert streams == [expectation] * 2
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    streams.clear()
    model(inputs)  # like `generate`, without autocast
    assert streams == [torch.float32] * 2


@pytest.mark.parametrize(("choice", "compiles"), [("auto", True), ("False", False)])
def test_the_setup_of_another_device_follows_its_datasheet_and_the_flags(store, choice, compiles):
    setup = setup_of(read_config(["--plan", *flags(data=store.folder, plan_device="t4-16gb", torch_compile=choice)]))
    assert (setup.mixed_precision, setup.torch_compile) == ("fp16", compiles)
    assert (setup.sharding, setup.mask_documents) == (None, False)


def test_settings_that_no_device_has_are_refused_also_for_another_device(store):
    wrong = {"torch_compile_mode": "max-autotun", "attn_implementation": "flash_attn", "torch_compile": "yess"}
    wrong |= {"bf16_residual": "true", "mixed_precision": "no"}
    names = ["torch_compile_mode", "torch_compile", "bf16_residual", "attn_implementation"]
    for device in (None, "t4-16gb"):
        config = read_config(["--plan", *flags(data=store.folder, plan_device=device, **wrong)])
        problems = error_of(setup_of, config).splitlines()
        assert [line.split()[0] for line in problems] == names
        assert problems[1] == "torch_compile is 'yess'; it must be true, false or auto."


def test_the_setup_of_another_device_has_the_shards_of_the_launcher_and_the_mask(store, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    config = read_config(["--plan", *flags(data=store.folder, plan_device="t4-16gb", mask_documents="true")])
    assert (setup_of(config).sharding, setup_of(config).mask_documents) == ("device", True)


def test_gradient_checkpointing_is_enabled_on_request_without_a_warning():
    for choice in (False, True):
        with warnings.catch_warnings(action="error"):
            model = build_model(CONFIG, Setup("no", False, "sdpa", (), gradient_checkpointing=choice), 0)
        assert model.is_gradient_checkpointing is choice


@pytest.mark.parametrize(
    ("cuda", "visible", "cause"),
    [
        (None, "0", r"GPU, because it is a CPU-only build: install a build of torch for a CUDA version"),
        ("13.0", "0", r"GPU, probably because its driver is older than CUDA 13\.0: install"),
        ("13.0", "", None),
        ("no GPU", "0", None),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_named_with_the_remedy(tmp_path, monkeypatch, cuda, visible, cause):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{'Failed' if cuda == 'no GPU' else 'GPU 0: a GPU'}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for name, value in (("PATH", str(tmp_path)), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    notes = [note for note in decide(DeviceArguments(torch_compile="false"), 16).notes if "NVIDIA GPU" in note]
    assert len(notes) == bool(cause)
    assert all(re.search(cause, note) for note in notes)


def test_attention_kernel_is_the_one_that_pytorch_reports():
    for dropout, mask_documents, kernel in ((0.0, False, "flash"), (0.0, True, "flash"), (0.1, False, "math")):
        setup = Setup("bf16", True, "sdpa", (), mask_documents=mask_documents)
        assert kernel_of_sdpa(torch.device("cpu"), setup, 16, 8, dropout) == kernel


def test_the_interface_that_reaches_a_machine_is_found():
    assert interface_to("localhost") is interface_to("no.such.host.invalid") is None
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                assert interface_to(address.address) == (None if address.address.startswith("127.") else name)


@pytest.mark.skipif(sys.platform != "linux", reason="tests glibc behavior")
def test_freed_memory_is_kept_for_reuse(launch):
    """64 MB are 16,384 pages; without the setting, each would be requested again five times, with it at most once."""
    code = """if True:
        import resource
        from common.machine import keep_freed_memory
        keep_freed_memory()
        b"x" * (1 << 26), b"x" * (1 << 26)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            b"x" * (1 << 26)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    assert int(launch("-c", code).stdout) < 20_000


def test_the_number_of_compilers_follows_the_cores_unless_the_user_chose(launch):
    """Of a container, for example, whose quota PyTorch does not know."""
    code = "import os, common.machine as m; m.cores = lambda logical: 3; import training.runtime.threads; "
    code += "print(os.environ['TORCHINDUCTOR_COMPILE_THREADS'])"
    chosen = [{"TORCHINDUCTOR_COMPILE_THREADS": number} for number in (None, "1")]
    assert [launch("-c", code, **environment).stdout.strip() for environment in chosen] == ["3", "1"]


def test_threads_spin_only_shortly_unless_the_user_chose(launch):
    """Otherwise a process that uses a core makes a training step several times slower."""
    code = "import os, training.runtime.threads; print(os.environ.get('GOMP_SPINCOUNT'))"
    chosen = ({}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"})
    assert [launch("-c", code, **environment).stdout.strip() for environment in chosen] == ["1000", "None", "7"]


def test_memory_of_cuda_itself_is_not_that_of_other_processes(monkeypatch):
    for total, used, is_reported in ((4e9, 0.5e9, False), (4e9, 1.1e9, True), (80e9, 7e9, False), (80e9, 9e9, True)):
        for name, value in {"is_available": True, "mem_get_info": (total - used, total), "memory_reserved": 0}.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        assert bool(memory_of_others()) is is_reported


@pytest.mark.parametrize(("choice", "visible"), [("True", "-1"), ("1", "-1"), ("False", "0"), (None, "0")])
def test_a_gpu_is_not_used_if_the_launcher_is_asked_for_the_cpu(launch, choice, visible):
    code = "import os, training.runtime.threads; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    asked = {"ACCELERATE_USE_CPU": choice, "CUDA_VISIBLE_DEVICES": "0"}
    assert launch("-c", code, **asked).stdout.strip() == repr(visible)


CHILD = "import os, training.runtime.threads, training.runtime.launcher as e; "
CHILD += "print(os.environ['OMP_NUM_THREADS'], e.is_alone_by_mistake())"
LAUNCHER = f"import json, os, subprocess, sys; child = [sys.executable, '-c', {CHILD!r}, *sys.argv[2:]]; "
LAUNCHER += "subprocess.run(child, env=os.environ | json.loads(sys.argv[1]))"
UNASKED = {"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_MODE": "default"}  # exported by the launcher by default


@pytest.mark.parametrize(
    ("users", "launchers", "threads", "is_alone"),
    [
        ({}, {}, None, False),  # without a launcher
        ({"OMP_NUM_THREADS": "1", "MASTER_ADDR": "node1"}, {}, 1, False),
        ({}, UNASKED, None, False),
        ({}, UNASKED | {"LOCAL_WORLD_SIZE": "1000", "WORLD_SIZE": "1000", "MASTER_ADDR": "node1"}, 1, False),
        ({"OMP_NUM_THREADS": "1"}, UNASKED, 1, False),
        ({}, UNASKED | {"OMP_NUM_THREADS": "3"}, 3, False),
        ({}, UNASKED | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, None, True),
        ({"MASTER_ADDR": "node1"}, UNASKED, None, False),  # as under Slurm
        ({"MASTER_ADDR": "node1"}, UNASKED | {"MASTER_ADDR": "127.0.0.1"}, None, True),
    ],
)
def test_settings_of_the_user_are_distinguished_from_those_of_the_launcher(launch, users, launchers, threads, is_alone):
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    result = launch("-c", LAUNCHER, json.dumps(launchers), "--num_processes", "2", **{"OMP_NUM_THREADS": ""} | users)
    assert result.stdout.split() == [str(threads or cores), str(is_alone)], result.stderr


def test_gpu_supports_binaries_of_its_major_version_and_any_earlier_compute_target():
    built_for = ["sm_75", "sm_80", "sm_90", "sm_120"]
    assert has_kernels(built_for, (7, 0)) is False  # V100 with the build for CUDA 13
    assert has_kernels(built_for, (8, 9)) is True  # L4: binaries of the same major version
    assert has_kernels(built_for, (10, 0)) is False
    assert has_kernels(["sm_80", "compute_90"], (10, 0)) is True  # compiled on load
    assert has_kernels(["sm_90a", "sm_100f"], (9, 0)) is True


def test_a_gpu_without_kernels_is_refused_by_every_command_that_would_use_it(monkeypatch):
    facts = {"is_available": True, "get_device_name": "Tesla V100", "get_device_capability": (7, 0)}
    for name, value in (facts | {"get_arch_list": ["sm_75", "sm_90"], "is_bf16_supported": False}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    sentence = r"no kernels for Tesla V100 \(compute capability 7\.0\): install .* or put CUDA_VISIBLE_DEVICES= before"
    assert_user_error(sentence, decide, DeviceArguments(torch_compile="false"), 16)
    assert_user_error(sentence, generate.main, [])
    assert_user_error(sentence, evaluate.main, ["x"])
    assert_user_error(sentence, demo.show, ["x"], None, False)


@torch._inductor.config.patch("cpp.cxx", (None, "g++"))
def test_compilation_stays_off_without_a_compiler_and_python_headers(monkeypatch, tmp_path):
    """A note names them and the command that installs them; explicit compilation is refused."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for name, value in {"PATH": "/nowhere", "CXX": "", "CC": ""}.items():
        monkeypatch.setenv(name, value)
    gap = r"a C\+\+ compiler for C\+\+20 \(g\+\+ 10 or later, or .* CXX .*\), Python's headers .* not found; "
    gap += r".*: apt install g\+\+ python3-dev"
    setup = decide(DeviceArguments(), 64)
    assert not setup.torch_compile
    assert any(re.search(gap, note) for note in setup.notes)
    sentence = f"Steps cannot be compiled here: {gap}"
    assert_user_error(sentence, decide, DeviceArguments(torch_compile="true"), 64)
    assert not decide(DeviceArguments(torch_compile="false"), 64).notes


def test_cudnn_is_not_used_if_its_gradients_can_be_nan():
    for context, mask_documents, cudnn in ((64, True, False), (192, True, False), (128, True, True), (64, False, True)):
        assert decide(DeviceArguments(torch_compile="false"), context, mask_documents).cudnn_attention == cudnn
