"""What keeps a run: checkpoints, the health of its numbers, requests to stop, and what becomes of it when something fails.

In one place because of their order. On the way out, what is being saved is saved; then what becomes of the run is decided
and noted; and only then the backup drive is waited for, which may take minutes.
"""

from collections.abc import Iterator
from contextlib import ExitStack

from accelerate import Accelerator

from errors import UserError
from training.backup import Backup
from training.checkpoint import TrainState
from training.config import TrainConfig
from training.device import on_main, waits_for_main
from training.guard.faults import made_of
from training.guard.health import DivergenceError, Health
from training.guard.restart import Restart
from training.guard.rollback import forget_checkpoints_from, go_back
from training.guard.stopping import NOT_SAVED, Stopper
from training.guard.watchdog import Watchdog, is_of_the_group
from training.run import Start
from training.run_folder import RunFolder
from training.saver import Saver
from training.screen import voice
from training.status import record, write_status


class Keeper:
    """Used by every process. Whatever ends the run within it leaves it in order."""

    def __init__(
        self,
        config: TrainConfig,
        start: Start,
        folder: RunFolder,
        backup: Backup | None,
        accelerator: Accelerator,
        watchdog: Watchdog,
    ):
        self.config, self.plan, self.step = config, start.plan, start.step  # `step`: that the run has reached
        self.folder, self.backup = folder, backup
        self.accelerator, self.watchdog = accelerator, watchdog
        self.say = voice(accelerator)
        self.health = Health(accelerator, config.health, start.state.losses, start.state.unlogged)
        self.saver = Saver(folder, accelerator, start.step, config.checkpoints_kept, backup)
        self.stopper = Stopper(config.stopping, accelerator.num_processes, self._is_saving)
        self.reason: str | None = None  # why the run stopped before its end
        watchdog.before_leaving = self.saver.join
        watchdog.note = lambda sentence: write_status(folder.status, "failed", folder.newest_step(), sentence)

    def __enter__(self) -> "Keeper":
        self.stopper.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """
        Raises:
            UserError: something failed that the user can mend.
            Restart: the run goes on in a fresh process. Of several processes, all are told, and none comes back from here.
        """
        with ExitStack() as at_last:
            at_last.push(lambda *_: self.stopper.__exit__(kind))  # until then, Ctrl-C is heard
            self.saver.join()
            if error is None:
                self._end("finished" if self.reason is None else "stopped", self.reason or "")
            elif isinstance(error, Exception):
                self._fail(error)

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 0. Ends early where all processes agree to stop; how far they came is saved."""
        while self.step < self.plan.max_steps and not self.stopper.agreed():
            self.watchdog.phase = f"step {self.step + 1:,}"
            yield self.step
            self.step += 1
            if self.saver.failed:
                self.stopper.request(NOT_SAVED)
        self.reason = self.stopper.agreed()
        if self.step != self.saver.saved_step and self.reason != NOT_SAVED:
            self.read(self.step)
            self.save(self.step)
        on_main(self.accelerator, self.saver.wait)
        self.saver.verification.check()  # of other machines

    def read(self, step: int) -> None:
        """Looks at the numbers of the steps until `step`. Waits for the device.

        Raises:
            DivergenceError: too many of them were not finite.
            Restart: there was a spike, and the run goes back to before it.
        """
        spike = self.health.read(step)
        if spike is None:
            return
        self.say(f"WARNING: {spike}.")
        if self.accelerator.is_main_process:
            numbers = {"loss": spike.loss, "z_score": round(spike.z_score, 2), "last": spike.last}
            record(self.folder.events, "spike", spike.step, **numbers)
        if self.config.health.on_spike == "rollback" and not self.stopper.agreed_now():
            on_main(self.accelerator, self.saver.wait)
            go_back(spike, self.plan, self.folder, self.backup, self.accelerator)
            self.say(
                "The run goes on: going back has not helped, or no checkpoint from before is left. Try a lower rate."
            )

    def save(self, step: int) -> None:
        """Begins to save what the run is after `step` steps, all of them read, unless it is not worth it.

        Raises:
            DivergenceError: the run is at its end, and there is nothing worth saving.
        """
        if self.health.is_lost and step == self.plan.max_steps:
            raise DivergenceError(f"The loss is not finite at the last step, {step:,}")
        if not self.health.is_lost:  # if the weights recover, the next checkpoint is theirs
            losses, unlogged = tuple(self.health.losses), self.health.unlogged
            self.saver.save(TrainState(self.plan.after(step), self.plan.settings, losses, unlogged))

    def _is_saving(self) -> bool:
        """Also where another process does."""
        return self.saver.is_writing() or waits_for_main()

    def _fail(self, error: Exception) -> None:
        """
        Raises:
            UserError, Restart: see `__exit__`.
        """
        if self.accelerator.num_processes > 1 and is_of_the_group(error):
            return  # the watchdog, outside of this, knows why
        if isinstance(error, DivergenceError) and error.weights_after is not None and self.accelerator.is_main_process:
            forget_checkpoints_from(error.weights_after, self.folder, self.backup)
        outcome = made_of(error, self.plan, self.config.batch.per_device_train_batch_size, self.folder)
        if isinstance(outcome, Restart) and self.stopper.requested:  # a fresh process would not know of it
            outcome = UserError(f"Stopped ({self.stopper.requested}); the same command resumes. {outcome.reason}")
        if isinstance(outcome, Restart):
            self.watchdog.order_restart(outcome.environment, outcome.reason)
        self._end("failed", (str(outcome) or type(outcome).__name__).splitlines()[0])
        if outcome is not error:
            raise outcome from error

    def _end(self, state: str, reason: str) -> None:
        self.watchdog.note = lambda sentence: None  # whatever happens to the processes from here on
        if self.accelerator.is_main_process:
            write_status(self.folder.status, state, self.folder.newest_step(), reason)
            record(self.folder.events, state, self.step, **({"because": reason} if reason else {}))
            if self.backup is not None:
                self.backup.finish()
