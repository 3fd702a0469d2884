"""Checkpoints: written whole or not at all, loadable from the Hub as they are, resumable to the bit.

    step_00001000/
        model.safetensors, config.json, *.py, tokenizer.json ...   a model folder like any other
        training_state/optimizer.safetensors, state.json           what resuming needs; never published
        manifest.json                                              sizes and hashes, written last

A folder without its manifest does not exist as far as any reader is concerned. There is no pickle anywhere, and resuming
reads these files by these names alone: no index, no link, no code that lies in the folder.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer import vocabulary
from tokenizer.store import file_sha256
from training.position import Position
from training.sharding import part_like

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"
WEIGHTS = "model.safetensors"
OPTIMIZER = f"{STATE_FOLDER}/optimizer.safetensors"
STATE = f"{STATE_FOLDER}/state.json"
NEEDED = (WEIGHTS, OPTIMIZER, STATE, "config.json")


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
    """What resumes beside weights and optimizer. Data, dropout and learning rate are functions of the position."""

    position: Position
    settings: dict[str, Any]  # the run's, to tell what another command would change
    losses: tuple[float | None, ...] = ()  # of the last steps; None where one was skipped
    unlogged: int = 0  # how many of them no log line has told yet
    grad_scaler: dict[str, float] | None = None  # fp16 only


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def all_checkpoints(folder: Path) -> list[Path]:
    """Everything that has the name of one, oldest first."""
    return sorted(path for path in folder.glob("step_[0-9]*") if path.name[5:].isdecimal())


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those with a manifest, oldest first."""
    return [path for path in all_checkpoints(folder) if (path / MANIFEST).is_file()]


# ---- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """All tensors of a moment, in the memory of the main process."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in (self.weights, self.moments) for tensor in tensors.values())

    def is_finite(self) -> bool:
        tensors = [*self.weights.values(), *self.moments.values()]
        return all(torch.linalg.vector_norm(tensor, float("inf")).isfinite() for tensor in tensors)


def write(
    folder: Path,
    snapshot: Snapshot,
    shell: GPT2ScratchForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainState,
) -> Path:
    """Writes `folder/step_N`. Until the last rename nothing of that name exists; older checkpoints are not touched.

    `shell` is a model of the same configuration, whose weights do not matter.

    Raises:
        OSError: the disk is full or the folder cannot be written; safetensors says so in its own way (`as_os_error`).
    """
    final = folder / folder_name(state.position.step)
    unfinished = folder / f".{final.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        (unfinished / STATE_FOLDER).mkdir(parents=True)
        shell.save_pretrained(unfinished, state_dict=dict(snapshot.weights), max_shard_size=snapshot.n_bytes + 1)
        vocabulary.save(tokenizer, unfinished, context=shell.config.n_positions)
        save_file(snapshot.moments, unfinished / OPTIMIZER)
        (unfinished / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        _seal(unfinished, state.position.step)
        if final.exists():  # this step was reached before, in a run that went back
            remove(final)
        unfinished.rename(final)
        sync(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def as_os_error(error: Exception) -> Exception:
    """safetensors and tokenizers say `... (os error 28)` where Python says OSError."""
    text = str(error)
    if isinstance(error, OSError) or "(os error " not in text:
        return error
    number = int(text.rsplit("(os error ", 1)[1].split(")")[0])
    return OSError(number, os.strerror(number))


def _seal(folder: Path, step: int) -> None:
    """Gives every file the user's usual permissions (safetensors writes 0600), forces it to disk, writes the manifest."""
    umask = os.umask(0)
    os.umask(umask)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {}
    for path in paths:
        path.chmod(0o666 & ~umask)
        sync(path)
        files[str(path.relative_to(folder).as_posix())] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=2) + "\n", encoding="utf-8"
    )
    for path in (manifest, folder / STATE_FOLDER, folder):
        sync(path)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


# ---- removing --------------------------------------------------------------------------------------------------------


