"""Tests of ONNX files, read by onnxruntime, and of the repositories that contain them."""

import json
import re
import shutil
from functools import partial

import pytest
import test_native
import torch
from huggingface_hub import HfApi, ModelCard

import push_to_hub
from conftest import MODERN, MODERN_RUN, REPOSITORY, assert_one_sentence, assert_user_error, trained
from modeling_gpt2scratch import GPT2ScratchConfig
from publishing import onnx_file
from publishing.published_model import PublishedModel
from publishing.verify import expect

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra")

ONNX = {"onnx/model.onnx", "onnx/model_quantized.onnx"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
ROTARY = {"rope_parameters": MODERN["rope_parameters"]}
MODELS = {
    "rotary GPT-2 of characters without a twin": (
        test_native.characters,
        ROTARY | {"activation_function": "relu", "n_layer": 1},
    ),
    "tied modern with a context of 4": (
        test_native.bpe,
        MODERN | {"n_head": 4, "n_positions": 4, "tie_word_embeddings": True},
    ),
}


def exported(folder):
    """Write the ONNX files of a model folder into it. Return the model and the facts about each file."""
    release = PublishedModel.read(folder)
    return release.model, onnx_file.write_onnx(release.model, expect(release), folder, ["fp32", "q8"])


@pytest.mark.parametrize(("make", "fields"), MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_onnxruntime_computes_the_logits_of_the_model_also_in_a_padded_batch(make, fields, tmp_path):
    test_native.model_folder(tmp_path / "model", make(), **fields).bfloat16().save_pretrained(tmp_path / "model")
    settings = tmp_path / "model" / "generation_config.json"  # the comparison is without these
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"repetition_penalty": 3.0}))
    model, (exact, *_) = exported(tmp_path / "model")
    assert (exact["name"], exact["equal"], model.dtype) == ("onnx/model.onnx", 20, torch.float32)
    assert exact["loss"] == pytest.approx(exact["model_loss"], abs=1e-4)
    file = tmp_path / "model" / "onnx" / "model.onnx"
    size = 4 * model.num_parameters()
    assert size < file.stat().st_size < size + 100_000  # a tied embedding is stored once
    assert str(REPOSITORY).encode() not in file.read_bytes()  # the exporter records paths
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ids, mask = torch.arange(4).repeat(2, 1) + 4, torch.ones(2, 4, dtype=torch.long)
    mask[0, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    empty = torch.zeros(2, model.config.n_head, 0, model.config.n_embd // model.config.n_head)
    inputs |= {entry.name: empty for entry in session.get_inputs()[2:]}
    logits = torch.from_numpy(session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})[0])
    assert torch.allclose(logits[0, 2:], model(ids[:1, 2:]).logits[0], atol=1e-3)
    assert torch.allclose(logits[1], model(ids[1:]).logits[0], atol=1e-3)


def assert_interface(file):
    """Check the names that transformers.js fills in, for a model of two layers with two heads of width 8."""
    session = onnxruntime.InferenceSession(file)
    caches = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert {entry.name: entry.shape for entry in session.get_inputs()} == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        **{f"past_key_values.{name}": ["batch_size", 2, "past_sequence_length", 8] for name in caches},
    }
    assert [entry.name for entry in session.get_outputs()] == ["logits", *(f"present.{name}" for name in caches)]


@pytest.fixture(scope="module")
def modern(tmp_path_factory, store):
    """A modern run whose texts are not tied, with a validation."""
    return trained(store, tmp_path_factory.mktemp("runs") / "modern", **MODERN_RUN, tie_word_embeddings="false")


def push(folder, *options) -> None:
    push_to_hub.main([str(folder), "--repo_id", "me/tiny", *options])


@pytest.fixture(scope="module")
def one_export(tmp_path_factory):
    """Each model is exported once, in ten seconds; its files are copied afterwards. Models differ in their sizes."""
    export, folder = onnx_file._export, tmp_path_factory.mktemp("exports")

    def export_once(model, paths):
        files = {kind: folder / f"{model.num_parameters()}-{kind}.onnx" for kind in onnx_file.FILES}
        if not files["fp32"].exists():
            export(model, files)
        for kind, path in paths.items():
            shutil.copy(files[kind], path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "_export", export_once)
        yield


