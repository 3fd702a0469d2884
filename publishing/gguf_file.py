"""Write a model as one GGUF file for llama.cpp and programs based on it. See docs/gguf.md.

python -m publishing.gguf_file runs/x model-f16.gguf --type f16
python -m publishing.gguf_file runs/x/checkpoints/step_00001000 model-q8_0.gguf --type q8_0
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import ApertusForCausalLM, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.utils import logging as transformers_logging

try:
    import gguf  # optional extra
except ImportError:
    gguf = None

from common.atomic import unfinished_path
from common.command_line import FlagParser, run
from common.errors import Problems, UserError, disk_errors
from common.limits import setting
from common.removal import FILE_MARK, refuse_replacing
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from modeling_gpt2scratch.conversion_gpt2scratch import XIELU, native_kind, to_apertus, with_biases
from modeling_gpt2scratch.prompts import turn_end
from tokenizer.encoding import encode, vocabulary
from tokenizer.encoding.encode import byte_level_alphabet, is_plain
from training.checkpoints.loading import find_model, load_own_model, model_errors, name_of_model

LLAMA_CPP_GELU = "gelu_new"  # the only activation that llama.cpp's GPT-2 supports
ACTIVATION_TOLERANCE = 1e-3  # largest differences from gelu_new: exact GELU 0.0005, quick_gelu 0.02, ReLU 0.17
STAND_INS = {byte: character for character, byte in byte_level_alphabet().items()}
NO_MERGE = "À Á"  # two bytes that UTF-8 never contains: llama.cpp requires at least one merge
SILENT_LOGIT = -1000.0


def write_gguf(
    model: GPT2ScratchForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    destination: Path,
    kind: str,
    name: str,
    license: str | None = None,
) -> None:
    """Write a float32 model as GPT-2 or Apertus in GGUF v3, atomically.
    `kind`: type of matrices, `f16` or `q8_0`. Vectors and position embeddings stay float32. Matrices whose row length
    is not a multiple of 32 are stored as f16. Programs that run the file show `name` and `license`.
    Raise a `UserError` if llama.cpp cannot compute this model or read its tokenizer, or the file cannot be written or
    is another's."""
    if gguf is None:
        raise UserError("Writing GGUF needs the package gguf: run pip install -e '.[gguf]'.")
    refuse_replacing(destination)
    config, kinds = model.config, gguf.GGMLQuantizationType
    refusal = f"{model.name_or_path} cannot be converted to GGUF"
    with model_errors(f"{refusal}: {{}}."):
        is_modern = native_kind(config) == "apertus"
    Problems(f"{refusal}: {problem}; publish it without GGUF." for problem in _problems(model, tokenizer)).refuse()
    tensors = _tensors(to_apertus(model) if is_modern else model)
    with disk_errors(destination), unfinished_path(destination, ".tmp") as path:
        writer = gguf.GGUFWriter(path, "apertus" if is_modern else "gpt2")
        writer.add_string(FILE_MARK, "GGUF")
        writer.add_name(name)
        if license is not None:
            writer.add_license(license)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_head_count(config.n_head)
        if is_modern:
            writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
            writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
            for name, value in XIELU.items():  # as in the checkpoint: llama.cpp applies the softplus
                getattr(writer, f"add_xielu_{name}")([value] * config.n_layer)
        else:
            writer.add_layer_norm_eps(config.layer_norm_epsilon)
        exact = {"position_embd.weight"}
        if _add_vocabulary(writer, tokenizer, config.vocab_size):
            longer = _with_silent_row(model.name_or_path, tensors)
            tensors, exact = tensors | longer, exact | longer.keys()  # few rows; the last row needs full precision
        for tensor_name, tensor in tensors.items():
            if tensor.ndim == 1 or tensor_name in exact:
                storage = kinds.F32
            else:
                storage = kinds.Q8_0 if kind == "q8_0" and tensor.shape[1] % 32 == 0 else kinds.F16
            writer.add_tensor(tensor_name, gguf.quantize(tensor.numpy(), storage), raw_dtype=storage)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@torch.no_grad()
