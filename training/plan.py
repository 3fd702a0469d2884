"""Everything that is decided before the first step: model, batches, length. All problems are found here, together."""

import os
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch._inductor
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from errors import UserError, counted
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.corpus import Corpus
from tokenizer.store import SPLITS, TokenStore
from training.batches import BatchPlan, WindowOrder, plan_batches
from training.compatibility import NOT_THE_RUN
from training.config import ABOUT_TEXT, TrainConfig
from training.data import Placement, bytes_of, choose_placement, processes_of_this_machine
from training.device import Setup, decide, without_kernels
from training.guard import restart
from training.length import steps_of
from training.memory import Memory
from training.model import ModelArguments, model_config
from training.planning.rentals import RENTALS
from training.position import Position

PROGRAM_GROWS = 120_000_000  # bytes: of code that is loaded, and compiled, from the first step on


@dataclass(frozen=True)
class Plan:
    model: GPT2ScratchConfig
    batches: BatchPlan
    order: WindowOrder
    max_steps: int
    placement: Placement
    memory: Memory
    available: int  # bytes for each process, beside what lies there already
    settings: dict[str, Any]  # by which a checkpoint knows its run
    position: Position  # that the run goes on from

    @property
    def tokens_per_step(self) -> int:
        return self.batches.sequences * self.batches.context

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return self.after(step).sample / self.order.windows

    def after(self, step: int) -> Position:
        """Where the run stands after `step` steps."""
        return self.position.after(step, self.batches.sequences, self.batches.context)

    def going_on(self, position: Position, settings: dict[str, Any]) -> "Plan":
        """The plan of a run that goes on from there. Other data than before are read from their beginning."""
        if settings.get("data") != self.settings["data"]:
            position = replace(position, sample=0, passed_over=())
        passed_over = sorted({*position.passed_over, *self.position.passed_over})
        return replace(self, position=replace(position, passed_over=tuple(passed_over)))

    def describe_model(self) -> str:
        model = self.model
        layers, heads = counted(model.n_layer, "layer"), counted(model.n_head, "head")
        shape = f"{layers}, {heads}, width {model.n_embd}, context {model.n_positions}"
        return f"{shape}, vocabulary {model.vocab_size:,}"

    def describe_variant(self) -> str:
        """Return what shape and size do not show: `untied head, exact GELU, dropout 0.1`."""
        model = self.model
        head = "tied head" if model.tie_word_embeddings else "untied head"
        gelu = {"gelu": "exact GELU", "gelu_new": "tanh GELU"}.get(model.activation_function, model.activation_function)
        rates = {"embeddings": model.embd_pdrop, "attention": model.attn_pdrop, "blocks": model.resid_pdrop}
        if len(set(rates.values())) == 1:
            return f"{head}, {gelu}, dropout {model.embd_pdrop:g}"
        return f"{head}, {gelu}, dropout " + ", ".join(f"{rate:g} ({where})" for where, rate in rates.items())

    def describe_data(self) -> str:
        return f"{self.order.n_tokens:,} tokens, {counted(self.order.windows, 'window')} per epoch"

    def describe_length(self) -> str:
        batch = self.batches
        split = f"{batch.context} tokens x {counted(batch.micro_batch, 'sequence')} x {batch.accumulation} accumulated"
        total = self.max_steps * self.tokens_per_step
        return (
            f"{counted(self.max_steps, 'step')} of {self.tokens_per_step:,} tokens "
            f"({split} x {counted(batch.processes, 'process', 'processes')}): {total / 1e6:,.1f}M tokens, {self.epoch(self.max_steps):.2f} epochs"
        )

    def is_due(self, strategy: str, every: int, step: int) -> bool:
        """Whether what happens by `strategy` (`steps`, `epoch`, `no`) happens after `step` steps. The last is always due."""
        if step == self.max_steps:
            return True
        if strategy == "epoch":
            return int(self.epoch(step)) > int(self.epoch(step - 1))
        return strategy == "steps" and step % every == 0


