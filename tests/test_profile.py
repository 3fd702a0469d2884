"""Profile: complete accounting of time, and no effect on the run."""

import gzip
import json
import shutil

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from conftest import assert_same_run
from training.log.profile import summarize_profile, table

ADAMW = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>"


def event(name: str, start: float, end: float, parent: FunctionEvent | None = None, **options) -> FunctionEvent:
    child = FunctionEvent(0, name, 1, start, end, **options)
    if parent is not None:
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    return child


def test_device_time_is_that_of_kernels():
    """Two steps that take 1,000 us together."""
    gpu = {"device_type": DeviceType.CUDA}
    events = [
        event("data", 0, 100),
        event("aten::mm", 200, 900),  # only launches kernels
        event("optimizer", 600, 1000, is_user_annotation=True, **gpu),  # the range, in the device's stream
        event("nvjet_hsh", 0, 300, **gpu),
        event("nvjet_hsh", 300, 500, **gpu),
        event(ADAMW, 600, 900, **gpu),
    ]
    summary = summarize_profile(events, 1000, 4, 5)
    kernels = [{"name": "nvjet_hsh", "ms": 0.25}, {"name": ADAMW, "ms": 0.15}, {"name": "no kernel", "ms": 0.1}]
    assert (summary["step_ms"], summary["kernels"]) == (0.5, kernels)
    assert table(summary).splitlines() == [
        "Time per step (steps 4 to 5): 0.50 ms",
        "        0.25 ms  50.0%  nvjet_hsh",
        f"        0.15 ms  30.0%  {ADAMW[:45]}…{ADAMW[-26:]}",
        "        0.10 ms  20.0%  no kernel",
    ]


def test_cpu_time_counts_for_the_innermost_operator():
    data, linear, optimizer = event("data", 0, 100), event("aten::linear", 120, 200), event("optimizer", 600, 700)
    events = [data, event("aten::stack", 10, 90, data), linear, event("aten::addmm", 130, 190, linear), optimizer]
    events += [event("aten::mul_", 620, 650, optimizer)]
    times = {kernel["name"]: kernel["ms"] for kernel in summarize_profile(events, 700, 4, 4)["kernels"]}
    assert times == {
        "data": 0.02,
        "aten::stack": 0.08,
        "aten::linear": 0.02,
        "aten::addmm": 0.06,
        "optimizer": 0.07,
        "aten::mul_": 0.03,
    }


def summary_of(run) -> dict:
    return json.loads((run / "profile" / "summary.json").read_text())


def assert_adds_up(summary: dict) -> None:
    names, total = {kernel["name"] for kernel in summary["kernels"]}, sum(kernel["ms"] for kernel in summary["kernels"])
    assert total == pytest.approx(summary["step_ms"], rel=0.05)
    assert {"data", "forward", "backward", "optimizer", "aten::mm"} <= names


def test_profiling_does_not_change_the_run(train, tmp_path, capsys):
    settings = {"per_device_train_batch_size": 2, "resid_pdrop": 0.1}
    plain = train(tmp_path / "plain", **settings)
    run = train(tmp_path / "run", "--profile", **settings)
    assert_same_run(plain, run)

    summary, path = summary_of(run), run / "profile" / "trace.json.gz"
    assert (summary["first_step"], summary["last_step"]) == (4, 6)
    assert_adds_up(summary)
    names = {kernel["name"] for kernel in summary["kernels"]}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert f"{table(summary)}\nTrace: {path}; " in capsys.readouterr().out
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"data", "forward", "backward", "optimizer", "aten::addmm"} <= set(names)
    assert names.count("backward") == 3 * 2  # steps, micro-batches
    assert "profile" not in (run / "config.yaml").read_text()  # a resumed run does not profile again


def test_a_resumed_run_is_profiled_from_its_start(train, tmp_path, capsys):
    run, settings = tmp_path / "run", {"eval_strategy": "no", "save_steps": 20}
    train(run, max_steps=2, **settings)
    resume = ("--resume_from_checkpoint", str(run), "--profile")
    train(run, *resume, max_steps=9, **settings)
    summary = summary_of(run)
    assert (summary["first_step"], summary["last_step"]) == (6, 8)
    train(run, *resume, max_steps=11, **settings)
    assert "Nothing was profiled: the run ended before step 15, the last to record." in capsys.readouterr().out
    assert summary_of(run) == summary


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_kernels_are_named(train, tmp_path):
    summary = summary_of(train(tmp_path / "run", "--profile", torch_compile="true", n_layer=1, eval_strategy="no"))
    assert_adds_up(summary)
    assert any("cpp_fused_" in kernel["name"] for kernel in summary["kernels"])
