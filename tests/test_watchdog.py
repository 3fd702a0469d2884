"""Processes that die or hang: two real processes under the real launcher."""

import os
import re
import signal
import threading
from types import SimpleNamespace

import pytest
from test_stopping import Job
from torch import distributed

from conftest import TWO_PROCESSES, wait_until
from training.checkpoints.run_folder import RunFolder
from training.guard import watchdog
from training.guard.watchdog import Pulse, find_fault, is_of_the_group

JOB = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from datetime import timedelta
from pathlib import Path
from threading import Thread

from torch import distributed, ones

from training.runtime.distributed import RENDEZVOUS
from training.guard.stopping import Stopper, StoppingArguments
from training.guard import watchdog as module
from training.checkpoints.saver import THREAD
from training.checkpoints.run_folder import RunFolder

folder, mode, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
module.PATIENCE, module.INTERVAL = 3, 0.5
rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
log = (folder / f"rank{rank}.log").open("a", buffering=1)
log.write(f"pid {os.getpid()}\\n")
distributed.init_process_group("gloo", RENDEZVOUS, timeout=timedelta(seconds=seconds))

def finish_saving():
    while not watchdog._store.check(["order"]):
        time.sleep(0.1)
    time.sleep(1)
    log.write("saved\\n")

with (
    module.Watchdog(rank, processes, seconds, RunFolder(folder)) as watchdog,
    Stopper(StoppingArguments(), processes),  # because the launcher sends SIGTERM after a death
):
    Thread(target=finish_saving, name=THREAD, daemon=True).start()
    for step in range(600):
        watchdog.phase = f"step {step}"
        if rank == 1 and step == 5 and mode == "hang":
            time.sleep(600)
        time.sleep(0.1)
        distributed.all_reduce(ones(1))
        log.write(f"step {step}\\n")
