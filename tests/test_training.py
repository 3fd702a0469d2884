"""Whole runs: their files, exact resuming, and refused settings."""

import json
import math
import re
import shutil
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
    assert_equal,
    assert_same_run,
    assert_user_error,
    flags,
    flip,
    lines,
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
    assert {path.name for path in run.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "events.jsonl", "status.json", "samples.md", "report.json"),
        *("report.md", "loss.png", "course.png", "checkpoints", "model", ".gpt2scratch.json"),
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    assert {path.name for path in (run / "model").iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("modeling_gpt2scratch.py", "configuration_gpt2scratch.py"),
    }
    assert_equal(weights(run), load_file(run / "checkpoints" / "step_00000006" / "model.safetensors"))
    entries = [entry for entry in metrics(run) if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [entry["tokens"] for entry in entries] == [64, 128, 192, 256, 320, 384]
    assert [entry["learning_rate"] for entry in entries][:3] == [0.005, 0.01, 0.01]
    assert entries[-1]["learning_rate"] == 0.0
    assert {"epoch", "grad_norm", "tokens_per_second", "seconds_per_step", "peak_memory_gb"} <= entries[-1].keys()
    assert "mfu" not in entries[-1]  # a CPU has no MFU
    assert ["seconds_to_first_step" in entry for entry in entries] == [True] + [False] * 5
    assert 0 < entries[-1]["data_share"] < 1
    validations = [entry for entry in metrics(run) if "eval_loss" in entry]
    assert [entry["step"] for entry in validations] == [3, 6]
    assert validations[1]["eval_loss"] < validations[0]["eval_loss"]
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
    entries = [entry for entry in metrics(run) if "mfu" in entry]
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
        moments = [f"After {step} steps:\n\n{code(samples[step][nth])}\n\n" for step in (0, 3, 6)]
        assert content == "".join(moments)
    assert "--- step 0" not in output
    assert f"--- step 6:\n{samples[6][1]}\n" in output


def test_report_compares_the_estimate_and_lists_events(launch, store, tmp_path):
    run, settings = tmp_path / "run", TINY | {"max_steps": 4, "hourly_price": 3600.0}
    begun = launch("train_accelerate.py", *flags(data=store.folder, output_dir=run, **settings))  # has its own peak
    assert begun.returncode == 0, begun.stderr
    advice = {"time": now(), "event": "advice", "step": 4, "about": "flat", "text": "It is flat."}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(advice) + "\n")
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
    first, end = (entry for entry in metrics(run) if "eval_loss" in entry)
    assert first["eval_tokens"] == 16 + 11  # the last window is short
    assert end["eval_tokens"] == store.metadata.val.tokens - 1
    assert end["eval_sampled_tokens"] == first["eval_tokens"]
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
    assert re.search(
        rf"step 6: validation loss {end['eval_loss']:.4f}, perplexity [\d.]+, [\d.]+ bits per byte on all held-out "
        r"text \(best on the sample\)\n",
        output,
    )
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


@pytest.mark.parametrize(
    "settings",
    [ACROSS_EPOCHS, WITHIN_A_LOG_LINE],
    ids=["across epochs, dropout", "within a log line, masked documents"],
)
def test_resuming_is_exact(train, tmp_path, settings):
    straight = train(tmp_path / "straight", eval_strategy="no", **settings)
    copy = shutil.copytree(straight, tmp_path / "stopped")
    shutil.rmtree(max((copy / "checkpoints").iterdir()))  # as if killed before the last checkpoint was written
    train(copy, "--resume_from_checkpoint", str(copy), eval_strategy="no", **settings)
    assert_same_run(straight, copy)


def test_repeated_command_reports_the_finished_run_and_another_one_is_refused(finished, finished_copy, train, capsys):
    run = finished_copy
    older = run / "checkpoints" / "step_00000003" / "model.safetensors"
    shutil.copy(older, run / "model" / "model.safetensors")  # as if killed between the last save and its copy
    train(run)
    assert_equal(weights(finished), weights(run))
    output = capsys.readouterr().out
    assert "is finished (6 steps)" in output
    assert "--overwrite_output_dir" in output
    assert_user_error(r"another run \(learning_rate 0\.01 -> 0\.02\)", train, run, learning_rate=0.02)
    shorter = ["--resume_from_checkpoint", str(run), "--max_steps", "4"]
    assert_user_error("is at step 6 of 4, so nothing is left to train", train_accelerate.main, shorter)
    train(run, "--overwrite_output_dir", max_steps=1, learning_rate=0.02)
    assert yaml.safe_load((run / "config.yaml").read_text())["learning_rate"] == 0.02


