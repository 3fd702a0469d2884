"""Contestants of `benchmarks.train_step` and rungs of `benchmarks.ladder`: loops that train the same model.

All take turns, each in a fresh process, in several rounds:

python -m benchmarks.contestants FOLDER '{"contestant": "raw", ...}'

FOLDER holds store/. Prints one JSON line: the seconds per step of each window, and the peak memory.
"""

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
import transformers
from torch.utils.benchmark import Timer, timer  # `timer` waits for the device

from benchmarks.results import REPOSITORY, as_flags, run_python, spread
from benchmarks.workload import Workload, make_store
from common.limits import setting
from training.checkpoints.metrics import read_metrics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOGGING_STEPS = 10
LAUNCH = ("-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1")
LAUNCH += ("--mixed_precision", "no", "--dynamo_backend", "no", "train_accelerate.py")


@dataclass(frozen=True)
class Measurement:
    """Length of a measurement: `warmup` untimed steps, then `windows` timed windows of `steps` steps each."""

    warmup: int = setting(5, "Steps before the first timed window.")
    windows: int = setting(3, "Timed windows per process.", minimum=1)
    steps: int = setting(5, "Steps per window.", minimum=1)


@dataclass
class ContestArguments:
    preset: str = setting("shakespeare_char", "Preset in presets/ that gives the model's shape.")
    sequences: int = setting(16, "Sequences per step, in one micro-batch.", minimum=1)
    rounds: int = setting(3, "Processes per contestant.", minimum=1)


@dataclass(frozen=True)
class Rung:
    """Settings of a raw PyTorch loop on our model: one switch per optimization."""

    batches: str = "ours"  # or `ram_loop`, `memory_map_loop`: one row at a time, as in nanoGPT
    compiled: bool = True
    bf16: bool = True
    attention: str = "auto"
    fused_loss: bool = True
    fused_optimizer: bool = True
    keeps_memory: bool = True  # keeps freed memory, on a CPU
    bf16_residual: bool = False
    waits: bool = False  # reads the loss after every step


def measured(step: Callable[[int], object], measurement: Measurement) -> dict[str, Any]:
    """Time `step`, which receives its number. The device is synchronized only at both ends of a window."""
    start = timer()
    step(0)
    first = timer() - start
    for number in range(1, measurement.warmup):
        step(number)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds, number = [], measurement.warmup
    for _ in range(measurement.windows):
        start = timer()
        for _ in range(measurement.steps):
            step(number)
            number += 1
        seconds.append((timer() - start) / measurement.steps)
    return {
        "seconds_a_step": seconds,
        "seconds_of_the_first_step": first,
        "recompiles": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "peak_memory_bytes": peak_memory(),
    }


def peak_memory() -> int:
    """Return the peak bytes of the device's allocations; on a CPU, of the whole process."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rows_one_by_one(
    read: Callable[[], np.ndarray], sequences: int, context: int, device: torch.device = DEVICE
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a builder of batches like nanoGPT's `get_batch`: random positions, a loop over rows, pinned for a GPU."""

    def batch() -> tuple[torch.Tensor, ...]:
        data = read()
        places = torch.randint(len(data) - context, (sequences,))
        pairs = (
            torch.stack([torch.from_numpy(data[i + shift : i + shift + context].astype(np.int64)) for i in places])
            for shift in (0, 1)
        )
        if device.type == "cuda":
            return tuple(rows.pin_memory().to(device, non_blocking=True) for rows in pairs)
        return tuple(pairs)

    return batch


def memory_map(folder: Path) -> Callable[[], np.ndarray]:
    """Return a function that maps the training file again for each batch, as nanoGPT does."""
    return lambda: np.memmap(folder / "store" / "train.bin", dtype=np.uint16, mode="r")


