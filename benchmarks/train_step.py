"""Compare the tokens per second of a training step with nanoGPT, Trainer, and a raw loop on this project's model.

python -m benchmarks.train_step --nanogpt path/to/nanoGPT    # writes benchmarks/results/train-step-PRESET-DEVICE.json
python -m benchmarks.train_step --nanogpt path/to/nanoGPT --preset gpt2_small_seed --sequences 64

"ours" is `accelerate launch train_accelerate.py`. It runs first and last in each round, which shows how much the
machine's speed drifts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import contestants
from benchmarks.contestants import ContestArguments, Measurement, contest, times_as_fast
from benchmarks.results import about, device_kind, spread, write
from benchmarks.workload import Workload
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting


@dataclass
class TrainStepArguments(ContestArguments):
    nanogpt: str | None = setting(
        None, "Path of a clone of nanoGPT, to compare with its model.py; without the flag, nanoGPT does not take part."
    )
    dropout: float = setting(0.0, "Dropout probability of all contestants.", below=1)
    only: list[str] = setting([], "Names of the contestants to run; default: all.")


@dataclass(frozen=True)
class TrainStepMeasurement(Measurement):
    warmup: int = setting(20, "Steps before the first timed window.")
    windows: int = setting(5, "Timed windows per process.", minimum=1)
    steps: int = setting(20, "Steps per window.", minimum=1)


def known_contestants(nanogpt: str | None, on_cpu: bool) -> dict[str, dict[str, Any]]:
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
    parser = FlagParser((TrainStepArguments, TrainStepMeasurement), __doc__)
    options, measurement = parser.parse(arguments)
    if options.nanogpt is not None and not (Path(options.nanogpt) / "model.py").is_file():
        raise UserError(f"{options.nanogpt} has no model.py: pass the path of a clone of nanoGPT.")
    entered = known_contestants(options.nanogpt, device_kind() == "cpu")
    if unknown := sorted(set(options.only) - set(entered)):
        raise UserError(f"Unknown contestant {unknown[0]!r}: use {', '.join(entered)}.")
    entered = {name: given for name, given in entered.items() if not options.only or name in options.only}
    workload = Workload.of_preset(options.preset, options.sequences, options.dropout)
    measured = contest(workload, measurement, options.rounds, {"ceilings": {"contestant": "ceilings"}} | entered)
    ceilings = measured.pop("ceilings")
    uncompiled = {"ours, not compiled": {"contestant": "ours", "torch_compile": "false"}}
    [[found]] = contest(workload, Measurement(1, 1, 1), 1, uncompiled).values()
    public = ["path/to/nanoGPT" if word == options.nanogpt else word for word in arguments]
    result = about("train_step", public) | {
        "workload": asdict(workload),
        "measurement": asdict(measurement) | {"rounds": options.rounds},
        "ceilings": ceilings,
        "contestants": {name: summary(rounds, workload) for name, rounds in measured.items()},
        "ratios": ratios(measured),
        "seconds_to_the_first_step_uncompiled": round(found["seconds_to_the_first_step"], 1),
    }
    dropout = f"-dropout{options.dropout}" if options.dropout else ""
    write(f"train-step-{options.preset}{dropout}-{device_kind()}", result)


def summary(rounds: list[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """Summarize all rounds and windows of one contestant."""
    milliseconds = [1000 * seconds for found in rounds for seconds in found["seconds_a_step"]]
    values = contestants.summary(rounds, workload) | {"milliseconds_a_step": spread(milliseconds, 2)}
    for name in ("recompiles", "graph_breaks", "data_share", "mfu"):
        if name in rounds[0]:
            values[name] = round(max(found[name] for found in rounds), 5)
    for name in ("seconds_to_the_first_step", "device_line"):
        if name in rounds[0]:
            values[name] = rounds[-1][name]
    return values


def ratios(measured: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the speed of `ours` divided by that of each other contestant."""
    ours = measured.get("ours")
    return {name: times_as_fast(ours, rounds) for name, rounds in measured.items() if ours and name != "ours"}


if __name__ == "__main__":
    run(main)
