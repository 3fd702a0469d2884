"""Time a batch of 64 x 513 tokens in the training loop, compared with nanoGPT's get_batch.

python -m benchmarks.batches                            # writes benchmarks/results/batches-cpu.json

The store holds 400 MB of random ids. No window is read twice. The "cold" cases drop the file from the page cache before
every batch. For the memory map, the windows of the next batch are then announced, as the training loop does, 20 ms
(one step) earlier.
"""

import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.contestants import rows_one_by_one
from benchmarks.results import about, write
from common.command_line import FlagParser, run
from training.data.batches import BatchPlan, TrainBatches, WindowOrder
from training.data.tokens import Tokens

ROWS, CONTEXT, N_TOKENS, VOCAB_SIZE = 64, 512, 200_000_000, 50_000
BATCHES, COLD_BATCHES, STEP_SECONDS = 2000, 200, 0.02
CPU = torch.device("cpu")


def timed(get: Callable[[int], object], count: int, before: Callable[[int], None] = lambda i: None) -> dict[str, float]:
    """Return the median, 99th percentile and maximum of the microseconds per batch."""
    taken = []
    for i in range(count):
        before(i)
        start = time.perf_counter()
        get(i)
        taken.append((time.perf_counter() - start) * 1e6)
    median, p99, worst = np.quantile(taken, (0.5, 0.99, 1)).round(1).tolist()
    return {"median_us": median, "p99_us": p99, "worst_us": worst}


def measure(path: Path) -> dict[str, dict[str, float]]:
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, N_TOKENS, dtype=np.uint16)
    ids.tofile(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    order, plan = WindowOrder(N_TOKENS, CONTEXT, seed=1), BatchPlan(CONTEXT, ROWS, 1, 1)
    segments = np.append(np.arange(0, N_TOKENS, 700), N_TOKENS) - 1
    in_ram = torch.from_numpy(ids.view("<i2"))
    from_file = Tokens.mapped(np.memmap(path, np.uint16, mode="r"), CPU)
    nanogpt = rows_one_by_one(lambda: np.memmap(path, dtype=np.uint16, mode="r"), ROWS, CONTEXT, CPU)
    ram, masked, mapped = (
        TrainBatches(tokens, order, plan, rank=0)
        for tokens in (Tokens(in_ram, CPU), Tokens(in_ram, CPU, segments), from_file)
    )

    def forget() -> None:
        from_file.file.madvise(mmap.MADV_DONTNEED)  # mapped pages would otherwise stay in the cache
        with path.open("rb") as content:
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def before_a_step(i: int) -> None:
        forget()
        from_file.announce(order.starts(i * ROWS, ROWS), CONTEXT + 1)
        time.sleep(STEP_SECONDS)

    torch.set_num_threads(1)
    return {
        "ram": timed(lambda i: ram(i, 0), BATCHES),
        "ram_mask_documents": timed(lambda i: masked(i, 0), BATCHES),
        "memory_map": timed(lambda i: mapped(i, 0), BATCHES),
        "memory_map_cold": timed(lambda i: mapped(i, 0), COLD_BATCHES, before_a_step),
        "nanogpt_get_batch": timed(lambda i: nanogpt(), BATCHES),
        "nanogpt_get_batch_cold": timed(lambda i: nanogpt(), COLD_BATCHES, lambda i: forget()),
    }


def main(arguments: list[str]) -> None:
    FlagParser((), __doc__).parse(arguments)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        systems = measure(Path(folder) / "train.bin")
    result = {
        **about("batches", []),
        "threads": 1,
        "batch": [ROWS, CONTEXT + 1],
        "systems": systems,
        "times_as_fast": round(systems["nanogpt_get_batch"]["median_us"] / systems["ram"]["median_us"], 1),
    }
    print(json.dumps(result, indent=2))
    write("batches-cpu", result)


if __name__ == "__main__":
    run(main)
