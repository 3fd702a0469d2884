"""A second home for checkpoints: `--backup_dir`, on a drive that may be slow, full or gone at any moment.

    BACKUP_DIR/x/        a run folder like runs/x, without its model/
        checkpoints/     each copied by a thread while training goes on; there whole or not at all

The drive never stops the training: what it refuses is reported once and tried again. At the next start the same command brings
back what the drive has and the run folder has not. What is copied is checked against the manifest as it is read, and by its
size once it is written: reading it again would take a slow drive as long as writing it. Loading hashes it again.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from atomic import copy_file, unfinished_path
from errors import UserError
from limits import setting
from removal import discard, mark
from settings_file import read_yaml
from training import checkpoint as checkpoints
from training.checkpoint import FILES, MANIFEST, DamageError, complete_checkpoints, is_linked, listed_files, step_of
from training.console import clock
from training.metrics import best_step, read_metrics
from training.run_folder import RunFolder, may_hold_run

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between attempts


@dataclass
class BackupArguments:
    backup_dir: str | None = setting(
        None,
        "An existing folder on another drive that checkpoints are copied to while training goes on, and that a run "
        "whose own folder is lost resumes from.",
        resume="free",
    )

    def problems(self, output_dir: str | Path) -> list[str]:
        if self.backup_dir is None:
            return []
        run, there = Path(output_dir).resolve(), _folder_there(self.backup_dir, output_dir).resolve()
        if run == there or run in there.parents:
            return [f"backup_dir is {self.backup_dir}, where the run itself is; name a folder on another drive."]
        if there.parent.exists() and not there.parent.is_dir():
            return [f"backup_dir is {self.backup_dir}, which is a file; name a folder on another drive."]
        with suppress(OSError):  # a drive that cannot be read is reported when the run looks for its backup
            if not may_hold_run(RunFolder(there)):
                return [f"{there} exists and is not a backup of a run; name another --backup_dir or --output_dir."]
        return []


class Backup:
    """Mirror of a run's newest checkpoint and its logs. Used by the main process alone: `restore` before the run begins, the
    rest while it trains."""

    def __init__(
        self, backup_dir: str | Path, run: RunFolder, save_total_limit: int | None, say: Callable[[str], None]
    ):
        """`say` is called by another thread too."""
        self.run, self.there = run, RunFolder(_folder_there(backup_dir, run.path))
        self.limit, self.say = save_total_limit, say
        self.first_step = 0
        self.may_replace = False
        self.is_made = False  # the folder there
        self.submitted: set[str] = set()  # names of checkpoints that this process copied or began to copy
        self.damaged: set[Path] = set()  # checkpoints of the run
        self.copying: Path | None = None  # must not be removed
        self.copied: str | None = None  # the newest checkpoint of this run that is there
        self.problem: str | None = None  # the last error of the drive, until an attempt succeeds
        self._updating, self._wake = Lock(), Event()
        self._is_closing = False
        self._thread: Thread | None = None

    def restore(self, after: int, check: Callable[[dict[str, Any]], None]) -> Path | None:
        """Copy the newest sound checkpoint that the drive has beyond step `after` into the run folder, with the logs and
        settings of the run there; return the copy. A damaged one is reported and passed over for the one before.

        `check` is called with the settings first. A drive that cannot be read is reported, and has nothing; a `UserError` is
        raised where it, or the run's own disk, fails while they are copied.
        """
        there = self.there
        try:
            os.stat(there.path.parent)
            later = [path for path in complete_checkpoints(there.checkpoints) if step_of(path) > after]
            has_settings = there.config.is_file() and not is_linked(there.config, there.path)
            settings = read_yaml(there.config) if later and has_settings else {}
        except OSError as error:
            self.say(
                f"WARNING: {there.path} (--backup_dir) cannot be read ({_reason(error)}): is its drive mounted? Nothing is "
                f"brought back from it, and nothing is backed up until it is there."
            )
            return None
        if not later:
            return None
        check(settings)
        self.may_replace = True
        try:
            for checkpoint in reversed(later):
                try:
                    if is_linked(checkpoint / MANIFEST, there.path):
                        raise DamageError(f"it is a link out of {there.path}")
                    listed_files(checkpoint)
                    self._bring_files(step_of(checkpoint))
                    self.run.checkpoints.mkdir(exist_ok=True)
                    checkpoints.copy(checkpoint, self.run.checkpoints / checkpoint.name)
                    self.say(f"Backup:  {checkpoint.name} is brought back from {there.path}")
                    return self.run.checkpoints / checkpoint.name
                except DamageError as damage:
                    self.say(f"WARNING: {checkpoint} is damaged: {damage}. Falling back to the one before.")
        except OSError as error:
            raise UserError(
                f"{self.run.path} could not be restored from {there.path} ({_reason(error)}). Correct that, and the same "
                f"command restores it; without --backup_dir it resumes from what is in {self.run.path}."
            ) from error
        return None

    def _bring_files(self, step: int) -> None:
        """Copy the logs and settings of the backup. A log that reaches `step` is not replaced."""
        mark(self.run.path, "run")
        logged = read_metrics(self.run.metrics)
        is_older = not logged or logged[-1]["step"] < step
        for theirs, ours in zip(self.there.files, self.run.files, strict=True):
            is_wanted = not ours.exists() or (is_older and ours != self.run.config)
            if is_wanted and theirs.is_file() and not is_linked(theirs, self.there.path):
                with unfinished_path(ours) as unfinished:
                    copy_file(theirs, unfinished)

    def begin(self, first_step: int, may_replace: bool) -> None:
        """The run starts after `first_step`. `may_replace`: the user said that what the drive holds of later steps may go.

        Otherwise, unless `restore` has seen them, later steps are left alone, and nothing is copied until they are gone: the
        drive may have been away when the run began, and come back with days of work.
        """
        self.first_step = first_step
        self.may_replace |= may_replace

    def submit(self) -> None:
        """Have the run's newest checkpoint copied by a thread; return at once."""
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

    def finish(self, timeout: float = 600.0) -> None:
        """Waits at most `timeout` seconds for what is not yet copied; a drive that is gone is tried once more."""
        if self._thread is None:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join(min(1.0, timeout))  # as a rule there is nothing to wait for, and to report
        if self._thread.is_alive():
            self._report(f"Backup:  waiting for {self.there.path}, {clock(timeout)} at most ...")
            self._thread.join(timeout)
        if problem := "the drive is too slow" if self._thread.is_alive() else self.problem:
            self._report(
                f"WARNING: {self.there.path} does not hold all of the run ({problem}); copy {self.run.path} there yourself."
            )
        elif self.copied:
            self._report(f"Backup:  {self.copied} is in {self.there.path}")

    def update(self) -> None:
        """Make the drive hold the run's logs, its newest checkpoint that is not damaged, and none of later steps. Report a
        drive that fails or is back."""
        with self._updating:
            own = (path for path in complete_checkpoints(self.run.checkpoints) if path not in self.damaged)
            checkpoint = self.copying = max(own, key=step_of, default=None)
            if checkpoint is None:
                return
            try:
                self._copy(checkpoint)
            except OSError as error:
                if not (checkpoint / MANIFEST).is_file():
                    self._wake.set()  # removed before it was protected: a newer one is there
                elif isinstance(error, DamageError):
                    self.damaged.add(checkpoint)
                    self._report(f"WARNING: {checkpoint} is damaged: {error}. It is not backed up.")
                    self._wake.set()
                else:
                    if self.problem is None:
                        self._report(
                            f"WARNING: {checkpoint.name} could not be copied to {self.there.path} ({_reason(error)}). Training "
                            f"continues, and copying is tried again."
                        )
                    self.problem = _reason(error)
                return
            if self.problem is not None:
                self._report(f"Backup:  {self.there.path} is back, and {checkpoint.name} is in it")
            self.problem, self.copying, self.copied = None, None, checkpoint.name

    def _copy(self, checkpoint: Path) -> None:
        there = self.there.checkpoints
        if not self.is_made:  # made once; missing later, the drive is gone, and its mount point is not filled instead
            if not may_hold_run(self.there):
                raise OSError("it is not a backup of a run; name another --backup_dir")
            self.there.path.mkdir(exist_ok=True)
            mark(self.there.path, "run")
            self.is_made = True
        there.mkdir(exist_ok=True)
        later = [path for path in complete_checkpoints(there) if step_of(path) > self.first_step]
        unknown = [path for path in later if path.name not in self.submitted]
        if unknown and not self.may_replace:
            raise OSError(
                f"it holds {unknown[-1].name}, which this run did not go on from, and which is left alone; start again to "
                f"go on from it, or delete it"
            )
        self.submitted.add(checkpoint.name)
        self._copy_files()  # before the checkpoint counts, so that the log always reaches it
        copied, is_there = there / checkpoint.name, False
        with suppress(FileNotFoundError, DamageError):  # as far as manifest and sizes tell
            is_there = (copied / MANIFEST).read_bytes() == (checkpoint / MANIFEST).read_bytes() and listed_files(
                copied
            ) != {}
        if not is_there:
            checkpoints.copy(checkpoint, copied)
        self._copy_files()  # again: copying takes long, and the validation of this step may be there by now
        for path in later:
            if path.name != checkpoint.name and (path in unknown or step_of(path) > step_of(checkpoint)):  # taken back
                discard(path, FILES)
        self.may_replace = False
        checkpoints.sweep(there)
        checkpoints.prune(there, self.limit, best_step(self.run.metrics))

    def _copy_files(self) -> None:
        for ours, theirs in zip(self.run.files, self.there.files, strict=True):
            if ours.is_file():
                with unfinished_path(theirs) as unfinished:
                    copy_file(ours, unfinished)

    def _report(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads the output any more
            self.say(text)


def _folder_there(backup_dir: str | Path, output_dir: str | Path) -> Path:
    return Path(backup_dir) / os.path.basename(os.path.abspath(output_dir))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
