"""The course of a run: where it starts, at its first step or after a checkpoint; how it begins, and how it ends."""

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

from accelerate import Accelerator

from errors import UserError, disk_errors
from training import checkpoint as checkpoints
from training.backup import Backup
from training.checkpoint import TrainState
from training.compatibility import compare
from training.config import TrainConfig, write_config
from training.device import on_main
from training.early import launch_command
from training.guard import restart
from training.metrics import has_evaluation, read_events
from training.plan import Plan
from training.resume import Settings, choose_checkpoint, refuse_lost_checkpoints
from training.run_folder import RunFolder, begin, is_checkpoint, run_of
from training.screen import say
from training.status import record, starts_in_force, write_status

LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate")


@dataclass(frozen=True)
class Start:
    checkpoint: Path | None  # to go on from
    state: TrainState
    plan: Plan  # with the position to start at
    changes: list[str]  # what is different from now on
    owes_validation: bool = False  # the run ended between a checkpoint and its validation

    @property
    def step(self) -> int:
        return self.state.position.step

    def earlier(self, folder: RunFolder) -> list[dict[str, Any]]:
        """The starts before this one of the run that it branches off from."""
        if self.checkpoint is None or self.is_own(folder):
            return []
        starts = starts_in_force(read_events(RunFolder(run_of(self.checkpoint)).events))
        return [start for start in starts if start["step"] < self.step]

    def is_own(self, folder: RunFolder) -> bool:
        """Whether the checkpoint is the run's, which it goes on with, and not another's, which it branches off from."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == folder.checkpoints.resolve()

    @property
    def is_finished(self) -> bool:
        return self.step >= self.plan.max_steps and not self.owes_validation


def find_start(
    config: TrainConfig, plan: Plan, folder: RunFolder, backup: Backup | None, accelerator: Accelerator
) -> Start:
    """Called by every process; the main one decides. Changes nothing but what it brings back from the backup.

    Raises:
        UserError: the folder holds another run; what the checkpoint is of and this command differ; it is damaged.
    """

    def choose() -> str | None:
        settings = Settings(config.flat(), config.defaults(), config.changes.allowed)
        chosen = choose_checkpoint(config.run, settings, backup, bool(restart.restarted()), say)
        refuse_lost_checkpoints(config.run, chosen)
        return str(chosen) if chosen is not None else None

    found = on_main(accelerator, choose)
    if found is None:
        return Start(None, TrainState(plan.position, plan.settings), plan, [])
    chosen = Path(found)
    state, changes = compare(chosen, plan.model, plan.settings, config.changes)
    plan = plan.going_on(state.position, state.settings)
    is_due = plan.is_due(config.evaluation.eval_strategy, config.evaluation.eval_steps, state.position.step)
    start = Start(chosen, state, plan, changes)
    has_it = on_main(accelerator, lambda: has_evaluation(folder.metrics, start.step))
    return replace(start, owes_validation=is_due and start.is_own(folder) and not has_it)


def begin_run(
    start: Start,
    config: TrainConfig,
    folder: RunFolder,
    backup: Backup | None,
    planned: dict[str, float | None],
    hardware: str,
) -> None:
    """Prepares the folder and records how the run began, what was `planned` and on what hardware. Called by the main process,
    after all have read the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    with disk_errors(folder.path, "name another --output_dir"):
        for kept in begin(folder, start.step, start.checkpoint):
            say(f"{kept} keeps files that were in {folder.path} and that no run wrote.")
        write_config(config, folder.config)
        folder.checkpoints.mkdir(exist_ok=True)
    if backup is not None:
        named = config.run.resume_from_checkpoint
        goes_back = config.run.overwrite_output_dir or (named is not None and is_checkpoint(Path(named)))
        backup.begin(start.step, may_replace=goes_back)
        if start.is_own(folder):
            backup.submit(start.checkpoint)
    write_status(folder.status, "running", start.step)
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    environment = f"{hardware}; {versions}"
    details: dict[str, Any] = {
        "batches": asdict(start.plan.batches),
        "planned": planned,
        "environment": environment,
    }
    if start.checkpoint is not None:
        details |= {"checkpoint": start.checkpoint.name, "changes": start.changes}
    if earlier := start.earlier(folder):
        details["earlier"] = earlier
    if restarted := restart.restarted():
        details["because"] = restarted["because"]
    record(folder.events, "begun" if start.checkpoint is None else "resumed", start.step, **details)


def describe_run(start: Start, folder: RunFolder, outlook: str) -> str:
    """What the user reads before the first step. `outlook`: what the run will take, see forecast.py."""
    going_on = f", going on after {start.checkpoint.name}" if start.checkpoint else ""
    run = f"Run:     {folder.path}{going_on}"
    return "\n".join([outlook, run, *(f"Change:  {change}" for change in start.changes)])


def describe_end(folder: RunFolder, plan: Plan, step: int, reason: str | None, prompt: str) -> str:
    """What the user reads last; `reason`: why the run stopped after `step` steps, None at its end."""
    if reason is not None:
        stopped = f"\nStopped after step {step:,} of {plan.max_steps:,} ({reason}); {folder.last_good()}."
        if folder.newest_step() == 0:
            return f"{stopped} The same command starts again."
        resume = f"{launch_command()} --resume_from_checkpoint {quote(str(folder.path))}"
        return f"{stopped} To resume, give the same command, or:\n  {resume}"
    opening, path = prompt.splitlines()[0] if prompt.strip() else "", quote(str(folder.path))
    return (
        f"\nDone: {folder.model} is the model, {folder.report} tells the run. Next:\n"
        f"  python generate.py {path} --prompt {quote(opening)}\n"
        f"  python push_to_hub.py {path} --repo_id YOUR_NAME/{quote(folder.path.resolve().name)}"
    )


def finish_again(start: Start, folder: RunFolder, backup: Backup | None) -> str:
    """For a run that is over: makes up for what is missing where it was killed at its very end. Returns what to say.

    Raises:
        UserError: the folder cannot be written.
    """
    if start.is_own(folder):
        try:
            checkpoints.renew_model(start.checkpoint, folder.model)
        except OSError as error:
            problem = checkpoints.as_os_error(error)
            raise UserError(f"{folder.path} cannot be written ({problem.strerror or problem}).") from error
        write_status(folder.status, "finished", start.step)
        if backup is not None:
            backup.begin(start.step, may_replace=False)
            backup.submit(start.checkpoint)
            backup.finish()
    return folder.finished_message(start.step)
