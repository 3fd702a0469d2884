"""Readers of metrics.jsonl (one object per log line and per validation, with the names of Transformers' Trainer) and
events.jsonl (status.py).

A line that a crash cut off is skipped.
"""

import json
import math
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic import write_atomic


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics.jsonl: log lines and validations."""
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):  # a line that a crash cut off
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the objects of an events.jsonl."""
    return read_metrics(path)


def forget_after(path: Path, step: int, scored_step: float = math.inf) -> None:
    """Remove the entries after the checkpoint that a run resumes from, so that the file reads as one run, and the
    validations after `scored_step`, which the resumed run repeats, or whose text it has replaced."""
    kept = (entry for entry in read_metrics(path) if entry["step"] <= step)
    entries = [entry for entry in kept if entry["step"] <= scored_step or "eval_loss" not in entry]
    write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def best_step(path: Path, steps: Collection[int]) -> int | None:
    """Return the one of `steps` with the lowest comparable validation loss, or None if none of them was validated."""
    return (best_evaluation([entry for entry in read_metrics(path) if entry["step"] in steps]) or {}).get("step")


def best_evaluation(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the validation with the lowest comparable loss, or None without a validation."""
    return min(comparable_evaluations(entries), key=comparable_loss, default=None)


def comparable_evaluations(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validations whose sample has the size of the newest one's, which a resumed run may change, or an
    unknown size."""
    validations = [entry for entry in entries if "eval_loss" in entry]
    sizes = list(map(sample_tokens, validations))
    newest = next(filter(None, reversed(sizes)), None)
    return [entry for entry, size in zip(validations, sizes, strict=True) if size in (newest, None)]


def comparable_loss(entry: dict[str, Any]) -> float:
    """Return the loss on the text that all validations of a run score. The last validation may score more text."""
    return entry.get("eval_sampled_loss", entry["eval_loss"])


def comparable_scores(entry: dict[str, Any]) -> dict[str, float]:
    """Return loss and bits per byte on the text of `comparable_loss`. Their ratio on all text is assumed."""
    factor = comparable_loss(entry) / entry["eval_loss"]
    return {name: entry[name] * factor for name in ("eval_loss", "eval_bits_per_byte") if name in entry}


def sample_tokens(entry: dict[str, Any]) -> int | None:
    """Return the tokens of the sample that all validations score, or None if an older version did not record them."""
    return entry.get("eval_sampled_tokens", None if scores_more(entry) else entry.get("eval_tokens"))


def scores_more(entry: dict[str, Any]) -> bool:
    """Return whether a validation scored more than the sample, so that its loss is not comparable with the others."""
    return comparable_loss(entry) != entry["eval_loss"]


def seconds_until(entries: list[dict[str, Any]], first_step: int) -> dict[int, float]:
    """Return the training seconds until each step of `entries`, from the tokens and the speed of each log line, between
    two log lines by interpolation. `first_step`: 0, or the step of the other run's checkpoint that this one branched
    off from."""
    step, tokens = next(((entry["step"], entry["tokens"]) for entry in entries if "tokens" in entry), (0, 0))
    start = first_step if first_step < step else 0  # the event of the first start may be lost
    seconds, until = 0.0, {start: 0.0}
    tokens *= start / step if step else 0
    for entry in entries:
        if "tokens" in entry:
            seconds += (entry["tokens"] - tokens) / entry.get("tokens_per_second", math.inf)
            tokens, until[entry["step"]] = entry["tokens"], seconds
    steps = [entry["step"] for entry in entries]
    return dict(zip(steps, np.interp(steps, [*until], [*until.values()]).tolist(), strict=True))
