"""Tests of ONNX files, read by onnxruntime, and of the repositories that contain them."""

import json
import re
from functools import partial

import pytest
import test_native
import torch
from huggingface_hub import HfApi, ModelCard

import push_to_hub
from conftest import MODERN, MODERN_RUN, assert_one_sentence, assert_user_error, trained
from modeling_gpt2scratch import GPT2ScratchConfig
from publishing import onnx_file
from publishing.published_model import PublishedModel
from publishing.verify import expect

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra")

ONNX = {"onnx/model.onnx", "onnx/model_quantized.onnx"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
MODELS = {
    "tied GPT-2": (test_native.bpe, {"tie_word_embeddings": True}),
    "untied GPT-2 of characters": (test_native.characters, {"n_inner": 24, "activation_function": "relu"}),
    "modern with a context of 4": (test_native.bpe, MODERN | {"n_head": 4, "n_positions": 4}),
    "rotary GPT-2 without a twin": (test_native.bpe, {"rope_parameters": MODERN["rope_parameters"]}),
}


def names(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def exported(folder):
    """Write the ONNX files of a model folder into it. Return the model and the facts about each file."""
    release = PublishedModel.read(folder)
    return release.model, onnx_file.write_onnx(release.model, expect(release), folder, ["fp32", "q8"])


@pytest.mark.parametrize(("make", "fields"), MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_onnxruntime_computes_the_logits_of_the_model_also_in_a_padded_batch(make, fields, tmp_path):
    test_native.model_folder(tmp_path / "model", make(), **fields).bfloat16().save_pretrained(tmp_path / "model")
    model, (exact, *_) = exported(tmp_path / "model")
    assert (exact["name"], exact["equal"], model.dtype) == ("onnx/model.onnx", 20, torch.float32)
    assert exact["loss"] == pytest.approx(exact["model_loss"], abs=1e-4)
    file = tmp_path / "model" / "onnx" / "model.onnx"
    size = 4 * model.num_parameters()
    assert size < file.stat().st_size < size + 100_000  # a tied embedding is stored once
    assert str(onnx_file.CHECK.parent.parent).encode() not in file.read_bytes()  # the exporter records paths
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


def test_a_repository_for_browsers_replaces_one_with_code_and_both_can_be_in_one(hub, modern, capsys, monkeypatch):
    monkeypatch.setattr(push_to_hub, "verify", lambda location, reference: None)  # of the other formats
    push(modern, "--format", "both", "onnx", "--onnx", "q8")
    remote = partial(HfApi().list_repo_files, "me/tiny")
    assert {"modeling_gpt2scratch.py", "native/config.json", "onnx/model_quantized.onnx"} < set(remote())
    assert_interface(modern / "hub" / "onnx" / "model_quantized.onnx")
    card = (modern / "hub" / "README.md").read_text()
    assert 'config: {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2},' in card
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
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16}
    assert json.loads((modern / "hub" / "config.json").read_text()) == config
    card = ModelCard.load(modern / "hub" / "README.md")
    assert (card.data.library_name, card.data.tags[0]) == ("transformers.js", "gpt2")
    assert "```python" not in card.text
    assert "config:" not in card.text
    loss = r"\| `onnx/model\.onnx` \| fp32 \| 20 of 20 \| [\d.e-]+ \| (\d\.\d{4}) \|(?s:.*)tokens of validation text (?s:.*)"
    assert re.search(rf"{loss}is \1 for the model", card.text)


def test_a_file_whose_rounding_costs_too_much_is_left_out(tmp_path, monkeypatch, capsys):
    test_native.model_folder(tmp_path, test_native.bpe())
    monkeypatch.setattr(onnx_file, "LOSS_TOLERANCE", -1.0)
    assert_one_sentence("has no ONNX file of that type; choose --onnx fp32", exported, tmp_path)
    sentence = r"onnx/model_quantized\.onnx is left out: it raises the loss by .*, more than -1\.0\."
    assert re.search(sentence, capsys.readouterr().out)


def test_a_model_that_is_too_large_or_differs_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    small, large = tmp_path / "small", tmp_path / "large"
    test_native.model_folder(small, test_native.bpe())
    GPT2ScratchConfig().save_pretrained(large)
    assert_user_error(
        r"large has 134,601,216 parameters: 538 MB as fp32, but a file for browsers may have 200 MB; leave ONNX out, or add "
        r"--onnx q8\.",
        push, large, "--format", "onnx", "--dry_run",
    )  # fmt: skip
    onnx_file.check_onnx(large, ["q8"])
    monkeypatch.setattr(onnx_file, "_run_isolated", wrong(onnx_file._run_isolated))
    assert_one_sentence(r"small computes other results in onnxruntime: logits differ by 1\.0e\+0.*", exported, small)
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    assert_user_error(r"run pip install -e '\.\[onnx\]'\.$", push, small, "--onnx", "q8", "--dry_run")


def wrong(run):
    """Return `run` with logits that differ by 1."""

    def run_wrong(path, request):
        answer = run(path, request)
        return answer | {"logits": answer["logits"] + 1}

    return run_wrong


def test_a_text_counts_as_equal_where_two_tokens_are_equally_likely():
    texts, logits = torch.tensor([[9, 1, 2], [9, 1, 2], [9, 1, 2]]), torch.zeros(1, 3)
    answer = {"tokens": torch.tensor([[1, 2], [1, 0], [0, 2]]).numpy(), "logits": torch.zeros(2, 3).numpy()}
    gaps = torch.tensor([[1.0, 1.0], [1.0, 1e-6], [1.0, 1e-6]])
    assert onnx_file._differences(answer, logits, texts, gaps)["equal"] == 2