@pytest.mark.usefixtures("one_export")
def test_a_repository_for_browsers_replaces_one_with_code_and_both_can_be_in_one(hub, modern, capsys, monkeypatch):
    monkeypatch.setattr(push_to_hub, "verify", lambda location, reference: None)  # of the other formats
    push(modern, "--format", "both", "onnx", "--onnx", "q8")
    remote = partial(HfApi().list_repo_files, "me/tiny")
    assert {"modeling_gpt2scratch.py", "native/config.json", "onnx/model_quantized.onnx"} < set(remote())
    assert_interface(modern / "hub" / "onnx" / "model_quantized.onnx")
    card = (modern / "hub" / "README.md").read_text()
    assert (
        'config: {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 300},'
        in card
    )
    push(modern, "--format", "onnx")
    assert set(remote()) - {".gitattributes"} == {
        *ONNX,
        *TOKENIZER,
        "config.json",
        "README.md",
        "loss.png",
        "course.png",
    }
    assert capsys.readouterr().out.count("onnx/model.onnx: 20 of 20 greedy texts are equal, logits") == 1
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 300}
    assert json.loads((modern / "hub" / "config.json").read_text()) == config
    card = ModelCard.load(modern / "hub" / "README.md")
    assert (card.data.library_name, card.data.tags[0]) == ("transformers.js", "gpt2")
    assert "```python" not in card.text
    assert "config:" not in card.text
    loss = r"\| `onnx/model\.onnx` \| fp32 \| 20 of 20 \| [\d.e-]+ \| (\d\.\d{4}) \|(?s:.*)"
    loss += r"tokens of validation text (?s:.*)"
    assert re.search(rf"{loss}is \1 for the model", card.text)


def test_a_file_that_computes_other_results_is_refused_or_left_out(tmp_path, monkeypatch, capsys):
    test_native.model_folder(tmp_path / "model", test_native.bpe())
    compared = {"equal": 20, "logits": 1e-5, "tolerance": 1e-4, "loss": 9.0}
    monkeypatch.setattr(onnx_file, "_export", lambda model, paths: [path.touch() for path in paths.values()])
    monkeypatch.setattr(onnx_file, "_compare", lambda *parts: compared)
    for change in ({"logits": 1.0}, {"logits": float("nan")}, {"equal": 19}):
        monkeypatch.setattr(onnx_file, "_compare", lambda *parts, change=change: compared | change)
        folder = shutil.copytree(tmp_path / "model", tmp_path / str(change))
        assert_one_sentence(
            "computes other results in onnxruntime: .*, logits differ by .*; publish it without", exported, folder
        )
    monkeypatch.setattr(onnx_file, "_compare", lambda *parts: compared)
    assert_one_sentence("has no ONNX file of that type; choose --onnx fp32", exported, tmp_path / "model")
    sentence = r"onnx/model_quantized\.onnx is left out: it raises the loss by .*, more than 0\.02\."
    assert re.search(sentence, capsys.readouterr().out)


def test_a_model_that_is_too_large_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    GPT2ScratchConfig().save_pretrained(tmp_path / "large")
    sentence = (
        r"large has 134,601,216 parameters: 538 MB as fp32, but a file for browsers may have 200 MB; leave ONNX out, or"
    )
    assert_user_error(sentence, push, tmp_path / "large", "--format", "onnx", "--dry_run")
    onnx_file.check_onnx(tmp_path / "large", ["q8"])
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    assert_user_error(r"run pip install -e '\.\[onnx\]'\.$", push, tmp_path / "large", "--onnx", "q8", "--dry_run")


@torch.no_grad()
def test_a_text_counts_as_equal_where_two_tokens_are_equally_likely(tmp_path, monkeypatch):
    model = test_native.model_folder(tmp_path, test_native.bpe())
    prompts, options = torch.arange(4)[:, None] + 4, {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **options)

    def lowered(session, ids, P):
        changes = torch.zeros(len(ids), model.config.vocab_size)
        changes[:-1].scatter_(1, ids[1:, None], -1000.0)
        return model(ids[None]).logits[0] + changes

    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, providers: None)
    monkeypatch.setattr(onnx_file, "_logits", lowered)
    assert onnx_file._compare(model, tmp_path, texts, 1, texts)["equal"] == 0
    monkeypatch.setattr(onnx_file, "CACHE_TOLERANCE", 1.0)  # now all tokens are equally likely
    assert onnx_file._compare(model, tmp_path, texts, 1, texts)["equal"] == 4
