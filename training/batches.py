"""Which tokens make up which batch: arithmetic on (seed, step, rank), with nothing to remember and nothing to resume.

The tokens of an epoch are cut into windows of `context + 1` that overlap by one, so that every token is a target once.
Where the cut begins differs from epoch to epoch, and the windows come in a shuffled order without replacement. Sample g
of a run (g counts over all steps and processes) lies in epoch g // windows at place g % windows.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from command_line import UserError

BLOCK = 4096  # samples whose places are computed together: the cost of a few vector operations is spread over them
ROUNDS = 4
MASK64 = (1 << 64) - 1


@dataclass
class BatchArguments:
    tokens_per_step: int = field(
        default=32768, metadata={"help": "Tokens of the global batch: all processes and accumulation steps together."}
    )
    per_device_train_batch_size: str = field(
        default="auto",
        metadata={"help": "Sequences a process computes at once (micro-batch): a number, or auto by free memory."},
    )


@dataclass(frozen=True)
class BatchPlan:
    """tokens_per_step = context * micro_batch * accumulation * processes."""

    context: int
    micro_batch: int
    accumulation: int
    processes: int

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.accumulation * self.processes


def plan_batches(
    arguments: BatchArguments, context: int, processes: int, largest_micro_batch: int
) -> tuple[BatchPlan | None, list[str]]:
    """The split of the global batch, or the problems that forbid it. `auto` takes the largest micro-batch that divides
    the batch and is at most `largest_micro_batch`."""
    micro = arguments.per_device_train_batch_size
    if micro != "auto" and not (micro.isdecimal() and int(micro) > 0):
        return None, [f"per_device_train_batch_size is {micro!r}; it must be a positive whole number or auto."]
    tokens = arguments.tokens_per_step
    unit = context * processes * (1 if micro == "auto" else int(micro))
    if tokens < 1 or tokens % unit:
        nearest = sorted({max(1, tokens // unit) * unit, (tokens // unit + 1) * unit})
        factors = f"context {context} x {processes} process{'es' * (processes > 1)}"
        factors += "" if micro == "auto" else f" x micro-batch {micro}"
        names = " or ".join(str(value) for value in nearest)
        return None, [f"tokens_per_step {tokens} is not a multiple of {unit} ({factors}); the nearest are {names}."]
    sequences = tokens // (context * processes)  # of one process
    if micro == "auto":
        micro = max(size for size in range(1, min(sequences, max(1, largest_micro_batch)) + 1) if sequences % size == 0)
    return BatchPlan(context, int(micro), sequences // int(micro), processes), []


def largest_micro_batch(config, free_bytes: int, trained_bytes: int, bytes_per_value: int) -> int:
    """Sequences that should fit beside weights, gradients and optimizer (`trained_bytes`); an estimate, on the safe side.

    A block keeps about 18 values a token and unit of width for its backward pass (attention without its matrix); the
    head keeps its logits once in the compute precision and twice in fp32.
    """
    kept = config.n_layer * config.n_embd * 18 * bytes_per_value + config.vocab_size * (bytes_per_value + 8)
    return max(1, int(0.8 * (free_bytes - trained_bytes) // (kept * config.n_positions)))


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
        epochs, places = np.divmod(samples, np.uint64(self.windows))
        starts = np.empty(len(samples), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            key = mix(self.seed, int(epoch))
            slack = self.n_tokens - 1 - self.windows * self.context  # tokens the windows can move by
            offset = key % (min(self.context - 1, slack) + 1)
            starts[inside] = offset + permute(places[inside], self.windows, key).astype(np.int64) * self.context
        return starts


def permute(places: np.ndarray, n: int, key: int) -> np.ndarray:
    """A pseudo-random permutation of 0 .. n-1, looked up at `places`, (k,) uint64, in O(k) time and memory.

    A balanced Feistel network (Luby and Rackoff 1988) shuffles the smallest square power of two that holds n; what
    falls beyond n is shuffled on until it does not (cycle walking: Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, r)) for r in range(ROUNDS)]

    def shuffle(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & low
        for round_key in keys:
            left, right = right, left ^ (_scrambled(right ^ round_key) & low)
        return (left << half) | right

    out = shuffle(places)
    while len(beyond := np.flatnonzero(out >= n)):
        out[beyond] = shuffle(out[beyond])
    return out


def mix(a: int, b: int) -> int:
    """64 bits that depend on all bits of both."""
    return int(_scrambled(np.array([(a * 0x9E3779B97F4A7C15 + b + 1) & MASK64], dtype=np.uint64))[0])


def _scrambled(values: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea and Flood 2014), on uint64 that wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TrainBatches:
    """The micro-batches of one process."""

    def __init__(self, tokens: np.ndarray, order: WindowOrder, plan: BatchPlan, rank: int, device: torch.device):
        self.windows = sliding_window_view(tokens, plan.context + 1)  # (n - context, context + 1), a view
        self.order = order
        self.plan = plan
        self.rank = rank
        self.device = device

    def __call__(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, (micro_batch, context) int64 each, on the device."""
        plan = self.plan
        first = step * plan.sequences + (micro_step * plan.processes + self.rank) * plan.micro_batch
        rows = self.windows[self.order.starts(first, plan.micro_batch)].astype(np.int64)  # (B, T + 1)
        return split_windows(torch.from_numpy(rows), self.device)


def split_windows(windows: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T + 1) on the host -> inputs and targets, (B, T) each, on the device, without waiting for it."""
    if device.type == "cuda":
        windows = windows.pin_memory()
    windows = windows.to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
