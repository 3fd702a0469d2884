"""Train as train_accelerate.py does, with synchronizations forbidden and what the GPU is asked for written down.

python tests/fake_cuda/observed_run.py RESULT.json [the flags of train_accelerate.py]

Every step but the first runs under `set_sync_debug_mode("error")`. What the first one compiled is read from Inductor's cache,
which has to be empty before (TORCHINDUCTOR_CACHE_DIR), with TORCHINDUCTOR_BENCHMARK_KERNEL=1 for the bytes of each kernel.
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
from command_line import run
from training.step import Trainer

KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\(.*?'kernel_num_gb': ([\d.e-]+)", re.MULTILINE | re.DOTALL)
BUFFER = re.compile(r"= empty_strided_cuda\(\(([\d, ]+)\), \([\d, ]*\), torch\.float32\)")


def compiled_graphs() -> dict:
    """Bytes that the Triton kernels of all graphs read and write, once each, and the shapes of their fp32 buffers."""
    gigabytes, buffers = {}, set()
    for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        if "class Runner" in code:  # not the file of a single kernel
            sizes = {name: float(size) for name, size in KERNEL.findall(code)}
            launched = re.findall(r"(triton_\w+)\.run\(", code.split("class Runner")[1].split("def benchmark")[0])
            gigabytes[file.name] = [(name, sizes[name]) for name in launched]
            buffers |= {tuple(map(int, shape.strip(", ").split(", "))) for shape in BUFFER.findall(code)}
    total = sum(size for kernels in gigabytes.values() for _, size in kernels)
    return {"triton_gb": round(total, 4), "fp32_buffers": sorted(buffers), "kernels": list(gigabytes.values())}


def main(arguments: list[str]) -> None:
    result, *flags = arguments
    observed, plain = {}, Trainer.step
    mark = ctypes.CDLL("libcuda.so.1").fake_mark

    def step(self: Trainer, number: int, learning_rate: float):
        mark(f"step {number}".encode())
        if number > 0:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, number, learning_rate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            mark(b"after")
            if number == 0 and "TORCHINDUCTOR_CACHE_DIR" in os.environ:
                observed.update(compiled_graphs())
            observed["steps"] = number + 1
            observed["peak_bytes"] = torch.cuda.max_memory_allocated()
            Path(result).write_text(json.dumps(observed), encoding="utf-8")

    Trainer.step = step
    train_accelerate.main_or_restart(flags)


if __name__ == "__main__":
    run(main)
