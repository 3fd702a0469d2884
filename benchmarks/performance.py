"""Write docs/performance.md and its plots from the files of benchmarks/results/.

python -m benchmarks.performance
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import REPOSITORY, RESULTS

DOCS = REPOSITORY / "docs"
OURS = "#2a6f97"
OTHERS = "#9aa5b1"

HEAD = """# Performance

Compare the speed and memory of this project with nanoGPT and Transformers, and see the effect of each optimization.

```bash
python -m benchmarks.performance    # write this page from the files of benchmarks/results/
```

The command below a table repeats its measurement. "Ours" is `accelerate launch train_accelerate.py` itself. Terms: [speed.md](speed.md).

- Each program runs in a fresh process, one after the other, in as many rounds as the command shows (`--rounds`, three by default).
- Figures are medians, with the 10th to the 90th percentile in parentheses. Ratios are computed within a round."""


def results(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(RESULTS.glob(f"{kind}-*.json")):
        yield path, json.loads(path.read_text(encoding="utf-8"))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column to the left, numbers to the right."""
    top, *lines = ("| " + " | ".join(line) + " |" for line in [head, *rows])
    return "\n".join([top, "|---" + "|--:" * (len(head) - 1) + "|", *lines])


def with_spread(found: dict[str, float], digits: int = 0) -> str:
    median, p10, p90 = (f"{found[name]:,.{digits}f}" for name in ("median", "p10", "p90"))
    return median if p10 == p90 else f"{median} ({p10}-{p90})"


def measured_on(result: dict[str, Any], path: Path) -> str:
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "transformers", "accelerate"))
    return (
        f"`{result['command']}` on {result['device']}, {versions}, {result['date']} (`benchmarks/results/{path.name}`)."
    )


ONE_ROUND = (
    "Each row is one process on a machine whose speed varies by 15% from minute to minute: a row up to 15% below the row above it shows no "
    "loss of speed, and speeds are comparable only within a table."
)


def describe(workload: dict[str, Any]) -> str:
    dropout = f", dropout {workload['dropout']}" if workload["dropout"] else ""
    return (
        f"{workload['preset']} ({workload['n_layer']} layers, width {workload['n_embd']}, vocabulary "
        f"{workload['vocab_size']:,}), {workload['sequences']} x {workload['n_positions']} tokens per step{dropout}"
    )


def train_step(path: Path, result: dict[str, Any]) -> str:
    ours = result["contestants"]["ours"]
    rows = [
        [
            name,
            with_spread(found["tokens_per_second"]),
            with_spread(result["ratios"][name], 2) if name in result["ratios"] else "1",
            f"{found['peak_memory_gb']:.2f}",
        ]
        for name, found in result["contestants"].items()
    ]
    head = ["", "tokens/s", "speed of ours / speed of this row", "peak memory, GB"]
    notes = [
        f"Ours: {ours['device_line']}; {100 * ours['data_share']:.2f}% of the time is spent on batches; {ours['graph_breaks']} graph breaks, "
        f"{ours['recompiles']} recompilations.",
        f"The first step ends {result['seconds_to_the_first_step_uncompiled']} s after the start if it is not compiled, and after "
        f"{ours['seconds_to_the_first_step']:.1f} s if it is compiled with a warm cache.",
    ]
    return "\n\n".join(
        [f"### {describe(result['workload'])}", table(head, rows), " ".join(notes), measured_on(result, path)]
    )


