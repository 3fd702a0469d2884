"""The pictures of a run: PNG without a background, legible on light and dark pages. Where matplotlib cannot be imported,
there are none."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.metrics import comparable_loss, seconds_until

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Legible on white and on black.
GRAY, BLUE, ORANGE = "#808690", "#3d84c6", "#d9673f"
COLORS = {"model": BLUE, "n-gram": "#c98a1b", "compressor": "#8a8f98"}
LONGEST_NAME = 40  # characters
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MOST_POINTS = 1000  # of a curve; neighbours share one where there are more


def plot_loss(entries: list[dict[str, Any]], path: Path) -> bool:
    """Training and validation loss, by tokens and by the time that the steps took. False where there is nothing to plot."""
    train = [entry for entry in entries if "loss" in entry]
    figure = _figure(9, 3.6)
    if not train or figure is None:
        return False
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    scored = [entry for entry in entries if "eval_loss" in entry]
    steps, until = [entry["step"] for entry in train], seconds_until(entries)
    tokens, seconds = [entry["tokens"] for entry in train], np.array([until[step] for step in steps])
    unit, name = next((unit, name) for unit, name in UNITS if seconds[-1] >= 2 * unit or unit == 1)
    for axes, at, label in ((by_tokens, tokens, "tokens"), (by_time, seconds / unit, f"{name} of training")):
        _curve(axes, list(zip(at, [entry["loss"] for entry in train], strict=True)), BLUE, "training")
        places = np.interp([entry["step"] for entry in scored], steps, at)  # also between two log lines
        losses = [comparable_loss(entry) for entry in scored]
        axes.plot(places, losses, color=ORANGE, marker="o", markersize=4, label="validation")
        _dress(axes, label)
    _in_thousands(by_tokens.xaxis)
    by_tokens.set_ylabel("loss (nats a token)", color=GRAY)
    by_time.legend(frameon=False, labelcolor=GRAY)
    return _save(figure, path)


def plot_course(entries: list[dict[str, Any]], path: Path) -> bool:
    """Throughput, learning rate and the gradient's norm by tokens. False where there is nothing to plot."""
    logged = [entry for entry in entries if "learning_rate" in entry]
    figure = _figure(9, 2.6)
    if not logged or figure is None:
        return False
    told = {
        "tokens_per_second": "tokens a second",
        "learning_rate": "learning rate",
        "grad_norm": "norm of the gradient",
    }
    for axes, (name, title) in zip(figure.subplots(1, 3), told.items(), strict=True):
        _curve(axes, [(entry["tokens"], entry[name]) for entry in logged if name in entry], BLUE, title)
        axes.set_title(title, color=GRAY, fontsize="medium")
        _dress(axes, "tokens")
        _in_thousands(axes.xaxis)
        if name == "learning_rate":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            axes.yaxis.get_offset_text().set_color(GRAY)
        else:
            axes.set_ylim(bottom=0)
        if name == "tokens_per_second":
            _in_thousands(axes.yaxis)
    return _save(figure, path)


def plot_panel(rows: list[dict[str, Any]], path: Path) -> bool:
    """Bars, the best on top; `rows` as evaluation.json has them."""
    figure = _figure(8, 1.1 + 0.42 * len(rows))
    if figure is None:
        return False
    axes = figure.subplots()
    places = range(len(rows))
    values = [row["bits_per_byte"] for row in rows]
    errors = [row.get("bits_per_byte_stderr", np.nan) for row in rows]
    axes.barh(places, values, color=[COLORS[row["kind"]] for row in rows], height=0.66)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=GRAY, capsize=3)
    for place, value, end in zip(places, values, np.add(values, np.nan_to_num(errors)), strict=True):
        axes.annotate(f"{value:.3f}", (end, place), (6, 0), textcoords="offset points", va="center", color=GRAY)
    axes.set_yticks(places, [_short(row["name"]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    _dress(axes, "bits a byte of held-out text (less is better)")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return _save(figure, path)


def _short(name: str) -> str:
    """The end of a long path: the rest would leave no room for the bars."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _figure(width: float, height: float) -> "Figure | None":
    """In inches; None where matplotlib is not installed, or is but does not work: no run ends for its pictures."""
    try:
        from matplotlib.backends import backend_agg  # noqa: F401  what would be imported when the picture is saved
        from matplotlib.figure import Figure
    except Exception:  # of any kind: MPLBACKEND names nothing, numpy is of another build ...
        return None
    return Figure(figsize=(width, height), layout="constrained")


def _curve(axes: "Axes", points: list[tuple[float, float]], color: str, label: str) -> None:
    if points:
        groups = np.array_split(np.array(points), min(len(points), MOST_POINTS))
        x, y = np.array([group.mean(axis=0) for group in groups]).T
        axes.plot(x, y, color=color, linewidth=1.2, label=label)


def _dress(axes: "Axes", xlabel: str) -> None:
    axes.set_xlabel(xlabel, color=GRAY)
    axes.tick_params(colors=GRAY)
    axes.grid(alpha=0.25, color=GRAY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)


def _in_thousands(axis: Any) -> None:
    """1.5M"""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def _save(figure: "Figure", path: Path) -> bool:
    figure.savefig(path, dpi=120, transparent=True)
    return True
