"""Checkpoints that are written atomically, load as Hub models, and resume with bit-identical results.

    step_00001000/
        model.safetensors, config.json, *.py, tokenizer.json ...   a normal model folder
        training_state/optimizer.safetensors, state.json           needed to resume; never published
        manifest.json                                              sizes and hashes, written last

Every reader ignores a folder without a manifest. No file is a pickle. Resuming reads only files with these names: no
index, no link, and no code from the folder.

Format 1 can also be read: its state.json holds step, seed, tokens per step and two hashes.
"""

import errno
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from common import schema
from common.atomic import copy_file, file_sha256, fsync, set_default_permissions, unfinished_path, write_atomic
from common.errors import NONSENSE, UserError, check_format
from common.limits import free
from common.removal import discard
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import CONFIG, GENERATION, INDEX, OLD_TOKENIZER, SHARDS, TEMPLATES, TOKENIZER
from tokenizer.encoding import vocabulary
from training.checkpoints.metrics import best_step
from training.data.batches import DataPosition
from training.step.tensors import OPTIMIZER, STATE_FOLDER, WEIGHTS

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE = f"{STATE_FOLDER}/state.json"
REQUIRED_FILES = (WEIGHTS, OPTIMIZER, STATE, CONFIG)
MODEL_FILES = (  # names that are deleted with a model; other files are never deleted
    *(CONFIG, GENERATION, "configuration_gpt2scratch.py", "modeling_gpt2scratch.py", WEIGHTS, SHARDS, INDEX),
    *(*TOKENIZER, *OLD_TOKENIZER, TEMPLATES),
)
FILES = (*MODEL_FILES, OPTIMIZER, STATE, MANIFEST)


@dataclass
class CheckpointArguments:
    save_strategy: Literal["no", "steps", "epoch"] = free(
        "steps", "When to save: every save_steps, after each epoch, or only at the end of the run."
    )
    save_steps: int = free(500, "Steps between checkpoints.", minimum=1)
    save_total_limit: int | None = free(
        None, "Newest checkpoints to keep, in addition to the best by validation loss. Default: all.", minimum=1
    )