def ours(folder: Path, workload: Workload, measurement: Measurement, **flags: str) -> dict[str, Any]:
    """Measure `accelerate launch train_accelerate.py` with these flags on the workload, from the run's own log."""
    run = folder / f"run-{os.getpid()}"
    steps = measurement.warmup + measurement.windows * measurement.steps
    settings = {
        "config": f"presets/{workload.preset}.yaml",
        "data": folder / "store",
        "output_dir": run,
        "vocab_size": workload.vocab_size,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), workload.dropout),
        "tokens_per_step": workload.tokens,
        "per_device_train_batch_size": workload.sequences,
        "torch_compile": "true",  # as the default does for a run of usual length
        "max_steps": steps,
        "warmup_steps": 1,
        # A window must consist of whole log lines.
        "logging_steps": math.gcd(measurement.warmup, measurement.steps, LOGGING_STEPS),
        "eval_strategy": "no",
        "save_strategy": "no",
        "max_eval_samples": 1,
        "sample_prompts": "word1",
        "sample_tokens": 0,
        **flags,
    }
    environment = os.environ | {"TORCH_LOGS": "recompiles,graph_breaks"}
    start = time.time()
    with subprocess.Popen(
        [sys.executable, *LAUNCH, *as_flags(settings)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines, first = [], None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("First step after"):
                first = time.time() - start
    if process.returncode:
        sys.exit("".join(lines))
    speeds = [entry for entry in read_metrics(run / "metrics.jsonl") if "tokens_per_second" in entry]
    logged = [entry for entry in speeds if entry["step"] > measurement.warmup]
    seconds = [workload.tokens / entry["tokens_per_second"] for entry in logged]
    a_window = len(seconds) // measurement.windows
    windows = np.array(seconds).reshape(measurement.windows, a_window).mean(axis=1)
    last = logged[-1]
    while_training = lines[: next(i for i, line in enumerate(lines) if line.startswith(f"step {steps}/"))]
    return {
        "seconds_a_step": windows.tolist(),
        "seconds_to_the_first_step": first,
        "recompiles": sum("Recompiling function" in line for line in while_training),
        "graph_breaks": sum("Graph break" in line for line in while_training),
        "peak_memory_bytes": round(last["peak_memory_gb"] * 1e9),
        "data_share": float(np.mean([entry["data_share"] for entry in logged])),
        **({"mfu": last["mfu"]} if "mfu" in last else {}),
        "device_line": next(line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("Device:")),
    }


def raw(folder: Path, workload: Workload, measurement: Measurement, **switches: Any) -> dict[str, Any]:
    """Measure our model in a minimal loop, which shows the overhead of Accelerate and the rest of a run.
    `switches`: settings of a `Rung`."""
    from common.machine import keep_freed_memory
    from modeling_gpt2scratch import GPT2ScratchConfig
    from tokenizer.store.store import TokenStore
    from training.data.batches import BatchPlan, TrainBatches, WindowOrder
    from training.data.run_data import place_tokens
    from training.runtime.device import DeviceArguments, decide
    from training.step.loss import NextTokenLoss
    from training.step.model import build_model
    from training.step.optim import OptimArguments, build_optimizer

    torch.set_float32_matmul_precision("high")
    rung = Rung(**switches)
    if rung.keeps_memory and DEVICE.type == "cpu":
        keep_freed_memory()
    arguments = DeviceArguments(
        mixed_precision="bf16" if rung.bf16 else "no",
        bf16_residual=rung.bf16_residual,
        attn_implementation=rung.attention,
    )
    setup = decide(arguments, workload.n_positions)
    model = build_model(GPT2ScratchConfig(**workload.model), setup, seed=0).to(DEVICE).train()
    fused = NextTokenLoss(model)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=rung.bf16):
            if rung.fused_loss:
                return fused(inputs, targets, targets.numel())
            logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss, logits  # Transformers' and nanoGPT's models return the logits too

    forward = torch.compile(loss_of, fullgraph=True, dynamic=False) if rung.compiled else loss_of
    optimizer = build_optimizer(model, OptimArguments(), DEVICE)
    if not rung.fused_optimizer:
        optimizer = torch.optim.AdamW(optimizer.param_groups, foreach=False)
    store = TokenStore(folder / "store")
    if rung.batches == "ours":
        where = "device" if DEVICE.type == "cuda" else "ram"
        tokens = place_tokens(store, "train", where, DEVICE, False)
        plan = BatchPlan(workload.n_positions, workload.sequences, 1, 1)
        made = TrainBatches(tokens, WindowOrder(len(tokens), workload.n_positions, 0), plan, 0)
        batch = lambda number: made(number, 0)[:2]  # noqa: E731
    else:
        in_ram = store.in_memory("train")
        read = memory_map(folder) if rung.batches == "memory_map_loop" else lambda: in_ram
        rows = rows_one_by_one(read, workload.sequences, workload.n_positions)
        batch = lambda number: rows()  # noqa: E731

    def step(number: int) -> None:
        result = forward(*batch(number))
        loss = result if rung.fused_loss else result[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rung.waits or number % LOGGING_STEPS == 0:
            loss.item()

    return measured(step, measurement)


def nanogpt(
    folder: Path,
    workload: Workload,
    measurement: Measurement,
    path: str,
    compiled: bool = True,
    bf16: bool = False,
    keeps_memory: bool = False,
) -> dict[str, Any]:
    """Measure nanoGPT: model.py from the clone at `path`, with the training step of its train.py.

    `bf16` adds autocast on a CPU, where nanoGPT's train.py does not use it. `keeps_memory` keeps freed memory.
    """
    from common.machine import keep_freed_memory

    if keeps_memory:
        keep_freed_memory()
    sys.path.insert(0, path)
    from model import GPT, GPTConfig  # nanoGPT's model.py

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    # nanoGPT's default vocabulary size is padded to a multiple of 64.
    vocab_size = 50304 if workload.vocab_size == 50257 else workload.vocab_size
    shape = {"n_layer": workload.n_layer, "n_head": workload.n_head, "n_embd": workload.n_embd}
    model = GPT(
        GPTConfig(block_size=workload.n_positions, vocab_size=vocab_size, dropout=workload.dropout, bias=True, **shape)
    ).to(DEVICE)
    if not workload.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), DEVICE.type)
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(DEVICE.type, torch.bfloat16) if DEVICE.type == "cuda" or bf16 else nullcontext()
    get_batch = rows_one_by_one(memory_map(folder), workload.sequences, workload.n_positions)
    following = [get_batch()]

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 6e-4
        with autocast:
            _, loss = forward(*following[0])
        following[0] = get_batch()  # while the device computes
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % LOGGING_STEPS == 0:
            loss.item()

    return measured(step, measurement)


