"""The run that a command with --budget or --depth continues: its settings, its time and its checkpoint."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from common.settings_file import read_yaml
from training.checkpoints.backup import earlier_run
from training.checkpoints.checkpoint import step_of
from training.checkpoints.metrics import read_events
from training.checkpoints.run_folder import RunFolder, is_checkpoint, run_of
from training.checkpoints.status import hours
from training.config import CHOICES, DEFAULTS, LENGTHS, TrainConfig
from training.runtime.restart import restarted


@dataclass(frozen=True)
class EarlierRun:
    """Run in the folder of a command, or in its backup. Without one, settings and events are empty."""

    settings: dict[str, Any]
    events: list[dict[str, Any]]
    step: int  # of the checkpoint that the command continues from, or 0

    @classmethod
    def of(cls, config: TrainConfig) -> "EarlierRun":
        source = config.run.resume_from_checkpoint
        folder = None if config.cost.plan else earlier_run(config.run, config.backup.backup_dir)
        step = folder.newest_step() if folder is not None else 0
        if source is not None and not step:
            step = step_of(path) if is_checkpoint(path := Path(source)) else RunFolder(run_of(path)).newest_step()
        return cls({}, [], step) if folder is None else cls(read_yaml(folder.config), read_events(folder.events), step)

    def has_budget_of(self, config: TrainConfig) -> bool:
        return all(self.settings.get(name) == value for name, value in vars(config.budget).items())

    def is_repeated_by(self, config: TrainConfig) -> bool:
        """Whether the command is the one that began the run, whose choices then hold."""
        has_begun = self.step or restarted().get("has_begun")  # otherwise, the machine may be another one
        may_choose_length = config.budget.budget is not None or not LENGTHS & config.flags
        return bool(has_begun and may_choose_length and self.has_budget_of(config))

    def restore(self, config: TrainConfig, has_length: bool = False) -> TrainConfig:
        """Return the configuration with the run's choices where none is given, and with its length. A setting that the
        run's file lacks had its default, but a length that it lacks is not decided."""
        settings = DEFAULTS | self.settings
        names = CHOICES - LENGTHS - config.given | (LENGTHS & self.settings.keys() if has_length else set())
        return config.with_settings({name: settings[name] for name in names}, "file")

    def seconds_spent(self) -> float:
        """Return the seconds since the start of this process, and of the run's earlier processes."""
        if restarted().get("has_begun"):  # the process is that of before, also while the text was tokenized
            return 3600 * hours(self.events, datetime.now(UTC), time.monotonic())
        return time.time() - psutil.Process().create_time() + 3600 * hours(self.events)  # it has written none yet
