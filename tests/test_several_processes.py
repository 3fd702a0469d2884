"""A run gives the same result with any number of processes, with and without sharding."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import (
    ACCELERATE,
    MODERN_RUN,
    REPOSITORY,
    TINY,
    TWO_PROCESSES,
    assert_equal,
    assert_user_error,
    flags,
    leave_out_plots,
    metrics,
    trained,
    weights,
)
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training.runtime.device import DeviceArguments, decide

DDP = {"ACCELERATE_USE_FSDP": "false"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SETTINGS = {**TINY, "tokens_per_step": 96}  # 6 sequences: for 1, 2 and 3 processes; width 16: 3 unequal shards
# As a long run by default: compiled, if there is a C++ compiler; three micro-batches per step.
COMPILES = decide(DeviceArguments(), TINY["n_positions"]).torch_compile
DEFAULTS = {"torch_compile": COMPILES, "mixed_precision": None, "per_device_train_batch_size": 1}
MUON = MODERN_RUN | {"optimizer": "muon", "tie_word_embeddings": False, "weight_average": 3}
MUON |= {"second_target_weight": 0.3, "induction_init": True}
TIED = {"tie_word_embeddings": True, "per_device_train_batch_size": 1}  # and 3 micro-batches per step


def run(store, folder: Path, environment: dict[str, str], resume_from: Path | None = None, **settings) -> dict:
    """Return a run for a group of processes; `resume_from`: a run whose third step it resumes from."""
    settings = {**SETTINGS, "data": store.folder, "output_dir": folder, **settings}
    if resume_from is not None:
        settings["resume_from_checkpoint"] = resume_from / "checkpoints" / "step_00000003"
    return {"environment": environment, "arguments": flags(**settings)}


@pytest.fixture(scope="module", autouse=True)
def without_plots():
    with pytest.MonkeyPatch.context() as patch:
        yield leave_out_plots(patch.setattr)


@pytest.fixture(scope="module")
def runs(launch, store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    trained(store, folder / "alone", **SETTINGS)
    trained(store, folder / "alone_tied", **SETTINGS | TIED)
    trained(store, folder / "alone_muon", **SETTINGS | MUON)
    pair = [
        run(store, folder / "ddp", DDP, profile=True),
        run(store, folder / "fsdp", FSDP),
        run(store, folder / "fsdp_tied", FSDP, **TIED),
        run(store, folder / "fsdp_muon", FSDP, **MUON),
        run(store, folder / "fsdp_muon_resumed", FSDP, resume_from=folder / "fsdp_muon", **MUON),
        run(store, folder / "ddp_muon", DDP, **MUON),
        run(store, folder / "fsdp_bf16", FSDP, mixed_precision="bf16", gradient_checkpointing=True, max_steps=3),
        run(store, folder / "fsdp_offloaded", FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}),
        run(store, folder / "alone_to_fsdp", FSDP, resume_from=folder / "alone"),
        run(store, folder / "fsdp_to_ddp", DDP, resume_from=folder / "fsdp"),
        run(store, folder / "ddp_defaults", DDP, **MUON | DEFAULTS),
        run(store, folder / "ddp_defaults_resumed", DDP, resume_from=folder / "ddp_defaults", **MUON | DEFAULTS),
        run(store, folder / "fsdp_defaults", FSDP, **DEFAULTS),
    ]
    (folder / "pair.json").write_text(json.dumps(pair))
    result = launch(*TWO_PROCESSES, "tests/several_processes.py", folder / "pair.json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("passed: check_") == 10
    assert result.stdout.count("2 processes, model and optimizer sharded") == 8  # all with FSDP
    assert result.stdout.count(", compiled, ") == 3 * COMPILES
    assert result.stdout.count("2 buckets") == 4 * COMPILES, result.stdout  # two runs of two processes
    assert result.stdout.count("Time per step (steps 4 to 6)") == 1
    checkpoint = folder / "fsdp" / "checkpoints" / "step_00000003"
    trained(store, folder / "fsdp_to_alone", **SETTINGS, resume_from_checkpoint=checkpoint)
    return folder


def numbers(run: Path) -> dict[tuple[int, str], float]:
    comparison = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_tokens")
    return {(entry["step"], name): entry[name] for entry in metrics(run) for name in comparison if name in entry}


def assert_same(run: Path, expectation: Path, tolerance: float = 1e-6) -> None:
    actual, reference = numbers(run), numbers(expectation)
    for key, value in actual.items():
        assert value == pytest.approx(reference[key], abs=tolerance), key
    assert (6, "eval_loss") in actual


@pytest.mark.parametrize(
    ("name", "alone"), [("ddp", "alone"), ("fsdp", "alone"), ("fsdp_offloaded", "alone"), ("fsdp_tied", "alone_tied")]
)
def test_two_processes_train_like_one(runs, name, alone):
    assert_same(runs / name, runs / alone)
    assert numbers(runs / name).keys() == numbers(runs / alone).keys()
    assert (runs / name / "samples.md").read_text() == (runs / alone / "samples.md").read_text()


@pytest.mark.parametrize("name", ["alone_to_fsdp", "fsdp_to_ddp", "fsdp_to_alone"])
def test_a_run_resumes_with_another_number_of_processes(runs, name):
    assert_same(runs / name, runs / "alone")
    assert min(numbers(runs / name))[0] == 4


def test_three_processes_resume_from_two_with_the_fsdp2_yaml(launch, store, runs):
    resume = run(store, runs / "three", {}, resume_from=runs / "fsdp")
    three = ("--num_processes", "3", "train_accelerate.py", *resume["arguments"])
    result = launch(*ACCELERATE, "--config_file", "launch/fsdp2.yaml", *three, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    assert "3 processes, model and optimizer sharded" in result.stdout
    assert_same(runs / "three", runs / "alone")


@pytest.mark.parametrize(("name", "alone"), [("ddp_defaults", "alone_muon"), ("fsdp_defaults", "alone")])
def test_two_processes_train_at_default_settings(runs, name, alone):
    """Compiled, with the device's precision, which may be bf16."""
    actual, expectation = numbers(runs / name), numbers(runs / alone)
    assert actual.keys() == expectation.keys()
    for step in range(1, 7):
        assert actual[step, "loss"] == pytest.approx(expectation[step, "loss"], abs=2e-2)


