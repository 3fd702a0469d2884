"""How many threads compute on a CPU. Imported before torch, which asks as it loads."""

import os

import psutil

from training.early import is_launched


def _cores() -> int:
    """Physical ones that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count()
    return min(physical, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else physical


# Where nobody set it, the launcher exports 1, which would idle all other cores; without a launcher, torch might choose another
# number and so round differently. To tell torch later helps by half: a step of two threads is then a fifth slower
# (docs/log.md).
_UNSET = "1" if is_launched() else None
if (os.environ.get("OMP_NUM_THREADS") or None) == _UNSET:
    os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
