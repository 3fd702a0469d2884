"""Readers of metrics.jsonl (one object per log line, with the names of Transformers' Trainer) and events.jsonl
(status.py).

An invalid line, cut off by a crash or edited by hand, is skipped, so that it cannot make a run fail at its report.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common import schema
from common.atomic import write_atomic

VALIDATION_KEYS = {"epoch", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_tokens"}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl: log lines and validations. All their values are numbers."""
    return [entry for entry in _objects(path) if _is_metrics(entry)]


def read_events(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in _objects(path) if {"time", "event"} <= entry.keys() and _fits(entry)]


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and _is_count(entry.get("step")):
            yield entry


def _is_metrics(entry: dict[str, Any]) -> bool:
    keys = VALIDATION_KEYS if "eval_loss" in entry else {"tokens"}
    is_whole = keys <= entry.keys() and all(map(_is_number, entry.values()))
    is_logged = "tokens" not in entry or (_is_count(entry["tokens"]) and entry["step"] > 0)
    return is_whole and is_logged and entry.get("tokens_per_second", 1) > 0


def _fits(event: dict[str, Any]) -> bool:
    keys = {"spike": {"loss", "z_score"}, "advice": {"about", "text"}}.get(str(event.get("event")), set())
    try:
        details = {name: schema.build(event[name], kind) for name, kind in DETAILS.items() if name in event}
        is_zoned = "time" not in details or datetime.fromisoformat(details["time"]).tzinfo is not None
    except ValueError:
        return False
    starts = details.get("earlier", [])
    is_whole = keys <= event.keys() and all("step" in start and _fits(start) for start in starts)
    return is_zoned and is_whole and ("planned" not in details or details["planned"].is_possible)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**62)


@dataclass
class Planned:
    """Estimate of a run, recorded in its first event."""

    steps: int
    evaluation_share: float
    memory_bytes: float
    tokens_per_second: float | None  # None exactly if `hours` is None
    hours: float | None

    @property
    def is_possible(self) -> bool:
        """True if the numbers are valid for reports."""
        is_one_unknown = (self.tokens_per_second is None) != (self.hours is None)
        largest = max(abs(number or 0) for number in vars(self).values())
        return not is_one_unknown and largest < 1e18 and self.steps >= 1 > self.evaluation_share


DETAILS = {
    **dict.fromkeys(("time", "event", "environment", "about", "text", "checkpoint", "because"), str),
    "step": int,
    "loss": float,
    "z_score": float,
    "planned": Planned,
    "changes": list[str],
    "earlier": list[dict[str, Any]],
}


def forget_after(path: Path, step: int, keeps_scores: bool = True) -> None:
    """Remove the entries after the checkpoint that a run resumes from, so that the file reads as one run, and the
    validations if those that follow score another text."""
    kept = (entry for entry in read_metrics(path) if entry["step"] <= step)
    entries = [entry for entry in kept if keeps_scores or "eval_loss" not in entry]
    write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def best_step(path: Path, steps: Collection[int]) -> int | None:
    """Return the one of `steps` with the lowest comparable validation loss, or None if none of them was validated."""
    return (best_evaluation([entry for entry in read_metrics(path) if entry["step"] in steps]) or {}).get("step")


def best_evaluation(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the validation with the lowest comparable loss, or None without a validation."""
    return min(comparable_evaluations(entries), key=comparable_loss, default=None)


def comparable_evaluations(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validations whose sample has the size of the newest one's: a resumed run may change it."""
    validations, by_size = [entry for entry in entries if "eval_loss" in entry], {}
    size = next(filter(None, map(sample_tokens, validations)), None)
    for entry in validations:
        size = sample_tokens(entry) or size
        by_size.setdefault(size, []).append(entry)
    return by_size.get(size, [])


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
    """Return the training seconds until each logged step, from the tokens and the speed of each log line. `first_step`:
    0, or the step of the other run's checkpoint that this one branched off from."""
    seconds, until = 0.0, {}
    step, tokens = next(((entry["step"], entry["tokens"]) for entry in entries if "tokens" in entry), (0, 0))
    tokens *= first_step / step if first_step < step else 0  # the event of the first start may be lost
    for entry in entries:
        if "tokens_per_second" in entry:
            seconds += (entry["tokens"] - tokens) / entry["tokens_per_second"]
        tokens = entry.get("tokens", tokens)
        until[entry["step"]] = seconds
    return until
