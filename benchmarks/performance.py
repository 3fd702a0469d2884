"""Write docs/performance.md and its plots from the files of benchmarks/results/.

python -m benchmarks.performance
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from benchmarks.results import REPOSITORY, RESULTS
from common.command_line import FlagParser, run
from common.errors import counted

DOCS = REPOSITORY / "docs"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
OURS = "#2a6f97"
OTHERS = "#9aa5b1"
EFFORTS = {  # of an optimization, in a training script without it
    "memory map, a loop over rows": "",
    "RAM, a loop over rows": "1 line",
    "RAM, gathered at once": "3 lines",
    "compiled": "1 line, and a C++ compiler",
    "bf16": "1 line; fp16 also needs a scaler",
    "fused attention (SDPA)": "1 line in place of 4",
    "the device's best attention": "1 condition",
    "fused loss, no logits": "a function of 80 lines",
    "fused AdamW": "1 argument",
    "freed memory kept (CPU)": "3 lines",
}
WRITERS = {
    "gpt2": "Transformers' GPT-2",
    "gpt2_compiled": "Transformers' GPT-2, static cache, compiled",
    "gpt2scratch": "this model",
    "gpt2scratch_arranged": "this model, weights arranged for a CPU (generate.py)",
    "gpt2scratch_compiled": "this model, static cache, compiled",
}


def results(kind: str) -> list[tuple[Path, dict[str, Any]]]:
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column to the left, numbers to the right."""
    top, *lines = ("| " + " | ".join(line) + " |" for line in [head, *rows])
    return "\n".join([top, "|---" + "|--:" * (len(head) - 1) + "|", *lines])


def with_spread(found: dict[str, float], digits: int = 0) -> str:
    median, p10, p90 = (f"{found[name]:,.{digits}f}" for name in ("median", "p10", "p90"))
    return median if p10 == p90 else f"{median} ({p10}-{p90})"


def with_results(page: str, results: str) -> str:
    """Return a page of docs/ with `results` between its markers."""
    before, rest = (DOCS / page).read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{results}\n{END}{rest.split(END)[1]}"


def write_page(page: str, text: str) -> None:
    (DOCS / page).write_text(text, encoding="utf-8")
    print(f"docs/{page} is written.")


def measured_on(result: dict[str, Any], path: Path) -> str:
    machine = f"{result['device']}, torch {result['torch']}"
    return f"`{result['command']}` on {machine}, {result['date']} (`benchmarks/results/{path.name}`)."


def described(workload: dict[str, Any]) -> str:
    dropout = f", dropout {workload['dropout']}" if workload["dropout"] else ", without dropout"
    return (
        f"{workload['preset']} ({workload['n_layer']} layers, width {workload['n_embd']}, vocabulary "
        f"{workload['vocab_size']:,}), {workload['sequences']} x {workload['n_positions']} tokens per step{dropout}"
    )


def draw_ladder(result: dict[str, Any], path: Path) -> None:
    rungs = result["ladder"]
    rates = [found["tokens_per_second"] for found in rungs.values()]
    medians = [rate["median"] for rate in rates]
    errors = [[rate["median"] - rate["p10"] for rate in rates], [rate["p90"] - rate["median"] for rate in rates]]
    figure = Figure(figsize=(8, 0.45 * len(rungs) + 1.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    bars = axes.barh(list(rungs), medians, xerr=errors, color=[OTHERS] * (len(rungs) - 1) + [OURS], ecolor="#555555")
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in medians], padding=6)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second", xlim=(0, 1.18 * max(medians)), title=described(result["workload"]))
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def page() -> str:
    jinja = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"counted": counted, "described": described, "spread": with_spread}
    return jinja.get_template("performance.md.j2").render(
        results={kind: results(kind) for kind in ("train-step", "ladder", "generate", "fake")},
        planned_to_peak=lambda memory: sorted(found["planned_gb"] / found["peak_gb"] for found in memory),
        efforts=EFFORTS,
        writers=WRITERS,
        measured_on=measured_on,
    )


def main(arguments: list[str]) -> None:
    FlagParser((), __doc__).parse(arguments)
    write_page("performance.md", page())
    for path, result in results("ladder"):
        draw_ladder(result, DOCS / f"{path.stem}.png")


if __name__ == "__main__":
    run(main)
