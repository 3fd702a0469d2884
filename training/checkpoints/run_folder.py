"""Run folder: its files, and lookup of a run or a checkpoint by path.

runs/x/
    .gpt2scratch.json  marks the folder as a run
    config.yaml      every setting; `--config` runs it again
    metrics.jsonl    one object per log line and per validation
    events.jsonl     events of the run with their times; status.json: its current state
    samples.md       text that the model wrote at each validation
    report.json      the facts shown in the report and the model card
    report.md        one-page report, with loss.png and course.png
    tensorboard/     event files, if TensorBoard is a tracker; tracker_id: the run's id in other trackers
    profile/         time of a step by operation, see profile.py
    evaluation/      results of evaluate.py; lm_eval/: results of lm-eval, if its --output_path is this folder
    checkpoints/     see checkpoint.py
    model/           the newest checkpoint's model, without training state; hub/: the published files
    replaced/        the run that this one replaces, until the first checkpoint of this one is complete
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from os.path import expanduser
from pathlib import Path
from shlex import quote

from common.atomic import file_sha256
from common.errors import UserError
from common.limits import free, setting
from common.removal import MARK, UNFINISHED_MARK, discard, is_known, is_marked, mark, renew
from common.settings_file import read_yaml
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.metrics import best_step, forget_after, read_events
from training.checkpoints.samples import forget_samples_after
from training.checkpoints.status import check_run_format, read_status
from training.runtime.console import say
from training.runtime.restart import restarted

CONFIG_FILE = "config.yaml"
# A folder with only these names counts as empty.
EMPTY = (UNFINISHED_MARK, ".gitignore", ".gitkeep", ".ipynb_checkpoints", "lost+found")
PLOTS = ("loss", "course")
EVALUATION = ("evaluation.json", "evaluation.md", "panel.png")
_STEP = f"step_{'[0-9]' * 8}"
_STEPS = (_STEP, f"damaged_{_STEP}", f".{_STEP}.unfinished", f".{_STEP}.removed", f".damaged_{_STEP}.removed")
HUB_FILES = (  # the published files; push_to_hub.py deletes them with their folder
    *checkpoints.MODEL_FILES,
    *(f"native/{name}" for name in checkpoints.MODEL_FILES),
    *("onnx/model.onnx", "onnx/model_quantized.onnx"),
    *("*-F16.gguf", "*-Q8_0.gguf", *(f"{name}.png" for name in PLOTS), "README.md", MARK),
)
FOLDERS = {  # folders of a run, with the files that are deleted when another run replaces it
    "model": checkpoints.MODEL_FILES,
    "tensorboard": ("**/events.out.tfevents.*", "**/hparams.yml"),
    "profile": ("trace.json.gz", "summary.json"),
    "evaluation": (*EVALUATION, MARK),
    "lm_eval": ("results_*.json", "samples_*.jsonl", "*/results_*.json", "*/samples_*.jsonl"),
    "hub": HUB_FILES,
    "checkpoints": tuple(f"{step}/{name}" for step in _STEPS for name in checkpoints.FILES),
}


@dataclass
class RunArguments:
    output_dir: str | None = free(None, "Run folder. Default: runs/NAME of config or data.", type=expanduser)
    overwrite_output_dir: bool = free(False, "Replace the run in the folder at the first checkpoint.")
    resume_from_checkpoint: str | None = free(None, "A run (its newest checkpoint) or a checkpoint.", type=expanduser)
    init_from: str | None = setting(None, "Start from the model of a run, a folder or a Hub id.", type=expanduser)
    seed: int = setting(1337, "Seed of the initial weights, data order and dropout.", below=2**63, resume="refused")

    @property
    def folder(self) -> "RunFolder":
        return RunFolder(self.output_dir)

    def problems(self) -> Iterator[str]:
        folder = self.folder
        if not may_hold_run(folder):
            yield f"{self.output_dir} exists and is not a run folder; use another --output_dir."
        replaced = () if self.overwrite_output_dir else (folder.checkpoints,)  # a resumed run deletes old ones
        for path in (*folder.files, *replaced, folder.tensorboard, folder.profile):
            if path.is_symlink():
                yield f"{path} is a link, through which the run would write elsewhere; replace it by what it leads to."


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / CONFIG_FILE
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.status = self.path / "status.json"
        self.samples = self.path / "samples.md"
        self.facts = self.path / "report.json"
        self.report = self.path / "report.md"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.hub = self.path / "hub"
        self.plots = {name: self.path / f"{name}.png" for name in PLOTS}
        self.tracker_id = self.path / "tracker_id"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"
        self.evaluation = self.path / "evaluation"
        self.evaluations = self.path / "lm_eval"
        self.replaced = self.path / "replaced"

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that a backup also holds. The last one states how far the others are, see `Backup.fetch`."""
        logs = (self.events, self.status, self.samples, self.facts, self.report, self.tracker_id)
        return (self.config, *logs, *self.plots.values(), self.metrics)

    @property
    def repository_name(self) -> str:
        """Name of the folder with the characters that the Hub accepts."""
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", self.path.resolve().name.replace("..", "-"))
        return name[:96].strip(".-").removesuffix(".git") or "model"

    def is_run(self) -> bool:
        """Return whether this project trained in the folder. It did if there is a mark file or, from an older version,
        a checkpoint, or a status and events in our format. A config.yaml is not enough: any project may have one."""
        has_status = {"state", "step", "reason", "time"} <= read_status(self.status).keys()
        if is_marked(self.path, "run") or (has_status and read_events(self.events)):
            return True
        for checkpoint in checkpoints.complete_checkpoints(self.checkpoints):
            with suppress(OSError):
                return bool(checkpoints.listed_files(checkpoint))
        return False

    def owns(self, checkpoint: Path | None) -> bool:
        """Return whether a checkpoint is the run's own, rather than from a run that this one branches off from."""
        return checkpoint is not None and checkpoint.parent.resolve() == self.checkpoints.resolve()

    def newest_checkpoint(self, say: Callable[[str], None]) -> Path | None:
        """Return the newest undamaged checkpoint.
        Report and skip damaged ones. Raise a `UserError` if there are checkpoints and all of them are damaged."""
        candidates = checkpoints.all_checkpoints(self.checkpoints)
        for checkpoint in reversed(candidates):
            if (problem := checkpoints.damage(checkpoint)) is None:
                return checkpoint
            say(f"WARNING: {checkpoint} is damaged: {problem}.")
        if candidates:
            use = f"start from the last weights with --init_from {quote(str(self.model))} and another --output_dir, or "
            raise UserError(
                f"All checkpoints in {self.checkpoints} are damaged; without --resume_from_checkpoint, "
                f"{use * self.model.is_dir()}repeat the run's first command with --overwrite_output_dir."
            )
        return None

    def last_good(self) -> str:
        """Describe the checkpoint to resume from, for messages."""
        if complete := checkpoints.complete_checkpoints(self.checkpoints):
            return f"{complete[-1]} is the last good checkpoint"
        hint = f", and the run before it is in {self.replaced}" if is_marked(self.replaced, "replaced") else ""
        return f"there is no checkpoint yet{hint}"

    def resume_advice(self) -> str:
        """Describe how to resume, or to start again, after a problem is corrected."""
        if checkpoints.complete_checkpoints(self.checkpoints):
            return f"resume with --resume_from_checkpoint {quote(str(self.path))}"
        return "run the same command again"

    def checkpoint_of_model(self) -> Path | None:
        """Return the newest checkpoint with the weights that model/ has, or None if there is none."""
        weights = self.model / checkpoints.WEIGHTS
        sha256 = file_sha256(weights) if weights.is_file() else ""
        for checkpoint in reversed(checkpoints.complete_checkpoints(self.checkpoints)):
            with suppress(checkpoints.DamageError):
                if checkpoints.listed_files(checkpoint)[checkpoints.WEIGHTS] == sha256:
                    return checkpoint
        return None

    def newest_step(self, until: float = math.inf) -> int:
        """Return the step of the newest complete checkpoint, at most `until`, or 0 if there is none."""
        steps = map(checkpoints.step_of, checkpoints.complete_checkpoints(self.checkpoints))
        return max((step for step in steps if step <= until), default=0)


