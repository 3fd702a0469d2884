"""Facts in report.json for the report and the model card, gathered from the run folder.

Each start of the run writes the facts that no other file holds: model and data. Each validation adds the log so
far.
"""

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from common import schema
from common.atomic import write_atomic
from common.errors import NONSENSE, UserError, check_format
from common.settings_file import read_yaml
from modeling_gpt2scratch import GPT2ScratchConfig
from modeling_gpt2scratch.loading import TOKENIZER
from tokenizer.build.report import documents, left_out
from tokenizer.corpus.named_data import find
from tokenizer.store.store import Metadata
from training.checkpoints import metrics
from training.checkpoints.checkpoint import complete_checkpoints, step_of
from training.checkpoints.loading import name_of_model
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.samples import read_samples
from training.checkpoints.status import first_step, hours, read_status, starts_in_force
from training.log.reference import find_reference
from training.log.speed import flops_per_token
from training.plan.compatibility import model_fields
from training.step.size import size_of

FORMAT_VERSION = 1
MAX_ROWS = 16  # rows of the results table; metrics.jsonl has all validations
MAX_MOMENTS = 5  # steps for which the report shows samples
PROMPT_CHARACTERS = 10  # first characters of a sample, used as the prompt if none is given
FIRST_LINES = 5  # log lines from which the duration is estimated if no speed was known for the device
SPEED_MEASURES = ("tokens_per_second", "mfu", "data_share")
NOTABLE_EVENTS = ("resumed", "stopped", "spike", "advice")  # events that explain the curves

Entries = list[dict[str, Any]]


def begin_report(folder: RunFolder, model: GPT2ScratchConfig, parameters: int, data: Metadata) -> None:
    """Write the facts that no other file of the run holds."""
    on_the_hub = tuple(data.hub_datasets)
    facts = {
        "model": {name: getattr(model, name) for name in model_fields(type(model))},
        "parameters": parameters,
        "product_parameters": size_of(model).products,
        "flops_per_token": {"causal": flops_per_token(model), "palm": flops_per_token(model, causal=False)},
        "data": {
            "sources": [name if name.startswith(on_the_hub) else Path(name).name for name in data.sources],
            "commits": data.commits,
            "citations": list(_citations(data)),
            "tokenizer": "BPE" if data.tokenizer_type == "bpe" else data.tokenizer_type,
            "vocab_size": data.vocab_size,
            "tokenizer_sha256": data.tokenizer_sha256,
            "train": asdict(data.train),
            "val": asdict(data.val),
            "cleaning": data.settings["cleaning"],
            "dedup": data.settings["dedup"],
            "documents": "; ".join([documents(data), *left_out(data)]),
        },
    }
    write_facts(folder, read_facts(folder) | facts)


def _citations(data: Metadata) -> Iterator[str]:
    """Yield the citation of each named data set in the store, but not of a folder with such a name."""
    for name in data.sources:
        with suppress(UserError):  # such as a name that lacks its language
            source = find(name)
            if source is not None and source.citation and (source.package or source.dataset in data.hub_datasets):
                yield f"{source.citation} (license: {source.license or 'not known'})"


def write_facts(folder: RunFolder, facts: dict[str, Any]) -> None:
    write_atomic(folder.facts, schema.sealed({"format_version": FORMAT_VERSION} | facts, indent=2) + "\n")


def read_facts(folder: RunFolder) -> dict[str, Any]:
    """Return the content of report.json, or {} if missing or damaged. Raise a `UserError` for a newer format."""
    try:
        facts = schema.read(folder.facts)
        check_format(folder.facts, facts["format_version"], FORMAT_VERSION)
        return facts
    except (FileNotFoundError, *NONSENSE):
        return {}


