"""Link to the launcher process: if the launcher dies, this process ends too. Import it before slow imports.

A process that survived its launcher would continue training, or join the next job, which uses the same port.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

LAUNCHER = "GPT2SCRATCH_LAUNCHER"
# Parent process at start; after a restart (restart.py), the parent of the previous process. Removed from the
# environment, because it is not the parent of processes that this one starts.
PARENT = int(os.environ.pop(LAUNCHER, os.getppid()))
# Only `accelerate launch` sets the first variable, and only torchrun the second. A parent process alone does not show a
# launcher: the parent of `nohup python train_accelerate.py &` is a shell, and its exit must not end the run.
_SET_BY_LAUNCHERS = ("ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID")
_SET_PARENT_DEATH_SIGNAL = 1  # constant of Linux's prctl


def is_launched() -> bool:
    """Return whether the parent of this process is a launcher."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def launch_words() -> list[str]:
    """Return the command of this run without the script's arguments: of its launcher, or `python train_accelerate.py`.
    The number of processes is added if it comes from a file or from the GPUs of this machine."""
    if not is_launched():
        return ["python", "train_accelerate.py"]
    words = LAUNCHER_LINE
    if len(words) < 3:  # it has exited
        words = ["python", "accelerate", "launch", "--quiet", "train_accelerate.py"]
    *words, script = ["python"] * words[1].startswith("-") + words[1:]
    words[0] = Path(words[0]).name
    processes = os.environ.get("WORLD_SIZE", "1")
    is_accelerate = any(word.startswith("accelerate") for word in words[:4])  # also python -m
    if is_accelerate and processes != "1" and not launcher_option("num_processes"):
        words += ["--num_processes", processes]
    return [*words, script]


def launcher_option(name: str) -> str:
    """Return the value of an option of the launcher. It is empty without the option or a launcher."""
    words = [part for word in LAUNCHER_LINE for part in word.split("=", 1)]
    return {word.replace("-", "_"): value for word, value in pairwise(words)}.get(f"__{name}", "")


def _launcher_words() -> list[str]:
    """Return the parent's command line up to the script of this process, or an empty list if the parent has exited."""
    with suppress(psutil.Error):
        line = psutil.Process(PARENT).cmdline()
        return line[: len(line) - len(sys.argv) + 1]
    return []


def set_by_launcher(name: str) -> bool:
    """Return whether the launcher set an environment variable, rather than inheriting its value."""
    if not is_launched() or name not in os.environ:
        return False
    try:
        return psutil.Process(PARENT).environ().get(name) != os.environ[name]
    except psutil.Error:
        return True


def is_alone_by_mistake() -> bool:
    """Return whether `accelerate launch` was asked for several processes but started one.
    It then sets a master address without a WORLD_SIZE. The address may also come from the shell, as under Slurm."""
    if not is_launched() or "WORLD_SIZE" in os.environ:
        return False
    has_master = set_by_launcher("MASTER_ADDR") or set_by_launcher("MASTER_PORT")
    return has_master or launcher_option("num_processes") not in ("", "0", "1")


def die_with_launcher(enable: bool) -> None:
    """Set whether the system kills this process when its launcher exits. Linux only. Call it from the main thread."""
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL if enable else 0)


LAUNCHER_LINE = _launcher_words()  # read at the start: the launcher may be killed before this process stops
die_with_launcher(True)
