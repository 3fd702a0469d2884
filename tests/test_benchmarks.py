"""Tests of the benchmark scripts at tiny sizes, and of their recorded results."""

import itertools
import json
import os
import subprocess
import threading
from contextlib import suppress

import pytest

from benchmarks import contestants, performance, results, scaling, small_data, speedrun, tokens_to_loss, train_step
from benchmarks.contestants import Measurement, Rung, compete
from benchmarks.ladder import LADDER, WITHOUT_ONE
from benchmarks.workload import Workload, make_store
from conftest import REPOSITORY, assert_user_error, flags


@pytest.mark.parametrize(
    ("name", "pages"),
    [("performance", performance), ("tokens_to_loss", tokens_to_loss), ("budget", scaling), ("small_data", small_data)],
)
def test_a_page_matches_its_results(name, pages):
    assert (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8") == pages.page()


def test_plan_estimates_are_close_to_the_measured_runs():
    for path in results.RESULTS.glob("plan-*.json"):
        for run in json.loads(path.read_text())["runs"].values():
            assert run["said"]["seconds"] == pytest.approx(run["took"]["seconds"], rel=0.2)
            assert run["said"]["peak_memory_gb"] == pytest.approx(run["took"]["peak_memory_gb"], rel=0.1)


def test_each_rung_changes_one_setting():
    rungs = list(LADDER.values())
    pairs = list(itertools.pairwise(rungs)) + [(Rung(), rung) for rung in WITHOUT_ONE.values()]
    for one, other in pairs:
        assert sum(vars(one)[name] != vars(other)[name] for name in vars(one)) == 1, other
    assert rungs[-1] == Rung()


def test_ratios_are_computed_within_a_round_and_a_wrong_nanogpt_path_is_refused(tmp_path):
    """The machine is three times slower in the second round. `theirs` takes twice as long as `ours` in both."""
    measured = {
        "ours": [{"seconds_a_step": [0.1, 0.2, 0.2]}, {"seconds_a_step": [0.6]}],
        "theirs": [{"seconds_a_step": [0.4]}, {"seconds_a_step": [1.2]}],
    }
    assert train_step.ratios(measured) == {"theirs": {"median": 2.0, "p10": 2.0, "p90": 2.0}}
    assert_user_error(r"has no model\.py", train_step.main, ["--nanogpt", str(tmp_path)])


@pytest.fixture
def forked_contestants(launch, monkeypatch):
    monkeypatch.setattr(contestants, "run_python", lambda *command, **_: launch(*command))


def test_the_train_step_benchmark_measures_a_run(tmp_path, monkeypatch, forked_contestants):
    """Runs the whole benchmark, only smaller."""
    for module in (results, performance):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    settings = {"preset": "nano", "sequences": 1, "rounds": 1, "warmup": 1, "windows": 1, "steps": 1, "only": "ours"}
    train_step.main(flags(**settings))
    [path] = tmp_path.glob("train-step-nano-*.json")
    ours = json.loads(path.read_text())["contestants"]["ours"]
    speed = 128_000 / ours["milliseconds_a_step"]["median"]
    assert ours["tokens_per_second"]["median"] == pytest.approx(speed, rel=0.01)
    assert ours["graph_breaks"] == ours["recompiles"] == 0
    assert ", compiled, " in ours["device_line"]
    assert (
        "\n### nano (2 layers, width 128, vocabulary 4,096), 1 x 128 tokens per step, without dropout\n"
        in performance.page()
    )


def test_a_raw_loop_is_measured_without_recompilation(tmp_path, forked_contestants):
    workload = Workload.of_preset("shakespeare_char", 1, dropout=0.0)
    make_store(tmp_path / "store", workload.vocab_size)
    found = compete(tmp_path, workload, Measurement(1, 2, 1), "raw", **vars(LADDER["memory map, a loop over rows"]))
    assert len(found["seconds_a_step"]) == 2
    assert found["recompiles"] == 0


@pytest.fixture
def python(launch, tmp_path):
    """A program like `python`, whose commands `launch` runs."""
    program, question, answer = (tmp_path / name for name in ("python", "question", "answer"))
    program.write_text(f"""#!/bin/bash
printf '%s\\n' "$@" > {question}
{{ read code; cat; }} < {answer}
exit $code
""")
    program.chmod(0o755)
    for pipe in (question, answer):
        os.mkfifo(pipe)

    def serve() -> None:
        while command := question.read_text().splitlines():
            done = launch(*command)
            answer.write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")

    threading.Thread(target=serve, daemon=True).start()
    yield program
    with suppress(OSError):  # nobody reads, because the script ended early
        os.close(os.open(question, os.O_WRONLY | os.O_NONBLOCK))


def test_the_script_for_the_first_hour_on_a_gpu_runs_on_a_cpu_with_tiny_models(tmp_path, python):
    """All commands of the script exist and accept their flags, and its run resumes bitwise."""
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "logs")}
    command = ["bash", "benchmarks/first_hour_on_gpu.sh", "--smoke"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("exit code 0 after") == 8
    assert "measured peak, including the program itself: " in done.stdout


def test_speedrun_entries_are_compared_and_their_settings_confined(tmp_path):
    path = results.RESULTS / "speedrun-cpu.json"
    entry = speedrun.read_entry(path)
    assert speedrun.compare(entry, entry) == []
    assert speedrun.compare(entry, entry | {"weights_sha256": "0"}) == ["weights_sha256 differ"]
    assert speedrun.compare(entry, entry | {"cpu": "other", "weights_sha256": "0", "bits_per_byte": 1.26}) == []
    far = entry | {"torch": "3", "bits_per_byte": 1.4}
    assert speedrun.compare(entry, far) == ["bits per byte differ by 0.1452, more than 0.02"]
    assert "the text differs (the entry used Python" in speedrun.compare(entry, entry | {"text_sha256": ""})[0]
    assert speedrun.settings_file(entry["settings"], "", tmp_path / "settings.yaml").is_file()
    for name in ("init_from", "backup_dir", "exclude", "cleaning", "max_bytes"):
        (tmp_path / "theirs.json").write_text(json.dumps(entry | {"settings": entry["settings"] | {name: "x"}}))
        sentence = f"theirs.json has {name}, which the rules do not allow"
        assert_user_error(sentence, speedrun.main, ["--verify", str(tmp_path / "theirs.json")])
    (tmp_path / "theirs.json").write_text("{}")
    sentence = "is not an entry of this speedrun \\(it lacks bits_per_byte, cpu"
    assert_user_error(sentence, speedrun.main, ["--verify", str(tmp_path / "theirs.json")])
    assert_user_error("Name --output for a new entry", speedrun.main, [])


def test_small_data_has_a_row_per_budget_and_refuses_another_text(tmp_path):
    settings = {"settings": {"n_layer": 3}, "epochs": 4.0}
    runs = [{"arm": "`--budget`", "seed": seed, "flops": flops} for flops in (4e13, 2e13) for seed in (1, 2)]
    rows = [{"run": run, "bits_per_byte": 6e13 / run["flops"]} | settings for run in runs]
    path, head = tmp_path / "small-data-my-1mb.jsonl", results.about("", []) | {"data": "my-1mb", "train_tokens": 9}
    results.write_runs(path, head, {results.key(row["run"]): row for row in rows})
    bits = {"2e+13": "3.0000 ± 0.0000", "4e+13": "1.5000 ± 0.0000"}
    expected = [["my-1mb", f"`--budget`, {flops} FLOPs", "3", "4.0", mean] for flops, mean in bits.items()]
    assert small_data.rows_of(path) == expected
    sentence = "^small-data-my-1mb.jsonl was measured with train_tokens 9, now 8: use the same, or delete the file"
    assert_user_error(sentence, results.require_same_conditions, path, head, (), train_tokens=8)