def gather(folder: RunFolder, entries: Entries) -> dict[str, Any]:
    """Gather the facts from the entries of metrics.jsonl and the current files of the run."""
    events = metrics.read_events(folder.events)
    samples, settings = read_samples(folder.samples), read_yaml(folder.config)
    for name, kind in {"data": str, "exclude": list, "sample_prompts": list}.items():
        if not isinstance(settings.get(name, kind()), kind):  # half of an edit
            raise UserError(f"{folder.config}: {name} is {settings[name]!r}; correct it.")
    starts, source, text = starts_in_force(events), settings.get("init_from"), settings.get("data", "TEXT")
    if "exclude" in settings:
        settings["exclude"] = list(map(_as_typed, settings["exclude"]))
    environments = [{"step": start["step"], "text": start["environment"]} for start in starts if "environment" in start]
    evaluations, reference = [entry for entry in entries if "eval_loss" in entry], find_reference(folder)
    texts_at = {step: texts for step, texts in samples.items() if texts}
    speed_entries = [entry for entry in entries if "tokens_per_second" in entry]
    startup = next((entry["seconds_to_first_step"] for entry in entries if "seconds_to_first_step" in entry), 0.0)
    openings = [texts[0][:PROMPT_CHARACTERS] for texts in texts_at.values()]  # the tokenizer can encode these
    openings = ["Hello"] if (folder.model / TOKENIZER[-1]).is_file() else openings
    return {
        "name": folder.path.resolve().name,
        "prompt": [*settings.get("sample_prompts", []), *openings, "Once"][0],
        "results": _results(entries, evaluations, texts_at, first_step(events)) if evaluations else None,
        "reference": reference.compared(evaluations[-1]) if evaluations and reference is not None else "",
        "samples": [{"step": step, "texts": texts_at[step]} for step in evenly(sorted(texts_at), MAX_MOMENTS)],
        "settings": {
            name: _as_typed(value) if isinstance(value, str) else value
            for name, value in settings.items()
            if name not in ("data", "backup_dir")
        },
        # The first name: the model may be deleted meanwhile.
        "pretrained": source and (read_facts(folder).get("pretrained") or name_of_model(source)),
        "command": f"python train_accelerate.py --config config.yaml --data {shlex.quote(_as_typed(text))}",
        # Hardware and libraries, with the step after which each combination was used.
        "environments": [next(group) for _, group in groupby(environments, key=itemgetter("text"))],
        "begins_at": starts[0]["step"] if starts else 0,
        "changes": [
            {"step": start["step"], "text": text.partition("; the run was")[0]}
            for start in starts
            for text in start.get("changes", [])
        ],
        "speed": _speed(speed_entries, startup) if speed_entries else None,
        "estimate": _estimate(speed_entries, startup, events) if speed_entries else None,
        "noticed": _noticed(events),
        "hours": hours(events, datetime.now(UTC), time.monotonic()),
        "hourly_price": settings.get("hourly_price"),
        "notes": settings.get("notes"),
    }


def is_reported(folder: RunFolder, step: int, scores_all: bool) -> bool:
    """Return whether the validation after `step` is complete up to the report, which is written last. `scores_all`: it
    must have scored the sample and all held-out text."""
    validations = [entry for entry in metrics.read_metrics(folder.metrics) if "eval_loss" in entry]
    entry = next((entry for entry in validations if entry["step"] == step), {})
    row = [{"step": -1}, *(read_facts(folder).get("results") or {}).get("rows", [])][-1]
    has_row = row["step"] > step or (row["step"], row.get("eval_loss")) == (step, entry.get("eval_loss"))
    return has_row and ("eval_sampled_loss" in entry if scores_all else bool(entry))


def summarize_run(folder: RunFolder) -> dict[str, Any]:
    """Return the facts of a run, finished or in progress, for a comparison with other runs."""
    entries, events = metrics.read_metrics(folder.metrics), metrics.read_events(folder.events)
    settings, data = read_yaml(folder.config), read_facts(folder).get("data", {})
    status = read_status(folder.status)
    is_ended = bool(entries) and entries[-1]["step"] == settings.get("max_steps")  # the first versions wrote no status
    state = status.get("state", "finished" if is_ended else "running")
    validations = [entry for entry in entries if "eval_loss" in entry]
    newest = ([{}] + validations)[-1]
    if state == "finished" and settings.get("load_best_model_at_end"):  # whose model is an earlier one
        steps = {step_of(checkpoint) for checkpoint in complete_checkpoints(folder.checkpoints)}
        saved = [entry for entry in validations if entry["step"] in steps]
        newest = metrics.best_evaluation(saved or validations) or {}
    estimates = [{"steps": 0}] + [event["planned"] for event in events if "planned" in event]
    end = datetime.fromtimestamp(folder.metrics.stat().st_mtime, UTC) if entries and state == "running" else None
    step = max([status.get("step", 0)] + [entry["step"] for entry in entries[-1:]])  # not every step is logged
    run = {"entries": entries, "step": step, "last": newest, "state": state, "hours": hours(events, end)}
    run["seconds_until"] = metrics.seconds_until(entries, first_step(events))
    return run | {"settings": settings, "planned": estimates[-1]["steps"], "text": str(data.get("val"))}


