"""Checks and decisions before the first step: settings, device, data, plan and starting point."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from common.errors import Problems, UserError, counted
from common.machine import free_memory
from modeling_gpt2scratch.loading import TOKENIZER, load_tokenizer, own_file
from tokenizer.corpus.file_finder import globbed
from tokenizer.corpus.named_data import dataset_of, find
from tokenizer.corpus.units import Corpus
from tokenizer.store.store import SPLITS, TokenStore
from training.checkpoints.backup import Backup, earlier_run
from training.checkpoints.checkpoint import TrainState, complete_checkpoints, load_state
from training.checkpoints.loading import model_errors
from training.checkpoints.metrics import read_events
from training.checkpoints.pretrained import load_pretrained, vocabulary_problems
from training.checkpoints.run_folder import RunFolder, is_checkpoint, run_of
from training.config import TrainConfig
from training.data import run_data
from training.data.batches import START, DataPosition, WindowOrder, plan_batches
from training.evaluation.sampling import with_prompts
from training.log.speed import flops_per_token
from training.plan.compatibility import compare
from training.plan.memory import Memory
from training.plan.plan import Plan, cuda_graph_problems, host_memory_problems, steps_of
from training.plan.resume import ResumePoint, choose_checkpoint, resume_position
from training.plan.run import Run
from training.report.facts import is_reported
from training.runtime.compilation import SHORT_RUN, is_automatic, pays_off, prepare_compiler
from training.runtime.console import printer
from training.runtime.device import Setup, decide, sharding, uses_mps
from training.runtime.distributed import on_main
from training.runtime.hardware import RENTALS
from training.runtime.restart import restarted
from training.step.induction import induction_problems
from training.step.model import model_config

PROGRAM_GROWS = 120_000_000  # bytes of code that are loaded and compiled from the first step on


def setup_of(config: TrainConfig) -> Setup:
    """Decide device, precision and compilation for this machine, or for the device named by --plan_device.
    Raise a `UserError` like `decide`, and if the named device is unknown or does not support the precision."""
    if config.cost.plan_device is None:
        return decide(config.device, config.model.n_positions, config.batch.mask_documents)
    if config.cost.plan_device not in RENTALS:
        Problems(config.cost.problems()).refuse()
    device, rental = config.device, RENTALS[config.cost.plan_device]
    best = "fp16" if rental.datasheet in ("T4", "V100") else "bf16"
    precision = best if device.mixed_precision == "auto" else device.mixed_precision
    if (precision, best) == ("bf16", "fp16"):
        raise UserError(f"mixed_precision is bf16, which a {rental.name} does not support; use fp16 or auto.")
    Problems(device.problems(precision)).refuse()
    attention = "sdpa" if device.attn_implementation == "auto" else device.attn_implementation
    choices = {"mixed_precision": precision, "attn_implementation": attention}
    choices["torch_compile"] = device.torch_compile.lower() != "false"
    return Setup(sharding=sharding(), mask_documents=config.batch.mask_documents, **vars(device) | choices)


def check(config: TrainConfig) -> None:
    """Raise a `UserError` with all problems that can be found before text is tokenized, one per line."""
    problems = Problems(config.recipe.problems() if config.text else [])
    setup = problems.add_of(setup_of, config)
    problems.sentences += config.problems()
    context, vocab_size, store = config.model.n_positions, config.vocabulary.vocab_size or 1, None
    if not config.text:
        store = problems.add_of(TokenStore, config.data.data)
    elif (recorded := problems.add_of(recorded_data, config)) is None or run_data.find_cached(recorded) is None:
        problems.add_of(Corpus, [config.data.data], config.corpus)
    if store is not None:
        vocab_size = store.metadata.vocab_size
        problems.sentences += _vocabulary_problems(config, store)
        problems.add_of(WindowOrder, store.metadata.train.tokens, context, config.run.seed)
    if not config.budget.chooses or config.has_model_file:  # otherwise the budget chooses what is not given
        problems.add_of(model_config, config.model, vocab_size)
        if config.optim.induction_init:  # `make_plan` repeats this for a chosen model
            problems.sentences += induction_problems(config.model)
    if config.optim.induction_init and config.pretrained_source is not None:
        problems.add("induction_init is for new models; leave it out, or leave out init_from.")
    is_chosen = config.budget.chooses and "tokens_per_step" not in config.given
    if not (is_chosen or any(config.batch.problems())):
        problems.add_of(plan_batches, config.batch, context, int(os.environ.get("WORLD_SIZE", 1)), 1)
    if config.optim.optimizer == "muon" and setup is not None and setup.sharding == "cpu":
        problems.add(
            "optimizer muon does not work with the launcher's fsdp_offload_params, because its matrix products would "
            "run on the CPU; set fsdp_offload_params to false, or use adamw."
        )
    dropout = (config.model.embd_pdrop, config.model.attn_pdrop, config.model.resid_pdrop)
    if config.device.gradient_checkpointing and any(dropout) and uses_mps() and config.cost.plan_device is None:
        problems.add(
            "gradient_checkpointing repeats dropout with other values on Apple GPUs; leave out one of the two."
        )
    attention = config.device.attn_implementation
    if config.batch.mask_documents and attention.startswith("flash_attention"):
        problems.add(
            f"mask_documents needs attn_implementation sdpa, eager or flex_attention: Transformers passes document "
            f"boundaries to {attention} only for a batch of one row."
        )
    if attention == "flex_attention" and config.model.attn_pdrop:
        problems.add(f"attn_pdrop is {config.model.attn_pdrop}, but flex_attention has no dropout; set it to 0.")
    problems.refuse()


def _vocabulary_problems(config: TrainConfig, store: TokenStore) -> Iterator[str]:
    vocab_size = store.metadata.vocab_size
    if config.pretrained_source is not None:
        yield from vocabulary_problems(config.pretrained_source, store)
    if "vocab_size" in config.flags and (flag := config.overridden_vocab_size(vocab_size)) is not None:
        tokens = f"the vocabulary of {store.folder} has {vocab_size} tokens"
        yield f"vocab_size is {flag}, but {tokens}; remove --vocab_size."


def open_data(config: TrainConfig, accelerator: Accelerator) -> TokenStore:
    """Open the token store of a run like `run_data.open_store`. A continued run keeps the commit of a Hub dataset."""
    recorded = on_main(accelerator, lambda: recorded_data(config))
    open_store = partial(run_data.open_store, config.recipe, printer(accelerator), recorded)
    if accelerator.num_processes > 1:  # the process that prints builds the store
        on_main(accelerator, lambda: str(open_store().folder))
    return open_store()


def recorded_data(config: TrainConfig) -> str | None:
    """Return the identity of the tokens in the run that this command continues if its text is a Hub dataset, or no
    longer exists, or None."""
    data, path = config.data.data, os.path.expanduser(config.data.data)
    is_file = os.path.lexists(path) or any(globbed(path))
    is_local = dataset_of(data) is None and (find(data) is not None or is_file)
    if not config.text or is_local or "data" in config.settings.allowed:
        return None
    source = config.run.resume_from_checkpoint
    if source is not None and is_checkpoint(Path(source)) and Path(source).exists():
        return load_state(Path(source)).settings.get("data")
    folder = earlier_run(config.run, config.backup.backup_dir) if source is None else RunFolder(run_of(Path(source)))
    for checkpoint in reversed(complete_checkpoints(folder.checkpoints) if folder is not None else []):
        with suppress(UserError):
            return load_state(checkpoint).settings.get("data")
    return None


def decide_run(config: TrainConfig, setup: Setup, accelerator: Accelerator) -> Run:
    """Decide everything about a run whose configuration passed `check`. Raise a `UserError` for problems with data,
    memory, the run in the folder or its checkpoints. Called by every process. Tokenizes text, and otherwise writes only
    what `choose_checkpoint` does."""
    folder = config.run.folder
    if setup.torch_compile:
        prepare_compiler()  # its first part takes place while the text is read
    backup_dir, keep = config.backup.backup_dir, config.checkpoints_kept
    backup = Backup(backup_dir, folder, keep, printer(accelerator)) if backup_dir is not None else None
    checkpoint = on_main(accelerator, lambda: choose_checkpoint(config.run, config.settings, backup))
    store = open_data(config, accelerator)
    if on_main(accelerator, lambda: store.metadata.identity) != store.metadata.identity:
        raise UserError(f"{store.folder} has other tokens on this machine than on that of rank 0; copy it again.")
    tokenizer = _tokenizer(store, checkpoint, config.pretrained_source)
    state = load_state(checkpoint) if checkpoint is not None else None
    position = resume_position(state, store.metadata.identity)
    plan = make_plan(config, store, tokenizer, accelerator, setup, position)
    start = _starting_point(config, store, plan, checkpoint, state, accelerator)
    placement = plan.placement.where, accelerator.device, config.batch.mask_documents
    data = run_data.RunData(store, tokenizer, *(run_data.place_tokens(store, split, *placement) for split in SPLITS))
    sampling = with_prompts(config.sampling, store, tokenizer)
    return Run(folder, accelerator, plan.memory.setup, data, plan, start, backup, sampling)


def _tokenizer(store: TokenStore, checkpoint: Path | None, source: str | None) -> PreTrainedTokenizerBase:
    """Return the store's tokenizer. If the store is of a run before the chats, the chat template is that of the
    checkpoint, or of the pretrained model `source`."""
    tokenizer = store.load_tokenizer()
    if tokenizer.chat_template is None:
        with model_errors():
            if checkpoint is None:
                tokenizer.chat_template = load_tokenizer(source).chat_template if source is not None else None
            elif (template := own_file(checkpoint, TOKENIZER[-1])) is not None:
                tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _starting_point(
    config: TrainConfig,
    store: TokenStore,
    plan: Plan,
    checkpoint: Path | None,
    state: TrainState | None,
    accelerator: Accelerator,
) -> ResumePoint:
    """Return the start of a run at the checkpoint with `state`, or at step 0. Raise a `UserError` like `compare`."""
    settings = config.settings.recorded() | {
        "data": store.metadata.identity,
        "tokenizer": store.metadata.tokenizer_sha256,
        "max_steps": plan.max_steps,
        "mixed_precision": accelerator.mixed_precision,
    }
    if checkpoint is None:
        source = config.pretrained_source
        initializer = partial(load_pretrained, source) if source is not None else None
        return ResumePoint(None, TrainState(plan.position, settings), [], source is not None, initializer)
    changes = compare(checkpoint, state, plan.model, settings, config.settings)
    if any(state.settings.get(name) != settings[name] for name in ("data", "tokens_per_step")):
        state = replace(state, losses=(), unlogged=0)  # they are not a measure for the losses that follow
    state = replace(state, position=plan.position, settings=settings)
    folder, step, evaluation = config.run.folder, plan.position.step, config.evaluation
    owes_validation = False
    if step <= plan.max_steps and plan.is_due(evaluation.eval_strategy, evaluation.eval_steps, step):
        scores_all = step == plan.max_steps and evaluation.max_eval_samples is not None
        has_validation = on_main(accelerator, lambda: is_reported(folder, step, scores_all))
        owes_validation = folder.owns(checkpoint) and not has_validation
    return ResumePoint(checkpoint, state, changes, owes_validation)


def make_plan(
    config: TrainConfig,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    setup: Setup,
    position: DataPosition = START,
) -> Plan:
    """Plan a run whose configuration passed `check`. Raise a `UserError` with all problems of data and memory, one per
    line. After a restart, the micro-batch is at most the size that the previous process found to fit."""
    problems = Problems(_vocabulary_problems(config, store))
    if config.optim.induction_init:
        problems.sentences += induction_problems(config.model)
    model = model_config(config.model, store.metadata.vocab_size, tokenizer)
    local, size = run_data.processes_of_this_machine(accelerator), run_data.bytes_of(store, *SPLITS)
    placement = problems.add_of(run_data.choose_placement, config.data.data_placement, size, accelerator.device, local)
    token_bytes = placement.n_bytes if placement is not None else 0
    available = available_memory(accelerator, config.cost.plan_device, token_bytes)
    on_gpu = accelerator.device.type == "cuda" or config.cost.plan_device is not None
    processes = accelerator.num_processes
    program = 0 if on_gpu else psutil.Process().memory_info().rss + PROGRAM_GROWS
    optimizer, horizon = config.optim.optimizer, config.optim.weight_average
    memory = Memory(model, setup, on_gpu, processes, program, optimizer, has_average=horizon is not None)
    if not (on_gpu or config.cost.plan):
        problems.sentences += host_memory_problems(memory, local)
    largest = memory.largest_micro_batch(available)
    if processes > 1:
        largest = int(accelerator.gather(torch.tensor([largest], device=accelerator.device)).min())
    largest = min(largest, restarted().get("micro_batch", largest))
    if position.step and not on_gpu:
        largest = min(largest, on_main(accelerator, lambda: _earlier_micro_batch(config.run.folder, processes)))
    batches = plan_batches(config.batch, model.n_positions, processes, largest)
    order = problems.add_of(WindowOrder, store.metadata.train.tokens, model.n_positions, config.run.seed)
    if on_gpu:  # a CPU has no CUDA graphs
        problems.sentences += cuda_graph_problems(setup, batches)
    problems.refuse()
    steps = steps_of(config.length, batches, order.windows, position)
    if horizon is not None and horizon > steps and not position.step:  # a resumed run cannot change it
        raise UserError(f"weight_average is {horizon:,}, more than the {counted(steps, 'step')} of the run; use fewer.")
    plan = Plan(model, batches, order, steps, placement, memory, available, position)
    # One process decides, because their numbers of threads may differ.
    if setup.torch_compile and not on_gpu and on_main(accelerator, lambda: _is_short(config, plan)):
        note = "torch.compile is off: for so few steps, compiling would take longer than it saves."
        eager = replace(setup, torch_compile=False, notes=(*setup.notes, note))
        return make_plan(config, store, tokenizer, accelerator, eager, position)
    return plan


def _earlier_micro_batch(run: RunFolder, processes: int) -> float:
    """Return the micro-batch that `auto` chose in the run's last start with as many processes, because another one
    gives other bits, or infinity."""
    plans = [event["batches"] for event in read_events(run.events) if "batches" in event]
    sizes = [plan["micro_batch"] for plan in plans if plan["processes"] == processes and plan.get("is_auto")]
    return [math.inf, *sizes][-1]


def _is_short(config: TrainConfig, plan: Plan) -> bool:
    """Return whether the steps should not be compiled, because they are few and nothing else decides."""
    is_free = is_automatic(config.device.torch_compile) and config.device.torch_compile_mode is None
    tokens = plan.max_steps * plan.tokens_per_step  # of a resumed run, too: all of its steps
    flops = tokens * flops_per_token(plan.model) / plan.batches.processes
    return is_free and config.budget.budget is None and not pays_off(flops, SHORT_RUN)


def available_memory(accelerator: Accelerator, plan_device: str | None, token_bytes: int) -> int:
    """Return the bytes that a process may use in addition to the `token_bytes` of its tokens."""
    if plan_device in RENTALS:
        return int(RENTALS[plan_device].gigabytes * 1e9)
    if accelerator.device.type == "cuda":
        return torch.cuda.mem_get_info(accelerator.device)[0] - token_bytes
    return free_memory() // run_data.processes_of_this_machine(accelerator) - token_bytes
