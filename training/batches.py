"""Which tokens make up which batch: arithmetic on (seed, step, rank), with nothing to remember and nothing to resume.

The tokens of an epoch are cut into windows of `context + 1` that overlap by one, so that every token is a target once.
Where the cut begins differs from epoch to epoch, and the windows come in a shuffled order without replacement. Sample g
of a run (g counts over all steps and processes) lies in epoch g // windows at place g % windows.
"""

import re
import time
from dataclasses import dataclass, field, replace

import numpy as np

from errors import UserError
from limits import setting
from training.tokens import Batch, Tokens

BLOCK = 4096  # samples whose places are computed together: the cost of a few vector operations is spread over them
ROUNDS = 4
# The numbers of splitmix64.
GOLDEN, *FACTORS = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SHIFTS = tuple(np.uint64(n) for n in (30, 27, 31))


@dataclass
class BatchArguments:
    tokens_per_step: int = setting(
        32768,
        "Tokens of the global batch: all processes and accumulation steps together.",
        minimum=1,
        maximum=10**9,
        resume="refused",
    )
    per_device_train_batch_size: str = setting(
        "auto", "Sequences a process computes at once (micro-batch): a number, or auto by free memory.", resume="free"
    )
    mask_documents: bool = setting(
        False,
        "Attention and positions start again with each document; otherwise they cross from one to the next.",
        resume="refused",
    )


@dataclass(frozen=True)
class DataPosition:
    """Position in the data after `step` steps.

    Samples are counted over all processes. A step trains on the next `sequences` of them and skips the ranges that a
    rollback passed over, so that any other number of processes, or another micro-batch, sees the same samples in the same
    order.
    """

    step: int = 0
    sample: int = 0  # that the next step begins with
    tokens: int = 0  # trained on so far
    passed_over: tuple[tuple[int, int], ...] = ()  # ranges of samples, [first, end), that no step is trained on

    def first_sample(self, step: int, sequences: int) -> int:
        """The sample that step `step`, at or after this position, begins with, at `sequences` samples a step.

        A step that would reach into a range begins behind it.
        """
        now, sample = self.step, self.sample
        for first, end in sorted(self.passed_over):
            whole = max(0, first - sample) // sequences  # steps that fit before the range
            if sample < end and now + whole <= step:
                now, sample = now + whole, end
        return sample + (step - now) * sequences

    def after(self, step: int, sequences: int, context: int) -> "DataPosition":
        """The position after `step` steps in all."""
        tokens = self.tokens + (step - self.step) * sequences * context
        return replace(self, step=step, sample=self.first_sample(step, sequences), tokens=tokens)


START = DataPosition()


@dataclass(frozen=True)
class BatchPlan:
    """tokens_per_step = context * micro_batch * accumulation * processes."""

    context: int
    micro_batch: int
    accumulation: int
    processes: int
    is_auto: bool = False  # the micro-batch was chosen by memory

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.accumulation * self.processes


