"""Stop requests: real processes under the real launcher, with real signals."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import REPOSITORY, TINY, TWO_PROCESSES, flags, is_running, status, wait_until
from training.guard.stopping import TICK, Stopper, StoppingArguments

# A run without training: 0.1 s and, if there are several processes, a collective per step. Its terminal may close: it
# logs to a file.
JOB = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from datetime import timedelta
from pathlib import Path
from threading import Thread

from torch import distributed, ones

from training.runtime.console import say
from training.guard import stopping
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
stopping.GRACE = 1.0
with Stopper(arguments, processes) as stopper:
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


class Job:
    """A script started with or without a launcher, and the logs of its processes."""

    def __init__(self, folder: Path, script: str, spawn: Callable[..., subprocess.Popen]):
        self.folder, self.path, self.spawn = folder, folder / "job.py", spawn
        self.path.write_text(script)

    def start(self, *arguments: str, launcher: tuple[str, ...] = ()) -> "Job":
        self.started = self.spawn(*launcher, self.path, self.folder, *arguments)
        return self

    def lines(self, rank: int = 0) -> list[str]:
        log = self.folder / f"rank{rank}.log"
        return log.read_text().splitlines() if log.is_file() else []

    def pid(self, rank: int = 0) -> int:
        return [int(line.removeprefix("pid ")) for line in self.lines(rank) if line.startswith("pid ")][-1]

    def errors(self) -> str:
        """Wait for the end of all processes and return what they printed to stderr."""
        return self.started.communicate(timeout=120)[1]

    def wait_for(self, line: str, rank: int = 0) -> "Job":
        wait_until(lambda: line in self.lines(rank))
        return self

    def wait_for_end(self, rank: int = 0, seconds: float = 120) -> list[str]:
        """Wait for the end of a process, whose launcher may be gone; return its log."""
        wait_until(lambda: not is_running(self.pid(rank)), seconds)
        return self.lines(rank)

    def kill(self) -> None:
        for rank in (0, 1):
            if self.lines(rank) and is_running(self.pid(rank)):
                os.kill(self.pid(rank), signal.SIGKILL)


@pytest.fixture
def job(spawn, tmp_path):
    job = Job(tmp_path, JOB, spawn)
    yield job
    job.kill()


@pytest.mark.parametrize(("reason", "mode"), [("SIGTERM", "steps"), ("the launcher died", "slow save")])
def test_a_signal_to_one_process_or_the_launcher_stops_both_at_the_same_step(job, reason, mode):
    """Without their launcher, they end after a save that exceeds the grace."""
    two = job.start("600", mode, launcher=TWO_PROCESSES).wait_for("step 3", 1)
    if reason == "SIGTERM":
        os.kill(two.pid(1), signal.SIGTERM)
    else:
        two.started.kill()
    newest = two.wait_for_end(0)[-1]
    assert re.fullmatch(rf"saved \d+ {reason}", newest)
    assert two.wait_for_end(1)[-1] == newest
    output = f"Stopping after this step ({reason}) and saving.\n"
    assert output in two.errors() if reason == "SIGTERM" else output == two.errors()


def test_a_hung_process_ends_after_the_grace(job):
    one = job.start("600", "hang").wait_for("step 3")
    one.started.terminate()
    assert one.started.wait(60) == 143
    assert one.lines()[-1] == "step 3"


def command(job: Job, steps: str) -> list[str]:
    """Return the command of a job in a fresh interpreter."""
    return [sys.executable, str(job.path), str(job.folder), steps, "steps"]


def test_an_exiting_shell_does_not_count_as_a_dead_launcher(job):
    in_background = ["sh", "-c", 'nohup "$@" > /dev/null & read line', "sh", *command(job, "20")]
    with subprocess.Popen(in_background, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shell:
        job.wait_for("step 0")
        shell.stdin.close()  # the shell reads end of file and exits
        os.kill(job.pid(), signal.SIGHUP)
        assert job.wait_for_end()[-1] == "saved 19 None"
        assert "Stopping" not in shell.stderr.read()


def own_terminal() -> None:
    """Set up the child; reset SIGHUP in case these tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_saves_and_ends_the_run(job):
    near_end, far_end = os.openpty()
    options = dict.fromkeys(("stdin", "stdout", "stderr"), far_end) | {"start_new_session": True}
    with subprocess.Popen(command(job, "600"), preexec_fn=own_terminal, **options) as process:  # noqa: PLW1509
        os.close(far_end)
        job.wait_for("step 3")
        os.close(near_end)
        assert process.wait(60) == 129
    assert re.fullmatch(r"saved \d+ SIGHUP", job.lines()[-1])


