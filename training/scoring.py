"""The loss over a split: in windows of the context, each token a target once, shared among the processes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from limits import setting
from tokenizer.store import Split, TokenStore
from training.data import place_tokens
from training.tokens import IGNORED, Batch, Tokens


@dataclass
class EvaluationArguments:
    eval_strategy: Literal["no", "steps", "epoch"] = setting(
        "steps",
        "When to validate and sample: every eval_steps, at each epoch's end, or (no) only at the very end.",
        resume="free",
    )
    eval_steps: int = setting(500, "Steps between validations.", minimum=1, resume="free")
    max_eval_samples: int | None = setting(
        None,
        "Score only this many windows of one context, evenly spread; all where left out.",
        minimum=1,
        resume="free",
    )


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats a token
    bits_per_byte: float  # comparable across tokenizers
    tokens: int  # scored

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def metrics(self) -> dict[str, float]:
        return {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_bits_per_byte": self.bits_per_byte,
            "eval_tokens": self.tokens,
        }


@torch.no_grad()
def evaluate(
    loss: nn.Module,
    tokens: Tokens,
    split: Split,
    context: int,
    micro_batch: int,
    accelerator: Accelerator,
    max_eval_samples: int | None = None,
    stop: Callable[[float], object] = lambda share: None,
) -> Evaluation | None:
    """Scores `tokens` in windows that overlap by one, so that each token but the first is a target once.

    `loss` is the prepared `NextTokenLoss`; all processes take part and get the same result. `stop` is asked before each
    batch, and told what share is done; where it says so (to all processes at once), nothing is scored.
    """
    loss.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=float64_device(accelerator.device))  # nats, targets
    where = (accelerator.process_index, accelerator.num_processes, max_eval_samples)
    number = len(eval_starts(len(tokens), context, micro_batch, *where))
    for done, (inputs, targets, positions) in enumerate(eval_batches(tokens, context, micro_batch, *where)):
        if stop(done / number):
            loss.train()
            return None
        sums[0] += loss(inputs, targets, 1, positions).to(sums.device)
        sums[1] += (targets != IGNORED).sum().to(sums.device)
    loss.train()
    nats, scored = accelerator.reduce(sums, reduction="sum").tolist()
    mean = nats / scored
    return Evaluation(mean, mean / math.log(2) * split.tokens / split.bytes, int(scored))


def eval_batches(
    tokens: Tokens, context: int, micro_batch: int, rank: int, processes: int, max_samples: int | None
) -> Iterator[Batch]:
    """This process's batches. Every process yields as many, of the same shape, if need be of ignored targets."""
    mine = eval_starts(len(tokens), context, micro_batch, rank, processes, max_samples)
    for now in range(len(mine)):
        if tokens.file is not None:
            tokens.file.announce(mine[now : now + 2].flatten(), context + 1)
        yield tokens.batch(mine[now], context)


def eval_starts(
    n_tokens: int, context: int, micro_batch: int, rank: int, processes: int, max_samples: int | None
) -> np.ndarray:
    """(batches, micro_batch) int64: where the windows of this process begin."""
    count = -(-(n_tokens - 1) // context)
    starts = np.arange(count, dtype=np.int64) * context
    if max_samples is not None and max_samples < count:
        starts = starts[np.linspace(0, count - 1, max_samples).astype(np.int64)]
    rounds = -(-len(starts) // (micro_batch * processes))
    padded = np.full(rounds * processes * micro_batch, n_tokens, dtype=np.int64)  # beyond the end: nothing to score
    padded[: len(starts)] = starts
    return padded.reshape(rounds, processes, micro_batch)[:, rank]


def eval_windows(store: TokenStore, context: int, number: int, mask_documents: bool) -> dict[str, torch.Tensor]:
    """The windows that a validation with `number` of them scores: inputs, targets and, where documents are masked,
    positions, (N, context) each."""
    tokens = place_tokens(store, "val", "mmap", torch.device("cpu"), mask_documents)
    batches = list(eval_batches(tokens, context, 1, 0, 1, number))
    names = ("inputs", "targets", "positions") if mask_documents else ("inputs", "targets")
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}


def float64_device(device: torch.device) -> torch.device:
    """Return where to add up in fp64: Apple's GPUs cannot."""
    return torch.device("cpu") if device.type == "mps" else device