def remove(checkpoint: Path) -> None:
    """Out of sight in one step: killed in between, what is left is not taken for a checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what a run that was killed left half written or half removed."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover)


def prune(
    folder: Path, limit: int | None, best_step: int | None, is_in_use: Callable[[Path], bool] = lambda checkpoint: False
) -> None:
    """Removes all but the newest `limit` checkpoints and the best one. One in use is left for the next time."""
    if limit is None:
        return
    for checkpoint in complete_checkpoints(folder)[: -max(1, limit)]:
        if step_of(checkpoint) != best_step and not is_in_use(checkpoint):
            remove(checkpoint)


# ---- reading ---------------------------------------------------------------------------------------------------------


class DamageError(Exception):
    """A checkpoint is not as it was written. The text goes on from 'it is damaged: '."""


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: the first file that is not as it was written."""
    try:
        for name, (_, sha256) in listed_files(checkpoint).items():
            if file_sha256(checkpoint / name) != sha256:
                return f"{name} was changed or damaged (its hash differs)"
    except DamageError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or 'it'} cannot be read ({error.strerror or error})"
    return None


def listed_files(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Size in bytes and SHA-256 by name, of all that the manifest lists, where names and sizes are right.

    Raises:
        DamageError: there is no manifest that can be understood, or a file is missing, of another size, or lies elsewhere.
    """
    if not (checkpoint / MANIFEST).is_file():
        raise DamageError(f"it has no {MANIFEST}")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        version = manifest["format_version"]
        files = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"its {MANIFEST} cannot be read ({error})") from error
    if version != FORMAT_VERSION:
        raise DamageError(f"its format is {version}, and this program reads {FORMAT_VERSION}")
    if missing := [name for name in NEEDED if name not in files]:
        raise DamageError(f"its {MANIFEST} does not name {missing[0]}")
    for name, (size, _) in files.items():
        path = checkpoint / name
        plain = PureWindowsPath(name)  # which knows both kinds of slashes, and drives
        if plain.anchor or ".." in plain.parts or is_linked(path, checkpoint):
            raise DamageError(f"{name} lies outside of it")
        if not path.is_file():
            raise DamageError(f"{name} is missing")
        if path.stat().st_size != size:
            raise DamageError(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
    return files


def is_linked(path: Path, folder: Path) -> bool:
    """Whether the way from `folder` to `path` goes through a link."""
    return os.path.realpath(path) != os.path.join(os.path.realpath(folder), path.relative_to(folder))


def load_state(checkpoint: Path) -> TrainState:
    """
    Raises:
        UserError: it is not a state as `write` leaves it.
    """
    try:
        content = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        position = content.pop("position")
        passed_over = tuple((int(first), int(end)) for first, end in position.pop("passed_over"))
        losses = tuple(None if loss is None else float(loss) for loss in content.pop("losses"))
        return TrainState(Position(**position, passed_over=passed_over), losses=losses, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{checkpoint / STATE} cannot be read ({error}); resume from another checkpoint.") from error


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Fills `model`, which is not prepared yet.

    Raises:
        UserError: the file holds other tensors than the model.
    """
    tensors = load_file(checkpoint / WEIGHTS)
    parameters = dict(model.named_parameters())  # a tied head is not among them
    wrong = sorted(tensors.keys() ^ parameters.keys())
    wrong += [name for name, tensor in tensors.items() if name in parameters and tensor.shape != parameters[name].shape]
    if wrong:
        raise UserError(f"{checkpoint / WEIGHTS} does not fit its config.json: {', '.join(wrong[:5])}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills `optimizer`, built for `model`, with the saved moments; its hyperparameters stay its own.

    Raises:
        UserError: the file holds other tensors than the optimizer.
    """
    names = parameter_names(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(checkpoint / OPTIMIZER, framework="pt") as file:  # one tensor at a time: of some, a share is kept
        for index, parameter in enumerate(parameters):
            prefix = names[parameter] + "/"
            keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (it is no dict)
            moments = {key.removeprefix(prefix): file.get_tensor(key) for key in keys}
            if any(moment.dim() and moment.shape != parameter.shape for moment in moments.values()):
                raise UserError(f"{checkpoint / OPTIMIZER} does not fit the model: {prefix[:-1]} has another shape.")
            state[index] = {key: part_like(moment, parameter) for key, moment in moments.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}
