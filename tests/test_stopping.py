"""Being asked to stop: real processes under the real launcher, real signals."""

import fcntl
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from conftest import REPOSITORY, clean_environment
from training.guard.stopping import EXIT_CODES, Stopper, StoppingArguments

# A training run without the training: 0.1 s a step, a collective where there are several processes. It writes what it
# does to a file of its own, since its screen may go.
JOB = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from threading import Thread

from torch import distributed, ones

from training.console import say
from training.guard.stopping import EXIT_CODES, Stopper, StoppingArguments
from training.saver import THREAD

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
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_machines", "1")
SAID_ALOUD = ("--mixed_precision", "no", "--dynamo_backend", "no")  # what the launcher would tell us about else
ALONE = (*LAUNCH, *SAID_ALOUD, "--num_processes", "1")
TWO = (*LAUNCH, *SAID_ALOUD, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")


class Job:
    """A script that was started, by a launcher or plainly, and what each of its processes has written to its log."""

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

    def wait_for(self, line: str, rank: int = 0, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while line not in self.lines(rank):
            assert time.monotonic() < end, (line, self.lines(rank), self.stderr())
            time.sleep(0.02)

    def wait_for_end(self, rank: int = 0, seconds: float = 120) -> list[str]:
        """Of a process, whose launcher may be gone; returns its log."""
        end = time.monotonic() + seconds
        while alive(self.pid(rank)):
            assert time.monotonic() < end, (self.lines(rank), self.stderr())
            time.sleep(0.02)
        return self.lines(rank)

    def clean_up(self) -> None:
        for pid in [self.started.pid, *(self.pid(rank) for rank in (0, 1) if self.lines(rank))]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.started.wait()
        if self.started.stdin is not None:
            self.started.stdin.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def job(tmp_path):
    started = []

    def start(launcher: tuple[str, ...], *arguments: str, **options) -> Job:
        started.append(Job(tmp_path, JOB, launcher, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


@pytest.mark.parametrize("reason", ["SIGTERM", "the launcher died"])
def test_one_signal_to_one_of_two_or_to_their_launcher_stops_both_at_the_same_step(job, reason):
    two = job(TWO, "600", "steps")
    two.wait_for("step 3", 1)
    if reason == "SIGTERM":
        os.kill(two.pid(1), signal.SIGTERM)
    else:
        two.started.kill()
    last = two.wait_for_end(0)[-1]
    assert re.fullmatch(rf"saved \d+ {reason}", last)
    assert two.wait_for_end(1)[-1] == last
    said = f"Stopping after this step ({reason}), and saving.\n"
    assert said in two.stderr() if reason == "SIGTERM" else said == two.stderr()


def test_without_its_launcher_one_process_saves_and_ends_also_where_saving_takes_longer_than_the_grace(job):
    one = job(ALONE, "600", "slow save")
    one.wait_for("step 3")
    one.started.kill()
    assert re.fullmatch(r"saved \d+ the launcher died", one.wait_for_end()[-1])


def test_a_process_that_hangs_ends_after_the_grace(job):
    one = job((sys.executable,), "600", "hang")
    one.wait_for("step 3")
    one.started.terminate()
    assert one.started.wait(60) == 143
    assert one.lines()[-1] == "step 3"


def test_a_shell_that_exits_is_no_launcher_that_dies(job):
    in_background = ("sh", "-c", 'nohup "$@" > /dev/null & read line', "sh", sys.executable)
    one = job(in_background, "20", "steps", stdin=subprocess.PIPE)
    one.wait_for("step 0")
    one.started.communicate()  # the shell reads its end, and exits
    os.kill(one.pid(), signal.SIGHUP)
    assert one.wait_for_end()[-1] == "saved 19 None"
    assert "Stopping" not in one.stderr()


def own_terminal() -> None:
    """In the child; also where whoever runs these tests lets no hang-up through, as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_that_is_closed_ends_the_run_after_it_has_saved(job):
    ours, theirs = os.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    one = job((sys.executable,), "600", "steps", preexec_fn=own_terminal, **terminal)
    os.close(theirs)
    one.wait_for("step 3")
    os.close(ours)
    assert one.started.wait(60) == 129
    assert re.fullmatch(r"saved \d+ SIGHUP", one.lines()[-1])


def test_the_second_ctrl_c_stops_at_once_whatever_the_process_hangs_in(job):
    one = job((sys.executable,), "600", "hang")
    one.wait_for("step 3")
    one.started.send_signal(signal.SIGINT)
    time.sleep(0.3)
    one.started.send_signal(signal.SIGINT)  # torchrun's copy of the first one
    time.sleep(1)
    said = "Stopping after this step (SIGINT), and saving. Ctrl-C once more ends the run at once, without saving.\n"
    assert one.stderr() == said
    assert one.started.poll() is None
    one.started.send_signal(signal.SIGINT)
    assert one.started.wait(60) == 130
    assert one.stderr() == said + "interrupted\n"


def test_max_hours_stop_and_save_and_count_from_the_start_of_the_process(job):
    before = time.monotonic()
    one = job((sys.executable,), "600", "steps", str(4 / 3600))
    assert one.started.wait(60) == 0
    assert time.monotonic() - before >= 4
    assert one.lines()[-1].endswith(" max_hours")
    assert one.stderr() == "Stopping after this step (max_hours), and saving.\n"
    age = (time.time() - psutil.Process().create_time()) / 3600
    assert age > 0
    with Stopper(StoppingArguments(max_hours=age / 2)) as stopper:
        assert stopper._hours_end < time.monotonic()  # over before the stopper began
    with Stopper(StoppingArguments(max_hours=age + 1)) as stopper:
        assert stopper._hours_end == pytest.approx(time.monotonic() + 3600, abs=60)


def test_ending_a_forked_child_is_no_request_to_stop():
    before = signal.getsignal(signal.SIGINT)
    with Stopper(StoppingArguments()) as stopper:
        assert signal.getsignal(signal.SIGINT) is not before
        fork = multiprocessing.get_context("fork")
        started = fork.Event()
        child = fork.Process(target=lambda: (started.set(), time.sleep(600)))
        child.start()
        assert started.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        stopper._sent.send(bytes([signal.SIGUSR1]))  # read after what the child might have sent
        while select.select([stopper._received], [], [], 0)[0]:
            time.sleep(0.01)
        assert (stopper.requested, stopper.agreed()) == (None, None)
        stopper.request("SIGINT")
        assert EXIT_CODES[stopper.agreed()] == 130
    assert signal.getsignal(signal.SIGINT) is before  # put back
