"""Training runs on one thread each. Finished runs are kept in a file with a run per line, so the same plan resumes."""

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import REPOSITORY, as_flags, key, run_python, write_runs
from common.errors import UserError
from training.checkpoints.metrics import read_metrics
from training.data.run_data import is_store


class Trained(NamedTuple):
    entries: list[dict[str, Any]]  # of metrics.jsonl
    seconds: float
    cpu_seconds: float

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "eval_loss" in entry]


def train(folder: Path, settings: dict[str, Any]) -> Trained:
    """Run train_accelerate.py with these flags in a process with one thread."""
    command = [sys.executable, "train_accelerate.py", *as_flags(settings | {"output_dir": folder})]
    environment, start = os.environ | {"OMP_NUM_THREADS": "1"}, time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)  # the only call that returns the CPU time of one child
        process.returncode, seconds = os.waitstatus_to_exitcode(status), time.perf_counter() - start
        if process.returncode != 0:
            output.seek(0)
            raise UserError(f"{shlex.join(command[1:])} failed: {output.read().decode(errors='replace')[-1500:]}")
    return Trained(read_metrics(folder / "metrics.jsonl"), seconds, usage.ru_utime + usage.ru_stime)


def measure_missing(
    path: Path,
    head: dict[str, Any],
    found: dict[str, dict[str, Any]],
    plan: Iterable[dict[str, Any]],
    measure: Callable[[dict[str, Any], Path], dict[str, Any]],
    workers: int,
    hours: float = math.inf,
) -> None:
    """Add the runs of `plan` that are not in `found` to it and to the file. Start none after `hours`."""
    end, lock = time.monotonic() + 3600 * hours, threading.Lock()

    def work(run: dict[str, Any]) -> None:
        if time.monotonic() < end:
            with tempfile.TemporaryDirectory() as scratch:
                result = measure(run, Path(scratch) / "run")
            with lock:  # the file has one draft
                found[key(run)] = result
                write_runs(path, head, found)
            print(json.dumps(result), flush=True)

    missing = {key(run): run for run in plan if key(run) not in found}
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, missing.values()))  # raises the error of a failed run; those that have begun are kept


def token_store(name: str, text: str, **settings: Any) -> Path:
    """Return the store data/NAME. If there is none, tokenize the text with these flags of `tokenizer.pretokenize`."""
    store = REPOSITORY / "data" / name
    if not is_store(str(store)):
        run_python("-m", "tokenizer.pretokenize", *as_flags({"input": text, "output": store} | settings))
    return store
