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
from shlex import quote

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


def launch_command() -> str:
    """Return the command of this run: `python train_accelerate.py`, or `accelerate launch` with its main options."""
    if not is_launched():
        return "python train_accelerate.py"
    file = Path(launcher_option("config_file"))
    processes = os.environ.get("WORLD_SIZE", "1")
    if file.parent.name == "launch":
        file = Path("launch", file.name)
    options = "" if file == Path() else f" --config_file {quote(str(file))}"
    if processes != "1" or options or launcher_option("num_processes"):  # without a number, all GPUs
        options += f" --num_processes {processes}"
    for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port"):
        options += f" --{name} {value}" if (value := launcher_option(name)) else ""
    return f"accelerate launch --quiet{options} train_accelerate.py"


def launcher_option(name: str) -> str:
    """Return the value of an option of the launcher. It is empty without the option, or if the launcher has exited."""
    words = []
    with suppress(psutil.Error):
        line = psutil.Process(PARENT).cmdline()
        options = line[: len(line) - len(sys.argv) + 1]  # the script's own arguments follow
        words = [part for word in options for part in word.split("=", 1)]
    return {word.replace("-", "_"): value for word, value in pairwise(words)}.get(f"__{name}", "")


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


die_with_launcher(True)
