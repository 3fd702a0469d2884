"""Sweeps and comparisons of runs, as real processes."""

import json
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from common import schema
from conftest import TINY, assert_user_error, error_of, flags, lines, metrics, status, wait_until
from training import compare_runs, sweep
from training.config import dump_config, read_config

SETTINGS = {name: value for name, value in TINY.items() if name != "learning_rate"}


def command(store, base, **settings) -> list[str]:
    return [*flags(data=store.folder, output_dir=base, **SETTINGS | settings), "--vary", "learning_rate=0.01,0.02"]


@pytest.fixture
def results(launch, monkeypatch) -> list[subprocess.CompletedProcess]:
    """Results of the runs of sweeps in this process, which are forks."""
    results = []

    def train(command: list[str], seconds: None) -> int:
        results.append(launch("train_accelerate.py", *command))
        return results[-1].returncode

    monkeypatch.setattr(sweep, "train", train)
    return results


def test_a_killed_sweep_continues_after_its_finished_and_failed_runs(store, run, tmp_path, spawn, results, capsys):
    first, second = (tmp_path / "sweep" / f"learning_rate={rate}" for rate in ("0.01", "0.02"))
    arguments = command(store, tmp_path / "sweep", max_steps=200, save_steps=50, eval_steps=100)
    process = spawn("-m", "training.sweep", *arguments)
    wait_until((second / "checkpoints" / "step_00000050").exists)
    compare_runs.main([str(first), str(second), "--output", str(tmp_path / "comparison.png")])
    rows = r"\| finished \| `0.01` \|.*\| running at step \d+ of 200 \| `0.02`"
    assert re.search(rows, capsys.readouterr().out, re.DOTALL)
    process.kill()
    process.wait()
    log = (first / "metrics.jsonl").read_bytes()
    shutil.copytree(run, tmp_path / "sweep" / "learning_rate=0.03")  # a finished run with other settings
    assert_user_error("1 of 3 runs failed: .*=0.03", sweep.main, [*arguments[:-1], "learning_rate=0.03,0.01,0.02"])
    assert "contains another run" in results[0].stderr
    assert (tmp_path / "sweep" / "comparison.png").is_file()
    assert "learning_rate=0.01 is finished (200 steps)" in results[1].stdout
    assert (first / "metrics.jsonl").read_bytes() == log
    assert [event["event"] for event in lines(second / "events.jsonl")].count("resumed") == 1
    assert capsys.readouterr().out.count("| finished |") == 3
    shutil.rmtree(first / "checkpoints")
    sweep.main([*arguments[:-1], "learning_rate=0.01"])
    assert "learning_rate=0.01 is finished. It has no checkpoints" in capsys.readouterr().out


def test_a_run_without_checkpoints_is_compared_without_what_its_text_chose(tmp_path):
    words = ["--data", str(tmp_path / "my.txt"), "--output_dir", str(tmp_path)]
    config = read_config(words)
    (tmp_path / "config.yaml").write_text(dump_config(config.with_settings({"max_steps": 49, "n_layer": 1})))
    assert [len(sweep.differences(read_config([*words, *flag]))) for flag in ([], ["--max_steps", "9"])] == [1, 2]


def test_two_values_for_one_folder_are_refused(store, tmp_path):
    arguments = [*command(store, tmp_path / "sweep")[:-1], "learning_rate=0.01", "notes=a/b,a_b"]
    sentence = "Two combinations of --vary have the same folder, learning_rate=0.01,notes=a_b; sweep them separately"
    assert_user_error(sentence, sweep.main, arguments)


def test_a_finished_run_is_compared_by_the_validation_of_its_model(train, tmp_path, capsys):
    run = train(tmp_path / "run", load_best_model_at_end=True)
    *_, last = [entry for entry in metrics(run) if "eval_loss" in entry]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"eval_loss": 9.0, "step": 7}) + "\n")  # it was not saved
        file.write(json.dumps(last | {"eval_loss": 1.0, "step": 8}) + "\n")
    compare_runs.main([str(run), "--output", str(tmp_path / "x.png")])
    assert f"| `run` | {last['eval_loss']:.4f} |" in capsys.readouterr().out


def test_settings_that_a_budget_chooses_do_not_make_a_finished_run_another_one(tmp_path):
    config = read_config(["--data", "x", "--budget", "1h", "--n_layer", "2", "--output_dir", str(tmp_path)])
    choices = {"n_embd": 64, "learning_rate": 0.5, "max_steps": 7, "layer_norm_epsilon": 0.1}
    (tmp_path / "config.yaml").write_text(json.dumps(config.flat() | choices | {"n_layer": 3}))
    assert sweep.differences(config) == ["n_layer 3 -> 2"]