def plan_batches(arguments: BatchArguments, context: int, processes: int, largest_micro_batch: int) -> BatchPlan:
    """Divide the global batch; raise a `UserError` where it cannot be divided. `auto` takes the largest micro-batch that divides
    it and is at most `largest_micro_batch`."""
    micro = arguments.per_device_train_batch_size
    is_auto = micro == "auto"
    if not is_auto and not re.fullmatch(r"[1-9]\d{0,8}", micro, re.ASCII):
        raise UserError(f"per_device_train_batch_size is {micro!r}; it must be a positive whole number or auto.")
    tokens = arguments.tokens_per_step
    unit = context * processes * (1 if is_auto else int(micro))
    if tokens % unit:
        nearest = sorted({max(1, tokens // unit) * unit, (tokens // unit + 1) * unit})
        factors = f"context {context} x {processes} process{'es' * (processes > 1)}"
        factors += "" if is_auto else f" x micro-batch {micro}"
        names = " or ".join(str(value) for value in nearest)
        raise UserError(f"tokens_per_step {tokens} is not a multiple of {unit} ({factors}); the nearest are {names}.")
    sequences = tokens // (context * processes)  # of one process
    if is_auto:
        micro = max(size for size in range(1, min(sequences, max(1, largest_micro_batch)) + 1) if sequences % size == 0)
    return BatchPlan(context, int(micro), sequences // int(micro), processes, is_auto)


@dataclass
class WindowOrder:
    """Where each sample of a run begins."""

    n_tokens: int
    context: int
    seed: int
    _block: tuple[int, np.ndarray] = field(default=(-1, np.empty(0)), repr=False)

    def __post_init__(self):
        if self.n_tokens < self.context + 1:
            raise UserError(
                f"The training split has {self.n_tokens:,} tokens, fewer than one context of {self.context} and its "
                f"next token; give it more text or a smaller n_positions."
            )

    @property
    def windows(self) -> int:
        """Samples an epoch. One less than would fit leaves room for beginning anywhere in the first window."""
        return max(1, self.n_tokens // self.context - 1)

    def starts(self, first: int, count: int) -> np.ndarray:
        """(count,) int64: the first token of samples first, first + 1, ..."""
        parts = []
        while count > 0:
            block, offset = divmod(first, BLOCK)
            if self._block[0] != block:
                self._block = (block, self._compute(np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)))
            part = self._block[1][offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)

    def _compute(self, samples: np.ndarray) -> np.ndarray:
        """(k,) int64 for samples in a row, (k,) uint64. They may lie in many epochs, if those are short."""
        epochs, places = np.divmod(samples, np.uint64(self.windows))
        nth = (epochs - epochs[0]).astype(np.intp)  # (k,): which of the epochs here
        here = np.arange(int(epochs[0]), int(epochs[-1]) + 1, dtype=np.uint64)
        keys = _mixed(np.array([self.seed], dtype=np.uint64), here)  # one an epoch
        slack = self.n_tokens - 1 - self.windows * self.context  # tokens the windows can move by
        offsets = keys % np.uint64(min(self.context - 1, slack) + 1)
        starts = offsets[nth] + permute(places, self.windows, keys, nth) * np.uint64(self.context)
        return starts.astype(np.int64)


def permute(places: np.ndarray, n: int, keys: np.ndarray, nth: np.ndarray) -> np.ndarray:
    """Pseudo-random permutations of 0 .. n-1, one for each of `keys`, looked up in O(k) time and memory.

    `places`, (k,) uint64, are looked up in the permutations of `keys[nth]`. A balanced Feistel network (Luby and
    Rackoff 1988) shuffles the smallest square power of two that holds n; what falls beyond n is shuffled on until it
    does not (cycle walking: Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    round_keys = _mixed(keys, np.arange(ROUNDS, dtype=np.uint64)[:, None])  # (ROUNDS, keys)

    def shuffle(values: np.ndarray, nth: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & low
        for keys_of_round in round_keys:
            left, right = right, left ^ (_scrambled(right ^ keys_of_round[nth]) & low)
        return (left << half) | right

    out = shuffle(places, nth)
    while len(beyond := np.flatnonzero(out >= n)):
        out[beyond] = shuffle(out[beyond], nth[beyond])
    return out


def mix(a: int, b: int) -> int:
    """64 bits that depend on all bits of both."""
    return int(_mixed(np.array([a], dtype=np.uint64), np.array([b], dtype=np.uint64))[0])


def _mixed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _scrambled(a * GOLDEN + b + np.uint64(1))


def _scrambled(values: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea and Flood 2014), on uint64 that wrap around."""
    values = values + GOLDEN
    values = (values ^ (values >> SHIFTS[0])) * FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * FACTORS[1]
    return values ^ (values >> SHIFTS[2])


class TrainBatches:
    """The micro-batches of one process."""

    def __init__(self, tokens: Tokens, order: WindowOrder, plan: BatchPlan, rank: int, position: DataPosition = START):
        self.tokens = tokens
        self.order = order
        self.plan = plan
        self.rank = rank
        self.position = position  # that the run goes on from
        self.seconds = 0.0  # spent on making batches, since speed.py last set it back

    def __call__(self, step: int, micro_step: int) -> Batch:
        """(micro_batch, context) each, on the device, without waiting for it."""
        before = time.perf_counter()
        batch = self._make(step, micro_step)
        self.seconds += time.perf_counter() - before
        return batch

    def _make(self, step: int, micro_step: int) -> Batch:
        starts, context = self._starts(step, micro_step), self.plan.context
        if self.tokens.file is not None:
            following = self._starts(step, micro_step + 1)  # after the last one, nearly always the next step's first
            self.tokens.file.announce(np.concatenate([starts, following]), context + 1)
        return self.tokens.batch(starts, context)

    def _starts(self, step: int, micro_step: int) -> np.ndarray:
        plan = self.plan
        first = self.position.first_sample(step, plan.sequences)
        first += (micro_step * plan.processes + self.rank) * plan.micro_batch
        return self.order.starts(first, plan.micro_batch)
