"""Results for the `model-index` of a model card: of the run's validation, and of lm-eval."""

import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from common.errors import NONSENSE, UserError
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.run_folder import RunFolder, is_checkpoint

HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"
VALIDATION = {"eval_loss": "Loss", "eval_perplexity": "Perplexity", "eval_bits_per_byte": "Bits per byte"}


def validation_results(record: dict[str, float]) -> list[EvalResult]:
    """Return the results of a validation of the run. `record`: its metrics."""
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


def harness_results(home: RunFolder, folder: Path) -> list[EvalResult]:
    """Return the newest results of lm-eval for these weights, without those of --limit. `home`: the run, or the folder
    of a model without a run."""
    results, is_own_model = {}, is_checkpoint(folder) and home.checkpoint_of_model() == folder
    paths = filter(Path.is_file, home.evaluations.glob("**/results_*.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            model = Path(content["model_name"]).resolve()
            by_task: dict[tuple[str, str], list[EvalResult]] = {}
            for entry in harness_entries(content):
                by_task.setdefault((entry.dataset_name, entry.unique_identifier), []).append(entry)
            is_part = bool(content.get("config", {}).get("limit"))  # of the documents
            begun = min(path.stat().st_mtime, content.get("date", math.inf))  # the run may save until it ends
        except NONSENSE as error:
            raise UserError(f"{path} is incomplete or damaged; delete it, or run lm_eval again.") from error
        is_own = model == folder.resolve()
        if is_own_model and model == home.model.resolve():  # with these weights, if they are older than the results
            weights = (folder / checkpoints.MANIFEST, home.model / checkpoints.WEIGHTS)
            is_own = begun >= max(file.stat().st_mtime for file in weights)
        results |= by_task if is_own and not is_part else {}
    return [*chain.from_iterable(results.values())]


def harness_entries(content: dict[str, Any]) -> Iterator[EvalResult]:
    """Yield the results in a file of lm-eval."""
    for name, task in content["configs"].items():
        # Local tasks have no dataset id on the Hub, and a local path must not be published.
        is_local = task["dataset_path"] in (None, "json") or Path(task["dataset_path"]).is_absolute()
        for key, value in content["results"][name].items():
            metric, _, name_of_filter = key.partition(",")
            if name_of_filter and not metric.endswith("_stderr") and isinstance(value, float):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=name if is_local else task["dataset_path"],
                    dataset_name=name,
                    dataset_config=task.get("dataset_name"),
                    dataset_split=task.get("test_split") or task.get("validation_split"),
                    metric_type=metric,
                    metric_value=value,
                    source_name=f"lm-eval {content['lm_eval_version']}, {content['n-shot'][name]}-shot",
                    source_url=HARNESS,
                )
