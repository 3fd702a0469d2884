"""Load a causal language model from a folder or the Hub: no code but ours and Transformers' runs, no weight is random.

`trust_remote_code` is never given: `model_type` gpt2scratch is loaded by the classes of this package, a type that
Transformers knows by Transformers', and all others are refused. This file is not part of what is uploaded.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS, SHARDS, INDEX = "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
OLD_TOKENIZER = ("vocab.json", "merges.txt", "added_tokens.json")
MISFIT = "its weights do not fit its config.json"
LOWEST_TEMPERATURE = 1e-6  # logits divided by less may be infinite in float32
LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")
# Settings of a config.json by which Transformers reads other weights, or other than as numbers.
MAX_LABELS = 1_000_000
REFUSED = ("quantization_config", "transformers_weights")


class ModelError(ValueError):
    """The model cannot be loaded; the text is one sentence for the user."""


def load_model(source: str | Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Load the model in a folder or of a Hub id, for evaluation. Raise a `ModelError` where it is damaged, incomplete, of an
    unknown architecture, or leads out of its folder."""
    with one_sentence(source):
        folder = fetch(source, CONFIG, GENERATION, ADAPTER)
        described = read_model_config(folder)
        if own_file(folder, ADAPTER) is not None:
            raise ModelError(f"{ADAPTER} names a base that is elsewhere; merge the adapter into its base first")
        if own_file(folder, GENERATION) is not None:
            read_json(folder, GENERATION)
        types = _stored_types(fetch(source, WEIGHTS, SHARDS, INDEX))
        for name in LAYERS:  # before so many are built, which takes time even without their weights
            if isinstance(number := described.get(name), int) and number > len(types):
                raise ModelError(f"{MISFIT}: {name} is {number}, and there are {len(types)} tensors")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config._attn_implementation = config._experts_implementation = None  # either may name a kernel, code of the Hub
        model = load_weights(AutoModelForCausalLM, folder, config, dtype)
        for name, _ in model.named_parameters():
            if not types.get(name, "F").startswith(("F", "BF")):
                raise ModelError(f"{name} is of type {types[name]}, which is not a weight's")
        _check_special_tokens(model)
        model.name_or_path = model.config.name_or_path = str(source)
    return model


