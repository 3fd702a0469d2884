"""What an evaluation found: shown on a terminal, kept in the run folder.

evaluation/evaluation.json   everything, also of earlier commands on the same weights and the same text
evaluation/evaluation.md     the same to read, with panel.png where models were compared
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from atomic import file_sha256, write_atomic
from errors import NONSENSE, UserError, check_format, disk_errors
from tokenizer.store import RESUMES, TokenStore
from training.compare.panel import Row
from training.report.plots import plot_panel
from training.report.report import gather
from training.run_folder import RunFolder, run_of
from training.sampling import fenced

FORMAT_VERSION = 1  # of evaluation.json; one without a version is of format 1 too
METRICS = {"loss": "loss (nats a token)", "perplexity": "perplexity", "bits_per_byte": "bits a byte"}


def show(results: dict[str, Any]) -> None:
    """Small tables."""
    console = Console()
    for title, header, lines, note in _tables(results):
        table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
        for place, name in enumerate(header):
            table.add_column(name, justify="right" if place else "left", overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        console.print(note, markup=False, highlight=False)
        console.print()


def keep(results: dict[str, Any], rows: list[Row], model: Path, store: TokenStore) -> None:
    """Writes the files into the run folder that `model` is of; nothing where there is no run.

    Raises:
        UserError: they cannot be written.
    """
    try:
        run = RunFolder(run_of(model))
    except UserError:
        return
    with disk_errors(run.evaluation, RESUMES):
        _write(results, rows, run.evaluation, store)
        found, picture = found_of(run, run.model), run.evaluation / "panel.png"
        if found and picture.is_file():
            found += f"\n\n![Bits a byte of each]({run.evaluation.name}/{picture.name})"
        gather(run.report, "Evaluation", found)
    print(f"Kept in {run.evaluation}.", file=sys.stderr)


def found_of(run: RunFolder, model: Path) -> str:
    """What was found of just these weights, in Markdown for a page that others read: without paths of this machine and without
    text that was trained on. Empty where nothing was."""
    results = _kept(run.evaluation)
    if results.get("weights_sha256") != _hashes(model):
        return ""
    for row in results.get("panel", {}).get("rows", []):
        row["name"] = _public(row["name"])
    results |= {"model": "this model", "data": "held-out text of the sources below"}
    if "memorization" in results:
        results["memorization"]["example"] = None
    return "\n\n".join(_sections(results, "###"))


def _public(name: str) -> str:
    """An id of the Hub as it is; of a path, the last part."""
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists() else Path(name).name


def _kept(folder: Path) -> dict[str, Any]:
    """Return the content of evaluation.json; nothing where there is none, or one that cannot be shown.

    Raises:
        UserError: a newer version of this project wrote it.
    """
    path = folder / "evaluation.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_format(path, results.pop("format_version", None), FORMAT_VERSION)
        "\n\n".join(_sections(results, ""))
        return results
    except (FileNotFoundError, *NONSENSE):
        return {}


def _hashes(model: Path) -> list[str]:
    return [file_sha256(path) for path in sorted(model.glob("*.safetensors"))]


def _write(results: dict[str, Any], rows: list[Row], folder: Path, store: TokenStore) -> None:
    identity = {"weights_sha256": _hashes(Path(results["model"])), "tokens_sha256": store.metadata.identity}
    folder.mkdir(exist_ok=True)
    before = _kept(folder)
    if {name: before.get(name) for name in identity} == identity:
        results = before | results
    elif not rows:
        (folder / "panel.png").unlink(missing_ok=True)  # of other weights
    has_plot = plot_panel(rows, folder / "panel.png") if rows else (folder / "panel.png").is_file()
    write_atomic(
        folder / "evaluation.json",
        json.dumps({"format_version": FORMAT_VERSION} | results | identity, indent=2, ensure_ascii=False) + "\n",
    )
    shown = ["![Bits a byte of each](panel.png)"] if has_plot else []
    write_atomic(folder / "evaluation.md", "\n\n".join(["# Evaluation", *_sections(results, "##"), *shown]) + "\n")


def _tables(results: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]], str]]:
    """Title, header, lines and a note of each."""
    metrics = [
        [title, f"{results[f'eval_{name}']:.4f}", f"{results[f'eval_{name}_stderr']:.4f}"]
        for name, title in METRICS.items()
    ]
    note = (
        f"{results['eval_tokens']:,} tokens of {results['data']}. ±: standard error over {results['eval_stderr_over']}."
    )
    tables = [(f"Validation: {results['model']}", ["", "value", "±"], metrics, note)]
    if "panel" in results:
        lines = [
            [row["name"], *(_number(row, name) for name in ("bits_per_byte", "difference"))]
            for row in results["panel"]["rows"]
        ]
        first = next(
            row["name"] for row in results["panel"]["rows"] if row["kind"] == "model" and "difference" not in row
        )
        tables.append(("Panel", ["", "bits a byte", f"more than {first}"], lines, results["panel"]["how"]))
    if "memorization" in results:
        found = results["memorization"]
        lines = [
            [title, f"{found[f'{name}spans']:,}", f"{found[f'{name}share']:.2%}", f"{found[f'{name}share_stderr']:.2%}"]
            for title, name in (("written by the model", ""), ("held-out text", "held_out_"))
        ]
        note = (
            f"Spans of {found['span_tokens']} tokens that stand in the training split word for word. ±: standard error over "
            f"{found['texts']} texts; where nothing is found, up to one text in {max(1, found['texts'] // 3)} may still recite."
        )
        if found["example"] is not None:
            example = found["example"]
            note += f" One stands in its document {example['document']:,}, at token {example['token']:,}:\n\n"
            note += fenced(example["text"])
        tables.append(("Memorization", ["", "spans", "found", "±"], lines, note))
    return tables


def _number(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    value = f"{row[name]:+.4f}" if name == "difference" else f"{row[name]:.4f}"
    return f"{value} ± {row[f'{name}_stderr']:.4f}" if f"{name}_stderr" in row else value


def _sections(results: dict[str, Any], mark: str) -> list[str]:
    """In Markdown, under headings of `mark`."""
    sections = []
    for title, header, lines, note in _tables(results):
        rows = [header, ["---", *["--:"] * (len(header) - 1)], *lines]
        sections += [f"{mark} {title}", "\n".join(f"| {' | '.join(row)} |" for row in rows), note]
    return sections
