"""Tests of EleutherAI's lm-evaluation-harness with our folders and converted GPT-2 models, as docs/evaluation.md
describes."""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from test_publishing import card_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import MODERN_RUN, REPOSITORY, assert_user_error, prose, tokenized, trained
from modeling_gpt2scratch.conversion_gpt2scratch import convert
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


def write_tasks(folder) -> None:
    """Write the task from the documentation for the user's own text, and a multiple-choice task."""
    example = re.search(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)[1]
    assert "tasks/held_out.jsonl" in example
    my_text = example.replace("tasks/held_out.jsonl", f"{folder}/my_text.jsonl")
    for name, task, rows in (
        ("my_text", my_text, [{"text": page} for page in PAGES]),
        ("which", MULTIPLE_CHOICE.replace("FOLDER", str(folder)), CHOICES),
    ):
        (folder / f"{name}.yaml").write_text(task)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, store):
    folder = tmp_path_factory.mktemp("models")
    checkpoint = trained(store, folder / "run", max_steps=30, warmup_steps=0) / "checkpoints" / "step_00000030"
    convert(str(checkpoint), str(folder / "twin"), "gpt2")
    return {"checkpoint": checkpoint, "twin": folder / "twin"}


def evaluated(model, tasks, *names: str, **model_options) -> dict:
    """Return the results of the harness in this process, which does not read its thousands of tasks."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options = "".join(f",{name}={value}" for name, value in model_options.items())
    settings = {"model_args": f"pretrained={model},dtype=float32{options}", "device": "cpu", "batch_size": 4}
    return lm_eval.simple_evaluate(model="hf", tasks=list(names), task_manager=manager, **settings)


def nats_of(samples: list[dict]) -> list[float]:
    return [float(nats) for sample in samples for [[nats, _]] in sample["resps"]]


@pytest.fixture(scope="module")
def results(launch, models, tasks):
    """For the checkpoint, by the documented command, and its twin: all results, and the log likelihoods of the
    choices."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "home")}
    arguments = f"pretrained={models['checkpoint']},dtype=float32,trust_remote_code=True"
    process = launch(
        *("-m", "lm_eval", "--model", "hf", "--model_args", arguments),
        *("--tasks", "my_text,which", "--include_path", tasks, "--batch_size", "4", "--device", "cpu"),
        *("--output_path", tasks / "checkpoint", "--log_samples"),
        **offline,
    )
    assert process.returncode == 0, process.stderr
    [summary] = (tasks / "checkpoint").glob("*/results_*.json")
    [samples] = (tasks / "checkpoint").glob("*/samples_which_*.jsonl")
    twin = evaluated(models["twin"], tasks, "my_text", "which")
    return {
        "checkpoint": (json.loads(summary.read_text()), nats_of(map(json.loads, samples.read_text().splitlines()))),
        "twin": (twin, nats_of(twin["samples"]["which"])),
    }


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


def test_a_checkpoint_and_its_converted_gpt2_get_the_same_results(results, models):
    (checkpoint, choices), (twin, choices_of_twin) = results["checkpoint"], results["twin"]
    assert checkpoint["max_length"] == twin["max_length"] == 16
    assert checkpoint["config"]["model_num_parameters"] == twin["config"]["model_num_parameters"] == 11648
    assert choices == pytest.approx(choices_of_twin, abs=1e-5)
    assert len(choices) == 6
    for task in ("my_text", "which"):
        assert numbers(checkpoint, task) == pytest.approx(numbers(twin, task), rel=1e-6)
    value = checkpoint["results"]["my_text"]["bits_per_byte,none"]
    assert value == pytest.approx(bits_per_byte(models["checkpoint"]), rel=1e-5)
    assert 1.5 < value < 3.5  # a uniform distribution over 300 tokens would give 3.5


def test_a_character_model_of_the_modern_family_uses_the_given_prefix_token(tasks, tmp_path):
    (tmp_path / "text.txt").write_text(prose(1, 800))
    characters = tokenized(tmp_path, tmp_path / "store", tokenizer_type="character")
    model = trained(characters, tmp_path / "run", **MODERN_RUN) / "model"
    newline = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("\n")
    result = evaluated(model, tasks, "my_text", trust_remote_code=True, prefix_token_id=newline)
    assert result["results"]["my_text"]["bits_per_byte,none"] == pytest.approx(bits_per_byte(model, newline), rel=1e-5)


