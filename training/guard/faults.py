"""Failures during a run, translated into a one-sentence error or a restart in a fresh process."""

import errno
import math
import tempfile

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from common.errors import FULL_DISK, UserError, counted
from training.checkpoints.checkpoint import DamageError
from training.plan.run import Run
from training.runtime.device import memory_of_others
from training.runtime.restart import Restart
from training.step.loss import DivergenceError

# Errors caused by a disk, a drive or its permissions.
OF_THE_DISK = {
    *FULL_DISK,
    *(errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT),
}
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def translate(error: Exception, run: Run) -> Exception:
    """Return the `UserError` or `Restart` that corresponds to an error. A `DivergenceError` gets the last good
    checkpoint. Any other `UserError`, an internal bug and an error of the process group are returned unchanged."""
    folder = run.folder
    if isinstance(error, DivergenceError):
        last_good, start = folder.last_good(), run.start
        if start.checkpoint is not None and (error.weights_after or math.inf) <= start.step:
            last_good = f"{start.checkpoint} itself gives no finite loss here; resume from another, or elsewhere"
        return UserError(f"{error} {last_good.replace('there is', 'There is')}.")
    if is_out_of_memory(error):
        return _out_of_memory(run)
    if isinstance(error, BackendCompilerFailed):
        return compiler_error(error, f"; {folder.last_good()}", folder.resume_advice())
    if isinstance(error, DamageError) or (isinstance(error, OSError) and error.errno in OF_THE_DISK):
        return UserError(
            f"{error.filename or folder.path}: {error.strerror or error}. The run ends here; {folder.last_good()}. "
            f"Fix the problem and {folder.resume_advice()}."
        )
    return error


def compiler_error(error: BackendCompilerFailed, state: str, repeat: str) -> UserError:
    """Return the error for a failed compiler. `state` follows its reason; `repeat` says how to continue."""
    cause = error.inner_exception
    if isinstance(cause, PermissionError):  # of another user
        problem = f"torch.compile cannot use its cache, {cache_dir()} ({cause})"
        return UserError(f"{problem}{state}. Name a folder of your own with TORCHINDUCTOR_CACHE_DIR, and {repeat}.")
    reason = cause.output if isinstance(cause, CppCompileError) else repr(cause)  # without its long command
    return UserError(
        f"torch.compile failed ({' '.join(reason.split()):.300}){state}. Delete its cache, {cache_dir()}, free space "
        f"in {tempfile.gettempdir()} (TMPDIR) if the disk is full, and {repeat}; if that does not help, add "
        "--torch_compile false."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, even if the compiler wrapped it in another error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def _out_of_memory(run: Run) -> Exception:
    plan, last_good = run.plan, run.folder.last_good()
    micro = plan.batches.micro_batch
    sentence = f"Out of memory with a micro-batch of {counted(micro, 'sequence')} of {plan.batches.context} tokens"
    if run.setup.autotunes:
        sentence += ", while max-autotune needs memory to try kernels (without torch_compile_mode, more sequences fit)"
    neighbors = memory_of_others()
    sentence += f". {neighbors}" if neighbors else ""
    if micro == 1 and neighbors:
        return UserError(f"{sentence}; {last_good}.")
    if micro == 1:
        return UserError(
            f"{sentence}: not even one sequence fits; {last_good}. Use --gradient_checkpointing, a smaller model or "
            "n_positions, or FSDP2 on several devices (docs/multi_gpu.md)."
        )
    if not plan.batches.is_auto:
        return UserError(
            f"{sentence}; {last_good}. Resume with --per_device_train_batch_size auto, which finds a size that fits; "
            "tokens_per_step and the order of the data stay the same."
        )
    reason = f"{sentence}: resuming from the last checkpoint with at most {micro // 2:,}, in a fresh process."
    return Restart(reason, {"micro_batch": micro // 2})
