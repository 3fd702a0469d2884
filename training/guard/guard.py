"""The guards of a job and of the run in it: lock, watchdog, stop requests, health of the losses, saving, final status."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from errors import UserError
from removal import discard
from training import checkpoint as checkpoints
from training.checkpoint import TrainState
from training.console import printer
from training.device import Setup
from training.distributed import check_same_command, on_main, start_accelerator, stop_accelerator
from training.guard.faults import translate
from training.guard.lock import RunLock
from training.guard.stopping import NOT_SAVED, Stopper, StoppingArguments
from training.guard.watchdog import Watchdog, is_of_the_group
from training.health import Health, HealthArguments, Spike
from training.loss import DivergenceError
from training.restart import Restart
from training.run import Run
from training.run_folder import RunFolder
from training.saver import Saver
from training.status import record, write_status

MOST_IN_A_ROW = 3  # rollbacks to one checkpoint: what is still wrong then is not the batches


@contextmanager
def job(
    setup: Setup, folder: RunFolder, trackers: list[str] | None, stopping: StoppingArguments, settings: dict[str, Any]
) -> Iterator[tuple[Accelerator, Watchdog]]:
    """Start the processes; within, they are watched, and the folder is locked. `settings`: must be the same in all of them."""
    accelerator = start_accelerator(setup, trackers, str(folder.path), stopping.ddp_timeout)
    lock = RunLock(folder.path)
    with Watchdog(accelerator.process_index, accelerator.num_processes, stopping.ddp_timeout, folder) as watchdog:
        try:
            check_same_command(accelerator, settings)
            on_main(accelerator, lock.acquire)
            yield accelerator, watchdog
        finally:
            lock.release()
        on_main(accelerator, lambda: None)  # which may still be copying to the backup
        accelerator.wait_for_everyone()
    stop_accelerator(accelerator)


class RunGuard:
    """Used by every process. However the run ends within it, its folder says how, and its checkpoints are complete."""

    def __init__(self, run: Run, health: HealthArguments, stopping: StoppingArguments, watchdog: Watchdog):
        self.run, self.watchdog = run, watchdog
        self.step = run.start.step  # steps done
        self.reason: str | None = None  # why the run stopped before its end
        self.rolls_back = health.on_spike == "rollback"
        self.health = Health(run.accelerator, health, run.start.state)
        self.stopper = Stopper(stopping, run.accelerator.num_processes)

    def __enter__(self) -> "RunGuard":
        self.stopper.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Raise a `UserError` for a failure that the user can fix; a `Restart` where the run resumes in a fresh process. Of several
        processes, all do, and none returns from here."""
        try:
            if error is None:
                self._end("finished" if self.reason is None else "stopped", self.reason or "")
            elif isinstance(error, Exception):
                self._fail(error)
        finally:
            self.stopper.__exit__(kind)  # until then, Ctrl-C is noted

    def steps(self, saver: Saver) -> Iterator[int]:
        """Yield the steps to do, counted from 0; end early where all processes agree to stop. How far they came is saved."""
        while self.step < self.run.plan.max_steps and not self.stopper.agreed():
            self.watchdog.phase = f"step {self.step + 1:,}"
            yield self.step
            self.step += 1
            if saver.failed:
                self.stopper.request(NOT_SAVED)
        self.reason = self.stopper.agreed()
        if self.step not in (self.run.start.step, saver.saved_step) and self.reason != NOT_SAVED:
            self.read_losses(self.step, saver)
            self.save(self.step, saver)
        on_main(self.run.accelerator, saver.wait)
        saver.verification.check()  # of other machines

    def read_losses(self, step: int, saver: Saver) -> None:
        """Read the losses of the steps until `step`, which waits for the device. Raise a `DivergenceError` where too many were not
        finite; a `Restart` where there was a spike, and the run goes back to before it."""
        run, spike = self.run, self.health.read(step)
        if spike is None:
            return
        say = printer(run.accelerator)
        say(f"WARNING: {spike}.")
        if run.accelerator.is_main_process:
            numbers = {"loss": spike.loss, "z_score": round(spike.z_score, 2), "last": spike.last}
            record(run.folder.events, "spike", spike.step, **numbers)
        if self.rolls_back and not self.stopper.agreed(now=True):
            on_main(run.accelerator, saver.wait)
            go_back(spike, run)
            say("The run goes on: going back has not helped, or no checkpoint from before is left. Try a lower rate.")

    def save(self, step: int, saver: Saver) -> None:
        """Begin to save the state after `step` steps, all of them read, unless it is not worth it: at the run's end, that raises
        a `DivergenceError`."""
        if self.health.is_lost and step == self.run.plan.max_steps:
            raise DivergenceError(f"The loss is not finite at the last step, {step:,}")
        if not self.health.is_lost:  # if the weights recover, the next checkpoint is theirs
            losses, settings = tuple(self.health.losses), self.run.start.state.settings
            saver.save(TrainState(self.run.plan.after(step), settings, losses, self.health.unlogged))

    def _fail(self, error: Exception) -> None:
        accelerator = self.run.accelerator
        if accelerator.num_processes > 1 and is_of_the_group(error):
            return  # the watchdog, outside of this, knows why
        if isinstance(error, DivergenceError) and error.weights_after is not None and accelerator.is_main_process:
            remove_checkpoints_from(error.weights_after, self.run)
        outcome = translate(error, self.run)
        if isinstance(outcome, Restart) and self.stopper.requested:  # a fresh process would not know of it
            outcome = UserError(f"Stopped ({self.stopper.requested}); the same command resumes. {outcome}")
        if isinstance(outcome, Restart):
            self.watchdog.order(outcome)
        self._end("failed", (str(outcome) or type(outcome).__name__).splitlines()[0])
        if outcome is not error:
            raise outcome from error

    def _end(self, state: str, reason: str) -> None:
        if self.run.accelerator.is_main_process:
            write_status(self.run.folder.status, state, self.run.folder.newest_step(), reason)
            record(self.run.folder.events, state, self.step, **({"because": reason} if reason else {}))
            if self.run.backup is not None:
                self.run.backup.finish()