def test_a_validation_without_its_samples_or_all_its_text_is_repeated(train, tmp_path):
    run = train(tmp_path / "run", max_eval_samples=2)
    validations, page = [entry for entry in metrics(run) if "eval_loss" in entry], (run / "report.md").read_text()
    folder = RunFolder(run)
    facts = read_facts(folder)
    del facts["results"]["rows"][-1]
    write_facts(folder, facts)  # as if killed before the last report was written
    train(run, max_eval_samples=2)
    assert [entry for entry in metrics(run) if "eval_loss" in entry] == validations
    assert re.findall(r"^## step (\d+)$", folder.samples.read_text(), re.MULTILINE) == ["0", "3", "6"]
    rows = [re.findall(r"^\| 6 \| .*", text, re.MULTILINE) for text in ((run / "report.md").read_text(), page)]
    assert rows[0] == rows[1] != []
    facts = read_facts(folder)
    facts["results"]["rows"][-1]["eval_loss"] = 1.0  # of a run that was continued otherwise
    write_facts(folder, facts)
    shorter = ["--resume_from_checkpoint", str(run), "--max_steps", "5"]
    assert_user_error("is at step 6 of 5, so nothing is left to train", train_accelerate.main, shorter)
    train(run, max_eval_samples=2)
    assert [row["step"] for row in read_facts(folder)["results"]["rows"]] == [3, 6]
    assert read_facts(folder)["results"]["rows"][-1]["eval_loss"] == validations[1]["eval_loss"]
    folder.report.write_text("Mine.")
    folder.facts.unlink()
    train(run, max_eval_samples=2)
    assert [path.read_text() for path in run.glob("report.edited-*.md")] == ["Mine."]
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    train(run, "--resume_from_checkpoint", str(run), max_eval_samples=2, max_steps=3)
    [end] = (entry for entry in metrics(run) if "eval_loss" in entry)
    assert (end["step"], end["eval_sampled_loss"]) == (3, validations[0]["eval_loss"])
    assert end["eval_tokens"] > end["eval_sampled_tokens"]
    assert yaml.safe_load((run / "config.yaml").read_text())["max_steps"] == 3


def test_a_damaged_checkpoint_is_reported_and_skipped(finished_copy, train, tmp_path, capsys):
    run = finished_copy
    weights_file = run / "checkpoints" / "step_00000006" / "model.safetensors"
    flip(weights_file)
    train(run)
    output = capsys.readouterr().out
    assert "model.safetensors was changed or damaged" in output
    assert "resuming from step_00000003" in output
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["damaged_step_00000006", "step_00000003", "step_00000006"]
    assert damage(weights_file.parent) is None
    flip(weights_file)
    (run / "checkpoints" / "step_00000003" / "config.json").unlink()
    assert_user_error(rf"All checkpoints in .* are damaged; .* --init_from {run}/model and another", train, run)
    assert_user_error("is damaged", train, tmp_path / "other", "--resume_from_checkpoint", str(weights_file.parent))


