"""Evaluate a model: loss, perplexity and bits per byte on held-out text.

python -m training.evaluate runs/x                      # the whole validation split of the run's store
python -m training.evaluate runs/x --checkpoint best --data data/other
python -m training.evaluate runs/x --compare            # compare with n-grams and compressors
python -m training.evaluate runs/x --compare_with runs/y openai-community/gpt2
python -m training.evaluate runs/x --memorization       # share of its output that is copied from the training text
python -m training.evaluate runs/x --tasks hellaswag,arc_easy  # benchmarks of lm-evaluation-harness
"""

import training.runtime.threads  # noqa: F401  (first: torch reads its settings; also for Ctrl-C during the imports)

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from common.machine import keep_freed_memory
from tokenizer.corpus import hub
from tokenizer.encoding import vocabulary
from tokenizer.store.store import TokenStore
from training.checkpoints.checkpoint import load_state
from training.checkpoints.loading import check_store, find_model, load_own_model
from training.checkpoints.run_folder import find_checkpoint, run_of
from training.config import read_config
from training.data import run_data
from training.evaluation import panel
from training.evaluation.memorization import LENGTH, memorization
from training.evaluation.scoring import score_split
from training.report.report import evaluated_run, keep_evaluation, show_evaluation, weight_hashes
from training.runtime.device import keep_accelerate_from_sharding
from training.runtime.distributed import is_launched_on_cpu
from training.runtime.hardware import check_kernels


def store_and_masking(
    model: str, data: str | None, flag: str = "data", may_build: bool = True
) -> tuple[TokenStore, bool]:
    """Return the store to score and whether to mask documents. Both default to the values of the run of `model`.
    Raise a `UserError`, which names `flag`, if there is neither a run nor a store, or if the run's would be built
    again and that is not wanted."""
    try:
        run_folder = run_of(Path(model))
    except UserError as error:
        if data is None:
            raise UserError(f"{error} For another model, name a token store with --{flag}.") from error
        return TokenStore(data), False  # a model that is not in a run folder
    config = read_config(["--resume_from_checkpoint", str(run_folder.absolute())])
    if data is not None:
        return TokenStore(data), config.batch.mask_documents
    store = identity = None  # of what the newest checkpoint recorded, if it still exists: its text may have changed
    with suppress(UserError):
        identity = load_state(find_checkpoint(run_folder, "last")).settings["data"]
        store = run_data.find_recorded_store(config.data.data, identity)
    if store is None and not may_build and (store := run_data.find_store(config.recipe)) is None:
        raise UserError(f"The token store of {run_folder} no longer exists; name one with --{flag}.")
    store = store or run_data.open_store(config.recipe, partial(print, file=sys.stderr))
    if identity not in (None, store.metadata.identity):
        print(f"WARNING: The tokens of {run_folder} no longer exist; {store.folder} has others.", file=sys.stderr)
    return store, config.batch.mask_documents


@contextmanager
def lm_eval_errors() -> Iterator[None]:
    """Raise a `UserError` if lm-eval fails, for lack of a network for example."""
    try:
        yield
    except Exception as error:  # of any library that a task uses
        cause = f"{type(error).__name__}: {hub.shortened(error)}"
        raise UserError(f"lm-evaluation-harness ended with {cause}; see docs/evaluation.md.") from error


def find_tasks(arguments: list[str], trust_task_code: bool) -> tuple[Any, list[str]]:
    """Return lm-eval's task manager, and the names and YAML files of tasks.
    Raise a `UserError` for an unknown task, for a file without trust, and if a task or its data cannot be loaded."""
    if find_spec("lm_eval") is None:
        raise UserError("tasks needs lm-evaluation-harness: run pip install -e '.[evaluation]'")
    from lm_eval.tasks import TaskManager

    names = [name for part in arguments for name in part.split(",")]
    files = {name: [name] for name in names if name.endswith(".yaml") and Path(name).is_file()}
    manager = TaskManager(include_defaults=not files.keys() >= set(names))  # the default: thousands of files
    matches = {name: manager.match_tasks([name]) for name in names} | files
    if absent := [name for name in matches if not matches[name]]:
        raise UserError(f"{absent[0]!r} is neither a task in `python -m lm_eval ls tasks` nor a YAML file; correct it.")
    if files and not trust_task_code:
        file = next(iter(files))
        raise UserError(f"{file} can contain or name code, which lm-eval runs; read it, then add --trust_task_code.")
    tasks = [task for name in matches for task in matches[name]]
    with lm_eval_errors():
        manager.load(tasks)  # before minutes of scoring; the data are read again from the cache
    return manager, tasks


def run_tasks(
    model: PreTrainedModel, folder: str, tasks: tuple[Any, list[str]], batch_size: int
) -> Iterator[dict[str, Any]]:
    """After each task, yield the results so far in the form of lm-eval's files, and the number of requests cut to the
    context, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    def is_shown(record: logging.LogRecord) -> bool:  # otherwise lm-eval prints a line per request
        cuts[-1] += "runcat" in record.getMessage()  # "Truncating ..." or "Left truncation ..."
        return record.levelno >= logging.ERROR

    cuts, results = [0], {"configs": {}, "results": {}, "n-shot": {}, "cut_requests": {}}
    results["lm_eval_version"] = version("lm_eval")
    logging.getLogger("lm_eval.models.huggingface").filters = [is_shown]
    with lm_eval_errors():
        tokenizer = vocabulary.load(folder)
        tokenizer.model_max_length = sys.maxsize  # lm-eval cuts texts itself: no warning about their length
        harness_model = HFLM(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        for task in tasks[1]:
            cuts.append(0)
            output = simple_evaluate(harness_model, tasks=[task], task_manager=tasks[0], log_samples=False)
            for name in ("results", "n-shot"):
                results[name] |= output[name]
            results["configs"] |= {name: _public(config) for name, config in output["configs"].items()}
            results["cut_requests"][Path(task.removesuffix(".yaml")).name] = cuts[-1]
            yield results


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a task, without a local path."""
    source = {key: config.get(key) for key in ("dataset_path", "dataset_name", "test_split", "validation_split")}
    return source | ({"dataset_path": None} if Path(source["dataset_path"] or "json").exists() else {})


