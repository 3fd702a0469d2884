"""Guards of a job and its run: lock, watchdog, stop requests, loss health, saving and final status."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from accelerate import Accelerator
from torch._dynamo.exc import BackendCompilerFailed

from common.errors import UserError
from common.removal import discard
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.backup import LONGEST_WAIT, SHORT_WAIT
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.saver import Saver
from training.checkpoints.status import record, write_status
from training.guard.faults import translate
from training.guard.health import Health, HealthArguments, Spike
from training.guard.learning import LearningCheck
from training.guard.lock import locked
from training.guard.stopping import EXIT_CODES, SAVE_FAILURE, TICK, Stopper, StoppingArguments
from training.guard.watchdog import Watchdog, is_of_the_group
from training.plan.run import Run
from training.report.report import write_report
from training.runtime.console import printer
from training.runtime.device import Setup
from training.runtime.distributed import check_same_command, on_main, start_accelerator, stop_accelerator
from training.runtime.restart import Restart, restarted
from training.step.loss import DivergenceError

MOST_IN_A_ROW = 3  # rollbacks to one checkpoint: if the loss still spikes after these, the batches are not the cause


@contextmanager
def job(
    setup: Setup, folder: RunFolder, trackers: list[str] | None, stopping: StoppingArguments, settings: dict[str, Any]
) -> Iterator[tuple[Accelerator, Watchdog]]:
    """Set up and watch the processes of a job inside the `with` block, and lock the folder.
    `settings` must be equal in all processes."""
    accelerator = start_accelerator(setup, trackers, str(folder.path), stopping.ddp_timeout)
    with Watchdog(accelerator.process_index, accelerator.num_processes, stopping.ddp_timeout, folder) as watchdog:
        with ExitStack() as lock:
            check_same_command(settings | {name: value for name, value in vars(setup).items() if name != "notes"})
            on_main(accelerator, lambda: lock.enter_context(locked(folder.path)))
            yield accelerator, watchdog
        on_main(accelerator, lambda: None)  # the main process may still be copying to the backup
        accelerator.wait_for_everyone()
    stop_accelerator(accelerator)


class RunGuard:
    """Guard of the training loop, used by every process. It leaves a folder with final status and checkpoints."""

    def __init__(self, run: Run, health: HealthArguments, stopping: StoppingArguments, watchdog: Watchdog):
        self.run, self.watchdog = run, watchdog
        self.step = run.start.step  # number of steps done
        self.reason: str | None = None  # why the run stopped before its end
        self.has_begun = restarted().get("has_begun", False)  # until then, the folder is not changed
        self.rolls_back = health.on_spike == "rollback"
        self.health = Health(run.accelerator, health, run.start.state)
        self.scaler = run.accelerator.scaler  # None unless fp16
        if self.scaler is not None and run.start.state.grad_scaler:
            self.scaler.load_state_dict(run.start.state.grad_scaler)
        self.stopper = Stopper(stopping, run.accelerator.num_processes)

    def __enter__(self) -> "RunGuard":
        self.stopper.end_without_saving = self._end_without_saving
        self.stopper.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Raise a `UserError` for a failure that the user can fix, or a `Restart` if the run resumes in a fresh
        process. With several processes, a restart replaces all of them and does not return."""
        try:
            if error is None:
                self._end("finished" if self.reason is None else "stopped", self.reason or "")
            elif isinstance(error, Exception):
                self._fail(error)
        finally:
            self.stopper.__exit__(kind)  # last, because until here, Ctrl-C only requests a stop

    @property
    def exit_code(self) -> int:
        return 0 if self.reason is None else EXIT_CODES[self.reason]

    def steps(self, saver: Saver) -> Iterator[int]:
        """Yield the remaining steps, counted from 0, until the end or until all processes agree to stop. `saver` saves
        their checkpoints."""
        self.saver, start = saver, self.run.start
        is_new = start.checkpoint is None and start.initializer is None
        self.learning = LearningCheck(saver.train_step, self.run.plan, is_new)
        while self.step < self.run.plan.max_steps and not self.stopper.agreed():
            self.watchdog.phase = f"step {self.step + 1:,}"
            yield self.step
            self.stopper.end_without_saving = None
            self.step += 1
            if saver.failed:
                self.stopper.request(SAVE_FAILURE)
        self.reason = self.stopper.agreed()

    def finish(self) -> None:
        """Save the last step, if it is not saved, and wait until it is on the disk."""
        if self.step not in (self.run.start.step, self.saver.saved_step) and self.reason != SAVE_FAILURE:
            self.read_losses(self.step)
            self.save(self.step)
        on_main(self.run.accelerator, self.saver.wait)

    def read_losses(self, step: int) -> None:
        """Read the losses of the steps until `step`, and wait for the device. Raise a `UserError` if the model does not
        learn, a `DivergenceError` if too many losses were not finite, or a `Restart` if the run rolls back."""
        run, spike = self.run, self.health.read(step)
        say = printer(run.accelerator)
        for warning in self.learning.check(step, self.health):
            say(f"WARNING: {warning}")
            if run.accelerator.is_main_process:
                record(run.folder.events, "advice", step, about="first loss", text=warning)
        if spike is None:
            return
        say(f"WARNING: {spike}.")
        if run.accelerator.is_main_process:
            numbers = {"loss": spike.loss, "z_score": round(spike.z_score, 2), "last": spike.last}
            record(run.folder.events, "spike", spike.step, **numbers)
        if self.rolls_back and not self.stopper.agreed(now=True):
            on_main(run.accelerator, self.saver.wait)
            roll_back(spike, run)
            say("Continuing: rolling back did not help, or no earlier checkpoint is left. Try a lower learning rate.")

    def save(self, step: int) -> None:
        """Start saving the state after `step` steps. All their losses must have been read. Weights with a non-finite
        loss are not saved. At the end of the run, they raise a `DivergenceError`."""
        if self.health.is_lost and step == self.run.plan.max_steps:
            raise DivergenceError(f"The loss is not finite at the last step, {step:,}")
        if not self.health.is_lost:  # if the weights recover, the next checkpoint has them
            position, settings = self.run.plan.after(step), self.run.start.state.settings
            losses, scale = tuple(self.health.losses), self.scaler and self.scaler.state_dict()
            self.saver.save(checkpoints.TrainState(position, settings, losses, self.health.unlogged, scale))

    def _fail(self, error: Exception) -> None:
        accelerator = self.run.accelerator
        if accelerator.num_processes > 1 and is_of_the_group(error):
            return  # the watchdog around this guard reports the cause
        self.watchdog.is_ending = True
        if isinstance(error, BackendCompilerFailed):
            time.sleep(TICK)  # a signal to all processes of a job also ends the compiler, which may be noticed first
            if self.stopper.requested:
                self._end("stopped", self.stopper.requested)
                raise SystemExit(EXIT_CODES[self.stopper.requested]) from None
        if isinstance(error, DivergenceError) and error.weights_after is not None and accelerator.is_main_process:
            # A checkpoint that this process has only read may be good: another precision or machine may be the cause.
            remove_checkpoints_from(max(error.weights_after, self.run.start.step + 1), self.run)
        outcome = translate(error, self.run)
        if isinstance(outcome, Restart) and self.stopper.requested:  # a fresh process would not know of the request
            outcome = UserError(f"Stopped ({self.stopper.requested}); {self.run.folder.last_good()}. {outcome}")
        if isinstance(outcome, Restart):
            outcome.facts["has_begun"] = self.has_begun
            self.watchdog.order(outcome)
        self._end("failed", (str(outcome) or type(outcome).__name__).splitlines()[0])
        if outcome is not error:
            raise outcome from error

    def _end_without_saving(self, reason: str) -> None:
        self._record("stopped", reason)
        self.watchdog.__exit__(None, None)  # so that the other processes do not report that this one has died

    def _end(self, state: str, reason: str) -> None:
        self._record(state, reason)
        if not (self.has_begun and self.run.accelerator.is_main_process):
            return
        if state == "stopped":
            with suppress(OSError, UserError):
                write_report(self.run.folder)
        if self.run.backup is not None:
            is_short = state == "failed" and self.run.accelerator.num_processes > 1
            self.run.backup.finish(SHORT_WAIT if is_short else LONGEST_WAIT)
            with suppress(OSError):  # the checkpoint that was being copied at the last save
                folder, backup = self.run.folder, self.run.backup
                checkpoints.prune(folder.checkpoints, backup.limit, folder.metrics, backup.copying)

    def _record(self, state: str, reason: str) -> None:
        if self.has_begun and self.run.accelerator.is_main_process:
            write_status(self.run.folder.status, state, self.run.folder.newest_step(), reason)
            record(self.run.folder.events, state, self.step, **({"because": reason} if reason else {}))