def logit_difference(model: GPT2ScratchForCausalLM, file: Path, ids: torch.Tensor) -> tuple[float, float]:
    """Return the differences between GGUF file and float32 model: the largest of a logit, and the loss in nats per
    token. `ids`: (B, T) int64. Computed in float32 with the file's weights and llama.cpp's activation. The rounding
    inside llama.cpp is not included."""
    if native_kind(model.config) == "apertus":
        twin = to_apertus(model)
    else:
        twin = copy.deepcopy(model)
        for block in twin.transformer.h:
            block.mlp.act = ACT2FN[LLAMA_CPP_GELU]
    tensors = {part.name: gguf.dequantize(part.data, part.tensor_type) for part in gguf.GGUFReader(file).tensors}
    for gguf_name, weight in _tensors(twin).items():
        weight.copy_(torch.from_numpy(np.array(tensors[gguf_name][: len(weight)])))
    largest, losses = 0.0, []
    for row in ids:  # row by row: all logits together might not fit into memory
        logits = [module(row[None]).logits[0] for module in (model, twin)]  # two arrays (T, V)
        largest = max(largest, (logits[1] - logits[0]).abs().max().item())
        losses.append([nn.functional.cross_entropy(rows[:-1], row[1:]).item() for rows in logits])
    model_loss, twin_loss = np.mean(losses, axis=0)
    return largest, float(twin_loss - model_loss)


