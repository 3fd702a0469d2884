"""Evaluation results for the model card: the run's own validation, and what lm-eval measured.

    python -m lm_eval --model hf --model_args pretrained=runs/x/model,trust_remote_code=True --tasks ... --output_path runs/x/lm_eval

puts its results where they are found here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from errors import NONSENSE, UserError
from publishing.source import Source
from training.checkpoint import MANIFEST

HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"
VALIDATION = {"eval_loss": "Loss", "eval_perplexity": "Perplexity", "eval_bits_per_byte": "Bits per byte"}


def validation_results(source: Source) -> list[EvalResult]:
    """Return the run's validation of the checkpoint, as the Hub's `model-index` has it."""
    record = source.validation or {}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Language modeling",
            dataset_type="text",
            dataset_name="held-out text of the training sources",
            dataset_split="validation",
            metric_type=name.removeprefix("eval_"),
            metric_name=title,
            metric_value=round(record[name], 4),
            verified=False,
        )
        for name, title in VALIDATION.items()
        if name in record
    ]


def harness_results(source: Source) -> list[EvalResult]:
    """Return what lm-eval measured of these weights, oldest first."""
    if source.run is None:
        return []
    found: list[EvalResult] = []
    for path in sorted(source.run.evaluations.glob("**/results_*.json"), key=lambda path: path.stat().st_mtime):
        try:
            measured = json.loads(path.read_text(encoding="utf-8"))
            model, results = Path(measured["model_name"]).resolve(), list(_entries(measured))
            {result.unique_identifier for result in results}  # a card groups them by it
        except NONSENSE as error:
            raise UserError(f"{path} is not whole; delete it, or measure again.") from error
        is_newest = model == source.run.model.resolve() and source.step == source.run.newest_step()
        is_later = path.stat().st_mtime >= (source.model / MANIFEST).stat().st_mtime  # than what `model/` was then
        if model == source.model.resolve() or (is_newest and is_later):
            found += results
    return found


def _entries(measured: dict[str, Any]) -> Iterator[EvalResult]:
    for name, task in measured["configs"].items():
        # No id on the Hub: tasks of one's own would count as one, and a folder of this machine would be published.
        local = task["dataset_path"] in (None, "json") or Path(task["dataset_path"]).is_absolute()
        for key, value in measured["results"][name].items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, float):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=name if local else task["dataset_path"],
                    dataset_name=name,
                    dataset_config=task.get("dataset_name"),
                    dataset_split=task.get("test_split") or task.get("validation_split"),
                    metric_type=metric,
                    metric_value=value,
                    source_name=f"lm-eval {measured['lm_eval_version']}, {measured['n-shot'][name]}-shot",
                    source_url=HARNESS,
                )
