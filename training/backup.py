"""A second home for checkpoints: `--backup_dir`, on a drive that may be slow, full or gone at any moment.

    BACKUP_DIR/x/        a run folder like runs/x, without its model/
        checkpoints/     each copied by a thread while training goes on; there whole or not at all

The drive never stops the training: what it refuses is said once and tried again. At the next start the same command brings
back what the drive has and the run folder has not. What is copied is checked against the manifest as it is read, and by its
size once it is written: reading it again would take a slow drive as long as writing it. Whoever loads it hashes it again.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Condition, Thread
from typing import Any

from atomic import fsync, fsync_path
from command_line import read_yaml
from errors import UserError
from limits import setting
from removal import discard, mark
from training.checkpoint import (
    FILES,
    MANIFEST,
    DamageError,
    complete_checkpoints,
    is_linked,
    listed_files,
    prune,
    step_of,
    sweep,
)
from training.console import clock
from training.metrics import best_step, read_metrics
from training.run_folder import RunFolder, may_hold_run

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between attempts
PIECE_BYTES = 1 << 20


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
    """Used by the main process alone. `newest` and `restore` come before the run begins, `begin` when it does."""

    def __init__(
        self, backup_dir: str | Path, run: RunFolder, save_total_limit: int | None, say: Callable[[str], None]
    ):
        """`say` is called by another thread too."""
        self.run, self.there = run, RunFolder(_folder_there(backup_dir, run.path))
        self.limit, self.say = save_total_limit, say
        self.first_step = 0
        self.may_replace = False
        self.was_there = False
        self.own: set[str] = set()  # names of what this process copied or began to
        self.forgotten_from: int | None = None
        self.copied: str | None = None  # the newest of them that is there
        self.passed_over: set[Path] = set()
        self.problem: str | None = None  # what the drive last answered, until it is back
        self._change = Condition()
        self._waiting: Path | None = None
        self._copying: Path | None = None
        self._closing = False
        self._is_done = False
        self._thread: Thread | None = None

    # ---- at the start of a run ---------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any] | None:
        """The config.yaml of the run that the drive holds under this name; None where it holds none or cannot be read.

        Raises:
            UserError: it is not a YAML file of settings.
        """
        try:
            if self.there.config.is_file() and not is_linked(self.there.config, self.there.path):
                return read_yaml(self.there.config)
        except OSError as error:
            self._say_unreadable(error)
        return None

    def newest(self, after: int | None) -> Path | None:
        """The newest checkpoint of the drive beyond step `after` (None: any), as far as names and sizes tell.

        A drive that cannot be read is said, and has none.
        """
        try:
            if not self.there.path.parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return next(self._beyond(after), None)
        except OSError as error:
            self._say_unreadable(error)
            return None

    def restore(self, after: int | None) -> Path | None:
        """Copies that checkpoint and what else the run has there into the run folder; returns the copy.

        One that turns out to be damaged is said and passed over for the one before. Whoever calls this has made sure
        that it is the same run: checkpoints of later steps there may be replaced from now on.

        Raises:
            UserError: the drive or the run's own disk failed in between.
        """
        restored = None
        try:
            for checkpoint in self._beyond(after):
                self._bring_files(step_of(checkpoint))
                self.run.checkpoints.mkdir(exist_ok=True)
                try:
                    restored = copy_checkpoint(checkpoint, self.run.checkpoints)
                    break
                except DamageError as damage:
                    self._pass_over(checkpoint, damage)
        except OSError as error:
            raise UserError(
                f"{self.run.path} could not be restored from {self.there.path} ({_reason(error)}). Mend that, and the same "
                f"command restores it; without --backup_dir it goes on from what is in {self.run.path}."
            ) from error
        self.may_replace = True
        return restored

    def _beyond(self, after: int | None) -> Iterator[Path]:
        for checkpoint in reversed(complete_checkpoints(self.there.checkpoints)):
            if after is not None and step_of(checkpoint) <= after:
                return
            try:
                if is_linked(checkpoint / MANIFEST, self.there.path):
                    raise DamageError(f"it is a link out of {self.there.path}")
                listed_files(checkpoint)
                yield checkpoint
            except DamageError as damage:
                self._pass_over(checkpoint, damage)

    def _pass_over(self, checkpoint: Path, damage: DamageError) -> None:
        if checkpoint not in self.passed_over:
            self.passed_over.add(checkpoint)
            self.say(f"WARNING: {checkpoint} is damaged: {damage}. Falling back to the one before.")

    def _bring_files(self, step: int) -> None:
        """Copy the logs and settings of the backup. A log that reaches `step` is not replaced."""
        mark(self.run.path, "run")
        logged = read_metrics(self.run.metrics)
        is_older = not logged or logged[-1]["step"] < step
        for theirs, ours in zip(self.there.files, self.run.files, strict=True):
            is_wanted = not ours.exists() or (is_older and ours != self.run.config)
            if is_wanted and theirs.is_file() and not is_linked(theirs, self.there.path):
                _copy_whole(theirs, ours)

    def _say_unreadable(self, error: OSError) -> None:
        home = self.there.path.parent
        if not home.exists():
            self.say(
                f"WARNING: there is no {home} (--backup_dir): is its drive mounted? Nothing is backed up until it is there."
            )
            return
        self.say(
            f"WARNING: the backup {self.there.path} cannot be read ({_reason(error)}), so nothing is brought back from it."
        )

    # ---- while the run goes on ---------------------------------------------------------------------------------------

    def begin(self, first_step: int, may_replace: bool) -> None:
        """The run starts after `first_step`. `may_replace`: the user said that what the drive holds of later steps may go.

        Otherwise later steps that are neither the run's own nor known since `restore` are left alone, and nothing is
        copied beside them: the drive may have been away when the run began, and come back with days of work.
        """
        self.first_step = first_step
        self.may_replace |= may_replace

    def submit(self, checkpoint: Path) -> None:
        """Has a complete checkpoint copied, in place of any that still waits; returns at once."""
        with self._change:
            self._waiting = checkpoint
            self._change.notify()
            if self._thread is None:
                self._thread = Thread(target=self._work, name="backup", daemon=True)
                self._thread.start()

    def protects(self, checkpoint: Path) -> bool:
        """Whether it is still to be copied, so that it must not be removed."""
        with self._change:
            return checkpoint in (self._waiting, self._copying)

    def forget_from(self, step: int) -> None:
        """Removes its checkpoints after `step` and more steps, which the run has taken back. Nothing is copied any more."""
        with self._change:
            self._waiting, self.forgotten_from = None, step
        try:
            if not self.there.path.parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            for checkpoint in complete_checkpoints(self.there.checkpoints):
                if step_of(checkpoint) >= step and (self.may_replace or checkpoint not in self._strangers()):
                    discard(checkpoint, FILES)
        except OSError as error:
            self._tell(
                f"WARNING: checkpoints of step {step:,} and more stay in {self.there.path} ({_reason(error)}); delete them."
            )

    def finish(self, timeout: float = 600.0) -> None:
        """Waits at most `timeout` seconds for what is not yet copied; a drive that is gone is tried once more."""
        if self._thread is None:
            return
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(min(1.0, timeout))  # as a rule there is nothing to wait for, and to say
        if self._thread.is_alive():
            self._tell(f"Backup:  waiting for {self.there.path}, {clock(timeout)} at most ...")
            self._thread.join(timeout)
        if not self._is_done:
            problem = "the drive is too slow" if self._thread.is_alive() else self.problem or "the backup broke off"
            self._tell(
                f"WARNING: {self.there.path} does not hold all of the run ({problem}); copy {self.run.path} there yourself."
            )
        elif self.copied:
            self._tell(f"Backup:  {self.copied} is in {self.there.path}")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause = FIRST_PAUSE
        while (checkpoint := self._next()) is not None:
            is_last_attempt = self._closing
            if self._attempt(checkpoint):
                pause = FIRST_PAUSE
            elif is_last_attempt:
                return
            else:
                self._pause(checkpoint, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        try:
            self._copy_files()  # what was written after the last checkpoint
        except OSError as error:
            self.problem = _reason(error)
        else:
            self._is_done = True

    def _next(self) -> Path | None:
        """The newest checkpoint that waits, as soon as there is one; None at the end."""
        with self._change:
            self._copying = None
            self._change.wait_for(lambda: self._waiting is not None or self._closing)
            self._copying, self._waiting = self._waiting, None
            return self._copying

    def _pause(self, checkpoint: Path, seconds: float) -> None:
        """Puts `checkpoint` back, unless a newer one is there; a newer one and the end of the run end the pause."""
        with self._change:
            self._copying = None
            if self._waiting is None:
                self._waiting = checkpoint
            self._change.wait_for(lambda: self._waiting is not checkpoint or self._closing, seconds)

    def _attempt(self, checkpoint: Path) -> bool:
        """False where it is to be tried again."""
        try:
            self._copy(checkpoint)
        except (OSError, DamageError) as error:
            if not (checkpoint / MANIFEST).is_file():
                return True  # removed meanwhile: a newer one will come
            if isinstance(error, DamageError):
                self._tell(f"WARNING: {checkpoint} is damaged: {error}. It is not backed up.")
                return True
            if self.problem is None:
                self._tell(
                    f"WARNING: {checkpoint.name} could not be copied to {self.there.path} ({_reason(error)}). Training goes "
                    f"on, and so do the attempts."
                )
            self.problem = _reason(error)
            return False
        if self.problem is not None:
            self._tell(f"Backup:  {self.there.path} is back, and {checkpoint.name} is in it")
        self.problem, self.copied = None, checkpoint.name
        return True

    def _copy(self, checkpoint: Path) -> None:
        if not self.was_there:  # made once; missing later, the drive is gone, and its mount point is not filled instead
            if not may_hold_run(self.there):
                raise OSError("it is not a backup of a run; name another --backup_dir")
            self.there.path.mkdir(exist_ok=True)
            mark(self.there.path, "run")
            self.was_there = True
        self.there.checkpoints.mkdir(exist_ok=True)
        strangers = self._strangers()
        if strangers and not self.may_replace:
            raise OSError(
                f"it holds {strangers[-1].name}, which this run did not go on from, and which is left alone; start again to "
                f"go on from it, or delete it"
            )
        self.own.add(checkpoint.name)
        self._copy_files()  # before the checkpoint counts, so that the log always reaches it
        if not _is_copy(self.there.checkpoints / checkpoint.name, checkpoint):
            copied = copy_checkpoint(checkpoint, self.there.checkpoints)
            if self.forgotten_from is not None and step_of(checkpoint) >= self.forgotten_from:
                discard(copied, FILES)
                return
        self._copy_files()  # again: copying takes long, and the validation of this step may be there by now
        for stranger in strangers:
            if stranger.name != checkpoint.name:
                discard(stranger, FILES)
        self._prune()

    def _strangers(self) -> list[Path]:
        """Checkpoints of steps that this run had not reached when it began, and has not copied."""
        there = complete_checkpoints(self.there.checkpoints)
        return [path for path in there if step_of(path) > self.first_step and path.name not in self.own]

    def _copy_files(self) -> None:
        for ours, theirs in zip(self.run.files, self.there.files, strict=True):
            if ours.is_file():
                _copy_whole(ours, theirs)

    def _prune(self) -> None:
        sweep(self.there.checkpoints)
        prune(self.there.checkpoints, self.limit, best_step(self.run.metrics))

    def _tell(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody listens any more
            self.say(text)


def copy_checkpoint(source: Path, folder: Path) -> Path:
    """Makes `folder/step_N` a copy of `source`. Until the last rename nothing of that name exists.

    Raises:
        DamageError: `source` is not as its manifest says.
        OSError: it cannot be read, or the copy cannot be written.
    """
    manifest = (source / MANIFEST).read_bytes()
    files = listed_files(source)
    final, unfinished = folder / source.name, folder / f".{source.name}.unfinished"
    discard(unfinished, FILES)
    try:
        # One by one: `parents=True` would build the way to a drive that is gone on the disk below it.
        folders = sorted({unfinished / parent for name in files for parent in PurePosixPath(name).parents})
        for inside in folders:
            inside.mkdir()
        for name, (_, sha256) in files.items():
            if _copy_file(source / name, unfinished / name) != sha256:
                raise DamageError(f"{name} was changed or damaged (its hash differs)")
        with (unfinished / MANIFEST).open("wb") as file:
            file.write(manifest)
            fsync(file)
        for inside in folders:
            fsync_path(inside)
        discard(final, FILES, replacement=unfinished)
        fsync_path(folder)
    except (OSError, DamageError):
        with suppress(OSError):  # what failed above is the reason
            discard(unfinished, FILES)
        raise
    return final


def _is_copy(copy: Path, checkpoint: Path) -> bool:
    """As far as manifest and sizes tell."""
    try:
        return (copy / MANIFEST).read_bytes() == (checkpoint / MANIFEST).read_bytes() and listed_files(copy) != {}
    except (FileNotFoundError, DamageError):
        return False


def _copy_file(source: Path, target: Path) -> str:
    """Copies to the disk; returns the SHA-256 of what was read.

    Raises:
        OSError: also where the copy is shorter than it should be, which some drives do not say.
    """
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(PIECE_BYTES):
            digest.update(piece)
            size += writer.write(piece)
        fsync(writer)
    if (written := target.stat().st_size) != size:
        raise OSError(f"{target} has {written:,} bytes after {size:,} were written")
    return digest.hexdigest()


def _copy_whole(source: Path, target: Path) -> None:
    """Replaces `target`, which is there whole at any moment."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    _copy_file(source, unfinished)
    os.replace(unfinished, target)


def _folder_there(backup_dir: str | Path, output_dir: str | Path) -> Path:
    return Path(backup_dir) / os.path.basename(os.path.abspath(output_dir))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
