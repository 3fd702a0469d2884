"""Where a command starts: at the first step, or after the run's newest checkpoint, its backup's, or a named one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from errors import UserError
from settings_file import read_yaml
from training import checkpoint as checkpoints
from training.backup import Backup
from training.batches import START, DataPosition
from training.checkpoint import TrainState
from training.compatibility import Settings
from training.run_folder import CONFIG_FILE, RunArguments, RunFolder, is_checkpoint, run_of
from training.status import check_run_format


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts: at its first step, or after a checkpoint."""

    checkpoint: Path | None
    state: TrainState  # at the start: position, settings, last losses
    changes: list[str]  # settings that differ from now on, a sentence each
    owes_validation: bool = False  # the run ended between a checkpoint and its validation

    @property
    def step(self) -> int:
        return self.state.position.step

    def is_own(self, folder: RunFolder) -> bool:
        """Whether the checkpoint is the run's own, and not that of a run that this one branches off from."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == folder.checkpoints.resolve()


def resume_position(state: TrainState | None, data: str, passed_over: Iterable[Sequence[int]]) -> DataPosition:
    """Return the position in the data to start from. Data with another identity than before are read from their beginning.

    `passed_over`: ranges of samples that a restart skips in addition to those of the checkpoint.
    """
    position = state.position if state is not None else START
    if state is not None and state.settings.get("data") != data:
        position = replace(position, sample=0, passed_over=())
    return replace(position, passed_over=tuple(sorted({*position.passed_over, *map(tuple, passed_over)})))


def choose_checkpoint(
    arguments: RunArguments, settings: Settings, backup: Backup | None, is_restart: bool, say: Callable[[str], None]
) -> Path | None:
    """Decide what this command means for the folder; return the checkpoint to go on from, None for a new run. Raise a
    `UserError` where it would replace another run, or where a checkpoint is missing or damaged.

    After a restart, the run goes on in its own folder, whatever the command says about beginning. Only what a backup has and
    the folder has not is written.
    """
    folder, overwrites = arguments.folder, arguments.overwrite_output_dir
    check_run_format(folder.status)
    has_begun = bool(checkpoints.all_checkpoints(folder.checkpoints))
    if is_restart:  # what the backup has beyond the folder was taken back
        backup = None
        if has_begun:
            return folder.newest_checkpoint(say)
    source = Path(named) if (named := arguments.resume_from_checkpoint) is not None else None
    is_branch = source is not None and run_of(source).resolve() != folder.path.resolve()
    if source is not None and not (is_branch and has_begun and not overwrites):
        checkpoint = _named_checkpoint(source, folder, None if is_branch else backup, say)
    elif overwrites:
        checkpoint = None
    else:  # also the command that branched off, given again
        if has_begun:
            _refuse_another(folder.path, read_yaml(run_of(folder.path) / CONFIG_FILE), settings)
        checkpoint = _newest(folder, backup, settings, say)
    is_own = checkpoint is not None and checkpoint.parent.resolve() == folder.checkpoints.resolve()
    if not (is_own or overwrites) and (folder.model / checkpoints.WEIGHTS).exists():
        raise UserError(
            f"{folder.path} holds a model and no checkpoint that this command can resume from; name another --output_dir, or "
            f"delete the model by --overwrite_output_dir."
        )
    return checkpoint


def _newest(
    folder: RunFolder, backup: Backup | None, settings: Settings | None, say: Callable[[str], None]
) -> Path | None:
    """The newest checkpoint of the folder and its backup, which is copied here. `settings` (None: the run's own) must be
    those of the run in the backup."""
    checkpoint = failure = None
    try:
        checkpoint = folder.newest_checkpoint(say)
    except UserError as error:
        failure = error
    if backup is not None:
        step = checkpoints.step_of(checkpoint) if checkpoint is not None else -1
        checkpoint = (
            backup.restore(step, lambda found: _refuse_another(backup.there.path, found, settings)) or checkpoint
        )
    if checkpoint is None and failure is not None:
        raise failure
    return checkpoint


def _refuse_another(folder: Path, before: dict[str, Any], settings: Settings | None) -> None:
    """Raise a `UserError` that names the settings in which the run in the folder differs."""
    if settings is not None and (changed := settings.differences(before)):
        raise UserError(
            f"{folder} holds another run ({', '.join(changed)}); name another --output_dir, go on with it by "
            f"--resume_from_checkpoint {folder}, or delete it by --overwrite_output_dir."
        )


def _named_checkpoint(source: Path, folder: RunFolder, backup: Backup | None, say: Callable[[str], None]) -> Path:
    if not is_checkpoint(source):
        newest = _newest(RunFolder(run_of(source)), backup, None, say)
        if newest is None:
            raise UserError(
                f"{source} has no complete checkpoint to resume from; start it again with the first command."
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