REPLACED_FILES = (  # files that are deleted with a replaced run
    *(MARK, UNFINISHED_MARK, *(path.name for path in RunFolder("").files)),
    *(file if "**" in file else f"{name}/{file}" for name, files in FOLDERS.items() for file in files),
)


def may_hold_run(folder: RunFolder) -> bool:
    """Return whether a run can be written to a folder without touching unrelated files. The folder must not exist, must
    hold a run, or must hold only a lock and files that systems and version control put into empty folders."""
    if not folder.path.is_dir():
        return not folder.path.exists()
    names = (*EMPTY, f".{escape(folder.path.resolve().name)}.lock*")
    return folder.is_run() or all(is_known(path.name, names) for path in folder.path.iterdir())


def is_checkpoint(path: Path) -> bool:
    is_named = path.name.startswith("step_") and path.absolute().parent.name == "checkpoints"
    return is_named and not is_marked(path, "run")  # the folder of all runs may be called checkpoints


def run_of(path: Path) -> Path:
    """Return the run folder of `path`, which is a run folder, one of its checkpoints, or its model.
    Raise a `UserError` for any other path, or if a newer version of this project wrote the run."""
    run = path
    if is_checkpoint(path):
        run = path.parent.parent if path.parent.name else Path("..")
    elif path.name in ("model", "checkpoints") and not RunFolder(path).is_run():
        run = path.parent
    is_gone = is_checkpoint(path) and run.is_dir() and not path.exists()
    if is_gone and not restarted().get("has_begun"):  # a run that restarts itself may have deleted it
        names = [checkpoint.name for checkpoint in checkpoints.complete_checkpoints(path.parent)]
        raise UserError(f"{path} does not exist; {run} has {', '.join(names) or 'no checkpoint'}.")
    if not (is_gone or path.exists()) or not RunFolder(run).is_run():
        raise UserError(f"{path} is neither a run folder nor a checkpoint in one.")
    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"{run} has no {CONFIG_FILE}; restore it from a backup, or train in another folder.")
    check_run_format(RunFolder(run).status)
    return run


