"""How many threads compute on a CPU. Imported before torch, which asks as it loads."""

import os

import psutil

from training.early import is_launched


def _cores() -> int:
    """Physical ones that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count()
    return min(physical, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else physical


# The launcher exports 1 where nobody told it otherwise, which would idle all other cores. To tell torch later helps by half:
# a step of two threads is then a fifth slower (docs/log.md).
if is_launched() and os.environ.get("OMP_NUM_THREADS") == "1":
    os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
