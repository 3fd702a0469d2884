"""Comparison of a run with the reference curve of its settings and text."""

import json
import re

import pytest

from benchmarks import reference as benchmark
from conftest import metrics, trained
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
    wrong = ["", "<<<<<<< HEAD\n", "[]", json.dumps(head), json.dumps(head) + '\n{"step": null}']
    for name, content in zip("abcde", wrong, strict=True):
        (folder / f"{name}.jsonl").write_text(content)
    run = trained(store, tmp_path / "run", seed=2)
    losses = [entry["eval_loss"] for entry in metrics(run) if "eval_loss" in entry]
    difference = losses[1] - curve[1]["eval_loss"]
    expectation = (
        f"{abs(difference):.2f} {'above' if difference > 0 else 'below'} the reference tiny at 0.000384M tokens"
    )
    out = capsys.readouterr().out
    assert expectation in out
    assert re.findall(r"(\w)\.jsonl is damaged \(.+\), so no run is compared with it\.\n", out) == list("abcde")
    assert f"Last validation loss: {expectation} (`presets/reference/`)." in (run / "report.md").read_text()
    second = trained(store, tmp_path / "other", learning_rate=0.02)
    assert "the reference" not in capsys.readouterr().out + (second / "report.md").read_text()


def test_losses_between_validations_are_interpolated_and_silent_beyond_the_curve():
    curve = Reference("x", [10, 20], [3.0, 2.0], 1_000_000)
    assert curve.compared({"step": 15, "eval_loss": 2.75}) == "0.25 above the reference x at 15M tokens"
    sample_entry = {"step": 20, "eval_loss": 9.0, "eval_sampled_loss": 1.9}
    assert curve.compared(sample_entry) == "0.10 below the reference x at 20M tokens"
    assert curve.compared({"step": 20, "eval_loss": 2.004}) == "within 0.01 of the reference x at 20M tokens"
    assert curve.compared({"step": 21, "eval_loss": 2.0}) == ""