def test_a_second_ctrl_c_ends_a_hung_process_immediately(job):
    one = job.start("600", "hang").wait_for("step 3")
    one.started.send_signal(signal.SIGINT)
    time.sleep(0.3)
    one.started.send_signal(signal.SIGINT)  # the copy of the first signal by torchrun
    time.sleep(1)
    assert one.started.poll() is None
    one.started.send_signal(signal.SIGINT)
    output = r"Stopping after this step \(SIGINT\) and saving\. Press Ctrl-C again .*\ninterrupted\n"
    assert re.fullmatch(output, one.errors())
    assert one.started.returncode == 130


def test_max_hours_saves_stops_and_counts_from_the_process_start(job):
    one = job.start("600", "steps", str(4 / 3600))
    assert (one.errors(), one.started.returncode) == ("Stopping after this step (max_hours) and saving.\n", 0)
    assert one.lines()[-1].endswith(" max_hours")
    age = (time.time() - psutil.Process().create_time()) / 3600
    with Stopper(StoppingArguments(max_hours=age / 2)) as stopper:  # they ended before the stopper started
        wait_until(lambda: stopper.agreed() == "max_hours", 60)
    with Stopper(StoppingArguments(max_hours=age + 1)) as stopper:
        time.sleep(2 * TICK)
        assert stopper.agreed() is None


@pytest.mark.parametrize(("number", "final_lines"), [(signal.SIGUSR1, ["requeue 7"]), (signal.SIGTERM, [])])
def test_the_slurm_script_saves_before_the_time_limit_and_requeues_the_job(tmp_path, number, final_lines):
    """With stand-ins for Slurm and for the launcher, which ends after SIGTERM; the slowed script still starts it."""
    launcher = 'trap "sleep 1; echo saved; exit 1" TERM; echo "$*" > started; while true; do sleep 0.1; done'
    slow = "trap 'sleep ${PAUSE:-0}' DEBUG"
    for name, body in (("accelerate", launcher), ("scontrol", 'echo "$*"'), (".venv/bin/activate", slow)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    command = ["bash", REPOSITORY / "launch" / "slurm.sh", "--data", "my text"]
    own = ["--resume_from_checkpoint", "runs/a/checkpoints/step_00000010"]
    for words in (["--overwrite_output_dir"], ["--overwrite-output-dir=true"], own):  # a requeued job would repeat them
        assert subprocess.run([*command, *words], **options, stderr=subprocess.DEVNULL, check=False).returncode == 1
        assert not (tmp_path / "started").exists()
    with subprocess.Popen(command, **options | {"env": environment | {"PAUSE": "0.3"}}) as job:
        wait_until((tmp_path / "started").is_file, 60)
        job.send_signal(number)
        assert job.communicate(timeout=60)[0].splitlines() == ["saved", *final_lines]
    assert job.returncode == 1
    assert (tmp_path / "started").read_text().endswith("--num_processes 4 train_accelerate.py --data my text\n")


def test_ctrl_c_that_a_shell_ignores_stays_ignored_and_other_handlers_are_restored():
    original, of_sigterm = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with Stopper(StoppingArguments()):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != of_sigterm
        assert signal.getsignal(signal.SIGTERM) == of_sigterm
    finally:
        signal.signal(signal.SIGINT, original)


def test_ctrl_c_while_compiling_ends_the_run_at_once(spawn, store, tmp_path):
    """It also ends the compiler, as in a terminal. Nothing is left running."""
    settings = TINY | {"torch_compile": "true", "data": store.folder, "output_dir": tmp_path / "run"}
    one = spawn("train_accelerate.py", *flags(**settings), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    process = psutil.Process(one.pid)
    wait_until((tmp_path / "run" / "samples.md").is_file)  # the run has begun
    wait_until(lambda: any("cc1plus" in child.name() for child in process.children(recursive=True)))
    children = process.children(recursive=True)
    os.killpg(one.pid, signal.SIGINT)
    output = one.communicate(timeout=60)[1]
    assert one.returncode == 130
    assert re.fullmatch(r"Stopped \(SIGINT\)\. .* the same command starts again\.\n", output)
    assert status(tmp_path / "run")["state"] == "stopped"
    wait_until(lambda: not any(is_running(child.pid) for child in children), seconds=10)
