"""Load a causal language model from a folder or the Hub without running its code and without random weights.

`trust_remote_code` is always false. This package loads `model_type` gpt2scratch, Transformers loads the types that it
knows, and all others are refused. This file is not uploaded with models.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS, SHARDS, INDEX = "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TEMPLATES = "additional_chat_templates/*.jinja"
OLD_TOKENIZER = ("vocab.json", "merges.txt", "added_tokens.json")
MISFIT = "its weights do not fit its config.json"
LFS_POINTER = b"version https://git-lfs"
LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Settings of a config.json that make Transformers read other weight files or quantized weights.
REFUSED_SETTINGS = ("quantization_config", "transformers_weights")


class ModelError(ValueError):
    """Error for a model that cannot be loaded. The text is one sentence for the user."""


def load_model(source: str | Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Load a model from a folder or a Hub id, in evaluation mode.
    Raise a `ModelError` if it is damaged, incomplete, of an unknown architecture, or has links out of its folder."""
    with one_sentence(source):
        folder = fetch(source, GENERATION, ADAPTER)
        if own_file(folder, ADAPTER) is not None:  # often without a config.json
            raise ModelError(f"{ADAPTER} makes it an adapter; merge the adapter into its base model first")
        settings = read_model_config(folder)
        if own_file(folder, GENERATION) is not None:
            read_json(folder, GENERATION)
        types = _stored_types(fetch(source, WEIGHTS, SHARDS, INDEX))
        for name in LAYERS:  # checked first, because building many layers takes time even without weights
            if isinstance(number := settings.get(name), int) and number > len(types):
                raise ModelError(f"{MISFIT}: {name} is {number}, but there are only {len(types)} tensors")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Either setting may name a kernel, which is code from the Hub.
        config._attn_implementation = config._experts_implementation = None
        model = load_weights(AutoModelForCausalLM, folder, config, dtype)
        for name, _ in model.named_parameters():
            if not types.get(name, "F").startswith(("F", "BF")):
                raise ModelError(f"{name} has type {types[name]}, which is not a floating-point type")
        _check_special_tokens(model)
        model.generation_config = _valid(model.generation_config)
        model.name_or_path = model.config.name_or_path = str(source)
    return model


