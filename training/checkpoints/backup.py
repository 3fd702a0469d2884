"""Backup of checkpoints to `--backup_dir`, on a drive that may be slow, full or disconnected at any time.

    BACKUP_DIR/x/        a run folder like runs/x, without its model/
        checkpoints/     each copied by a thread while training continues, and complete or absent

The drive never stops the training: an error is reported once, and the copy is retried. At the next start, the same
command restores checkpoints that exist only on the drive. A copy is checked against the manifest's hash while it is
read, and by size after it is written: reading it back would take a slow drive as long as writing. Loading checks the
hashes again.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from threading import Event, Lock, Thread
from typing import Any

from common.atomic import copy_file, unfinished_path
from common.errors import UserError
from common.limits import free
from common.removal import discard, mark
from common.settings_file import read_yaml
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.checkpoint import DamageError, complete_checkpoints, is_linked, listed_files, step_of
from training.checkpoints.metrics import read_events, read_metrics
from training.checkpoints.run_folder import RunArguments, RunFolder, may_hold_run
from training.checkpoints.status import record
from training.runtime.console import clock
from training.runtime.restart import restarted

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between attempts
LONGEST_WAIT = 600.0  # seconds that the end of a run waits for the drive
SHORT_WAIT = 15.0  # the same after an error, with several processes: their launcher allows 30 in total


@dataclass
class BackupArguments:
    backup_dir: str | None = free(
        None,
        "An existing folder on another drive. Checkpoints are copied to it during training; if the run's own folder is "
        "lost, the run resumes from it.",
        type=os.path.expanduser,
    )

    def problems(self, output_dir: str | Path) -> Iterator[str]:
        if self.backup_dir is None:
            return
        run, backup = Path(output_dir).resolve(), _backup_folder(self.backup_dir, output_dir).resolve()
        if run == backup or run in backup.parents:
            yield (
                f"backup_dir {self.backup_dir} puts the backup into the run's own folder; name a folder on another "
                "drive, or, to restore a run from its backup, add --output_dir with the folder of the run."
            )
            return
        with suppress(OSError):  # an unreadable drive is reported when the run looks for its backup
            if backup.parent.exists() and not backup.parent.is_dir():
                yield f"backup_dir is {self.backup_dir}, which is a file; name a folder on another drive."
            elif not may_hold_run(RunFolder(backup)):
                yield f"{backup} exists and is not a backup of a run; choose another --backup_dir or --output_dir."


class Backup:
    """Copy of a run's newest checkpoint and logs on another drive.
    Only the main process uses it: to restore the run before it starts, and during training."""

    def __init__(self, backup_dir: str | Path, run: RunFolder, limit: int | None, say: Callable[[str], None]):
        """`limit` is the number of newest checkpoints to keep. `say` is also called from another thread."""
        self.run, self.there = run, RunFolder(_backup_folder(backup_dir, run.path))
        self.limit, self.say = limit, say
        self.first_step = 0
        self.may_replace = False
        self.is_made = False  # true once the backup folder exists
        self.submitted: set[str] = set()  # names of checkpoints that this process copied or started to copy
        self.copying: Path | None = None  # this checkpoint must not be deleted
        self.copied: str | None = None  # the newest checkpoint of this run in the backup
        self.problem: str | None = None  # the last error of the drive, until an attempt succeeds
        self._updating, self._wake, self._is_closing = Lock(), Event(), False
        self._thread: Thread | None = None

    def restore(self, last_step: int, check: Callable[[dict[str, Any]], None]) -> Path | None:
        """Copy the newest intact checkpoint after step `last_step` from the drive into the run folder, and return the
        copy. Copy the logs and settings of the backup too. A damaged checkpoint is reported, and the previous one is
        tried. `check` is called with the settings first. An unreadable drive is reported and counts as empty. Raise a
        `UserError` if the drive or the run's own disk fails during the copy, or if no checkpoint is intact."""
        backup = self.there
        try:
            os.stat(backup.path.parent)
            later_checkpoints = [path for path in complete_checkpoints(backup.checkpoints) if step_of(path) > last_step]
            has_settings = backup.config.is_file() and not is_linked(backup.config, backup.path)
            settings = read_yaml(backup.config) if later_checkpoints and has_settings else {}
            is_replaced = last_step >= 0 and _has_replaced(self.run, backup)
        except OSError as error:
            self.say(
                f"WARNING: {backup.path} (--backup_dir) cannot be read ({_reason(error)}): is its drive mounted? "
                "Nothing is restored from it, and nothing is backed up until it is available."
            )
            return None
        if not later_checkpoints:
            return None
        if is_replaced:
            self.say(
                f"WARNING: {backup.path} is the backup of a run that {self.run.path} replaced, so nothing is restored "
                "from it."
            )
            return None
        check(settings)
        self.may_replace = True
        for checkpoint in reversed(later_checkpoints):
            try:
                return self.fetch(checkpoint)
            except DamageError as damage:
                self.say(f"WARNING: {checkpoint} is damaged: {damage}.")
        if last_step < 0:
            raise UserError(
                f"All checkpoints in {backup.checkpoints} are damaged; wait until they are uploaded, or start from "
                f"their weights with --init_from {quote(str(later_checkpoints[-1]))} and another --output_dir, or "
                "replace the run with --overwrite_output_dir."
            )
        return None

    def holds_this_run(self) -> bool:
        """Return whether the run in the backup started as the one in the folder did, as far as can be read."""
        try:
            return read_events(self.run.events)[:1] == read_events(self.there.events)[:1]
        except OSError:  # `restore` reports it
            return True

    def fetch(self, checkpoint: Path) -> Path:
        """Copy a checkpoint of the backup, its logs (unless the run's own reach that step) and the best earlier
        checkpoint into the run folder. Return the copy. Raise a `DamageError`, or a `UserError` if the drive or the
        run's own disk fails."""
        copy = self.run.checkpoints / checkpoint.name
        try:
            if is_linked(checkpoint / checkpoints.MANIFEST, self.there.path):
                raise DamageError(f"it is a link to a path outside {self.there.path}")
            listed_files(checkpoint)
            mark(self.run.path, "run")
            entries = read_metrics(self.run.metrics)
            if not entries or entries[-1]["step"] < step_of(checkpoint):
                _copy_files(self.there, self.run)
            self.run.checkpoints.mkdir(exist_ok=True)
            checkpoints.copy(checkpoint, copy)
            self._restore_best(step_of(checkpoint))
        except DamageError:  # an OSError, too
            raise
        except OSError as error:
            other = f", or remove backup_dir (flag, or line in config.yaml) to resume from the files in {self.run.path}"
            raise UserError(
                f"{self.run.path} could not be restored from {self.there.path} ({_reason(error)}): fix that and run "
                f"the same command again{other if complete_checkpoints(self.run.checkpoints) else ''}."
            ) from error
        self.say(f"Backup:  {checkpoint.name} is restored from {self.there.path}")
        return copy

    def begin(self, first_step: int, may_replace: bool) -> None:
        """Start the backup of a run from `first_step`. With `may_replace`, the user allowed deleting later steps.
        Otherwise, unless `restore` has seen them, later steps are kept, and nothing is copied until they are deleted:
        the drive may have been disconnected when the run started, and hold days of work."""
        self.first_step = first_step
        self.may_replace |= may_replace

    def submit(self) -> None:
        """Request a copy of the newest checkpoint from the backup thread, without waiting for it."""
        self._wake.set()
        if self._thread is None:
            self._thread = Thread(target=self._work, name="backup", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        is_last, pause = False, None
        while not is_last:
            self._wake.wait(pause)
            self._wake.clear()
            is_last = self._is_closing
            self.update()
            pause = None if self.problem is None else min(2 * (pause or FIRST_PAUSE / 2), LONGEST_PAUSE)

    def finish(self, seconds: float = LONGEST_WAIT) -> None:
        """Copy the newest checkpoint and the logs, and wait at most `seconds`. An unavailable drive is tried once."""
        self._is_closing = True
        self.submit()
        self._thread.join(1.0)  # usually enough, so that no waiting has to be reported
        if self._thread.is_alive():
            self.say(f"Backup:  waiting for {self.there.path}, at most {clock(seconds)} (Ctrl-C twice ends it)")
            self._thread.join(seconds)
        if problem := "the drive is too slow" if self._thread.is_alive() else self.problem:
            record(self.run.events, "backup_failed", self.run.newest_step(), because=problem)
            self.say(
                f"WARNING: The backup in {self.there.path} is incomplete ({problem}); copy {self.run.path} there "
                "yourself."
            )
        elif self.copied:
            self.say(f"Backup:  {self.copied} is in {self.there.path}")

    def update(self) -> None:
        """Copy the run's logs and its newest checkpoint to the drive, and delete checkpoints of later steps there.
        Report when the drive fails and when it is available again."""
        with self._updating:  # a rollback updates the backup, too, in the main thread
            self.copying = next(reversed(complete_checkpoints(self.run.checkpoints)), None)
            if self.copying is None:
                return
            name = self.copying.name
            try:
                self._copy(self.copying)
            except OSError as error:
                if self.problem is None:
                    record(self.run.events, "backup_failed", step_of(self.copying), because=_reason(error))
                    self.say(
                        f"WARNING: {name} could not be copied to {self.there.path} ({_reason(error)}). Training "
                        "continues, and the copy will be retried."
                    )
                self.problem = _reason(error)
                return
            if self.problem is not None:
                self.say(f"Backup:  {self.there.path} is available again, and {name} is in it")
            self.problem, self.copying, self.copied = None, None, name

    def _restore_best(self, step: int) -> None:
        """Restore the best checkpoint before `step`, too, if it is not damaged: it may become the run's model."""
        best = checkpoints.best_checkpoint(self.there.checkpoints, self.run.metrics, until=step)
        if best is not None and not (self.run.checkpoints / best.name).exists():
            with suppress(DamageError):
                checkpoints.copy(best, self.run.checkpoints / best.name)

    def _copy(self, checkpoint: Path) -> None:
        backup = self.there.checkpoints
        if not (self.is_made or may_hold_run(self.there)):
            raise OSError("it is not a backup of a run; choose another --backup_dir")
        is_other = complete_checkpoints(backup) and read_events(self.there.events) and not self.holds_this_run()
        if is_other and not self.may_replace:  # each time: two runs may have begun it together
            raise OSError(
                "it is the backup of another run; move that folder away, or choose another --backup_dir or --output_dir"
            )
        if not self.is_made:  # created only once: if it is missing later, the drive is gone; keep its mount point empty
            self.there.path.mkdir(exist_ok=True)
            mark(self.there.path, "run")
            self.is_made = True
        backup.mkdir(exist_ok=True)
        later_checkpoints = [path for path in complete_checkpoints(backup) if step_of(path) > self.first_step]
        unknown = [path for path in later_checkpoints if path.name not in self.submitted]
        if unknown and not self.may_replace:
            raise OSError(
                f"it holds {unknown[-1].name}, which this run did not resume from and does not replace; run the "
                "command again to resume from it, or delete it"
            )
        for path in unknown:  # first: next to the new settings, it would look like the run's own
            discard(path, checkpoints.FILES)
        _copy_files(self.run, self.there)  # before the checkpoint is complete, so that the log always reaches its step
        self._copy_checkpoint(checkpoint)
        _copy_files(self.run, self.there)  # again: the copy takes long, and this step may have been validated meanwhile
        for path in later_checkpoints:
            if step_of(path) > step_of(checkpoint):  # rolled back
                discard(path, checkpoints.FILES)
        self.may_replace = False
        checkpoints.sweep(backup)
        checkpoints.prune(backup, self.limit, self.run.metrics)
        best = checkpoints.best_checkpoint(self.run.checkpoints, self.run.metrics)
        if best is not None:  # it may be older than the backup
            with suppress(DamageError, FileNotFoundError):  # damaged, or deleted meanwhile
                self._copy_checkpoint(best)

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        self.submitted.add(checkpoint.name)
        target = self.there.checkpoints / checkpoint.name
        with suppress(FileNotFoundError, DamageError):  # checks only the manifest and the sizes
            if listed_files(target) == listed_files(checkpoint):
                return
        checkpoints.copy(checkpoint, target)


def _copy_files(source: RunFolder, target: RunFolder) -> None:
    """Copy settings and logs, except links to a path outside."""
    for file, copy in zip(source.files, target.files, strict=True):
        if file.is_file() and not is_linked(file, source.path):
            with unfinished_path(copy) as partial:
                copy_file(file, partial)


def _has_replaced(run: RunFolder, backup: RunFolder) -> bool:
    """Return whether the run began with --overwrite_output_dir, after that of its backup."""
    start, earlier = (read_events(folder.events)[:1] for folder in (run, backup))
    return start not in ([], earlier) and start[0].get("replaces", False)


def earlier_run(arguments: RunArguments, backup_dir: str | None) -> RunFolder | None:
    """Return the folder of the run, or that of its backup if this has a newer checkpoint or the run has not begun, or
    None if neither has settings, or if the command will replace them. After a restart, it is the run's own."""
    is_restart = restarted().get("has_begun")
    if arguments.overwrite_output_dir and not is_restart:
        return None
    run, steps = arguments.folder, {}
    has_backup = backup_dir is not None and not is_restart
    for folder in [run, *([RunFolder(_backup_folder(backup_dir, run.path))] if has_backup else [])]:
        with suppress(OSError):  # the drive of the backup may be gone
            if folder.config.is_file() and folder.is_run() and not (steps.get(run) and _has_replaced(run, folder)):
                steps[folder] = folder.newest_step()
    return max(steps, key=steps.get, default=None)


def _backup_folder(backup_dir: str | Path, output_dir: str | Path) -> Path:
    return Path(backup_dir) / os.path.basename(os.path.abspath(output_dir))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
