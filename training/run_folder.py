"""The run folder: what lies where, and whether a run may begin, go on, or is over.

runs/x/
    config.yaml      every setting; `--config` runs it again
    metrics.jsonl    one object a log line
    events.jsonl     what happened to the run, and when; status.json: how it stands
    samples.md       what the model wrote at each validation
    report.md        the run told in one page, with plots
    checkpoints/     see checkpoint.py
    model/           the model to use: the newest checkpoint's, without its training state
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import read_yaml
from errors import UserError
from training import checkpoint as checkpoints
from training.changes import NOT_THE_RUN
from training.journal import forget_after
from training.sampling import forget_samples_after

if TYPE_CHECKING:
    from training.backup import Backup  # which knows run folders itself

CONFIG_FILE = "config.yaml"


@dataclass
class RunArguments:
    output_dir: str | None = field(
        default=None, metadata={"help": "The run folder; runs/NAME of the config file or the data where left out."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete the run that is in the folder and start anew."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Go on with a run (its folder: the newest checkpoint) or from one of its checkpoints."},
    )
    seed: int = field(default=1337, metadata={"help": "Decides initial weights, data order and dropout."})


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / CONFIG_FILE
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.status = self.path / "status.json"
        self.samples = self.path / "samples.md"
        self.report = self.path / "report.md"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.hub = self.path / "hub"
        self.plot = self.path / "loss.png"

    @property
    def contents(self) -> tuple[Path, ...]:
        """All that a run leaves; nothing else in the folder is ever deleted."""
        files = (self.config, self.metrics, self.events, self.status, self.samples, self.report, self.plot)
        return (*files, self.checkpoints, self.model, self.hub)

    def newest_checkpoint(self, say: Callable[[str], None]) -> Path | None:
        """The newest complete checkpoint that is as it was written; damaged ones are named and passed over.

        Raises:
            UserError: there are checkpoints, and all of them are damaged.
        """
        problem = None
        for checkpoint in reversed(checkpoints.all_checkpoints(self.checkpoints)):
            problem = checkpoints.damage(checkpoint)
            if problem is None:
                return checkpoint
            say(f"WARNING: {checkpoint} is damaged: {problem}. Falling back to the one before.")
        if problem is not None:
            raise UserError(f"Every checkpoint in {self.checkpoints} is damaged; --overwrite_output_dir starts anew.")
        return None

    def last_good(self) -> str:
        """What to go on from, in words."""
        complete = checkpoints.complete_checkpoints(self.checkpoints)
        return f"{complete[-1]} is the last good checkpoint" if complete else "there is no checkpoint yet"

    def newest_step(self) -> int:
        """Of the complete checkpoints; 0 where there is none."""
        complete = checkpoints.complete_checkpoints(self.checkpoints)
        return checkpoints.step_of(complete[-1]) if complete else 0

    def finished_message(self, step: int) -> str:
        return (
            f"{self.path} is finished ({step:,} steps). To train it anew, add --overwrite_output_dir; to train it longer, "
            f"--resume_from_checkpoint {self.path} --max_steps N."
        )


def open_run(
    arguments: RunArguments,
    settings: dict[str, Any],
    allowed: set[str],
    backup: "Backup | None",
    is_restart: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Decides what this command means for the folder; returns the checkpoint to go on from, None for a new run.

    `allowed` names the settings that may be others than the run's. After a restart, the run goes on in its own folder,
    whatever the command says about beginning. Only what a backup has and the folder has not is written; a new run's
    folder is made by `begin`.

    Raises:
        UserError: the folder holds another run or something else; the checkpoint is missing or damaged.
    """
    folder = RunFolder(arguments.output_dir)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"{folder.path} is a file; name another --output_dir.")
    # Names with a dot are a lock's, or of a restoring that was killed.
    empty = not folder.path.exists() or all(path.name.startswith(".") for path in folder.path.iterdir())
    if not empty and not folder.config.is_file():
        raise UserError(f"{folder.path} exists and is not a run folder; name another --output_dir.")
    has_begun = bool(checkpoints.all_checkpoints(folder.checkpoints))
    if is_restart and has_begun:
        return folder.newest_checkpoint(say)
    if arguments.resume_from_checkpoint is not None:
        source = Path(arguments.resume_from_checkpoint)
        branch = run_of(source).resolve() != folder.path.resolve()
        if branch and not empty and not arguments.overwrite_output_dir:
            raise UserError(f"{folder.path} holds another run; name a new --output_dir to branch off from {source}.")
        return _named_checkpoint(source, folder, None if branch else backup, say)
    if arguments.overwrite_output_dir:
        return None
    if has_begun:  # otherwise there is nothing to lose
        _refuse_another(folder.path, read_yaml(folder.config), settings, allowed)
    return _newest(folder, backup, settings, allowed, say)


def _newest(
    folder: RunFolder,
    backup: "Backup | None",
    settings: dict[str, Any] | None,
    allowed: set[str],
    say: Callable[[str], None],
) -> Path | None:
    """The newest checkpoint of the folder and its backup, which is copied here. `settings` (None: the run's own) must be
    those of the run in the backup."""
    try:
        here = folder.newest_checkpoint(say)
    except UserError:
        if backup is None or backup.newest(None) is None:
            raise
        here = None
    after = checkpoints.step_of(here) if here is not None else None
    if backup is None or backup.newest(after) is None:
        return here
    if settings is not None:
        _refuse_another(backup.there.path, backup.settings() or {}, settings, allowed)
    return backup.restore(after) or here


