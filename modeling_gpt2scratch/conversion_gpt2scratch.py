"""Lossless conversion to Transformers' GPT-2 and Apertus, and from GPT-2 and seed checkpoints (of this project's
predecessor).

    python -m modeling_gpt2scratch.conversion_gpt2scratch SRC DST                # from GPT-2 or a seed checkpoint
    python -m modeling_gpt2scratch.conversion_gpt2scratch SRC DST --to native    # to GPT-2 or Apertus

SRC is a folder or a Hub id. Its kind is read from config.json: GPT-2 or GPT2Scratch from `model_type`, a seed
checkpoint (`pytorch_model.bin`) from the fields `embed_dim`, `ff_dim` and `max_seq_len`. The tokenizer is converted,
too. This file is not uploaded with models.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from copy import deepcopy
from inspect import get_annotations
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.apertus import ApertusConfig, ApertusForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM, loading
from modeling_gpt2scratch.loading import CONFIG, OLD_TOKENIZER, TOKENIZER, ModelError

# Fields with the same name in GPT2Config and GPT2ScratchConfig.
SHARED_FIELDS = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "initializer_range"),
    *("tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# Fields of GPT2ScratchConfig that a twin may have with other values than the default.
TWIN_KEYS = {*SHARED_FIELDS, "normalization", "rope_parameters", "attention_scale", "use_bias"}
# Options that only GPT2Config has, with the only value that GPT2Scratch supports.
GPT2_OPTIONS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# Fields with the same name in ApertusConfig and GPT2ScratchConfig, or its `attribute_map`.
APERTUS_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("rope_parameters", "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# xIELU (Huang and Schlag 2024, arXiv:2411.13010) with these values is softplus(alpha_p) * relu(x)^2. vLLM stores
# alpha_p and, in eager mode, its softplus in bf16: this value is exact, and its softplus is within 1.5e-6 of 0.90625,
# which is also exact.
XIELU = {"alpha_p": 0.388671875, "alpha_n": -200.0, "beta": 0.0, "eps": -1e-6}
# GPT-2's Conv1D stores its weight (in, out), nn.Linear (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Fields of GPT2ScratchConfig, and their names in a seed checkpoint's config.json.
SEED_FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "max_seq_len",
    "n_embd": "embed_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "ff_dim",
}
# Any two of these identify a seed checkpoint: its model_type is missing or "TransformerLanguageModel".
SEED_ONLY_KEYS = {"embed_dim", "ff_dim", "max_seq_len"}
SEED_WEIGHTS = "pytorch_model.bin"
SEED_PARAMETERS = {
    "_orig_mod": "",  # prefix in a compiled model
    "blocks": "transformer.h.",
    "token_embedding": "transformer.wte.",
    "positional_embedding": "transformer.wpe.",
    "norm1": "ln_1.",
    "norm2": "ln_2.",
    "attention.qkv": "attn.c_attn.",
    "attention.out_proj": "attn.c_proj.",
    "feed_forward.fc1": "mlp.c_fc.",
    "feed_forward.fc2": "mlp.c_proj.",
    "ln_f": "transformer.ln_f.",
    "head": "lm_head.",
}


def scratch_config(gpt2: GPT2Config) -> GPT2ScratchConfig:
    """Return the configuration of the same model. Raise a `ModelError` for GPT-2 options that GPT2Scratch does not
    support."""
    foreign = [name for name, value in GPT2_OPTIONS.items() if getattr(gpt2, name) != value]
    if foreign:
        values = ", ".join(f"{name}={getattr(gpt2, name)}" for name in foreign)
        raise ModelError(f"GPT2Scratch does not support {values}; only the plain GPT-2 architecture can be converted")
    return GPT2ScratchConfig(**{name: getattr(gpt2, name) for name in SHARED_FIELDS})


def from_gpt2(gpt2: GPT2LMHeadModel) -> GPT2ScratchForCausalLM:
    """Return a GPT2Scratch model with the same weights. Raise a `ModelError` like `scratch_config`."""
    config, state = scratch_config(gpt2.config), _transposed(gpt2.state_dict())
    model = loading.load_weights(GPT2ScratchForCausalLM, None, config, gpt2.dtype, state_dict=state)
    model.generation_config = deepcopy(gpt2.generation_config)
    return model


def native_kind(config: GPT2ScratchConfig, to: str = "native") -> str:
    """Return the `model_type` of the native twin: `to`, or for "native" the class of Transformers that computes the
    same. Raise a `ModelError` that names the fields and values that the class does not support."""
    best = "apertus" if config.is_modern else "gpt2"
    kind = best if to == "native" else to
    requirements = {
        "gpt2": {"normalization": "layer_norm", "rope_parameters": None, "attention_scale": None},
        "apertus": {"normalization": "rms_norm", "rope_parameters": config.rope_parameters or "rotary positions"}
        | {"use_bias": False, "activation_function": "relu2"},
    }[kind]
    requirements |= {
        name: getattr(GPT2ScratchConfig, name) for name in sorted(get_annotations(GPT2ScratchConfig).keys() - TWIN_KEYS)
    }
    values = {name: getattr(config, name) for name in requirements}
    differences = [f"{name}={value!r}" for name, value in values.items() if value != requirements[name]]
    if differences:
        remedy = "use --to native" if kind != best else "publish it with --format gpt2scratch and without --gguf"
        raise ModelError(f"Transformers' {kind} does not support {', '.join(differences)}; {remedy}")
    return kind


def to_native(model: GPT2ScratchForCausalLM, to: str = "native") -> GPT2LMHeadModel | ApertusForCausalLM:
    """Return the native twin: a model of Transformers' own class with the same logits, which needs no remote code.
    Raise a `ModelError` if `to` (a `model_type`, or "native" for either) cannot compute it."""
    return {"gpt2": to_gpt2, "apertus": to_apertus}[native_kind(model.config, to)](model)


def to_gpt2(model: GPT2ScratchForCausalLM) -> GPT2LMHeadModel:
    """Return the native twin of a GPT-2. Biases that it does not have are zero in the twin."""
    fields = {name: getattr(model.config, name) for name in SHARED_FIELDS}
    # n_ctx: required by llama.cpp's converter.
    config = GPT2Config(**fields, **GPT2_OPTIONS, n_ctx=model.config.n_positions)
    state = _transposed(with_biases(model.state_dict()))
    twin = loading.load_weights(GPT2LMHeadModel, None, config, model.dtype, state_dict=state)
    twin.generation_config = deepcopy(model.generation_config)
    return twin


@torch.no_grad()
def to_apertus(model: GPT2ScratchForCausalLM) -> ApertusForCausalLM:
    """Return the native twin of a model of the modern family, in float32 and untied.
    Apertus has no normalization after the embedding, so the twin stores the normalized embedding. Rounding it to bf16
    would change the logits. The query norm carries the attention scale, and the MLP's output projection the inverse
    scale of xIELU."""
    source, decoder = model.config, model.transformer
    C, hs = source.n_embd, source.n_embd // source.n_head
    config = ApertusConfig(
        **{name: getattr(source, name) for name in APERTUS_FIELDS},
        intermediate_size=decoder.h[0].mlp.c_fc.out_features,
        rms_norm_eps=source.layer_norm_epsilon,
        attention_dropout=source.attn_pdrop,
    )
    scale = functional.softplus(torch.tensor(XIELU["alpha_p"]))
    state = {"model.embed_tokens.weight": decoder.ln_e(decoder.wte.weight.float()), "model.norm.weight": torch.ones(C)}
    state["lm_head.weight"] = model.lm_head.weight
    for i, block in enumerate(decoder.h):
        q, k, v = block.attn.c_attn.weight.split(C)
        layer = {
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": block.attn.c_proj.weight,
            "self_attn.q_norm.weight": torch.full((hs,), block.attn.scaling * hs**0.5),
            "self_attn.k_norm.weight": torch.ones(hs),
            "mlp.up_proj.weight": block.mlp.c_fc.weight,
            "mlp.down_proj.weight": block.mlp.c_proj.weight.float() / scale,
            "attention_layernorm.weight": torch.ones(C),
            "feedforward_layernorm.weight": torch.ones(C),
        }
        layer |= {f"mlp.act_fn.{name}": torch.full((1,) if "alpha" in name else (), XIELU[name]) for name in XIELU}
        state |= {f"model.layers.{i}.{name}": weight for name, weight in layer.items()}
    state = {name: weight.float().clone() for name, weight in state.items()}
    # Silences Transformers, which suggests to install a package that computes another function.
    with loading.one_sentence(model.name_or_path):
        twin = loading.load_weights(ApertusForCausalLM, None, config, torch.float32, state_dict=state)
    twin.generation_config = deepcopy(model.generation_config)
    return twin


def with_biases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a GPT-2 with zeros for the biases that it does not have."""
    names = [name for name in state if ".h." in name or ".ln_f." in name]
    return {name.replace(".weight", ".bias"): state[name].new_zeros(len(state[name])) for name in names} | state


