"""report.md: the run on one page, with its plots, made from report.json by templates/report.md.j2."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from atomic import file_sha256, write_atomic
from errors import counted
from training.console import clock, perplexity
from training.hardware import GRAMS_OF_CO2_PER_KWH
from training.metrics import read_metrics
from training.report.facts import gather, read_facts, write_facts
from training.report.plots import plot_course, plot_loss
from training.run_folder import RunFolder
from training.sampling import fenced

TEMPLATES = Path(__file__).parent / "templates"
CELL = 60  # characters of a text in a table


def environment(*folders: Path) -> Environment:
    """Return Jinja's environment for the templates of `folders` and of this package."""
    loader = FileSystemLoader([*folders, TEMPLATES])
    made = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters |= {"as": format, "counted": counted, "fenced": fenced, "cell": cell, "clock": clock}
    made.filters |= {"perplexity": perplexity, "quoted": partial(json.dumps, ensure_ascii=False)}  # a string of Python
    made.filters["yaml"] = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    made.globals["grams_of_co2_per_kwh"] = GRAMS_OF_CO2_PER_KWH
    return made


def write_report(folder: RunFolder) -> None:
    """Write report.json, report.md and, if matplotlib is installed, the plots, from what was logged so far."""
    begun = read_facts(folder)
    if begun is None:  # deleted or damaged since the run was started: its next start writes it again
        return
    entries = read_metrics(folder.metrics)
    plots = {"loss": plot_loss(entries, folder.plots["loss"]), "course": plot_course(entries, folder.plots["course"])}
    _write(folder, begun | gather(folder) | {"plots": [name for name, drawn in plots.items() if drawn]}, None)


def put_evaluation(folder: RunFolder, evaluation: dict[str, Any] | None) -> None:
    """Show an evaluation in report.md in place of the one before; None takes that out. A page that someone edited, or that an
    older version wrote, stays as it is."""
    facts = facts_of(folder)
    if facts is not None and folder.report.is_file():
        _write(folder, facts, evaluation)


def facts_of(folder: RunFolder) -> dict[str, Any] | None:
    """Return the facts that report.md was made from; None if someone edited the page, or an older version wrote it."""
    facts = read_facts(folder) or {}
    written = facts.get("report_sha256")
    is_edited = folder.report.is_file() and file_sha256(folder.report) != written
    return None if written is None or is_edited else facts


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a Markdown page by heading, "" for what is above the first; those of the same name as one.

    For pages that people wrote. Headings inside code blocks are text: what a model wrote may hold anything.
    """
    sections: dict[str, list[list[str]]] = {"": [[]]}
    heading, fence = "", None
    for line in page.split("\n"):
        mark = re.match(r"`{3,}", line)
        if fence is None and line.startswith("## "):
            heading = line.removeprefix("## ").strip()
            sections.setdefault(heading, []).append([])
            continue
        if mark and fence is None:
            fence = mark[0]
        elif fence is not None and line.strip() == fence:
            fence = None
        sections[heading][-1].append(line)
    return {heading: "\n\n".join("\n".join(part).strip() for part in parts) for heading, parts in sections.items()}


def cell(text: str) -> str:
    """The beginning of a text in a row of a table, as code: whatever a model writes, it stays text."""
    line = re.sub(r"\s+", " ", text.replace("`", "'")).strip()
    line = line if len(line) <= CELL else line[: CELL - 1] + "…"
    return f"`{line}`".replace("|", r"\|")


def _write(folder: RunFolder, facts: dict[str, Any], evaluation: dict[str, Any] | None) -> None:
    model = folder.model.as_posix()
    page = environment().get_template("report.md.j2").render(facts, model_path=model, evaluation=evaluation)
    write_atomic(folder.report, page.strip() + "\n")
    write_facts(folder, facts | {"report_sha256": file_sha256(folder.report)})
