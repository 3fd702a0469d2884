"""Everything that is decided before the first step: model, batches, length. All problems are found here, together."""

from dataclasses import dataclass

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import SPLITS, TokenStore
from training.batches import BatchPlan, WindowOrder, largest_micro_batch, plan_batches
from training.config import TrainConfig
from training.data import Placement, bytes_of, choose_placement, processes_of_this_machine
from training.length import steps_of
from training.model import model_config
from training.sharding import bytes_of_one

BYTES_PER_PARAMETER = 16  # fp32 weight and gradient, and AdamW's two moments


@dataclass(frozen=True)
class Plan:
    model: GPT2ScratchConfig
    batches: BatchPlan
    order: WindowOrder
    max_steps: int
    placement: Placement

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
    config: TrainConfig, store: TokenStore, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator, sharded: bool
) -> Plan:
    """`sharded`: each process holds a share of the model only.

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
    attention = config.device.attn_implementation
    if config.batch.mask_documents and attention.startswith("flash_attention"):
        problems.append(
            f"mask_documents needs attn_implementation sdpa, eager or flex_attention: {attention}, as Transformers calls "
            f"it, would see documents only in a batch of one row."
        )
    placement = batches = order = steps = None
    try:
        local = processes_of_this_machine(accelerator)
        placement = choose_placement(config.data.data_placement, bytes_of(store, *SPLITS), accelerator.device, local)
    except UserError as error:
        problems.append(str(error))
    if model is not None:
        largest = _largest_micro_batch(model, placement.reserved if placement is not None else 0, accelerator, sharded)
        batches, batch_problems = plan_batches(config.batch, model.n_positions, accelerator.num_processes, largest)
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
    return Plan(model, batches, order, steps, placement)


def _largest_micro_batch(model: GPT2ScratchConfig, reserved: int, accelerator: Accelerator, sharded: bool) -> int:
    """Sequences that fit every process, beside `reserved` bytes of tokens."""
    if accelerator.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(accelerator.device)
    else:
        free = psutil.virtual_memory().available // processes_of_this_machine(accelerator)
    width, inner = model.n_embd, model.n_inner or 4 * model.n_embd
    blocks = model.n_layer * (4 * width**2 + 2 * width * inner)
    embeddings = (model.vocab_size * (1 if model.tie_word_embeddings else 2) + model.n_positions) * width
    bytes_per_value = 4 if accelerator.mixed_precision == "no" else 2
    trained_bytes = BYTES_PER_PARAMETER * (blocks + embeddings)
    if sharded:
        trained_bytes = bytes_of_one(trained_bytes, blocks + embeddings, accelerator.num_processes)
    largest = largest_micro_batch(model, free - reserved, trained_bytes, bytes_per_value)
    return int(accelerator.gather(torch.tensor([largest], device=accelerator.device)).min())
