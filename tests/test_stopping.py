"""Stop requests: real processes under the real launcher, with real signals."""

import fcntl
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil
import pytest

from conftest import ACCELERATE, REPOSITORY, TINY, clean_environment, flags, is_running, wait_until
from training.guard.stopping import EXIT_CODES, Stopper, StoppingArguments

# A run without training: 0.1 s and, if there are several processes, a collective per step. Its terminal may close: it
# logs to a file.
JOB = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from threading import Thread

from torch import distributed, ones

from training.runtime.console import say
from training.guard.stopping import EXIT_CODES, Stopper, StoppingArguments
from training.checkpoints.saver import THREAD

folder, steps, mode, hours = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [float(text) for text in sys.argv[4:]]
rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
log = (folder / f"rank{rank}.log").open("a", buffering=1)
log.write(f"pid {os.getpid()}\\n")
if processes > 1:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
arguments = StoppingArguments(*hours)
if mode == "slow save":
    Thread(target=time.sleep, args=(600,), name=THREAD, daemon=True).start()
with Stopper(arguments, processes, grace=1.0) as stopper:
    for step in range(steps):
        log.write(f"step {step}\\n")
        while mode == "hang" and step == 3:
            time.sleep(0.1 if stopper.requested is None else 100)
        time.sleep(0.1)
        if processes > 1:
            distributed.all_reduce(ones(1))
        say(f"step {step}")
        if (reason := stopper.agreed()) is not None:
            break
    if mode == "slow save":
        time.sleep(3)
    reason = stopper.agreed(now=True)
    log.write(f"saved {step} {reason}\\n")
if processes > 1:
    distributed.barrier()
    distributed.destroy_process_group()
sys.exit(EXIT_CODES[reason] if reason else 0)
"""
EXPLICIT = ("--mixed_precision", "no", "--dynamo_backend", "no")  # otherwise the launcher prints a note
LAUNCH = (sys.executable, *ACCELERATE, "--num_machines", "1", *EXPLICIT, "--num_processes")
ALONE, TWO = (*LAUNCH, "1"), (*LAUNCH, "2", "--multi_gpu", "--main_process_port", "0")


class Job:
    """A script started with or without a launcher, and the logs of its processes."""

    def __init__(self, folder: Path, script: str, launcher: tuple[str, ...], *arguments: str, **options):
        self.folder = folder
        (folder / "job.py").write_text(script)
        environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        streams = {"stdout": subprocess.DEVNULL, "stderr": (folder / "stderr").open("w")}
        self.started = subprocess.Popen(
            [*launcher, str(folder / "job.py"), str(folder), *arguments],
            env=clean_environment() | environment,
            start_new_session=True,
            **{**streams, **options},
        )
        streams["stderr"].close()

    def lines(self, rank: int = 0) -> list[str]:
        log = self.folder / f"rank{rank}.log"
        return log.read_text().splitlines() if log.is_file() else []

    def pid(self, rank: int = 0) -> int:
        return int(self.lines(rank)[0].removeprefix("pid "))

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_for(self, line: str, rank: int = 0) -> None:
        wait_until(lambda: line in self.lines(rank))

    def wait_for_end(self, rank: int = 0, seconds: float = 120) -> list[str]:
        """Wait for the end of a process, whose launcher may be gone; return its log."""
        wait_until(lambda: not is_running(self.pid(rank)), seconds)
        return self.lines(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.started.pid, *(self.pid(rank) for rank in (0, 1) if self.lines(rank))]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.started.wait()
        if self.started.stdin is not None:
            self.started.stdin.close()


@pytest.fixture
def job(tmp_path):
    with ExitStack() as jobs:
        yield lambda *arguments, **options: jobs.enter_context(Job(tmp_path, JOB, *arguments, **options))


@pytest.mark.parametrize("reason", ["SIGTERM", "the launcher died"])
def test_a_signal_to_one_process_or_the_launcher_stops_both_at_the_same_step(job, reason):
    two = job(TWO, "600", "steps")
    two.wait_for("step 3", 1)
    if reason == "SIGTERM":
        os.kill(two.pid(1), signal.SIGTERM)
    else:
        two.started.kill()
    newest = two.wait_for_end(0)[-1]
    assert re.fullmatch(rf"saved \d+ {reason}", newest)
    assert two.wait_for_end(1)[-1] == newest
    output = f"Stopping after this step ({reason}) and saving.\n"
    assert output in two.stderr() if reason == "SIGTERM" else output == two.stderr()


def test_a_process_without_launcher_saves_and_ends_even_if_saving_exceeds_the_grace(job):
    one = job(ALONE, "600", "slow save")
    one.wait_for("step 3")
    one.started.kill()
    assert re.fullmatch(r"saved \d+ the launcher died", one.wait_for_end()[-1])


def test_a_hung_process_ends_after_the_grace(job):
    one = job((sys.executable,), "600", "hang")
    one.wait_for("step 3")
    one.started.terminate()
    assert one.started.wait(60) == 143
    assert one.lines()[-1] == "step 3"


def test_an_exiting_shell_does_not_count_as_a_dead_launcher(job):
    in_background = ("sh", "-c", 'nohup "$@" > /dev/null & read line', "sh", sys.executable)
    one = job(in_background, "20", "steps", stdin=subprocess.PIPE)
    one.wait_for("step 0")
    one.started.communicate()  # the shell reads end of file and exits
    os.kill(one.pid(), signal.SIGHUP)
    assert one.wait_for_end()[-1] == "saved 19 None"
    assert "Stopping" not in one.stderr()


def own_terminal() -> None:
    """Set up the child; reset SIGHUP in case these tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_saves_and_ends_the_run(job):
    near_end, far_end = os.openpty()
    terminal = {"stdin": far_end, "stdout": far_end, "stderr": far_end}
    one = job((sys.executable,), "600", "steps", preexec_fn=own_terminal, **terminal)
    os.close(far_end)
    one.wait_for("step 3")
    os.close(near_end)
    assert one.started.wait(60) == 129
    assert re.fullmatch(r"saved \d+ SIGHUP", one.lines()[-1])


