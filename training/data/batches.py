"""Batch order: a stateless function of (seed, step, rank), so that there is no loader state to save or restore.

The tokens of an epoch are cut into windows of `context + 1` that overlap by one, so that each of them is a target once.
The offset of the first window differs between epochs, and the windows are shuffled without replacement. Sample g
of a run (counted over all steps and processes) is in epoch g // windows at position g % windows.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from common.errors import UserError, counted
from common.limits import free, setting
from training.data.tokens import Batch, Tokens

BLOCK = 4096  # samples whose positions are computed together, to amortize the cost of the vector operations
FEW_WINDOWS = 64  # below, an epoch may start later, to reach the last tokens; longer texts keep an older order
ROUNDS = 4
# Constants of splitmix64.
GOLDEN, *FACTORS = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SHIFTS = tuple(np.uint64(n) for n in (30, 27, 31))


@dataclass
class BatchArguments:
    tokens_per_step: int = setting(
        32768, "Global batch in tokens, over all processes.", minimum=1, maximum=10**9, resume="refused"
    )
    per_device_train_batch_size: str = free(
        "auto", "Sequences per micro-batch and process: a number, or auto to choose by free memory."
    )
    mask_documents: bool = setting(
        False,
        "Restart attention and positions at each document; otherwise attention crosses document boundaries.",
        resume="refused",
    )

    def problems(self) -> Iterator[str]:
        micro = self.per_device_train_batch_size
        if not re.fullmatch(r"auto|[1-9]\d{0,8}", micro, re.ASCII):
            yield f"per_device_train_batch_size is {micro!r}; it must be a positive whole number or auto."


@dataclass(frozen=True)
class DataPosition:
    """Position in the data after `step` steps.
    Samples are counted over all processes. A step trains on the next `sequences` samples and skips the ranges that a
    rollback excluded, so that all numbers of processes and micro-batch sizes give the same samples in the same
    order."""

    step: int = 0
    sample: int = 0  # first sample of the next step
    tokens: int = 0  # tokens trained on so far
    passed_over: tuple[tuple[int, int], ...] = ()  # excluded ranges of samples, [first, end)

    def first_sample(self, step: int, sequences: int) -> int:
        """Return the first sample of step `step`, at or after this position, at `sequences` samples per step.
        A step that would reach into an excluded range starts after it."""
        position, sample = self.step, self.sample
        for start, end in sorted(self.passed_over):
            n_steps = max(0, start - sample) // sequences  # steps that fit before the range
            if sample < end and position + n_steps <= step:
                position, sample = position + n_steps, end
        return sample + (step - position) * sequences

    def after(self, step: int, sequences: int, context: int) -> "DataPosition":
        """Return the position after `step` steps, counted from the start of the run."""
        tokens = self.tokens + (step - self.step) * sequences * context
        return replace(self, step=step, sample=self.first_sample(step, sequences), tokens=tokens)


START = DataPosition()


@dataclass(frozen=True)
class BatchPlan:
    """Division of the global batch: tokens_per_step = context * micro_batch * accumulation * processes."""

    context: int
    micro_batch: int
    accumulation: int
    processes: int
    is_auto: bool = False  # true if available memory determined the micro-batch

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.accumulation * self.processes


def plan_batches(arguments: BatchArguments, context: int, processes: int, largest_micro_batch: int) -> BatchPlan:
    """Divide the global batch, or raise a `UserError` if it cannot be divided. `auto` uses the largest micro-batch that
    divides it and is at most `largest_micro_batch`."""
    micro = arguments.per_device_train_batch_size
    is_auto = micro == "auto"
    tokens = arguments.tokens_per_step
    unit = context * processes * (1 if is_auto else int(micro))
    if tokens % unit:
        nearest = sorted({max(1, tokens // unit) * unit, (tokens // unit + 1) * unit})
        factors = f"context {context} x {counted(processes, 'process', 'processes')}"
        factors += "" if is_auto else f" x micro-batch {micro}"
        names = " or ".join(str(value) for value in nearest)
        raise UserError(f"tokens_per_step {tokens} is not a multiple of {unit} ({factors}); the nearest are {names}.")
    sequences = tokens // (context * processes)  # per process
    if is_auto:
        micro = max(size for size in range(1, min(sequences, max(1, largest_micro_batch)) + 1) if sequences % size == 0)
    return BatchPlan(context, int(micro), sequences // int(micro), processes, is_auto)


@dataclass(frozen=True)
class WindowOrder:
    """Shuffled order of a run's samples, each given by the index of its first token."""

    n_tokens: int
    context: int
    seed: int

    def __post_init__(self):
        if self.n_tokens < self.context + 1:
            raise UserError(
                f"The training split has {self.n_tokens:,} tokens, fewer than one context of {self.context} plus the "
                f"next token; use more text or a smaller n_positions."
            )

    @property
    def windows(self) -> int:
        """Number of samples per epoch: one less than would fit, because an epoch starts anywhere in the first window,
        or a little later if there are few."""
        return max(1, self.n_tokens // self.context - 1)

    def starts(self, sample: int, count: int) -> np.ndarray:
        """Return the index of the first token of samples `sample`, `sample + 1`, ..., as (count,) int64."""
        block, offset = divmod(sample, BLOCK)
        return _starts_of_block(self, block, count)[offset : offset + count]


@lru_cache(maxsize=1)
def _starts_of_block(order: WindowOrder, block: int, count: int) -> np.ndarray:
    """Return the starts of the samples of a block and of the next `count`, (BLOCK + count,), which may span epochs."""
    samples, windows = np.arange(block * BLOCK, (block + 1) * BLOCK + count, dtype=np.uint64), order.windows
    epochs, places = np.divmod(samples, np.uint64(windows))
    keys = _mixed(np.array([order.seed], dtype=np.uint64), epochs)  # (BLOCK + count,): the same within an epoch
    slack = order.n_tokens - 1 - windows * order.context  # tokens by which the windows can shift
    most = slack if windows < FEW_WINDOWS else min(order.context - 1, slack)
    offsets = keys % np.uint64(most + 1)
    return (offsets + permute(places, windows, keys) * np.uint64(order.context)).astype(np.int64)


def permute(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Apply pseudo-random permutations of 0 .. n-1, one per key, in O(k) time and memory.
    Each of `places`, (k,) uint64, is mapped by the permutation of its key. A balanced Feistel network (Luby and
    Rackoff 1988) permutes the smallest square power of two that is at least n; results of n or more are permuted again
    until they are below n (cycle walking: Black and Rogaway 2002)."""
    n_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(n_bits)) - 1)

    def shuffle(values: np.ndarray, round_keys: np.ndarray) -> np.ndarray:
        high, low = values >> n_bits, values & mask
        for keys_of_round in round_keys:
            high, low = low, high ^ (_scrambled(low ^ keys_of_round) & mask)
        return (high << n_bits) | low

    round_keys = _mixed(keys, np.arange(ROUNDS, dtype=np.uint64)[:, None])  # (ROUNDS, k)
    out = shuffle(places, round_keys)
    while len(beyond := np.flatnonzero(out >= n)):
        out[beyond] = shuffle(out[beyond], round_keys[:, beyond])
    return out


def mix(a: int, b: int) -> int:
    """Return 64 bits that depend on all bits of both numbers."""
    return int(_mixed(np.array([a], dtype=np.uint64), np.array([b], dtype=np.uint64))[0])


def _mixed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _scrambled(a * GOLDEN + b + np.uint64(1))


def _scrambled(values: np.ndarray) -> np.ndarray:
    """Apply the output function of splitmix64 (Steele, Lea and Flood 2014) to uint64, with wraparound."""
    values = values + GOLDEN
    values = (values ^ (values >> SHIFTS[0])) * FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * FACTORS[1]
    return values ^ (values >> SHIFTS[2])


@dataclass
class TrainBatches:
    """Micro-batches of one process."""

    tokens: Tokens
    order: WindowOrder
    plan: BatchPlan
    rank: int
    position: DataPosition = START  # position in the data at which the run starts or resumes
    seconds: float = 0.0  # time spent on preparing batches since speed.py last reset it

    def __call__(self, step: int, micro_step: int) -> Batch:
        """Return a batch of tensors (micro_batch, context) on the device, without waiting for the device."""
        begin = time.perf_counter()
        starts, context = self._starts(step, micro_step), self.plan.context
        if self.tokens.file is not None:
            next_starts = self._starts(step, micro_step + 1)  # after the last one: nearly always the next step's first
            self.tokens.announce(np.concatenate([starts, next_starts]), context + 1)
        batch = self.tokens.batch(starts, context)
        self.seconds += time.perf_counter() - begin
        return batch

    def _starts(self, step: int, micro_step: int) -> np.ndarray:
        plan = self.plan
        sample = self.position.first_sample(step, plan.sequences)
        sample += (micro_step * plan.processes + self.rank) * plan.micro_batch
        return self.order.starts(sample, plan.micro_batch)