def go_back(spike: Spike, run: Run) -> None:
    """Raise a `Restart` from the checkpoint before a spike, with the batches to pass over. Return where that has not helped
    before, or there are checkpoints, but none from before the spike. Called by every process, while nothing is being saved.

    PaLM (Chowdhery et al. 2022, section 5.1) did this by hand: the batches were not bad by themselves, only together with the
    weights they met.
    """
    plan, complete = run.plan, checkpoints.complete_checkpoints(run.folder.checkpoints)
    # The newest one whose weights no batch has touched that will be passed over.
    good = max((path for path in complete if checkpoints.step_of(path) <= spike.step - 2), default=None)
    sample = checkpoints.load_state(good).position.sample if good is not None else 0
    tried = sum(first >= sample for first, _ in plan.position.passed_over)
    run.accelerator.wait_for_everyone()  # all have looked
    if tried >= MOST_IN_A_ROW or (good is None and complete):
        return
    if good is not None:  # later ones learned from what is passed over; the drive of a backup may be slow
        on_main(run.accelerator, lambda: remove_checkpoints_from(checkpoints.step_of(good) + 1, run))
    # From the step before the spike, whose update led there, to its last step: steps are counted from 1 in a spike, from 0 in
    # the data.
    first = plan.after(max(plan.position.step, spike.step - 2)).sample
    end = plan.after(spike.last - 1).sample + plan.batches.sequences
    where = good.name if good is not None else "the beginning"
    raise Restart(
        f"{spike}: going back to {where}, and passing over samples {first:,} to {end - 1:,}.",
        {"passed_over": [*plan.position.passed_over, (first, end)]},
    )


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
