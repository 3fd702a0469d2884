"""Tests of the loader of all commands: which models it loads, and which it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import generate
from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import ModelError, load_model, load_tokenizer
from tokenizer.encoding.vocabulary import character_tokenizer
from training.checkpoints.loading import load_any_model

SIZE = {"vocab_size": 4, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
LLAMA = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def saved(folder: Path, model=None, **options) -> Path:
    torch.manual_seed(0)
    (model or GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE))).save_pretrained(folder, **options)
    character_tokenizer(["ab \n"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "model",
    [
        GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE)),
        GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE, tie_word_embeddings=True)),
        GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=None, eos_token_id=None)),
        LlamaForCausalLM(LlamaConfig(**LLAMA)),
    ],
    ids=["untied", "tied", "gpt2", "llama"],
)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 3000}], ids=["whole", "sharded"])
def test_models_saved_by_transformers_are_loaded(tmp_path, model, options):
    loaded, _ = load_any_model(saved(tmp_path, model, **options))
    assert type(loaded) is type(model)
    ids = torch.arange(4)[None]
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-6)


def test_a_model_with_settings_that_transformers_refuses_to_save_is_saved_without_them(tmp_path):
    folder = saved(tmp_path, GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE)))
    refused, valid = {"temperature": 0.7, "pad_token_id": -1}, {"repetition_penalty": 1.1, "max_new_tokens": 9}
    changed("generation_config.json", **refused, **valid, eos_token_id=3)(folder)
    model, _ = load_any_model(folder)
    model.generation_config.eos_token_id = [3, 2]
    model.save_pretrained(folder)
    content = json.loads((folder / "generation_config.json").read_text())
    assert (content["eos_token_id"], {*refused} & {*content}) == ([3, 2], set())
    assert {name: content[name] for name in valid} == valid


def changed(name: str, **values):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change


def written(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def rewritten(change):
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def with_weights(**tensors):
    def change(folder):
        weights = load_file(folder / WEIGHTS) | tensors
        save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / WEIGHTS)

    return change


def indexed(name: str):
    """Return a change that moves the weights out of the folder and names this shard in an index."""

    def change(folder):
        (folder / WEIGHTS).rename(folder.parent / "secret.safetensors")
        shard = name.replace("PARENT", str(folder.parent))
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))

    return change


def linked(name: str):
    def change(folder):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (changed(CONFIG, n_layer=3), r"transformer\.h\.1\.attn\.c_attn\.bias is missing; .* and 21 more"),
        (changed(CONFIG, n_layer=10**9), "n_layer is 1000000000, but there are only 17 tensors"),
        (written(CONFIG, '{"model_type": "llama"}'), r"model\.embed_tokens\.weight is missing; .* and \d+ more"),
        (changed(CONFIG, vocab_size=10**12), "vocab_size is 1000000000000 but must be at least 1 and at most"),
        (changed(CONFIG, n_positions=16), r"wpe\.weight is \(32, 16\) instead of \(16, 16\)"),
        (changed(CONFIG, n_head="x"), "Field 'n_head' expected int, got str"),
        (changed(CONFIG, dtype=5), "cannot be loaded"),
        (changed(CONFIG, model_type="evil", auto_map={"AutoConfig": "evil.C"}), "the model's own code is not run"),
        (changed(CONFIG, model_type="t5"), "is not a causal language model of Transformers"),
        (changed(CONFIG, quantization_config={"quant_method": "evil"}), "sets quantization_config"),
        (changed(CONFIG, transformers_weights="../a.safetensors"), "sets transformers_weights"),
        (written(CONFIG, "[1]"), "config.json does not contain a JSON object"),
        (written("generation_config.json", "{"), "generation_config.json is not JSON"),
        (changed("generation_config.json", eos_token_id="x"), "sets eos_token_id to 'x'"),
        (written("adapter_config.json", "{}"), "merge the adapter into its base"),
        (
            written("tokenizer_config.json", '{"tokenizer_class": "My", "auto_map": {"AutoTokenizer": ["a.B", null]}}'),
            "needs its own code, which",
        ),
        (changed(CONFIG, pad_token_id=10**20), "which is not a token id"),
        (changed("tokenizer_config.json", model_max_length="x"), "has no usable tokenizer"),
        (written("tokenizer_config.json", "[" * 100_000), "has no usable tokenizer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (
            lambda folder: character_tokenizer(["abcde"]).save_pretrained(folder),
            "ids up to 4, but its model has only 4 embeddings",
        ),
        (
            rewritten(lambda content: b"version https://git-lfs.github.com/spec/v1\n"),
            "pointer of Git LFS, .*; run git lfs pull",
        ),
        (rewritten(lambda content: content[:-10]), "Error while deserializing header"),
        (rewritten(lambda content: content.replace(b'"F32"', b'"I32"')), r"wte\.weight has type I32"),
        (with_weights(extra=torch.zeros(3)), "extra is unknown"),
        (
            with_weights(**{"lm_head.weight": None, "head": torch.zeros(4, 16)}),
            r"lm_head\.weight is missing; head is unknown",
        ),
        (with_weights(**{"lm_head.weight": torch.zeros(16, 4)}), r"lm_head\.weight is \(16, 4\) instead of \(4, 16\)"),
        (with_weights(**{"transformer.ln_f.bias": torch.full((16,), float("nan"))}), "logits that are not finite"),
        (indexed("../secret.safetensors"), r"names \.\./secret\.safetensors, which is not a safetensors file in"),
        (indexed("PARENT/secret.safetensors"), "which is not a safetensors file in its folder"),
        (indexed("model-1.safetensors"), "is missing, but model.safetensors.index.json names it"),
        (indexed("model.bin"), "which is not a safetensors file"),
        (linked(WEIGHTS), "model.safetensors is a link out of the folder"),
        (linked(CONFIG), "config.json is a link out of the folder"),
        (linked("tokenizer_config.json"), "tokenizer_config.json is a link out of the folder"),
    ],
)  # fmt: skip
def test_an_incomplete_or_wrong_model_is_refused_in_one_sentence(tmp_path, change, expected, capsys):
    change(saved(tmp_path / "model"))
    with pytest.raises(UserError, match=expected) as refused:
        generate.main([str(tmp_path / "model"), "--prompt", "a", "--max_new_tokens", "2"])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
    assert capsys.readouterr().out == ""


def test_code_in_a_model_folder_does_not_run(tmp_path, capsys):
    folder, trace = saved(tmp_path / "model"), tmp_path / "trace"
    (folder / "custom_generate").mkdir()
    for name in ("modeling_gpt2scratch", "configuration_gpt2scratch", "evil", "custom_generate/generate"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\n")
    changed(CONFIG, _attn_implementation="evil/kernel", attn_implementation="evil/kernel")(folder)
    for auto_map in ({"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, {"AutoConfig": "evil--evil.C"}):
        changed(CONFIG, auto_map=auto_map)(folder)
        changed("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})(folder)
        generate.main([str(folder), "--prompt", "a", "--max_new_tokens", "2"])
        assert capsys.readouterr().out.startswith("a")
        load_tokenizer(folder)
    shutil.rmtree(folder / "custom_generate")
    changed(CONFIG, model_type="evil")(folder)
    with pytest.raises(ModelError, match="is not run"):
        load_model(folder)
    assert not trace.exists()
