"""Plan of a run: model, batches, length, memory, and start position in the data."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch._inductor

from common.limits import setting
from common.machine import memory_limits
from modeling_gpt2scratch import GPT2ScratchConfig
from training.data.batches import BatchPlan, DataPosition, WindowOrder
from training.data.run_data import Placement
from training.plan.memory import Memory
from training.runtime.device import Setup


@dataclass
class LengthArguments:
    """Length of a run, in one of three units. The default is one epoch."""

    max_steps: int | None = setting(None, "Length of the run in steps.", minimum=1)
    num_train_epochs: float | None = setting(
        None, "Length of the run in passes over the text.", above=0, maximum=10**6, resume="derived"
    )
    max_train_tokens: int | None = setting(None, "Length of the run in tokens.", minimum=1, resume="derived")

    def problems(self) -> Iterator[str]:
        lengths = [f"{name} {value}" for name, value in vars(self).items() if value is not None]
        if len(lengths) > 1:
            yield f"{' and '.join(lengths)} are given together; use only one of them for the length of a run."


@dataclass
class Plan:
    """Plan of a run. Only `max_steps` may change during the run, see pacer.py."""

    model: GPT2ScratchConfig
    batches: BatchPlan
    order: WindowOrder
    max_steps: int
    placement: Placement
    memory: Memory
    available: int  # bytes for each process, without its tokens
    position: DataPosition  # position at which the run starts or resumes

    @property
    def tokens_per_step(self) -> int:
        return self.batches.sequences * self.batches.context

    def epoch(self, step: int) -> float:
        """Return the number of epochs after `step` steps."""
        return self.after(step).sample / self.order.windows

    def after(self, step: int) -> DataPosition:
        """Return the position in the data after `step` steps."""
        return self.position.after(step, self.batches.sequences, self.batches.context)

    def is_due(self, strategy: str, interval: int, step: int) -> bool:
        """Return whether an action with `strategy` (`steps`, `epoch`, `no`) is due after `step` steps."""
        if step == self.max_steps:
            return True
        if strategy == "epoch":
            return int(self.epoch(step)) > int(self.epoch(step - 1))
        return strategy == "steps" and step % interval == 0


def steps_of(arguments: LengthArguments, batches: BatchPlan, windows: int, position: DataPosition) -> int:
    """Return the number of steps. A partial last step counts as a whole one. If batch or text was another one until
    `position`, the tokens that are left are divided into steps."""
    if arguments.max_steps is not None:
        return arguments.max_steps
    tokens_per_step, epochs = batches.sequences * batches.context, arguments.num_train_epochs or 1
    skipped = sum(min(end, position.sample) - start for start, end in position.passed_over if start < position.sample)
    done_with_text = min(position.tokens, (position.sample - skipped) * batches.context)
    done = position.tokens if arguments.max_train_tokens else done_with_text
    if done != position.step * tokens_per_step:
        tokens = arguments.max_train_tokens or epochs * windows * batches.context
        return position.step + max(0, math.ceil((tokens - done) / tokens_per_step))
    if arguments.max_train_tokens is not None:
        return math.ceil(arguments.max_train_tokens / tokens_per_step)
    return math.ceil(epochs * windows / batches.sequences)


def host_memory_problems(memory: Memory, processes: int) -> Iterator[str]:
    """Yield a problem if the model cannot fit the whole memory. The system would kill the process without a message."""
    n_bytes = sum(memory.fixed().values()) * processes
    ram = min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])
    capacity = ram + psutil.swap_memory().total
    if n_bytes > capacity:
        yield (
            f"A model of {memory.parameters:,} parameters needs {n_bytes / 1e9:,.0f} GB with its gradients and moments"
            f", but this machine has {capacity / 1e9:,.0f} GB; lower n_layer or n_embd, or use a GPU or a larger "
            "machine."
        )


def cuda_graph_problems(setup: Setup, batches: BatchPlan) -> Iterator[str]:
    """Yield a problem if CUDA graphs, which reuse the memory of gradients, would corrupt accumulation or DDP."""
    mode = setup.torch_compile_mode
    if not setup.torch_compile or mode is None or not torch._inductor.list_mode_options(mode).get("triton.cudagraphs"):
        return
    remedy = "max-autotune-no-cudagraphs" if "max" in mode else "no torch_compile_mode"
    if batches.processes > 1:
        yield (
            f"torch_compile_mode {mode} uses CUDA graphs, which do not work with {batches.processes} processes; use "
            f"{remedy}."
        )
    elif batches.accumulation > 1:
        yield (
            f"torch_compile_mode {mode} uses CUDA graphs, which overwrite the gradients accumulated over "
            f"{batches.accumulation} micro-batches; use {remedy}, or --tokens_per_step "
            f"{batches.micro_batch * batches.context}, a single micro-batch."
        )
