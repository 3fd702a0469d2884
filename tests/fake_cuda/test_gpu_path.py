"""Tests of the GPU path on a CUDA runtime that computes nothing. See README.md."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.results import RESULTS, about, write
from benchmarks.workload import make_store

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = HERE / "build"
CARDS = {  # name, compute capability, multiprocessors, GB
    "P100": "Tesla P100-PCIE-16GB,60,56,17.1",
    "V100": "Tesla V100-SXM2-16GB,70,80,16.9",
    "T4": "Tesla T4,75,40,15.8",
    "L4": "NVIDIA L4,89,58,23.7",
    "H100": "NVIDIA H100 80GB HBM3,90,132,85.0",
}


def on_card(card: str, *command: str | Path, **environment: str | Path) -> subprocess.CompletedProcess:
    """Run Python with the arguments `command` on a machine with this card."""
    own = {"FAKE_GPU": CARDS[card], "LD_PRELOAD": BUILD / "libcuda.so.1", "TRITON_LIBCUDA_PATH": BUILD}
    own = {name: str(value) for name, value in {**own, "HF_HUB_OFFLINE": "1", **environment}.items()}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """Token stores by the size of their vocabulary."""
    folder = tmp_path_factory.mktemp("stores")
    for vocab_size in (32_000, 50_257):
        make_store(folder / str(vocab_size), vocab_size)
    return folder


@pytest.fixture(scope="session")
def record():
    """Counts to write to benchmarks/results/: memory (if all cards were measured), the step, or both."""
    counted = {"memory": []}
    yield counted
    if len(counted["memory"]) < len(MEMORY):
        del counted["memory"]
    file = RESULTS / "fake-cuda.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    how = {"command": "make test-fake-cuda", "device": "no device: a CUDA runtime that computes nothing"}
    head = about("", []) | how
    write("fake-cuda", before | head | counted)


def planned(card: str, folder: Path, store: Path, *flags: str, **environment: str | Path) -> dict:
    """Run a few steps with --plan. Return the observations of observed_run.py and the estimated memory."""
    result = folder / "observed.json"
    flags = ("--data", store, "--output_dir", folder / "run", "--plan", "--plan_steps", "1", *flags)
    done = on_card(card, HERE / "observed_run.py", result, *flags, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    observed = json.loads(result.read_text(encoding="utf-8"))
    assert observed["steps"] > 2
    observed["planned_gb"] = float(re.search(r"Memory:  ([\d.]+) GB", done.stdout)[1])
    observed["output"] = done.stdout + done.stderr
    return observed


MEMORY = [(card, preset) for card in ("T4", "L4", "H100") for preset in ("gpt2_small_seed", "gpt2", "shakespeare_char")]


@pytest.mark.parametrize(("card", "preset"), MEMORY)
def test_peak_memory_matches_the_plan_and_no_step_synchronizes(card, preset, stores, tmp_path, record):
    """Uses the micro-batch of `auto`. A T4 trains in fp16 with loss scaling. Presets' larger batches accumulate."""
    store = stores / ("50257" if preset == "gpt2" else "32000")
    seen = planned(card, tmp_path, store, "--config", f"presets/{preset}.yaml", "--torch_compile", "false")
    if preset == "gpt2":
        assert seen["accumulation"] > 1
    named = ("micro_batch", "accumulation", "planned_gb", "peak_gb")
    record["memory"].append({"card": card, "preset": preset, **{name: seen[name] for name in named}})
    assert seen["peak_gb"] == pytest.approx(seen["planned_gb"], rel=0.1)


def test_fp16_works_compiled_and_with_gradient_accumulation_on_a_small_gpu(stores, tmp_path):
    flags = ("--config", "presets/shakespeare_char.yaml", "--n_layer", "1", "--tokens_per_step", "16384")
    seen = planned("T4", tmp_path, stores / "32000", *flags, "--per_device_train_batch_size", "32")
    assert "fp16, compiled" in seen["output"]
    assert seen["accumulation"] == 2
    assert "Not enough SMs" not in seen["output"]


MODERN = "--rope_theta 10000 --normalization rms_norm --use_bias false --activation_function relu2 "
MODERN += "--attention_scale 0.12 --n_head 6"


@pytest.mark.parametrize(
    ("name", "more", "most_launches", "most_gb"), [("step", "", 700, 50), ("modern_step", MODERN, 490, 55)]
)
def test_a_step_of_gpt2_small_seed_stays_within_its_budget(
    name, more, most_launches, most_gb, stores, tmp_path, record
):
    """Limits for 12 layers, 64 x 512 tokens, compiled: launches, bytes that Triton kernels move, and no fp32 logits."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache", "TORCHINDUCTOR_BENCHMARK_KERNEL": "1"}
    flags = ("--config", "presets/gpt2_small_seed.yaml", "--per_device_train_batch_size", "64", *more.split())
    seen = planned("H100", tmp_path, stores / "32000", *flags, FAKE_GPU_LOG=tmp_path / "log", **cache)
    steps = [log.read_text(errors="replace").split("MARK step 2\n") for log in tmp_path.glob("log.*")]
    [step] = [parts[1].split("MARK after")[0] for parts in steps if len(parts) > 1]
    events = Counter(line.split()[0] for line in step.splitlines())
    launches = sum(events[name] for name in ("KERNEL", "TRITON", "MEMSET"))
    family = ", modern family" if more else ""
    record[name] = {
        "preset": f"gpt2_small_seed{family}, 64 x 512 tokens, bf16, compiled for sm_90",
        "launches": launches,
        "of_triton": events["TRITON"],
        "synchronizations": events["SYNC"],
        "copies": events["COPY"] + events["COPY_SYNC"],
        **{name: seen[name] for name in ("triton_gb", "planned_gb", "peak_gb")},
    }
    assert events["SYNC"] == 0
    assert launches <= most_launches
    assert seen["triton_gb"] <= most_gb
    assert [shape for shape in seen["fp32_buffers"] if 32_000 in shape and shape != [32_000, 768]] == []
    assert seen["peak_gb"] == pytest.approx(seen["planned_gb"], rel=0.1)


# Sets the usable memory to three times its size, so that the first micro-batch does not fit.
TOO_MUCH = """if True:
    import sys
    sys.path.insert(0, "tests/fake_cuda")
    from training.plan import memory
    memory.USABLE = 3
    import observed_run
    observed_run.main(sys.argv[1:])