def _tensors(model: GPT2ScratchForCausalLM | ApertusForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weights of a GPT-2 or of an Apertus twin by llama.cpp's names, without a tied head."""
    arch = gguf.MODEL_ARCH.APERTUS if isinstance(model, ApertusForCausalLM) else gguf.MODEL_ARCH.GPT2
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # lists shared weights once
    weights = with_biases(weights) if arch == gguf.MODEL_ARCH.GPT2 else weights
    tensors = {names.get_name(name, try_suffixes=(".weight", ".bias")): weight for name, weight in weights.items()}
    tensors.pop(None, None)  # the parameters of xIELU are metadata in GGUF
    return tensors


def _with_silent_row(model: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return embedding and head with one more token that is never generated: its logit is always SILENT_LOGIT.
    llama.cpp ends a text at token 11 if the file names no end token, so a character model would stop at its twelfth
    character. The input of the head is weight * z + bias of the last LayerNorm, where z sums to 0. Its product with a
    row of 1 / weight depends on the bias alone, which is zero in an untrained model."""
    weight, bias = tensors["output_norm.weight"], tensors["output_norm.bias"]
    constant = (bias / weight).sum()
    if not constant.abs() > 1e-2:
        raise UserError(
            f"{model} cannot be converted to GGUF: its tokenizer has no end-of-text token, which llama.cpp requires, "
            f"and one can be added only after training; train the model first."
        )
    row = (SILENT_LOGIT / constant / weight)[None]
    heads = [name for name in ("token_embd.weight", "output.weight") if name in tensors]
    return {name: torch.cat([tensors[name], row]) for name in heads}


def unusual_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the parts that make a tokenizer neither a byte-level BPE with GPT-2's words nor one of characters."""
    rust, parts = tokenizer.backend_tokenizer, []
    if not encode.is_character(rust):
        words = json.loads(rust.to_str())["pre_tokenizer"] or {}
        if words.get("type") != "ByteLevel" or words["add_prefix_space"] or not words["use_regex"]:
            parts.append(f"pre_tokenizer {rust.pre_tokenizer}")
        if rust.normalizer is not None:
            parts.append(f"normalizer {rust.normalizer}")
        if not is_plain(rust):
            parts.append(f"a model {type(rust.model).__name__} that is not a plain BPE over bytes")
    return parts + [
        f"a token {token.content!r} that includes neighboring blanks or matches whole words only"
        for token in rust.get_added_tokens_decoder().values()
        if token.lstrip or token.rstrip or token.single_word
    ]


def _problems(model: GPT2ScratchForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield each property of the model or tokenizer that llama.cpp does not support."""
    activation, x = model.config.activation_function, torch.linspace(-12, 12, 10_001)
    with torch.no_grad():
        gap = (ACT2FN[activation](x) - ACT2FN[LLAMA_CPP_GELU](x)).abs().max().item()
    if gap > ACTIVATION_TOLERANCE and native_kind(model.config) == "gpt2":
        yield f"its activation_function {activation} differs by up to {gap:.2f} from the tanh GELU of llama.cpp"
    if model.config.rope_parameters and (kind := model.config.rope_parameters["rope_type"]) != "default":
        yield f"its rotary positions have the type {kind}, and GGUF files are written for default"
    rust = tokenizer.backend_tokenizer
    if parts := unusual_parts(tokenizer):
        yield f"llama.cpp supports GPT-2's byte-level BPE, but the tokenizer has {', '.join(parts)}"
    if not model.config.use_bias and tokenizer.eos_token_id is None and vocabulary.END_OF_TEXT not in rust.get_vocab():
        yield (
            "its tokenizer has no end-of-text token, which llama.cpp requires, and one can be added only to a model "
            "with use_bias=True"
        )
    if (tokens := max(rust.get_vocab().values()) + 1) > model.config.vocab_size:
        yield f"it has {model.config.vocab_size} embeddings but {tokens} tokens"


def _add_vocabulary(writer, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """Write the tokenizer as a byte-level BPE over GPT-2's words. Return whether an end-of-text token had to be
    added."""
    kinds, rust = gguf.TokenType, tokenizer.backend_tokenizer
    token_of = dict(sorted((i, token) for token, i in rust.get_vocab().items()))
    if encode.is_character(tokenizer.backend_tokenizer):
        characters = {i: token.encode() for i, token in token_of.items() if len(token) == 1}
        names = {i: "".join(STAND_INS[byte] for byte in character) for i, character in characters.items()}
        token_of |= names
        # These merges join the bytes of a character into one token. A first byte never occurs inside a character.
        merges = [f"{name[:end]} {name[end]}" for name in names.values() for end in range(1, len(name))]
    else:
        merges = [" ".join(pair) for pair in json.loads(rust.to_str())["model"]["merges"]]
    tokens = [token_of.get(i, f"[PAD{i}]") for i in range(vocab_size)]  # a padded embedding has rows without tokens
    types = [kinds.NORMAL if i in token_of else kinds.UNUSED for i in range(vocab_size)]
    for i, token in rust.get_added_tokens_decoder().items():
        types[i] = kinds.CONTROL if token.special else kinds.USER_DEFINED
    eos = tokenizer.eos_token_id
    if eos is None and vocabulary.END_OF_TEXT not in tokens:
        tokens, types = [*tokens, vocabulary.END_OF_TEXT], [*types, kinds.CONTROL]
    eos = tokens.index(vocabulary.END_OF_TEXT) if eos is None else eos
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(dict.fromkeys(merges)) or [NO_MERGE])
    writer.add_bos_token_id(eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
    writer.add_eos_token_id(eos)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        with suppress(Exception):  # no template is the default, or it does not render a chat
            writer.add_chat_template(tokenizer.get_chat_template())
            if (end := turn_end(tokenizer)) not in (None, eos):
                writer.add_eot_token_id(end)
    return len(tokens) > vocab_size


@dataclass
class GGUFArguments:
    paths: list[str] = setting([], "The model (a run, a checkpoint or a model folder) and the file to write.")
    type: Literal["f16", "q8_0"] = setting("f16", "Type of the matrices: f16 uses 2 bytes per weight, q8_0 uses 1.06.")
    name: str | None = setting(None, "Name stored in the file; default: the name of the run or folder.")
    license: str | None = setting(None, "License of the weights, such as mit.")

    def check(self) -> None:
        if len(self.paths) != 2:
            raise UserError("Name a model and a file: python -m publishing.gguf_file runs/x model-f16.gguf")


def main(arguments: list[str]) -> None:
    parser = FlagParser((GGUFArguments,), __doc__, positional="paths")
    (options,) = parser.parse(arguments, check=GGUFArguments.check)
    source, destination = find_model(options.paths[0]), Path(options.paths[1])
    model, tokenizer = load_own_model(source), vocabulary.load(source)
    name = options.name or name_of_model(options.paths[0])
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(model, tokenizer, destination, options.type, name, options.license)
    print(f"Wrote {destination} ({destination.stat().st_size:,} bytes, {options.type}).")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
