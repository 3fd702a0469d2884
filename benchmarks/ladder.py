"""Measure the speed of a training step with optimizations added one by one, and with each of them removed.

python -m benchmarks.ladder                                  # writes benchmarks/results/ladder-PRESET-DEVICE.json
python -m benchmarks.ladder --preset gpt2_small_seed --sequences 64

The batch is the same on all rungs. Each rung trains our model in a plain loop.
"""

from dataclasses import asdict, replace
from typing import Any

from benchmarks import contestants
from benchmarks.contestants import ContestArguments, Measurement, Rung, contest, times_as_fast
from benchmarks.results import about, device_kind, write
from benchmarks.workload import Workload
from common.command_line import FlagParser, run

NAIVE = Rung(
    batches="memory_map_loop",
    compiled=False,
    bf16=False,
    attention="eager",
    fused_loss=False,
    fused_optimizer=False,
    keeps_memory=False,
)
ADDED = {  # optimizations in order, each added to those before it
    "RAM, a loop over rows": {"batches": "ram_loop"},
    "RAM, gathered at once": {"batches": "ours"},
    "compiled": {"compiled": True},
    "bf16": {"bf16": True},
    "fused attention (SDPA)": {"attention": "sdpa"},
    "the device's best attention": {"attention": "auto"},
    "fused loss, no logits": {"fused_loss": True},
    "fused AdamW": {"fused_optimizer": True},
    "freed memory kept (CPU)": {"keeps_memory": True},
}
LADDER = {"memory map, a loop over rows": NAIVE}
for name, change in ADDED.items():
    LADDER[name] = replace(LADDER[next(reversed(LADDER))], **change)
WITHOUT_ONE = {
    "batches gathered at once": Rung(batches="memory_map_loop"),
    "compilation": Rung(compiled=False),
    "bf16": Rung(bf16=False),
    "the device's best attention": Rung(attention="sdpa" if device_kind() == "cpu" else "eager"),
    "fused loss": Rung(fused_loss=False),
    "fused AdamW": Rung(fused_optimizer=False),
    "freed memory kept (CPU)": Rung(keeps_memory=False),
    "running ahead of the device": Rung(waits=True),
}
WITH_ONE_MORE = {"bf16 residual stream": Rung(bf16_residual=True)}


def main(arguments: list[str]) -> None:
    options, measurement = FlagParser((ContestArguments, Measurement), __doc__).parse(arguments)
    workload = Workload.of_preset(options.preset, options.sequences, dropout=0.0)
    groups = {"ladder": LADDER, "without_one": WITHOUT_ONE, "with_one_more": WITH_ONE_MORE}
    entered = {
        f"{group}: {name}": {"contestant": "raw", **asdict(rung)}
        for group, rungs in groups.items()
        for name, rung in rungs.items()
    }
    measured = contest(workload, measurement, options.rounds, entered)
    top = measured[f"ladder: {next(reversed(LADDER))}"]
    result = about("ladder", arguments) | {
        "workload": asdict(workload),
        "measurement": asdict(measurement) | {"rounds": options.rounds},
        **{
            group: {name: summary(measured[f"{group}: {name}"], top, workload) for name in rungs}
            for group, rungs in groups.items()
        },
    }
    write(f"ladder-{options.preset}-{device_kind()}", result)


def summary(rounds: list[dict[str, Any]], top: list[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """Summarize all rounds. `of_the_top` is the speed as a share of the top rung's."""
    return contestants.summary(rounds, workload) | {
        "of_the_top": times_as_fast(rounds, top),
        "seconds_of_the_first_step": round(rounds[-1]["seconds_of_the_first_step"], 1),
        "recompiles": max(found["recompiles"] for found in rounds),
    }


if __name__ == "__main__":
    run(main)
