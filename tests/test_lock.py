"""Lock of a run folder, with real processes that hold it, die and return."""

import errno
import fcntl
import re
from threading import Timer

from conftest import error_of
from training.guard.lock import locked

REST = "a second run in it would not be refused."
HOLD = """
import sys, time
from training.guard.lock import locked
with locked(sys.argv[1], say=lambda text: None, patience=3):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""
BECOME_ANOTHER = f"""
import os, sys
from training.guard.lock import locked
with locked(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-c", {HOLD!r}, *sys.argv[1:]])
"""


def refusal(folder) -> str:
    return error_of(locked(folder, patience=0.1).__enter__)


def test_a_second_process_is_refused_until_the_holder_ends_even_by_kill_9_or_exec(spawn, tmp_path):
    run, note, output = tmp_path / "x", tmp_path / ".x.lock.txt", []
    holder = spawn("-c", BECOME_ANOTHER, run, 60)
    assert holder.stdout.readline() == "held\n"
    holder_text = rf"{run} is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d; "
    assert re.match(f"{holder_text}.* use another --output_dir", refusal(run))
    assert not run.exists()  # a folder that may belong to another program is not created
    Timer(2, holder.kill).start()
    with locked(run, output.append, patience=60):
        assert re.fullmatch(rf"{holder_text}waiting up to 60 s for it to end \.\.\.", output[0])
        assert note.exists()
        assert "is in use" in refusal(run)
    assert not note.exists()


def test_leftover_lock_files_do_not_lock(tmp_path):
    for content in (b"", b"garbage", b"process x\n", b"\xff"):
        for name in (".x.lock", ".x.lock.txt"):
            (tmp_path / name).write_bytes(content)
        with locked(tmp_path / "x"):
            (tmp_path / ".x.lock.txt").write_bytes(content)
            assert "is in use by " in refusal(tmp_path / "x")


def test_other_paths_of_a_folder_share_its_lock_and_an_unwritable_path_is_reported(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("x")
    monkeypatch.chdir(tmp_path)
    with locked(tmp_path / "link"):
        for name in ("x", "./x", "x/../x", "link"):
            assert "is in use" in refusal(name)
    (tmp_path / "file").write_text("")
    assert re.search(r"cannot be read or written \(.*\); use another --output_dir", refusal(tmp_path / "file" / "x"))


def test_a_disk_without_flock_is_a_warning(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    output = []
    with locked(tmp_path / "x", output.append), locked(tmp_path / "x", output.append):
        assert output == 2 * [f"WARNING: The disk of {tmp_path / 'x'} has no locks: {REST}"]
