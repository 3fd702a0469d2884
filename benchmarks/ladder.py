"""Measure the speed of a training step with optimizations added one by one, and with each of them removed.

python -m benchmarks.ladder                                  # writes benchmarks/results/ladder-PRESET-DEVICE.json
python -m benchmarks.ladder --preset gpt2_small_seed --sequences 64

The batch is the same on all rungs. Each rung trains our model in a plain loop, in a fresh process, one after the other,
in several rounds.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.contestants import Measurement, Rung, compete
from benchmarks.results import about, device_kind, spread, write
from benchmarks.workload import Workload, make_store
from common.command_line import FlagParser, run
from common.limits import setting


@dataclass
class LadderArguments:
    preset: str = setting("shakespeare_char", "Preset in presets/ that gives the model's shape.")
    sequences: int = setting(16, "Sequences per step, in one micro-batch.", minimum=1)
    rounds: int = setting(3, "Processes per rung.", minimum=1)
    warmup: int = setting(5, "Steps before the first timed window.")
    windows: int = setting(3, "Timed windows per process.", minimum=1)
    steps: int = setting(5, "Steps per window.", minimum=1)


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
    (options,) = FlagParser((LadderArguments,), __doc__.splitlines()[0]).parse(arguments)
    workload = Workload.of_preset(options.preset, options.sequences, dropout=0.0)
    measurement = Measurement(options.warmup, options.windows, options.steps)
    groups = {"ladder": LADDER, "without_one": WITHOUT_ONE, "with_one_more": WITH_ONE_MORE}
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_store(folder / "store", workload.vocab_size)
        for _ in range(options.rounds):
            for group, rungs in groups.items():
                for name, rung in rungs.items():
                    found = compete(folder, workload, measurement, "raw", **asdict(rung))
                    measured.setdefault((group, name), []).append(found)
                    speed = workload.tokens / median(found["seconds_a_step"])
                    print(f"{group}: {name}: {speed:,.0f} tokens/s", flush=True)
    top = measured["ladder", next(reversed(LADDER))]
    result = about("ladder", arguments) | {
        "workload": asdict(workload),
        "measurement": vars(measurement) | {"rounds": options.rounds},
        **{
            group: {name: summary(measured[group, name], top, workload) for name in rungs}
            for group, rungs in groups.items()
        },
    }
    write(f"ladder-{options.preset}-{device_kind()}", result)


def summary(found: list[dict[str, Any]], top: list[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    """Summarize all rounds. `of_the_top` is the speed as a share of the top rung's speed in the same round."""
    seconds = [one for each in found for one in each["seconds_a_step"]]
    best, medians = ([median(each["seconds_a_step"]) for each in rounds] for rounds in (top, found))
    return {
        "tokens_per_second": spread([workload.tokens / one for one in seconds]),
        "of_the_top": spread(np.divide(best, medians), 3),
        "peak_memory_gb": round(max(each["peak_memory_bytes"] for each in found) / 1e9, 3),
        "seconds_of_the_first_step": round(found[-1]["seconds_of_the_first_step"], 1),
        "recompiles": max(each["recompiles"] for each in found),
    }


if __name__ == "__main__":
    run(main)