@dataclass
class EvaluateArguments:
    model: str | None = setting(
        None, "A run, a checkpoint or a model folder.", needed=("a model", "python -m training.evaluate runs/x")
    )
    checkpoint: str | None = setting(
        None, "Checkpoint of a run: last, best (by validation loss) or a step. Default: the run's model/."
    )
    data: str | None = setting(None, "Token store to score. Default: the run's own.")
    mask_documents: bool = setting(False, "Attend within documents only. Default: as in the model's run.")
    per_device_eval_batch_size: int = setting(16, "Sequences per batch.", minimum=1, maximum=65_536)
    compare: bool = setting(False, "Compare bits per byte with n-grams and compressors on the same text.")
    compare_with: list[str] = setting(
        [], "Compare also with these runs, checkpoints, model folders or Hub ids of causal models; implies compare."
    )
    compare_documents: int | None = setting(
        None, "Evenly spaced documents to compare on; implies compare. Default: all.", minimum=1
    )
    memorization: bool = setting(False, "Measure how much generated text occurs verbatim in the training text.")
    memorization_texts: int | None = setting(
        None,
        "Texts to generate, of up to 256 tokens each; implies memorization. Default: 64.",
        minimum=2,
        maximum=100_000,
    )
    memorization_span: int | None = setting(
        None, "Tokens of the spans to look up; implies memorization. Default: 50.", minimum=1, maximum=LENGTH
    )
    tasks: list[str] = setting([], "Tasks of lm-evaluation-harness or YAML files, separated by commas.", free_text=True)
    trust_task_code: bool = setting(False, "Allow YAML files of tasks, whose code lm-evaluation-harness runs.")
    seed: int = setting(1337, "Random seed for generated text and for the choice of held-out text.", below=2**63)
    json: bool = setting(False, "Print one line of JSON instead of tables.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((EvaluateArguments,), __doc__, positional="model").parse(arguments)
    check_kernels()
    options.model = options.model and os.path.expanduser(options.model)
    options.compare |= bool(options.compare_with or options.compare_documents)
    options.memorization |= bool(options.memorization_texts or options.memorization_span)
    source = (
        options.model if options.checkpoint is None else str(find_checkpoint(Path(options.model), options.checkpoint))
    )
    tasks = find_tasks(options.tasks, options.trust_task_code) if options.tasks else None
    folder, *comparisons = map(find_model, (source, *options.compare_with))
    if len({folder, *comparisons}) <= len(comparisons):
        raise UserError("compare_with names a model twice, or the evaluated model; name each model once.")
    keeps = options.compare or options.memorization or options.tasks
    results_folder = evaluated_run(Path(source), folder) if keeps else None
    for comparison in comparisons:
        vocabulary.load(comparison)  # report a missing file before minutes of scoring
    store, mask_documents = store_and_masking(source, options.data)
    mask_documents |= options.mask_documents
    hashes = weight_hashes(Path(folder))  # first: a run that trains replaces its model/
    model = load_own_model(folder)
    check_store(folder, vocabulary.load(folder), store)
    # plain sampling: ignore the model's own settings
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    if model.config.vocab_size != store.metadata.vocab_size:  # with equal tokenizers, the metadata is wrong
        raise UserError(
            f"{folder} has a vocabulary of {model.config.vocab_size} tokens, but {store.folder} has "
            f"{store.metadata.vocab_size}; score it on a store made with its own tokenizer."
        )
    keep_accelerate_from_sharding()  # scoring needs the whole model, even if the launcher shards
    accelerator = Accelerator(cpu=is_launched_on_cpu())
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    model = model.to(accelerator.device)
    local = run_data.processes_of_this_machine(accelerator)
    placement = run_data.choose_placement("auto", run_data.bytes_of(store, "val"), accelerator.device, local)
    store.check_hashes("val", *["train"] * options.memorization)
    tokens = run_data.place_tokens(store, "val", placement.where, accelerator.device, mask_documents)
    scores = score_split(model, store, tokens, options.per_device_eval_batch_size, accelerator)
    if not math.isfinite(loss := scores["eval_loss"]):
        raise UserError(f"{folder} has a loss of {loss}; its weights or its config.json are damaged.")
    results = {"model": str(folder), "data": str(store.folder), "mask_documents": mask_documents} | scores
    if options.compare:
        results["panel"] = panel.compare_models(
            model, source, options.compare_with, store, options.compare_documents, accelerator
        )
    if not accelerator.is_main_process:
        return
    try:
        if options.memorization:
            sizes = (options.memorization_texts or 64, options.memorization_span or 50)
            results["memorization"] = memorization(model, store, *sizes, options.seed)
        if tasks is not None:
            for so_far in run_tasks(model, folder, tasks, options.per_device_eval_batch_size):
                results["tasks"] = so_far
    finally:  # if something fails or is interrupted, the other results are kept
        if options.json:
            print(json.dumps(results))
        else:
            show_evaluation(results)
        if results_folder is not None and results.keys() & {"panel", "memorization", "tasks"}:
            keep_evaluation(results, results_folder, store, hashes)


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
