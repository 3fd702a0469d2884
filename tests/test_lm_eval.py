"""Tests of EleutherAI's lm-evaluation-harness with our folders and converted GPT-2 models, as docs/evaluation.md
describes."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from test_publishing import MINE, card_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import MODERN_RUN, REPOSITORY, assert_user_error, prose, tokenized, trained
from modeling_gpt2scratch.conversion_gpt2scratch import convert
from publishing.card import FolderArguments, _metadata
from publishing.published_model import PublishedModel
from training import evaluate

lm_eval = pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'lm_eval[hf]'")
from lm_eval.tasks import TaskManager  # noqa: E402

DOCUMENTATION = REPOSITORY / "docs" / "evaluation.md"
# Two texts of many windows of 16 tokens, with a shorter last window, and a text shorter than one window.
PAGES = [prose(11, 60), prose(12, 60), "The"]
CHOICES = [{"query": "The of and", "choices": ["a to in", f"is {word}", word], "label": 0} for word in ("was", "he")]
MULTIPLE_CHOICE = """
task: which
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/which.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATION = """
task: which
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/which.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{query}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n\\n"], do_sample: true, temperature: 1.0, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def write_task(folder, name: str, task: str, rows: list[dict]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(folder)).replace("which", name))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folder with the task of the documentation for the user's own text, and a multiple-choice task."""
    folder = tmp_path_factory.mktemp("tasks")
    example = re.search(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)[1]
    my_text = example.replace("tasks/held_out.jsonl", "FOLDER/my_text.jsonl")
    write_task(folder, "my_text", my_text, [{"text": page} for page in PAGES])
    write_task(folder, "which", MULTIPLE_CHOICE, CHOICES)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, store):
    run = trained(store, tmp_path_factory.mktemp("models") / "run", max_steps=30, warmup_steps=0, eval_steps=30)
    return run / "checkpoints" / "step_00000030"


def evaluated(model, tasks, *names: str, **model_options) -> dict:
    """Return the results of the harness in this process, which does not read its thousands of tasks."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options = "".join(f",{name}={value}" for name, value in model_options.items())
    settings = {"model_args": f"pretrained={model},dtype=float32{options}", "device": "cpu", "batch_size": 4}
    return lm_eval.simple_evaluate(model="hf", tasks=list(names), task_manager=manager, **settings)


@pytest.fixture(scope="module")
def results(launch, checkpoint, tasks):
    """Results of the checkpoint by the documented command."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "home")}
    process = launch(
        *("-m", "lm_eval", "--model", "hf", "--batch_size", "4", "--device", "cpu"),
        *("--model_args", f"pretrained={checkpoint},dtype=float32,trust_remote_code=True"),
        *("--tasks", "my_text,which", "--include_path", tasks, "--output_path", tasks / "checkpoint"),
        **offline,
    )
    assert process.returncode == 0, process.stderr
    [summary] = (tasks / "checkpoint").glob("*/results_*.json")
    return json.loads(summary.read_text())


