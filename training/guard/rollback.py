"""Going back from a loss spike: to the checkpoint before it, and on without the batches around it.

PaLM (Chowdhery et al. 2022, section 5.1) did this by hand: the batches were not bad by themselves, only together with the
weights they met.
"""

from pathlib import Path

from removal import discard
from training import checkpoint as checkpoints
from training.health import Spike
from training.plan import Plan
from training.restart import Restart, remembering
from training.run import Run

MOST_IN_A_ROW = 3  # from one checkpoint: what is still wrong then is not the batches


def go_back(spike: Spike, run: Run) -> None:
    """Restart from the checkpoint before a spike. Called by every process, while nothing is being saved.

    Returns where going back has not helped before, or there are checkpoints, but none from before the spike.

    Raises:
        Restart: from the checkpoint, with the batches to pass over.
    """
    position, folder = run.plan.position, run.folder
    good = checkpoint_before(spike, folder.checkpoints)
    is_too_late = good is None and bool(checkpoints.complete_checkpoints(folder.checkpoints))
    tried = sum(first >= _sample_of(good) for first, _ in position.passed_over)
    run.accelerator.wait_for_everyone()  # all have looked
    if tried >= MOST_IN_A_ROW or is_too_late:
        return
    if run.accelerator.is_main_process and good is not None:  # later ones learned from what is passed over
        remove_checkpoints_from(checkpoints.step_of(good) + 1, run)
    first, end = samples_to_pass_over(spike, run.plan)
    where = good.name if good is not None else "the beginning"
    reason = f"{spike}: going back to {where}, and passing over samples {first:,} to {end - 1:,}."
    passed_over = [*position.passed_over, (first, end)]
    run.accelerator.wait_for_everyone()
    raise Restart(remembering(passed_over=passed_over, because=reason), reason)


def samples_to_pass_over(spike: Spike, plan: Plan) -> tuple[int, int]:
    """From the step before the spike, whose update led there, to its last step: [first, end)."""
    first = max(plan.position.step, spike.step - 2)  # steps are counted from 1 in a spike, from 0 in the data
    return plan.after(first).sample, plan.after(spike.last - 1).sample + plan.batches.sequences


def checkpoint_before(spike: Spike, folder: Path) -> Path | None:
    """The newest one whose weights no batch has touched that will be passed over."""
    before = [path for path in checkpoints.complete_checkpoints(folder) if checkpoints.step_of(path) <= spike.step - 2]
    return before[-1] if before else None


def remove_checkpoints_from(step: int, run: Run) -> None:
    """Remove the checkpoints of `step` and more steps, from the backup too, but never all: then the first one stays. The last
    one that stays becomes the model to use."""
    complete = checkpoints.complete_checkpoints(run.folder.checkpoints)
    kept = [checkpoint for checkpoint in complete if checkpoints.step_of(checkpoint) < step] or complete[:1]
    if kept == complete:
        return
    checkpoints.copy(kept[-1], run.folder.model, model_only=True)
    for checkpoint in complete[len(kept) :]:
        discard(checkpoint, checkpoints.FILES)
    if run.backup is not None:
        run.backup.update()


def _sample_of(checkpoint: Path | None) -> int:
    return checkpoints.load_state(checkpoint).position.sample if checkpoint is not None else 0