def setup_of(config: TrainConfig) -> Setup:
    """Device, precision and compilation: those of this machine, or of the device that is planned for.

    Raises:
        UserError: see `decide`; or the device that is planned for is unknown, or lacks the precision.
    """
    if config.cost.plan_device is None:
        return decide(config.device, config.model.n_positions, config.batch.mask_documents)
    if config.cost.plan_device not in RENTALS:
        raise UserError("\n".join(config.cost.problems()))
    asked = config.device.mixed_precision
    rental = RENTALS[config.cost.plan_device]
    best = "fp16" if rental.datasheet in ("T4", "V100") else "bf16"
    if (asked, best) == ("bf16", "fp16"):
        raise UserError(f"mixed_precision is bf16, but a {rental.name} has none; use fp16 or auto.")
    notes = ()
    if rental.too_old is not None:
        notes = (without_kernels(f"the {rental.name}", rental.too_old, "PyTorch's build for CUDA 13"),)
    precision, device = best if asked == "auto" else asked, config.device
    compiles = device.torch_compile != "false"
    return Setup(precision, compiles, "sdpa", notes, torch_compile_mode=device.torch_compile_mode)


def check(config: TrainConfig) -> None:
    """Raise a `UserError` with all that is known to be wrong before text is tokenized, one problem a line."""
    problems = config.recipe.problems() if config.text else []
    try:
        setup_of(config)
    except UserError as error:
        problems.append(str(error))
    problems += config.problems()
    context, vocab_size = config.model.n_positions, config.vocabulary.vocab_size or 1
    try:
        if config.text:
            Corpus([config.data.data], config.corpus)
        else:
            store = TokenStore(config.data.data)
            vocab_size = store.metadata.vocab_size
            problems += _vocabulary_problems(config, store)
            WindowOrder(store.metadata.train.tokens, context, config.seed)
    except UserError as error:
        problems.append(str(error))
    problems += model_config(config.model, vocab_size)[1]
    if context > 0:
        problems += plan_batches(config.batch, context, int(os.environ.get("WORLD_SIZE", 1)), 1)[1]
    attention = config.device.attn_implementation
    if config.batch.mask_documents and attention.startswith("flash_attention"):
        problems.append(
            f"mask_documents needs attn_implementation sdpa, eager or flex_attention: {attention}, as Transformers calls "
            f"it, would see documents only in a batch of one row."
        )
    if problems:
        raise UserError("\n".join(dict.fromkeys(line for problem in problems for line in problem.splitlines())))


def _vocabulary_problems(config: TrainConfig, store: TokenStore) -> list[str]:
    vocab_size = store.metadata.vocab_size
    if "vocab_size" not in config.flags or config.overridden_vocab_size(vocab_size) is None:
        return []
    return [
        f"vocab_size is {config.vocabulary.vocab_size}, but the store {store.folder} has {vocab_size} tokens; "
        f"leave --vocab_size out."
    ]


def make_plan(
    config: TrainConfig,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    setup: Setup,
) -> Plan:
    """For a configuration that `check` accepts. After a restart, this heeds what the process before this one has learned
    (see restart.py).

    Raises:
        UserError: what is wrong with data and memory, one problem a line.
    """
    problems = _vocabulary_problems(config, store)
    model, model_problems = model_config(config.model, store.metadata.vocab_size, tokenizer)
    problems += model_problems
    placement = batches = order = memory = None
    restarted = restart.restarted()
    try:
        local = processes_of_this_machine(accelerator)
        placement = choose_placement(config.data.data_placement, bytes_of(store, *SPLITS), accelerator.device, local)
    except UserError as error:
        problems.append(str(error))
    reserved = placement.reserved if placement is not None else 0
    available = _available(accelerator, config.cost.plan_device, reserved)
    if model is not None:
        memory = _memory(model, config, accelerator, setup)
        if memory.copies_to_host and not config.cost.plan:
            problems += _host_problems(memory, local)
        largest = memory.largest_micro_batch(available)
        if accelerator.num_processes > 1:
            largest = int(accelerator.gather(torch.tensor([largest], device=accelerator.device)).min())
        largest = min(largest, restarted.get("micro_batch", largest))
        batches, batch_problems = plan_batches(config.batch, model.n_positions, accelerator.num_processes, largest)
        problems += batch_problems
        try:
            order = WindowOrder(store.metadata.train.tokens, model.n_positions, config.seed)
        except UserError as error:
            problems.append(str(error))
    if batches is not None and not memory.copies_to_host:  # as on a CPU, where there are no such graphs
        problems += _graph_problems(setup, batches)
    if problems:
        raise UserError("\n".join(problems))
    steps = steps_of(config.length, batches, order.windows)
    position = Position(passed_over=tuple(map(tuple, restarted.get("passed_over", ()))))
    settings = _settings(config, store, steps, accelerator.mixed_precision)
    return Plan(model, batches, order, steps, placement, memory, available, settings, position)