def from_seed(folder: Path) -> GPT2ScratchForCausalLM:
    """Return the model of a seed checkpoint (`pytorch_model.bin` and `config.json`).
    Raise a `ModelError` if a file is missing or the weights do not match config.json."""
    seed = loading.read_json(folder, CONFIG)
    if names := set(SEED_FIELDS.values()) - seed.keys():
        raise ModelError(f"{CONFIG} lacks {', '.join(sorted(names))}")
    config = {name: seed[seed_name] for name, seed_name in SEED_FIELDS.items()}
    config |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), seed.get("dropout", 0.0))
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1} if seed.get("tokenizer_type") == "bpe" else {}
    config = GPT2ScratchConfig(**config, **special, activation_function="gelu", tie_word_embeddings=False)
    if not (folder / SEED_WEIGHTS).is_file():
        raise ModelError(f"{SEED_WEIGHTS} is missing")
    state = None
    with suppress(Exception):  # torch's unpickler raises any type of error for an unknown file
        state = torch.load(folder / SEED_WEIGHTS, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ModelError(
            f"{SEED_WEIGHTS} is damaged or not a plain state dict of tensors, and nothing else is unpickled"
        )
    weights = {_seed_parameter_name(name): tensor for name, tensor in state.items() if "causal_mask" not in name}
    dtype = next(iter(weights.values())).dtype
    model = loading.load_weights(GPT2ScratchForCausalLM, None, config, dtype, state_dict=weights)
    model.generation_config = GenerationConfig(**special)
    return model


def seed_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Return the BPE or character tokenizer of a seed checkpoint, or None if it has none."""
    if not (folder / TOKENIZER[0]).is_file():
        return None
    content, context = loading.read_json(folder, TOKENIZER[0]), loading.read_json(folder, CONFIG)["max_seq_len"]
    if isinstance(content.get("char_to_idx"), dict):  # the library treats a string as a file name
        characters = Tokenizer(models.WordLevel(content["char_to_idx"]))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        characters.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=characters, model_max_length=context)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER[0]))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(
            f"{TOKENIZER[0]} is neither a `tokenizers` file ({error}) nor a character map with char_to_idx"
        ) from error
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    special = {role: token for role, token in names.items() if tokenizer.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=context, **special)


def _transposed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the weights of a GPT-2 in the layout of the other class."""
    return {
        name: (tensor.t() if name.endswith(CONV1D_WEIGHTS) else tensor).clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _seed_parameter_name(name: str) -> str:
    """Translate a name: `_orig_mod.blocks.3.attention.qkv.weight` -> `transformer.h.3.attn.c_attn.weight`."""
    for seed_name, our_name in SEED_PARAMETERS.items():
        name = name.replace(f"{seed_name}.", our_name)
    return name


def convert(source: str | Path, destination: str | Path, to: str = "gpt2scratch") -> str:
    """Convert `source` (a folder or a Hub id) and write the model and its tokenizer to `destination`. Return its
    `model_type`. Raise a `ModelError` if the source is not recognized or cannot be loaded or converted, or
    `destination` is not empty."""
    destination = Path(destination)
    names = [path.name for path in destination.iterdir()] if destination.is_dir() else []
    if destination.is_file() or not all(name.startswith(".") for name in names):
        raise ModelError(f"{destination} is a file or is not empty; use a new folder.")
    folder = loading.fetch(source, *TOKENIZER, *OLD_TOKENIZER)
    with loading.one_sentence(source, "cannot be converted"):
        config = loading.read_json(folder, CONFIG)
        kind = "seed" if len(SEED_ONLY_KEYS & config.keys()) > 1 else config.get("model_type")
        if kind == to:
            raise ModelError(f"it already is a {kind} model")
        if kind not in ("seed", "gpt2", "gpt2scratch"):
            raise ModelError(
                f"its {CONFIG} names model_type {kind!r}; expected gpt2, gpt2scratch, or a seed checkpoint with "
                f"embed_dim, ff_dim, max_seq_len"
            )
        if kind == "gpt2scratch":  # before the weights are loaded
            native_kind(GPT2ScratchConfig.from_dict(loading.read_model_config(folder)), to)
        if kind == "seed":
            loading.fetch(source, SEED_WEIGHTS)
            model, tokenizer = from_seed(folder), seed_tokenizer(folder)
        else:
            model = loading.load_model(source)
            tokenizer = loading.load_tokenizer(source) if loading.has_tokenizer(folder) else None
        model = from_gpt2(model) if kind == "gpt2" else model
        model = to_native(model, to) if to != "gpt2scratch" else model
        if tokenizer is not None:
            loading.check_tokenizer(source, model, tokenizer)
    with loading.one_sentence(destination, "cannot be written"):
        destination.mkdir(parents=True, exist_ok=True)
        # Its name is hidden, so that the same command can run again after a kill.
        with TemporaryDirectory(prefix=".", dir=destination) as workspace:
            save(model, tokenizer, folder := Path(workspace))
            with suppress(OSError):  # a drive without modes
                for path in folder.glob("*.safetensors"):  # only the owner can read them
                    path.chmod((folder / CONFIG).stat().st_mode)
            for path in folder.iterdir():
                path.replace(destination / path.name)
    return model.config.model_type


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Save a model and its tokenizer. Transformers 4.57 and 5 both read a native twin: version 5 writes a class and
    fields that 4.57 does not know."""
    model.save_pretrained(folder)
    if (rope := getattr(model.config, "rope_parameters", None)) and model.config.model_type != "gpt2scratch":
        path, scaling = folder / CONFIG, {name: value for name, value in rope.items() if name != "rope_theta"}
        old = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if rope["rope_type"] != "default" else None}
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | old, indent=2), encoding="utf-8")
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    if model.config.model_type != "gpt2scratch":
        path = folder / TOKENIZER[1]
        config = json.loads(path.read_text(encoding="utf-8"))
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["model_input_names"] = ["input_ids", "attention_mask"]  # 4.57 would add token_type_ids
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m modeling_gpt2scratch.conversion_gpt2scratch",
        description="Convert GPT-2 or seed checkpoints to GPT2Scratch, or GPT2Scratch to GPT-2 or Apertus, losslessly.",
    )
    parser.add_argument("source", metavar="SRC", help="model folder or Hub id; config.json determines its kind")
    parser.add_argument("destination", metavar="DST", help="folder to write; must be new or empty")
    formats = ("gpt2scratch", "native", "gpt2")
    parser.add_argument("--to", choices=formats, default="gpt2scratch", help="native: Transformers' GPT-2 or Apertus")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.CRITICAL)  # errors are printed once, below
    logging.disable_progress_bar()
    try:
        for name in ("source", "destination"):
            if not getattr(options, name).strip():
                raise ModelError(f"{name} is empty (an unset shell variable?); name a folder.")
        kind = convert(options.source, options.destination, options.to)
        print(f"Wrote {options.destination} ({kind}).", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ModelError, OSError, UnicodeError) as error:
        text = "".join(character if character.isprintable() else " " for character in str(error))
        print(f"error: {' '.join(text.split())[:500]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