"""
SMALL = ("--config", "presets/shakespeare_char.yaml", "--torch_compile", "false", "--sample_tokens", "0")


def test_a_run_out_of_memory_restarts_in_a_fresh_process_with_half_the_micro_batch(stores, tmp_path):
    flags = ("--data", stores / "32000", "--output_dir", tmp_path / "run", "--tokens_per_step", str(2**20))
    done = on_card("T4", "-c", TOO_MUCH, tmp_path / "seen.json", *SMALL, *flags, "--max_steps", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    tried = re.findall(r"Out of memory with a micro-batch of ([\d,]+) sequences", done.stdout)
    tried = [int(size.replace(",", "")) for size in tried]
    assert tried
    assert json.loads((tmp_path / "seen.json").read_text())["micro_batch"] == tried[-1] // 2
    assert [first // 2 for first in tried[:-1]] == tried[1:]
    assert "step 3/3" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_the_host_copy_of_a_checkpoint_is_pinned_and_only_as_large_as_needed(stores, tmp_path):
    flags = (
        "--data",
        stores / "32000",
        "--output_dir",
        tmp_path / "run",
        "--n_embd",
        "320",
        "--max_steps",
        "1",
        "--verbose",
    )
    log = tmp_path / "log"
    done = on_card("H100", HERE / "observed_run.py", tmp_path / "seen.json", *SMALL, *flags, FAKE_GPU_LOG=log)
    assert done.returncode == 0, done.stderr[-3000:]
    parameters = int(re.search(r"([\d,]+) parameters", done.stdout)[1].replace(",", ""))
    lines = [line.split() for path in tmp_path.glob("log.*") for line in path.read_text(errors="replace").splitlines()]
    pinned = sum(int(line[1]) for line in lines if line[0] == "PINNED")
    assert 12 * parameters <= pinned <= 1.05 * 12 * parameters
    saved = [line for line in lines if line[:2] == ["COPY", "devicetohost"] and int(line[2]) > 4096]
    assert len(saved) >= 3 * 4
    assert not [line for line in saved if line[-1] == "pageable"]


@pytest.mark.parametrize(("card", "capability"), [("V100", "7.0"), ("P100", "6.0")])
def test_a_gpu_that_this_build_does_not_support_is_refused_before_text_is_read(card, capability, tmp_path):
    done = on_card(card, "train_accelerate.py", "--data", "README.md", "--output_dir", tmp_path / "run")
    assert done.returncode == 1
    assert f"(compute capability {capability}): install a build for CUDA 12.6" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_gpu_filled_by_other_processes_is_reported(stores, tmp_path):
    flags = ("--data", stores / "32000", "--output_dir", tmp_path / "run", "--plan", "--plan_steps", "0")
    done = on_card("H100", "train_accelerate.py", *SMALL, *flags, FAKE_GPU_TAKEN_GB="74")
    assert "Advice:  74 of 85 GB of the GPU are in use by other processes" in done.stdout, done.stderr[-3000:]


def test_masked_attention_avoids_cudnn_at_lengths_where_it_returned_nan(stores, tmp_path):
    flags = ("--data", stores / "32000", "--output_dir", tmp_path / "run", "--plan", "--plan_steps", "0")
    flags += ("--mask_documents", "true", "--attn_pdrop", "0", "--tokens_per_step", "8192")
    for context, kernel in (("64", "efficient"), ("128", "cudnn")):
        done = on_card("H100", "train_accelerate.py", *SMALL, *flags, "--n_positions", context)
        assert f"attention: sdpa ({kernel})" in done.stdout, done.stderr[-3000:]
        assert ("Attention does not use cuDNN" in done.stdout) == (kernel == "efficient")


ATTENTION = """if True:
    import torch
    from training.runtime.device import Setup, kernel_of_sdpa
    for precision in ("fp16", "bf16", "no"):
        for dropout in (0.0, 0.1):
            for mask in (False, True):
                setup = Setup(precision, True, "sdpa", (), mask_documents=mask)
                print(precision, dropout, mask, kernel_of_sdpa(torch.device("cuda"), setup, 1024, 64, dropout))
"""


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("T4", {"fp16 0.0 False": "efficient", "fp16 0.0 True": "efficient", "no 0.1 False": "efficient"}),
        ("L4", {"bf16 0.0 False": "flash", "bf16 0.0 True": "efficient", "bf16 0.1 False": "flash"}),
        ("H100", {"bf16 0.0 False": "cudnn", "bf16 0.1 False": "flash", "no 0.0 True": "efficient"}),
    ],
)
def test_attention_uses_the_fastest_kernel_of_the_card(card, expected):
    done = on_card(card, "-c", ATTENTION)
    assert done.returncode == 0, done.stderr
    chosen = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert "math" not in {kernel for case, kernel in chosen.items() if not (card == "T4" and "bf16" in case)}
    assert {case: chosen[case] for case in expected} == expected
