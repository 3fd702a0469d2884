"""Validation: loss, perplexity and bits per byte over the held-out text.

python -m training.evaluate runs/x                                  # the whole validation split of the run's store
python -m training.evaluate runs/x/checkpoints/step_00001000 --data data/other
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging as transformers_logging

from command_line import FlagParser, run
from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer.store import Split, TokenStore
from training.data import bytes_of, choose_placement, open_store, place_tokens, processes_of_this_machine
from training.loss import NextTokenLoss
from training.run_folder import CONFIG_FILE, find_model, run_of
from training.sharding import keep_accelerate_from_sharding
from training.tokens import IGNORED, Batch, Tokens


@dataclass
class EvaluationArguments:
    eval_strategy: Literal["no", "steps", "epoch"] = field(
        default="steps",
        metadata={
            "help": "When to validate and sample: every eval_steps, at each epoch's end, or (no) only at the very end."
        },
    )
    eval_steps: int = field(default=500, metadata={"help": "Steps between validations."})
    max_eval_samples: int | None = field(
        default=None,
        metadata={"help": "Score only this many windows of one context, evenly spread; all where left out."},
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
    stop: Callable[[], object] = lambda: None,
) -> Evaluation | None:
    """Scores `tokens` in windows that overlap by one, so that each token but the first is a target once.

    `loss` is the prepared `NextTokenLoss`; all processes take part and get the same result. `stop` is asked before each
    batch; where it says so (to all processes at once), nothing is scored.
    """
    loss.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=_float64_device(accelerator.device))  # nats, targets
    for inputs, targets, positions in eval_batches(
        tokens, context, micro_batch, accelerator.process_index, accelerator.num_processes, max_eval_samples
    ):
        if stop():
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
    count = -(-(len(tokens) - 1) // context)
    starts = np.arange(count, dtype=np.int64) * context
    if max_samples is not None and max_samples < count:
        starts = starts[np.linspace(0, count - 1, max_samples).astype(np.int64)]
    rounds = -(-len(starts) // (micro_batch * processes))
    padded = np.full(rounds * processes * micro_batch, len(tokens), dtype=np.int64)  # beyond the end: nothing to score
    padded[: len(starts)] = starts
    mine = padded.reshape(rounds, processes, micro_batch)[:, rank]
    for now in range(rounds):
        if tokens.file is not None:
            tokens.file.announce(mine[now : now + 2].flatten(), context + 1)
        yield tokens.batch(mine[now], context)


def eval_windows(store: TokenStore, context: int, number: int, mask_documents: bool) -> dict[str, torch.Tensor]:
    """The windows that a validation with `number` of them scores: inputs, targets and, where documents are masked,
    positions, (N, context) each."""
    tokens = place_tokens(store, "val", "mmap", torch.device("cpu"), mask_documents)
    batches = list(eval_batches(tokens, context, 1, 0, 1, number))
    names = ("inputs", "targets", "positions") if mask_documents else ("inputs", "targets")
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}


def store_and_masking(model: str, data: str | None) -> tuple[TokenStore, bool]:
    """The store to score, and whether attention keeps to documents, as the run says that `model` is of."""
    from training.config import read_config  # composes this module's arguments too: above, it would be a circle

    try:
        run_folder = run_of(Path(model))
    except UserError:
        if data is None:
            raise
        return TokenStore(data), False  # a model without its run
    config = read_config(["--config", str(run_folder / CONFIG_FILE)])
    if data is not None:
        return TokenStore(data), config.batch.mask_documents
    say = partial(print, file=sys.stderr)
    return open_store(config.recipe, say), config.batch.mask_documents


def _float64_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device


@dataclass
class EvaluateDoor:
    model: str | None = field(
        default=None, metadata={"help": "A run folder or a model folder; may be given without flag."}
    )
    data: str | None = field(default=None, metadata={"help": "Token store to score; the run's own where left out."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Sequences scored at once."})


def main(arguments: list[str]) -> None:
    (door,), _ = FlagParser((EvaluateDoor,), __doc__.splitlines()[0], positional="model").parse(arguments)
    if door.model is None:
        raise UserError("Name a run: python -m training.evaluate runs/x")
    if door.per_device_eval_batch_size < 1:
        raise UserError(f"per_device_eval_batch_size is {door.per_device_eval_batch_size}; it must be at least 1.")
    folder = find_model(door.model)
    store, mask_documents = store_and_masking(door.model, door.data)
    model = GPT2ScratchForCausalLM.from_pretrained(folder, use_safetensors=True)
    if model.config.vocab_size != store.metadata.vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {model.config.vocab_size} tokens, {store.folder} one of "
            f"{store.metadata.vocab_size}; score it on a store made with its own tokenizer."
        )
    keep_accelerate_from_sharding()  # whatever the launcher was told: a model is scored whole
    accelerator = Accelerator()
    local = processes_of_this_machine(accelerator)
    placement = choose_placement("auto", bytes_of(store, "val"), accelerator.device, local)
    result = evaluate(
        accelerator.prepare(NextTokenLoss(model)),
        place_tokens(store, "val", placement.where, accelerator.device, mask_documents),
        store.metadata.val,
        model.config.n_positions,
        door.per_device_eval_batch_size,
        accelerator,
    )
    accelerator.print(json.dumps({"model": str(folder), "data": str(store.folder)} | result.metrics()))


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
