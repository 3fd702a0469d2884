"""Shared parts of the recipes: flags, new examples, LoRA, the original text, measurements, and the output folder.

OUT/
    config.json, model.safetensors, tokenizer.json ...   a complete model; a LoRA adapter is merged into it
    README.md      model card: base model, data, method, and measurements before and after
    adapter/       with LoRA: the adapter as saved by PEFT
    finetuning.json    the steps so far and the store of the original text, for the next recipe; never published
"""

import itertools
import json
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from huggingface_hub import ModelCardData
from jinja2 import TemplateError
from torch.nn import functional as F  # noqa: N812  the usual name
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainerState

from command_line import FlagParser
from errors import UserError, counted
from limits import setting
from modeling_gpt2scratch.loading import turn_end
from tokenizer import files, vocabulary
from tokenizer.byte_range import ByteRange
from tokenizer.corpus import kind_of
from tokenizer.hub import HubDataset
from tokenizer.named_data import dataset_of
from tokenizer.records import records
from tokenizer.store import TokenStore
from training.evaluate import store_and_masking
from training.guard.lock import RunLock
from training.loading import check_store, find_model, load_with_tokenizer
from training.scoring import eval_metrics

EXAMPLE = "python -m examples.finetune_chat runs/x --data chats.jsonl"
HELD_OUT = 0.1  # fraction of the new text
MEASURED = 200  # held-out prompts whose answers are scored
ORIGINAL_WINDOWS = 200  # of the original validation text, each of one context
REPLAY = 0.5  # measured in benchmarks/results/finetuning-cpu.json
HUB_RECORDS = 20_000  # of a Hub dataset
RECORD = "finetuning.json"

# Template for a tokenizer without one. No token is added: a turn of the assistant ends with the end-of-text token, which the
# model already knows from pre-training. TRL computes the loss on the text between the `generation` tags.
PLAIN_TURNS = """\
{%- for message in messages %}
{%- set content = message['content'] | replace(eos_token, '') | trim %}
{%- if message['role'] == 'assistant' %}
{{- 'Assistant:\\n' }}{% generation %}{{ content + eos_token }}{% endgeneration %}
{%- else %}
{{- (message['role'] | capitalize) + ':\\n' + content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"""

# Explanations of the rows of the results.
MEANINGS = {
    "loss": "nats per token of {scored} held-out {unit}",
    "exact match": "share of {scored} held-out {unit} whose first or chosen answer greedy generation gives exactly, to its end",
    "preference accuracy": "share of {scored} held-out pairs whose chosen answer has the higher log-likelihood",
    "original, bits per byte": "on held-out text of the pre-training",
}


