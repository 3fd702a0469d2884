"""Time the quickstart in a fresh clone, and report the quality of its model.

python -m benchmarks.quickstart          # writes benchmarks/results/quickstart-DEVICE.json
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.contestants import LAUNCH
from benchmarks.results import REPOSITORY, about, device_kind, run_python, write
from common.command_line import FlagParser, run
from training.checkpoints.metrics import read_metrics


def main(arguments: list[str]) -> None:
    FlagParser((), __doc__).parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # No warm caches: text is tokenized and graphs are compiled as in a fresh clone on a new machine.
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        start = time.perf_counter()
        run_python(*LAUNCH, cwd=clone, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")})
        seconds = time.perf_counter() - start
        entries = read_metrics(clone / "runs" / "quickstart" / "metrics.jsonl")
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    last = [entry for entry in entries if "eval_loss" in entry][-1]
    result = {
        **about("quickstart", []),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "seconds_in_all": round(seconds, 1),
        "tokens": max(entry.get("tokens", 0) for entry in entries),
        "tokens_per_second_median": statistics.median(speeds),
        "eval_loss": round(last["eval_loss"], 4),
        "eval_bits_per_byte": round(last["eval_bits_per_byte"], 4),
    }
    print(json.dumps(result, indent=2))
    write(f"quickstart-{device_kind()}", result)


if __name__ == "__main__":
    run(main)
