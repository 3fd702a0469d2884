"""A run: what has been decided about it, how its record begins, and how it ends."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

from accelerate import Accelerator

from atomic import write_atomic
from errors import UserError, disk_errors
from training import checkpoint as checkpoints
from training.backup import Backup
from training.console import printer, say
from training.data import RunData
from training.device import Setup, describe
from training.distributed import on_main
from training.launcher import launch_command
from training.metrics import read_events
from training.plan import Plan
from training.restart import restarted
from training.resume import ResumePoint
from training.run_folder import RunArguments, RunFolder, begin, is_checkpoint, run_of
from training.sampling import SamplingArguments
from training.status import record, starts_in_force, write_status

LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate")


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    accelerator: Accelerator
    setup: Setup
    data: RunData
    plan: Plan
    start: ResumePoint
    backup: Backup | None
    sampling: SamplingArguments  # with the prompts that are continued


def is_finished(run: Run) -> bool:
    return run.start.step >= run.plan.max_steps and not run.start.owes_validation


def begin_run(run: Run, arguments: RunArguments, config: str, planned: dict[str, float | None]) -> None:
    """Prepare the run folder and record how the run began: its `config` as YAML, the estimate (`planned`) and the hardware.

    Called by every process; the main one writes, after all have read the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    run.accelerator.wait_for_everyone()
    hardware = describe(run.accelerator, run.setup, run.plan.model)
    on_main(run.accelerator, lambda: _write_beginning(run, arguments, config, planned, hardware))


def _write_beginning(
    run: Run, arguments: RunArguments, config: str, planned: dict[str, float | None], hardware: str
) -> None:
    folder, start = run.folder, run.start
    with disk_errors(folder.path, "name another --output_dir"):
        for kept in begin(folder, start.step, start.checkpoint):
            say(f"{kept} keeps files that were in {folder.path} and that no run wrote.")
        write_atomic(folder.config, config)
        folder.checkpoints.mkdir(exist_ok=True)
    if run.backup is not None:
        named = arguments.resume_from_checkpoint
        goes_back = arguments.overwrite_output_dir or (named is not None and is_checkpoint(Path(named)))
        run.backup.begin(start.step, may_replace=goes_back)
        if start.is_own(folder):
            run.backup.submit()
    write_status(folder.status, "running", start.step)
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    details: dict[str, Any] = {"batches": asdict(run.plan.batches), "planned": planned}
    details["environment"] = f"{hardware}; {versions}"
    if start.checkpoint is not None:
        details |= {"checkpoint": start.checkpoint.name, "changes": start.changes}
    if earlier := _earlier_starts(run):
        details["earlier"] = earlier
    if known := restarted():
        details["because"] = known["because"]
    record(folder.events, "begun" if start.checkpoint is None else "resumed", start.step, **details)


def _earlier_starts(run: Run) -> list[dict[str, Any]]:
    """Return the starts before this one of the run that this one branches off from."""
    checkpoint = run.start.checkpoint
    if checkpoint is None or run.start.is_own(run.folder):
        return []
    starts = starts_in_force(read_events(RunFolder(run_of(checkpoint)).events))
    return [start for start in starts if start["step"] < run.start.step]


def describe_run(run: Run, outlook: str) -> str:
    """Return what is printed before the first step: the `outlook` (see forecast.py), the folder, and changed settings."""
    checkpoint = run.start.checkpoint
    going_on = f", going on after {checkpoint.name}" if checkpoint else ""
    changes = (f"Change:  {change}" for change in run.start.changes)
    return "\n".join([outlook, f"Run:     {run.folder.path}{going_on}", *changes])


def print_end(run: Run, step: int, reason: str | None) -> None:
    """Print what comes next. `reason`: why the run stopped after `step` steps; None at its end."""
    printer(run.accelerator)(_describe_end(run, step, reason))


def _describe_end(run: Run, step: int, reason: str | None) -> str:
    folder, prompt = run.folder, run.sampling.sample_prompts[0]
    if reason is not None:
        stopped = f"\nStopped after step {step:,} of {run.plan.max_steps:,} ({reason}); {folder.last_good()}."
        if folder.newest_step() == 0:
            return f"{stopped} The same command starts again."
        resume = f"{launch_command()} --resume_from_checkpoint {quote(str(folder.path))}"
        return f"{stopped} To resume, give the same command, or:\n  {resume}"
    opening, path = prompt.splitlines()[0] if prompt.strip() else "", quote(str(folder.path))
    return (
        f"\nDone: {folder.model} is the model, {folder.report} describes the run. Next:\n"
        f"  python generate.py {path} --prompt {quote(opening)}\n"
        f"  python push_to_hub.py {path} --repo_id YOUR_NAME/{quote(folder.path.resolve().name)}"
    )


def finish_again(run: Run) -> None:
    """Complete a finished run that was killed at its very end, and say how to go on.

    Raises:
        UserError: the folder cannot be written.
    """
    printer(run.accelerator)(on_main(run.accelerator, lambda: _complete(run)))


def _complete(run: Run) -> str:
    folder, start = run.folder, run.start
    if start.is_own(folder):
        try:
            checkpoints.renew_model(start.checkpoint, folder.model)
        except OSError as error:
            problem = checkpoints.as_os_error(error)
            raise UserError(f"{folder.path} cannot be written ({problem.strerror or problem}).") from error
        write_status(folder.status, "finished", start.step)
        if run.backup is not None:
            run.backup.begin(start.step, may_replace=False)
            run.backup.submit()
            run.backup.finish()
    return folder.finished_message(start.step)
