"""metrics.jsonl: one object a log line, by the names of Transformers' Trainer; and events.jsonl, read the same way."""

import json
from pathlib import Path
from typing import Any

from tokenizer.store import write_whole


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl, without lines that are none, such as one cut off by a crash."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def forget_after(path: Path, step: int) -> None:
    """Takes out what was logged after the checkpoint that a run resumes from, so that the file reads as one run."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= step]
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def has_evaluation(path: Path, step: int) -> bool:
    return any(entry["step"] == step and "eval_loss" in entry for entry in read_metrics(path))


def best_step(path: Path) -> int | None:
    """The step with the lowest validation loss."""
    best = best_evaluation(read_metrics(path))
    return best["step"] if best is not None else None


def best_evaluation(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation with the lowest comparable loss."""
    return min((entry for entry in entries if "eval_loss" in entry), key=comparable_loss, default=None)


def comparable_loss(entry: dict[str, Any]) -> float:
    """Of a validation, on the text that all of a run's validations score: its last one scores more."""
    return entry.get("eval_sampled_loss", entry["eval_loss"])


def scores_more(entry: dict[str, Any]) -> bool:
    """Whether a validation scored more than the sample, so that its loss compares with no other."""
    return comparable_loss(entry) != entry["eval_loss"]


def seconds_until(entries: list[dict[str, Any]]) -> dict[int, float]:
    """How long the steps took until each logged step, by the tokens and the speed of each log line. In a run that goes on
    from another's checkpoint, the steps of that one do not count."""
    seconds, until = 0.0, {}
    logged = [entry for entry in entries if "tokens" in entry][:2]
    between = logged[-1]["step"] - logged[0]["step"] if logged else 0  # steps, as before the first line of such a run
    tokens = logged[0]["tokens"] * (1 - between / logged[0]["step"]) if between else 0
    for entry in entries:
        if "tokens_per_second" in entry:
            seconds += (entry["tokens"] - tokens) / entry["tokens_per_second"]
        tokens = entry.get("tokens", tokens)
        until[entry["step"]] = seconds
    return until
