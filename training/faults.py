"""What can go wrong in the middle of a run, and what becomes of it: one sentence, or a fresh process that goes on."""

import errno
import os
from contextlib import suppress

import torch

from errors import UserError
from training.health import DivergenceError
from training.plan import Plan
from training.restart import Restart, remembering
from training.run_folder import RunFolder, forget_checkpoints_from
from training.status import write_status
from training.stopping import Stopper
from training.watchdog import Watchdog

# What a disk, a drive or its owner can do to a run.
OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT),
}
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


class Guard:
    """Within it, what goes wrong is told in status.json and turned into what a user can act on."""

    def __init__(self, folder: RunFolder, plan: Plan, asked_micro_batch: str, stopper: Stopper, watchdog: Watchdog):
        self.folder, self.plan, self.asked_micro_batch = folder, plan, asked_micro_batch
        self.stopper, self.watchdog = stopper, watchdog

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """
        Raises:
            UserError: the user can mend it.
            Restart: the run goes on in a fresh process. Of several processes, all are told, and none comes back from here.
        """
        if not isinstance(error, Exception):
            return
        outcome = self._made_of(error)
        if isinstance(outcome, Restart) and self.stopper.requested:  # a fresh process would not know of it
            outcome = UserError(f"Stopped ({self.stopper.requested}); the same command goes on. {outcome.reason}")
        if isinstance(outcome, Restart):
            self.watchdog.order_restart(outcome.environment, outcome.reason)
        if self.watchdog.rank == 0:
            sentence = (str(outcome) or type(outcome).__name__).splitlines()[0]
            with suppress(OSError):  # the disk may be what failed
                write_status(self.folder.status, "failed", self.folder.newest_step(), sentence)
        if outcome is not error:
            raise outcome from error

    def _made_of(self, error: Exception) -> Exception:
        """A `UserError`, a `Restart`, or the error itself where it is our own mistake or the process group's."""
        if is_out_of_memory(error):
            return self._out_of_memory()
        if isinstance(error, DivergenceError):
            if self.watchdog.rank == 0 and error.weights_after is not None:
                forget_checkpoints_from(error.weights_after, self.folder)
            return UserError(f"{error} No such step has changed the model, and {self.folder.last_good()}.")
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            return UserError(
                f"{error.filename or self.folder.path}: {os.strerror(error.errno)}. The run ends here; "
                f"{self.folder.last_good()}. Mend that, and the same command goes on."
            )
        return error

    def _out_of_memory(self) -> Exception:
        batches, last_good = self.plan.batches, self.folder.last_good()
        micro = batches.micro_batch
        what = f"Out of memory with a micro-batch of {micro} sequence{'s' * (micro > 1)} of {batches.context} tokens"
        if micro == 1:
            return UserError(
                f"{what}: not even one fits; {last_good}. Use --gradient_checkpointing, a smaller model or n_positions, or "
                f"FSDP2 on several devices (docs/several_devices.md)."
            )
        if self.asked_micro_batch != "auto":
            return UserError(
                f"{what}; {last_good}. Resume with --per_device_train_batch_size {micro // 2}, or auto, which finds what "
                f"fits; tokens_per_step and the order of the data stay the same."
            )
        reason = f"{what}: going on from the last checkpoint with at most {micro // 2}, in a fresh process."
        return Restart(remembering(micro_batch=micro // 2, because=reason), reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Also inside what the compiler wraps around it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
