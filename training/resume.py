"""Which checkpoint a command goes on from: none, the run's newest, its backup's, or one that is named."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import read_yaml
from errors import UserError
from training import checkpoint as checkpoints
from training.backup import Backup
from training.compatibility import NOT_THE_RUN
from training.run_folder import CONFIG_FILE, RunArguments, RunFolder, is_checkpoint, may_hold_run, run_of
from training.status import check_run_format


@dataclass(frozen=True)
class Settings:
    """The settings of a command."""

    values: dict[str, Any]
    defaults: dict[str, Any]
    may_change: set[str]

    def differences(self, before: dict[str, Any]) -> list[str]:
        """Compare with the config.yaml of a run. A setting that an older version did not know had its default."""
        before = self.defaults | before
        return [
            f"{name} {before.get(name)} -> {value}"
            for name, value in self.values.items()
            if name not in NOT_THE_RUN | self.may_change and str(before.get(name)) != str(value)
        ]


def choose_checkpoint(
    arguments: RunArguments,
    settings: Settings,
    backup: Backup | None,
    is_restart: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Decides what this command means for the folder; returns the checkpoint to go on from, None for a new run.

    After a restart, the run goes on in its own folder, whatever the command says about beginning. Only what a backup has and
    the folder has not is written.

    Raises:
        UserError: the folder holds another run or something else; the checkpoint is missing or damaged.
    """
    folder = RunFolder(arguments.output_dir)
    if not may_hold_run(folder):
        raise UserError(f"{folder.path} exists and is not a run folder; name another --output_dir.")
    check_run_format(folder.status)
    has_begun = bool(checkpoints.all_checkpoints(folder.checkpoints))
    if is_restart:  # what the backup has beyond the folder was taken back
        backup = None
        if has_begun:
            return folder.newest_checkpoint(say)
    if arguments.resume_from_checkpoint is not None:
        source = Path(arguments.resume_from_checkpoint)
        branch = run_of(source).resolve() != folder.path.resolve()
        if branch and has_begun and not arguments.overwrite_output_dir:  # the same command again, or another
            _refuse_another(folder.path, read_yaml(folder.config), settings)
            return _newest(folder, backup, settings, say)
        return _named_checkpoint(source, folder, None if branch else backup, say)
    if arguments.overwrite_output_dir:
        return None
    if has_begun:
        _refuse_another(folder.path, read_yaml(run_of(folder.path) / CONFIG_FILE), settings)
    return _newest(folder, backup, settings, say)


def refuse_lost_checkpoints(arguments: RunArguments, checkpoint: Path | None) -> None:
    """Keep the model of a run whose checkpoints were deleted: a command that does not resume it would replace it.

    Raises:
        UserError: the run folder holds such a model, and the command does not overwrite it.
    """
    folder = RunFolder(arguments.output_dir)
    is_new = checkpoint is None or run_of(checkpoint).resolve() != folder.path.resolve()
    if is_new and (folder.model / checkpoints.WEIGHTS).exists() and not arguments.overwrite_output_dir:
        raise UserError(
            f"{folder.path} holds a model and no checkpoint that this command can resume from; name another --output_dir, or "
            f"delete the model by --overwrite_output_dir."
        )


def _newest(
    folder: RunFolder,
    backup: Backup | None,
    settings: Settings | None,
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
        _refuse_another(backup.there.path, backup.settings() or {}, settings)
    restored = backup.restore(after)
    if restored is not None:
        say(f"Backup:  {restored.name} is brought back from {backup.there.path}")
    return restored or here


def _refuse_another(folder: Path, before: dict[str, Any], settings: Settings) -> None:
    """Raise a `UserError` that names the settings in which the run in the folder differs."""
    if changed := settings.differences(before):
        raise UserError(
            f"{folder} holds another run ({', '.join(changed)}); name another --output_dir, go on with it by "
            f"--resume_from_checkpoint {folder}, or delete it by --overwrite_output_dir."
        )


def _named_checkpoint(source: Path, folder: RunFolder, backup: Backup | None, say: Callable[[str], None]) -> Path:
    if not is_checkpoint(source):
        newest = _newest(RunFolder(run_of(source)), backup, None, say)
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
