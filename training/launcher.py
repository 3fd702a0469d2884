"""Imported before anything that takes seconds to import: a launcher that dies meanwhile takes this process with it.

Left alone, it would train on, or join the processes of the next job, which meets at the same port.
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
# The parent at the very start; after a restart (restart.py), that of the process before. Taken out of the environment,
# since it is not the parent of what this process starts.
PARENT = int(os.environ.pop(LAUNCHER, os.getppid()))
# `accelerate launch` sets the one, torchrun the other, and nobody else either. The parent alone tells nothing: that of
# `nohup python train_accelerate.py &` is a shell, whose end means nothing.
_SET_BY_LAUNCHERS = ("ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID")
_SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


def is_launched() -> bool:
    """Whether the parent of this process is a launcher."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def launch_command() -> str:
    """Return how a command like this one starts: `python train_accelerate.py`, or `accelerate launch` with its main options."""
    if not is_launched():
        return "python train_accelerate.py"
    file = Path(launcher_option("config_file"))
    processes = os.environ.get("WORLD_SIZE", "1")
    options = f" --config_file launch/{file.name}" if file.parent.name == "launch" else ""
    options += f" --num_processes {processes}" if processes != "1" else ""
    return f"accelerate launch --quiet{options} train_accelerate.py"


def launcher_option(name: str) -> str:
    """Return what the launcher's command line gives for an option; empty where it has none, or the launcher is gone."""
    words = []
    with suppress(psutil.Error):
        words = [part for word in psutil.Process(PARENT).cmdline() for part in word.split("=", 1)]
    return {word.replace("-", "_"): value for word, value in pairwise(words)}.get(f"__{name}", "")


def set_by_launcher(name: str) -> bool:
    """Whether a variable of the environment has a value that the launcher was not started with."""
    if not is_launched() or name not in os.environ:
        return False
    try:
        return psutil.Process(PARENT).environ().get(name) != os.environ[name]
    except psutil.Error:
        return True


def is_alone_by_mistake() -> bool:
    """Whether `accelerate launch` was asked for several processes and started one: without a WORLD_SIZE, it names a meeting
    point only then. A shell may name one too, as under Slurm."""
    if not is_launched() or "WORLD_SIZE" in os.environ:
        return False
    has_meeting_point = set_by_launcher("MASTER_ADDR") or set_by_launcher("MASTER_PORT")
    return has_meeting_point or launcher_option("num_processes") not in ("", "0", "1")


def die_with_launcher(wanted: bool) -> None:
    """Whether the system is to kill this process when its launcher ends. Only Linux can; called by the main thread."""
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL if wanted else 0)


def _is_orphan() -> bool:
    """Whether the launcher has died before this could be asked for. In a container, process 1 may be the launcher itself."""
    if not is_launched() or os.getppid() == PARENT != 1:
        return False
    if os.getppid() != PARENT:
        return True
    try:
        return os.fsencode(sys.argv[0]) not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False


die_with_launcher(True)
if _is_orphan():
    os._exit(128 + signal.SIGTERM)
