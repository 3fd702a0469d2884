"""Saving while training goes on: the tensors are copied off the device, and a thread does the rest.

Training waits for the copy alone. The next save, and the end of the run, wait for the thread.
"""

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread, get_native_id

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training import checkpoint
from training.backup import Backup
from training.checkpoint import Snapshot, TrainState
from training.device import on_main
from training.health import DivergenceError
from training.journal import best_step
from training.run_folder import RunFolder
from training.sharding import whole
from training.status import record, write_status


class Saver:
    """Used by every process, because a sharded model is gathered by all; the main one writes.

    A save that failed is raised by the next `wait`; `failed` tells sooner.
    """

    def __init__(
        self,
        folder: RunFolder,
        model: GPT2ScratchForCausalLM,
        optimizer: torch.optim.Optimizer,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        first_step: int,
        save_total_limit: int | None,
        backup: Backup | None,
    ):
        self.folder = folder
        self.model, self.optimizer, self.tokenizer = model, optimizer, tokenizer
        self.accelerator = accelerator
        self.save_total_limit = save_total_limit
        self.backup = backup
        self.shell = _shell_of(model)
        self.snapshot = Snapshot()  # the same memory for every save
        self.thread: Thread | None = None
        self.failure: BaseException | None = None
        self.saved_step = first_step

    def __enter__(self) -> "Saver":
        if self.accelerator.is_main_process:
            self.thread = Thread(target=self._make_room, name="saver")  # while the first step is being made ready
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Whatever ended the run: what was being saved is saved."""
        if self.thread is not None:
            self.thread.join()
        if kind is not None and self.backup is not None:
            self.backup.finish()

    def save(self, state: TrainState) -> None:
        """Begins to save; notes the seconds that training waited for it.

        Raises:
            UserError: the save before this one failed.
        """
        begin = time.perf_counter()
        on_main(self.accelerator, self.wait)
        waited = time.perf_counter()
        if scaler := self.accelerator.scaler:
            state = replace(state, grad_scaler=scaler.state_dict())
        self._copy_off_the_device()
        self.saved_step = state.position.step
        if self.accelerator.is_main_process:
            self.thread = Thread(target=self._write, args=(state,), name="saver")
            self.thread.start()
            seconds = {"seconds_waiting": waited - begin, "seconds_copying": time.perf_counter() - waited}
            seconds = {name: round(value, 4) for name, value in seconds.items()}
            record(self.folder.events, "saving", self.saved_step, **seconds)

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def wait(self) -> None:
        """
        Raises:
            UserError: what was being saved is not saved.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            raise self.failure

    def is_writing(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish(self) -> None:
        """Waits; for a thread that is about to end the process."""
        if (thread := self.thread) is not None:
            thread.join()

    def _make_room(self) -> None:
        """Touches the memory of the snapshot, so that the first save does not wait for the system to find it."""
        for name, parameter in self.model.named_parameters():
            _room(self.snapshot.weights, name, parameter).zero_()
            for moment in ("exp_avg", "exp_avg_sq"):
                _room(self.snapshot.moments, f"{name}/{moment}", parameter).zero_()

    def _copy_off_the_device(self) -> None:
        for name, parameter in self.model.named_parameters():  # a tied head comes once
            self._keep(self.snapshot.weights, name, parameter)
        names = checkpoint.parameter_names(self.model)
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                self._keep(self.snapshot.moments, f"{names[parameter]}/{key}", value)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def _keep(self, kept: dict[str, torch.Tensor], name: str, value: nn.Parameter | torch.Tensor) -> None:
        full = whole(value.detach())
        if not self.accelerator.is_main_process:
            return
        _room(kept, name, full).copy_(full, non_blocking=True)

    def _write(self, state: TrainState) -> None:
        step, begin = state.position.step, time.perf_counter()
        if sys.platform == "linux":  # where a thread has a priority of its own: training on a CPU comes first
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
        try:
            if not self.snapshot.is_finite():
                raise DivergenceError(
                    f"Weights or moments are not finite after step {step:,}, which is therefore not saved"
                )
            _refuse_full_disk(self.folder.checkpoints, self.snapshot.n_bytes)
            saved = checkpoint.write(self.folder.checkpoints, self.snapshot, self.shell, self.tokenizer, state)
            record(self.folder.events, "saved", step, seconds=round(time.perf_counter() - begin, 4))
            checkpoint.copy_model(saved, self.folder.model)
            self.prune()
            if self.backup is not None:
                self.backup.submit(saved)
            write_status(self.folder.status, "running", step)
        except UserError as error:
            self.failure = error
        except Exception as error:
            problem = checkpoint.as_os_error(error)
            if not isinstance(problem, OSError):
                self.failure = error
                return
            self.failure = UserError(
                f"The checkpoint of step {step:,} could not be written to {self.folder.checkpoints}: "
                f"{problem.strerror or problem}; {self.folder.last_good()}. Mend that and resume."
            )

    def prune(self) -> None:
        best = best_step(self.folder.metrics)
        in_use = {} if self.backup is None else {"is_in_use": self.backup.protects}
        checkpoint.prune(self.folder.checkpoints, self.save_total_limit, best, **in_use)


def _room(kept: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """Of the same shape, in memory that a GPU can copy to without waiting."""
    if name not in kept:
        kept[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
    return kept[name]


def _shell_of(model: GPT2ScratchForCausalLM) -> GPT2ScratchForCausalLM:
    """A model of the same configuration without memory: what writes config and code while the real one trains."""
    with torch.device("meta"):
        shell = GPT2ScratchForCausalLM._from_config(model.config)
    shell.generation_config = model.generation_config
    return shell


def _refuse_full_disk(folder: Path, n_bytes: int) -> None:
    """
    Raises:
        UserError: less is free than a checkpoint and the copy of its weights take.
    """
    needed, free = int(n_bytes * 4 / 3), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB left, and a checkpoint needs {needed / 1e9:.2f} GB; earlier checkpoints are "
            f"intact. Make room and resume."
        )
