"""Memory and cores that this process may use, and memory that glibc keeps after it was freed."""

import ctypes
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MEMBERSHIP, CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# By controller in the membership file (none in version 2): files of limit and usage, and prefix of the page cache.
CONTROL_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}

M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # parameters of glibc's mallopt


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine and in the control groups of this process. `psutil`
    knows only the machine, but the system kills a process that exceeds the limit of its container or Slurm job."""
    return min([psutil.virtual_memory().available, *(limit - usage for limit, usage in memory_limits())])


def memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage of each control group of this process, in bytes. Usage is without page cache."""
    for controller, folder in _control_groups():
        limit, usage, prefix = CONTROL_FILES.get(controller, CONTROL_FILES[""])
        with suppress(OSError, ValueError):  # a container sees only its root; no limit is the word max
            stat = (folder / "memory.stat").read_text()
            cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
            numbers = [int((folder / name).read_text()) for name in (limit, usage)]
            yield numbers[0], numbers[1] - sum(map(int, cache))


def cores(logical: bool) -> int:
    """Return the number of cores, or with `logical` of hardware threads, that this process may use. A container's limit
    is a share of the time of all cores; more threads than that would wait for each other."""
    number = psutil.cpu_count(logical) or os.cpu_count()
    if sys.platform == "darwin" and not logical:  # like PyTorch, without Apple's efficiency cores
        with suppress(OSError, ValueError):  # Intel has only one kind
            name = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
            number = int(subprocess.run(name, check=False, capture_output=True, text=True).stdout)
    if hasattr(os, "sched_getaffinity"):
        number = min(number, len(os.sched_getaffinity(0)))
    for _, folder in _control_groups():
        with suppress(OSError, ValueError):  # no limit is the word max in version 2, -1 in version 1
            files = [folder / "cpu.max", *map(folder.joinpath, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))]
            quota, period = " ".join(file.read_text() for file in files if file.is_file()).split()
            number = min(number, math.ceil(int(quota) / int(period))) if int(quota) > 0 else number
    return number


def _control_groups() -> Iterator[tuple[str, Path]]:
    """Yield the controller, empty in version 2, and the folder of each control group of this process."""
    membership = MEMBERSHIP.read_text(encoding="utf-8") if MEMBERSHIP.is_file() else ""
    for line in membership.splitlines():
        _, controller, group = line.split(":", 2)
        folder = CONTROL_GROUPS / controller / group.strip("/")
        yield from ((controller, parent) for parent in (folder, *folder.parents))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, for steps on a CPU and batches of text that allocate the same again and again.
    By default, glibc returns large blocks to the system, which must clear every page again: a third of a step's time,
    and a fifth of the time of tokenizing."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
