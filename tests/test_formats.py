"""Compatibility of formats: folders of older versions (tests/formats/) are read, newer formats are refused.

The folders of format 1 were written by the version of 2026-11-21 02:26, those of format 2 by that of 2026-11-22 07:00.
"""

import json
import os
import re
import shutil

import pytest
from test_export import rows, unpacked

import generate
import train_accelerate
from common.atomic import file_sha256
from common.removal import mark
from conftest import REPOSITORY, assert_user_error, contents, reset_accelerate
from tokenizer import inspect, pretokenize
from tokenizer.build import export
from tokenizer.build.recipe import Recipe
from tokenizer.store.store import TokenStore
from training import compare_runs
from training.checkpoints.metrics import read_metrics
from training.checkpoints.run_folder import RunFolder
from training.data import run_data as data
from training.report.report import evaluation_of

FORMATS = REPOSITORY / "tests" / "formats"


@pytest.fixture
def old(tmp_path):
    """Copy of folders that older versions wrote, which tests may change."""
    return shutil.copytree(FORMATS, tmp_path / "formats")


def train(*arguments):
    reset_accelerate()
    train_accelerate.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("version", "loss"), [(1, 3.35865), (2, 3.35542)])
def test_older_run_generates_and_resumes_to_its_original_loss(old, version, loss, capsys):
    run = old / f"run_v{version}"
    generate.main([str(run), "--prompt", "The ", "--max_new_tokens", "4", "--temperature", "0"])
    assert len(capsys.readouterr().out.strip("\n")) == len("The ") + 4
    (run / "report.md").touch()
    train("--resume_from_checkpoint", run, "--data", old / f"store_v{version}")
    output = capsys.readouterr().out
    assert "damaged" not in output
    assert "report.md is of an older version, or was edited: that page is now" in output
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    assert read_metrics(run / "metrics.jsonl")[-1]["eval_loss"] == pytest.approx(loss, abs=1e-5)


def test_older_runs_are_compared(old, run, capsys):
    first, content = old / "run_v1", (old / "run_v1" / "config.yaml").read_text()
    for steps, state in ((7, "running at step 6 of 7"), (6, "finished")):
        (first / "config.yaml").write_text(content.replace("max_steps: 6", f"max_steps: {steps}"))
        compare_runs.main([str(first), str(run), "--output", str(old / "comparison.png")])
        output = capsys.readouterr().out
        assert f"| {state} |" in output
        assert "output_dir" not in output
        assert "different tokenizers, or an older version did not record which: compare bits per byte" in output


def test_same_command_resumes_a_run_that_lacks_a_new_setting(old):
    run, command = old / "run_v2", old / "command.yaml"
    content = (run / "config.yaml").read_text().replace("data: data/store", f"data: {old / 'store_v2'}")
    command.write_text(content.replace("initializer_range: 0.02\n", ""))
    assert "bf16_residual: false\n" in content
    content = content.replace("bf16_residual: false\n", "").replace("range: 0.02\n", "range: 0.03\n")
    (run / "config.yaml").write_text(content)
    train("--config", command, "--output_dir", run)
    assert "initializer_range: 0.03\n" in (run / "config.yaml").read_text()  # of its initial weights
    assert (run / "checkpoints" / "step_00000006").is_dir()


@pytest.mark.parametrize(("version", "ends"), [(1, [439]), (2, [444, 773, 1119])])
def test_older_store_is_read(old, version, ends, capsys):
    store = TokenStore(old / f"store_v{version}")
    assert store.offsets("val").tolist() == [0, *ends]
    inspect.main([str(store.folder)])
    assert "All hashes and indexes are correct" in capsys.readouterr().out
    inspect.main([str(store.folder), "--split", "val", "--document", "0"])
    text = (old / "unfinished_v1" / "text" / ("05.txt" if version == 1 else "00.txt")).read_text()
    assert capsys.readouterr().out == text + "\n"
    if version == 2:
        assert TokenStore(unpacked(old / "store_v2.tar.zst")).metadata == store.metadata


def test_format_1_store_is_used_packed_and_exported_unchanged(old, capsys):
    before = contents(old / "store_v1")
    text = str(old / "unfinished_v1" / "text")
    pretokenize.main(["--input", text, "--output", str(old / "store_v1"), "--tokenizer_type", "character"])
    assert "it is used unchanged" in capsys.readouterr().out
    assert contents(old / "store_v1") == before
    store = TokenStore(old / "store_v1")
    assert contents(unpacked(export.to_archive(store))) == before
    exported = rows(export.to_parquet(store), "validation")
    assert [ids for _, row in exported for ids in row] == store.in_memory("val").tolist()
    assert len(exported) == store.metadata.val.documents