def test_a_signal_ends_the_sweep_after_its_run_is_saved_and_each_sweep_has_its_own_backup(store, tmp_path, spawn):
    base, drive = tmp_path / "runs" / "one", tmp_path / "drive"
    drive.mkdir()
    settings = {"max_steps": 100_000, "save_steps": 100_000, "eval_steps": 100_000, "backup_dir": drive}
    process = spawn("-m", "training.sweep", *command(store, base, **settings))
    wait_until(lambda: lines(base / "learning_rate=0.01" / "metrics.jsonl"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert lines(base / "learning_rate=0.01" / "events.jsonl")[-1]["event"] == "stopped"
    assert [path.name for path in (drive / "one").iterdir()] == ["learning_rate=0.01"]
    assert not (base / "learning_rate=0.02").exists()


def test_a_time_limit_ends_the_sweep(store, tmp_path, results, capsys):
    sweep.main(command(store, tmp_path, max_steps=100_000, max_hours=1e-4))
    assert "learning_rate=0.01 was stopped, so the sweep ends here; the same command" in capsys.readouterr().out
    assert not (tmp_path / "learning_rate=0.02").exists()


def test_a_run_that_the_time_limit_ends_before_its_first_step_ends_the_sweep(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "train", lambda command, seconds: 0)
    sweep.main(command(store, tmp_path, max_hours=1))
    assert "learning_rate=0.01 was stopped, so the sweep ends here; the same command" in capsys.readouterr().out


def test_the_time_limit_counts_from_the_start_of_the_sweep(store, tmp_path, monkeypatch, capsys):
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "train", lambda command, seconds: limits.append(seconds) or time.sleep(0.1) or 1)
        assert "2 of 2 runs failed" in error_of(sweep.main, command(store, tmp_path, max_hours=1))
        assert "1 of 2 runs failed" in error_of(sweep.main, command(store, tmp_path, max_hours=1e-6))
    assert (limits[0], limits[2:]) == (None, [None])
    assert 3599 < limits[1] < 3600
    assert "learning_rate=0.02 (max_hours); the same command continues it." in capsys.readouterr().out
    monkeypatch.setattr(sweep, "SCRIPT", tmp_path / "run.py")
    handled = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    sweep.SCRIPT.write_text(f"import signal, sys, time\n{handled}\ntime.sleep(int(sys.argv[1]))\nsys.exit(3)\n")
    assert [sweep.train(["0"], None), sweep.train(["600"], 2)] == [3, 0]


def test_all_problems_are_reported_before_the_first_run(store, tmp_path, monkeypatch):
    arguments = command(store, tmp_path / "sweep", n_head=3, n_embd=16)
    for item, sentence in {
        "learning_rat=1": "Unknown flag --learning_rat. Did you mean --learning_rate?",
        "weight_decay=0,x": "--weight_decay: invalid float value: 'x'",
        "adam_beta2=0.9,": "--adam_beta2: invalid float value: ''",
        "warmup_steps=1,3": "--warmup_steps is given twice",
        "output_dir=a,b": "--output_dir is given twice",
    }.items():
        problems = error_of(sweep.main, [*arguments, item])
        assert sentence in problems
        assert "n_embd 16 is not divisible by n_head 3." in problems
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(r"one process, but 2 were started; use python -m training\.sweep", sweep.main, arguments)


def test_a_table_has_differing_settings_and_skips_entries_that_are_not_runs(run, train, tmp_path, capsys):
    settings = {"max_eval_samples": 2, "hourly_price": 3600, "tokens_per_step": 128, "weight_average": 2}
    twin = train(tmp_path / "other", max_steps=3, **settings)
    (twin / "config.yaml").write_text((twin / "config.yaml").read_text() + "setting_of_another_version: 1\n")
    notes = tmp_path / "notes.txt"
    notes.touch()
    compare_runs.main([str(run), str(notes), str(twin), "--output", str(tmp_path / "x.png")])
    output = capsys.readouterr()
    assert "| cost | state | tokens_per_step | weight_average | max_eval_samples |" in output.out
    assert f"Skipped: {notes} is neither" in output.err
    part = shutil.copytree(twin, tmp_path / "part")  # stopped after a validation of a sample, with another tokenizer
    (part / "status.json").write_text((part / "status.json").read_text().replace("finished", "stopped"))
    facts = schema.read(part / "report.json")
    facts["data"]["val"]["sha256"] = "another"
    (part / "report.json").write_text(schema.sealed(facts))
    changes = {"max_steps": 9, "adam_beta1": 0.5, "adam_beta2": 0.5, "n_head": 1, "seed": 7}  # more than columns show
    config = yaml.safe_load((part / "config.yaml").read_text()) | changes
    (part / "config.yaml").write_text(yaml.safe_dump(config))
    (part / "status.json").write_text(json.dumps(status(part) | {"step": 5}))  # not every step is logged
    *entries, end = lines(part / "metrics.jsonl")
    end["eval_bits_per_byte"] *= end["eval_sampled_loss"] / end["eval_loss"]
    end |= {"eval_loss": end.pop("eval_sampled_loss"), "eval_tokens": end.pop("eval_sampled_tokens")}
    (part / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, end]))
    compare_runs.main([str(twin), str(part), "--output", str(tmp_path / "x.png")])
    output = capsys.readouterr().out
    assert "compare bits per byte, not losses; some are of samples" in output
    assert "| stopped at step 5 of 9 |" in output
    assert re.search(r"\n- `part`: .*adam_beta1 `0.5`, adam_beta2 `0.5`", output)
    scores = re.findall(r"\| `(?:part|other)` \| ([\d.]+ \| [\d.]+)", output)
    assert (len(scores), len({*scores})) == (2, 1)  # the same weights on the same sample
    kept = [entry for entry in entries if "eval_loss" not in entry]
    (part / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in kept))  # no validation yet
    compare_runs.main([str(twin), str(part), "--output", str(tmp_path / "x.png")])
    assert "compare bits per byte, not losses" in capsys.readouterr().out
    assert_user_error("(?s)notes.txt is .*none is neither", compare_runs.main, [str(notes), "none"])
    assert_user_error("none is neither", compare_runs.main, [str(run), "none"])
