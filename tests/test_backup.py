"""Backup of a run to a drive that disconnects, fills up or returns damaged data, without disturbing the run."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from conftest import append, assert_user_error, wait_until
from training.checkpoints import backup
from training.checkpoints.backup import Backup, BackupArguments
from training.checkpoints.checkpoint import REQUIRED_FILES, complete_checkpoints, copy, damage, step_of, sweep
from training.checkpoints.run_folder import RunFolder


def write_checkpoint(folder, step: int, size: int = 1000, content: int = 0):
    """Write a folder that is a valid checkpoint for all checks except loading."""
    checkpoint, files = folder / f"step_{step:08d}", {}
    for name in (*REQUIRED_FILES, "tokenizer.json"):
        data = random.Random(f"{step} {content} {name}").randbytes(size)
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(data)
        files[name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps({"format_version": 2, "step": step, "files": files}))
    return checkpoint


def write_run(path, *steps: int) -> RunFolder:
    """Write a run folder in which each step was validated and the first is the best."""
    run = RunFolder(path)
    run.checkpoints.mkdir(parents=True)
    run.config.write_text("learning_rate: 0.01\n")
    run.samples.write_text("the\n")
    for step in steps:
        log(run, step, eval_loss=step)
        write_checkpoint(run.checkpoints, step)
    return run


def log(run: RunFolder, step: int, **numbers: float) -> None:
    evaluations = dict.fromkeys(("epoch", "eval_perplexity", "eval_bits_per_byte", "eval_tokens"), 1)
    append(run.metrics, json.dumps({"step": step, "tokens": 64 * step, **evaluations, **numbers}) + "\n")


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def submit(copies: Backup, checkpoint: Path) -> None:
    copies.submit()
    wait_until(lambda: copies.copied == checkpoint.name)


def fork(story: Callable[[], None]) -> int:
    """Run `story` in a child process without repeating the imports; return its id."""
    child = os.fork()
    if child == 0:
        try:
            story()
            os._exit(0)
        finally:
            os._exit(1)
    return child


@pytest.fixture
def drive(tmp_path):
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return write_run(tmp_path / "x", 1)


@pytest.fixture
def make(drive, monkeypatch):
    """Make a Backup that retries quickly, and the list of its messages."""
    monkeypatch.setattr(backup, "FIRST_PAUSE", 0.05)

    def make(run: RunFolder, limit: int | None = None, backup_dir=drive) -> tuple[Backup, list[str]]:
        output = []
        return Backup(backup_dir, run, limit, output.append), output

    return make


def test_backup_is_a_run_folder(make, drive, tmp_path):
    run = write_run(tmp_path / "x", 1, 2)
    copies, output = make(run)
    submit(copies, run.checkpoints / "step_00000002")
    log(run, 3, loss=1.0)  # after the last checkpoint
    copies.finish()
    backup_run = RunFolder(drive / "x")
    files = {"config.yaml", "metrics.jsonl", "samples.md"}
    assert {path.name for path in backup_run.path.iterdir()} == files | {"checkpoints", ".gpt2scratch.json"}
    assert all((backup_run.path / name).read_bytes() == (run.path / name).read_bytes() for name in files)
    assert backup_run.newest_checkpoint(output.append) == backup_run.checkpoints / "step_00000002"
    assert names(backup_run) == ["step_00000001", "step_00000002"]  # the first is the best
    assert output == [f"Backup:  step_00000002 is in {backup_run.path}"]


def test_backup_keeps_the_newest_and_the_best_checkpoint(make, run):
    copies, _ = make(run, limit=2)
    submit(copies, run.checkpoints / "step_00000001")
    for step in (2, 3, 4):
        submit(copies, write_checkpoint(run.checkpoints, step))
    (copies.there.checkpoints / ".step_00000009.unfinished").mkdir()
    write_checkpoint(run.checkpoints, 5)
    copies.finish()
    assert names(copies.there) == ["step_00000001", "step_00000004", "step_00000005"]


def test_disconnected_drive_is_reported_once_and_used_again_when_available(make, run, drive, tmp_path):
    [first] = run.checkpoints.iterdir()
    copies, output = make(run)
    submit(copies, first)
    drive.rename(tmp_path / "unplugged")
    drive.mkdir()  # the mount point, which must stay empty
    second = write_checkpoint(run.checkpoints, 2)
    copies.submit()
    wait_until(lambda: copies.problem)
    time.sleep(0.3)  # several attempts
    [warning] = output
    for words in ("WARNING: step_00000002 could not be copied", "No such file or directory"):
        assert words in warning
    assert copies.copying == second
    third = write_checkpoint(run.checkpoints, 3)
    copies.submit()
    wait_until(lambda: copies.copying == third)
    drive.rmdir()
    (tmp_path / "unplugged").rename(drive)
    wait_until(lambda: copies.copied == third.name)
    assert output[1:] == [f"Backup:  {drive / 'x'} is available again, and step_00000003 is in it"]
    copies.finish()
    assert names(copies.there) == [first.name, third.name]
    assert copies.copying is None


def test_run_does_not_wait_for_a_drive_that_never_appears(make, run, tmp_path):
    (tmp_path / "file").write_text("")
    copies, output = make(run, backup_dir=tmp_path / "file")
    copies.submit()
    wait_until(lambda: copies.problem)
    start_time = time.monotonic()
    copies.finish()
    assert time.monotonic() - start_time < 60
    assert "is incomplete (Not a directory); copy" in output[-1]


def test_full_drive_keeps_its_checkpoints(make, run, drive, tmp_path):
    copies, output = make(run, limit=1)

    def fill() -> None:
        submit(copies, run.checkpoints / "step_00000001")
        write_checkpoint(run.checkpoints, 2, size=300_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # maximum file size in bytes
        copies.submit()
        wait_until(lambda: copies.problem)
        output.append(str(names(copies.there)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        copies.finish()
        (tmp_path / "said").write_text("\n".join(output))

    assert os.waitpid(fork(fill), 0)[1] == 0
    output = (tmp_path / "said").read_text().splitlines()
    warning = r"WARNING: step_00000002 could not be copied to .* \(File too large\)\. Training continues, .*"
    assert re.fullmatch(warning, output[0])
    assert output[1] == "['step_00000001']"
    assert output[-1] == f"Backup:  step_00000002 is in {drive / 'x'}"
    assert names(RunFolder(drive / "x")) == ["step_00000001", "step_00000002"]  # the first is the best


def test_kill_9_never_leaves_a_partial_checkpoint(drive, tmp_path):
    original = write_checkpoint(drive, 1)
    versions = [write_checkpoint(tmp_path / str(i), 2, size=300_000, content=i) for i in range(2)]
    start_time = time.monotonic()
    copy(versions[0], drive / versions[0].name)
    takes = time.monotonic() - start_time  # depends on the disk of the test machine

    def copy_forever() -> None:
        while True:  # the two versions replace each other
            for version in versions:
                copy(version, drive / version.name)

    randomness = random.Random(1)
    for _ in range(10):
        child = fork(copy_forever)
        time.sleep(randomness.uniform(0, 3 * takes))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        backup_run = complete_checkpoints(drive)
        assert backup_run[0] == original
        assert [damage(checkpoint) for checkpoint in backup_run] == [None] * len(backup_run)
    (unfinished := drive / ".step_00000002.unfinished").mkdir(exist_ok=True)
    (unfinished / "manifest.json.tmp").touch()  # a kill between opening and renaming
    sweep(drive)
    assert all(path.name.startswith("step_") for path in drive.iterdir())


def test_damaged_checkpoint_is_reported_and_the_next_one_is_copied(make, run):
    (run.checkpoints / "step_00000001" / "config.json").write_bytes(b"x" * 1000)
    copies, output = make(run)
    copies.submit()
    wait_until(lambda: copies.problem)
    submit(copies, write_checkpoint(run.checkpoints, 2))
    for words in ("step_00000001 could not be copied", "(config.json was changed or damaged"):
        assert words in output[0]
    assert names(copies.there) == ["step_00000002"]


def test_rolled_back_checkpoints_are_removed_from_the_backup(make, tmp_path):
    run = write_run(tmp_path / "x", 1, 2)
    copies, _ = make(run)
    submit(copies, run.checkpoints / "step_00000002")
    shutil.rmtree(run.checkpoints / "step_00000002")
    copies.update()
    assert names(copies.there) == ["step_00000001"]
    for step in (2, 3):  # by another machine
        write_checkpoint(copies.there.checkpoints, step)
    copies.update()
    assert "it holds step_00000003, which this run did not resume from" in copies.problem
    assert names(copies.there) == ["step_00000001", "step_00000002", "step_00000003"]


def test_checkpoints_of_another_run_are_not_replaced(make, tmp_path):
    def back_up(run: RunFolder, step: int = 0, is_made: bool | None = None, **begin) -> tuple[list[str], list[str]]:
        copies, output = make(run, limit=1)
        if begin:
            copies.begin(step, **begin)
        copies.is_made = copies.is_made if is_made is None else is_made
        copies.submit()
        copies.finish()
        return names(copies.there), output

    back_up(write_run(tmp_path / "old" / "x", 500))
    new_run = write_run(tmp_path / "x", 1)
    remainder, output = back_up(new_run, may_replace=False)
    assert "it holds step_00000500, which this run did not resume from" in output[0]
    assert remainder == ["step_00000500"]
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup, "_copy_files", lambda source, target: written.append(names(target)))
        back_up(new_run, may_replace=True)
    assert written[0] == []  # otherwise, a kill would leave the old checkpoint next to the new settings
    new_run.events.write_text('{"event": "begun", "step": 0, "time": "today"}\n')
    assert back_up(new_run, may_replace=True)[0] == ["step_00000001"]  # --overwrite_output_dir
    other_run = write_run(tmp_path / "other" / "x", 2)
    other_run.events.write_text('{"event": "begun", "step": 0, "time": "yesterday"}\n')
    for is_made in (False, True):  # resumed; begun together with the other run, before its first copy was complete
        remainder, output = back_up(other_run, 2, is_made, may_replace=False)
        assert "it is the backup of another run; move that folder away" in output[0]
    assert remainder == ["step_00000001"]
    for folder in (tmp_path, tmp_path / "x", tmp_path / "x" / "checkpoints"):
        assert "into the run's own folder" in next(BackupArguments(str(folder)).problems(tmp_path / "x"))
    for folder in (str(tmp_path / "drive"), None):
        assert not list(BackupArguments(folder).problems(tmp_path / "x"))


def restore(copies: Backup, step: int = -1) -> Path | None:
    return copies.restore(step, lambda settings: None)


@pytest.fixture
def backed_up(make, run, tmp_path) -> RunFolder:
    """Run with steps 1 and 2 in the backup and a lost run folder."""
    copies, _ = make(run)
    submit(copies, run.checkpoints / "step_00000001")
    log(run, 2, eval_loss=2)
    submit(copies, write_checkpoint(run.checkpoints, 2))
    copies.finish()
    run.path.rename(tmp_path / "lost")
    return run


def test_newer_local_files_are_kept_unless_damaged(make, backed_up, tmp_path):
    (tmp_path / "lost").rename(backed_up.path)
    copies, _ = make(backed_up)
    assert restore(copies, 2) is None
    log(backed_up, 9)
    original, damaged = backed_up.metrics.read_text(), backed_up.checkpoints / "step_00000002"
    backed_up.config.write_text("learning_rate: 0.02\n")
    (damaged / "tokenizer.json").write_bytes(b"x" * 1000)  # of the right size
    assert restore(copies, 1) == damaged
    assert damage(damaged) is None
    assert names(backed_up) == ["step_00000001", "step_00000002"]
    assert backed_up.metrics.read_text() == original
    assert "0.02" in backed_up.config.read_text()


def test_the_best_checkpoint_is_restored_with_the_newest(make, backed_up, tmp_path):
    append(tmp_path / "drive" / "x" / "metrics.jsonl", '{"step": 1, "eval_loss": 1}\n')
    copies, _ = make(backed_up)
    assert restore(copies) == backed_up.checkpoints / "step_00000002"
    assert names(backed_up) == ["step_00000001", "step_00000002"]


MANIFEST = "manifest.json"
OUTSIDE = ("../../secret", "/etc/passwd", "a/../../../secret", "C:\\secret", "..\\secret", "link")
NO_MANIFESTS = (b"", b"[]", b"{}", b'{"files": {}}', b'{"files": {"a": {"size": "x"}}}', b"\xff")


def listing(name: str) -> Callable[[bytes], bytes]:
    """Return a change of a manifest: list one more file."""
    entry = json.dumps({name: {"size": 6, "sha256": sha256(b"secret").hexdigest()}})
    return lambda content: content.replace(b'"files": {', b'"files": %s, ' % entry[:-1].encode())


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("tokenizer.json", lambda content: b"x" * 1000, "tokenizer.json was changed or damaged"),
        ("tokenizer.json", lambda content: b"x", "tokenizer.json has 1 bytes instead of 1,000"),
        *((MANIFEST, listing(name), "is outside the checkpoint") for name in OUTSIDE),
        *((MANIFEST, lambda content, text=text: text, "is damaged") for text in NO_MANIFESTS),
    ],
)
def test_restore_skips_a_damaged_checkpoint(make, backed_up, tmp_path, file, change, problem):
    newest = tmp_path / "drive" / "x" / "checkpoints" / "step_00000002"
    (tmp_path / "secret").write_text("secret")
    (newest / "link").symlink_to(tmp_path / "secret")
    (newest / file).write_bytes(change((newest / file).read_bytes()))
    copies, output = make(backed_up)
    assert restore(copies).name == "step_00000001"
    assert names(backed_up) == ["step_00000001"]
    [warning, _] = output
    assert problem in warning
    assert restore(copies, 1) is None
    (newest.with_name("step_00000001") / file).write_bytes(b"x")
    shutil.rmtree(backed_up.path)
    assert_user_error(r"All checkpoints in .*/drive/x/checkpoints are damaged; wait until", restore, make(backed_up)[0])


def test_a_replaced_run_is_not_restored_over_the_one_that_replaced_it(make, backed_up):
    write_checkpoint(backed_up.checkpoints, 1)
    for details, restored_step in (({}, 2), ({"replaces": True}, None)):
        backed_up.events.write_text(json.dumps({"event": "begun", "step": 0, "time": "today"} | details) + "\n")
        copies, output = make(backed_up)
        restored = restore(copies, 1)
        assert (restored and step_of(restored)) == restored_step
        shutil.rmtree(backed_up.checkpoints / "step_00000002", ignore_errors=True)
    assert "is the backup of a run that" in output[0]


def test_links_to_paths_outside_the_backup_are_not_followed(make, backed_up, tmp_path):
    backup_run = RunFolder(tmp_path / "drive" / "x")
    outside = write_checkpoint(tmp_path / "outside", 3)
    (backup_run.checkpoints / outside.name).symlink_to(outside)
    manifest = write_checkpoint(backup_run.checkpoints, 4) / "manifest.json"
    manifest.symlink_to(manifest.rename(tmp_path / "manifest.json"))
    (tmp_path / "secret").write_text("a: secret\n")
    for path in (backup_run.config, backup_run.samples):
        path.unlink()
        path.symlink_to(tmp_path / "secret")
    copies, output = make(backed_up)
    assert restore(copies).name == "step_00000002"
    assert ["is a link to a path outside" in line for line in output] == [True, True, False]
    assert not backed_up.config.exists() | backed_up.samples.exists()


def test_missing_drive_is_a_warning_and_failed_restore_is_an_error(make, backed_up, tmp_path):
    copies, output = make(backed_up, backup_dir=tmp_path / "nowhere")
    assert restore(copies) is None
    [warning] = output
    assert "(--backup_dir) cannot be read (No such file or directory): is its drive mounted? Nothing is" in warning
    backed_up.path.write_text("a file")
    assert_user_error("could not be restored from", restore, make(backed_up)[0])


def test_a_restore_that_failed_copies_the_other_files_again(make, backed_up, monkeypatch):
    copies, _ = make(backed_up)

    def fail_at_samples(source: Path, target: Path) -> None:
        if source.name == "samples.md":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        shutil.copyfile(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(backup, "copy_file", fail_at_samples)
        assert_user_error("could not be restored from", restore, copies)
    assert restore(make(backed_up)[0]) == backed_up.checkpoints / "step_00000002"
    assert backed_up.samples.read_text() == "the\n"
