"""Tests of the model in the root of this repository: its files, its record, and its use without training anything."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open

import generate
import train_accelerate
from benchmarks import root_model
from common.atomic import file_sha256
from conftest import REPOSITORY, assert_user_error, clean_environment, online
from hub_server import serving
from publishing.published_model import read_page

RECORD = json.loads((REPOSITORY / "benchmarks/results/root-model.json").read_text(encoding="utf-8"))
BITS = {row["name"]: row["bits_per_byte"] for row in RECORD["scores"]["panel"]["rows"]}
SHARES = {name: entry["accepted"] / entry["of"] for name, entry in RECORD["functions"].items()}
# What a user of Transformers writes. The loss is that of the record only with the weights and the code in the folder.
USE = f"""
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

options = {{"trust_remote_code": True}}
for source in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", **options)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    ids = tokenizer({root_model.FIXED_TEXT!r}, return_tensors="pt").input_ids
    assert abs(model(ids, labels=ids).loss.item() - {RECORD["fixed_loss"]!r}) < 1e-4
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert AutoConfig.from_pretrained(source, **options).n_layer == 4
    assert AutoModel.from_pretrained(source, **options).config.n_embd == 256
    text = pipeline("text-generation", source, **options)("def ", max_new_tokens=5)[0]["generated_text"]
    assert text.startswith("def ") and "modeling_gpt2scratch" not in sys.modules
"""


@pytest.fixture
def copy(tmp_path):
    """Files of the repository that the Hub needs, in a folder of another name."""
    folder = tmp_path / "copy"
    shutil.copytree(
        *(REPOSITORY / "modeling_gpt2scratch", folder / "modeling_gpt2scratch"),
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in (*root_model.FILES, "README.md", ".gitattributes"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def test_the_root_is_uploaded_to_the_hub_and_loads_from_there_and_from_its_folder(copy, tmp_path):
    """It is loaded in a fresh process, whose Python does not find this repository, in another folder."""
    with serving() as (server, address):
        options = {"env": clean_environment() | online(address, tmp_path / "home"), "capture_output": True}
        upload = [f"{sys.prefix}/bin/hf", "upload", "me/gpt2scratch", "."]
        use = [sys.executable, "-c", USE, "me/gpt2scratch", str(REPOSITORY)]
        for command, folder in ((upload, copy), (use, tmp_path)):
            done = subprocess.run(command, cwd=folder, text=True, check=False, **options)
            assert done.returncode == 0, done.stderr
        repository = server["me/gpt2scratch"]
        files = repository.commits[repository.branches["main"]]
    card = ModelCard(files["README.md"].content.decode())
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"


def test_files_are_those_of_the_record_and_small():
    assert {name: file_sha256(REPOSITORY / name) for name in root_model.FILES} == RECORD["files"]
    assert (REPOSITORY / "model.safetensors").stat().st_size < 10_000_000
    with safe_open(REPOSITORY / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        assert {part.get_dtype() for part in sizes.values()} == {"BF16"}
        assert sum(file.get_tensor(name).numel() for name in sizes) == 4_718_592


def test_card_and_page_state_what_was_measured():
    metadata, _ = read_page(REPOSITORY / "README.md")
    [entry] = metadata["model-index"]
    values = {metric["type"]: metric["value"] for result in entry["results"] for metric in result["metrics"]}
    assert values == {
        "loss": round(RECORD["scores"]["eval_loss"], 4),
        "bits_per_byte": round(RECORD["scores"]["eval_bits_per_byte"], 4),
        "ast_parse": SHARES["."],
    }
    page = (REPOSITORY / "docs" / "root_model.md").read_text(encoding="utf-8")
    names = (".", root_model.QUICKSTART, "trigram", "xz -9")
    figures = [f"{BITS[name]:.3f}" for name in names] + [f"{share:.1%}" for share in SHARES.values()]
    figures += [f"{RECORD['scores']['eval_bits_per_byte']:.4f}", RECORD["commit"], *RECORD["files"].values()]
    assert [figure for figure in figures if figure not in page] == []
    assert re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)[-5:] == RECORD["functions"]["."]["first"]
    assert yaml.safe_load((REPOSITORY / root_model.PRESET).read_text())["vocab_size"] == 3072


def test_a_function_must_end_and_be_accepted():
    accepted = ("def f(x):\n    return x\n\n\nclass A", "def f(\n    x,\n) -> int:\n    return x\n# next")
    assert all(map(root_model.is_accepted, accepted))
    refused = ("def f(x):\n    return x", "def f(x:\n    return x\nx", "def \n", "def f(x):\n    return '\0'\nx")
    assert not any(map(root_model.is_accepted, refused))


def test_first_losses_are_compared_to_the_bit_on_the_same_type_of_cpu():
    first = RECORD["first_steps"]
    assert "within 0.000000 nats" in root_model.comparison(first, first)
    other = first | {"losses": [[step, loss + 1e-3] for step, loss in first["losses"]]}
    assert_user_error("differ from the record by up to 0.001", root_model.comparison, first, other)
    assert "within 0.001000 nats" in root_model.comparison(first, other | {"cpu": "another"})
    other = first | {"val_sha256": "", "packages": ["rich 15.1.0", *first["packages"]]}
    sentence = "The text differs: the record has the same packages, this machine rich 15.1.0; run make"
    assert_user_error(sentence, root_model.comparison, first, other)


def test_generate_without_a_model_means_the_root(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = []
    for source in ([], [str(REPOSITORY)]):
        generate.main([*source, "--prompt", "def ", "--max_new_tokens", "4", "--temperature", "0"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")


def test_missing_weights_end_in_one_sentence(copy, monkeypatch):
    monkeypatch.setattr(generate, "REPOSITORY", copy)
    (weights := copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_user_error("is a pointer of Git LFS, not the weights; run git lfs pull", generate.main, [])
    weights.unlink()
    assert_user_error("model.safetensors is missing", generate.main, [])


def test_training_never_writes_to_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert_user_error(r"\. exists and is not a run folder", train_accelerate.main, ["--output_dir", "."])
    assert_user_error(r"\. is neither a run", train_accelerate.main, ["--resume_from_checkpoint", "."])
