"""Load a causal language model from a folder or the Hub: no code but ours and Transformers' runs, no weight is random.

`trust_remote_code` is never given: `model_type` gpt2scratch is loaded by the classes of this package, a type that
Transformers knows by Transformers', and all others are refused. This file is not part of what is uploaded.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
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
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
OLD_TOKENIZER = ("vocab.json", "merges.txt", "added_tokens.json")
MISFIT = "its weights do not fit its config.json"
LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")
# Settings of a config.json by which Transformers reads other weights, or other than as numbers.
MAX_LABELS = 1_000_000
REFUSED = ("quantization_config", "transformers_weights")


class ModelError(ValueError):
    """The model cannot be loaded; the text is one sentence for the user."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, from the file's header."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, I64 ...


def load_model(source: str | Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """The model in a folder or of a Hub id, for evaluation.

    Raises:
        ModelError: it is damaged, incomplete, of an unknown architecture, or leads out of its folder.
    """
    with _one_sentence(source):
        folder = _folder(source, CONFIG, GENERATION, ADAPTER)
        described = read_model_config(folder)
        if own_file(folder, ADAPTER) is not None:
            raise ModelError(f"{ADAPTER} names a base that is elsewhere; merge the adapter into its base first")
        if own_file(folder, GENERATION) is not None:
            read_json(folder, GENERATION)
        stored = _stored(source, folder)
        _refuse_more_layers(described, stored)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config._attn_implementation = config._experts_implementation = None  # either may name a kernel, code of the Hub
        _refuse_random_weights(config, stored)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,  # a pickle is never opened
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
        )
        problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
        problems += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
        problems += [
            f"{name} is {tuple(found)} instead of {tuple(shape)}"
            for name, found, shape in sorted(report["mismatched_keys"])
        ]
        if problems:
            raise ModelError(f"{MISFIT}: {_some(problems)}")
        _check_special_tokens(model)
        model.name_or_path = model.config.name_or_path = str(source)
    return model.eval()


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a Hub id.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    with _one_sentence(source, "has no tokenizer that can be loaded"):
        folder = _folder(source, *TOKENIZER, *OLD_TOKENIZER)
        if not any(
            own_file(folder, name) for name in ("tokenizer.json", "vocab.json")
        ):  # Transformers makes up an empty one
            raise ModelError("tokenizer.json is missing")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.encode("")  # a wrong type in its settings shows first here
        return tokenizer


