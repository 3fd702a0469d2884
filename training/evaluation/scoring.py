"""Loss over a split and its standard error, computed in windows of one context by all processes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from common.errors import counted
from common.limits import free
from common.progress import track
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer.encoding import encode
from tokenizer.store.store import Split, TokenStore
from training.data.batches import BatchPlan
from training.data.run_data import place_tokens
from training.data.tokens import IGNORE_INDEX, Batch, Tokens
from training.runtime.console import printer
from training.step.loss import token_nats

ENOUGH_DOCUMENTS = 30
BLOCKS = 50  # units of a text with fewer documents


@dataclass
class EvaluationArguments:
    eval_strategy: Literal["no", "steps", "epoch"] = free(
        "steps", "When to validate and sample: every eval_steps, after each epoch, or (no) only after the last step."
    )
    eval_steps: int = free(500, "Steps between validations.", minimum=1)
    max_eval_samples: int | None = free(None, "Evenly spaced windows of one context to score. Default: all.", minimum=1)
    load_best_model_at_end: bool = free(
        False,
        "End with the saved step of the lowest validation loss as the model. --budget sets it if the text repeats.",
    )


def eval_metrics(loss: float, tokens: int, split: Split) -> dict[str, float]:
    """Return `loss` (nats per token over `tokens` targets) and metrics derived from it, by name in metrics.jsonl."""
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
    plan: BatchPlan,
    accelerator: Accelerator,
    max_eval_samples: int | None = None,
    stop: Callable[[float], object] = lambda share: None,
) -> dict[str, float] | None:
    """Score `tokens` in windows that overlap by one token, so that each token except the first is a target once.
    `loss` is the prepared `NextTokenLoss`. All processes take part and get the same metrics. `stop` is called before
    each batch with the fraction done; if it returns true (in all processes at once), scoring ends and returns None."""
    loss.eval()
    starts = eval_starts(len(tokens), plan.context, plan.micro_batch, accelerator, max_eval_samples)
    sums = torch.zeros(2, dtype=torch.float64, device=float64_device(accelerator.device))  # sums of nats and of targets
    failure = None
    for i, (inputs, targets, positions) in enumerate(eval_batches(tokens, starts, plan.context)):
        if stop(i / len(starts)):
            loss.train()
            return None
        try:
            sums[0] += loss(inputs, targets, 1, positions).to(sums.device)
        except BackendCompilerFailed as error:  # for example because a stop request has ended the compiler
            failure = error.inner_exception
            with torch.compiler.set_stance("force_eager"):
                sums[0] += loss(inputs, targets, 1, positions).to(sums.device)
        sums[1] += (targets != IGNORE_INDEX).sum().to(sums.device)
    loss.train()
    if failure is not None:
        printer(accelerator)(f"WARNING: This validation was not compiled ({failure!r:.300}).")
    nats, n_targets = accelerator.reduce(sums, reduction="sum").tolist()
    return eval_metrics(nats / n_targets, int(n_targets), split)


@torch.no_grad()
def score_split(
    model: GPT2ScratchForCausalLM, store: TokenStore, tokens: Tokens, micro_batch: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Score the whole validation split like `evaluate`. Return its metrics with their standard errors."""
    context = min(model.config.n_positions, max(1, len(tokens) - 1))
    edges, unit_name = units(store.offsets("val"))
    nats = np.zeros(len(edges) - 1)
    starts = eval_starts(len(tokens), context, micro_batch, accelerator)
    rows = track(starts, "scoring", accelerator.is_main_process)
    for begin, (inputs, targets, positions) in zip(rows, eval_batches(tokens, starts, context), strict=True):
        with accelerator.autocast():
            outputs = model.transformer(input_ids=inputs, position_ids=positions, use_cache=False)
            costs = token_nats(outputs.last_hidden_state.flatten(0, 1), model.lm_head.weight, targets.flatten())
        is_target = (targets != IGNORE_INDEX).cpu().numpy()
        places = (begin[:, None] + np.arange(1, context + 1))[is_target]  # positions in the split
        unit = np.searchsorted(edges, places, side="right") - 1
        np.add.at(nats, unit, costs.view(targets.shape).cpu().double().numpy()[is_target])
    nats = sum_of_processes(nats, accelerator)
    targets_of_units = np.diff(edges)
    targets_of_units[0] -= 1  # the first token is not a target
    texts = encode.token_bytes(store.load_tokenizer().backend_tokenizer)
    lengths = np.array(list(map(len, texts)), dtype=np.int64)
    split = store.memory_map("val")
    bytes_of_units = np.array([lengths[split[a:b]].sum() for a, b in pairwise(edges)])
    loss, stderr = ratio(nats, targets_of_units)
    per_byte, per_byte_stderr = ratio(nats, bytes_of_units)
    metrics = eval_metrics(loss, len(tokens) - 1, store.metadata.val)
    return metrics | {
        "eval_loss_stderr": stderr,
        "eval_perplexity_stderr": metrics["eval_perplexity"] * stderr,
        "eval_bits_per_byte_stderr": metrics["eval_bits_per_byte"] * per_byte_stderr / per_byte,
        "eval_stderr_over": unit_name,
    }


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """Return the ratio of the two sums, over (units,) each, and its standard error.
    The units are assumed independent. The standard error is a linearized ratio estimate (Cochran 1977, 6.4)."""
    total, n = denominators.sum(), len(numerators)
    value = numerators.sum() / total
    deviations = numerators - value * denominators
    variance = n / (n - 1) * (deviations**2).sum() if n > 1 else math.nan
    return float(value), math.sqrt(variance) / float(total)


