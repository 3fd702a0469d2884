"""Compare the estimates of --plan with the time, speed and memory of the actual run.

python -m benchmarks.plan          # writes benchmarks/results/plan-DEVICE.json
"""

import json
import re
import tempfile

from benchmarks.contestants import LAUNCH
from benchmarks.results import about, device_kind, run_python, write
from common.command_line import FlagParser, run
from training.checkpoints.metrics import read_events
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.status import hours
from training.report.facts import read_facts

WIDER = ["--n_layer=6", "--n_head=6", "--n_embd=384", "--n_positions=256", "--tokens_per_step=4096", "--max_steps=100"]
RUNS = {"quickstart": [], "11.5M parameters": [*WIDER, "--eval_steps=50", "--max_eval_samples=64"]}
ESTIMATES = re.compile(
    r"measured peak[^:]*: (?P<gb>[\d.]+) GB.*^Time: +(?P<clock>[\d:]+) at (?P<speed>[\d,]+) tokens/s",
    re.DOTALL | re.MULTILINE,
)


def main(arguments: list[str]) -> None:
    FlagParser((), __doc__).parse(arguments)
    launch([])  # warm-up: tokenizes the text and loads the imports into the page cache
    runs = {}
    for name, flags in RUNS.items():
        estimates = ESTIMATES.search(launch(flags))
        with tempfile.TemporaryDirectory() as folder:
            launch([*flags, "--output_dir", folder, "--overwrite_output_dir"], plan=False)
            runs[name] = {"flags": flags, "said": estimated(estimates), "took": actual(RunFolder(folder))}
        print(json.dumps(runs[name], indent=2))
    write(f"plan-{device_kind()}", {**about("plan", []), "runs": runs})


def launch(flags: list[str], plan: bool = True) -> str:
    return run_python(*LAUNCH, *flags, *["--plan"] * plan, capture_output=True).stdout


def estimated(estimates: re.Match[str]) -> dict[str, float]:
    seconds = 0
    for part in estimates["clock"].split(":"):
        seconds = 60 * seconds + int(part)
    speed = float(estimates["speed"].replace(",", ""))
    return {"seconds": seconds, "tokens_per_second": speed, "peak_memory_gb": float(estimates["gb"])}


def actual(run: RunFolder) -> dict[str, float]:
    speed, seconds = read_facts(run)["speed"], round(3600 * hours(read_events(run.events)), 1)
    _, median, _ = speed["percentiles"]["tokens_per_second"]
    return {"seconds": seconds, "tokens_per_second": median, "peak_memory_gb": speed["peak_memory_gb"]}


if __name__ == "__main__":
    run(main)
