"""Loading of a published folder in a process without this project."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from test_model import FAMILIES, tiny_model
from test_native import bpe, model_folder
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from conftest import REPOSITORY
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.configuration_gpt2scratch import AUTO_MAP

IDS = torch.arange(8)[None]
HUB_ID, COMMIT = "someone/tiny-gpt2", "c0ffee" * 6 + "cafe"
CODE = ["configuration_gpt2scratch.py", "modeling_gpt2scratch.py"]

# Loads each source without this project; prints one JSON object per source.
LOAD_EACH = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

def look(source, resaved):
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    ask = {"trust_remote_code": True, "output_loading_info": True}
    base, base_report = AutoModel.from_pretrained(source, **ask)
    model, report = AutoModelForCausalLM.from_pretrained(source, **ask)
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits, hidden = model(ids).logits, base(ids).last_hidden_state
        through_base = model.lm_head(hidden)
    if resaved:
        model.save_pretrained(resaved)
    return {
        "classes": [type(config).__name__, type(base).__name__, type(model).__name__],
        "modules": [type(config).__module__, type(model).__module__],
        "problems": [str(one) for one in (base_report, report) if any(one.values())],
        "logits": logits.tolist(),
        "through_base": through_base.tolist(),
        "dropped_by_vllm": sorted(base._keys_to_ignore_on_load_unexpected or []),
        "tied": model.lm_head.weight is model.transformer.wte.weight,
        "residual_std": fresh.transformer.h[0].mlp.c_proj.weight.std().item() / config.initializer_range,
        "generated": model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist(),
    }

for source, resaved in json.loads(sys.argv[1]):
    print(json.dumps(look(source, resaved)))
assert "modeling_gpt2scratch" not in sys.modules
"""

# Trains a classifier of texts of each source, saves it, loads it and classifies with it, without this project.
CLASSIFY = """
import sys, torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers import Trainer, TrainingArguments, pipeline

trust, texts = {"trust_remote_code": True}, ["aab", "baabb", "cdd", "dcdcd"]
for source in sys.argv[1:]:
    saved, tokenizer = f"{source}-saved", AutoTokenizer.from_pretrained(source, **trust)
    ask = {"id2label": {0: "with a", 1: "without"}, "output_loading_info": True, **trust}
    model, report = AutoModelForSequenceClassification.from_pretrained(source, **ask)
    assert (report["missing_keys"], report["unexpected_keys"]) == ({"score.weight", "score.bias"}, set())
    assert model.num_labels == 2
    data = [{"input_ids": tokenizer(text).input_ids, "labels": int("a" not in text)} for text in 8 * texts]
    settings = {"max_steps": 30, "learning_rate": 0.01, "report_to": [], "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(saved, **settings, gradient_accumulation_steps=2, logging_steps=1)
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    loss = trainer.evaluate(data)["eval_loss"]
    trainer.train()
    assert 0.6 < trainer.state.log_history[0]["loss"] / loss < 1.5  # not the sum of the micro-batches
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    classify = pipeline("text-classification", saved, **trust)
    assert [found["label"] for found in classify(texts, batch_size=4)] == 2 * ["with a"] + 2 * ["without"]
    for side in ("left", "right"):
        batch = tokenizer(texts[:2], padding=True, padding_side=side, return_tensors="pt")
        alone = classify.model(tokenizer(texts[0], return_tensors="pt").input_ids)
        torch.testing.assert_close(classify.model(**batch).logits[:1], alone.logits, rtol=1e-4, atol=1e-4)
    model = AutoModelForTokenClassification.from_pretrained(source, num_labels=3, **trust)
    assert model(**batch, labels=torch.zeros(2, 5, dtype=torch.long)).logits.shape == (2, 5, 3)
assert "modeling_gpt2scratch" not in sys.modules
"""


def run_isolated(launch, folder, script, *arguments):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    isolated = {"HF_HOME": str(folder / "hf"), "HF_HUB_CACHE": str(folder / "hf" / "hub"), "HF_HUB_OFFLINE": "1"}
    isolated |= {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}
    done = launch("-c", script, *arguments, folder=elsewhere, **isolated)
    assert done.returncode == 0, done.stderr
    return done