"""
SECOND = "rank 2 (a, pid 2)"
LAGGARD = "rank 1 (a, pid 1) kept the others waiting for 600 s (ddp_timeout): rank 1 is at step 7"
STOPPED = r"has been silent for 3 s at step N \(its process is stopped\)"


@pytest.fixture
def job(spawn, tmp_path):
    job = Job(tmp_path, JOB, spawn)
    yield job
    job.kill()


def started(job: Job, *arguments: str) -> Job:
    job.start(*arguments, launcher=TWO_PROCESSES)
    job.wait_for("step 3", 1)
    return job


def errors(job: Job) -> list[str]:
    """Return the error sentences without their steps, which depend on timing."""
    output = job.errors()
    assert "Connection closed by peer" not in output
    return [re.sub(r"step \d+", "step N", line) for line in re.findall("^error: .*", output, re.MULTILINE)]


def test_a_stopped_process_is_reported_and_ends_the_job(job):
    two = started(job, "steps", "60")
    os.kill(two.pid(1), signal.SIGSTOP)
    assert two.wait_for_end(0)[-1] == two.wait_for_end(1)[-1] == "saved"  # it was continued, to end normally
    [sentence] = errors(two)
    assert re.fullmatch(rf"error: rank 1 \(.+, pid {two.pid(1)}\) {STOPPED}\. The run ends; .*", sentence)
    assert two.started.returncode == 1


def test_a_dead_process_is_reported_and_ends_the_job_unless_the_launcher_restarts_it(job):
    """The launcher does so once. The new processes do not obey the order to end of those before them."""
    two, pids = job.start("steps", "60", launcher=(*TWO_PROCESSES, "--max_restarts", "1")), []
    for times in (1, 2):
        wait_until(lambda times=times: two.lines(1).count("step 3") == times)
        pids.append(two.pid(1))
        os.kill(pids[-1], signal.SIGKILL)
    assert two.wait_for_end(0)[-1] == "saved"
    for pid, sentence in zip(pids, errors(two), strict=True):
        assert re.fullmatch(rf"error: rank 1 \(.+, pid {pid}\) has died at step N\. The run ends; .*", sentence)
    assert two.started.returncode == 1


def test_a_hung_main_thread_is_reported_after_the_timeout(job):
    two = started(job, "hang", "3")
    assert two.wait_for_end(0, 16)[-1] == "saved"
    assert two.wait_for_end(1)[-1] == "saved"
    steps = r"3 s \(ddp_timeout\): rank 1 is at step N, rank 0 is at step N"
    [sentence] = errors(two)
    assert re.search(rf"rank 1 \(.+, pid {two.pid(1)}\) kept the others waiting for {steps}", sentence)


def test_a_store_that_does_not_answer_ends_the_process(monkeypatch, tmp_path, capsys):
    ended = threading.Event()
    monkeypatch.setattr(watchdog, "EXIT_TIMEOUT", 0.4)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.1)
    monkeypatch.setattr(watchdog, "leave", lambda code: ended.set() or threading.Event().wait())
    monkeypatch.setattr(watchdog, "print_unbuffered", print)
    silent = watchdog.Watchdog(1, 2, 600, RunFolder(tmp_path / "my run"))
    # As if the machine of rank 0 had lost its power.
    silent._store = SimpleNamespace(set=lambda *_: threading.Event().wait())
    silent._thread = threading.Thread(target=silent._watch, daemon=True)
    silent._thread.start()
    threading.Thread(target=silent._watch_connection, daemon=True).start()
    assert ended.wait(10)
    sentence = r"^error: rank 0's machine has not answered for 0\.4 s at start\. The run ends; resume it with "
    assert re.search(sentence + r"--resume_from_checkpoint '.*/my run', or, without a checkp", capsys.readouterr().out)


def test_out_of_memory_in_nccl_is_not_an_error_of_the_group():
    text = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 "
    memory, other = (distributed.DistBackendError(text + reason) for reason in ("'out of memory'", "'unknown error'"))
    assert (is_of_the_group(memory), is_of_the_group(other)) == (False, True)


@pytest.mark.parametrize(
    ("judge", "trouble", "pulses", "fault"),
    [
        (0, 0, [{}, {"silence": 59}, {"left": True, "state": "dead"}], None),
        (0, 0, [{}, {"state": "dead"}, {"state": "dead"}], "rank 1 (a, pid 1), rank 2 (a, pid 2) have died at step 7"),
        (1, 0, [{"state": "dead"}, {}, {"silence": 99}], "rank 0 (a, pid 0) has died at step 7"),
        (1, 9, [{}, {"error": "timeout"}, {"state": "dead"}], None),
        (0, 1, [{}, {"failure": "ValueError: x."}, {}], None),
        (0, 5, [{}, {"failure": "ValueError: x."}, {}], "rank 1 (a, pid 1) failed at step 7: ValueError: x"),
        (0, 1, [{"error": "r"}, {"failure": "E: x"}, {"state": "dead"}], "rank 1 (a, pid 1) failed at step 7: E: x"),
        (0, 4, [{"error": "reset"}, {"error": "reset"}, {"silence": 9}], None),
        (0, 5, [{"error": "r"}, {}, {"silence": 3}], f"{SECOND} no longer answers, last seen at step 7"),
        (0, 5, [{"error": "Timed out"}, {}, {"error": "r"}], f"{LAGGARD}, rank 0 is at step 7, rank 2 is at step 7"),
        (0, 5, [{"error": "NCCL error"}, {}, {}], "the processes lost their connection at step 7: NCCL error"),
        (0, 5, [{"error": "r"}] * 3, "the processes lost their connection at step 7: r"),
    ],
)
def test_judge_finds_the_cause_not_its_consequences(judge, trouble, pulses, fault):
    table = [Pulse(rank, "a", "", rank, phase="step 7", **pulse) for rank, pulse in enumerate(pulses)]
    assert find_fault(judge, table, trouble, ddp_timeout=600) == fault