def test_a_second_ctrl_c_ends_a_hung_process_immediately(job):
    one = job((sys.executable,), "600", "hang")
    one.wait_for("step 3")
    one.started.send_signal(signal.SIGINT)
    time.sleep(0.3)
    one.started.send_signal(signal.SIGINT)  # the copy of the first signal by torchrun
    time.sleep(1)
    options = "Press Ctrl-C again to end the run immediately, without saving."
    output = f"Stopping after this step (SIGINT) and saving. {options}\n"
    assert one.stderr() == output
    assert one.started.poll() is None
    one.started.send_signal(signal.SIGINT)
    assert one.started.wait(60) == 130
    assert one.stderr() == output + "interrupted\n"


def test_max_hours_saves_stops_and_counts_from_the_process_start(job):
    original = time.monotonic()
    one = job((sys.executable,), "600", "steps", str(4 / 3600))
    assert one.started.wait(60) == 0
    assert time.monotonic() - original >= 4
    assert one.lines()[-1].endswith(" max_hours")
    assert one.stderr() == "Stopping after this step (max_hours) and saving.\n"
    age = (time.time() - psutil.Process().create_time()) / 3600
    assert age > 0
    with Stopper(StoppingArguments(max_hours=age / 2)) as stopper:
        assert stopper._hours_end < time.monotonic()  # expired before the stopper started
    with Stopper(StoppingArguments(max_hours=age + 1)) as stopper:
        assert stopper._hours_end == pytest.approx(time.monotonic() + 3600, abs=60)


@pytest.mark.parametrize(("number", "final_lines"), [(signal.SIGUSR1, ["requeue 7"]), (signal.SIGTERM, [])])
def test_the_slurm_script_saves_before_the_time_limit_and_requeues_the_job(tmp_path, number, final_lines):
    """With stand-ins for Slurm and for the launcher, which ends after SIGTERM; the slowed script is still starting
    it."""
    slurm = REPOSITORY / "launch" / "slurm.sh"
    launcher = 'trap "sleep 1; echo saved; exit 1" TERM; echo "$*" > started; while true; do sleep 0.1; done'
    slow = "trap 'sleep 0.3' DEBUG"
    for name, body in (("accelerate", launcher), ("scontrol", 'echo "$*"'), (".venv/bin/activate", slow)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", slurm, "--data", "my text"], **options) as job:
        wait_until((tmp_path / "started").is_file, 60)
        job.send_signal(number)
        assert job.communicate(timeout=60)[0].splitlines() == ["saved", *final_lines]
    assert job.returncode == 1
    assert (tmp_path / "started").read_text().endswith("--num_processes 4 train_accelerate.py --data my text\n")


def test_ending_a_forked_child_does_not_request_a_stop():
    original = signal.getsignal(signal.SIGINT)
    with Stopper(StoppingArguments()) as stopper:
        assert signal.getsignal(signal.SIGINT) is not original
        fork = multiprocessing.get_context("fork")
        event_of_start = fork.Event()
        child = fork.Process(target=lambda: (event_of_start.set(), time.sleep(600)))
        child.start()
        assert event_of_start.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        stopper._sent.send(bytes([signal.SIGUSR1]))  # read after any byte sent by the child
        while select.select([stopper._received], [], [], 0)[0]:
            time.sleep(0.01)
        assert (stopper.requested, stopper.agreed()) == (None, None)
        stopper.request("SIGINT")
        assert EXIT_CODES[stopper.agreed()] == 130
    assert signal.getsignal(signal.SIGINT) is original  # restored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_compiling_ends_the_run_at_once(spawn, store, tmp_path, number):
    """The signal also ends the compiler, as Ctrl-C in a terminal does. Nothing is left running."""
    settings = TINY | {"torch_compile": "true", "data": store.folder, "output_dir": tmp_path / "run"}
    one = spawn("train_accelerate.py", *flags(**settings), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    process = psutil.Process(one.pid)
    wait_until((tmp_path / "run" / "samples.md").is_file)  # the run has begun
    wait_until(lambda: any("cc1plus" in child.name() for child in process.children(recursive=True)))
    children = process.children(recursive=True)
    os.killpg(one.pid, number)
    output = one.communicate(timeout=60)[1]
    assert (one.returncode, output) == (
        128 + number,
        f"Stopped ({number.name}). There was nothing to save; the same command starts again.\n",
    )
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
    wait_until(lambda: not any(is_running(child.pid) for child in children), seconds=10)