def put_in_hub_cache(model_folder, cache):
    """Write the files as `huggingface_hub` stores a downloaded repository."""
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    shutil.copytree(model_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@pytest.fixture(scope="module")
def published(tmp_path_factory, launch):
    """Return all folders of these tests and the results of loading them, one after the other."""
    folder = tmp_path_factory.mktemp("published")
    models = {"untied": tiny_model("gpt2"), "tied": tiny_model("gpt2", tie_word_embeddings=True)}
    models["modern"] = tiny_model("modern")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    put_in_hub_cache(folder / "untied", folder / "hf" / "hub")
    shutil.copytree(folder / "untied", folder / "another name-v1.0")
    shutil.copytree(folder / "untied", folder / "changed/untied")
    with (folder / "changed/untied/modeling_gpt2scratch.py").open("a") as file:
        file.write("# changed\n")
    pairs = [(str(folder / name), to and str(folder / to)) for name, to in SOURCES.items()]
    pairs[3] = (HUB_ID, pairs[3][1])
    done = run_isolated(launch, folder, LOAD_EACH, json.dumps(pairs))
    seen = [SimpleNamespace(**json.loads(line), stderr=done.stderr) for line in done.stdout.splitlines()]
    return SimpleNamespace(folder=folder, models=models, seen=dict(zip(SOURCES, seen, strict=True)))


# Sources, and the folders in which the process saves what it loaded.
SOURCES = {"untied": "resaved", "tied": "", "modern": "", HUB_ID: "resaved_from_hub"}
SOURCES |= dict.fromkeys(("resaved", "resaved_from_hub", "another name-v1.0", "changed/untied"), "")


@pytest.mark.parametrize("folder", ["untied", "resaved", "resaved_from_hub"])
def test_a_saved_folder_carries_its_code_and_names_it(published, folder):
    files = sorted(path.name for path in (published.folder / folder).iterdir())
    assert files == sorted([*CODE, "config.json", "generation_config.json", "model.safetensors"])
    config = json.loads((published.folder / folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["model_type"] == "gpt2scratch"
    assert config["architectures"] == ["GPT2ScratchForCausalLM"]
    for name in CODE:
        ours = (REPOSITORY / "modeling_gpt2scratch" / name).read_bytes()
        assert (published.folder / folder / name).read_bytes() == ours


class CappedLM(GPT2ScratchForCausalLM):
    pass


def test_a_subclass_keeps_its_entry(tmp_path):
    model = CappedLM(GPT2ScratchConfig(n_layer=1, n_head=1, n_embd=4, n_positions=4, vocab_size=5))
    for folder in (tmp_path / "first", tmp_path / "second"):
        model.save_pretrained(folder)
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map == AUTO_MAP | {"AutoModelForCausalLM": "test_loading.CappedLM"}


@torch.no_grad()
@pytest.mark.parametrize("source", SOURCES)
def test_other_process_loads_every_class_and_weight_with_the_folders_code_and_gets_the_same_logits(published, source):
    seen, model = published.seen[source], published.models.get(source, published.models["untied"])
    assert seen.classes == ["GPT2ScratchConfig", "GPT2ScratchModel", "GPT2ScratchForCausalLM"]
    assert all(module.startswith("transformers_modules.") for module in seen.modules)
    assert seen.problems == []
    assert "lm_head" not in seen.stderr  # no warning from the base model
    assert seen.dropped_by_vllm == []  # this attribute would make it drop the head
    assert seen.tied == (source == "tied")
    for logits in (seen.logits, seen.through_base):
        torch.testing.assert_close(torch.tensor(logits), model(IDS).logits, rtol=0, atol=1e-6)
    assert seen.generated == model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    # Initial weights: 1 / sqrt(2 * 2 layers), or zero. Transformers once skipped modules defined by custom code.
    assert seen.residual_std == pytest.approx(0.0 if source == "modern" else 0.5, rel=0.1)


def test_folders_of_one_name_use_their_own_code(published):
    assert published.seen["changed/untied"].modules[1] != published.seen["untied"].modules[1]


def test_other_process_trains_a_classifier_from_a_saved_folder(launch, tmp_path):
    for family, fields in FAMILIES.items():
        model_folder(tmp_path / family, bpe(), **fields)
    run_isolated(launch, tmp_path, CLASSIFY, *(tmp_path / family for family in FAMILIES))


def weight_names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_tied_weights_are_stored_once(published):
    untied, tied = (weight_names(published.folder / name) for name in ("untied", "tied"))
    assert len(untied) == len(tied) + 1
    assert "lm_head.weight" not in tied


def test_compiled_model_and_model_without_head_are_saved_with_their_code(tmp_path):
    model = tiny_model("gpt2")
    torch.compile(model).save_pretrained(tmp_path / "compiled")
    assert set(weight_names(tmp_path / "compiled")) == set(model.state_dict())  # plain names
    model.transformer.save_pretrained(tmp_path / "base")
    for folder in (tmp_path / "compiled", tmp_path / "base"):
        assert {path.name for path in folder.iterdir()} >= {*CODE, "config.json", "model.safetensors"}
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_uploaded_files_import_only_public_packages_and_each_other(published):
    allowed = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
    configuration, modeling = (published.folder / "untied" / name for name in CODE)
    assert get_relative_imports(configuration) == ["modeling_gpt2scratch"]
    assert get_relative_imports(modeling) == ["configuration_gpt2scratch"]
    assert {*get_imports(configuration), *get_imports(modeling)} <= allowed
