"""Saving during training: the tensors are copied off the device, and a thread writes the checkpoint.

Training waits only for the copy. The next save and the end of the run wait for the thread.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial

import numpy as np
import torch

from common.errors import UserError, as_os_error, require_room
from common.machine import free_memory
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from modeling_gpt2scratch.prompts import add_turn_end
from training.checkpoints import checkpoint
from training.checkpoints.backup import Backup
from training.checkpoints.run_folder import RunFolder, forget_replaced
from training.checkpoints.status import record, write_status
from training.data.run_data import RunData, processes_of_this_machine
from training.runtime.distributed import on_main, wait_for_all
from training.step.loss import DivergenceError
from training.step.optim import moment_shapes, named_moments, named_weights
from training.step.tensors import whole
from training.step.train_step import TrainStep

THREAD = "saver"


def wait_for_writing(seconds: float) -> bool:
    """Wait up to `seconds` for this process's checkpoint. Return whether it is still being written."""
    writers = [thread for thread in threading.enumerate() if thread.name == THREAD]
    for thread in writers:
        if thread.is_alive():  # false while the thread is starting
            thread.join(seconds)
    return any(thread.is_alive() for thread in writers)


def in_background(work: Callable[[], None], name: str, daemon: bool = False) -> Future[None]:
    """Start `work` in a thread. Return its future, which keeps an exception of the work.
    The thread has no low priority: on a busy machine, the run would wait for it at the next save and at a stop."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # otherwise those who wait would wait forever
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


class Saver(AbstractContextManager):
    """Checkpoint saver, used by every process because all of them gather a sharded model. The main process writes.
    `failed` shows a failed save immediately; the next `wait` raises it. On exit, a save in progress is completed."""

    def __init__(
        self, folder: RunFolder, train_step: TrainStep, data: RunData, limit: int | None, backup: Backup | None
    ):
        """Allocate memory for the copy of weights and moments while the first step is being prepared. Raise a
        `UserError` if the disk has no room for a checkpoint, before any step is trained.
        `data`: no checkpoint is completed before the hashes of its store were verified, because size and modification
        time would not show a flipped bit. One process per machine reads the files, at about 1.5 GB/s. With several
        machines, training waits for that.
        `limit` is the number of newest checkpoints to keep."""
        self.folder, self.tokenizer, self.train_step = folder, data.tokenizer, train_step
        self.accelerator, self.model = train_step.accelerator, train_step.model
        self.verification = self.task = Future()  # done; replaced in processes that verify or write
        self.task.set_result(None)
        if self.accelerator.is_local_main_process:
            self.verification = in_background(data.store.check_hashes, "verification", daemon=True)  # delays no exit
        self.optimizer, self.average = train_step.optimizer.optimizer, train_step.average
        self.limit, self.backup = limit, backup
        self.saved_step: int | None = None
        self.snapshot: dict[str, torch.Tensor] = {}  # of the main process; the same memory for every save
        # Not in the thread: during a step, a sharded model has other parameters.
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        shapes |= moment_shapes(self.model, self.optimizer)
        if self.average is not None:
            shapes |= {name: weight.shape for name, weight in named_weights(self.model).items()}
        self.n_bytes = 4 * sum(shape.numel() for shape in shapes.values())
        on_main(self.accelerator, lambda: refuse_full_disk(folder, self.n_bytes))
        with torch.device("meta"):  # a model without memory, to write config and code while the real model trains
            self.shell = GPT2ScratchForCausalLM._from_config(deepcopy(self.model.config))  # saving changes the config
        self.shell.generation_config = deepcopy(self.model.generation_config)
        add_turn_end(self.shell, self.tokenizer)
        if self.accelerator.is_main_process:
            self.task = in_background(partial(self._make_room, shapes), THREAD)

    def __exit__(self, *_: object) -> None:
        wait([self.task])

    def save(self, state: checkpoint.TrainState) -> None:
        """Start a save and record the seconds that training waited for it. Raise the exception of the previous save."""
        begin = time.perf_counter()
        if self.saved_step is None and processes_of_this_machine(self.accelerator) < self.accelerator.num_processes:
            self.verification.result()  # `_write` waits for that of its own machine only
            wait_for_all(self.accelerator)
        on_main(self.accelerator, self.wait)
        after_wait = time.perf_counter()
        self._copy_off_the_device()
        self.saved_step = state.position.step
        if self.accelerator.is_main_process:
            self.task = in_background(partial(self._write, state), THREAD)
            wait_time, copy_time = round(after_wait - begin, 4), round(time.perf_counter() - after_wait, 4)
            record(self.folder.events, "saving", self.saved_step, seconds_waiting=wait_time, seconds_copying=copy_time)

    @property
    def failed(self) -> bool:
        return any(task.done() and task.exception() is not None for task in (self.task, self.verification))

    def wait(self) -> None:
        """Wait for the save in progress. Raise a `UserError` if it failed."""
        self.task.result()
        if self.verification.done():
            self.verification.result()

    def _make_room(self, shapes: dict[str, torch.Size]) -> None:
        """Allocate the memory of the snapshot and touch it, so that the first save does not wait for the system.
        It is one block, page-locked for a GPU: `pin_memory` would round each tensor up to a power of two, 1.5 to 1.7
        times."""
        on_gpu = self.accelerator.device.type == "cuda"
        try:
            if on_gpu and self.n_bytes > free_memory():  # Linux would grant it, and kill the run later
                raise MemoryError
            block = torch.empty(self.n_bytes // 4, dtype=torch.float32)
            if on_gpu:
                cuda = torch.cuda.cudart()
                if cuda.cudaHostRegister(block.data_ptr(), block.nbytes, 0) == cuda.cudaError.success:  # WSL2 limits it
                    weakref.finalize(self, cuda.cudaHostUnregister, block.data_ptr()).atexit = False
        except (RuntimeError, MemoryError) as error:
            raise UserError(
                "The machine has too little memory (not GPU memory) for the copy of weights and moments that is saved, "
                "12 bytes per parameter, 16 with weight_average; free some, or use a machine with more."
            ) from error
        ends = np.cumsum([shape.numel() for shape in shapes.values()])
        # By NumPy, not as views of one storage: save_pretrained would treat them as tied, and copy.
        for (name, shape), part in zip(shapes.items(), np.split(block.zero_().numpy(), ends[:-1]), strict=True):
            self.snapshot[name] = torch.from_numpy(part).view(shape)

    def _copy_off_the_device(self) -> None:
        for name, full in self._whole_tensors():
            if self.accelerator.is_main_process:
                self.snapshot[name].copy_(full, non_blocking=True)
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint: model, moments and, if the model is an average, the weights themselves."""
        tensors = dict(self.model.named_parameters())  # tied weights once
        if self.average is not None:
            yield from self.average.whole()
            tensors = named_weights(self.model)
        for name, tensor in (*tensors.items(), *named_moments(self.model, self.optimizer)):
            yield name, whole(tensor.detach())

    def _write(self, state: checkpoint.TrainState) -> None:
        step, begin = state.position.step, time.perf_counter()
        if not all(torch.linalg.vector_norm(tensor, math.inf).isfinite() for tensor in self.snapshot.values()):
            raise DivergenceError(f"Weights or moments are not finite after step {step:,}, so this step is not saved")
        self.verification.result()
        subject = f"The checkpoint of step {step:,} could not be written to {self.folder.checkpoints}"
        try:
            refuse_full_disk(self.folder, self.n_bytes)
            new = checkpoint.write_checkpoint(self.folder.checkpoints, self.snapshot, self.shell, self.tokenizer, state)
            seconds = round(time.perf_counter() - begin, 4)
            subject = f"The checkpoint of step {step:,} is complete, but {self.folder.path} could not be updated"
            checkpoint.copy(new, self.folder.model, model_only=True)
            forget_replaced(self.folder)
            in_use = self.backup.copying if self.backup is not None else None
            checkpoint.prune(self.folder.checkpoints, self.limit, self.folder.metrics, in_use)
        except Exception as error:
            problem = as_os_error(error)
            raise UserError(
                f"{subject}: {problem.strerror or problem}; {self.folder.last_good()}. Fix the problem and resume."
            ) from error
        if self.backup is not None:
            self.backup.submit()
        record(self.folder.events, "saved", step, seconds=seconds)
        write_status(self.folder.status, "running", step)


def refuse_full_disk(folder: RunFolder, n_bytes: int) -> None:
    """Raise a `UserError` if a checkpoint and the copy of its weights do not fit on the disk."""
    remedy = f"{folder.last_good()}: free space and {folder.resume_advice()}"
    require_room(folder.checkpoints, n_bytes * 4 / 3, "A checkpoint takes", remedy)
