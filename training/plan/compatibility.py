"""Compatibility of a command with the run it resumes. Each changed setting is refused, allowed by name, or reported."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from shlex import join
from typing import Any

import torch

from common.errors import Problems, UserError
from common.limits import free
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.checkpoints.checkpoint import TrainState
from training.checkpoints.metrics import read_events
from training.checkpoints.run_folder import RunFolder, run_of
from training.data.run_data import find_cached
from training.step.model import TOKEN_IDS
from training.step.optim import OptimArguments

# Model fields that a resumed run may change. Dropout is reported as a setting. `use_cache` affects only generation.
MAY_DIFFER = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "use_cache"}
FIXED_IN_FORMAT_1 = {"optimizer": "adamw", "weight_average": None, "induction_init": False}


@dataclass
class ChangeArguments:
    allow_change: list[str] = free(
        [], "Settings that may differ from those of the resumed checkpoint, by the names in the error message."
    )

    @property
    def allowed(self) -> set[str]:
        return {name for names in self.allow_change for name in names.replace(",", " ").split()}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a command, with the effect of each on resuming."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    resume: Mapping[str, str | None]  # by name, see `limits.setting`; None is reported
    allowed: set[str]  # names given in --allow_change

    @property
    def refused(self) -> set[str]:
        return {"tokenizer", "data"} | {name for name, meaning in self.resume.items() if meaning == "refused"}

    def problems(self) -> list[str]:
        may_name = [*sorted(self.refused), *model_fields(GPT2ScratchConfig)]
        unknown = sorted(self.allowed - set(may_name))
        return [f"allow_change names {name!r}; it may name {', '.join(may_name)}." for name in unknown]

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records."""
        return {name: value for name, value in self.values.items() if self.resume.get(name) not in ("free", "derived")}

    def differences(self, old: Mapping[str, Any]) -> list[str]:
        """Return the differences from the config.yaml of a run. A setting missing there has its default."""
        old = {**self.defaults, **old}
        return [
            f"{name} {old.get(name)} -> {value}"
            for name, value in self.values.items()
            if self.resume.get(name) != "free" and name not in self.allowed and str(old.get(name)) != str(value)
        ]


def model_fields(kind: type[GPT2ScratchConfig]) -> list[str]:
    """Return the fields declared by the model's own configuration that affect what the weights compute."""
    kinds = [base for base in reversed(kind.__mro__) if issubclass(base, GPT2ScratchConfig)]
    return [name for base in kinds for name in get_annotations(base) if name not in MAY_DIFFER]


def compare(
    checkpoint: Path, state: TrainState, model: GPT2ScratchConfig, new: Mapping[str, Any], settings: RunSettings
) -> list[str]:
    """Return the settings that change when `checkpoint` with its `state` is resumed, one sentence each. Raise a
    `UserError` with all changes that are not allowed, one per line. `model`: the command's model, compared with the
    checkpoint's config.json. `new`: settings that its checkpoint would record."""
    try:
        checkpoint_model = type(model).from_json_file(checkpoint / "config.json")
    except Exception as error:  # many types are possible if another program wrote the file
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{checkpoint / 'config.json'} is not a configuration of this model: {problem}") from error
    fields = model_fields(type(model))
    # A setting of the optimizer that is not recorded had its default; format 1 records none that could change.
    old = vars(OptimArguments()) if "learning_rate" in state.settings else FIXED_IN_FORMAT_1
    old = old | {name: getattr(checkpoint_model, name) for name in fields} | state.settings
    new = {name: getattr(model, name) for name in fields} | dict(new)
    differences = {name: _sentence(name, new, old) for name in new if name in old and new[name] != old[name]}
    exceptions = settings.allowed | {name for name, meaning in settings.resume.items() if meaning == "free"}
    if "tokenizer" in settings.allowed | differences.keys():  # with another tokenizer, these may change too
        exceptions |= set(TOKEN_IDS)
    # A run that was ended before its first checkpoint with allowed changes resumes with its own settings.
    events = read_events(RunFolder(checkpoint.absolute().parent.parent).events)
    starts = (event for event in events if event.get("checkpoint") == checkpoint.name)
    agreed = {sentence for event in starts for sentence in event.get("changes", ())}
    refusals = []
    for name, sentence in differences.items():
        if name in fields and not _has_same_shapes(checkpoint_model, name, new[name]):
            refusals.append(f"{sentence}, so its weights do not fit; start a new run in another --output_dir")
        elif settings.resume.get(name) == "fixed":
            refusals.append(f"{sentence}, so its moments do not fit; start a new run in another --output_dir")
        elif name in settings.refused.union(fields) - exceptions and sentence not in agreed:
            refusals.append(f"{sentence}; {_remedy(name, old['data'], checkpoint, settings)}")
    if str(checkpoint_model.dtype) not in ("None", "float32", "torch.float32"):
        refusals.append(f"its weights are {checkpoint_model.dtype}, but training needs float32")
    Problems(f"{checkpoint} cannot be resumed: {difference}." for difference in refusals).refuse()
    return [sentence for name, sentence in differences.items() if settings.resume.get(name) != "free"]


def _has_same_shapes(checkpoint_model: GPT2ScratchConfig, name: str, value: Any) -> bool:
    """Return whether the weights of `checkpoint_model` fit a model with another value in one field."""
    variant = deepcopy(checkpoint_model)
    setattr(variant, name, value)
    with torch.device("meta"):
        models = [GPT2ScratchForCausalLM._from_config(config) for config in (checkpoint_model, variant)]
    shapes = [{key: parameter.shape for key, parameter in model.named_parameters()} for model in models]
    return shapes[0] == shapes[1]


def _remedy(name: str, data: str, checkpoint: Path, settings: RunSettings) -> str:
    """Return how to keep the run's value of a setting, or to change it. `data`: identity of the run's tokens."""
    remedy = f"if this is intended, add --allow_change {name}"
    if name not in ("tokenizer", "data"):
        return remedy
    if (store := find_cached(data)) is not None:
        source = settings.values.get("resume_from_checkpoint") or run_of(checkpoint)
        command = join(["--resume_from_checkpoint", str(source), "--data", str(store)])
        remedy = f"the run was trained on {store}, so resume it with {command}; {remedy}"
    if name == "tokenizer" and name in settings.values:  # the text is tokenized for this run
        folder = checkpoint if store is None else store / "tokenizer"  # a backup has no model/
        words = join(["--tokenizer", str(folder), "--allow_change", "data"])
        remedy += f", and ids get other meanings; to keep the run's vocabulary on other text, add {words}"
    return remedy


def _sentence(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    if name not in ("tokenizer", "data"):
        return f"{name} changed from {old[name]} to {new[name]}"
    change = "the token store has another tokenizer" if name == "tokenizer" else "the token store has other tokens"
    return f"{change}, sha256 {new[name][:12]} instead of {old[name][:12]}"
