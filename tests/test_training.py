"""Whole runs: their files, exact resuming, and refused settings."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.tracking import TensorBoardTracker
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_accelerate
from conftest import (
    TINY,
    append,
    assert_equal,
    assert_same_run,
    assert_user_error,
    checkpoint_of,
    flags,
    flip,
    lines,
    logged,
    metrics,
    prose,
    status,
    weights,
)
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from publishing.published_model import find_folder
from training import compare_runs
from training.checkpoints.checkpoint import damage, prune
from training.checkpoints.metrics import best_evaluation, comparable_loss
from training.checkpoints.run_folder import RunFolder, run_of
from training.checkpoints.samples import read_samples
from training.checkpoints.status import now
from training.data.run_data import name_of
from training.evaluate import store_and_masking
from training.evaluation.scoring import eval_windows
from training.guard import health
from training.log.trackers import LoggingArguments
from training.report.facts import read_facts, write_facts
from training.report.report import environment, write_report
from training.step.loss import linear_cross_entropy


def test_a_run_writes_the_documented_files_and_its_config_reproduces_it(finished, tmp_path, capsys):
    run = tmp_path / "run"
    train_accelerate.main(["--config", str(finished / "config.yaml"), "--output_dir", str(run)])
    assert_equal(weights(finished), weights(run))
    files = "config.yaml metrics.jsonl events.jsonl status.json samples.md report.json report.md loss.png course.png"
    assert {path.name for path in run.iterdir()} == {*files.split(), "checkpoints", "model", ".gpt2scratch.json"}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    files = "model.safetensors config.json generation_config.json tokenizer.json tokenizer_config.json"
    code = {"modeling_gpt2scratch.py", "configuration_gpt2scratch.py"}
    assert {path.name for path in (run / "model").iterdir()} == {*files.split()} | code
    assert_equal(weights(run), load_file(checkpoint_of(run, 6) / "model.safetensors"))
    entries = logged(run)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [entry["tokens"] for entry in entries] == [64, 128, 192, 256, 320, 384]
    assert [entry["learning_rate"] for entry in entries][:3] == [0.005, 0.01, 0.01]
    assert entries[-1]["learning_rate"] == 0.0
    assert {"epoch", "grad_norm", "tokens_per_second", "seconds_per_step", "peak_memory_gb"} <= entries[-1].keys()
    assert "mfu" not in entries[-1]  # a CPU has no MFU
    assert ["seconds_to_first_step" in entry for entry in entries] == [True] + [False] * 5
    assert 0 < entries[-1]["data_share"] < 1
    first, second = logged(run, "eval_loss")
    assert (first["step"], second["step"]) == (3, 6)
    assert second["eval_loss"] < first["eval_loss"]
    assert (run / "samples.md").read_text().count("## step") == 3
    start, output = (text.splitlines() for text in re.split(r"(?=First step after)", capsys.readouterr().out))
    assert start[:2] == [
        "Device:  CPU (1 thread), fp32, not compiled, 1 process",
        "Model:   0.012M parameters, 2 layers, width 16, context 16, vocabulary 300",
    ]
    assert re.fullmatch(r"Data:    .*/store: [\d,]+ tokens for training", start[2])
    assert re.fullmatch(r"Length:  6 steps of 64 tokens, 0.0\d epochs; ETA with the first log line", start[3])
    assert {line.split(":")[0] for line in start[4:]} == {"Advice"}
    following = ["generate.py", "training.evaluate", "publishing.demo", "examples.finetune_chat", "push_to_hub.py"]
    assert [re.match(r"  python (?:-m )?(\S+)", line)[1] for line in output[-5:]] == following


def test_report_shows_speed_settings_and_the_samples_of_every_prompt_over_time(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.log.speed.peak_flops", lambda name, precision: 1e12)
    settings = {"n_layer": 1, "n_head": 1, "backup_dir": tmp_path / "backup", "sample_prompts": None}
    run = train(tmp_path / "run", "--sample_prompts", "the", "They are", **settings)
    entries = logged(run, "mfu")
    assert [entry["step"] for entry in entries] == [2, 3, 4, 5, 6]  # the first step is not measured
    # 6 * (12 * 16^2 + 300 * 16) + 6 * 16 * 16 operations per token
    assert entries[-1]["mfu"] == pytest.approx(entries[-1]["tokens_per_second"] * 48768 / 1e12, abs=1e-4)
    output, report = capsys.readouterr().out, (run / "report.md").read_text()
    line = r"step 6/6  loss .*  norm .*  lr 0.00e\+00 .* tok/s  .* s/step  MFU +\d+%  data .*%  peak .* GB  ETA 0:00\n"
    assert re.search(line, output)
    assert "1 layer, 1 head, width 16" in report
    settings = yaml.safe_load(report.split("```yaml\n")[1].split("```")[0])
    assert settings["sample_prompts"] == ["the", "They are"]
    assert str(tmp_path) not in str(settings)
    samples = read_samples(run / "samples.md")
    assert list(samples) == [0, 3, 6]
    section = report.split("## Samples\n\n")[1].split("## Data")[0]
    first, second = section.removeprefix("### Prompt 1\n\n").split("### Prompt 2\n\n")
    code = environment().filters["fenced"]
    for nth, content in enumerate((first, second)):
        assert content == "".join([f"After {step} steps:\n\n{code(samples[step][nth])}\n\n" for step in (0, 3, 6)])
    assert "--- step 0" not in output
    assert f"--- step 6:\n{samples[6][1]}\n" in output


def test_report_compares_the_estimate_and_lists_events(launch, store, tmp_path):
    run, settings = tmp_path / "run", TINY | {"max_steps": 4, "hourly_price": 3600.0}
    begun = launch("train_accelerate.py", *flags(data=store.folder, output_dir=run, **settings))  # has its own peak
    assert begun.returncode == 0, begun.stderr
    advice = {"time": now(), "event": "advice", "step": 4, "about": "flat", "text": "It is flat."}
    append(run / "events.jsonl", json.dumps(advice) + "\n")
    result = launch("train_accelerate.py", "--resume_from_checkpoint", run, "--max_steps", "8")
    assert result.returncode == 0, result.stderr
    report = (run / "report.md").read_text()
    assert "![Throughput, learning rate and gradient norm](course.png)" in report
    table = report.split("## Estimate vs. actual\n\n")[1].split("\n\n")[0].splitlines()
    assert table[2] == "| steps | 8 | 8 |"
    rows = {row.split(" | ")[0]: [cell.strip(" |") for cell in row.split(" | ")[1:]] for row in table[3:]}
    assert list(rows) == ["| tokens per second", "| time", "| peak memory", "| dollars"]
    estimate, actual = (float(cell.split()[0]) for cell in rows["| peak memory"])
    assert actual == pytest.approx(estimate, rel=0.3)
    assert 0 < float(rows["| dollars"][0]) < float(rows["| dollars"][1])
    assert "are estimated from the first log lines of the run" in report
    assert "## Events\n\n- step 4: It is flat.\n- step 4: resumed from step_00000004\n" in report


def test_last_validation_also_scores_the_sample_of_earlier_ones(train, store, tmp_path, capsys):
    run = train(tmp_path / "run", max_eval_samples=2, report_to="tensorboard")
    first, end = logged(run, "eval_loss")
    assert first["eval_tokens"] == end["eval_sampled_tokens"] == 16 + 11  # the last window is short
    assert end["eval_tokens"] == store.metadata.val.tokens - 1
    assert "eval_sampled_loss" not in first
    windows = eval_windows(store, 16, 2, mask_documents=False)
    assert eval_windows(store, 10**9, 1, False)["inputs"].shape == (1, store.metadata.val.tokens - 1)
    model = GPT2ScratchForCausalLM.from_pretrained(run / "model").eval()
    with torch.no_grad():
        logits = model(windows["inputs"]).logits
    sample_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows["targets"].flatten()).item()
    assert end["eval_sampled_loss"] == pytest.approx(sample_loss, abs=1e-5)
    assert comparable_loss(end) == end["eval_sampled_loss"] != end["eval_loss"]
    assert comparable_loss(first) == first["eval_loss"]
    content = EventAccumulator(str(run / "tensorboard")).Reload()
    points = [event.value for event in content.Scalars("eval/loss")]  # all have the loss on the same text
    assert points == pytest.approx([first["eval_loss"], end["eval_sampled_loss"]])
    assert content.Scalars("eval/perplexity")[-1].value == pytest.approx(math.exp(points[-1]))
    assert content.Scalars("eval/full_loss")[0].value == pytest.approx(end["eval_loss"])
    assert [event.value for event in content.Scalars("eval/tokens")] == 2 * [first["eval_tokens"]]
    assert content.Scalars("eval/full_tokens")[0].value == end["eval_tokens"]
    output, report = capsys.readouterr().out, (run / "report.md").read_text()
    line = rf"step 6: validation loss {end['eval_loss']:.4f}, perplexity [\d.]+, [\d.]+ bits per byte on all held-out "
    assert re.search(line + r"text \(best on the sample\)\n", output)
    assert f"on the sample: the lowest is {sample_loss:.4f}, at step 6." in " ".join(report.split())
    stopped, lines = shutil.copytree(run, tmp_path / "stopped"), (run / "metrics.jsonl").read_text().splitlines(True)
    (stopped / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 6))
    for runs, loss in (([run], end["eval_loss"]), ([run, stopped], sample_loss)):  # the other scored only the sample
        compare_runs.main([*map(str, runs), "--output", str(tmp_path / f"{len(runs)}.png")])
        output = capsys.readouterr().out
        assert f"| `run` | {loss:.4f} | " in output
        assert "samples of different sizes" not in output
    scores = (stopped / "metrics.jsonl").read_text()
    (stopped / "metrics.jsonl").write_text(scores.replace('"eval_tokens": 27', '"eval_tokens": 43'))
    compare_runs.main([str(run), str(stopped), "--output", str(tmp_path / "3.png")])
    assert "validated on samples of different sizes (max_eval_samples): compare" in capsys.readouterr().out
    for entry, loss in ((first, first["eval_loss"]), (end, sample_loss)):
        row = rf"\| {entry['step']} \| [\d.]+ \| [\d.]+ \| {entry['eval_loss']:.4f} \| {loss:.4f} \| "
        assert re.search(row, report)


ACROSS_EPOCHS = {"max_steps": None, "num_train_epochs": 2, "tokens_per_step": 1024, "save_steps": 10}
ACROSS_EPOCHS |= {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "per_device_train_batch_size": 2}
WITHIN_A_LOG_LINE = {"logging_steps": 4, "save_steps": 3, "max_steps": 8, "mask_documents": "true"}


@pytest.mark.parametrize("settings", [ACROSS_EPOCHS, WITHIN_A_LOG_LINE], ids=["dropout", "masked documents"])
def test_resuming_is_exact(train, tmp_path, settings):
    straight = train(tmp_path / "straight", eval_strategy="no", **settings)
    copy = shutil.copytree(straight, tmp_path / "stopped")
    shutil.rmtree(max((copy / "checkpoints").iterdir()))  # as if killed before the last checkpoint was written
    train(copy, resume_from_checkpoint=copy, eval_strategy="no", **settings)
    assert_same_run(straight, copy)


def test_repeated_command_reports_the_finished_run_and_another_one_is_refused(finished, finished_copy, train, capsys):
    run = finished_copy
    older = checkpoint_of(run, 3) / "model.safetensors"
    shutil.copy(older, run / "model" / "model.safetensors")  # as if killed between the last save and its copy
    train(run)
    assert_equal(weights(finished), weights(run))
    output = capsys.readouterr().out
    for words in ("is finished (6 steps)", "--overwrite_output_dir"):
        assert words in output
    assert_user_error(r"another run \(learning_rate 0\.01 -> 0\.02\)", train, run, learning_rate=0.02)
    train(run, "--overwrite_output_dir", max_steps=1, learning_rate=0.02)
    assert yaml.safe_load((run / "config.yaml").read_text())["learning_rate"] == 0.02


def test_a_validation_without_its_samples_or_all_its_text_is_repeated(train, tmp_path):
    run = train(tmp_path / "run", max_eval_samples=2)
    folder, validations, page = RunFolder(run), logged(run, "eval_loss"), (run / "report.md").read_text()
    facts = read_facts(folder)
    del facts["results"]["rows"][-1]
    write_facts(folder, facts)  # as if killed before the last report was written
    train(run, max_eval_samples=2)
    assert logged(run, "eval_loss") == validations
    assert re.findall(r"^## step (\d+)$", folder.samples.read_text(), re.MULTILINE) == ["0", "3", "6"]
    rows = [re.findall(r"^\| 6 \| .*", text, re.MULTILINE) for text in (folder.report.read_text(), page)]
    assert rows[0] == rows[1] != []
    facts = read_facts(folder)
    facts["results"]["rows"][-1]["eval_loss"] = 1.0  # of a run that was continued otherwise
    write_facts(folder, facts)
    shorter = ["--resume_from_checkpoint", str(run), "--max_steps", "5"]
    assert_user_error("is at step 6 of 5, so nothing is left to train", train_accelerate.main, shorter)
    train(run, max_eval_samples=2)
    rows = [(row["step"], row["eval_loss"]) for row in read_facts(folder)["results"]["rows"]]
    assert rows == [(3, validations[0]["eval_loss"]), (6, validations[1]["eval_loss"])]
    folder.report.write_text("Mine.")
    folder.facts.unlink()
    train(run, max_eval_samples=2)
    assert [path.read_text() for path in run.glob("report.edited-*.md")] == ["Mine."]
    shutil.rmtree(checkpoint_of(run, 6))
    train(run, resume_from_checkpoint=run, max_eval_samples=2, max_steps=3)
    [end] = logged(run, "eval_loss")
    assert (end["step"], end["eval_sampled_loss"]) == (3, validations[0]["eval_loss"])
    assert end["eval_tokens"] > end["eval_sampled_tokens"]
    assert yaml.safe_load((run / "config.yaml").read_text())["max_steps"] == 3


def test_a_damaged_checkpoint_is_reported_and_skipped(finished_copy, train, tmp_path, capsys):
    run, newest = finished_copy, checkpoint_of(finished_copy, 6)
    flip(newest / "model.safetensors")
    train(run)
    output = capsys.readouterr().out
    for words in ("model.safetensors was changed or damaged", "resuming from step_00000003"):
        assert words in output
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["damaged_step_00000006", "step_00000003", "step_00000006"]
    assert damage(newest) is None
    flip(newest / "model.safetensors")
    (checkpoint_of(run, 3) / "config.json").unlink()
    assert_user_error(rf"All checkpoints in .* are damaged; .* --init_from {run}/model and another", train, run)
    assert_user_error("is damaged", train, tmp_path / "other", resume_from_checkpoint=newest)


def test_save_total_limit_keeps_the_newest_and_the_best_which_may_become_the_model(train, tmp_path, capsys):
    settings = {"save_steps": 1, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 5.0, "max_steps": 5}
    train_best = partial(train, tmp_path / "run", load_best_model_at_end=True, **settings)
    *validations, _ = logged(run := train_best(), "eval_loss")
    step = min(validations, key=lambda entry: entry["eval_loss"])["step"]
    assert step < 4
    best, last = checkpoint_of(run, step), checkpoint_of(run, 5)
    assert {*(run / "checkpoints").iterdir()} == {best, last}
    sentence = f"The model is that of step {step}, which has the lowest validation loss of the saved steps.\n\nDone."
    assert sentence in capsys.readouterr().out
    best_weights = load_file(best / "model.safetensors")
    assert_equal(weights(run), best_weights)
    assert (find_folder(run, None), find_folder(run, "last")) == (best, last)
    shutil.rmtree(run / "model")  # as if killed before; in a backup, too
    assert find_folder(run, None) == best
    train_best()
    assert_equal(weights(run), best_weights)
    best.rename(tmp_path / "away")  # model/ is the only copy
    train_best()
    assert_equal(weights(run), best_weights)
    (tmp_path / "away").rename(best)
    append(run / "metrics.jsonl", '{"step": 0, "eval_loss": 0.1}\n')  # better, but not saved
    prune(run / "checkpoints", 1, run / "metrics.jsonl")
    assert best.is_dir()
    (best / "config.json").unlink()
    assert_user_error("is damaged: config.json is missing. Publish another one", find_folder, run, None)
    shutil.rmtree(run / "model")
    capsys.readouterr()
    train_best()
    assert "is damaged: config.json is missing. The model is the last one." in capsys.readouterr().out
    assert find_folder(run, None) == last
    shutil.rmtree(best)
    (run / "model" / "model.safetensors").write_bytes(b"other")
    assert_user_error(r"No checkpoint has the weights of .*model\. .* steps: 5; name one with", find_folder, run, None)
    assert find_folder(train(tmp_path / "other", **settings), None).name == "step_00000005"


def test_losses_on_a_sample_of_another_size_do_not_count_for_the_best():
    scores = [(1.0, 16, {}), (3.0, 64, {}), (2.9, 640, {"eval_sampled_loss": 3.1})]  # changed after the first
    entries = [{"eval_loss": loss, "eval_tokens": tokens} | sampled for loss, tokens, sampled in scores]
    assert [best_evaluation(entries[:n]) for n in (1, 2, 3)] == [entries[0], entries[1], entries[1]]
    assert best_evaluation([entries[2], entries[1]]) == entries[1]
    assert best_evaluation([entries[2], entries[1] | {"eval_loss": 3.2}]) == entries[2]  # earlier ones were pruned
    last = entries[2] | {"eval_sampled_tokens": 16}  # changed after the second
    assert best_evaluation([*entries[:2], last]) == entries[0]


def test_a_moved_run_resumes_and_a_missing_checkpoint_lists_the_others(train, tmp_path):
    run = train(tmp_path / "run", max_steps=3).rename(tmp_path / "moved")
    path = checkpoint_of(run, 5)
    assert_user_error(f"{path.name} does not exist; .* has step_00000003", train, None, resume_from_checkpoint=path)
    with pytest.MonkeyPatch.context() as patch:  # a run that restarts itself may have pruned it
        patch.setenv("GPT2SCRATCH_RESTART", '{"has_begun": true}')
        assert run_of(path) == run
    train(None, resume_from_checkpoint=run, max_steps=4)
    assert metrics(run)[-1]["step"] == 4
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run / "checkpoints")
        assert run_of(Path("step_00000003")).resolve() == run
    (tmp_path / "checkpoints").mkdir()
    run = run.rename(tmp_path / "checkpoints" / "step_size_3")
    assert run_of(run) == run_of(checkpoint_of(run, 3)) == run


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A file of text whose token store is cached in the test's folder."""
    monkeypatch.setattr("training.data.run_data.CACHE", tmp_path / "cache")
    (tmp_path / "mine.txt").write_text(prose(5))
    return tmp_path / "mine.txt"


