"""Compare the tokens per second of a training step with nanoGPT, Trainer, and a raw loop on this project's model.

python -m benchmarks.train_step --nanogpt path/to/nanoGPT    # writes benchmarks/results/train-step-PRESET-DEVICE.json
python -m benchmarks.train_step --nanogpt path/to/nanoGPT --preset gpt2_small_seed --sequences 64

Every contestant trains the preset's shape on the same tokens, in a fresh process, one after the other, in several
rounds. "ours" is `accelerate launch train_accelerate.py`. It runs first and last in each round, which shows how much
the machine's speed drifts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.contestants import Measurement, compete
from benchmarks.results import about, device_kind, spread, write
from benchmarks.workload import Workload, make_store
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting


@dataclass
class TrainStepArguments:
    nanogpt: str | None = setting(
        None, "Path of a clone of nanoGPT, to compare with its model.py; without the flag, nanoGPT does not take part."
    )
    preset: str = setting("shakespeare_char", "Preset in presets/ that gives the model's shape.")
    sequences: int = setting(16, "Sequences per step, in one micro-batch.", minimum=1)
    dropout: float = setting(0.0, "Dropout probability of all contestants.", below=1)
    rounds: int = setting(3, "Processes per contestant.", minimum=1)
    warmup: int = setting(20, "Steps before the first timed window.")
    windows: int = setting(5, "Timed windows per process.", minimum=1)
    steps: int = setting(20, "Steps per window.", minimum=1)
    only: list[str] = setting([], "Names of the contestants to run; default: all.")


def contestants(nanogpt: str | None, on_cpu: bool) -> dict[str, dict[str, Any]]:
    """Return the arguments of `compete` for each contestant."""
    known: dict[str, dict[str, Any]] = {
        "ours": {"contestant": "ours"},
        "raw loop on our model": {"contestant": "raw"},
        "ours, bf16 residual stream": {"contestant": "ours", "bf16_residual": "true"},
        "Trainer, tuned": {"contestant": "trainer", "tuned": True},
        "Trainer, as shipped (dropout 0.1)": {"contestant": "trainer", "tuned": False},
    }
    if nanogpt is not None:
        theirs = {"contestant": "nanogpt", "path": str(Path(nanogpt).resolve())}
        known["nanoGPT, compiled"] = theirs
        if on_cpu:  # on a CPU, nanoGPT computes in fp32, and its README turns compilation off
            known["nanoGPT, as its README has it"] = theirs | {"compiled": False}
            known["nanoGPT, compiled, bf16 added"] = theirs | {"bf16": True}
            allocator = {"bf16": True, "keeps_memory": True}
            known["nanoGPT, compiled, bf16 and freed memory kept added"] = theirs | allocator
    return known | {"ours, again": {"contestant": "ours"}}


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((TrainStepArguments,), __doc__.splitlines()[0]).parse(arguments)
    if options.nanogpt is not None and not (Path(options.nanogpt) / "model.py").is_file():
        raise UserError(f"{options.nanogpt} has no model.py: pass the path of a clone of nanoGPT.")
    entered = contestants(options.nanogpt, device_kind() == "cpu")
    if unknown := sorted(set(options.only) - set(entered)):
        raise UserError(f"Unknown contestant {unknown[0]!r}: use {', '.join(entered)}.")
    entered = {name: given for name, given in entered.items() if not options.only or name in options.only}
    workload = Workload.of_preset(options.preset, options.sequences, options.dropout)
    measurement = Measurement(options.warmup, options.windows, options.steps)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in entered}
    ceilings = []
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_store(folder / "store", workload.vocab_size)
        for _ in range(options.rounds):
            ceilings.append(compete(folder, workload, measurement, "ceilings"))
            for name, given in entered.items():
                found = compete(folder, workload, measurement, **given)
                measured[name].append(found)
                tokens = spread([workload.tokens / seconds for seconds in found["seconds_a_step"]])["median"]
                print(f"{name}: {tokens:,.0f} tokens/s", flush=True)
        uncompiled = compete(folder, workload, Measurement(1, 1, 1), "ours", torch_compile="false")
    public = ["path/to/nanoGPT" if word == options.nanogpt else word for word in arguments]
    result = about("train_step", public) | {
        "workload": asdict(workload),
        "measurement": vars(measurement) | {"rounds": options.rounds},
        "ceilings": ceilings,
        "contestants": {name: summary(found, workload) for name, found in measured.items()},
        "ratios": ratios(measured),
        "seconds_to_the_first_step_uncompiled": round(uncompiled["seconds_to_the_first_step"], 1),
    }
    dropout = f"-dropout{options.dropout}" if options.dropout else ""
    write(f"train-step-{options.preset}{dropout}-{device_kind()}", result)


def summary(found: list[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """Summarize all rounds and windows of one contestant."""
    seconds = [one for each in found for one in each["seconds_a_step"]]
    values = {
        "tokens_per_second": spread([workload.tokens / one for one in seconds]),
        "milliseconds_a_step": spread([1000 * one for one in seconds], 2),
        "peak_memory_gb": round(max(each["peak_memory_bytes"] for each in found) / 1e9, 3),
    }
    for name in ("recompiles", "graph_breaks", "data_share", "mfu"):
        if name in found[0]:
            values[name] = round(max(each[name] for each in found), 5)
    for name in ("seconds_to_the_first_step", "device_line"):
        if name in found[0]:
            values[name] = found[-1][name]
    return values


def ratios(measured: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the speed of `ours` divided by that of each other contestant, computed within each round."""
    medians = {name: [median(found["seconds_a_step"]) for found in rounds] for name, rounds in measured.items()}
    ours = medians.pop("ours", [])
    return {name: spread(np.divide(theirs, ours), 3) for name, theirs in medians.items() if ours}


if __name__ == "__main__":
    run(main)