def roll_back(spike: Spike, run: Run) -> None:
    """Raise a `Restart` from the checkpoint before a spike, with the batches to skip. Return if this did not help
    before, or if there are checkpoints, but none from before the spike. Called by every process, while nothing is being
    saved. PaLM (Chowdhery et al. 2022, section 5.1) did this by hand. The batches were not bad by themselves, only in
    combination with the weights at that time."""
    plan, complete = run.plan, checkpoints.complete_checkpoints(run.folder.checkpoints)
    # The newest checkpoint whose weights were not trained on any batch that will be skipped.
    good = max((path for path in complete if checkpoints.step_of(path) <= spike.step - 2), default=None)
    state = checkpoints.load_state(good) if good is not None else run.start.state
    is_same_text = state.settings["data"] == run.start.state.settings["data"]
    sample = state.position.sample if good is not None and is_same_text else 0
    n_rollbacks = sum(start >= sample for start, _ in plan.position.passed_over)
    run.accelerator.wait_for_everyone()  # until all processes have read the checkpoints
    if n_rollbacks >= MOST_IN_A_ROW or (good is None and complete):
        return
    if good is not None:  # later checkpoints saw the skipped batches; a backup's drive may be slow
        on_main(run.accelerator, lambda: remove_checkpoints_from(checkpoints.step_of(good) + 1, run))
    # From the step before the spike, whose update caused it, to the last step of the spike. Steps count from 1 in a
    # spike, from 0 in the data.
    start = plan.after(max(plan.position.step, spike.step - 2)).sample
    end = plan.after(spike.last - 1).sample + plan.batches.sequences
    source = good or run.start.checkpoint  # of a run that this one branches off from
    place = source.name if source is not None else "the beginning"
    raise Restart(
        f"{spike}: rolling back to {place} and skipping samples {start:,} to {end - 1:,}.",
        {"passed_over": [*plan.position.passed_over, (start, end)]},
    )


def remove_checkpoints_from(step: int, run: Run) -> None:
    """Remove the checkpoints at `step` and later, also from the backup, but keep at least the first one. The weights of
    the last remaining checkpoint become the model of the run."""
    complete = checkpoints.complete_checkpoints(run.folder.checkpoints)
    remainder = [checkpoint for checkpoint in complete if checkpoints.step_of(checkpoint) < step] or complete[:1]
    if remainder == complete:
        return
    checkpoints.copy(remainder[-1], run.folder.model, model_only=True)
    for checkpoint in complete[len(remainder) :]:
        discard(checkpoint, checkpoints.FILES)
    if run.backup is not None:
        run.backup.update()