def evenly(items: list[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced items, including the first and the last."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(limit, len(items))).round().astype(int)]


def _results(entries: Entries, evaluations: Entries, samples: dict[int, list[str]], start: int) -> dict[str, Any]:
    """Return one row per validation (`evaluations`), with scores, training time and a sample."""
    by_step = {entry["step"]: entry for entry in entries if "loss" in entry}
    seconds, best = metrics.seconds_until(entries, start), metrics.best_evaluation(evaluations)
    return {
        "rows": [
            entry
            | {"comparable_loss": metrics.comparable_loss(entry), "seconds": seconds.get(entry["step"], 0)}
            | {name: by_step.get(entry["step"], {}).get(name) for name in ("loss", "tokens_per_second")}
            | {"sample": samples.get(entry["step"], [""])[0]}
            for entry in evenly(evaluations, MAX_ROWS)
        ],
        "validations": len(evaluations),
        "is_sampled": any(map(metrics.scores_more, evaluations)),  # if so, losses are comparable only on the sample
        "best": {"step": best["step"], "loss": metrics.comparable_loss(best)},
    }


def _noticed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that the report lists: of spikes, only the highest, and of stops and resumes, the last."""
    earlier = [event for event in events if event["event"] in ("resumed", "stopped")][: -2 * MAX_ROWS]
    highest = sorted((event["z_score"] for event in events if event["event"] == "spike"), reverse=True)[:MAX_ROWS]
    noticed = [event for event in events if event["event"] in NOTABLE_EVENTS and event not in earlier[:-1]]
    if earlier:
        text = f"the last of {len(earlier):,} stops and resumes that only events.jsonl lists"
        noticed[noticed.index(earlier[-1])] = {"event": "earlier", "step": earlier[-1]["step"], "text": text}
    return [event for event in noticed if event["event"] != "spike" or event["z_score"] >= highest[-1]]


def _as_typed(value: str) -> str:
    """Return the value of a setting. A path out of the current folder is private, so shortened."""
    path = PurePath(os.path.expanduser(value))
    if ".." in path.parts:
        path = PurePath(os.path.abspath(path))
    if not path.is_absolute():
        return value
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else PurePath("path/to", path.name))


def _speed(entries: Entries, first_step: float) -> dict[str, Any]:
    values = {name: [entry[name] for entry in entries if name in entry] for name in SPEED_MEASURES}
    return {
        "percentiles": {name: np.percentile(row, [10, 50, 90]).tolist() for name, row in values.items() if row},
        "log_lines": len(entries),
        "peak_memory_gb": max(entry.get("peak_memory_gb", 0.0) for entry in entries),
        "seconds_to_first_step": first_step,
    }


def _estimate(entries: Entries, first_step: float, events: Entries) -> dict[str, Any] | None:
    """Return the estimate of the last start and the actual values, or None if no start recorded an estimate."""
    estimate = next((event["planned"] for event in reversed(events) if "planned" in event), None)
    if estimate is None:
        return None
    newest, speeds = entries[-1], [entry["tokens_per_second"] for entry in entries]
    speed, time = estimate["tokens_per_second"], estimate["hours"]
    if speed is None:
        speed = float(np.median(speeds[:FIRST_LINES]))
        tokens = estimate["steps"] * newest["tokens"] / newest["step"]
        time = (first_step + tokens / speed / (1 - estimate["evaluation_share"])) / 3600
    # The steps before a branch belong to the time of the run whose checkpoint it resumes from.
    time *= 1 - events[0]["step"] / estimate["steps"]
    return {
        "is_extrapolated": estimate["tokens_per_second"] is None,
        "steps": [estimate["steps"], max(newest["step"], events[-1]["step"])],
        "tokens_per_second": [speed, float(np.median(speeds))],
        "hours": time,
        # Older versions did not log peak memory.
        "memory_gb": [estimate["memory_bytes"] / 1e9, max(entry.get("peak_memory_gb", 0.0) for entry in entries)],
    }
