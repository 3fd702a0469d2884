"""Everything that is decided before the first step: model, batches, length. All problems are found here, together."""

from dataclasses import dataclass

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from command_line import UserError
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import TokenStore
from training.batches import BatchPlan, WindowOrder, largest_micro_batch, plan_batches
from training.config import TrainConfig
from training.length import steps_of
from training.model import model_config

BYTES_PER_PARAMETER = 16  # fp32 weight and gradient, and AdamW's two moments


@dataclass(frozen=True)
class Plan:
    model: GPT2ScratchConfig
    batches: BatchPlan
    order: WindowOrder
    max_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.batches.sequences * self.batches.context

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step * self.batches.sequences / self.order.windows

    def describe_model(self) -> str:
        model = self.model
        shape = f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, context {model.n_positions}"
        return f"{shape}, vocabulary {model.vocab_size:,}"

    def describe_data(self) -> str:
        return f"{self.order.n_tokens:,} tokens, {self.order.windows:,} windows an epoch"

    def describe_length(self) -> str:
        batch = self.batches
        split = f"{batch.context} tokens x {batch.micro_batch} sequences x {batch.accumulation} accumulated"
        total = self.max_steps * self.tokens_per_step
        return (
            f"{self.max_steps:,} steps of {self.tokens_per_step:,} tokens ({split} x {batch.processes} process{'es' * (batch.processes > 1)}): "
            f"{total / 1e6:,.1f}M tokens, {self.epoch(self.max_steps):.2f} epochs"
        )

    def is_due(self, strategy: str, every: int, step: int) -> bool:
        """Whether what happens by `strategy` (`steps`, `epoch`, `no`) happens after `step` steps. The last is always due."""
        if step == self.max_steps:
            return True
        if strategy == "epoch":
            return int(self.epoch(step)) > int(self.epoch(step - 1))
        return strategy == "steps" and step % every == 0


def make_plan(
    config: TrainConfig, store: TokenStore, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> Plan:
    """
    Raises:
        UserError: everything about the configuration that cannot be, one problem a line.
    """
    problems = config.problems()
    vocab_size = store.metadata.vocab_size
    if config.vocabulary.vocab_size not in (None, vocab_size) and not config.text:
        problems.append(
            f"vocab_size is {config.vocabulary.vocab_size}, but the store {store.folder} has {vocab_size} tokens; "
            f"leave vocab_size out or use a store of that size."
        )
    model, model_problems = model_config(config.model, vocab_size, tokenizer)
    problems += model_problems
    batches = order = steps = None
    if model is not None:
        largest = accelerator.gather(
            torch.tensor([_largest_micro_batch(model, accelerator)], device=accelerator.device)
        ).min()
        batches, batch_problems = plan_batches(config.batch, model.n_positions, accelerator.num_processes, int(largest))
        problems += batch_problems
        try:
            order = WindowOrder(store.metadata.train.tokens, model.n_positions, config.seed)
        except UserError as error:
            problems.append(str(error))
    if batches is not None and order is not None:
        steps, length_problems = steps_of(config.length, batches, order.windows)
        problems += length_problems
    if problems:
        raise UserError("\n".join(problems))
    return Plan(model, batches, order, steps)


def _largest_micro_batch(model: GPT2ScratchConfig, accelerator: Accelerator) -> int:
    if accelerator.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(accelerator.device)
    else:
        free = psutil.virtual_memory().available // max(1, accelerator.num_processes)
    width, inner = model.n_embd, model.n_inner or 4 * model.n_embd
    blocks = model.n_layer * (4 * width**2 + 2 * width * inner)
    embeddings = (model.vocab_size * (1 if model.tie_word_embeddings else 2) + model.n_positions) * width
    bytes_per_value = 4 if accelerator.mixed_precision == "no" else 2
    return largest_micro_batch(model, free, BYTES_PER_PARAMETER * (blocks + embeddings), bytes_per_value)
