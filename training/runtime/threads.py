"""Number of CPU threads, how they wait, and a GPU that is not used. Import this before torch, which reads all three."""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import os

from common.machine import cores
from training.runtime.launcher import launcher_option, set_by_launcher

# By default, the launcher sets 1, which would idle all other cores.
_number = os.environ.get("OMP_NUM_THREADS", "")
_is_chosen = not set_by_launcher("OMP_NUM_THREADS") or launcher_option("num_cpu_threads_per_process")
# Otherwise torch might choose another number and round differently. It is set here, not later in torch, because then a
# step of two threads takes a fifth longer (docs/log.md).
if _number in ("", "1") and not (_number and _is_chosen):
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores(logical=False) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
# `accelerate launch --cpu` sets it. Torch then finds no NVIDIA or AMD GPU; AMD's library ignores an empty list.
if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "on", "t", "true", "y", "yes"):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = "-1"
# By default, as many compilers run at once as the machine has cores, also in a container with a quota of fewer.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, cores(logical=True))))
# Threads wait for each other in every step. By default they spin for milliseconds, and a step takes several times
# longer if another process uses a core. This is libgomp's own value for more threads than cores; it costs 3% if the
# cores are free (docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
