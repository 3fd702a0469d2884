"""Measure how size and tokens divide a compute budget best on a CPU, and compare --budget with a sweep around it.

python -m benchmarks.scaling                    # writes benchmarks/results/scaling-*.jsonl, docs/budget.md
python -m benchmarks.scaling --hours 0          # only write the page from the result file

Each run is `train_accelerate.py --depth N --max_train_tokens D` on the quickstart's text, on one thread. Finished runs
are kept: the same command resumes an interrupted plan.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.performance import DOCS, measured_on, table, with_results, write_page
from benchmarks.results import RESULTS, about, as_flags, key, read_runs, require_same_conditions, run_python
from benchmarks.runs import measure_missing, train
from common import command_line
from common.errors import UserError
from common.limits import setting
from modeling_gpt2scratch import GPT2ScratchConfig
from training.budget import scaling
from training.config import read_config
from training.log.speed import flops_per_token
from training.report.plots import BLUE, ORANGE, STYLE
from training.step.size import size_of

# FLOPs of the runs of a row, by family, with their numbers of layers.
LADDER = {
    "modern": {5e12: (1, 2, 3), 1.5e13: (1, 2, 3, 4), 6e13: (2, 3, 4, 5)},
    "gpt2": {5e12: (1, 2, 3), 1.5e13: (1, 2, 3), 6e13: (2, 3, 4)},
}
# Budgets at which the choice is compared with its neighbors, with the seeds of these runs; the first is the default.
CHECKED = {1.5e13: (1337, 1, 2), 6e13: (1337, 1)}
RATES = ("learning_rate", "embedding_learning_rate", "head_learning_rate")
VOCAB_SIZE = 2048  # of all runs, so that losses per token can be compared
SPARING = {"save_strategy": "no", "sample_tokens": 0}
PATH = RESULTS / "scaling-python-standard-library-cpu.jsonl"
Run = dict[str, Any]


@dataclass
class ScalingArguments:
    hours: float = setting(3.0, "Start no run after this many hours.")
    workers: int = setting(2, "Runs at once, on one thread each.", minimum=1)


def model_of(run: Run) -> GPT2ScratchConfig:
    depth, width = run["depth"], 64 * run["depth"]
    shape = {"n_layer": depth, "n_head": depth, "n_embd": width, "n_positions": scaling.best_context(width)}
    return GPT2ScratchConfig(**shape, vocab_size=VOCAB_SIZE)


def ladder(family: str) -> list[Run]:
    return [
        {"family": family, "depth": depth, "flops": flops}
        for flops, depths in LADDER[family].items()
        for depth in depths
    ]


def neighbors(choice: Run) -> dict[str, list[Run]]:
    """Return the choice of --budget and its neighbors, with other sizes, batches and rates: one run per seed."""
    runs = {"the choice": {name: choice[name] for name in ("family", "depth", "flops")}}
    base = runs["the choice"]
    for depth in (base["depth"] - 1, base["depth"] + 1):
        if depth in LADDER[base["family"]][base["flops"]]:
            runs[f"{depth} layer{'s' * (depth > 1)}"] = base | {"depth": depth}
    for by in (0.5, 2):
        runs[f"batch x {by:g}"] = base | {"tokens_per_step": int(by * choice["settings"]["tokens_per_step"])}
        runs[f"rates x {by:g}"] = base | {name: by * choice["settings"][name] for name in RATES}
    others = CHECKED[base["flops"]][1:]
    return {name: [run, *(run | {"seed": seed} for seed in others)] for name, run in runs.items()}


def chosen(flops: float) -> Run:
    """Return the run that --budget chooses, with its settings, from the plan."""
    flags = {"budget": f"{flops:g}flops", "plan": True, "plan_steps": 0, "vocab_size": VOCAB_SIZE}
    output = run_python("train_accelerate.py", *as_flags(flags), capture_output=True).stdout
    settings = yaml.safe_load(output.split("--config:\n")[1])
    return {"family": "modern", "depth": settings["n_layer"], "flops": flops, "settings": settings}


def measure(run: Run, folder: Path) -> Run:
    """Train one run. Return its loss, settings and times."""
    model, settings = model_of(run), {name: value for name, value in run.items() if name != "flops"}
    length = {"max_train_tokens": int(run["flops"] / flops_per_token(model)), "vocab_size": VOCAB_SIZE}
    trained = train(folder, settings | length | SPARING)
    config, last = read_config(["--resume_from_checkpoint", str(folder)]).flat(), trained.validations[-1]
    chosen = ("n_positions", "tokens_per_step", "max_steps", "weight_decay", *RATES)
    return {
        "run": run,
        "parameters": size_of(model).products,
        "tokens": config["max_steps"] * config["tokens_per_step"],
        "settings": {name: config[name] for name in chosen},
        "eval_loss": round(last["eval_loss"], 5),
        "eval_bits_per_byte": round(last["eval_bits_per_byte"], 5),
        "seconds": round(trained.seconds, 1),
    }


def optimum(rows: list[Run]) -> tuple[float, float, float]:
    """Return parameters, tokens and bits per byte at the minimum of a parabola in log N through the three lowest losses
    of runs with equal FLOPs (approach 2 of Hoffmann et al. 2022)."""
    nearest = sorted((row["eval_bits_per_byte"], math.log(row["parameters"])) for row in rows)[:3]
    a, b, c = np.polyfit([size for _, size in nearest], [bits for bits, _ in nearest], 2)
    best = -b / (2 * a)
    sizes, tokens = np.log(sorted((row["parameters"], row["tokens"]) for row in rows)).T
    i = np.clip(np.searchsorted(sizes, best), 1, len(sizes) - 1)  # a minimum beyond them is extrapolated
    slope = (tokens[i] - tokens[i - 1]) / (sizes[i] - sizes[i - 1])
    return math.exp(best), math.exp(tokens[i] + slope * (best - sizes[i])), c - b**2 / (4 * a)


def law(family: str, found: dict[str, Run]) -> dict[str, Any]:
    """Fit power laws of the FLOPs C to the optima: N = n C^a, bits per byte = k C^-g."""
    budgets = sorted(LADDER[family])
    optima = [optimum([found[key(run)] for run in ladder(family) if run["flops"] == flops]) for flops in budgets]
    logs = np.log(budgets)
    a, n = np.polyfit(logs, [math.log(size) for size, _, _ in optima], 1)
    g, k = np.polyfit(logs, [math.log(bits) for *_, bits in optima], 1)
    return {"budgets": budgets, "optima": optima, "a": a, "n": math.exp(n), "g": -g, "k": math.exp(k)}


def main(arguments: list[str]) -> None:
    (options,) = command_line.FlagParser((ScalingArguments,), __doc__).parse(arguments)
    head, found = read_runs(PATH, "run")
    head = head or about("scaling", arguments) | {"data": "python-standard-library", "vocab_size": VOCAB_SIZE}
    runs = [run for family in LADDER for run in ladder(family)]
    if options.hours:
        require_same_conditions(PATH, head)
        runs += [run for flops in CHECKED for of_seeds in neighbors(chosen(flops)).values() for run in of_seeds]
        measure_missing(PATH, head, found, runs, measure, options.workers, options.hours)
    if any(key(run) not in found for run in runs):
        raise UserError("The plan is not finished; run python -m benchmarks.scaling to resume it.")
    draw(found)
    write_page("budget.md", page())


def page() -> str:
    """Return docs/budget.md with the tables of the result file between its markers."""
    head, found = read_runs(PATH, "run")
    depths = sorted({run["depth"] for family in LADDER for run in ladder(family)})
    sizes = {row["run"]["depth"]: row["parameters"] for row in found.values()}
    columns = ["family", "FLOPs", *(f"{depth} ({sizes[depth] / 1e6:.2f}M)" for depth in depths)]
    fits = {family: law(family, found) for family in LADDER}
    rows = []
    for family, fit in fits.items():
        for flops, (size, tokens, _) in zip(fit["budgets"], fit["optima"], strict=True):
            runs = [{"family": family, "depth": depth, "flops": flops} for depth in depths]
            measured = [found.get(key(run), {}).get("eval_bits_per_byte") for run in runs]
            best = min(bits for bits in measured if bits is not None)
            bits = ["" if one is None else f"**{one:.4f}**" if one == best else f"{one:.4f}" for one in measured]
            rows.append([family, f"{flops:g}", *bits, f"{size / 1e6:.2f}M", f"{tokens / size:.1f}"])
    laws = "; ".join(
        f"{family} {fit['n']:.3g} C^{fit['a']:.3f} parameters and {fit['k']:.3g} C^-{fit['g']:.4f} bits per byte"
        for family, fit in fits.items()
    )
    parts = [
        "Bits per byte by layers (parameters in matrix products), and the minimum of the parabola through the best "
        "three, which is extrapolated below 0.18M:",
        table([*columns, "parameters at the minimum", "tokens per parameter"], rows),
        f"Power laws of the FLOPs C, fitted to the minima: {laws}.",
        "The choice of `--budget` for the modern family, and its neighbors:",
    ]
    for flops in CHECKED:
        choice, rows, means = choice_of(flops, found), [], []
        for name, of_seeds in neighbors(choice).items():
            losses = [found[key(run)]["eval_loss"] for run in of_seeds]
            means.append(statistics.mean(losses))
            tokens_per_step = found[key(of_seeds[0])]["settings"]["tokens_per_step"]
            row = [name, f"{tokens_per_step:,}", ", ".join(f"{loss:.3f}" for loss in losses)]
            rows.append([*row, f"{means[-1]:.3f}", f"{means[-1] / means[0] - 1:+.1%}"])
        title = f"{flops:g} FLOPs (choice: Muon's rate {choice['settings']['learning_rate']:g})"
        parts.append(table([title, "tokens per step", "losses by seed", "mean", "compared"], rows))
    plot = f"![Bits per byte by size and by FLOPs]({PATH.stem}.png)"
    return with_results("budget.md", "\n\n".join([plot, *parts, measured_on(head, PATH)]))


def choice_of(flops: float, found: dict[str, Run]) -> Run:
    """Return the choice at a checked budget from the finished runs: the run whose neighbors were measured."""
    varied = [row["run"] for row in found.values() if row["run"]["flops"] == flops and "tokens_per_step" in row["run"]]
    base = {name: varied[0][name] for name in ("family", "depth", "flops")}
    return base | {"settings": found[key(base)]["settings"]}


def draw(found: dict[str, Run]) -> None:
    """Plot bits per byte by parameters, one curve per budget, and the minima by FLOPs with the fitted power law."""
    with matplotlib.rc_context(STYLE | {"text.parse_math": True}):
        figure = Figure(figsize=(9, 3.8))
        by_size, by_flops = figure.subplots(1, 2, sharey=True)
        for family, color in {"modern": BLUE, "gpt2": ORANGE}.items():
            fit = law(family, found)
            for flops, depths in LADDER[family].items():
                rows = [found[key({"family": family, "depth": depth, "flops": flops})] for depth in depths]
                sizes, bits = ([row[name] for row in rows] for name in ("parameters", "eval_bits_per_byte"))
                by_size.plot(sizes, bits, "o-", color=color)
                by_size.annotate(f"   {flops:g}", (sizes[-1], bits[-1]), color=color, va="center", fontsize="small")
            by_flops.plot(
                fit["budgets"], [bits for *_, bits in fit["optima"]], "o", color=color, label=f"{family}: minima"
            )
            flops = np.geomspace(fit["budgets"][0] / 2, fit["budgets"][-1] * 2)
            by_flops.plot(flops, fit["k"] * flops ** -fit["g"], "--", color=color, label=f"{family}: fitted power law")
        by_size.set(xscale="log", xlabel="parameters in matrix products", ylabel="bits per byte", xlim=(1.3e5, 1.5e7))
        by_size.xaxis.set_minor_formatter(NullFormatter())
        by_size.set_title("by size, with FLOPs", fontsize="medium")
        by_flops.set(xscale="log", xlabel="FLOPs")
        by_flops.legend()
        figure.savefig(DOCS / f"{PATH.stem}.png")


if __name__ == "__main__":
    command_line.run(main)