@dataclass(frozen=True)
class TrainState:
    """State of a run without weights and optimizer. Data, dropout and learning rate are functions of the position."""

    position: DataPosition
    settings: dict[str, Any]  # settings of the run, compared with those of a command that resumes it
    losses: tuple[float | None, ...] = ()  # losses of the last steps; None for a skipped step
    unlogged: int = 0  # number of these losses that are not in a log line yet
    grad_scaler: dict[str, float] | None = None  # only for fp16


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def all_checkpoints(folder: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint, oldest first. `step_9` is not one, because no run writes it."""
    candidates = (path for path in folder.glob("step_[0-9]*") if path.name[5:].isdecimal())
    return sorted((path for path in candidates if path.name == folder_name(step_of(path))), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, oldest first."""
    return [path for path in all_checkpoints(folder) if (path / MANIFEST).is_file()]


def best_checkpoint(folder: Path, metrics: Path, until: float = math.inf) -> Path | None:
    """Return the complete checkpoint of the lowest comparable validation loss, of those up to step `until`, or None if
    none of them was validated."""
    by_step = {step_of(checkpoint): checkpoint for checkpoint in complete_checkpoints(folder)}
    return by_step.get(best_step(metrics, [step for step in by_step if step <= until]))


def write_checkpoint(
    folder: Path,
    snapshot: dict[str, torch.Tensor],  # all tensors of a step; the name of a moment has a slash
    shell: GPT2ScratchForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainState,
) -> Path:
    """Write `folder/step_N`. Nothing of that name exists until the final rename. Older checkpoints are not changed.
    `shell`: a model of the same configuration; its weights are not used. On a full disk, safetensors raises its own
    kind of error, see `errors.as_os_error`."""
    final = folder / folder_name(state.position.step)  # exists if the run reached this step before a rollback
    moments = {name: tensor for name, tensor in snapshot.items() if "/" in name}
    weights = {name: tensor for name, tensor in snapshot.items() if name not in moments}
    with unfinished_path(final, patterns=FILES) as partial:
        (partial / STATE_FOLDER).mkdir()
        shell.save_pretrained(partial, state_dict=weights, max_shard_size=2**62)
        vocabulary.save(tokenizer, partial, context=shell.config.n_positions)
        save_file(moments, partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        _seal(partial, state.position.step)
    return final


def _seal(folder: Path, step: int) -> None:
    """Give every file the user's default permissions, flush it to disk, and write the manifest."""
    set_default_permissions(folder)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        fsync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    content = {"format_version": FORMAT_VERSION, "step": step, "files": files}
    write_atomic(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def copy(checkpoint: Path, final: Path, model_only: bool = False) -> None:
    """Replace `final` atomically with a copy of a checkpoint, or of its model without the training state. Raise a
    `DamageError` if the checkpoint does not match its manifest."""
    files, manifest = listed_files(checkpoint), (checkpoint / MANIFEST).read_text(encoding="utf-8")
    with unfinished_path(final, patterns=MODEL_FILES if model_only else FILES) as partial:
        for name, sha256 in files.items():
            if model_only and name in (OPTIMIZER, STATE):
                continue
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            if copy_file(checkpoint / name, partial / name) != sha256:
                raise DamageError(f"{name} was changed or damaged (its hash differs)")
        if not model_only:
            write_atomic(partial / MANIFEST, manifest)


def renew_model(checkpoint: Path, destination: Path) -> None:
    """Copy the model of a checkpoint unless `destination` already holds it. A killed run may not have copied it."""
    weights = destination / WEIGHTS
    if not weights.is_file() or file_sha256(weights) != listed_files(checkpoint)[WEIGHTS]:
        copy(checkpoint, destination, model_only=True)


def sweep(folder: Path) -> None:
    """Remove folders that a killed run left half written or half deleted."""
    for state in ("unfinished", "removed"):
        for leftover in folder.glob(f".*step_*.{state}"):
            discard(leftover, FILES)


def prune(folder: Path, limit: int | None, metrics: Path, in_use: Path | None = None) -> None:
    """Remove all checkpoints except the newest `limit`, the best, and the one in use, which a later call removes."""
    if limit is None:
        return
    best = best_checkpoint(folder, metrics)
    for checkpoint in complete_checkpoints(folder)[:-limit]:
        if checkpoint not in (best, in_use):
            discard(checkpoint, FILES)


# Errors of the disk, of its driver and of the file system (EUCLEAN is Linux's for a damaged inode).
DAMAGE = {errno.EIO, errno.ENOENT, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}


class DamageError(OSError):
    """Error for a damaged checkpoint. Its text completes a sentence that starts with 'it is damaged: '."""


def damage(checkpoint: Path) -> str | None:
    """Return the first damage in a checkpoint, or None. Raise a `UserError` for a newer version's checkpoint."""
    try:
        for name, sha256 in listed_files(checkpoint).items():
            if file_sha256(checkpoint / name) != sha256:
                return f"{name} was changed or damaged (its hash differs)"
    except DamageError as error:
        return str(error)
    except OSError as error:
        if error.errno not in DAMAGE:  # a drive that is not available damages nothing
            error.filename = error.filename or str(checkpoint)
            raise
        return f"{error.filename or 'it'} cannot be read ({error.strerror or error})"
    return None


def listed_files(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in the manifest, by name. Raise a `DamageError` if the manifest is invalid, or if
    a file is missing, has another size or is outside the checkpoint, or a `UserError` for a newer version's
    checkpoint."""
    if not (checkpoint / MANIFEST).is_file():
        raise DamageError(f"it has no {MANIFEST}")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        check_format(checkpoint, manifest["format_version"], FORMAT_VERSION)
        files = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except NONSENSE as error:
        raise DamageError(f"its {MANIFEST} cannot be read ({error})") from error
    if absent := [name for name in REQUIRED_FILES if name not in files]:
        raise DamageError(f"its {MANIFEST} does not list {absent[0]}")
    for name, (size, _) in files.items():
        path = checkpoint / name
        plain = PureWindowsPath(name)  # parses both kinds of slashes, and drives
        if plain.anchor or ".." in plain.parts or "\0" in name or is_linked(path, checkpoint):
            raise DamageError(f"{name} is outside the checkpoint")
        if not path.is_file():
            raise DamageError(f"{name} is missing")
        if path.stat().st_size != size:
            raise DamageError(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
    return {name: sha256 for name, (_, sha256) in files.items()}


def is_linked(path: Path, folder: Path) -> bool:
    """Return whether any part of `path` below `folder` is a link."""
    return os.path.realpath(path) != os.path.join(os.path.realpath(folder), path.relative_to(folder))


def load_state(checkpoint: Path) -> TrainState:
    """Return the state of a checkpoint. Raise a `UserError` if `write_checkpoint` cannot have written it."""
    try:
        content = schema.read(checkpoint / STATE, dict[str, Any])
        if "position" not in content:
            content = _from_format_1(content, checkpoint)
        state = schema.build(content, TrainState)
        _check_state(state, checkpoint)
    except (OSError, *NONSENSE) as error:
        reason = str(error)[:200]
        raise UserError(f"{checkpoint / STATE} cannot be read ({reason}); resume from another checkpoint.") from error
    return state


def _from_format_1(content: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return a state of format 1 in the current format. Format 1 skips no samples and does not record the precision."""
    step, tokens_per_step = content["step"], content["tokens_per_step"]
    context = schema.read(checkpoint / "config.json")["n_positions"]
    settings = {"data": content["data_identity"], "tokenizer": content["tokenizer_sha256"], "mask_documents": False}
    settings |= {"seed": content["seed"], "tokens_per_step": tokens_per_step}
    position = {"step": step, "sample": step * tokens_per_step // context, "tokens": step * tokens_per_step}
    return {"position": position, "settings": settings, "grad_scaler": content["grad_scaler"]}


def _check_state(state: TrainState, checkpoint: Path) -> None:
    """Raise a ValueError for values that no run writes, because another program may have written state and manifest."""
    if checkpoint.name.startswith("step_") and state.position.step != step_of(checkpoint):
        raise ValueError(f"step is {state.position.step}")
    if state.unlogged > len(state.losses):
        raise ValueError(f"unlogged is {state.unlogged}")
    if any(start >= end for start, end in state.position.passed_over):
        raise ValueError("passed_over has an empty range")
    types = {"data": str, "tokenizer": str, "seed": int, "tokens_per_step": int}
    if wrong := [name for name, kind in types.items() if type(state.settings.get(name)) is not kind]:
        raise ValueError(f"{', '.join(wrong)} not recorded")