@torch.no_grad()
def bits_per_byte(folder, prefix: int | None = None) -> float:
    """Compute the bits per byte of PAGES in windows that overlap by one token; the last window starts in scored
    tokens."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    context, nats = model.config.n_positions, 0.0
    for page in PAGES:
        ids = torch.tensor([tokenizer.bos_token_id if prefix is None else prefix, *tokenizer.encode(page)])
        for start in range(0, len(ids) - 1, context):
            end = min(start + context, len(ids) - 1)
            window = ids[max(end - context, 0) : end + 1]
            losses = cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none")
            nats += losses[start - end :].sum().item()
    return nats / math.log(2) / len("".join(PAGES).encode())


def numbers(result: dict, task: str) -> dict[str, float]:
    return {name: value for name, value in result["results"][task].items() if isinstance(value, float)}


def test_a_checkpoint_and_its_converted_gpt2_get_the_same_results(results, checkpoint, tasks, tmp_path):
    convert(str(checkpoint), str(tmp_path / "twin"), "gpt2")
    twin = evaluated(tmp_path / "twin", tasks, "my_text", "which")
    assert results["max_length"] == twin["max_length"] == 16
    assert results["config"]["model_num_parameters"] == twin["config"]["model_num_parameters"] == 11648
    for task in ("my_text", "which"):
        assert numbers(results, task) == pytest.approx(numbers(twin, task), rel=1e-6)
    value = results["results"]["my_text"]["bits_per_byte,none"]
    assert value == pytest.approx(bits_per_byte(checkpoint), rel=1e-5)
    assert 1.5 < value < 3.5  # a uniform distribution over 300 tokens would give 3.5


def test_a_character_model_of_the_modern_family_uses_the_given_prefix_token(tasks, tmp_path):
    (tmp_path / "text.txt").write_text(prose(1, 800))
    characters = tokenized(tmp_path, tmp_path / "store", tokenizer_type="character")
    model = trained(characters, tmp_path / "run", **MODERN_RUN) / "model"
    newline = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("\n")
    result = evaluated(model, tasks, "my_text", trust_remote_code=True, prefix_token_id=newline)
    assert result["results"]["my_text"]["bits_per_byte,none"] == pytest.approx(bits_per_byte(model, newline), rel=1e-5)


def test_the_card_shows_harness_results_only_of_its_own_weights(results, checkpoint, tasks):
    evaluations = shutil.copytree(tasks / "checkpoint", checkpoint.parents[1] / "lm_eval")
    card = ModelCard(card_of(checkpoint))
    entries = {(entry.dataset_name, entry.metric_type): entry for entry in card.data.eval_results}
    assert set(entries) == {
        *(("held-out text of the training sources", metric) for metric in ("loss", "perplexity", "bits_per_byte")),
        *(("my_text", metric) for metric in ("bits_per_byte", "byte_perplexity", "word_perplexity")),
        *(("which", metric) for metric in ("acc", "acc_norm")),
    }
    assert entries["which", "acc"].metric_value == results["results"]["which"]["acc,none"]
    assert entries["which", "acc"].dataset_split == "test"
    assert entries["which", "acc"].source_name == f"lm-eval {lm_eval.__version__}, 0-shot"
    assert len(entries) == len(card.data.eval_results)
    assert "## Evaluation\n\n| task | metric | value | source |" in card.text
    [path] = evaluations.glob("*/results_*.json")
    content = json.loads(path.read_text())
    ours = content | {"results": {"which": {"acc,none": 0.25}}, "configs": {"which": content["configs"]["which"]}}
    release = replace(PublishedModel.read(checkpoint), evaluation={"tasks": ours | {"n-shot": {"which": 2}}})
    results = _metadata(release, MINE, FolderArguments(), "gpt2").eval_results
    [entry] = [entry for entry in results if entry.dataset_name == "which"]
    assert (entry.metric_type, entry.metric_value, entry.source_name[-6:]) == ("acc", 0.25, "2-shot")
    newer = {name: dict.fromkeys(values, 0.5) for name, values in content["results"].items()}
    for name, more in (("part", {"results": newer, "config": {"limit": 2}}), ("again", {"results": newer})):
        (path.parent / f"results_{name}.json").write_text(json.dumps(content | more))
        harness = PublishedModel.read(checkpoint).harness
        assert {entry.metric_value == 0.5 for entry in harness} == {name == "again"}
        assert len(harness) == 5
        (path.parent / f"results_{name}.json").unlink()
    [path] = evaluations.glob("*/results_*.json")
    path.write_text(path.read_text().replace("step_00000030", "step_00000015"))  # results of other weights
    assert PublishedModel.read(checkpoint).harness == []


def test_a_text_ends_at_its_end_token(checkpoint, store, tmp_path, capsys):
    """Each answer is the one that `lm_eval --model hf` generates. Most end before the longest one of their batch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    eos, often = model.config.eos_token_id, int(np.bincount(store.in_memory("train")).argmax())
    with torch.no_grad():
        model.lm_head.weight[eos] = model.lm_head.weight[often]
    shutil.copytree(checkpoint, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    rows = [{"query": prose(i, 2), "answer": ""} for i in range(8)]
    write_task(tmp_path, "which", GENERATION, rows)
    samples = evaluated(tmp_path / "model", tmp_path, "which")["samples"]["which"]
    rows = [sample["doc"] | {"answer": sample["resps"][0][0]} for sample in samples]
    assert len({len(row["answer"]) for row in rows}) > 1
    task = write_task(tmp_path, "again", GENERATION, rows)
    arguments = ["--data", str(store.folder), "--tasks", str(task), "--trust_task_code", "--json"]
    evaluate.main([str(tmp_path / "model"), *arguments, "--per_device_eval_batch_size", "4"])
    assert json.loads(capsys.readouterr().out)["tasks"]["results"]["again"]["exact_match,none"] == 1.0


def test_evaluate_reports_the_results_of_lm_eval(results, checkpoint, tasks, store, tmp_path, monkeypatch):
    run = shutil.copytree(checkpoint.parents[1], tmp_path / "run", ignore=shutil.ignore_patterns("lm_eval"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_defaults: manager)
    for names in ("whi*", str(tasks / "my_text.yaml")):
        evaluate.main([str(run), "--tasks", names, "--trust_task_code", "--per_device_eval_batch_size", "4"])
    results_of_run = json.loads((run / "evaluation" / "evaluation.json").read_text())["tasks"]
    for task in ("my_text", "which"):
        assert numbers(results_of_run, task) == numbers(results, task)
    acc, stderr = (results_of_run["results"]["which"][f"acc{name},none"] for name in ("", "_stderr"))
    model_folder = shutil.copytree(run / "model", tmp_path / "alone")  # a model without a run
    evaluate.main([str(model_folder), "--data", str(store.folder), "--tasks", "which"])
    cards = [card_of(folder) for folder in (run, model_folder)]
    page_of_results = run / "evaluation" / "evaluation.md"
    for page in (*cards, page_of_results.read_text()):
        assert f"| which, acc | {acc:.4f} | {stderr:.4f} |\n" in page
    for entries in (ModelCard(card).data.eval_results for card in cards):
        assert ("which", "acc", acc) in {(e.dataset_name, e.metric_type, e.metric_value) for e in entries}
    assert "my_text: at least" not in page_of_results.read_text()
    rows = [CHOICES[0] | {"query": prose(i, 40), "choices": ["was", "he"]} for i in range(3)]
    long = write_task(tmp_path, "long", MULTIPLE_CHOICE, rows)
    evaluate.main([str(run), "--tasks", str(long), "--trust_task_code"])
    assert "long: at least 6 requests exceeded the context and lost the beginning." in page_of_results.read_text()
    long.write_text(long.read_text().replace("multiple_choice", "generate_until"))
    (run / "evaluation" / "evaluation.json").unlink()
    assert_user_error(
        "^lm-evaluation-harness ended",
        evaluate.main,
        [str(run), "--compare", "--tasks", f"which,{long}", "--trust_task_code"],
    )
    saved = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert "panel" in saved
    assert [*saved["tasks"]["results"]] == ["which"]
    assert_user_error("^'' is neither a task", evaluate.main, ["no/model", "--tasks", "which,"])
    (broken := tmp_path / "broken.yaml").write_text((tasks / "my_text.yaml").read_text().replace(".jsonl", ".missing"))
    sentence = "broken.yaml can contain or name code, .*; read it, then add --trust_task_code"
    assert_user_error(sentence, evaluate.main, ["no/model", "--tasks", f"which,{broken}"])
    command = ["no/model", "--tasks", str(broken), "--trust_task_code"]
    assert_user_error("^lm-evaluation-harness ended with", evaluate.main, command)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_user_error("^tasks needs lm-evaluation-harness: run pip", evaluate.main, ["no/model", "--tasks", "which"])
