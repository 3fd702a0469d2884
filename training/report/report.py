"""Pages of a run: report.md with plots, from report.json, and the results of evaluate.py, on a terminal and in the run
folder.

evaluation/evaluation.json   all results, including those of earlier commands on the same weights and, but for tasks,
                             the same text
evaluation/evaluation.md     the same results as a page, with panel.png if models were compared
"""

import json
import os
import re
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from rich.console import Console, RenderResult
from rich.markdown import Markdown, TableElement

from common.atomic import file_sha256, write_atomic
from common.command_line import reports_for_all
from common.errors import NONSENSE, UserError, check_format, counted, disk_errors, first_of
from common.removal import is_marked, mark, refuse_replacing
from common.terminal import CONTROL, printable
from tokenizer.store.store import RESUMES, TokenStore
from training.checkpoints.loading import name_of_model
from training.checkpoints.metrics import read_events, read_metrics, seconds_until
from training.checkpoints.run_folder import EVALUATION, FOLDERS, RunFolder, is_checkpoint, run_of
from training.checkpoints.samples import fenced
from training.checkpoints.status import first_step
from training.report.facts import gather, read_facts, write_facts
from training.report.plots import plot_course, plot_loss, plot_panel
from training.runtime.console import clock, perplexity, say
from training.runtime.hardware import DOLLARS_PER_COLAB_UNIT, PRICES_OF

TEMPLATES = Path(__file__).parent / "templates"
CELL = 60  # maximum characters of a text in a table
# Part of a page: a block of code, up to its closing fence or the end of the page, or a heading.
CODE_OR_HEADING = re.compile(r"^(`{3,})(?s:.*?)(?:^[^\S\n]*\1\s*?$|\Z)|^## (?P<heading>.*)$", re.MULTILINE)
# Characters of Markdown, with underscores that are not within a word.
MARKDOWN = re.compile(r"[\\`*\[\]<>|&!~$]|(?<![^\W_])_|_(?![^\W_])")
EVALUATION_FORMAT = 1  # of evaluation.json; a file without a version has format 1


@cache  # compiled templates
def environment(*folders: Path) -> Environment:
    """Return the Jinja environment for the templates of `folders` and of this package."""
    loader = FileSystemLoader([*folders, TEMPLATES])
    jinja = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    jinja.filters |= {"as": format, "counted": counted, "first_of": first_of, "cell": cell, "clock": clock}
    jinja.filters["fenced"] = lambda text: fenced(text.translate(CONTROL))  # which an untrained model writes
    jinja.filters |= {"perplexity": perplexity, "quoted": partial(json.dumps, ensure_ascii=False)}  # a Python string
    jinja.filters |= {
        "millions": lambda number: f"{number / 1e6:{',.1f' if number >= 1e6 else '.2g'}}M",
        "plain": lambda name: MARKDOWN.sub(r"\\\g<0>", " ".join(name.split())),
        "row": lambda cells: f"| {' | '.join(map(str, cells))} |",  # of a table
        "line": lambda text: " ".join(text.split()),  # a paragraph
        "yaml": partial(yaml.safe_dump, sort_keys=False, allow_unicode=True),
    }
    jinja.globals |= {"colab_dollars": DOLLARS_PER_COLAB_UNIT, "prices_of": PRICES_OF}
    jinja.globals["published"] = yaml.safe_load((TEMPLATES.parent / "published.yaml").read_text(encoding="utf-8"))
    return jinja


def cell(text: str) -> str:
    """Return the beginning of a text for a table cell, as code, so that it is never rendered as Markdown."""
    line = re.sub(r"\s+", " ", text.translate(CONTROL).replace("`", "'")).strip()
    line = line if len(line) <= CELL else line[: CELL - 1] + "…"
    return f"`{line}`".replace("|", r"\|")


def write_report(folder: RunFolder) -> None:
    """Write report.json, report.md and, if matplotlib is installed, the plots, from the log so far. An edited page is
    renamed first."""
    facts = read_facts(folder)
    if not facts:  # deleted or damaged since the start; the next start of the run writes it again
        return
    if folder.report.is_file() and facts.get("report_sha256") != (digest := file_sha256(folder.report)):
        page = folder.report.rename(folder.path / f"report.edited-{digest[:8]}.md")
        reason = "was edited" if "report_sha256" in facts else "is of an older version, or was edited"
        say(f"{folder.report} {reason}: that page is now {page}, because the run writes a new one.")
    entries = read_metrics(folder.metrics)
    until = seconds_until(entries, first_step(read_events(folder.events)))
    drawn = {"loss": plot_loss(entries, until, folder.plots["loss"])}
    drawn["course"] = plot_course(entries, folder.plots["course"])
    facts |= gather(folder, entries) | {"plots": list(filter(drawn.get, drawn))}
    page = environment().get_template("report.md.j2").render(facts, model_path=folder.model.as_posix())
    write_atomic(folder.report, page.strip() + "\n")
    write_facts(folder, facts | {"report_sha256": file_sha256(folder.report)})


