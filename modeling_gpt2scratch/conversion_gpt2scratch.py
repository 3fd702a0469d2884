"""Lossless conversion to and from Transformers' GPT-2, and from the checkpoints of the project this one grew from.

    python -m modeling_gpt2scratch.conversion_gpt2scratch SRC DST              # GPT-2 or seed checkpoint -> GPT2Scratch
    python -m modeling_gpt2scratch.conversion_gpt2scratch SRC DST --to gpt2    # GPT2Scratch -> GPT-2

SRC is a folder or a Hub id. Its config.json decides what it is: GPT-2 or GPT2Scratch by `model_type`, a seed checkpoint
(`pytorch_model.bin`) by the fields `embed_dim`, `ff_dim` and `max_seq_len`. The tokenizer is converted too. This file is
not part of what is uploaded.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from huggingface_hub import constants, get_session, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import ModelError, check_tokenizer, load_model, load_tokenizer, read_json

# Fields that GPT2Config and GPT2ScratchConfig share, name for name.
SHARED_FIELDS = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "initializer_range"),
    *("tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# What only GPT2Config can say, with the one value that GPT2Scratch computes.
GPT2_ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# GPT-2's Conv1D stores its weight (in, out), nn.Linear (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

SEED_CONFIG_KEYS = {"vocab_size", "embed_dim", "num_heads", "num_layers", "ff_dim", "max_seq_len"}
# Any two of these identify a seed checkpoint: its model_type is missing or "TransformerLanguageModel".
SEED_ONLY_KEYS = {"embed_dim", "ff_dim", "max_seq_len"}
SEED_FILES = ("config.json", "pytorch_model.bin", "tokenizer.json")
SEED_PARAMETERS = {
    "token_embedding": "transformer.wte",
    "positional_embedding": "transformer.wpe",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "feed_forward.fc1": "mlp.c_fc",
    "feed_forward.fc2": "mlp.c_proj",
    "ln_f": "transformer.ln_f",
    "head": "lm_head",
}


class ConversionError(ModelError):
    """What the source holds cannot be converted; the text is one sentence for the user."""


def from_gpt2(gpt2: GPT2LMHeadModel) -> GPT2ScratchForCausalLM:
    """The same function with our parameter layout.

    Raises:
        ConversionError: the source uses an option of GPT-2's that this architecture does not have.
    """
    foreign = [name for name, ours in GPT2_ONLY.items() if getattr(gpt2.config, name) != ours]
    if foreign:
        values = ", ".join(f"{name}={getattr(gpt2.config, name)}" for name in foreign)
        raise ConversionError(f"GPT2Scratch has no equivalent of {values}; only the plain GPT-2 architecture converts.")
    config = _config(**{name: getattr(gpt2.config, name) for name in SHARED_FIELDS})
    return _filled(GPT2ScratchForCausalLM, config, _transposed(gpt2.state_dict()), gpt2.generation_config, gpt2.dtype)


def to_gpt2(model: GPT2ScratchForCausalLM) -> GPT2LMHeadModel:
    """The native twin: a `GPT2LMHeadModel` that computes the same logits and needs no remote code."""
    shared = {name: getattr(model.config, name) for name in SHARED_FIELDS}
    # n_ctx: llama.cpp's converter asks for it.
    config = GPT2Config(**shared, **GPT2_ONLY, n_ctx=model.config.n_positions)
    return _filled(GPT2LMHeadModel, config, _transposed(model.state_dict()), model.generation_config, model.dtype)


def from_seed(directory: str | Path) -> GPT2ScratchForCausalLM:
    """A checkpoint of the seed author's trainer: `pytorch_model.bin` and `config.json`.

    Raises:
        ConversionError: a file is missing, or the weights are not those that config.json describes.
    """
    directory = Path(directory)
    seed = _read_json(directory / "config.json")
    weights_file = directory / "pytorch_model.bin"
    if not weights_file.is_file():
        raise ConversionError(f"{directory} has a config.json of the seeds but no pytorch_model.bin beside it.")
    if missing := SEED_CONFIG_KEYS - seed.keys():
        raise ConversionError(f"{directory / 'config.json'} lacks {', '.join(sorted(missing))}.")
    dropout = seed.get("dropout", 0.0)
    special = {}
    if seed.get("tokenizer_type", "character") == "bpe":
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = _config(
        vocab_size=seed["vocab_size"],
        n_positions=seed["max_seq_len"],
        n_embd=seed["embed_dim"],
        n_layer=seed["num_layers"],
        n_head=seed["num_heads"],
        n_inner=seed["ff_dim"],
        activation_function="gelu",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        tie_word_embeddings=False,
        **special,
    )
    refusal = f"{weights_file} is not a plain state dict of tensors (or is damaged), and nothing else is unpickled"
    try:
        state = torch.load(weights_file, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file: torch raises whatever its unpickler stumbles over
        raise ConversionError(f"{refusal}: {_first_line(error)}") from error
    if not isinstance(state, dict) or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConversionError(f"{refusal}.")
    named = {_seed_parameter_name(name): tensor for name, tensor in state.items() if "causal_mask" not in name}
    generation = GenerationConfig(**special)
    dtype = next((tensor.dtype for tensor in named.values()), torch.float32)
    return _filled(GPT2ScratchForCausalLM, config, named, generation, dtype)


def seed_tokenizer(directory: str | Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer beside a seed checkpoint, of either kind; None where there is none.

    Raises:
        ConversionError: `tokenizer.json` is of neither kind.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        return None
    content = _read_json(path)
    seed = _read_json(Path(directory) / "config.json")
    if isinstance(content.get("char_to_idx"), dict):  # the library would take a string for the name of a file
        characters = Tokenizer(models.WordLevel(content["char_to_idx"]))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        characters.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=characters, model_max_length=seed["max_seq_len"])
    if "model" not in content:
        raise ConversionError(f"{path} is neither a `tokenizers` file nor a character map with char_to_idx.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConversionError(f"{path} is not a file of the tokenizers library: {_first_line(error)}") from error
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    special = {role: token for role, token in names.items() if tokenizer.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=seed["max_seq_len"], **special)


def _config(**fields) -> GPT2ScratchConfig:
    try:
        return GPT2ScratchConfig(**fields)
    except StrictDataclassError as error:
        raise ConversionError(f"The configuration is not one of a GPT-2: {error.__cause__ or error}.") from error


def _read_json(path: Path) -> dict:
    try:
        return read_json(path.parent, path.name)
    except ModelError as error:
        raise ConversionError(f"{path.parent} cannot be read: {error}.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _transposed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.t() if name.endswith(TRANSPOSED) else tensor for name, tensor in state.items()}


def _seed_parameter_name(name: str) -> str:
    """`_orig_mod.blocks.3.attention.qkv.weight` -> `transformer.h.3.attn.c_attn.weight`"""
    name = name.removeprefix("_orig_mod.")
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, layer, *inner = module.split(".", 2)
        return ".".join(["transformer.h", layer, *(SEED_PARAMETERS.get(part, part) for part in inner), kind])
    return f"{SEED_PARAMETERS.get(module, module)}.{kind}"


def _filled(
    model_class: type,
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    generation_config: GenerationConfig,
    dtype: torch.dtype,
):
    """A model of `model_class` with exactly the weights of `state`; anything missing, left over or of another shape is
    an error, never a random weight."""
    if config.n_layer > len(state):  # before they are built, which takes time even without weights
        raise ConversionError(
            f"The weights do not fit the configuration: {len(state)} tensors for {config.n_layer} layers."
        )
    with torch.device("meta"):
        model = model_class(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    problems += [
        f"{name} is {tuple(state[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConversionError(f"The weights do not fit the configuration: {'; '.join(problems[:5])}{more}.")
    model = model.to_empty(device="cpu").to(dtype)
    model.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})
    model.tie_weights()
    model.generation_config = generation_config
    return model.eval()


def convert(source: str, destination: str | Path, to: str = "gpt2scratch") -> None:
    """Reads `source` (a folder, or a Hub id), writes a model folder with its tokenizer to `destination`.

    Raises:
        ModelError: the source is not recognised, cannot be loaded or converted, or `destination` holds files already.
    """
    destination = Path(destination)
    if destination.exists() and not destination.is_dir():
        raise ConversionError(f"{destination} is a file; name a new folder.")
    if destination.exists() and any(not path.name.startswith(".") for path in destination.iterdir()):
        raise ConversionError(f"{destination} is not empty; name a new folder.")
    config = _read_config(source)
    kind = "seed" if len(SEED_ONLY_KEYS & config.keys()) > 1 else config.get("model_type")
    if kind == to:
        raise ConversionError(f"{source} is a {kind} model already.")
    if kind == "gpt2scratch":
        model = to_gpt2(load_model(source))
    elif kind == "gpt2":
        model = from_gpt2(load_model(source))
    elif kind == "seed":
        source = _seed_folder(source)
        try:
            model, tokenizer = from_seed(source), seed_tokenizer(source)
        except (TypeError, ValueError, RuntimeError) as error:  # of a foreign file
            named = isinstance(error, ModelError)
            raise error if named else ConversionError(f"{source} cannot be read: {_first_line(error)}") from error
        model = to_gpt2(model) if to == "gpt2" else model
    else:
        raise ConversionError(
            f"{source} is not recognised: its config.json names model_type {kind!r}; expected gpt2, gpt2scratch, or a "
            f"seed checkpoint with embed_dim, ff_dim, max_seq_len."
        )
    if kind != "seed":
        tokenizer = _load_tokenizer(source)
    if tokenizer is not None:
        check_tokenizer(source, model, tokenizer)
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(f"{destination} cannot be made ({error.strerror}); name another folder.") from error
    model.save_pretrained(destination)
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)


def _read_config(source: str) -> dict:
    path = Path(source)
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConversionError(f"{source} holds no config.json, so there is nothing to recognise.")
        return _read_json(path / "config.json")
    _require_hub(source)
    try:
        return PreTrainedConfig.get_config_dict(source)[0]
    except OSError as error:
        raise ConversionError(f"{source} is neither a folder here nor a model on the Hub.") from error


def _require_hub(source: str) -> None:
    """Ask once whether the Hub can be reached; its libraries would ask six times for each file. If not, use their cache."""
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
        return
    except Exception as error:  # the HTTP library behind the Hub, and its exceptions, differ by version
        why = f"{constants.ENDPOINT}: {_first_line(error)}" if not constants.HF_HUB_OFFLINE else "HF_HUB_OFFLINE is set"
    constants.HF_HUB_OFFLINE = True
    try:
        is_id_without_files = not isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:
        return
    if is_id_without_files:
        raise ConversionError(
            f"{source} is not a local path, the local cache of the Hub does not hold a model of this name, and the Hub cannot "
            f"be reached ({why})."
        )


def _seed_folder(source: str) -> str:
    """The folder itself, or where the files of a Hub id were downloaded to."""
    if Path(source).exists():
        return source
    try:
        return snapshot_download(source, allow_patterns=SEED_FILES)
    except OSError as error:
        raise ConversionError(f"{source} cannot be downloaded from the Hub: {_first_line(error)}") from error


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """None where there is none."""
    path = Path(source)
    if path.exists() and not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    return load_tokenizer(source)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m modeling_gpt2scratch.conversion_gpt2scratch",
        description="Convert GPT-2 or seed checkpoints to GPT2Scratch, or GPT2Scratch to GPT-2, without loss.",
    )
    parser.add_argument("source", metavar="SRC", help="a model folder or a Hub id; what it holds is recognised")
    parser.add_argument("destination", metavar="DST", help="the folder to write; must be new or empty")
    parser.add_argument("--to", choices=("gpt2scratch", "gpt2"), default="gpt2scratch", help="what to write")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.CRITICAL)  # what is wrong is said once, below
    logging.disable_progress_bar()
    try:
        for name in ("source", "destination"):
            if not getattr(options, name).strip():
                raise ModelError(f"{name} is empty, as an unset variable of a shell is; name a folder.")
        convert(options.source, options.destination, options.to)
        print(f"Wrote {options.destination} ({options.to}).", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ModelError, OSError, UnicodeError) as error:
        print(f"error: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