def _refuse_another(folder: Path, before: dict[str, Any], settings: dict[str, Any], allowed: set[str]) -> None:
    """
    Raises:
        UserError: the run in the folder has other settings, which are named.
    """
    changed = [
        f"{name} {before.get(name)} -> {value}"
        for name, value in settings.items()
        if name not in NOT_THE_RUN | allowed and str(before.get(name)) != str(value)
    ]
    if changed:
        raise UserError(
            f"{folder} holds another run ({', '.join(changed)}); name another --output_dir, go on with it by "
            f"--resume_from_checkpoint {folder}, or delete it by --overwrite_output_dir."
        )


def _named_checkpoint(source: Path, folder: RunFolder, backup: "Backup | None", say: Callable[[str], None]) -> Path:
    if not is_checkpoint(source):
        newest = _newest(RunFolder(run_of(source)), backup, None, set(), say)
        if newest is None:
            raise UserError(
                f"{source} has no complete checkpoint to resume from; start it anew with the first command."
            )
        return newest
    if not (source / checkpoints.MANIFEST).is_file():
        raise UserError(f"{source} was never finished (it has no {checkpoints.MANIFEST}); resume from another one.")
    if problem := checkpoints.damage(source):
        raise UserError(f"{source} is damaged: {problem}. Resume from another one.")
    newer = [path for path in checkpoints.complete_checkpoints(folder.checkpoints) if path.name > source.name]
    if newer and source.resolve().parent == folder.checkpoints.resolve():
        raise UserError(
            f"{folder.path} went on to {newer[-1].name} after {source.name}; name another --output_dir to branch off, "
            f"or delete the later checkpoints."
        )
    return source


def is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step_") and path.parent.name == "checkpoints"


def resume_source(arguments: list[str]) -> Path | None:
    """The run folder that `--resume_from_checkpoint` names, by itself or by one of its checkpoints.

    Raises:
        UserError: it is not there, or not a run folder.
    """
    named = None
    for position, argument in enumerate(arguments):
        if argument == "--resume_from_checkpoint" and position + 1 < len(arguments):
            named = arguments[position + 1]
        elif argument.startswith("--resume_from_checkpoint="):
            named = argument.split("=", 1)[1]
    if named is None:
        return None
    return run_of(Path(named))


def run_of(path: Path) -> Path:
    """The run folder that `path` is, or is a checkpoint or the model of.

    Raises:
        UserError: it is not there, or is none of these.
    """
    run = path
    if is_checkpoint(path):
        run = path.parent.parent
    elif path.name in ("model", "checkpoints") and not (path / CONFIG_FILE).is_file():
        run = path.parent
    if is_checkpoint(path) and run.is_dir() and not path.exists():
        there = ", ".join(found.name for found in checkpoints.complete_checkpoints(path.parent)) or "no checkpoint"
        raise UserError(f"There is no {path}; {run} has {there}.")
    if not path.exists() or not (run / CONFIG_FILE).is_file():
        raise UserError(f"{path} is not a run folder or a checkpoint in one: there is no {run / CONFIG_FILE}.")
    return run


def begin(folder: RunFolder, first_step: int, resume_from: Path | None) -> None:
    """Makes the folder ready: a new run finds nothing of an old one, a resumed run nothing of later steps.

    Raises:
        UserError: it cannot be written.
    """
    own = resume_from is not None and run_of(resume_from).resolve() == folder.path.resolve()
    try:
        checkpoints.sweep(folder.checkpoints)
        if own:
            if not folder.model.exists():  # killed while it was replaced
                checkpoints.copy_model(resume_from, folder.model)
            forget_after(folder.metrics, first_step)
            forget_samples_after(folder.samples, first_step)
        else:
            for inside in folder.contents:
                shutil.rmtree(inside) if inside.is_dir() else inside.unlink(missing_ok=True)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written ({error.strerror}); name another --output_dir.") from error


def forget_checkpoints_from(step: int, folder: RunFolder) -> None:
    """Removes those after `step` and more steps; the model of the last one that stays is the model to use."""
    complete = checkpoints.complete_checkpoints(folder.checkpoints)
    kept = [checkpoint for checkpoint in complete if checkpoints.step_of(checkpoint) < step]
    for checkpoint in complete[len(kept) :]:
        checkpoints.remove(checkpoint)
    if kept and len(kept) < len(complete):
        checkpoints.copy_model(kept[-1], folder.model)


def _refuse_links_of_index(model: Path) -> None:
    """
    Raises:
        UserError: the model's index names weights outside of its folder, which Transformers would load.
    """
    index = model / "model.safetensors.index.json"
    if index.is_file() and not (model / "model.safetensors").is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if outside := sorted(str(shard) for shard in shards if Path(str(shard)).name != shard):
            raise UserError(f"{index} names weights outside of {model} ({outside[0]}); such a model is not loaded.")


def find_model(name: str) -> str:
    """A loadable model for a run folder, a checkpoint, a model folder or a Hub id.

    Raises:
        UserError: the folder holds no model, or there is no such folder and it is no Hub id.
    """
    path = Path(name)
    for candidate in (path / "model", path, *reversed(checkpoints.complete_checkpoints(path / "checkpoints"))):
        if (candidate / "config.json").is_file():
            _refuse_links_of_index(candidate)
            return str(candidate)
    if path.exists():
        hint = " yet: its first checkpoint is still to come" if (path / CONFIG_FILE).is_file() else ""
        raise UserError(f"{name} holds no model{hint}.")
    if len(name.strip("/").split("/")) != 2 or name.startswith((".", "/", "runs/")):
        raise UserError(f"{name} is neither a folder here nor a Hub id (user/name).")
    return name