def facts_of(folder: RunFolder) -> dict[str, Any] | None:
    """Return the facts behind report.md, or None if the page was edited, or written by an older version."""
    facts = read_facts(folder)
    digest = facts.get("report_sha256")
    is_edited = folder.report.is_file() and file_sha256(folder.report) != digest
    return None if digest is None or is_edited or "reference" not in facts else facts  # older facts lack some


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a Markdown page by heading ("" above the first heading). Sections of the same name are
    joined. For pages that people wrote. Headings inside code blocks are text, because a model may write anything."""
    headings = [match for match in CODE_OR_HEADING.finditer(page) if match["heading"] is not None]
    sections = {"": [page[: headings[0].start() if headings else None]]}
    for match, next_heading in pairwise([*headings, None]):
        text = page[match.end() : next_heading and next_heading.start()]
        sections.setdefault(match["heading"].strip(), []).append(text)
    return {heading: "\n\n".join(part.strip() for part in parts) for heading, parts in sections.items()}


class TerminalPage(Markdown):
    """Markdown on a terminal, without control characters, and with tables that fold long names."""

    def __init__(self, page: str):
        super().__init__(printable(page, sys.stdout))

    class Table(TableElement):
        def __rich_console__(self, *arguments: Any) -> RenderResult:
            for table in super().__rich_console__(*arguments):
                for column in table.columns:
                    column.overflow = "fold"
                yield table

    elements: ClassVar = Markdown.elements | {"table_open": Table}


def show_evaluation(results: dict[str, Any]) -> None:
    Console().print(TerminalPage(_page(results)))


def evaluated_run(model: Path, folder: str) -> RunFolder | None:
    """Return the run folder of `model`, or `folder` for a model without a run, to keep results in; None if they cannot
    be kept. Raise a `UserError` if its evaluation/ has other files with the names of the results."""
    try:
        run = RunFolder(run_of(model))
    except UserError:  # not kept: those of a damaged or newer run, of the Hub, or of someone else's folder
        run = RunFolder(folder)
        is_part = model.name in FOLDERS and RunFolder(model.parent).is_run()
        if is_checkpoint(model) or RunFolder(model).is_run() or is_part:
            return None
    if not os.access(run.path, os.W_OK):
        if run.path.is_dir() and reports_for_all():
            print(f"The results will not be saved: {run.path} cannot be written.", file=sys.stderr, flush=True)
        return None
    with disk_errors(run.evaluation, RESUMES):  # an older version set no mark
        if not is_marked(run.evaluation, "evaluation") and "weights_sha256" not in _read(run.evaluation):
            for name in EVALUATION:
                refuse_replacing(run.evaluation / name)
    return run


def keep_evaluation(results: dict[str, Any], run: RunFolder, store: TokenStore, hashes: list[str]) -> None:
    """Write the results of weights with these `hashes` into the folder of `evaluated_run`."""
    for row in results.get("panel", {}).get("rows", []):
        row["is_local"] = os.path.exists(row["name"])
    identity = {"weights_sha256": hashes, "tokens_sha256": store.metadata.identity}
    folder, picture = run.evaluation, run.evaluation / "panel.png"
    with disk_errors(folder, RESUMES):
        mark(folder, "evaluation")
        earlier_results = _read(folder)
        if (earlier_hashes := earlier_results.get("weights_sha256")) != hashes:
            if earlier_hashes == weight_hashes(run.model):
                print(f"Not saved: {folder} has results of {run.model}; delete it to save these.", file=sys.stderr)
                return
            earlier_results = {}
        elif earlier_results.get("tokens_sha256") != identity["tokens_sha256"]:  # tasks have their own text
            earlier_results = {name: value for name, value in earlier_results.items() if name == "tasks"}
        if "panel" in results or "panel" not in earlier_results:
            picture.unlink(missing_ok=True)
        if "tasks" in results and "tasks" in earlier_results:
            for name in ("configs", "results", "n-shot", "cut_requests"):
                results["tasks"][name] = earlier_results["tasks"].get(name, {}) | results["tasks"][name]
        content = {"format_version": EVALUATION_FORMAT} | earlier_results | results | identity
        write_atomic(folder / "evaluation.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        if "panel" in results:
            plot_panel(results["panel"]["rows"], picture)
        if picture.is_file():
            content["picture"] = picture.name
        write_atomic(folder / "evaluation.md", _page(content))
    print(f"Saved in {folder}.", file=sys.stderr)


def evaluation_of(run: RunFolder, model: Path) -> dict[str, Any] | None:
    """Return the results for exactly these weights, for a public page. `run` may be the folder of a model without a
    run. They contain no paths of this machine and no training text."""
    results = _read(run.evaluation)
    if results.get("weights_sha256") != weight_hashes(model):
        return None
    for row in results.get("panel", {}).get("rows", []):
        name = str(row["name"])
        if row.get("is_local", os.path.exists(name)) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):  # not a Hub id
            row["name"] = name_of_model(str(Path(name).resolve()))
    if "memorization" in results:
        results["memorization"]["example"] = None
    return results | {"model": "this model", "data": f"held-out text of {Path(str(results.get('data', ''))).name}"}


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of evaluation.json, or an empty dictionary if the file is missing or cannot be rendered."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_format(path, results.pop("format_version", None), EVALUATION_FORMAT)
        _page(results)
        return results
    except (OSError, *NONSENSE, TemplateError):
        return {}


def weight_hashes(model: Path) -> list[str]:
    return [file_sha256(path) for path in sorted(model.glob("*.safetensors")) if path.is_file()]


def _page(results: dict[str, Any]) -> str:
    tables = environment().get_template("tables.md.j2").module
    return f"# Evaluation\n\n{tables.evaluation_tables(results, '##').strip()}\n"
