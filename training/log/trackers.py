"""Experiment trackers (TensorBoard, W&B, Trackio ...): settings, runs and logged values."""

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, get_available_trackers
from accelerate.utils import LoggerType

from common.atomic import write_atomic
from common.errors import UserError
from common.limits import free
from training.checkpoints.metrics import comparable_scores, sample_tokens
from training.checkpoints.run_folder import RunFolder
from training.runtime.restart import restarted

STEP = "train/global_step"  # the x axis in W&B, as Transformers' Trainer names it


@dataclass
class LoggingArguments:
    logging_steps: int = free(10, "Steps between log lines; each line waits for the device once.", minimum=1)
    verbose: bool = free(False, "Print the whole estimate of --plan at the start of the run, before the first step.")
    report_to: list[str] = free([], "Trackers supported by Accelerate: tensorboard, wandb, ... or all, or none.")
    notes: str | None = free(None, "A note for report, model card and trackers: why this run?", free_text=True)
    project: str = free("gpt2scratch", "Project name in the trackers; runs are named after their folders.")

    @property
    def trackers(self) -> list[str] | None:
        return [name for name in self.report_to if name != "none"] or None

    def problems(self) -> Iterator[str]:
        """Yield problems that Accelerate would ignore silently or turn into a traceback."""
        names, available = list(map(str, LoggerType)), list(map(str, get_available_trackers()))
        for name in self.trackers or []:
            if name not in names:
                yield f"report_to names {name!r}; the available trackers are {', '.join(names)}."
            elif name not in ("all", *available):
                yield f"report_to names {name}, which is not installed: pip install {name}."


def open_trackers(accelerator: Accelerator, folder: RunFolder, settings: dict[str, Any], first_step: int) -> None:
    """Open the trackers of `report_to` and send every setting that has a value. Called by the main process.
    The run's id is saved in its folder, so that a resumed run continues the same run in each tracker. TensorBoard's
    event files are also in that folder; a resumed run discards entries after its checkpoint."""
    if not accelerator.log_with:
        return
    is_known = folder.tracker_id.is_file()
    if not is_known:
        write_atomic(folder.tracker_id, f"{secrets.token_hex(4)}\n")
    name, run_id = folder.path.resolve().name, folder.tracker_id.read_text(encoding="utf-8").strip()
    values = {name: value for name, value in settings.items() if value is not None}
    options = {
        "wandb": {"name": name, "id": run_id, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow" if is_known else "never"},  # Trackio identifies runs by name
        "mlflow": {"run_name": name},
        "clearml": {"task_name": name},
    }
    accelerator.log_with = [
        TensorBoardTracker(folder.tensorboard.name, folder.path, purge_step=first_step + 1)
        if str(tracker) == "tensorboard"
        else tracker
        for tracker in accelerator.log_with
    ]
    try:
        accelerator.init_trackers(settings["project"], init_kwargs=options)
        for tracker in accelerator.trackers:
            _send_settings(tracker, values)
    except Exception as error:  # not logged in, no network
        problem = f"A tracker of --report_to cannot start: {error}."
        if not restarted().get("has_begun"):
            raise UserError(f"{problem} Correct that, or use --report_to none.") from error
        print(f"WARNING: {problem} The run continues without trackers.", flush=True)
        accelerator.trackers = []


def _send_settings(tracker: GeneralTracker, values: dict[str, Any]) -> None:
    if tracker.name == "tensorboard":
        # As text, because Accelerate's own method would create another TensorBoard run at each start.
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        tracker.writer.add_text("settings", f"```yaml\n{text}```")
        return
    plain = {name: value if isinstance(value, (int, float, str)) else str(value) for name, value in values.items()}
    tracker.store_init_configuration(plain)
    if tracker.name == "wandb":
        tracker.run.define_metric("*", step_metric=STEP)


def log_to_trackers(accelerator: Accelerator, entry: dict[str, Any], say: Callable[[str], None]) -> None:
    """Send an entry of metrics.jsonl with the names of Transformers' Trainer: eval/loss, train/loss. If the last
    validation scored more text than the others, eval/loss is still that of their sample, and eval/full_loss of all.
    A tracker that fails is reported and no longer used."""
    if "eval_sampled_loss" in entry:
        scores = comparable_scores(entry)
        scores |= {"eval_perplexity": math.exp(min(scores["eval_loss"], 700.0)), "eval_tokens": sample_tokens(entry)}
        entry = entry | {name.replace("eval_", "eval_full_"): entry[name] for name in scores} | scores
    values = {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in entry.items()
        if name != "step"
    }
    for tracker in [*accelerator.trackers]:
        try:
            if tracker.name == "wandb":  # W&B drops steps before its last one, e.g. after a resume
                tracker.log(values | {STEP: entry["step"]})
            else:
                tracker.log(values, step=entry["step"])
        except Exception as error:  # of its network or its own process
            accelerator.trackers.remove(tracker)
            say(f"WARNING: {tracker.name} failed ({error!r:.200}). The run continues without it.")
