"""Comparison of a run with the reference curve of its settings and text."""

import json

import pytest

from benchmarks import reference as benchmark
from conftest import metrics, trained
from training.config import read_config
from training.log import reference
from training.log.reference import Reference


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (reference, benchmark):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "reference")
    return tmp_path / "reference"


def test_a_run_of_the_same_settings_and_text_is_compared_and_others_are_not(finished, store, folder, tmp_path, capsys):
    benchmark.main([str(finished), "tiny"])
    head, *curve = map(json.loads, (folder / "tiny.jsonl").read_text().splitlines())
    assert {"device", "torch", "compared"} <= head.keys()
    assert [entry["step"] for entry in curve] == [3, 6]
    run = trained(store, tmp_path / "run", seed=2)
    losses = [entry["eval_loss"] for entry in metrics(run) if "eval_loss" in entry]
    difference = losses[1] - curve[1]["eval_loss"]
    place = f"{'above' if difference > 0 else 'below'} the reference tiny at 0.000384M tokens"
    assert f"{abs(difference):.2f} {place}" in capsys.readouterr().out
    assert f" {place} (`presets/reference/`)." in (run / "report.md").read_text()
    older = head | {"compared": {name: value for name, value in head["compared"].items() if name != "weight_average"}}
    (folder / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (older, *curve)))
    assert reference.find_reference(reference.RunFolder(run)).name == "tiny"
    second = trained(store, tmp_path / "other", learning_rate=0.02)
    assert "the reference" not in capsys.readouterr().out + (second / "report.md").read_text()


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char_modern", "python_packages", "shakespeare_char"])
def test_the_reference_of_a_preset_has_its_settings(name):
    head = json.loads((reference.FOLDER / f"{name}.jsonl").read_text().splitlines()[0])["compared"]
    values = read_config(["--config", f"presets/{name}.yaml", "--data", "presets"]).values
    settings = {setting: str(values[setting]) for setting in reference.COMPARED_SETTINGS}
    defaults = dict.fromkeys(reference.COMPARED_SETTINGS, "None") | reference.DEFAULTS
    assert settings == defaults | {name: head[name] for name in head.keys() & settings.keys()}


def test_losses_between_validations_are_interpolated_and_silent_beyond_the_curve():
    curve = Reference("x", [10, 20], [3.0, 2.0], 1_000_000)
    assert curve.compared({"step": 15, "eval_loss": 2.75}) == "0.25 above the reference x at 15M tokens"
    sample_entry = {"step": 20, "eval_loss": 9.0, "eval_sampled_loss": 1.9}
    assert curve.compared(sample_entry) == "0.10 below the reference x at 20M tokens"
    assert curve.compared({"step": 20, "eval_loss": 2.004}) == "within 0.01 of the reference x at 20M tokens"
    assert curve.compared({"step": 21, "eval_loss": 2.0}) == ""
