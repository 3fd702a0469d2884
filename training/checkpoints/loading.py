"""Model loading for commands: from a run, a checkpoint, a model folder or a Hub id."""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM, loading, prompts
from tokenizer.corpus import hub
from tokenizer.store.store import TokenStore
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.run_folder import CONFIG_FILE, RunFolder, find_checkpoint


def find_model(name: str) -> str:
    """Return the model folder or Hub id to load for a run folder, a checkpoint, a model folder or a Hub id. Raise a
    `UserError` if there is no model, or the Hub cannot be reached."""
    path = Path(os.path.expanduser(name))
    for candidate in (path / "model", path):
        if (candidate / loading.CONFIG).is_file() or (candidate / loading.ADAPTER).is_file():
            return str(candidate)
    if complete := checkpoints.complete_checkpoints(path / "checkpoints"):
        return str(find_checkpoint(path, None) if (path / CONFIG_FILE).is_file() else complete[-1])
    if path.exists():
        hint = f" yet: {RunFolder(path).last_good()}" if RunFolder(path).is_run() else ""
        raise UserError(f"{name} holds no model{hint}.")
    if not is_hub_id(name):
        raise UserError(f"{name} is neither a local folder nor a Hub id (user/name).{hub.HINTS.get(name, '')}")
    hub.require(name, "a model", "config.json")
    return name


def is_hub_id(name: str) -> bool:
    """Return whether a model that is not a local folder is named by a Hub id, user/name."""
    is_pair = len(name.strip("/").split("/")) == 2 and not name.startswith((".", "/", "~", "runs/"))
    return is_pair and not Path(name).exists()


def name_of_model(source: str) -> str:
    """Return the Hub id of a model, or the name of its run or folder."""
    if is_hub_id(source):
        return source
    path = Path(os.path.abspath(source))  # `.` has the name of the folder
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.parent.name if path.name == "model" else path.name


@contextmanager
def model_errors(sentence: str = "{}") -> Iterator[None]:
    """Raise a `UserError` for a `ModelError`, with its text in `sentence`."""
    try:
        yield
    except loading.ModelError as error:
        raise UserError(sentence.replace("{}", str(error))) from error


def load_own_model(source: str | Path) -> GPT2ScratchForCausalLM:
    """Load a model in fp32. Raise a `UserError` if it cannot be loaded or has another architecture."""
    with model_errors():
        model = loading.load_model(source, torch.float32)
    if not isinstance(model, GPT2ScratchForCausalLM):
        command = f"python -m modeling_gpt2scratch.conversion_gpt2scratch {shlex.quote(str(source))} DST"
        remedy = f" Convert it first: {command}" if model.config.model_type == "gpt2" else ""
        raise UserError(f"{source} is a {type(model).__name__}, not a model of this project.{remedy}")
    return model


def load_any_model(
    source: str | Path, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer like `modeling_gpt2scratch.prompts`, but with `UserError`s."""
    with model_errors():
        return prompts.load_with_tokenizer(source, dtype)


def check_store(source: str | Path, tokenizer: PreTrainedTokenizerBase, store: TokenStore) -> None:
    """Raise a `UserError` if the store was made with a tokenizer other than the model's."""
    if rules(tokenizer) != rules(store.load_tokenizer()):  # files differ between library versions, so compare rules
        raise UserError(
            f"{source} and {store.folder} have different tokenizers; use a store that was made with the model's own "
            f"tokenizer (python -m tokenizer.pretokenize --tokenizer {shlex.quote(str(source))} ...)."
        )


def rules(tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the settings of a tokenizer that determine the ids of a text, without those that a loader may set:
    truncation, padding, tokens before or after a text, and which added tokens are special."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["added_tokens"] = [token | {"special": None} for token in rules["added_tokens"]]
    return {name: value for name, value in rules.items() if name not in ("truncation", "padding", "post_processor")}