def units(starts: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the boundaries of the units of the standard error, (units + 1,) int64, and a description of the units.
    `starts`: the starts of the documents, and the end. Units are documents, because tokens within a document are
    correlated. If there are too few documents to estimate their variance, units are blocks of equal length."""
    documents, end = len(starts) - 1, int(starts[-1])
    if documents >= ENOUGH_DOCUMENTS:
        return starts, counted(documents, "document")
    blocks = min(BLOCKS, end)
    return np.arange(blocks + 1, dtype=np.int64) * end // blocks, f"{blocks} blocks of the text"


def eval_batches(tokens: Tokens, starts: np.ndarray, context: int) -> Iterator[Batch]:
    """Yield the batch of windows at each row of `starts` (batches, micro_batch)."""
    for i, row in enumerate(starts):
        if tokens.file is not None:
            tokens.announce(starts[i : i + 2].flatten(), context + 1)
        yield tokens.batch(row, context)


def eval_starts(
    n_tokens: int, context: int, micro_batch: int, accelerator: Accelerator, max_samples: int | None = None
) -> np.ndarray:
    """Return the starts of the windows of this process, (batches, micro_batch) int64.
    Every process gets the same number of equal batches. Padding windows start at the end of the text, without
    targets."""
    starts = _window_starts(n_tokens, context, max_samples)
    per_round = accelerator.num_processes * micro_batch
    all_starts = np.pad(starts, (0, -len(starts) % per_round), constant_values=n_tokens)
    return all_starts.reshape(-1, accelerator.num_processes, micro_batch)[:, accelerator.process_index]


def _window_starts(n_tokens: int, context: int, limit: int | None) -> np.ndarray:
    """Return the starts of all windows, or of `limit` evenly spaced ones, (windows,) int64."""
    starts = np.arange(0, n_tokens - 1, context, dtype=np.int64)
    if limit is None or limit >= len(starts):
        return starts
    return starts[np.linspace(0, len(starts) - 1, limit).astype(np.int64)]


def eval_windows(store: TokenStore, context: int, number: int, mask_documents: bool) -> dict[str, torch.Tensor]:
    """Return the inputs and targets of the windows that a validation of `number` windows scores, (N, context) each.
    With masked documents, return positions too."""
    tokens = place_tokens(store, "val", "mmap", torch.device("cpu"), mask_documents)
    context = min(context, max(1, len(tokens) - 1))
    batch = tokens.batch(_window_starts(len(tokens), context, number), context)
    return {name: values for name, values in batch._asdict().items() if values is not None}


def sum_of_processes(values: np.ndarray, accelerator: Accelerator) -> np.ndarray:
    """Return the sum of fp64 `values` over all processes."""
    tensor = torch.from_numpy(values).to(float64_device(accelerator.device))
    return accelerator.reduce(tensor, reduction="sum").cpu().numpy()


def float64_device(device: torch.device) -> torch.device:
    """Return the device for fp64 sums, which is the CPU for Apple GPUs, because they lack fp64."""
    return torch.device("cpu") if device.type == "mps" else device