@dataclass
class Tuning:
    model: str | None = setting(None, "A run, a checkpoint, a model folder or a Hub id.", needed=("a model", EXAMPLE))
    data: str | None = setting(
        None,
        "File with the new text, chats or pairs, a name of `python -m tokenizer.pretokenize --list`, or a Hub dataset.",
        needed=("a file", EXAMPLE),
    )
    max_documents: int | None = setting(
        None, f"Use only the first N records; default: {HUB_RECORDS:,} of a Hub dataset, all of a file.", minimum=1
    )
    output_dir: str | None = setting(None, "New folder for the model; default: runs/MODEL-DATA.")
    lora_rank: int = setting(16, "Rank of the adapters; 0 trains all weights, without LoRA.", maximum=1024)
    learning_rate: float | None = setting(
        None, "Peak learning rate; default: from the model's width.", above=0, maximum=100
    )
    num_train_epochs: float = setting(3.0, "Passes over the new data.", above=0, maximum=10**6)
    per_device_train_batch_size: int = setting(16, "Examples per step and device.", minimum=1, maximum=65_536)
    replay_fraction: float | None = setting(
        None, f"Fraction of examples from the original training text; default: {REPLAY} if it is available.", below=1
    )
    original_data: str | None = setting(None, "Token store of the original text; default: the run's own.")
    seed: int = setting(1337, "Random seed for order, adapters and the held-out split.", below=2**32)

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.output_dir or f"runs/{self.name}-{Path(self.data.split(':')[0].split('@')[0]).stem}")

    @property
    def name(self) -> str:
        """Name of the base model."""
        path = Path(self.model)
        if path.parent.name == "checkpoints":
            return f"{path.parent.parent.name}-{path.name}"
        return path.parent.name if path.name == "model" else path.name

    @cached_property
    def hub(self) -> HubDataset | None:
        """Dataset on the Hub at its current commit, or None for a file."""
        dataset = dataset_of(self.data)
        return dataset and dataset.pinned()

    def check(self) -> None:
        if not Path(self.data).is_file() and dataset_of(self.data) is None:
            raise UserError(f"{self.data} is not a file, a named data set or a Hub dataset.")
        if self.folder.is_file() or any(self.folder.glob("*")):  # empty after a stopped or refused command
            raise UserError(f"{self.folder} already exists; choose a new folder with --output_dir.")

    def default_rate(self, width: int) -> float:
        return default_rate(width, self.lora_rank > 0)

    def decide(self, width: int, has_original: bool) -> None:
        """Set options that were left out, for a model of this width, and print them."""
        if self.learning_rate is None:
            self.learning_rate = self.default_rate(width)
        if self.replay_fraction is None:
            self.replay_fraction = REPLAY if has_original else 0.0
        replay = f"{self.replay_fraction:.0%} of the examples are" if self.replay_fraction else "no example is"
        print(f"Peak learning rate {self.learning_rate:g} (width {width}); {replay} replayed original text.")


def default_rate(width: int, lora: bool) -> float:
    """Return the learning rate of `get_lr` in the Tinker cookbook (Thinking Machines) for models like Llama, to two digits.
    LoRA uses ten times this rate: Schulman et al. 2025, "LoRA Without Regret", with `lora_alpha` 32 as here."""
    return float(f"{(5e-4 if lora else 5e-5) * (2000 / width) ** 0.781:.2g}")


def parse(documentation: str, arguments: list[str], kind: type[Tuning] = Tuning) -> Any:
    """Return the settings of the flags; raise a `UserError` with all problems."""
    disable_progress_bars()  # of `datasets`: short, and several for each step of TRL
    parser = FlagParser((kind,), documentation.splitlines()[0], positional="model")
    (tuning,) = parser.parse(arguments, check=kind.check)
    return tuning


def need(*packages: str) -> None:
    """Raise a `UserError` if a package is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(f"Fine-tuning needs {' and '.join(missing)}: run pip install -e '.[finetuning]'")


# ---- new text --------------------------------------------------------------------------------------------------------


def read_text(path: str) -> str:
    """Return the text of a file; raise a `UserError` if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text.") from error


class UselessError(ValueError):
    """Error for a record that is left out and counted, also in a file."""


