"""Compare runs, finished or in progress: one table and one plot.

python -m training.compare_runs runs/*
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import math
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from common.command_line import FlagParser, run
from common.errors import Problems, disk_errors
from common.limits import setting
from common.removal import refuse_replacing
from training.checkpoints.metrics import comparable_scores, sample_tokens
from training.checkpoints.run_folder import RunFolder, run_of
from training.config import DEFAULTS, TEXT_SETTINGS
from training.report.facts import summarize_run
from training.report.plots import plot_runs
from training.report.report import TerminalPage, environment

# Settings without effect on the model.
IGNORED_SETTINGS = {"output_dir", "hourly_price", "notes", "backup_dir", "report_to", "project", "sample_prompts"}


@dataclass
class CompareArguments:
    runs: list[str] = setting([], "Run folders.", needed=("the runs", "python -m training.compare_runs runs/*"))
    output: str = setting("comparison.png", "File of the plot, in PNG.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((CompareArguments,), __doc__, positional="runs").parse(arguments)
    refuse_replacing(Path(options.output))
    problems = Problems()
    folders = [folder for path in options.runs if (folder := problems.add_of(run_of, Path(path)))]
    if not (folders and all(map(os.path.exists, options.runs))):
        problems.refuse()
    for sentence in problems.sentences:
        print(f"Skipped: {sentence}", file=sys.stderr)
    base = os.path.commonpath([folder.resolve().parent for folder in folders])
    runs = {os.path.relpath(folder.resolve(), base): _summarize(folder) for folder in folders}
    differences = _make_comparable([*runs.values()])
    runs = dict(sorted(runs.items(), key=lambda item: item[1]["last"].get("eval_bits_per_byte", math.inf)))
    setting_names = _different_settings([summary["settings"] for summary in runs.values()])
    if sys.stdout.isatty():  # narrow: the names of a sweep's runs contain the settings
        setting_names = [name for name in setting_names if not all(f"{name}=" in run_name for run_name in runs)]
    page = environment().get_template("comparison.md.j2").render(runs=runs, setting_names=setting_names, **differences)
    Console().print(TerminalPage(page)) if sys.stdout.isatty() else print(page)
    measure = "eval_bits_per_byte" if differences["is_other_text"] else "eval_loss"
    with disk_errors(options.output, "name another file with --output"):
        if plot_runs(runs, Path(options.output), measure):
            print(f"Plot: {options.output}", file=sys.stderr)
        elif find_spec("matplotlib") is None:
            print("No plot: run pip install -e '.[plots]'.", file=sys.stderr)


def _summarize(folder: Path) -> dict[str, Any]:
    """Return the facts of a run, with the defaults of the settings that its config.yaml lacks."""
    summary = summarize_run(RunFolder(folder))
    absent = set() if "tokenizer_type" in summary["settings"] else TEXT_SETTINGS  # of a run on a token store
    defaults = {name: value for name, value in DEFAULTS.items() if name not in absent}
    return summary | {"settings": defaults | summary["settings"]}


def _make_comparable(summaries: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether the runs were validated on different texts or samples, for comparison.md.j2. If some scored only a
    sample, replace the scores of finished runs, which are of the whole split, by those of their sample."""
    validated = [summary for summary in summaries if summary["last"]]
    newest = [summary["last"] for summary in validated]
    texts = {summary["text"] for summary in summaries if summary["last"] or summary["text"] != "None"}
    is_other_text = len(texts) > 1
    has_samples = any(map(_is_of_sample, validated))
    is_other_sample = len({entry.get("eval_tokens") for entry in newest}) > 1
    if is_other_sample and (has_samples or not is_other_text):
        is_other_sample = len({*map(sample_tokens, newest)} - {None}) > 1
        for entry in newest:
            entry.update(comparable_scores(entry))
    answers = {"is_other_text": is_other_text, "is_unknown_text": "None" in texts}
    return answers | {"is_other_sample": is_other_sample, "has_samples": has_samples}


def _different_settings(settings_of_runs: list[dict[str, Any]]) -> list[str]:
    """Return the names of the settings that have more than one value."""
    values: dict[str, set[str]] = {}
    for settings in settings_of_runs:
        for name, value in settings.items():
            values.setdefault(name, set()).add(str(value))
    return [name for name in values if len(values[name]) > 1 and name not in IGNORED_SETTINGS]


def _is_of_sample(summary: dict[str, Any]) -> bool:
    """Return whether only a sample of the held-out text was scored: before the end of a run, or at its best step."""
    settings, last = summary["settings"], summary["last"]
    may_be_earlier = summary["state"] != "finished" or settings.get("load_best_model_at_end")
    return bool(settings.get("max_eval_samples") and may_be_earlier and "eval_sampled_loss" not in last)


if __name__ == "__main__":
    run(main)