EFFORT = {  # of an optimization, in a training script without it
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


def ladder(path: Path, result: dict[str, Any]) -> str:
    head = ["optimization, added to those above", "tokens/s", "relative to the last row", "peak memory, GB", "effort"]

    def rows(group: str) -> list[list[str]]:
        return [
            [
                name,
                with_spread(found["tokens_per_second"]),
                with_spread(found["of_the_top"], 2),
                f"{found['peak_memory_gb']:.2f}",
                EFFORT.get(name, ""),
            ]
            for name, found in result[group].items()
        ]

    return "\n\n".join(
        [
            f"### {describe(result['workload'])}",
            f"![Tokens per second after each optimization]({path.stem}.png)",
            table(head, rows("ladder")),
            *([ONE_ROUND] if result["measurement"]["rounds"] == 1 else []),
            "All optimizations but one, or with one more, relative to the last row above:",
            table(
                ["", "relative speed", "peak memory, GB"],
                [[f"without {row[0]}", *row[2:4]] for row in rows("without_one")]
                + [[f"with {row[0]}", *row[2:4]] for row in rows("with_one_more")],
            ),
            measured_on(result, path),
        ]
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
    axes.set(xlabel="tokens per second", xlim=(0, 1.18 * max(medians)), title=describe(result["workload"]))
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


WRITERS = {
    "gpt2": "Transformers' GPT-2",
    "gpt2_compiled": "Transformers' GPT-2, static cache, compiled",
    "gpt2scratch": "this model",
    "gpt2scratch_arranged": "this model, weights arranged for a CPU (generate.py)",
    "gpt2scratch_compiled": "this model, static cache, compiled",
}


def generate(path: Path, result: dict[str, Any]) -> str:
    head = [f"tokens/s, {result['dtype']}"]
    rows = {name: [WRITERS[name]] for name in result["runs"][0]["tokens_per_second"]}
    for found in result["runs"]:
        size = "4 layers x 256" if found["model"] == "small" else "124M"
        head.append(f"{size}, {found['batch_size']} text{'s' * (found['batch_size'] > 1)} at once")
        for name, row in rows.items():
            ratio = found["times_as_fast"].get(f"{name} / gpt2")
            relative = f" ({ratio['median']:.2f})" if ratio else ""
            row.append(f"{found['tokens_per_second'][name]['median']:,.1f}{relative}")
    intro = (
        f"Greedy generation of {result['new_tokens']['small']} (4 layers x 256) and {result['new_tokens']['gpt2']} (124M) new tokens after a "
        f"prompt of {result['prompt_tokens']} tokens, with the same weights, timed from the first new token to the last. In parentheses: relative to "
        f"Transformers' GPT-2."
    )
    return "\n\n".join([intro, table(head, list(rows.values())), measured_on(result, path)])


def fake_cuda(path: Path, result: dict[str, Any]) -> str:
    """Return the section of counted figures (no times), see tests/fake_cuda/README.md."""
    rows = [
        [f"{found['preset']} on {found['card']}", *(f"{found[name]:,}" for name in ("micro_batch", "accumulation"))]
        + [f"{found[name]:.2f}" for name in ("planned_gb", "peak_gb")]
        for found in result["memory"]
    ]
    head = ["not compiled, micro-batch auto", "micro-batch", "accumulation", "planned, GB", "the allocator's peak, GB"]
    steps = (
        f"One step of {step['preset']}: {step['launches']} kernel launches, {step['triton_gb']:.1f} GB of reads and writes by Triton's "
        f"kernels, {step['synchronizations']} synchronizations, {step['copies']} copy of its batch; planned {step['planned_gb']:.2f} GB, peak "
        f"{step['peak_gb']:.2f} GB."
        for step in (result["step"], result["modern_step"])
    )
    return "\n\n".join([*steps, table(head, rows), measured_on(result, path)])


CHAPTERS = {
    "train-step": ("Training", train_step),
    "ladder": ("Optimizations, one at a time", ladder),
    "generate": ("Generation", generate),
    "fake": ("GPU memory and kernel launches, counted without a GPU", fake_cuda),
}


def page() -> str:
    parts = [HEAD]
    if not list(RESULTS.glob("train-step-*-cuda.json")):
        parts.append("Nothing has been measured on a GPU yet.")
    for kind, (title, section) in CHAPTERS.items():
        found = [section(path, result) for path, result in results(kind)]
        if found:
            parts += [f"## {title}", *found]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    (DOCS / "performance.md").write_text(page(), encoding="utf-8")
    for path, result in results("ladder"):
        draw_ladder(result, DOCS / f"{path.stem}.png")
    print("docs/performance.md is written.")


if __name__ == "__main__":
    main()
