"""Loss over a split, in windows of the context, shared among the processes."""

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


def eval_metrics(loss: float, tokens: int, split: Split) -> dict[str, float]:
    """Return `loss`, nats per token of `tokens` scored, and what follows from it, by the names of metrics.jsonl."""
    return {
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "eval_bits_per_byte": loss / math.log(2) * split.tokens / split.bytes,  # comparable across tokenizers
        "eval_tokens": tokens,
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
) -> dict[str, float] | None:
    """Score `tokens` in windows that overlap by one, so that each token but the first is a target once.

    `loss` is the prepared `NextTokenLoss`; all processes take part and get the same metrics. `stop` is called before each
    batch with the share that is done; where it returns true (to all processes at once), nothing is scored.
    """
    loss.eval()
    starts = eval_starts(len(tokens), context, micro_batch, accelerator, max_eval_samples)
    sums = torch.zeros(2, dtype=torch.float64, device=float64_device(accelerator.device))  # nats, targets
    for done, (inputs, targets, positions) in enumerate(eval_batches(tokens, starts, context)):
        if stop(done / len(starts)):
            loss.train()
            return None
        sums[0] += loss(inputs, targets, 1, positions).to(sums.device)
        sums[1] += (targets != IGNORED).sum().to(sums.device)
    loss.train()
    nats, scored = accelerator.reduce(sums, reduction="sum").tolist()
    return eval_metrics(nats / scored, int(scored), split)


def eval_batches(tokens: Tokens, starts: np.ndarray, context: int) -> Iterator[Batch]:
    """Yield the batch of windows at each row of `starts` (batches, micro_batch)."""
    for now, row in enumerate(starts):
        if tokens.file is not None:
            tokens.file.announce(starts[now : now + 2].flatten(), context + 1)
        yield tokens.batch(row, context)


def eval_starts(
    n_tokens: int, context: int, micro_batch: int, accelerator: Accelerator, max_samples: int | None = None
) -> np.ndarray:
    """(batches, micro_batch) int64: where the windows of this process begin.

    Every process has as many, of the same shape, if need be beyond the end, where all targets are ignored.
    """
    starts = _window_starts(n_tokens, context, max_samples)
    per_round = accelerator.num_processes * micro_batch
    padded = np.pad(starts, (0, -len(starts) % per_round), constant_values=n_tokens)
    return padded.reshape(-1, accelerator.num_processes, micro_batch)[:, accelerator.process_index]


def _window_starts(n_tokens: int, context: int, most: int | None) -> np.ndarray:
    """(windows,) int64: all of them, or `most`, evenly spread."""
    starts = np.arange(0, n_tokens - 1, context, dtype=np.int64)
    if most is None or most >= len(starts):
        return starts
    return starts[np.linspace(0, len(starts) - 1, most).astype(np.int64)]


def eval_windows(store: TokenStore, context: int, number: int, mask_documents: bool) -> dict[str, torch.Tensor]:
    """Return the windows that a validation with `number` of them scores: inputs, targets and, where documents are masked,
    positions, (N, context) each."""
    tokens = place_tokens(store, "val", "mmap", torch.device("cpu"), mask_documents)
    batch = tokens.batch(_window_starts(len(tokens), context, number), context)
    names = ("inputs", "targets", "positions") if mask_documents else ("inputs", "targets")
    return {name: getattr(batch, name) for name in names}


def sum_of_processes(values: np.ndarray, accelerator: Accelerator) -> np.ndarray:
    """Add up fp64 `values` over all processes."""
    tensor = torch.from_numpy(values).to(float64_device(accelerator.device))
    return accelerator.reduce(tensor, reduction="sum").cpu().numpy()


def float64_device(device: torch.device) -> torch.device:
    """Return where to add up in fp64: Apple's GPUs cannot."""
    return torch.device("cpu") if device.type == "mps" else device
