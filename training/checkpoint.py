"""Checkpoints: written whole or not at all, loadable from the Hub as they are, resumable to the bit.

    step_00001000/
        model.safetensors, config.json, *.py, tokenizer.json ...   a model folder like any other
        training_state/optimizer.safetensors, state.json           what resuming needs; never published
        manifest.json                                              sizes and hashes, written last

A folder without its manifest does not exist as far as any reader is concerned. There is no pickle anywhere, and resuming
reads these files by these names alone: no index, no link, no code that lies in the folder.

Format 1 is read as well: its state.json holds step, seed, tokens per step and two hashes.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from atomic import copy_file, file_sha256, fsync, fsync_path, unfinished_path
from errors import NONSENSE, UserError, check_format
from limits import setting
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from removal import discard
from tokenizer import schema, vocabulary
from training.batches import DataPosition
from training.tensors import OPTIMIZER, STATE_FOLDER, WEIGHTS

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE = f"{STATE_FOLDER}/state.json"
NEEDED = (WEIGHTS, OPTIMIZER, STATE, "config.json")
MODEL_FILES = (  # names that are deleted with a model; other files are kept
    *("config.json", "generation_config.json", "configuration_gpt2scratch.py", "modeling_gpt2scratch.py"),
    *(WEIGHTS, "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
FILES = (*MODEL_FILES, OPTIMIZER, STATE, MANIFEST)


@dataclass
class CheckpointArguments:
    save_strategy: Literal["no", "steps", "epoch"] = setting(
        "steps", "When to save: every save_steps, at each epoch's end, or only at the very end.", resume="free"
    )
    save_steps: int = setting(500, "Steps between checkpoints.", minimum=1, resume="free")
    save_total_limit: int | None = setting(
        None,
        "Keep this many checkpoints, and the best by validation loss; all where left out.",
        minimum=1,
        resume="free",
    )


@dataclass(frozen=True)
class TrainState:
    """What resumes beside weights and optimizer. Data, dropout and learning rate are functions of the position."""

    position: DataPosition
    settings: dict[str, Any]  # the run's, to tell what another command would change
    losses: tuple[float | None, ...] = ()  # of the last steps; None where one was skipped
    unlogged: int = 0  # how many of them no log line holds yet
    grad_scaler: dict[str, float] | None = None  # fp16 only


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def all_checkpoints(folder: Path) -> list[Path]:
    """Return every folder with the name of a checkpoint, oldest first. `step_9`, which no run writes, is not one."""
    named = (path for path in folder.glob("step_[0-9]*") if path.name[5:].isdecimal())
    return sorted((path for path in named if path.name == folder_name(step_of(path))), key=step_of)


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
    """Write `folder/step_N`. Until the last rename nothing of that name exists; older checkpoints are not touched.

    `shell`: a model of the same configuration, whose weights do not matter. On a full disk, safetensors raises an error of its
    own, see `as_os_error`.
    """
    final = folder / folder_name(state.position.step)  # there if a run that went back had reached this step
    with unfinished_path(final, known=FILES) as unfinished:
        (unfinished / STATE_FOLDER).mkdir()
        shell.save_pretrained(unfinished, state_dict=dict(snapshot.weights), max_shard_size=snapshot.n_bytes + 1)
        vocabulary.save(tokenizer, unfinished, context=shell.config.n_positions)
        save_file(snapshot.moments, unfinished / OPTIMIZER)
        (unfinished / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        _seal(unfinished, state.position.step)
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
        fsync_path(path)
        files[str(path.relative_to(folder).as_posix())] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=2) + "\n", encoding="utf-8"
    )
    fsync_path(manifest)


def copy(checkpoint: Path, final: Path, model_only: bool = False) -> None:
    """Replace `final` by a copy of a checkpoint, or of its model without the training state: it is there whole or not at all.
    Raise a `DamageError` where the checkpoint is not as its manifest says."""
    manifest, files = (checkpoint / MANIFEST).read_bytes(), listed_files(checkpoint)
    with unfinished_path(final, known=MODEL_FILES if model_only else FILES) as unfinished:
        for name, (_, sha256) in files.items():
            if model_only and name in (OPTIMIZER, STATE):
                continue
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            if copy_file(checkpoint / name, unfinished / name) != sha256:
                raise DamageError(f"{name} was changed or damaged (its hash differs)")
        if not model_only:
            with (unfinished / MANIFEST).open("wb") as file:
                file.write(manifest)
                fsync(file)


def renew_model(checkpoint: Path, destination: Path) -> None:
    """Copy the model of a checkpoint, where `destination` does not hold it: a run may have been killed before."""
    size, sha256 = listed_files(checkpoint)[WEIGHTS]
    weights = destination / WEIGHTS
    if not weights.is_file() or weights.stat().st_size != size or file_sha256(weights) != sha256:
        copy(checkpoint, destination, model_only=True)


# ---- removing --------------------------------------------------------------------------------------------------------


def sweep(folder: Path) -> None:
    """Removes what a run that was killed left half written or half removed."""
    for state in ("unfinished", "removed"):
        for leftover in folder.glob(f".step_*.{state}"):
            discard(leftover, FILES)


def prune(folder: Path, limit: int | None, best_step: int | None, in_use: Path | None = None) -> None:
    """Remove all but the newest `limit` checkpoints and the best one. The one in use is left for the next time."""
    for checkpoint in complete_checkpoints(folder)[:-limit] if limit is not None else []:
        if step_of(checkpoint) != best_step and checkpoint != in_use:
            discard(checkpoint, FILES)


# ---- reading ---------------------------------------------------------------------------------------------------------


class DamageError(OSError):
    """A checkpoint is not as it was written. The text goes on from 'it is damaged: '."""


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint: the first file that is not as it was written. Raise a `UserError` where a newer
    version of this project wrote it."""
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
    """Return size in bytes and SHA-256 of all files that the manifest lists, by name. Raise a `DamageError` where it cannot be
    understood, or a file is missing, of another size, or lies elsewhere; a `UserError` for a newer version's checkpoint."""
    if not (checkpoint / MANIFEST).is_file():
        raise DamageError(f"it has no {MANIFEST}")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        check_format(checkpoint, manifest["format_version"], FORMAT_VERSION)
        files = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except NONSENSE as error:
        raise DamageError(f"its {MANIFEST} cannot be read ({error})") from error
    if missing := [name for name in NEEDED if name not in files]:
        raise DamageError(f"its {MANIFEST} does not name {missing[0]}")
    for name, (size, _) in files.items():
        path = checkpoint / name
        plain = PureWindowsPath(name)  # which knows both kinds of slashes, and drives
        if plain.anchor or ".." in plain.parts or "\0" in name or is_linked(path, checkpoint):
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
    """Return the state of a checkpoint; raise a `UserError` where it is not as `write` leaves it."""
    try:
        content = schema.read(checkpoint / STATE, dict[str, Any])
        if "position" not in content:
            content = _from_format_1(content, checkpoint)
        state = schema.build(content, TrainState)
        _check_state(state, checkpoint)
    except (OSError, *NONSENSE) as error:
        wrong = str(error)[:200]
        raise UserError(f"{checkpoint / STATE} cannot be read ({wrong}); resume from another checkpoint.") from error
    return state