def test_save_total_limit_keeps_the_newest_and_the_best_which_may_become_the_model(train, tmp_path, capsys):
    settings = {"save_steps": 1, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 5.0, "max_steps": 5}
    run = train(tmp_path / "run", load_best_model_at_end=True, **settings)
    *validations, _ = (entry for entry in metrics(run) if "eval_loss" in entry)
    best = min(validations, key=lambda entry: entry["eval_loss"])["step"]
    assert best < 4
    checkpoints = {path.name: path for path in (run / "checkpoints").iterdir()}
    name = f"step_{best:08}"
    assert checkpoints.keys() == {"step_00000005", name}
    sentence = f"The model is that of step {best}, which has the lowest validation loss of the saved steps.\n\nDone."
    assert sentence in capsys.readouterr().out
    assert_equal(weights(run), load_file(checkpoints[name] / "model.safetensors"))
    assert (find_folder(run, None), find_folder(run, "last").name) == (checkpoints[name], "step_00000005")
    shutil.rmtree(run / "model")  # as if killed before; in a backup, too
    assert find_folder(run, None) == checkpoints[name]
    train(run, load_best_model_at_end=True, **settings)
    assert_equal(weights(run), load_file(checkpoints[name] / "model.safetensors"))
    best_weights = weights(run)
    checkpoints[name].rename(tmp_path / "away")  # model/ is the only copy
    train(run, load_best_model_at_end=True, **settings)
    assert_equal(weights(run), best_weights)
    (tmp_path / "away").rename(checkpoints[name])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "eval_loss": 0.1}\n')  # better, but not saved
    prune(run / "checkpoints", 1, run / "metrics.jsonl")
    assert checkpoints[name].is_dir()
    (checkpoints[name] / "config.json").unlink()
    assert_user_error("is damaged: config.json is missing. Publish another one", find_folder, run, None)
    shutil.rmtree(run / "model")
    capsys.readouterr()
    train(run, load_best_model_at_end=True, **settings)
    assert "is damaged: config.json is missing. The model is the last one." in capsys.readouterr().out
    assert find_folder(run, None).name == "step_00000005"
    shutil.rmtree(checkpoints[name])
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
    path = run / "checkpoints" / "step_00000005"
    assert_user_error(f"{path.name} does not exist; .* has step_00000003", train, None, resume_from_checkpoint=path)
    with pytest.MonkeyPatch.context() as patch:  # a run that restarts itself may have pruned it
        patch.setenv("GPT2SCRATCH_RESTART", '{"has_begun": true}')
        assert run_of(path) == run
    train(None, "--resume_from_checkpoint", str(run), max_steps=4)
    assert metrics(run)[-1]["step"] == 4
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run / "checkpoints")
        assert run_of(Path("step_00000003")).resolve() == run
    (tmp_path / "checkpoints").mkdir()
    run = run.rename(tmp_path / "checkpoints" / "step_size_3")
    assert (run_of(run), run_of(run / "checkpoints" / "step_00000003")) == (run, run)