def _host_problems(memory: Memory, processes: int) -> list[str]:
    """A model that cannot fit the machine, whatever else runs there: the system would kill the process without a word."""
    needed = sum(memory.fixed().values()) * processes
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    if needed <= there:
        return []
    return [
        f"A model of {memory.parameters:,} parameters takes {needed / 1e9:,.0f} GB with its gradients and moments, and this machine "
        f"has {there / 1e9:,.0f} GB; lower n_layer or n_embd, or use a GPU or a larger machine."
    ]


def _graph_problems(setup: Setup, batches: BatchPlan) -> list[str]:
    """CUDA graphs write every gradient to the same memory: a second micro-batch, or DDP's buckets, would spoil the first."""
    mode = setup.torch_compile_mode
    if not setup.torch_compile or mode is None or not torch._inductor.list_mode_options(mode).get("triton.cudagraphs"):
        return []
    instead = "max-autotune-no-cudagraphs" if "max" in mode else "no torch_compile_mode"
    if batches.processes > 1:
        return [
            f"torch_compile_mode {mode} uses CUDA graphs, which do not work with {batches.processes} processes; use {instead}."
        ]
    if batches.accumulation > 1:
        return [
            f"torch_compile_mode {mode} uses CUDA graphs, which would overwrite gradients that {batches.accumulation} micro-batches "
            f"add up; use {instead}, or --tokens_per_step {batches.micro_batch * batches.context}, a single micro-batch."
        ]
    return []


def _settings(config: TrainConfig, store: TokenStore, max_steps: int, mixed_precision: str) -> dict[str, Any]:
    """What a checkpoint tells of its run: all that decides about the steps to come, with every `auto` decided.

    The shape of the model is told by its config.json; what was asked about text and length, by hashes and `max_steps`.
    """
    told_elsewhere = ABOUT_TEXT | NOT_THE_RUN | {"num_train_epochs", "max_train_tokens"}
    told_elsewhere |= {name for name in vars(ModelArguments()) if not name.endswith("_pdrop")}
    settings = {name: value for name, value in config.flat().items() if name not in told_elsewhere}
    data = {"data": store.metadata.identity, "tokenizer": store.metadata.tokenizer_sha256}
    return settings | data | {"max_steps": max_steps, "mixed_precision": mixed_precision}


def _available(accelerator: Accelerator, plan_device: str | None, reserved: int) -> int:
    """Bytes that a process may take, beside `reserved` ones of tokens."""
    if plan_device in RENTALS:
        return int(RENTALS[plan_device].gigabytes * 1e9)
    if accelerator.device.type == "cuda":
        return torch.cuda.mem_get_info(accelerator.device)[0] - reserved
    return psutil.virtual_memory().available // processes_of_this_machine(accelerator) - reserved


def _memory(model: GPT2ScratchConfig, config: TrainConfig, accelerator: Accelerator, setup: Setup) -> Memory:
    on_host = accelerator.device.type != "cuda" and config.cost.plan_device is None
    return Memory(
        model,
        in_half=setup.mixed_precision != "no",
        written_out=setup.attn_implementation == "eager",
        checkpointing=config.device.gradient_checkpointing,
        sharded_by=accelerator.num_processes if setup.shards(accelerator) else 1,
        copies_to_host=on_host,
        on_gpu=not on_host,
        compiled=setup.torch_compile,
        autotunes=setup.torch_compile and "max-autotune" in (setup.torch_compile_mode or ""),
        program=psutil.Process().memory_info().rss + PROGRAM_GROWS if on_host else 0,
    )