def read_examples(tuning: Tuning, example_of: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Return `example_of` each record of a file, or of the beginning of a Hub dataset.
    It raises a `ValueError` for a wrong record. In a file this is a `UserError` with the line; in a Hub dataset, which a user cannot
    correct, the record is left out and counted."""
    limit, left_out, examples = tuning.max_documents, Counter(), []
    if tuning.hub is not None:
        limit = limit or HUB_RECORDS
        print(f"Reading the first {limit:,} records of {tuning.hub}.")
        found = ((record, {"record": i}) for i, record in enumerate(tuning.hub.records(), start=1))
    elif (kind := kind_of(tuning.data)) == "text":
        raise UserError(f"{tuning.data} has no records; pass a jsonl, json, csv, parquet or arrow file.")
    else:
        found = records(ByteRange(tuning.data, kind))
    for record, place in itertools.islice(found, limit):
        try:
            if record is None:
                raise ValueError("is not a JSON object")
            json.dumps(record, ensure_ascii=False, default=str).encode()
            examples.append(example_of(record))
        except ValueError as error:
            reason = "is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
            if tuning.hub is None and not isinstance(error, UselessError):
                unit, number = next(iter(place.items()))
                if unit == "byte":
                    unit, number = "line", files.line_number(tuning.data, number)
                raise UserError(f"{tuning.data}, {unit} {number:,} {reason}.") from error
            left_out[reason] += 1
    for reason, number in left_out.items():
        print(f"Left out {counted(number, 'record')} of {tuning.data}: each {reason}.")
    return examples


def splits(examples: list[Any], prompts: list[Any], tuning: Tuning, unit: str) -> tuple[Dataset, Dataset]:
    """Split into examples for training and a held-out tenth of the prompts, with all of their examples. A prompt may be a list of
    messages. Raise a `UserError` for fewer than two prompts."""
    keys = [json.dumps(prompt) for prompt in prompts]
    shuffled = list(dict.fromkeys(keys))
    if len(shuffled) < 2:
        raise UserError(
            f"At least 2 {unit} are needed, because one is held out; {tuning.data} provides {len(shuffled)}."
        )
    random.Random(tuning.seed).shuffle(shuffled)
    held_out = set(shuffled[: max(1, int(len(shuffled) * HELD_OUT))])
    parts = ([], [])
    for key, example in zip(keys, examples, strict=True):
        parts[key in held_out].append(example)
    return tuple(map(Dataset.from_list, parts))


# ---- the model and its original text ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OriginalText:
    """Pre-training text of the model, if it is available."""

    store: TokenStore | None
    context: int

    def bits_per_byte(self, model: PreTrainedModel) -> dict[str, float]:
        """Measure forgetting on fixed windows of the validation split, if it is available."""
        if self.store is None:
            return {}
        loss, tokens = mean_loss(model, self._windows("val", ORIGINAL_WINDOWS))
        return {"original, bits per byte": eval_metrics(loss, tokens, self.store.metadata.val)["eval_bits_per_byte"]}

    def mixed_into(self, new: Dataset, fraction: float) -> Dataset:
        """Return `new` with windows of the original training split, which are `fraction` of all examples."""
        if fraction == 0:
            return new
        windows = self._windows("train", round(len(new) * fraction / (1 - fraction)))
        return concatenate_datasets([new, windows.cast(new.features)])

    def _windows(self, split: str, number: int) -> Dataset:
        """Return `number` evenly spaced windows of one context; in a small text they overlap."""
        tokens = self.store.memory_map(split)
        starts = np.linspace(0, max(0, len(tokens) - self.context), number).astype(int)
        windows = [tokens[start : start + self.context].tolist() for start in starts]
        return Dataset.from_dict({"input_ids": windows, "labels": windows})


def load(tuning: Tuning) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, OriginalText]:
    """Load the model in fp32, its tokenizer and its original text; set the options that `tuning` leaves open.
    Raise a `UserError` if the model cannot be loaded, or the requested original text is missing or of another tokenizer."""
    source = find_model(tuning.model)
    model, tokenizer = load_with_tokenizer(source, torch.float32)
    store = original_store(tuning, source, tokenizer)
    tuning.decide(model.config.hidden_size, store is not None)
    return model, tokenizer, OriginalText(store, model.config.max_position_embeddings)


def record_of(tuning: Tuning) -> dict[str, Any]:
    """Return what the recipe that made the model recorded, or a new record."""
    path = Path(tuning.model) / RECORD
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    base = None if Path(tuning.model).exists() else tuning.model
    return {"steps": [tuning.name], "base_model": base, "datasets": [], "original_data": None}


def original_store(tuning: Tuning, source: str, tokenizer: PreTrainedTokenizerBase) -> TokenStore | None:
    """Return the store of `original_data`, of the model's record or of the run; None if it is missing and was not requested."""
    try:
        store, _ = store_and_masking(
            tuning.model, tuning.original_data or record_of(tuning)["original_data"], "original_data"
        )
    except UserError as error:
        if tuning.original_data is not None or tuning.replay_fraction:
            raise
        print(f"Forgetting is not measured: {error}")
        return None
    check_store(source, tokenizer, store)
    return store


@contextmanager
def template_errors() -> Iterator[None]:
    """Raise a `UserError` if the chat template is damaged or refuses a chat. Used as a decorator."""
    try:
        yield
    except TemplateError as error:
        raise UserError(
            f"The model's chat template does not render a chat ({error}); correct chat_template.jinja or the chats."
        ) from error


def give_template(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the tokenizer a chat template if it has none; return the id of the token that ends the assistant's turn.
    Raise a `UserError` if there is no such token."""
    if tokenizer.chat_template is None and tokenizer.eos_token is None:
        raise UserError(
            f"The tokenizer of {len(tokenizer)} tokens has no end-of-text token, so answers would never stop; use a model "
            "with a BPE tokenizer."
        )
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TURNS
    if (end := turn_end(tokenizer)) is None:
        raise UserError("The tokenizer's chat template ends the assistant's turn without a special token; correct it.")
    return end


# ---- measurements ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[dict[str, list[int]]]) -> tuple[float, int]:
    """Return the loss in nats per token and the number of tokens, of rows with `input_ids` and `labels` (-100: not counted)."""
    model.eval()
    nats, tokens = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        nats += F.cross_entropy(logits, labels[1:], reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    return nats / tokens, tokens


@torch.no_grad()
def score(model: PreTrainedModel, answers: Iterable[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each answer after its prompt in nats, and whether it is the greedy answer, from pairs of ids.
    As in lm-eval, an answer is greedy if each token is the most likely one after the tokens before it: greedy generation repeats
    exactly this answer. An answer that does not fit the context is cut, and is not greedy."""
    model.eval()
    context, scores = model.config.max_position_embeddings, []
    for prompt, answer in answers:
        ids, start = torch.tensor([*prompt, *answer][:context], device=model.device), max(1, len(prompt))
        targets = ids[start:]
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, start - 1 :].float()
        is_greedy = len(targets) == len(answer) and bool((logits.argmax(-1) == targets).all())
        scores.append((-F.cross_entropy(logits, targets, reduction="sum").item(), is_greedy))
    return scores


def until(end: int, ids: list[int]) -> list[int]:
    """Return the ids to the last one that equals `end`: after the token that ends a turn, a template may write a line break. All of
    them if there is none, because the answer was cut."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


@dataclass(frozen=True)
class Learned:
    """New examples, without the replayed ones, and what is measured on the held-out ones."""

    method: str  # fine-tuned
    trained: int
    held_out: int
    unit: str  # chats, windows of 64 tokens
    use: str  # flags of generate.py
    measure: Callable[[PreTrainedModel], dict[str, float]]


# ---- training and output ---------------------------------------------------------------------------------------------


class Progress(ProgressCallback):
    """Transformers' progress bar, with a line of the loss in place of a dict of all values."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            values = f"loss {float(logs['loss']):.3f}  norm {float(logs['grad_norm']):.2f}  lr {float(logs['learning_rate']):.1e}"
            self.training_bar.write(f"step {state.global_step}/{state.max_steps}  {values}")


def lora(tuning: Tuning):
    """Return PEFT's configuration, or None for training all weights.
    PEFT knows default layers only for architectures in its own list. `all-linear` means the four matrices of each block, in
    attention and MLP, but not the head: a tied head stays tied."""
    if tuning.lora_rank == 0:
        return None
    from peft import LoraConfig

    return LoraConfig(r=tuning.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def shared_settings(tuning: Tuning) -> dict[str, Any]:
    """Return the settings shared by `TrainingArguments`, `SFTConfig` and `DPOConfig`."""
    return {
        "output_dir": str(tuning.folder),
        "learning_rate": tuning.learning_rate,
        "num_train_epochs": tuning.num_train_epochs,
        "per_device_train_batch_size": tuning.per_device_train_batch_size,
        "seed": tuning.seed,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # fraction of all steps
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        "logging_steps": 10,
        "save_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
    }


def train_and_save(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, tuning: Tuning, original: OriginalText, learned: Learned
) -> None:
    """Train, and write the output folder; print the measurements before and after, and the next commands.
    Raise a `UserError` if the folder is in use, or if the weights are not finite."""
    with RunLock(tuning.folder, patience=0):
        tuning.check()  # another command may have written it
        _train_and_save(trainer, tokenizer, tuning, original, learned)


def _train_and_save(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, tuning: Tuning, original: OriginalText, learned: Learned
) -> None:
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    before = learned.measure(trainer.model) | original.bits_per_byte(trainer.model)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("\nNothing is saved before the end. The same command starts again.")
        raise
    # Without autocast, so that both measurements are in fp32.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if not all(weights.isfinite().all() for weights in model.parameters()):
        raise UserError(
            f"The weights are not finite after training at a peak rate of {tuning.learning_rate:g}; set a lower --learning_rate."
        )
    if tuning.lora_rank:
        model.save_pretrained(tuning.folder / "adapter")
        model = model.merge_and_unload()
    model.config.use_cache = True  # Trainer turns it off, which would make generation slow
    model.save_pretrained(tuning.folder)
    vocabulary.save(tokenizer, tuning.folder, model.config.max_position_embeddings)
    record = record_of(tuning)
    source = str(tuning.hub or Path(tuning.data).name)
    record["steps"] += [f"{learned.method} on {learned.trained:,} {learned.unit} of {source}"]
    record["datasets"] += [tuning.hub.name] if tuning.hub else []
    if original.store is not None:
        record["original_data"] = str(original.store.folder.resolve())
    (tuning.folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    after = learned.measure(model) | original.bits_per_byte(model)
    rows = (f"| {name} | {old:.4f} | {after[name]:.4f} | {after[name] - old:+.4f} |" for name, old in before.items())
    table = "\n".join(["| held out | before | after | change |", "|---|--:|--:|--:|", *rows])
    scored = min(MEASURED, learned.held_out)
    meanings = "\n".join(f"- {name}: {MEANINGS[name].format(unit=learned.unit, scored=scored)}" for name in before)
    results = f"{table}\n\n{learned.held_out:,} {learned.unit} were held out.\n\n{meanings}"
    text = card(model, trainer, tokenizer, tuning, results, learned, record)
    (tuning.folder / "README.md").write_text(text, encoding="utf-8")
    folder = shlex.quote(str(tuning.folder))
    print(f"{table}\nThe model is in {tuning.folder}. Next:\n  python generate.py {folder} {learned.use}")
    if model.config.model_type == "gpt2scratch":
        print(f"  python push_to_hub.py {folder} --repo_id YOUR_NAME/{shlex.quote(tuning.folder.name)}")


def card(
    model: PreTrainedModel,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    results: str,
    learned: Learned,
    record: dict[str, Any],
) -> str:
    """Return the model card, without local paths. Publishing replaces its section Use."""
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=record["base_model"],
        datasets=sorted(set(record["datasets"])) or None,
        tags=["gpt2scratch", "fine-tuned"],
    )
    method = f"LoRA of rank {tuning.lora_rank} on attention and MLP, merged" if tuning.lora_rank else "all weights"
    libraries = dict.fromkeys([type(trainer).__module__.split(".")[0], "transformers", "torch"])
    libraries |= {"peft": None} if tuning.lora_rank else {}
    context, replayed = model.config.max_position_embeddings, len(trainer.train_dataset) - learned.trained
    share = (
        f"{replayed:,} windows of {context} tokens, {tuning.replay_fraction:.0%} of examples" if replayed else "none"
    )
    name = tuning.folder.name if tuning.folder.is_absolute() else tuning.folder.as_posix()
    prompt = '[{"role": "user", "content": "Hello"}]' if tokenizer.chat_template else '"Once"'
    return f"""---
{metadata.to_yaml()}
---

# {tuning.folder.name}

{", ".join(record["steps"])}: {model.num_parameters():,}
parameters, a context of {context} tokens.

## Results

{results}

## Training

| | |
|---|---|
| method | {method} |
| learning rate, epochs, seed | {tuning.learning_rate:g}, {tuning.num_train_epochs:g}, {tuning.seed} |
| replayed original text | {share} |
| libraries | {", ".join(f"{name} {version(name)}" for name in libraries)} |

## Use

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{name}", trust_remote_code=True)
generator({prompt})
```
"""
