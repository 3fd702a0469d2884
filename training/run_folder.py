"""The run folder: what lies where, and whether a run may begin, go on, or is over.

runs/x/
    config.yaml      every setting; `--config` runs it again
    metrics.jsonl    one object a log line
    samples.md       what the model wrote at each validation
    report.md        the run told in one page, with plots
    checkpoints/     see checkpoint.py
    model/           the model to use: the newest checkpoint's, without its training state
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import read_yaml
from errors import UserError
from modeling_gpt2scratch import GPT2ScratchConfig
from training import checkpoint as checkpoints
from training.checkpoint import TrainState
from training.journal import forget_after
from training.sampling import forget_samples_after

CONFIG_FILE = "config.yaml"
ARCHITECTURE = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
    *("tie_word_embeddings", "layer_norm_epsilon"),
)
# Settings that may differ without making it another run.
NOT_THE_RUN = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "data_placement", "report_to", "logging_steps"),
    *("eval_strategy", "eval_steps", "max_eval_samples", "save_strategy", "save_steps", "save_total_limit"),
    *("sample_prompts", "sample_tokens", "sample_temperature", "sample_top_k", "torch_compile", "torch_compile_mode"),
}


@dataclass
class RunArguments:
    output_dir: str | None = field(
        default=None, metadata={"help": "The run folder; runs/NAME of the config file or the data where left out."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete the run that is in the folder and start anew."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Go on with a run (its folder: the newest checkpoint) or from one of its checkpoints."},
    )
    seed: int = field(default=1337, metadata={"help": "Decides initial weights, data order and dropout."})


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / CONFIG_FILE
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.md"
        self.report = self.path / "report.md"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.hub = self.path / "hub"
        self.plot = self.path / "loss.png"

    @property
    def contents(self) -> tuple[Path, ...]:
        """All that a run leaves; nothing else in the folder is ever deleted."""
        files = (self.config, self.metrics, self.samples, self.report, self.plot)
        return (*files, self.checkpoints, self.model, self.hub)

    def newest_checkpoint(self, say: Callable[[str], None]) -> Path | None:
        """The newest complete checkpoint that is as it was written; damaged ones are named and passed over.

        Raises:
            UserError: there are checkpoints, and all of them are damaged.
        """
        problem = None
        for checkpoint in reversed(checkpoints.complete_checkpoints(self.checkpoints)):
            problem = checkpoints.damage(checkpoint)
            if problem is None:
                return checkpoint
            say(f"WARNING: {checkpoint} is damaged: {problem}. Falling back to the one before.")
        if problem is not None:
            raise UserError(f"Every checkpoint in {self.checkpoints} is damaged; --overwrite_output_dir starts anew.")
        return None

    def finished_message(self, step: int) -> str:
        return (
            f"{self.path} is finished ({step:,} steps). To train it anew, add --overwrite_output_dir; to train it longer, "
            f"--resume_from_checkpoint {self.path} --max_steps N."
        )


def open_run(arguments: RunArguments, settings: dict[str, Any], say: Callable[[str], None]) -> Path | None:
    """Decides what this command means for the folder; returns the checkpoint to go on from, None for a new run.

    Reads only. A new run's folder is made by `begin`.

    Raises:
        UserError: the folder holds another run or something else; the checkpoint is missing or damaged.
    """
    folder = RunFolder(arguments.output_dir)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"{folder.path} is a file; name another --output_dir.")
    empty = not folder.path.exists() or not any(folder.path.iterdir())
    if not empty and not folder.config.is_file():
        raise UserError(f"{folder.path} exists and is not a run folder; name another --output_dir.")
    if arguments.resume_from_checkpoint is not None:
        source = Path(arguments.resume_from_checkpoint)
        branch = run_of(source).resolve() != folder.path.resolve()
        if branch and not empty and not arguments.overwrite_output_dir:
            raise UserError(f"{folder.path} holds another run; name a new --output_dir to branch off from {source}.")
        return _named_checkpoint(source, folder, say)
    if empty or arguments.overwrite_output_dir or not checkpoints.complete_checkpoints(folder.checkpoints):
        return None  # nothing to lose
    before = read_yaml(folder.config)
    changed = [
        f"{name} {before.get(name)} -> {value}"
        for name, value in settings.items()
        if name not in NOT_THE_RUN and str(before.get(name)) != str(value)
    ]
    if changed:
        raise UserError(
            f"{folder.path} holds another run ({', '.join(changed)}); name another --output_dir, go on with it by "
            f"--resume_from_checkpoint {folder.path}, or delete it by --overwrite_output_dir."
        )
    return folder.newest_checkpoint(say)


def _named_checkpoint(source: Path, folder: RunFolder, say: Callable[[str], None]) -> Path:
    if not is_checkpoint(source):
        newest = RunFolder(run_of(source)).newest_checkpoint(say)
        if newest is None:
            raise UserError(
                f"{source} has no complete checkpoint to resume from; start it anew with the first command."
            )
        return newest
    if not (source / checkpoints.MANIFEST).is_file():
        raise UserError(f"{source} was never finished (it has no {checkpoints.MANIFEST}); resume from another one.")
    if problem := checkpoints.damage(source):
        raise UserError(f"{source} is damaged: {problem}. Resume from another one.")
    newer = [path for path in checkpoints.complete_checkpoints(folder.checkpoints) if path.name > source.name]
    if newer and source.resolve().parent == folder.checkpoints.resolve():
        raise UserError(
            f"{folder.path} went on to {newer[-1].name} after {source.name}; name another --output_dir to branch off, "
            f"or delete the later checkpoints."
        )
    return source


def check_same_run(checkpoint: Path, model: GPT2ScratchConfig, now: TrainState) -> TrainState:
    """The state to go on from.

    Raises:
        UserError: the checkpoint's architecture, vocabulary or data are not this run's; all differences are named.
    """
    saved_model = GPT2ScratchConfig.from_pretrained(checkpoint)
    saved = checkpoints.load_state(checkpoint)
    differences = [
        f"{name} is {getattr(model, name)} here and {getattr(saved_model, name)} in the checkpoint"
        for name in ARCHITECTURE
        if getattr(model, name) != getattr(saved_model, name)
    ]
    if now.tokenizer_sha256 != saved.tokenizer_sha256:
        differences.append("the token store was made with another tokenizer than the checkpoint's")
    elif now.data_identity != saved.data_identity:
        differences.append("the token store holds other tokens than the checkpoint was trained on")
    for name in ("tokens_per_step", "seed"):
        if getattr(now, name) != getattr(saved, name):
            differences.append(f"{name} is {getattr(now, name)} here and {getattr(saved, name)} in the checkpoint")
    if differences:
        raise UserError("\n".join(f"{checkpoint} cannot be resumed: {difference}." for difference in differences))
    return saved


def is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step_") and path.parent.name == "checkpoints"


def resume_source(arguments: list[str]) -> Path | None:
    """The run folder that `--resume_from_checkpoint` names, by itself or by one of its checkpoints.

    Raises:
        UserError: it is not there, or not a run folder.
    """
    named = None
    for position, argument in enumerate(arguments):
        if argument == "--resume_from_checkpoint" and position + 1 < len(arguments):
            named = arguments[position + 1]
        elif argument.startswith("--resume_from_checkpoint="):
            named = argument.split("=", 1)[1]
    if named is None:
        return None
    return run_of(Path(named))


def run_of(path: Path) -> Path:
    """The run folder that `path` is, or is a checkpoint or the model of.

    Raises:
        UserError: it is not there, or is none of these.
    """
    run = path
    if is_checkpoint(path):
        run = path.parent.parent
    elif path.name in ("model", "checkpoints") and not (path / CONFIG_FILE).is_file():
        run = path.parent
    if is_checkpoint(path) and run.is_dir() and not path.exists():
        there = ", ".join(found.name for found in checkpoints.complete_checkpoints(path.parent)) or "no checkpoint"
        raise UserError(f"There is no {path}; {run} has {there}.")
    if not path.exists() or not (run / CONFIG_FILE).is_file():
        raise UserError(f"{path} is not a run folder or a checkpoint in one: there is no {run / CONFIG_FILE}.")
    return run


def begin(folder: RunFolder, first_step: int, resume_from: Path | None) -> None:
    """Makes the folder ready: a new run finds nothing of an old one, a resumed run nothing of later steps.

    Raises:
        UserError: it cannot be written.
    """
    own = resume_from is not None and run_of(resume_from).resolve() == folder.path.resolve()
    try:
        if own:
            forget_after(folder.metrics, first_step)
            forget_samples_after(folder.samples, first_step)
        else:
            for inside in folder.contents:
                shutil.rmtree(inside) if inside.is_dir() else inside.unlink(missing_ok=True)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written ({error.strerror}); name another --output_dir.") from error


def find_model(name: str) -> str:
    """A loadable model for a run folder, a checkpoint, a model folder or a Hub id.

    Raises:
        UserError: the folder holds no model, or there is no such folder and it is no Hub id.
    """
    path = Path(name)
    for candidate in (path / "model", path):
        if (candidate / "config.json").is_file():
            return str(candidate)
    if path.exists():
        hint = " yet: its first checkpoint is still to come" if (path / CONFIG_FILE).is_file() else ""
        raise UserError(f"{name} holds no model{hint}.")
    if len(name.strip("/").split("/")) != 2 or name.startswith((".", "/", "runs/")):
        raise UserError(f"{name} is neither a folder here nor a Hub id (user/name).")
    return name
