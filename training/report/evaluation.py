"""The page about an evaluation: shown on a terminal, kept in the run folder.

evaluation/evaluation.json   everything, also of earlier commands on the same weights and the same text
evaluation/evaluation.md     the same to read, with panel.png where models were compared
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import TemplateError
from rich.console import Console, RenderResult
from rich.markdown import Markdown, TableElement

from atomic import file_sha256, write_atomic
from errors import NONSENSE, UserError, check_format, disk_errors
from tokenizer.store import RESUMES, TokenStore
from training.report.plots import plot_panel
from training.report.report import environment, put_evaluation
from training.run_folder import RunFolder, run_of

FORMAT_VERSION = 1  # of evaluation.json; one without a version is of format 1 too


class Page(Markdown):
    """Markdown on a terminal, whose tables fold long names instead of cutting them."""

    class Table(TableElement):
        def __rich_console__(self, *where: Any) -> RenderResult:
            for table in super().__rich_console__(*where):
                for column in table.columns:
                    column.overflow = "fold"
                yield table

    elements: ClassVar = Markdown.elements | {"table_open": Table}


def show(results: dict[str, Any]) -> None:
    """Print small tables."""
    Console().print(Page(_page(results)))


def keep(results: dict[str, Any], model: Path, store: TokenStore) -> None:
    """Write the files into the run folder of `model`, if it is of a run, and show them in its report."""
    try:
        run = RunFolder(run_of(model))
    except UserError:
        return
    identity = {"weights_sha256": _hashes(Path(results["model"])), "tokens_sha256": store.metadata.identity}
    folder, picture = run.evaluation, run.evaluation / "panel.png"
    with disk_errors(folder, RESUMES):
        folder.mkdir(exist_ok=True)
        before = _read(folder)
        is_same = identity.items() <= before.items()
        if "panel" in results or not is_same:
            picture.unlink(missing_ok=True)
        if "panel" in results:
            plot_panel(results["panel"]["rows"], picture)
        content = {"format_version": FORMAT_VERSION} | (before if is_same else {}) | results | identity
        write_atomic(folder / "evaluation.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        found = evaluation_of(run, run.model)
        if picture.is_file():
            content["picture"] = picture.name
            found = found and found | {"picture": f"{folder.name}/{picture.name}"}
        write_atomic(folder / "evaluation.md", _page(content))
        put_evaluation(run, found)
    print(f"Kept in {folder}.", file=sys.stderr)


def evaluation_of(run: RunFolder, model: Path) -> dict[str, Any] | None:
    """Return what was found of just these weights, for a page that others read: without paths of this machine and without
    text that was trained on."""
    results = _read(run.evaluation)
    if results.get("weights_sha256") != _hashes(model):
        return None
    for row in results.get("panel", {}).get("rows", []):
        name = str(row["name"])
        if os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):  # no id of the Hub
            row["name"] = Path(name).name
    if "memorization" in results:
        results["memorization"]["example"] = None
    return results | {"model": "this model", "data": "held-out text of the sources below"}


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of evaluation.json; nothing if there is none, or one that cannot be shown."""
    path = folder / "evaluation.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_format(path, results.pop("format_version", None), FORMAT_VERSION)
        _page(results)
        return results
    except (FileNotFoundError, *NONSENSE, TemplateError):
        return {}


def _hashes(model: Path) -> list[str]:
    return [file_sha256(path) for path in sorted(model.glob("*.safetensors"))]


def _page(results: dict[str, Any]) -> str:
    return environment().get_template("evaluation.md.j2").render(results=results).strip() + "\n"