def test_the_card_shows_harness_results_only_of_its_own_weights(results, models, tasks):
    checkpoint = models["checkpoint"]
    evaluations = shutil.copytree(tasks / "checkpoint", checkpoint.parents[1] / "lm_eval")
    result, _ = results["checkpoint"]
    card = ModelCard(card_of(checkpoint))
    entries = {(entry.dataset_name, entry.metric_type): entry for entry in card.data.eval_results}
    assert set(entries) == {
        *(("held-out text of the training sources", metric) for metric in ("loss", "perplexity", "bits_per_byte")),
        *(("my_text", metric) for metric in ("bits_per_byte", "byte_perplexity", "word_perplexity")),
        *(("which", metric) for metric in ("acc", "acc_norm")),
    }
    assert entries["which", "acc"].metric_value == result["results"]["which"]["acc,none"]
    assert entries["which", "acc"].dataset_split == "test"
    assert entries["which", "acc"].source_name == f"lm-eval {lm_eval.__version__}, 0-shot"
    assert "## Evaluation\n\n| task | metric | value | source |" in card.text
    [path] = evaluations.glob("*/results_*.json")
    path.write_text(path.read_text().replace("step_00000030", "step_00000015"))  # results of other weights
    assert PublishedModel.read(checkpoint).harness == []


def test_evaluate_reports_the_results_of_lm_eval(results, models, tasks, store, tmp_path, monkeypatch):
    run = shutil.copytree(models["checkpoint"].parents[1], tmp_path / "run", ignore=shutil.ignore_patterns("lm_eval"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_defaults: manager)
    for names in ("whi*", str(tasks / "my_text.yaml")):
        evaluate.main([str(run), "--tasks", names, "--per_device_eval_batch_size", "4"])
    results_of_run = json.loads((run / "evaluation" / "evaluation.json").read_text())["tasks"]
    for task in ("my_text", "which"):
        assert numbers(results_of_run, task) == numbers(results["checkpoint"][0], task)
    acc, stderr = (results_of_run["results"]["which"][f"acc{name},none"] for name in ("", "_stderr"))
    model_folder = shutil.copytree(run / "model", tmp_path / "alone")  # a model without a run
    evaluate.main([str(model_folder), "--data", str(store.folder), "--tasks", "which"])
    cards = [card_of(folder) for folder in (run, model_folder)]
    for page in (*cards, (run / "report.md").read_text()):
        assert f"| which, acc | {acc:.4f} | {stderr:.4f} |\n" in page
    for entries in (ModelCard(card).data.eval_results for card in cards):
        assert ("which", "acc", acc) in {(e.dataset_name, e.metric_type, e.metric_value) for e in entries}
    assert "my_text: at least" not in (run / "report.md").read_text()
    rows = (CHOICES[0] | {"query": prose(i, 40), "choices": ["was", "he"]} for i in range(3))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = tmp_path / "long.yaml"
    long.write_text(MULTIPLE_CHOICE.replace("FOLDER", str(tmp_path)).replace("which", "long"))
    evaluate.main([str(run), "--tasks", str(long)])
    assert "long: at least 6 requests exceeded the context and lost the beginning." in (run / "report.md").read_text()
    long.write_text(long.read_text().replace("multiple_choice", "generate_until"))
    (run / "evaluation" / "evaluation.json").unlink()
    assert_user_error("^lm-evaluation-harness ended", evaluate.main, [str(run), "--compare", "--tasks", str(long)])
    assert "panel" in json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert_user_error("^'' is neither a task", evaluate.main, ["no/model", "--tasks", "which,"])
    (broken := tmp_path / "broken.yaml").write_text((tasks / "my_text.yaml").read_text().replace(".jsonl", ".missing"))
    assert_user_error("^lm-evaluation-harness ended with", evaluate.main, ["no/model", "--tasks", str(broken)])
    for value in (
        "'{{query.x}}'",
        "!function os.getcwd",
        "'{% set x = 1 %}'",
        "x\ninclude: a",
        "x\nmetric_list: [{metric: x}]",
    ):
        broken.write_text(MULTIPLE_CHOICE.replace('"{{query}}"', value))
        sentence = "broken.yaml can run code .*; read it, then add --trust_task_code"
        assert_user_error(sentence, evaluate.main, ["no/model", "--tasks", str(broken)])
    assert_user_error("^lm-evaluation", evaluate.main, ["no/model", "--tasks", str(broken), "--trust_task_code"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_user_error("^tasks needs lm-evaluation-harness: run pip", evaluate.main, ["no/model", "--tasks", "which"])