def test_raw_text_trains_without_the_prompts_of_the_quickstart(train, text, tmp_path):
    run = train(tmp_path / "run", data=text, vocab_size=280, max_steps=1, sample_prompts=None)
    assert GPT2ScratchForCausalLM.from_pretrained(run / "model").config.vocab_size == 280
    assert len(list((tmp_path / "cache").glob("mine-*/metadata.json"))) == 1
    assert "class" not in (run / "samples.md").read_text()
    assert {name_of(f"{tmp_path}{end}") for end in ("", "/", "/*.txt", "/**/a*.txt")} == {tmp_path.name}
    (tmp_path / "wiki [2024]").mkdir()
    assert name_of(f"{tmp_path}/wiki [2024]") == "wiki-2024"


def test_character_vocabulary_overrides_the_size_in_a_yaml_file(train, text, tmp_path, capsys):
    (tmp_path / "char.yaml").write_text("tokenizer_type: character\nvocab_size: 65\n")
    settings, characters = {"config": tmp_path / "char.yaml", "data": text}, len(set(prose(5)))
    run = train(tmp_path / "run", "--verbose", **settings, max_steps=1)
    config = GPT2ScratchForCausalLM.from_pretrained(run / "model").config
    assert (config.vocab_size, config.eos_token_id) == (characters, None)
    line = f"         vocab_size is {characters}, from the data; the value 65 in the YAML file has no effect.\n"
    assert line in capsys.readouterr().out
    train(run, **settings, max_steps=1)  # the same command again, after the run finished
    assert "is finished" in capsys.readouterr().out
    store_and_masking(str(run), None)  # from the cache, without tokenizing again
    assert capsys.readouterr() == ("", "")
    sentence = rf"vocab_size is 65, but .* {characters} tokens; remove --vocab_size"
    assert_user_error(sentence, train, tmp_path / "other", **settings, vocab_size=65)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attn_implementation": "nonsense"}, "attn_implementation is 'nonsense'; it must be one of auto, eager, "),
        ({"attn_implementation": "flash_attention_2"}, "needs an NVIDIA GPU"),
        ({"bf16_residual": "true"}, "bf16_residual needs mixed_precision bf16, but it is no"),
        ({"report_to": "nonsense"}, "nonsense"),
        ({"tokenizer_type": "character"}, "tokenizer_type applies to text only"),
        ({"activation_function": "reluu"}, "^activation_function 'reluu' is unknown"),
        ({"n_layer": 1000, "n_embd": 65_536}, r"^A model of 51,5.* needs .* GB .*; lower n_layer or n_embd"),
        ({"num_train_epochs": 1}, "are given together"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one of these settings is valid on a GPU")
def test_invalid_settings_are_refused(train, tmp_path, settings, sentence):
    assert_user_error(sentence, train, tmp_path / "run", **settings)


def test_a_diverged_loss_ends_the_run_and_keeps_its_checkpoints(train, a_copy, finished_copy, tmp_path, monkeypatch):
    monkeypatch.setattr(train_accelerate, "schedule", lambda *_: 1e30)
    settings = {"max_grad_norm": 0, "save_steps": 1, "max_steps": 30, "eval_strategy": "no"}
    sentence = r"not finite in 20 consecutive steps, up to step 24: .*step_00000003 is the last good"
    assert_user_error(sentence, train, a_copy, resume_from_checkpoint=a_copy, **settings)
    assert [*(a_copy / "checkpoints").iterdir()] == [checkpoint_of(a_copy, 3)]
    assert_equal(weights(a_copy), load_file(checkpoint_of(a_copy, 3) / "model.safetensors"))
    assert status(a_copy)["state"] == "failed"
    assert_user_error("diverged", train, tmp_path / "other", max_grad_norm=0, eval_strategy="no")
    monkeypatch.undo()
    train(tmp_path / "other", max_steps=1)  # possible because nothing was saved
    infinite = "training.step.loss.linear_cross_entropy"
    monkeypatch.setattr(infinite, lambda *parts: math.nan * linear_cross_entropy(*parts))
    sentence = r"not finite in 20 consecutive steps, up to step 26: .*step_00000006 itself gives no finite loss here"
    settings = {"resume_from_checkpoint": finished_copy, "max_steps": 30, "eval_strategy": "no"}
    assert_user_error(sentence, train, None, **settings)
    kept = {checkpoint_of(finished_copy, step) for step in (3, 6)}  # which this process has only read
    assert {*(finished_copy / "checkpoints").iterdir()} == kept


def test_a_tracker_that_fails_is_reported_and_the_run_continues(train, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise ConnectionResetError("Connection lost")

    for name in ("log", "finish"):
        monkeypatch.setattr(TensorBoardTracker, name, fail)
    run = train(tmp_path / "run", report_to="tensorboard")
    assert capsys.readouterr().out.count("tensorboard failed (ConnectionResetError('Connection lost'))") == 1
    assert metrics(run)[-1]["step"] == 6
    sentence = "A tracker of --report_to cannot start: Connection lost"
    with monkeypatch.context() as patch:
        patch.setattr("training.log.trackers._send_settings", fail)
        assert_user_error(sentence, train, tmp_path / "other", report_to="tensorboard")
    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    assert_user_error(sentence, train, tmp_path / "other", report_to="tensorboard")
    monkeypatch.setenv("GPT2SCRATCH_RESTART", '{"has_begun": true, "because": "out of memory"}')
    run = train(tmp_path / "other", report_to="tensorboard")
    assert f"WARNING: {sentence}" in capsys.readouterr().out
    assert metrics(run)[-1]["step"] == 6
    assert LoggingArguments(report_to=["none"]).trackers is None


def test_a_spike_at_the_default_threshold_is_reported_without_a_rollback(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(health, "MIN_LOSSES", 8)  # losses, instead of 64
    monkeypatch.setattr(train_accelerate, "schedule", lambda step, *_: 3000.0 if step == 9 else 0.01)
    run = train(tmp_path / "run", max_steps=12, save_steps=4, eval_strategy="no")
    assert re.search(r"WARNING: .* standard deviations above its mean", capsys.readouterr().out)
    events = lines(run / "events.jsonl")
    [spike] = [event for event in events if event["event"] == "spike"]
    added = [spike | {"step": 12, "z_score": 7.0 + i} for i in range(40)]
    pauses = [{"event": "stopped", "because": "SIGTERM"}, {"event": "resumed", "checkpoint": "step_00000012"}] * 30
    added += [{"time": now(), "step": i, **pause} for i, pause in enumerate(pauses)]
    append(run / "events.jsonl", "".join(json.dumps(event) + "\n" for event in added))
    write_report(RunFolder(run))
    report = (run / "report.md").read_text()
    assert report.count("standard deviations above its mean") == 16
    assert "- step 27: the last of 28 stops and resumes that only events.jsonl lists\n" in report
    assert report.count("stopped (SIGTERM)") == report.count("resumed from step_00000012") == 16
    assert (spike["step"], spike["z_score"] > 6) == (11, True)
    assert "resumed" not in [event["event"] for event in events]
    assert [entry["step"] for entry in logged(run)] == [*range(1, 13)]


def test_a_resumed_run_continues_in_tensorboard_without_duplicate_steps(train, tmp_path):
    run = train(tmp_path / "run", report_to="tensorboard", notes="a longer warmup")
    run_id = (run / "tracker_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{8}\n", run_id)
    shutil.rmtree(checkpoint_of(run, 6))  # resumed from step 3, the run logs 4 to 6 again
    train(None, resume_from_checkpoint=run, learning_rate=0.02, max_steps=8)
    assert (run / "tracker_id").read_text() == run_id
    files = list(run.rglob("events.out.tfevents*"))
    assert {file.parent for file in files} == {run / "tensorboard"}
    content = EventAccumulator(str(run / "tensorboard")).Reload()
    scalars = set(content.Tags()["scalars"])
    assert {"train/grad_norm", "train/tokens_per_second", "eval/loss", "eval/bits_per_byte"} <= scalars
    for tag, name in (("train/learning_rate", "learning_rate"), ("train/loss", "loss"), ("eval/loss", "eval_loss")):
        points = [(entry["step"], pytest.approx(entry[name])) for entry in logged(run, name)]
        assert [(event.step, event.value) for event in content.Scalars(tag)] == points
    [settings, *_] = content.Tensors("settings/text_summary")
    assert b"notes: a longer warmup\nproject: gpt2scratch\n" in settings.tensor_proto.string_val[0]
    train(run, "--overwrite_output_dir", max_steps=1, report_to="tensorboard")
    assert (run / "tracker_id").read_text() != run_id
    assert not set(files) & set(run.rglob("events.out.tfevents*"))