def test_unfinished_work_of_an_older_version_is_completed(old, monkeypatch, capsys):
    monkeypatch.chdir(old / "unfinished_v1")
    plan = json.loads((old / "unfinished_v1" / ".store.unfinished" / "plan.json").read_text())
    for name, _, modified in plan["inputs"]:
        os.utime(name, ns=(modified, modified))
    command = ["--input", "text/0*", "text/1*", "--tokenizer_type", "character", "--validation_fraction", "0.2"]
    pretokenize.main([*command, "--output", "store", "--num_proc", "1"])
    assert "1 of 2 units of work are done" in capsys.readouterr().out
    pretokenize.main([*command, "--output", "fresh", "--num_proc", "1"])
    assert TokenStore("store").metadata.identity == TokenStore("fresh").metadata.identity


def test_older_evaluations_are_read(old):
    run = RunFolder(old / "run_v2")
    results = json.loads((run.evaluation / "evaluation.json").read_text())
    shutil.copytree(run.checkpoints / "step_00000004", run.model)
    assert evaluation_of(run, run.model) is None  # it evaluated other weights, those of step 6
    results["weights_sha256"] = [file_sha256(run.model / "model.safetensors")]
    (run.evaluation / "evaluation.json").write_text(json.dumps(results))
    assert evaluation_of(run, run.model)["panel"]["rows"]


def test_the_cached_store_of_a_run_is_named(old, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", old)
    shutil.copytree(old / "run_v2", run := tmp_path / "my run")
    origin = r"the run was trained on \S+/store_v2, so resume it with"
    checkpoint = run / "checkpoints" / "step_00000004"
    for source, more in ((run, ()), (checkpoint, ("--output_dir", tmp_path / "branch"))):
        sentence = f"{origin} --resume_from_checkpoint '{re.escape(str(source))}' --data \\S+/store_v2;"
        assert_user_error(sentence, train, "--resume_from_checkpoint", source, "--data", old / "store_v1", *more)


def test_names_of_cached_stores_stay_the_same():
    """A change here would rebuild users' cached stores: omit a new setting from `Recipe.settings` at its default."""
    corpus = {"text_column": None, "sample_by": "document", "chat_template": None, "strict": False}
    tokens = {"vocab_size": None, "tokenizer_type": "bpe", "tokenizer": None, "sample_bytes": 200000000}
    rest = {"pad_token": "<|pad|>", "special_tokens": [], "cleaning": ["normalize"], "dedup": "no", "input": ["x"]}
    rest |= {"weights": [], "seed": 1337, "validation_fraction": 0.01}
    assert Recipe(["x"]).settings() == corpus | tokens | rest


def pretokenize_again(old):
    os.chdir(old / "unfinished_v1")
    pretokenize.main(["--input", "text/0*", "text/1*", "--output", "store", "--tokenizer_type", "character"])


def resume(old):
    train("--resume_from_checkpoint", old / "run_v2", "--data", old / "store_v2")


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("run_v2/checkpoints/step_00000004/manifest.json", resume),
        ("run_v2/status.json", resume),
        ("store_v2/metadata.json", resume),
        ("unfinished_v1/.store.unfinished/plan.json", pretokenize_again),
        ("run_v2/evaluation/evaluation.json", lambda it: evaluation_of(RunFolder(it / "run_v2"), it / "run_v2/model")),
    ],
)
def test_files_of_newer_versions_are_refused_and_kept(old, file, use, monkeypatch):
    monkeypatch.chdir(old)
    content = json.loads((old / file).read_text()) | {"format_version": 9, "of_tomorrow": [1]}
    (old / file).write_text(json.dumps(content))
    before = contents(old)
    assert_user_error(r"was written by a newer version of GPT2Scratch \(format 9; .* `git pull`\.", use, old)
    after = contents(old)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("file", ["store_v2/metadata.json", "run_v2/config.yaml"])
def test_an_unknown_key_may_be_that_of_a_newer_version(old, file):
    text = (old / file).read_text()
    is_json = file.endswith("json")
    (old / file).write_text(text.replace("{", '{"of_tomorrow": 1, ', 1) if is_json else text + "of_tomorrow: 1\n")
    mark(old / "run_v2", "run")
    assert_user_error(r"of_tomorrow.* If a newer version of GPT2Scratch wrote it, update with", resume, old)
