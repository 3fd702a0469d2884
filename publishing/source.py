"""Source of a published model: a checkpoint of a run, or a model folder without a run."""

from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from common.errors import UserError
from modeling_gpt2scratch.loading import own_file
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.loading import model_errors
from training.checkpoints.metrics import read_metrics
from training.checkpoints.run_folder import RunFolder, find_checkpoint, is_checkpoint, run_of
from training.config import TrainConfig, read_config


@dataclass(frozen=True)
class Source:
    """Model to publish, with its run and step if known."""

    model: Path  # folder with the weights
    run: RunFolder | None = None
    step: int | None = None  # training step of the checkpoint

    @property
    def name(self) -> str:
        return self.run.path.resolve().name if self.run is not None else self.model.resolve().name

    @property
    def hub(self) -> Path:
        """Folder in which the files for the Hub are assembled."""
        return self.run.hub if self.run is not None else self.model.resolve().with_name(f"{self.name}-hub")

    def files(self, allowed: tuple[str, ...]) -> list[Path]:
        """Return the model's files that match a pattern. Files that a checkpoint's manifest does not list are left out.
        Raise a `UserError` for a link that leads out of the folder."""
        names = [path.name for path in self.model.iterdir() if path.is_file()]
        if self.run is not None:
            names = [name for name in checkpoints.listed_files(self.model) if "/" not in name]
        return [self._own(self.model / name) for name in names if any(fnmatch(name, pattern) for pattern in allowed)]

    def check_pages(self) -> None:
        """Raise a `UserError` if a source file of the card is a link out of the folder."""
        for path in self.run.files if self.run is not None else [self.model / "README.md"]:
            self._own(path)

    def _own(self, path: Path) -> Path | None:
        with model_errors(f"{path.parent} cannot be published: {{}}; replace the link by the file."):
            return own_file(path.parent, path.name)

    @cached_property
    def config(self) -> TrainConfig | None:
        return read_config(["--config", str(self.run.config)]) if self.run is not None else None

    @property
    def tokens(self) -> int:
        """Number of tokens that the checkpoint was trained on."""
        return checkpoints.load_state(self.model).position.tokens

    @property
    def branch(self) -> str:
        """Branch of the repository for this checkpoint, such as `step0001000-tokens33M` (a scheme like Pythia's)."""
        return f"step{self.step:07d}-tokens{in_short(self.tokens)}"

    @property
    def validation(self) -> dict[str, float] | None:
        """Metrics of the run's validation at this step."""
        entries = [] if self.run is None else read_metrics(self.run.metrics)
        scored = (entry for entry in reversed(entries) if "eval_loss" in entry)
        return next((entry for entry in scored if entry["step"] == self.step), None)


def find_source(path: Path, wanted: str | None) -> Source:
    """Return the model at `path`. `wanted` selects the checkpoint of a run: `last`, `best` or a step (None means `last`).
    Raise a `UserError` if it does not exist or is damaged."""
    if (path / "config.json").is_file() and not is_checkpoint(path) and not RunFolder(path.parent).is_run():
        if wanted is not None:
            raise UserError(f"{path} is a model without a run and has no checkpoint {wanted}; leave --checkpoint out.")
        return Source(path)
    run = RunFolder(run_of(path))
    if not checkpoints.complete_checkpoints(run.checkpoints):
        raise UserError(f"{run.path} cannot be published: it has no checkpoint yet; train until one is saved.")
    is_chosen = is_checkpoint(path) and wanted is None
    return _whole(run, path if is_chosen else find_checkpoint(path, wanted or "last"))


def all_sources(run: RunFolder) -> list[Source]:
    """Return every kept checkpoint, oldest first. Raise a `UserError` if one of them is damaged."""
    return [_whole(run, checkpoint) for checkpoint in checkpoints.complete_checkpoints(run.checkpoints)]


def in_short(number: int) -> str:
    """Return a number in short form with at least two digits: 33M, 1740K, and 2000M for 2 billion."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= 10 * size:
            return f"{round(number / size)}{unit}"
    return str(number)


def _whole(run: RunFolder, checkpoint: Path) -> Source:
    if (problem := checkpoints.damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint} is damaged: {problem}. Publish another one with --checkpoint STEP.")
    return Source(checkpoint, run, checkpoints.step_of(checkpoint))
