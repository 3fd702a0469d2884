"""Tests of the native format, for programs that support only Transformers' own classes."""

import json
from functools import partial

import pytest
import torch
from transformers import ApertusForCausalLM, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from conftest import CHATML_TOKENS, MODERN, prose
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.conversion_gpt2scratch import convert
from tokenizer.corpus.chat import CHATML
from tokenizer.encoding.vocabulary import character_tokenizer, save, train_bpe

SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
characters = partial(character_tokenizer, [prose(1)])


def bpe(texts=None, vocab_size=320):
    tokenizer = train_bpe(texts or [prose(1)], vocab_size, special_tokens=CHATML_TOKENS)
    tokenizer.chat_template = CHATML
    return tokenizer


def model_folder(folder, tokenizer, seed=1, **fields):
    """Save a small random model in which every parameter affects the output."""
    torch.manual_seed(seed)
    roles = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    config = GPT2ScratchConfig(**{"vocab_size": len(tokenizer), **shape, **roles, **fields})
    model = GPT2ScratchForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save(tokenizer, folder, config.n_positions)
    return model


@pytest.mark.parametrize(
    ("make", "fields", "special"),
    [
        (bpe, {"tie_word_embeddings": True}, SPECIAL),
        (characters, {"n_inner": 24, "activation_function": "relu"}, []),
        (bpe, MODERN, SPECIAL),
        (characters, MODERN | {"n_inner": 24, "attention_scale": None, "tie_word_embeddings": True}, []),
        (bpe, {"use_bias": False}, SPECIAL),
    ],
    ids=["bpe", "character", "modern bpe", "modern character", "without biases"],
)
def test_transformers_reads_the_same_model_with_its_own_classes(make, fields, special, tmp_path):
    tokenizer = make()
    ours = model_folder(tmp_path / "model", tokenizer, **fields)
    convert(tmp_path / "model", tmp_path / "native", to="native")
    native, words = (kind.from_pretrained(tmp_path / "native") for kind in (AutoModelForCausalLM, AutoTokenizer))
    kind = ApertusForCausalLM if "normalization" in fields else GPT2LMHeadModel
    assert (type(native), native.dtype, native.config.eos_token_id) == (kind, torch.float32, tokenizer.eos_token_id)
    ids = words("the of and a", return_tensors="pt").input_ids
    assert ids.tolist() == [tokenizer.encode("the of and a")]
    with torch.no_grad():
        assert (ours(ids).logits - native(ids).logits).abs().max() < 1e-5 * max(1, ours(ids).logits.abs().max())
    more = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(ids, use_cache=cached, **more) for model in (ours, native) for cached in (True, False)]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert (words.all_special_tokens, words.chat_template) == (special, tokenizer.chat_template)


def test_the_native_folder_has_the_files_that_other_programs_need(tmp_path):
    model_folder(tmp_path / "model", bpe())
    convert(tmp_path / "model", tmp_path / "native", to="native")
    files = {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
    files |= {"model.safetensors", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "native").iterdir()} == files
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert (config["model_type"], config["n_ctx"], config["n_positions"]) == ("gpt2", 32, 32)
    assert "auto_map" not in config
    described = json.loads((tmp_path / "native" / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"  # 4.57 does not know TokenizersBackend
    assert described["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert described["model_input_names"] == ["input_ids", "attention_mask"]  # 4.57 would add token_type_ids
    scaled = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    for parameters, old in ((MODERN["rope_parameters"], None), (scaled, {"rope_type": "linear", "factor": 2.0})):
        folder = tmp_path / parameters["rope_type"]
        model_folder(folder / "model", bpe(), **MODERN | {"rope_parameters": parameters})
        convert(folder / "model", folder / "native", to="native")
        config = json.loads((folder / "native" / "config.json").read_text())
        assert (config["rope_theta"], config["rope_scaling"]) == (parameters["rope_theta"], old)  # for 4.57
    assert "extra_special_tokens" not in described  # Transformers 4.57 fails on a list here
