"""Parts of a run that were decided before it starts, the first entries of its record, and its end."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from shlex import join, quote

from accelerate import Accelerator

from common.atomic import write_atomic
from common.errors import UserError, counted, disk_errors
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.backup import Backup
from training.checkpoints.metrics import best_evaluation, read_events, read_metrics
from training.checkpoints.run_folder import RunArguments, RunFolder, begin, find_checkpoint, is_checkpoint, run_of
from training.checkpoints.status import read_status, record, starts_in_force, write_status
from training.data.run_data import RunData
from training.evaluation.sampling import SamplingArguments
from training.plan.plan import Plan
from training.plan.resume import ResumePoint
from training.runtime.console import printer
from training.runtime.device import Setup, describe
from training.runtime.distributed import on_main
from training.runtime.launcher import launch_words
from training.runtime.restart import restarted
from training.step.optim import OptimArguments, cooldown_start

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
    sampling: SamplingArguments  # with the prompts to continue


def begin_run(run: Run, arguments: RunArguments, config: str, estimate: dict[str, float | None]) -> None:
    """Prepare the run folder and record the start: `config` (YAML), the `estimate` and the hardware.
    Called by every process; the main process writes after all have read the folder."""
    run.accelerator.wait_for_everyone()
    on_main(run.accelerator, lambda: _write_beginning(run, arguments, config, estimate))


def _write_beginning(run: Run, arguments: RunArguments, config: str, estimate: dict[str, float | None]) -> None:
    folder, start = run.folder, run.start
    own_checkpoint = start.checkpoint if folder.owns(start.checkpoint) else None
    earlier_starts = []  # the starts of the run that this one branches off from
    if start.checkpoint is not None and own_checkpoint is None:
        events = read_events(RunFolder(run_of(start.checkpoint)).events)
        earlier_starts = [event for event in starts_in_force(events) if event["step"] < start.step]
    with disk_errors(folder.path, "use another --output_dir"):
        if own_checkpoint is None and arguments.overwrite_output_dir:
            run.data.store.check_hashes()  # before a run is replaced by one that could not save a checkpoint
        is_same_text = start.state.position.sample > 0
        begin(folder, own_checkpoint, is_same_text, start.owes_validation)
        write_atomic(folder.config, config)
        folder.checkpoints.mkdir(exist_ok=True)
    if run.backup is not None:
        is_rolled_back = "passed_over" in restarted()
        run.backup.begin(start.step, may_replace=discards_steps(run, arguments) or is_rolled_back)
    write_status(folder.status, "running", start.step)
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    hardware = describe(run.accelerator, run.setup, run.plan.model)
    details = {"batches": asdict(run.plan.batches), "planned": estimate, "environment": f"{hardware}; {versions}"}
    if own_checkpoint is None and arguments.overwrite_output_dir:
        details["replaces"] = True  # the run in the backup, too
    if start.checkpoint is not None:
        details |= {"checkpoint": start.checkpoint.name, "changes": start.changes}
    if earlier_starts:
        details["earlier"] = earlier_starts
    if facts := restarted():
        details["because"] = facts["because"]
    record(folder.events, "begun" if start.checkpoint is None else "resumed", start.step, **details)
    if run.backup is not None and own_checkpoint is not None:
        run.backup.submit()


def discards_steps(run: Run, arguments: RunArguments) -> bool:
    """Return whether the command discards steps of the run in its folder or backup: all, or those after a checkpoint.
    The same command again does not resume."""
    source = Path(arguments.resume_from_checkpoint or "").resolve()  # it may be deleted during the run
    folders = [run.folder] if run.backup is None else [run.folder, run.backup.there]
    is_own = is_checkpoint(source) and source.parent in [folder.checkpoints.resolve() for folder in folders]
    return arguments.overwrite_output_dir or is_own


def choose_best_model(run: Run) -> None:
    """Give model/ the weights of the checkpoint with the lowest validation loss, unless it is damaged."""
    on_main(run.accelerator, lambda: _choose_best_model(run))


def _choose_best_model(run: Run) -> bool:
    """Return whether model/ has the weights of a checkpoint before the last one."""
    say, best = printer(run.accelerator), find_checkpoint(run.folder.path, "best")
    if (step := checkpoints.step_of(best)) == run.folder.newest_step():
        return False
    with disk_errors(run.folder.path):
        try:
            checkpoints.renew_model(best, run.folder.model)
        except checkpoints.DamageError as damage:
            say(f"WARNING: {best} has the lowest validation loss, but is damaged: {damage}. The model is the last one.")
            return False
    say(f"The model is that of step {step:,}, which has the lowest validation loss of the saved steps.")
    return True


def print_end(run: Run, arguments: RunArguments, step: int, reason: str | None) -> None:
    """Print the next commands. `reason` is why the run stopped after `step` steps, or None if it is finished."""
    say, folder, path = printer(run.accelerator), run.folder, quote(str(run.folder.path))
    if reason is not None:
        how = "run" + " the same command again, or" * (not discards_steps(run, arguments))
        how += f":\n  {join(launch_words())} --resume_from_checkpoint {path}"
        resume = f"To resume, {how}" if folder.newest_step() else "The same command starts the run from the beginning."
        say(f"\nStopped after step {step:,} of {run.plan.max_steps:,} ({reason}); {folder.last_good()}. {resume}")
        return
    tokenizer, chats = run.data.tokenizer, ""
    prompt = run.sampling.sample_prompts[0]
    opening = next((line for line in prompt.splitlines() if line.strip()), prompt)
    prompt = "--chat" if tokenizer.chat_template is not None else f"--prompt={quote(opening)}"
    if tokenizer.eos_token is not None:
        chats = f"  python -m examples.finetune_chat {path} --data CHATS.jsonl\n"
    say(
        f"\nDone. Model: {folder.model}; report: {folder.report}. Next:\n"
        f"  python generate.py {path} {prompt}\n"
        f"  python -m training.evaluate {path} --compare\n"
        f"  python -m publishing.demo {path}\n"
        f"{chats}"
        f"  python push_to_hub.py {path} --repo_id YOUR_NAME/{folder.repository_name}"
    )


def finish_again(run: Run, optim: OptimArguments, chooses_best: bool, has_new_length: bool) -> None:
    """Complete the files of a finished run, in case it was killed at its very end, and print the next commands. Raise a
    `UserError` if its folder cannot be written."""
    if not run.folder.owns(run.start.checkpoint) or (has_new_length and run.start.step > run.plan.max_steps):
        raise UserError(
            f"{run.start.checkpoint} is at step {run.start.step:,} of {run.plan.max_steps:,}, so nothing is left to "
            "train; use a greater length."
        )
    on_main(run.accelerator, lambda: _complete(run, chooses_best))
    folder, source = run.folder, quote(str(run.folder.path))
    if stable := folder.newest_step(until=cooldown_start(run.plan.max_steps, optim)):
        source = f"{quote(str(folder.checkpoints / checkpoints.folder_name(stable)))} --output_dir NEW_FOLDER"
    printer(run.accelerator)(
        f"{folder.path} is finished ({counted(run.start.step, 'step')}). To train again, use its first command with "
        f"--overwrite_output_dir. To train longer, use --resume_from_checkpoint {source} --max_steps N."
    )


def _has_only_copy_of_best(folder: RunFolder) -> bool:
    """Return whether model/ of a finished run may be the only copy of its best weights."""
    was_finished = read_status(folder.status).get("state") == "finished"
    best = (best_evaluation(read_metrics(folder.metrics)) or {}).get("step")
    saved = {checkpoints.step_of(checkpoint) for checkpoint in checkpoints.complete_checkpoints(folder.checkpoints)}
    has_weights = (folder.model / checkpoints.WEIGHTS).is_file() and folder.checkpoint_of_model() is None
    return was_finished and best not in saved and has_weights


def _complete(run: Run, chooses_best: bool) -> None:
    folder, start = run.folder, run.start
    if chooses_best and _has_only_copy_of_best(folder):
        printer(run.accelerator)(
            f"The checkpoint with the lowest validation loss was deleted, so {folder.model} is kept; delete it, too, "
            "to get the weights of another checkpoint."
        )
    elif not (chooses_best and _choose_best_model(run)):
        with disk_errors(folder.path):
            checkpoints.renew_model(start.checkpoint, folder.model)
    write_status(folder.status, "finished", start.step)
    if run.backup is not None:
        run.backup.begin(start.step, may_replace=False)
        run.backup.finish()