def check_tokenizer(source: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Raises:
        ModelError: the tokenizer has ids that the model has no embedding of.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(f"{source} has a tokenizer with ids up to {largest}, and its model embeds {rows} tokens.")


def read_model_config(folder: Path) -> dict[str, Any]:
    """What config.json says, of an architecture that is known here.

    Raises:
        ModelError: it is damaged or of another architecture; the text is without the name of the model.
    """
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
    """
    Raises:
        ModelError: the file does not exist, or holds no JSON object.
    """
    if (path := own_file(folder, name)) is None:
        raise ModelError(f"{name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also of text that is not UTF-8
        raise ModelError(f"{name} is not JSON: {_short(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name} holds no JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, all of them in its folder.

    Raises:
        ModelError: there are none, or the index names one that is not in the folder.
    """
    if (whole := own_file(folder, WEIGHTS)) is not None:
        return [whole]
    files = {name: own_file(folder, name) for name in shards(folder)}
    if missing := sorted(name for name, path in files.items() if path is None):
        raise ModelError(f"{missing[0]}, which {INDEX} names, is missing")
    return [path for path in files.values() if path is not None]


def shards(folder: Path) -> list[str]:
    """The file names in the index of a model's weights.

    Raises:
        ModelError: there is no index, or it names files outside of the folder.
    """
    if own_file(folder, INDEX) is None:
        raise ModelError(f"{WEIGHTS} is missing")
    names = read_json(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{INDEX} has no weight_map of file names")
    distinct = sorted(set(names.values()))
    if outside := [name for name in distinct if Path(name).name != name or "\\" in name]:
        raise ModelError(f"{INDEX} names weights outside of the folder ({outside[0][:100]})")
    if others := [name for name in distinct if not name.endswith(".safetensors")]:
        raise ModelError(f"{INDEX} names {others[0][:100]}, which is not a safetensors file")
    return distinct


def _stored(source: str | Path, folder: Path) -> dict[str, Stored]:
    """The tensors by name; of a Hub id, after the download of its weights."""
    if not Path(source).exists() and _fetched(source, WEIGHTS) is None and _fetched(source, INDEX) is not None:
        for name in shards(folder):
            _fetched(source, name)
    stored = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it cannot be iterated over
                tensor = file.get_slice(name)
                stored[name] = Stored(tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def _refuse_more_layers(described: dict[str, Any], stored: dict[str, Stored]) -> None:
    """Before a model of that many layers is built, which takes time even without its weights."""
    for name in LAYERS:
        if isinstance(number := described.get(name), int) and number > len(stored):
            raise ModelError(f"{MISFIT}: {name} is {number}, and there are {len(stored)} tensors")


def _refuse_random_weights(config: PreTrainedConfig, stored: dict[str, Stored]) -> None:
    """Before memory is taken for weights that no file has.

    The number of parameters is compared, for names and shapes of other architectures change while they are loaded; what
    `from_pretrained` reports is exact, and comes after their allocation.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    computed = "|".join(empty._keys_to_ignore_on_load_missing or []) or "$^"
    named = empty.named_parameters()  # names shared weights once
    expected = {name: tuple(weight.shape) for name, weight in named if not re.search(computed, name)}
    prefix = f"{empty.base_model_prefix}."  # which files of a model without its head lack
    found = {name: stored.get(name, stored.get(name.removeprefix(prefix))) for name in expected}
    problems = [
        f"{name} is {f'{tensor.shape} instead of {expected[name]}' if tensor is not None else 'missing'}"
        for name, tensor in found.items()
        if tensor is None or tensor.shape != expected[name]
    ]
    count, held = sum(map(math.prod, expected.values())), sum(math.prod(tensor.shape) for tensor in stored.values())
    if count > held:
        raise ModelError(f"{MISFIT}: of {count:,} parameters, the files hold {held:,}; {_some(problems)}")
    for name, tensor in found.items():
        if tensor is not None and not tensor.dtype.startswith(("F", "BF")):
            raise ModelError(f"{name} is of type {tensor.dtype}, which is not a weight's")


def _folder(source: str | Path, *names: str) -> Path:
    """The folder `source`; of a Hub id, the one of the cache, with those files of it that the repository has."""
    if Path(source).exists():
        return Path(source)
    found = [path for path in (_fetched(source, name) for name in names) if path is not None]
    if not found:
        raise ModelError(f"{names[0]} is missing")
    return found[0].parent


def _fetched(source: str | Path, name: str) -> Path | None:
    try:
        return Path(hf_hub_download(str(source), name))
    except EntryNotFoundError:
        return None


def _check_special_tokens(model: PreTrainedModel) -> None:
    for file, settings in ((GENERATION, model.generation_config), (CONFIG, model.config)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(settings, name, None)
            ids = value if isinstance(value, list) and value else [value]
            if not all(id is None or (type(id) is int and abs(id) < 2**63) for id in ids):
                raise ModelError(f"{file} has {str(value)[:100]!r} for {name}, which is not the id of a token")


def own_file(folder: Path, name: str) -> Path | None:
    """The file of that name in a model's folder; None where there is none.

    Raises:
        ModelError: it is a link out of the folder.
    """
    path = folder / name
    if not path.is_file():
        return None
    there, home = path.resolve(), folder.resolve()
    # The Hub's cache keeps the files of a snapshot in another folder of the repository.
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not there.is_relative_to(home) and there.parent != blobs:
        raise ModelError(f"{name} is a link out of the folder")
    return path


@contextmanager
def _one_sentence(source: str | Path, problem: str = "cannot be loaded") -> Iterator[None]:
    """What loading raises, as a sentence, without what it logs; Transformers, its parts and the formats raise anything."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{source} {problem}: {error}.") from error
    except Exception as error:
        raise ModelError(f"{source} {problem}: {_short(error)}.") from error
    finally:
        logging.set_verbosity(verbosity)


def _short(error: Exception) -> str:
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own, which is not run"
    return text.split(" Exception raised from ")[0][:300].rstrip(".")  # of C++


def _some(problems: list[str]) -> str:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