def load_weights(
    kind: type, folder: Path | None, config: PreTrainedConfig, dtype: str | torch.dtype, **options: Any
) -> PreTrainedModel:
    """Load a model of a class, or by an auto class; raise a `ModelError` where a weight is missing, left over or of another
    shape."""
    for to in ({"device_map": "meta"}, {"dtype": dtype}):  # first without taking memory for weights that no file has
        model, report = kind.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,  # a pickle is never opened
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **options,
            **to,
        )
        problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
        problems += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
        problems += [
            f"{name} is {tuple(found)} instead of {tuple(shape)}"
            for name, found, shape in sorted(report["mismatched_keys"])
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ModelError(f"{MISFIT}: {'; '.join(problems[:3])}{more}")
    return model.eval()


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer in a folder or of a Hub id; raise a `ModelError` where there is none that can be loaded."""
    with one_sentence(source, "has no tokenizer that can be loaded"):
        folder = fetch(source, *TOKENIZER, *OLD_TOKENIZER)
        if not has_tokenizer(folder):
            raise ModelError("tokenizer.json is missing")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.encode("")  # a wrong type in its settings shows first here
        if not tokenizer.is_fast:
            raise ModelError("it is a slow one, and only fast ones (tokenizer.json) are supported")
        return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether there is one; without it, Transformers makes up an empty one."""
    return any(own_file(folder, name) for name in ("tokenizer.json", "vocab.json"))


def check_tokenizer(source: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ModelError` where the tokenizer has ids that the model has no embedding of."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(f"{source} has a tokenizer with ids up to {largest}, and its model embeds {rows} tokens.")


def load_with_tokenizer(
    source: str | Path, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; raise a `ModelError` where one cannot be loaded, or they do not fit together."""
    model, tokenizer = (
        load_model(source, dtype),
        load_tokenizer(source),
    )  # which reads config.json too, and checks nothing
    check_tokenizer(source, model, tokenizer)
    return model, tokenizer


def arrange_weights(model: PreTrainedModel) -> None:
    """Lay matrices out column by column, as GPT-2's `Conv1D` has them; their shapes and values stay.

    MKL then multiplies a single row of fp32 by them up to twice as fast (AMD EPYC). In bf16 this would be slower.
    """
    if model.device.type == "cpu" and model.dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a text, of a chat model that of a turn too."""
    ends = model.generation_config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the ids of `prompt`, of an empty one the token that begins a text; raise a `ModelError` where there is none, or for
    a character that the tokenizer does not know."""
    try:
        prompt.encode()
        ids = tokenizer.encode(prompt, add_special_tokens=False, verbose=False)
    except UnicodeEncodeError as error:
        raise ModelError("The prompt is not UTF-8 text.") from error
    except Exception as error:  # the Rust library raises nothing narrower
        unknown = ", ".join(map(repr, sorted(set(prompt) - set(tokenizer.get_vocab()))[:10]))
        raise ModelError(
            f"The prompt has {unknown}, which this model of {len(tokenizer)} characters has never seen; leave it out."
        ) from error
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise ModelError("The prompt is empty, and this model's tokenizer has no token that begins a text; give one.")
    return ids


# ---- files -----------------------------------------------------------------------------------------------------------


def fetch(source: str | Path, *patterns: str) -> Path:
    """Return the folder `source`; of a Hub id, the one of the Hub's cache with the files that match, downloaded where needed.
    Raise a `ModelError` where there is no such model, or no way to it."""
    if Path(source).exists():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[CONFIG, *patterns]))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelError(f"{source} is neither a folder here nor a model on the Hub that you may read.") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{source} is not a local path, the local cache of the Hub does not hold a model of this name, and the Hub "
            f"cannot be reached ({constants.ENDPOINT}: {_short(error)})."
        ) from error


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return what config.json says. Raise a `ModelError`, without the name of the model, where the file is damaged or the
    architecture is not known here."""
    described = read_json(folder, CONFIG)
    kind = described.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    if not known or CONFIG_MAPPING[kind] not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"its config.json names model_type {str(kind)[:100]!r}, which is not a causal language model that Transformers "
            f"knows, and code that comes with a model is not run"
        )
    if isinstance(number := described.get("num_labels"), int) and number > MAX_LABELS:  # each gets a name
        raise ModelError(f"its config.json sets num_labels to {number}, and a language model has none")
    if refused := [name for name in REFUSED if described.get(name)]:
        raise ModelError(f"its config.json sets {refused[0]}, which is not supported here")
    return described


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise a `ModelError` where it does not exist or holds something else."""
    if (path := own_file(folder, name)) is None:
        raise ModelError(f"{name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also of text that is not UTF-8
        raise ModelError(f"{name} is not JSON: {_short(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name} holds no JSON object")
    return content


def own_file(folder: Path, name: str) -> Path | None:
    """Return the file of that name in a model's folder, None where there is none; raise a `ModelError` for a link out of it."""
    path = folder / name
    if not path.is_file():
        return None
    there, home = path.resolve(), folder.resolve()
    # The Hub's cache keeps the files of a snapshot in another folder of the repository.
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not there.is_relative_to(home) and there.parent != blobs:
        raise ModelError(f"{name} is a link out of the folder")
    return path


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, all of them in its folder."""
    if (whole := own_file(folder, WEIGHTS)) is not None:
        return [whole]
    if own_file(folder, INDEX) is None:
        raise ModelError(f"{WEIGHTS} is missing")
    names = read_json(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{INDEX} has no weight_map of file names")
    files = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or "\\" in name:
            raise ModelError(f"{INDEX} names weights outside of the folder ({name[:100]})")
        if not name.endswith(".safetensors"):
            raise ModelError(f"{INDEX} names {name[:100]}, which is not a safetensors file")
        if (path := own_file(folder, name)) is None:
            raise ModelError(f"{name}, which {INDEX} names, is missing")
        files.append(path)
    return files


def _stored_types(folder: Path) -> dict[str, str]:
    """Return the type of each tensor, as safetensors spells it (F32, BF16, I64 ...), from the headers of the files."""
    types = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            types |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  no mapping
    return types


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_special_tokens(model: PreTrainedModel) -> None:
    for file, settings in ((GENERATION, model.generation_config), (CONFIG, model.config)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(settings, name, None)
            ids = value if isinstance(value, list) and value else [value]
            if not all(id is None or (type(id) is int and abs(id) < 2**63) for id in ids):
                raise ModelError(f"{file} has {str(value)[:100]!r} for {name}, which is not the id of a token")


@contextmanager
def one_sentence(source: str | Path, problem: str = "cannot be loaded") -> Iterator[None]:
    """Raise a `ModelError` of one sentence for any exception; Transformers, its parts and the formats raise and log anything."""
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
        return "it needs code of its own, which is not run"
    return text.split(" Exception raised from ")[0][:300].rstrip(".")  # of C++
