"""Plots of a run: transparent PNGs, legible on light and dark pages. The functions return whether they wrote a file:
there are no plots if matplotlib cannot be imported."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic import unfinished_path
from common.removal import FILE_MARK
from training.checkpoints.metrics import comparable_loss, comparable_scores, sample_tokens

# Legible on white and on black.
GRAY, BLUE, ORANGE = "#808690", "#3d84c6", "#d9673f"
COLORS = {"model": BLUE, "n-gram": "#c98a1b", "compressor": "#8a8f98"}
RUNS = [BLUE, ORANGE, "#2f9e73", "#a868c8", "#b58a12", "#d0578f", "#2a9fb5", "#8b7355"]  # then dashed
STYLE = {
    "axes.prop_cycle": f"cycler('linestyle', ['-', '--', ':']) * cycler('color', {RUNS})",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "grid.color"), GRAY),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), GRAY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": "medium",
    "text.usetex": False,  # of a user's matplotlibrc; LaTeX may be missing
    "text.parse_math": False,  # a name may have two dollar signs
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "figure.dpi": 120,
    "savefig.dpi": 120,
    "savefig.transparent": True,
    "figure.constrained_layout.use": True,
}
LONGEST_NAME = 40  # characters
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MOST_POINTS = 1000  # points per curve; longer curves average neighboring points


def plot_loss(entries: list[dict[str, Any]], until: dict[int, float], path: Path) -> bool:
    """Plot training and validation loss, by tokens and by training time. `until`: seconds by step."""
    train = [entry for entry in entries if "loss" in entry]
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    if not train:
        return False
    steps = [entry["step"] for entry in train]
    tokens, seconds = [entry["tokens"] for entry in train], np.array([until[step] for step in steps])
    unit, name = next((unit, name) for unit, name in UNITS if seconds[-1] >= 2 * unit or unit == 1)

    evaluated = [entry["step"] for entry in evaluations]
    places_by_tokens = np.interp(evaluated, [0, *steps], [0, *tokens])  # between two log lines
    places_by_time = np.array([until[step] for step in evaluated]) / unit

    def draw(figure: Any) -> None:
        by_tokens, by_time = figure.subplots(1, 2, sharey=True)
        for axes, at, places, label in (
            (by_tokens, tokens, places_by_tokens, "tokens"),
            (by_time, seconds / unit, places_by_time, f"{name} of training"),
        ):
            _curve(axes, list(zip(at, [entry["loss"] for entry in train], strict=True)), "training")
            losses = [comparable_loss(entry) for entry in evaluations]
            axes.plot(places, losses, color=ORANGE, marker="o", markersize=4, linewidth=1.5, label="validation")
            axes.set_xlabel(label)
        _in_thousands(by_tokens.xaxis)
        by_tokens.set_ylabel("loss (nats per token)")
        by_time.legend()

    return _save(path, (9, 3.6), draw)


def plot_runs(runs: dict[str, dict[str, Any]], path: Path, measure: str) -> bool:
    """Plot a measure of the validations of runs, or their training loss before the first, by tokens and by time."""

    def draw(figure: Any) -> None:
        by_tokens, by_time = figure.subplots(1, 2, sharey=True)
        samples: set[int | None] = set()
        for name, run in runs.items():
            entries, until = run["entries"], run["seconds_until"]
            tokens = {0: 0} | {e["step"]: e["tokens"] for e in entries if "tokens" in e}
            evaluations, in_nats = [entry for entry in entries if measure in entry], measure == "eval_loss"
            curve = {entry["step"]: comparable_scores(entry)[measure] for entry in evaluations}
            label = " " * name.startswith("_") + name  # a label that begins with _ has no entry in a legend
            style = {"label": label, "marker": "."} if curve else {"label": f"{label} (training loss)"}
            samples |= {sample_tokens(entry) for entry in evaluations}
            curve = curve or {entry["step"]: entry["loss"] for entry in entries if "loss" in entry and in_nats}
            if not curve:
                continue
            by_tokens.plot(np.interp([*curve], [*tokens], [*tokens.values()]), curve.values(), **style)
            by_time.plot([until[step] / 60 for step in curve], curve.values(), **style)
        title = f"validation: {measure.removeprefix('eval_').replace('_', ' ')}"
        if len(samples - {None}) > 1 and measure == "eval_loss":  # tokens of another tokenizer are not comparable
            title += "\nof samples of different sizes"
        by_tokens.set(xlabel="tokens", ylabel=title)
        by_time.set_xlabel("minutes of training")
        _in_thousands(by_tokens.xaxis)
        figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center")

    return any(run["entries"] for run in runs.values()) and _save(path, (9, 3.6 + 0.2 * len(runs)), draw)


def plot_course(entries: list[dict[str, Any]], path: Path) -> bool:
    """Plot throughput, learning rate and gradient norm, by tokens."""
    log_lines = [entry for entry in entries if "learning_rate" in entry]
    titles = {"tokens_per_second": "tokens per second", "learning_rate": "learning rate", "grad_norm": "gradient norm"}

    def draw(figure: Any) -> None:
        for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
            _curve(axes, [(entry["tokens"], entry[name]) for entry in log_lines if name in entry], title)
            axes.set(title=title, xlabel="tokens")
            _in_thousands(axes.xaxis)
            if name == "learning_rate":
                axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            else:
                axes.set_ylim(bottom=0)
            if name == "tokens_per_second":
                _in_thousands(axes.yaxis)

    return bool(log_lines) and _save(path, (9, 2.6), draw)


def plot_panel(rows: list[dict[str, Any]], path: Path) -> bool:
    """Plot bits per byte as bars, with the best on top. `rows` are those of evaluation.json."""
    places, values = range(len(rows)), [row["bits_per_byte"] for row in rows]
    errors = [row.get("bits_per_byte_stderr", np.nan) for row in rows]
    names = [row["name"] for row in rows]  # long paths lose their beginning, to leave room for the bars
    names = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.barh(places, values, color=[COLORS[row["kind"]] for row in rows], height=0.66)
        axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=GRAY, elinewidth=1.5, capsize=3)
        for place, value, end in zip(places, values, np.add(values, np.nan_to_num(errors)), strict=True):
            axes.annotate(f"{value:.3f}", (end, place), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("bits per byte of held-out text (lower is better)")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)

    return _save(path, (8, 1.1 + 0.42 * len(rows)), draw)


def _save(path: Path, inches: tuple[float, float], draw: Callable[[Any], None]) -> bool:
    try:
        import matplotlib
        from matplotlib.backends import backend_agg  # noqa: F401  otherwise imported at savefig
        from matplotlib.figure import Figure
    except Exception:  # many kinds are possible: an unknown MPLBACKEND, an incompatible numpy ...
        return False
    with unfinished_path(path) as partial, matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # is missing in the font
        figure = Figure(figsize=inches)
        draw(figure)
        figure.savefig(partial, format="png", metadata={FILE_MARK: "plot"})
    return True


def _curve(axes: Any, points: list[tuple[float, float]], label: str) -> None:
    if points:
        groups = np.array_split(np.array(points), min(len(points), MOST_POINTS))
        x, y = np.array([group.mean(axis=0) for group in groups]).T
        axes.plot(x, y, color=BLUE, label=label, marker="." if len(x) == 1 else "")


def _in_thousands(axis: Any) -> None:
    """Label the axis as 1.5M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
