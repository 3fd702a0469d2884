import itertools
import json
import os
import subprocess
import sys

import pytest

from benchmarks import performance, results, train_step
from benchmarks.contestants import Measurement, Rung, compete
from benchmarks.ladder import LADDER, WITHOUT_ONE
from benchmarks.workload import Workload, make_store
from conftest import REPOSITORY
from errors import UserError


def test_the_page_of_performance_says_what_the_results_say():
    assert (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8") == performance.page()


def test_plans_came_near_their_runs():
    for path in results.RESULTS.glob("plan-*.json"):
        for run in json.loads(path.read_text())["runs"].values():
            assert run["said"]["seconds"] == pytest.approx(run["took"]["seconds"], rel=0.2)
            assert run["said"]["peak_memory_gb"] == pytest.approx(run["took"]["peak_memory_gb"], rel=0.1)


def test_every_rung_changes_one_lever():
    rungs = list(LADDER.values())
    pairs = list(itertools.pairwise(rungs)) + [(Rung(), rung) for rung in WITHOUT_ONE.values()]
    for one, other in pairs:
        assert sum(vars(one)[name] != vars(other)[name] for name in vars(one)) == 1, other
    assert rungs[-1] == Rung()


def test_ratios_are_taken_within_a_round_and_a_clone_that_is_none_is_refused(tmp_path):
    """The machine is three times as slow in the second round; theirs takes twice as long in both."""
    measured = {
        "ours": [{"seconds_a_step": [0.1, 0.2, 0.2]}, {"seconds_a_step": [0.6]}],
        "theirs": [{"seconds_a_step": [0.4]}, {"seconds_a_step": [1.2]}],
    }
    assert train_step.ratios(measured) == {"theirs": {"median": 2.0, "p10": 2.0, "p90": 2.0}}
    with pytest.raises(UserError, match=r"has no model\.py"):
        train_step.main(["--nanogpt", str(tmp_path)])


def test_ours_and_a_raw_loop_compete(tmp_path, monkeypatch):
    """From the command to the result, with everything real but the size."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    few = ["--sequences", "1", "--rounds", "1", "--warmup", "1", "--windows", "1", "--steps", "1"]
    train_step.main([*few, "--only", "ours"])
    [path] = tmp_path.glob("train-step-shakespeare_char-*.json")
    result = json.loads(path.read_text())
    assert result["workload"]["n_positions"] == 256
    ours = result["contestants"]["ours"]
    assert ours["tokens_per_second"]["median"] == pytest.approx(
        256 / (ours["milliseconds_a_step"]["median"] / 1000), rel=0.01
    )
    assert ours["graph_breaks"] == ours["recompiles"] == 0
    assert performance.train_step(path, result).startswith("### shakespeare_char (4 layers, width 256, vocabulary 65)")


def test_rungs_train_the_same_model_whatever_their_levers(tmp_path):
    workload = Workload.of_preset("shakespeare_char", 1, dropout=0.0)
    make_store(tmp_path / "store", workload.vocab_size)
    workload.write(tmp_path)
    naive = vars(LADDER["memory map, a loop over rows"])
    found = compete(tmp_path, Measurement(1, 2, 1), "raw", **naive)
    assert len(found["seconds_a_step"]) == 2
    assert found["recompiles"] == 0


def test_the_first_hour_on_a_gpu_runs_at_tiny_sizes_on_a_cpu(tmp_path):
    """Its commands exist, take their flags, and resume to the bit; what they show about a GPU is for whoever has one."""
    done = subprocess.run(
        ["bash", "benchmarks/first_hour_on_gpu.sh", "--smoke"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("exit code 0 after") == 8
    assert "measured peak, including the program itself: " in done.stdout
