"""Lock of a run folder, with real processes that hold it, die and return."""

import errno
import fcntl
import re
import subprocess

import pytest

from conftest import error_of
from training.guard.lock import RunLock

HOLD = """
import sys, time
from training.guard.lock import RunLock
lock = RunLock(sys.argv[1], say=lambda text: None, patience=3)
lock.acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
lock.release()
"""
BECOME_ANOTHER = f"""
import os, sys
from training.guard.lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
os.execv(sys.executable, [sys.executable, "-c", {HOLD!r}, *sys.argv[1:]])
"""


@pytest.fixture
def start(spawn):
    """Start a script with arguments; return it and the first line that it prints."""

    def run(script: str, *arguments) -> tuple[subprocess.Popen, str]:
        process = spawn("-c", script, *arguments)
        return process, process.stdout.readline().strip()

    return run


def refusal(folder) -> str:
    return error_of(RunLock(folder, patience=0.1).acquire)


def test_a_second_process_is_refused_with_the_name_of_the_holder(start, tmp_path):
    run = tmp_path / "x"
    holder, output = start(HOLD, run, 60)
    assert output == "held"
    since = r"since \d{4}-\d\d-\d\d \d\d:\d\d; .* use another --output_dir"
    assert re.search(rf"{run} is in use by process {holder.pid} on \S+ {since}", refusal(run))
    assert not run.exists()  # a folder that may belong to another program is not created


def test_lock_is_free_after_a_run_or_kill_9_and_is_reacquired_after_exec(start, tmp_path):
    with RunLock(tmp_path / "x"):
        assert "is in use" in refusal(tmp_path / "x")
    holder, _ = start(HOLD, tmp_path / "x", 60)
    holder.kill()
    holder.wait()
    assert (tmp_path / ".x.lock.txt").exists()
    with RunLock(tmp_path / "x"):
        pass
    assert not (tmp_path / ".x.lock.txt").exists()
    holder, output = start(BECOME_ANOTHER, tmp_path / "x", 60)
    assert output == "held"
    assert f"process {holder.pid} on" in refusal(tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"host": 1}', b"process x\n", b"\xff"])
def test_leftover_lock_files_do_not_lock(tmp_path, content):
    for name in (".x.lock", ".x.lock.txt"):
        (tmp_path / name).write_bytes(content)
    with RunLock(tmp_path / "x"):
        (tmp_path / ".x.lock.txt").write_bytes(content)
        assert "is in use by another process; wait" in refusal(tmp_path / "x")


def test_lock_waits_for_a_holder_that_ends(start, tmp_path):
    holder, _ = start(HOLD, tmp_path / "x", 1)
    output = []
    with RunLock(tmp_path / "x", output.append, patience=60):
        assert output[0].startswith(f"{tmp_path / 'x'} is in use by process {holder.pid} on ")
        assert output[0].endswith("; waiting up to 60 s for it to end ...")


def test_other_paths_of_a_folder_share_its_lock_and_an_unwritable_path_is_reported(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("x")
    monkeypatch.chdir(tmp_path)
    with RunLock(tmp_path / "link"):
        for name in ("x", "./x", "x/../x", "link"):
            assert "is in use" in refusal(name)
    (tmp_path / "file").write_text("")
    assert re.search(r"cannot be read or written \(.*\); use another --output_dir", refusal(tmp_path / "file" / "x"))


def test_a_disk_without_flock_is_a_warning(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    output = []
    for _ in range(2):
        with RunLock(tmp_path / "x", output.append):
            pass
    assert (
        output == [f"WARNING: The disk of {tmp_path / 'x'} has no locks: a second run in it would not be refused."] * 2
    )