@pytest.mark.parametrize("name", ["ddp_defaults", "fsdp_muon"])
def test_two_processes_resume_bitwise(runs, name):
    assert_equal(weights(runs / name), weights(runs / f"{name}_resumed"))


@pytest.mark.parametrize("name", ["ddp_muon", "fsdp_muon"])
def test_muon_on_two_processes_trains_like_on_one(runs, name):
    assert numbers(runs / name).keys() == numbers(runs / "alone_muon").keys()
    assert_same(runs / name, runs / "alone_muon", tolerance=1e-3)


def shapes(path: Path) -> dict[str, tuple]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


@pytest.mark.parametrize(("actual", "reference"), [("fsdp", "ddp"), ("ddp", "alone"), ("fsdp_tied", "alone_tied")])
def test_checkpoints_are_equal_for_all_kinds_of_processes(runs, actual, reference):
    actual, reference = (runs / name / "checkpoints" / "step_00000006" for name in (actual, reference))
    files = {path.relative_to(actual) for path in actual.rglob("*") if path.is_file()}
    assert files == {path.relative_to(reference) for path in reference.rglob("*") if path.is_file()}
    assert (actual / "config.json").read_text() == (reference / "config.json").read_text()
    for name in ("model.safetensors", "training_state/optimizer.safetensors"):
        assert shapes(actual / name) == shapes(reference / name)
        expectation = load_file(reference / name)
        for key, tensor in load_file(actual / name).items():
            torch.testing.assert_close(tensor, expectation[key], rtol=0, atol=2e-5, msg=key)
    _, info = GPT2ScratchForCausalLM.from_pretrained(actual, output_loading_info=True)
    assert not any(info.values()), info


def test_bf16_and_recomputed_activations_are_close(runs):
    actual, expectation = numbers(runs / "fsdp_bf16"), numbers(runs / "alone")
    for step in (1, 2):
        assert 1e-6 < abs(actual[step, "loss"] - expectation[step, "loss"]) < 1e-2
    tensors = shapes(runs / "fsdp_bf16" / "model" / "model.safetensors")
    assert {dtype for _, dtype in tensors.values()} == {"F32"}


def test_more_requested_than_running_processes_are_refused(train, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(r"requests 2 processes \(WORLD_SIZE\), but Accelerate sees 1", train, tmp_path / "run")


def test_fsdp1_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert_user_error("fsdp_version is 1; set it to 2", decide, DeviceArguments(), 16)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert decide(DeviceArguments(), 16).sharding == "cpu"


def test_fsdp_with_one_process_keeps_the_whole_model(train, tmp_path, monkeypatch, capsys):
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    train(tmp_path / "run", max_steps=1)
    assert ", 1 process\n" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((REPOSITORY / "launch").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_have_a_header_and_only_known_keys(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"accelerate launch --quiet --config_file launch/{path.name}" in text
    config = load_config_from_file(str(path))  # refuses unknown keys, but not those of fsdp_config
    assert config.mixed_precision is None
    facts = {name for action in launch_command_parser()._actions for name in action.option_strings}
    assert {f"--{key}" for key in config.fsdp_config} <= facts