def trainer(folder: Path, workload: Workload, measurement: Measurement, tuned: bool) -> dict[str, Any]:
    """Measure Transformers' Trainer with its GPT-2, as shipped or `tuned`.

    `tuned` compiles the model, sets the workload's dropout, uses the fused AdamW, and turns off the NaN filter of the
    losses, which synchronizes with the device at every step.
    """
    settings = {
        "output_dir": str(folder / f"trainer-{os.getpid()}"),
        "per_device_train_batch_size": workload.sequences,
        "max_steps": measurement.warmup + measurement.windows * measurement.steps,
        "bf16": True,
        "logging_steps": LOGGING_STEPS,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": DEVICE.type == "cpu",
    }
    if tuned:
        settings |= {"torch_compile": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
    shape = {name: value for name, value in workload.model.items() if tuned or not name.endswith("_pdrop")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, use_cache=False))
    arguments = transformers.TrainingArguments(**settings)

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            done = state.global_step - measurement.warmup
            if done >= 0 and done % measurement.steps == 0:
                times.append(timer())

    ids = torch.from_numpy(np.fromfile(folder / "store" / "train.bin", dtype=np.uint16).astype(np.int64))
    rows = ids.unfold(0, workload.n_positions, workload.n_positions)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[Clock()]).train()
    return {
        "seconds_a_step": (np.diff(times) / measurement.steps).tolist(),
        "peak_memory_bytes": peak_memory(),
    }


def ceilings(folder: Path, workload: Workload, measurement: Measurement) -> dict[str, Any]:
    """Measure the limits of the device in bf16 on random data: a large matrix product, our own shapes, and a copy."""
    M, C, V = workload.tokens, workload.n_embd, workload.vocab_size
    large = 8192 if DEVICE.type == "cuda" else 2048
    shapes = {"large": (large, large, large), "qkv": (M, C, 3 * C), "mlp_up": (M, C, 4 * C), "mlp_down": (M, 4 * C, C)}
    shapes["head"] = (M, C, V)

    def rate(work: Callable[[], object], amount: float) -> float:
        """Return the best of five rates, in `amount` per second. Each timing covers about 0.05 s of work or more."""
        timing = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        repeats = math.ceil(0.05 / timing.timeit(1).mean)
        return amount / min(timing.timeit(repeats).mean for _ in range(5))

    found = {}
    for name, (m, k, n) in shapes.items():
        a, b = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
        found[f"{name}_tflops"] = round(rate(lambda a=a, b=b: a @ b.T, 2 * m * k * n) / 1e12, 3)
    values = torch.randn(2**28 if DEVICE.type == "cuda" else 2**25, device=DEVICE)
    copy = torch.empty_like(values)
    found["copy_gb_per_second"] = round(rate(lambda: copy.copy_(values), 2 * values.nbytes) / 1e9, 1)
    return found


CONTESTANTS = {"ours": ours, "raw": raw, "nanogpt": nanogpt, "trainer": trainer, "ceilings": ceilings}


def compete(
    folder: Path, workload: Workload, measurement: Measurement, contestant: str, **options: Any
) -> dict[str, Any]:
    """Run a contestant with its options in a fresh process and return the result that it printed."""
    request = {
        "contestant": contestant,
        "workload": vars(workload),
        "measurement": vars(measurement),
        "options": options,
    }
    result = run_python("-m", "benchmarks.contestants", folder, json.dumps(request), capture_output=True, check=False)
    if result.returncode:
        sys.exit(f"{contestant} {options} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def contest(
    workload: Workload, measurement: Measurement, rounds: int, entered: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each round by the names of `entered`, which has the arguments of `compete`."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in entered}
    with TemporaryDirectory() as folder:
        make_store(Path(folder) / "store", workload.vocab_size)
        for _ in range(rounds):
            for name, given in entered.items():
                results[name].append(compete(Path(folder), workload, measurement, **given))
                if seconds := results[name][-1].get("seconds_a_step"):
                    print(f"{name}: {workload.tokens / median(seconds):,.0f} tokens/s", flush=True)
    return results


def summary(rounds: list[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """Return the speed in all windows of a contestant, and its peak memory."""
    speeds = [workload.tokens / seconds for found in rounds for seconds in found["seconds_a_step"]]
    peak = max(found["peak_memory_bytes"] for found in rounds)
    return {"tokens_per_second": spread(speeds), "peak_memory_gb": round(peak / 1e9, 3)}


def times_as_fast(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the speed of one contestant divided by that of another, computed within each round."""
    a, b = ([median(found["seconds_a_step"]) for found in rounds] for rounds in (ours, theirs))
    return spread(np.divide(b, a), 3)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    run = CONTESTANTS[request["contestant"]]
    result = run(folder, Workload(**request["workload"]), Measurement(**request["measurement"]), **request["options"])
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
