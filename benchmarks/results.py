"""Result files of the benchmarks: JSON with the command, date, device and versions of each measurement."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from common.atomic import write_atomic
from common.errors import UserError

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "accelerate")


def device_kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, {cpu_name()}"


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def about(module: str, arguments: list[str]) -> dict[str, Any]:
    """Return the first fields of every result: command, date, device and versions."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *arguments]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


def read_runs(path: Path, name: str) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """Return the head of a file with a run per line, and the runs by what defines them, their value of `name`."""
    if not path.is_file():
        return None, {}
    head, *runs = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head, {key(run[name]): run for run in runs}


def write_runs(path: Path, head: dict[str, Any], runs: dict[str, dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in [head, *runs.values()]))


def require_same_conditions(
    path: Path, head: dict[str, Any], names: tuple[str, ...] = ("device", *PACKAGES), **text: Any
) -> None:
    """Raise a `UserError` if one of `names`, or of the values of `text`, differs from the runs in a file."""
    now, names = about("", []) | text, (*names, *text)
    if changed := [f"{name} {head[name]}, now {now[name]}" for name in names if head[name] != now[name]]:
        raise UserError(f"{path.name} was measured with {'; '.join(changed)}: use the same, or delete the file.")


def as_flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def run_python(
    *command: Any, cwd: Path = REPOSITORY, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with the words of a command line and the options of `subprocess.run`. With `check`, raise a
    `UserError` if it fails."""
    result = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, check=False, text=True, **options)
    if check and result.returncode:
        *_, problem = ["its error is above", *(result.stderr or "").strip().splitlines()]
        raise UserError(f"python {' '.join(map(str, command[:3]))} ended with exit code {result.returncode}: {problem}")
    return result


def commit() -> str:
    """Return the commit of the code, with a `+` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()


def write(name: str, result: dict[str, Any]) -> Path:
    """Write the result to benchmarks/results/NAME.json, and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Wrote benchmarks/results/{path.name}.")
    return path


def spread(values: ArrayLike, digits: int = 1) -> dict[str, float]:
    """Return the median and the 10th and 90th percentiles."""
    p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9))
    return {"median": round(median, digits), "p10": round(p10, digits), "p90": round(p90, digits)}