def find_checkpoint(path: Path, name: str | None) -> Path:
    """Return the checkpoint `name` of the run at `path`: `last`, `best` (lowest validation loss) or a step. None is the
    checkpoint with the weights of model/ or, if it cannot be found, a damaged one; without model/, as in a backup, the
    best if the run ends with that, otherwise the last."""
    run = RunFolder(run_of(path))
    if is_checkpoint(path):
        raise UserError(f"{path} is already a checkpoint; remove --checkpoint {name}.")
    by_step = {checkpoints.step_of(path): path for path in checkpoints.complete_checkpoints(run.checkpoints)}
    choice = f"{run.path} has these checkpoint steps: {', '.join(map(str, by_step)) or 'none'}"
    if name is None and (run.model / checkpoints.WEIGHTS).is_file() and by_step:
        damaged_paths = (path for path in reversed(by_step.values()) if checkpoints.damage(path) is not None)
        if (checkpoint := run.checkpoint_of_model() or next(damaged_paths, None)) is None:
            raise UserError(f"No checkpoint has the weights of {run.model}. {choice}; name one with --checkpoint.")
        return checkpoint
    best = best_step(run.metrics, by_step)
    if name is None:
        name = "best" if best is not None and read_yaml(run.config).get("load_best_model_at_end") else "last"
    if name == "best" and best is None:
        raise UserError(f"{choice}; none of them was validated. Choose one with --checkpoint STEP.")
    named = {"last": max(by_step, default=None), "best": best}
    step = named[name] if name in named else int(name) if name.isdecimal() else None
    if step not in by_step:
        raise UserError(f"checkpoint is {name}, but {choice}; use one of them, last or best.")
    return by_step[step]


def _parts(folder: RunFolder) -> dict[Path, tuple[str, ...]]:
    """Return the existing files and folders of a run, config.yaml first, the checkpoints last, with a folder's
    patterns."""
    parts = dict.fromkeys(folder.files, ()) | {folder.path / name: files for name, files in FOLDERS.items()}
    if not is_marked(folder.hub, "hub"):  # a folder of the user
        del parts[folder.hub]
    return {path: files for path, files in parts.items() if os.path.lexists(path)}


def put_back(folder: RunFolder) -> None:
    """Put the replaced run back, and delete the run that replaces it, unless this one has a complete checkpoint."""
    if is_marked(folder.replaced, "replaced") and not checkpoints.complete_checkpoints(folder.checkpoints):
        for path, files in _parts(RunFolder(folder.replaced)).items():  # if killed here, the next call completes it
            discard(folder.path / path.name, files, replacement=path)
        discard(folder.replaced, (MARK, UNFINISHED_MARK))


def forget_replaced(folder: RunFolder) -> None:
    """Delete the replaced run, and report where its files were moved that no run wrote, or that are in use."""
    is_gone = not os.path.lexists(folder.replaced)  # perhaps a killed process was deleting it
    if (is_gone or is_marked(folder.replaced, "replaced")) and (remainder := discard(folder.replaced, REPLACED_FILES)):
        say(f"Files in {folder.path} that no run wrote, or that are in use, were moved to {remainder}.")


def begin(folder: RunFolder, checkpoint: Path | None, is_same_text: bool = True, owes_validation: bool = False) -> None:
    """Prepare the folder: set the old run aside before a new one, or remove everything after its own `checkpoint`, the
    unfinished validation at that step if the run `owes_validation`, and all validations of another text."""
    mark(folder.path, "run")
    checkpoints.sweep(folder.checkpoints)
    forget_replaced(folder)
    if checkpoint is None:
        holds_model = folder.model.is_dir() or checkpoints.all_checkpoints(folder.checkpoints)
        parts = reversed(_parts(folder))  # the checkpoints first, see `put_back`
        renew(folder.replaced, "replaced", ())
        for path in parts:
            path.rename(folder.replaced / path.name)
        if not holds_model:
            forget_replaced(folder)
        return
    step = checkpoints.step_of(checkpoint)
    for candidate in checkpoints.all_checkpoints(folder.checkpoints):
        if checkpoints.step_of(candidate) > step:  # it is damaged, otherwise the run would resume from it
            aside = candidate.with_name(f"damaged_{candidate.name}")
            discard(aside, checkpoints.FILES)
            candidate.rename(aside)
    checkpoints.renew_model(checkpoint, folder.model)
    scored_step = step - owes_validation
    forget_after(folder.metrics, step, scored_step if is_same_text else -1)
    forget_samples_after(folder.samples, scored_step)
