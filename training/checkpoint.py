"""Checkpoints: written whole or not at all, loadable from the Hub as they are, resumable to the bit.

    step_00001000/
        model.safetensors, config.json, *.py, tokenizer.json ...   a model folder like any other
        training_state/optimizer.safetensors, state.json           what resuming needs; never published
        manifest.json                                              sizes and hashes, written last

A folder without its manifest does not exist as far as any reader is concerned. There is no pickle anywhere.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer import vocabulary
from tokenizer.store import Metadata, file_sha256
from training.sharding import part_like, whole

MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"


@dataclass
class CheckpointArguments:
    save_strategy: Literal["no", "steps", "epoch"] = field(
        default="steps",
        metadata={"help": "When to save: every save_steps, at each epoch's end, or only at the very end."},
    )
    save_steps: int = field(default=500, metadata={"help": "Steps between checkpoints."})
    save_total_limit: int | None = field(
        default=None,
        metadata={"help": "Keep this many checkpoints, and the best by validation loss; all where left out."},
    )


@dataclass(frozen=True)
class TrainState:
    """What resumes beside weights and optimizer. Data, dropout and learning rate are functions of the step."""

    step: int  # steps done
    seed: int
    tokens_per_step: int
    data_identity: str
    tokenizer_sha256: str
    grad_scaler: dict[str, float] | None = None  # fp16 only

    @classmethod
    def at_start(cls, seed: int, tokens_per_step: int, data: Metadata) -> "TrainState":
        return cls(0, seed, tokens_per_step, data.identity, data.tokenizer_sha256)

    def after(self, step: int, grad_scaler: dict[str, float] | None) -> "TrainState":
        return replace(self, step=step, grad_scaler=grad_scaler)


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those with a manifest, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step_[0-9]*/{MANIFEST}") if path.parent.name[5:].isdecimal())


@dataclass
class Snapshot:
    """All tensors of a moment, in the memory of the main process."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)  # `transformer.ln_f.weight/exp_avg` and so on


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> Snapshot:
    """Called by every process, because a sharded tensor is gathered by all: one after the other, so that the device holds
    no more than one of them whole. Empty where not to `keep`."""
    snapshot, names = Snapshot(), _parameter_names(model)

    def add(kept: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        full = whole(tensor.detach())
        if keep:
            kept[name] = full.cpu().contiguous()

    for name, parameter in model.named_parameters():  # a tied head comes once
        add(snapshot.weights, name, parameter)
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            add(snapshot.moments, f"{names[parameter]}/{key}", value)
    return snapshot


def shell_of(model: GPT2ScratchForCausalLM) -> GPT2ScratchForCausalLM:
    """A model of the same configuration without memory, whose class is the product's also where the model is sharded."""
    with torch.device("meta"):
        shell = GPT2ScratchForCausalLM._from_config(model.config)
    shell.generation_config = model.generation_config
    return shell


def save(
    folder: Path,
    snapshot: Snapshot,
    shell: GPT2ScratchForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainState,
) -> Path:
    """Writes `folder/step_N`. Until the last rename nothing of that name exists; older checkpoints are not touched.

    `shell` is a model of the same configuration, whose weights do not matter.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    final = folder / folder_name(state.step)
    unfinished = folder / f".{final.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / STATE_FOLDER).mkdir(parents=True)
        shell.save_pretrained(unfinished, state_dict=dict(snapshot.weights))
        vocabulary.save(tokenizer, unfinished, context=shell.config.n_positions)
        save_file(snapshot.moments, unfinished / STATE_FOLDER / "optimizer.safetensors")
        state_file = unfinished / STATE_FOLDER / "state.json"
        state_file.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        _seal(unfinished, state.step)
        if final.exists():  # this step was reached before, in a run that went back
            remove(final)
        unfinished.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(
            f"Checkpoint {final} could not be written: {error.strerror or error}; earlier checkpoints are intact. "
            f"Make room there and resume."
        ) from error
    return final


def load_state(checkpoint: Path) -> TrainState:
    return TrainState(**json.loads((checkpoint / STATE_FOLDER / "state.json").read_text(encoding="utf-8")))


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills `optimizer`, built for `model`, with the saved moments; its hyperparameters stay its own."""
    names = _parameter_names(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(checkpoint / STATE_FOLDER / "optimizer.safetensors", framework="pt") as file:
        for index, parameter in enumerate(parameters):
            prefix = names[parameter] + "/"
            keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (it is no dict)
            state[index] = {key.removeprefix(prefix): part_like(file.get_tensor(key), parameter) for key in keys}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint that has a manifest: the first file that is not as it was written."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
        if file_sha256(path) != expected["sha256"]:
            return f"{name} was changed or damaged (its hash differs)"
    return None


def remove(checkpoint: Path) -> None:
    """The manifest first: killed in between, what is left does not count as a checkpoint."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def prune(folder: Path, limit: int | None, best_step: int | None) -> None:
    """Removes all but the newest `limit` checkpoints and the best one, and what a crash left behind."""
    for leftover in folder.glob(".step_*.unfinished"):
        shutil.rmtree(leftover)
    if limit is None:
        return
    for checkpoint in complete_checkpoints(folder)[: -max(1, limit)]:
        if step_of(checkpoint) != best_step:
            remove(checkpoint)


def copy_model(checkpoint: Path, destination: Path) -> None:
    """Makes `destination` the model of `checkpoint`, without the training state."""
    fresh = destination.with_name(f".{destination.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(checkpoint, fresh, ignore=shutil.ignore_patterns(STATE_FOLDER, MANIFEST))
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    fresh.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _seal(folder: Path, step: int) -> None:
    """Gives every file the user's usual permissions (safetensors writes 0600), forces it to disk, writes the manifest."""
    umask = os.umask(0)
    os.umask(umask)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {}
    for path in paths:
        path.chmod(0o666 & ~umask)
        _sync(path)
        files[str(path.relative_to(folder).as_posix())] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({"format_version": 1, "step": step, "files": files}, indent=2) + "\n", encoding="utf-8"
    )
    for path in (manifest, folder / STATE_FOLDER, folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