def test_raw_text_trains_without_the_prompts_of_the_quickstart(train, tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.run_data.CACHE", tmp_path / "cache")
    (tmp_path / "mine.txt").write_text(prose(5))
    run = train(tmp_path / "run", data=tmp_path / "mine.txt", vocab_size=280, max_steps=1, sample_prompts=None)
    assert GPT2ScratchForCausalLM.from_pretrained(run / "model").config.vocab_size == 280
    assert len(list((tmp_path / "cache").glob("mine-*/metadata.json"))) == 1
    assert "class" not in (run / "samples.md").read_text()
    assert {name_of(f"{tmp_path}{end}") for end in ("", "/", "/*.txt", "/**/a*.txt")} == {tmp_path.name}
    (tmp_path / "wiki [2024]").mkdir()
    assert name_of(f"{tmp_path}/wiki [2024]") == "wiki-2024"


def test_character_vocabulary_overrides_the_size_in_a_yaml_file(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.data.run_data.CACHE", tmp_path / "cache")
    (tmp_path / "mine.txt").write_text(prose(5))
    (tmp_path / "char.yaml").write_text("tokenizer_type: character\nvocab_size: 65\n")
    command = ("--config", str(tmp_path / "char.yaml"))
    run = train(tmp_path / "run", *command, "--verbose", data=tmp_path / "mine.txt", max_steps=1)
    characters = len(set(prose(5)))
    config = GPT2ScratchForCausalLM.from_pretrained(run / "model").config
    assert (config.vocab_size, config.eos_token_id) == (characters, None)
    line = f"         vocab_size is {characters}, from the data; the value 65 in the YAML file has no effect.\n"
    assert line in capsys.readouterr().out
    train(run, *command, data=tmp_path / "mine.txt", max_steps=1)  # the same command again, after the run finished
    assert "is finished" in capsys.readouterr().out
    store_and_masking(str(run), None)  # from the cache, without tokenizing again
    assert capsys.readouterr() == ("", "")
    sentence = rf"vocab_size is 65, but .* {characters} tokens; remove --vocab_size"
    assert_user_error(sentence, train, tmp_path / "other", *command, data=tmp_path / "mine.txt", vocab_size=65)


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
    run = a_copy
    monkeypatch.setattr(train_accelerate, "schedule", lambda *_: 1e30)
    settings = {"max_grad_norm": 0, "save_steps": 1, "max_steps": 30, "eval_strategy": "no"}
    sentence = r"not finite in 20 consecutive steps, up to step 24: .*step_00000003 is the last good"
    assert_user_error(sentence, train, run, "--resume_from_checkpoint", str(run), **settings)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000003"]
    assert_equal(weights(run), load_file(run / "checkpoints" / "step_00000003" / "model.safetensors"))
    assert status(run)["state"] == "failed"
    assert_user_error("diverged", train, tmp_path / "other", max_grad_norm=0, eval_strategy="no")
    monkeypatch.undo()
    train(tmp_path / "other", max_steps=1)  # possible because nothing was saved
    monkeypatch.setattr(
        "training.step.loss.linear_cross_entropy", lambda *parts: math.nan * linear_cross_entropy(*parts)
    )
    resume = ("--resume_from_checkpoint", str(finished_copy))
    sentence = r"not finite in 20 consecutive steps, up to step 26: .*step_00000006 itself gives no finite loss here"
    assert_user_error(sentence, train, None, *resume, max_steps=30, eval_strategy="no")
    steps = [path.name for path in sorted((finished_copy / "checkpoints").iterdir())]
    assert steps == ["step_00000003", "step_00000006"]  # which this process has only read


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
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(spike | {"step": 12, "z_score": 7.0 + i}) + "\n" for i in range(40))
        pauses = [{"event": "stopped", "because": "SIGTERM"}, {"event": "resumed", "checkpoint": "step_00000012"}] * 30
        file.writelines(json.dumps({"time": now(), "step": i, **pause}) + "\n" for i, pause in enumerate(pauses))
    write_report(RunFolder(run))
    report = (run / "report.md").read_text()
    assert report.count("standard deviations above its mean") == 16
    assert "- step 27: the last of 28 stops and resumes that only events.jsonl lists\n" in report
    assert report.count("stopped (SIGTERM)") == report.count("resumed from step_00000012") == 16
    assert (spike["step"], spike["z_score"] > 6) == (11, True)
    assert "resumed" not in [event["event"] for event in events]
    assert [entry["step"] for entry in metrics(run) if "loss" in entry] == [*range(1, 13)]


def test_a_resumed_run_continues_in_tensorboard_without_duplicate_steps(train, tmp_path):
    run = train(tmp_path / "run", report_to="tensorboard", notes="a longer warmup")
    run_id = (run / "tracker_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{8}\n", run_id)
    shutil.rmtree(run / "checkpoints" / "step_00000006")  # resumed from step 3, the run logs 4 to 6 again
    train(None, "--resume_from_checkpoint", str(run), learning_rate=0.02, max_steps=8)
    assert (run / "tracker_id").read_text() == run_id
    files = list(run.rglob("events.out.tfevents*"))
    assert {file.parent for file in files} == {run / "tensorboard"}
    content = EventAccumulator(str(run / "tensorboard")).Reload()
    scalars = set(content.Tags()["scalars"])
    assert {"train/grad_norm", "train/tokens_per_second", "eval/loss", "eval/bits_per_byte"} <= scalars
    for tag, name in (("train/learning_rate", "learning_rate"), ("train/loss", "loss"), ("eval/loss", "eval_loss")):
        points = [(entry["step"], entry[name]) for entry in metrics(run) if name in entry]
        assert [(event.step, event.value) for event in content.Scalars(tag)] == [
            (s, pytest.approx(v)) for s, v in points
        ]
    [settings, *_] = content.Tensors("settings/text_summary")
    assert b"notes: a longer warmup\nproject: gpt2scratch\n" in settings.tensor_proto.string_val[0]
    train(run, "--overwrite_output_dir", max_steps=1, report_to="tensorboard")
    assert (run / "tracker_id").read_text() != run_id
    assert not set(files) & set(run.rglob("events.out.tfevents*"))