def load_weights(
    kind: type, folder: Path | None, config: PreTrainedConfig, dtype: str | torch.dtype, **options: Any
) -> PreTrainedModel:
    """Load a model by its class or an auto class. Raise a `ModelError` for missing or unexpected weights, or wrong
    shapes."""
    for to in ({"device_map": "meta"}, {"dtype": dtype}):  # first without allocating memory for weights
        model, report = kind.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,  # never open a pickle, which can run code
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # mismatches are reported below
            output_loading_info=True,
            **options,
            **to,
        )
        problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
        problems += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
        problems += [
            f"{name} is {tuple(size)} instead of {tuple(expectation)}"
            for name, size, expectation in sorted(report["mismatched_keys"])
        ]
        if problems:
            remainder = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ModelError(f"{MISFIT}: {'; '.join(problems[:3])}{remainder}")
    return model.eval()


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer from a folder or a Hub id. Raise a `ModelError` if none can be loaded."""
    with one_sentence(source, "has no usable tokenizer"):
        folder = fetch(source, *TOKENIZER, *OLD_TOKENIZER)
        if not has_tokenizer(folder):
            raise ModelError("tokenizer.json is missing")
        for name in tokenizer_files(folder):
            own_file(folder, name)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.encode("")  # fails if its settings have a wrong type
        if not tokenizer.is_fast:
            raise ModelError("only fast tokenizers (tokenizer.json) are supported")
        return tokenizer


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of files that may be part of a tokenizer."""
    return [*TOKENIZER, *OLD_TOKENIZER, *(path.relative_to(folder).as_posix() for path in folder.glob(TEMPLATES))]


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer. Without this check, Transformers would create an empty one."""
    return any(own_file(folder, name) for name in ("tokenizer.json", "vocab.json"))


def check_tokenizer(source: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ModelError` if the tokenizer has ids without an embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"{source} has a tokenizer with ids up to {largest}, but its model has only {rows} embeddings."
        )


@torch.no_grad()
def check_logits(source: str | Path, model: PreTrainedModel) -> None:
    """Raise a `ModelError` if the model computes logits that are not finite."""
    if not model(torch.tensor([[0]], device=model.device)).logits.isfinite().all():
        raise ModelError(f"{source} computes logits that are not finite: its weights or config.json are damaged.")


def arrange_weights(model: PreTrainedModel) -> None:
    """Store matrices column by column, like GPT-2's `Conv1D`. Shapes and values do not change.
    MKL then multiplies a single fp32 row by them up to twice as fast (AMD EPYC). In bf16 this would be slower."""
    if model.device.type == "cpu" and model.dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()


def fetch(source: str | Path, *patterns: str) -> Path:
    """Return the folder `source`, or the cache folder of a Hub id with config.json and the matching files, downloaded
    if needed. Raise a `ModelError` if the model does not exist or cannot be reached."""
    if Path(source).exists():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[CONFIG, *patterns]))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelError(f"{source} is neither a local folder nor a model on the Hub that you can access.") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{source} is not a local path, the local Hub cache lacks a model with this name, and the Hub cannot be "
            f"reached ({constants.ENDPOINT}: {_short(error)})."
        ) from error


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raise a `ModelError`, without the model's name, if it is damaged or not
    supported."""
    settings = read_json(folder, CONFIG)
    kind = settings.get("model_type")
    is_type = isinstance(kind, str) and kind in CONFIG_MAPPING
    if not is_type or CONFIG_MAPPING[kind] not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"its config.json names model_type {str(kind)[:100]!r}, which is not a causal language model of "
            f"Transformers, and the model's own code is not run"
        )
    for name in filter(settings.get, REFUSED_SETTINGS):
        raise ModelError(f"its config.json sets {name}, which is not supported here")
    return settings


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raise a `ModelError` if it does not exist or contains something else."""
    if (path := own_file(folder, name)) is None:
        raise ModelError(f"{name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also for text that is not UTF-8
        raise ModelError(f"{name} is not JSON: {_short(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name} does not contain a JSON object")
    return content


def own_file(folder: Path, name: str) -> Path | None:
    """Return a file of a model's folder, or None if it does not exist. Raise a `ModelError` for a link out of the
    folder."""
    path = folder / name
    if not path.is_file():
        return None
    target, home = path.resolve(), folder.resolve()
    # In the Hub's cache, files of a snapshot are links into the folder `blobs` of the repository.
    blobs = next((part.parent / "blobs" for part in home.parents if part.name == "snapshots"), home)
    if not target.is_relative_to(home) and target.parent != blobs:
        raise ModelError(f"{name} is a link out of the folder")
    return path


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model. All of them must be in its folder."""
    if (path := own_file(folder, WEIGHTS)) is not None:
        return [path]
    if own_file(folder, INDEX) is None:
        raise ModelError(f"{WEIGHTS} is missing")
    names = read_json(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{INDEX} has no weight_map of file names")
    files = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{INDEX} names {name[:100]}, which is not a safetensors file in its folder")
        if (path := own_file(folder, name)) is None:
            raise ModelError(f"{name} is missing, but {INDEX} names it")
        files.append(path)
    return files


def _stored_types(folder: Path) -> dict[str, str]:
    """Return the type of each tensor (F32, BF16, I64 ...) from the headers of the safetensors files."""
    types = {}
    for path in _weight_files(folder):
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(f"{path.name} is a pointer of Git LFS, not the weights; run git lfs pull")
        with safe_open(path, framework="pt") as file:
            types |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  not a mapping
    return types


def _check_special_tokens(model: PreTrainedModel) -> None:
    for file, config in ((GENERATION, model.generation_config), (CONFIG, model.config)):
        for name in TOKENS:
            value = getattr(config, name, None)
            ids = value if isinstance(value, list) and value else [value]
            if not all(id is None or (type(id) is int and abs(id) < 2**63) for id in ids):
                raise ModelError(f"{file} sets {name} to {str(value)[:100]!r}, which is not a token id")


def _valid(settings: GenerationConfig) -> GenerationConfig:
    """Return the settings without those that Transformers loads, but refuses to save after a change."""
    with suppress(ValueError):
        settings.validate(strict=True)
        return settings
    valid = GenerationConfig()
    for name in sorted(settings.to_diff_dict(), key=lambda name: name not in ("do_sample", "num_beams")):
        candidate = deepcopy(valid)
        setattr(candidate, name, getattr(settings, name, None))
        with suppress(ValueError):
            candidate.validate(strict=True)
            valid = candidate
    return valid


@contextmanager
def one_sentence(source: str | Path, problem: str = "cannot be loaded") -> Iterator[None]:
    """Turn any exception into a `ModelError` of one sentence, and silence the log of Transformers."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        raise ModelError(f"{source} {problem}: {_short(error)}.") from error
    finally:
        logging.set_verbosity(verbosity)


def _short(error: Exception) -> str:
    if isinstance(error, ModelError):
        return str(error).rstrip(".")
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs its own code, which is not run"
    return text.split(" Exception raised from ")[0][:300].rstrip(".")  # without the trace of C++ exceptions
