"""Run train_accelerate.py with synchronizations forbidden, and record its use of the GPU.

python tests/fake_cuda/observed_run.py RESULT.json [flags of train_accelerate.py]

Every step after the first runs under `set_sync_debug_mode("error")`. Validation is skipped, because the device would
have to count the scored tokens, and this device computes nothing.

TORCHINDUCTOR_BENCHMARK_KERNEL=1 makes Inductor record the bytes of each kernel. The graphs that the first step compiled
are then read from Inductor's cache, and TORCHINDUCTOR_CACHE_DIR must name an empty folder.
"""

import ctypes
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import train_accelerate
from common.command_line import run
from training.report.validation import Validation
from training.runtime.restart import restarting
from training.step.train_step import TrainStep

KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\(.*?'kernel_num_gb': ([\d.e-]+)", re.MULTILINE | re.DOTALL)
BUFFER = re.compile(r"= empty_strided_cuda\(\(([\d, ]+)\), \([\d, ]*\), torch\.float32\)")


def compiled_graphs(cache: Path) -> dict:
    """Return the gigabytes that the Triton kernels of all graphs read and write, and shapes of their fp32 buffers."""
    gigabytes, buffers = 0.0, set()
    for file in cache.rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        if "class Runner" in code:  # not the file of a single kernel
            sizes = {name: float(size) for name, size in KERNEL.findall(code)}
            called = code.split("class Runner")[1].split("def benchmark")[0]
            gigabytes += sum(sizes[name] for name in re.findall(r"(triton_\w+)\.run\(", called))
            buffers |= {tuple(map(int, shape.strip(", ").split(", "))) for shape in BUFFER.findall(called)}
    return {"triton_gb": round(gigabytes, 2), "fp32_buffers": sorted(buffers)}


def main(arguments: list[str]) -> None:
    result, *flags = arguments
    observed, plain = {}, TrainStep.__call__
    mark = ctypes.CDLL("libcuda.so.1").fake_mark

    def step(self: TrainStep, number: int, rate_factor: float, second_weight: float | None):
        mark(f"step {number}".encode())
        torch.cuda.set_sync_debug_mode("error" if number > 0 else "default")
        try:
            return plain(self, number, rate_factor, second_weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            mark(b"after a step")
            if number == 0 and os.environ.get("TORCHINDUCTOR_BENCHMARK_KERNEL") == "1":
                observed.update(compiled_graphs(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])))
            plan = self.batches.plan
            observed.update(steps=number + 1, micro_batch=plan.micro_batch, accumulation=plan.accumulation)
            observed["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            Path(result).write_text(json.dumps(observed), encoding="utf-8")

    TrainStep.__call__ = step
    Validation.validate = lambda *_: None
    restarting(train_accelerate.main)(flags)


if __name__ == "__main__":
    run(main)