def _from_format_1(content: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A state under today's names. Every step of format 1 trained on the next samples; precision was not recorded."""
    step, tokens_per_step = content["step"], content["tokens_per_step"]
    context = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["n_positions"]
    settings = {"data": content["data_identity"], "tokenizer": content["tokenizer_sha256"], "mask_documents": False}
    settings |= {"seed": content["seed"], "tokens_per_step": tokens_per_step}
    position = {"step": step, "sample": step * tokens_per_step // context, "tokens": step * tokens_per_step}
    return {"position": position, "settings": settings, "grad_scaler": content["grad_scaler"]}


def _check_state(state: TrainState, checkpoint: Path) -> None:
    """Raise a ValueError for numbers that no run writes; another program may have made the manifest fit."""
    if checkpoint.name.startswith("step_") and state.position.step != step_of(checkpoint):
        raise ValueError(f"step is {state.position.step}")
    if state.unlogged > len(state.losses):
        raise ValueError(f"unlogged is {state.unlogged}")
    if any(first >= end for first, end in state.position.passed_over):
        raise ValueError("passed_over has an empty range")
    types = {"data": str, "tokenizer": str, "seed": int, "tokens_per_step": int}
    if wrong := [name for name, kind in types.items() if type(state.settings.get(name)) is not kind]:
        raise ValueError(f"{', '.join(wrong)} not recorded")
