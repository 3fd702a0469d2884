"""Starting point of a command: the first step, the newest checkpoint of run or backup, or a named checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from common.errors import Problems, UserError
from common.settings_file import read_yaml
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.backup import Backup
from training.checkpoints.checkpoint import TrainState
from training.checkpoints.metrics import read_events
from training.checkpoints.run_folder import CONFIG_FILE, RunArguments, RunFolder, is_checkpoint, put_back, run_of
from training.checkpoints.status import check_run_format
from training.data.batches import START, DataPosition
from training.plan.compatibility import RunSettings
from training.runtime.console import say
from training.runtime.restart import restarted


@dataclass(frozen=True)
class ResumePoint:
    """Starting point of a run: its first step, or a checkpoint."""

    checkpoint: Path | None
    state: TrainState  # state at the start: position, settings, last losses
    changes: list[str]  # one sentence per setting that differs from the checkpoint's
    owes_validation: bool = False  # the run ended between a checkpoint and its validation, or has pretrained weights
    initializer: Callable[[nn.Module], None] | None = None  # writes the weights of step 0; None: random weights

    @property
    def step(self) -> int:
        return self.state.position.step


def resume_position(state: TrainState | None, data: str) -> DataPosition:
    """Return the position in the data to start from. If the data changed, start at the beginning of the new data. A
    restart skips further ranges of samples, in addition to those of the checkpoint."""
    position = state.position if state is not None else START
    if state is not None and state.settings.get("data") != data:
        position = replace(position, sample=0, passed_over=())
    passed_over = {*position.passed_over, *map(tuple, restarted().get("passed_over", ()))}
    return replace(position, passed_over=tuple(sorted(passed_over)))


def choose_checkpoint(arguments: RunArguments, settings: RunSettings, backup: Backup | None) -> Path | None:
    """Return the checkpoint that this command resumes from, or None for a new run. Called by the main process.
    Raise a `UserError` if the command would replace another run, or if a checkpoint is missing or damaged.
    After a restart, the run resumes in its own folder, even if the command asks for a new run. The only files written
    are those that the backup has and the folder lacks, and those of a run that was replaced in vain."""
    folder, overwrites = arguments.folder, arguments.overwrite_output_dir
    check_run_format(folder.status)
    if restarted().get("has_begun"):  # newer checkpoints of the backup were rolled back
        backup = None
        if checkpoints.all_checkpoints(folder.checkpoints):
            return folder.newest_checkpoint(say)
    source = Path(checkpoint_name) if (checkpoint_name := arguments.resume_from_checkpoint) is not None else None
    is_branch = source is not None and run_of(source).resolve() != folder.path.resolve()
    if source is None or is_branch:
        put_back(folder)
    has_begun = bool(checkpoints.all_checkpoints(folder.checkpoints))
    is_backup = backup is not None and is_branch and run_of(source).resolve() == backup.there.path.resolve()
    is_newest = is_backup and is_checkpoint(source) and folder.newest_step() == checkpoints.step_of(source)
    is_copied = is_newest and backup.holds_this_run()  # by an earlier command
    is_restored = is_backup and not overwrites and (not has_begun or is_copied)
    if source is not None and (overwrites or not is_branch or (is_restored and is_checkpoint(source))):
        checkpoint = _named_checkpoint(source, folder, None if is_branch else backup, settings)
        if is_restored:
            checkpoint = backup.fetch(checkpoint)
    elif overwrites:
        checkpoint = None
    else:
        first_step = checkpoints.step_of(source) if is_branch and not is_backup and is_checkpoint(source) else None
        if has_begun:
            _refuse_another(folder, read_yaml(run_of(folder.path) / CONFIG_FILE), settings, first_step)
        checkpoint = _newest(folder, backup, None if is_restored else settings, first_step)
        if checkpoint is None and source is not None:  # neither the folder nor its backup has begun
            checkpoint = _named_checkpoint(source, folder, None, None)
    if not (folder.owns(checkpoint) or overwrites) and (folder.model / checkpoints.WEIGHTS).exists():
        raise UserError(
            f"{folder.path} contains a model, but no checkpoint that this command can resume from; use another "
            "--output_dir, or delete the model with --overwrite_output_dir."
        )
    return checkpoint


def _newest(
    folder: RunFolder, backup: Backup | None, settings: RunSettings | None, first_step: int | None = None
) -> Path | None:
    """Return the newest checkpoint of the folder and its backup. A newer one in the backup is copied to the folder
    first. `settings` and `first_step` (None: the run's own) must match those of the run in the backup."""
    problems = Problems()
    checkpoint = problems.add_of(folder.newest_checkpoint, say)
    if backup is not None:
        step = checkpoints.step_of(checkpoint) if checkpoint is not None else -1
        copy = backup.restore(step, lambda values: _refuse_another(backup.there, values, settings, first_step))
        checkpoint = copy or checkpoint
    if checkpoint is None:
        problems.refuse()
    return checkpoint


def _refuse_another(
    run: RunFolder, settings_of_run: dict[str, Any], settings: RunSettings | None, first_step: int | None
) -> None:
    """Raise a `UserError` that names the settings of the run that differ, or the step at which it branched off."""
    changes = settings.differences(settings_of_run) if settings is not None else []
    events = read_events(run.events) if first_step is not None else []
    starts = [event["step"] for event in events if event.get("event") in ("begun", "resumed")]
    if starts[:1] not in ([], [first_step]):
        changes.append(f"first step {starts[0]} -> {first_step}")
    if changes:
        raise UserError(
            f"{run.path} contains another run ({', '.join(changes)}); use another --output_dir, resume that run with "
            f"--resume_from_checkpoint {quote(str(run.path))}, or delete it with --overwrite_output_dir."
        )


def _named_checkpoint(source: Path, folder: RunFolder, backup: Backup | None, settings: RunSettings | None) -> Path:
    """Return the checkpoint that the user named, or the newest of the run. A run in the backup that did not start as
    the one in the folder must have its `settings`: it may be one that this run replaced."""
    if not is_checkpoint(source):
        run, is_same = RunFolder(run_of(source)), backup is None or backup.holds_this_run()
        newest = _newest(run, backup, None if is_same else settings)
        if newest is None:
            raise UserError(f"{source} cannot be resumed ({run.last_good()}); start it again with its first command.")
        return newest
    if problem := checkpoints.damage(source):
        raise UserError(f"{source} is damaged: {problem}. Resume from another checkpoint.")
    newer = [path for path in checkpoints.complete_checkpoints(folder.checkpoints) if path.name > source.name]
    if newer and source.resolve().parent == folder.checkpoints.resolve():
        raise UserError(
            f"{folder.path} already continued from {source.name} to {newer[-1].name}; use another --output_dir to "
            "branch off, or delete the later checkpoints."
        )
    return source
