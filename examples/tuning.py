"""Shared parts of the recipes: flags, LoRA, the original text, and the output folder.

OUT/
    config.json, model.safetensors, tokenizer.json ...   a complete model; a LoRA adapter is merged into it
    README.md      model card: base model, data, method, and losses before and after
    adapter/       with LoRA: the adapter as saved by PEFT
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from command_line import FlagParser
from errors import UserError, counted
from limits import setting
from tokenizer import vocabulary
from tokenizer.store import TokenStore
from training.evaluate import store_and_masking
from training.loading import check_store, find_model, load_with_tokenizer

EXAMPLE = "python -m examples.finetune_chat runs/x --data chats.jsonl"
HELD_OUT = 0.1  # fraction of the new text
ORIGINAL_WINDOWS = 200  # of the original validation text, each of one context
REPLAY = 0.5  # measured in benchmarks/results/finetuning-cpu.json


@dataclass
class Tuning:
    model: str | None = setting(
        None,
        "A run, a checkpoint, a model folder or a Hub id.",
        needed=("a model", EXAMPLE),
    )
    data: str | None = setting(None, "File with the new text or chats.", needed=("a file", EXAMPLE))
    output_dir: str | None = setting(None, "New folder for the model; default: runs/MODEL-DATA.")
    lora_rank: int = setting(16, "Rank of the adapters; 0 trains all weights, without LoRA.", maximum=1024)
    learning_rate: float | None = setting(
        None, "Peak learning rate; default: from the model's width.", above=0, maximum=100
    )
    num_train_epochs: float = setting(3.0, "Passes over the file.", above=0, maximum=10**6)
    per_device_train_batch_size: int = setting(16, "Examples per step and device.", minimum=1, maximum=65_536)
    replay_fraction: float | None = setting(
        None, f"Fraction of examples from the original training text; default: {REPLAY} if it is available.", below=1
    )
    original_data: str | None = setting(None, "Token store of the original text; default: the run's own.")
    seed: int = setting(1337, "Random seed for order, adapters and the held-out split.", below=2**32)

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.output_dir or f"runs/{self.name}-{Path(self.data).stem}")

    @property
    def name(self) -> str:
        """Name of the base model."""
        path = Path(self.model)
        return path.parent.name if path.name == "model" else path.name

    def check(self) -> None:
        if not Path(self.data).is_file():
            raise UserError(f"{self.data} is not a file.")
        if self.folder.exists():
            raise UserError(f"{self.folder} already exists; choose a new folder with --output_dir.")

    def decide(self, width: int, has_original: bool) -> None:
        """Set options that were left out, for a model of this width, and print them."""
        if self.learning_rate is None:
            self.learning_rate = default_rate(width, self.lora_rank > 0)
        if self.replay_fraction is None:
            self.replay_fraction = REPLAY if has_original else 0.0
        replay = f"{self.replay_fraction:.0%} of the examples are" if self.replay_fraction else "no example is"
        print(f"Peak learning rate {self.learning_rate:g} (width {width}); {replay} replayed original text.")


def default_rate(width: int, lora: bool) -> float:
    """Return the learning rate of `get_lr` in the Tinker cookbook (Thinking Machines) for models like Llama, to two digits.

    LoRA uses ten times this rate: Schulman et al. 2025, "LoRA Without Regret", with `lora_alpha` 32 as here.
    """
    return float(f"{(5e-4 if lora else 5e-5) * (2000 / width) ** 0.781:.2g}")


def parse(documentation: str, arguments: list[str]) -> Tuning:
    """Return the settings of the flags; raise a `UserError` with all problems."""
    parser = FlagParser((Tuning,), documentation.splitlines()[0], positional="model")
    (tuning,) = parser.parse(arguments, check=Tuning.check)
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


def read_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line of a jsonl file; raise a `UserError` for a line that is not a JSON object."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # a string may contain other line breaks
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}.") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number} is not a JSON object.")
            yield number, record


def splits(examples: Dataset, tuning: Tuning, shuffle: bool) -> DatasetDict:
    """Split into `train` and a held-out tenth, `test`: random examples or the tail. Raise a `UserError` for fewer than two."""
    if len(examples) < 2:
        raise UserError(
            f"{tuning.data} contains {counted(len(examples), 'example')}; one is held out, so at least 2 are needed."
        )
    return examples.train_test_split(test_size=max(1, int(len(examples) * HELD_OUT)), shuffle=shuffle, seed=tuning.seed)


# ---- the model and its original text ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OriginalText:
    """Pre-training text of the model, if it is available."""

    store: TokenStore | None
    context: int

    @property
    def held_out(self) -> dict[str, Dataset]:
        """Fixed windows of the validation split, to measure forgetting."""
        return {} if self.store is None else {"original": self._windows("val", ORIGINAL_WINDOWS)}

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

    Raise a `UserError` if the model cannot be loaded, or the requested original text is missing or of another tokenizer.
    """
    source = find_model(tuning.model)
    model, tokenizer = load_with_tokenizer(source, torch.float32)
    store = original_store(tuning, source, tokenizer)
    tuning.decide(model.config.hidden_size, store is not None)
    return model, tokenizer, OriginalText(store, model.config.max_position_embeddings)


def original_store(tuning: Tuning, source: str, tokenizer: PreTrainedTokenizerBase) -> TokenStore | None:
    """Return the store of `original_data` or of the run; None if it is missing and was not requested."""
    try:
        store, _ = store_and_masking(tuning.model, tuning.original_data)
    except UserError as error:
        if tuning.original_data is not None or tuning.replay_fraction:
            raise
        print(f"Forgetting is not measured, because there is no --original_data: {error}")
        return None
    check_store(source, tokenizer, store)
    return store


# ---- training and output ---------------------------------------------------------------------------------------------


def lora(tuning: Tuning):
    """Return PEFT's configuration, or None for training all weights.

    PEFT knows default layers only for architectures in its own list. `all-linear` means the four matrices of each block, in
    attention and MLP, but not the head: a tied head stays tied.
    """
    from peft import LoraConfig

    if tuning.lora_rank == 0:
        return None
    return LoraConfig(r=tuning.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def shared_settings(tuning: Tuning) -> dict[str, Any]:
    """Return the settings shared by `TrainingArguments` and `SFTConfig`."""
    return {
        "output_dir": str(tuning.folder),
        "learning_rate": tuning.learning_rate,
        "num_train_epochs": tuning.num_train_epochs,
        "per_device_train_batch_size": tuning.per_device_train_batch_size,
        "per_device_eval_batch_size": tuning.per_device_train_batch_size,
        "seed": tuning.seed,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # fraction of all steps
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "logging_steps": 10,
        "save_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
    }


def losses(trainer: Trainer) -> dict[str, float]:
    """Return the loss on each held-out text, in nats per token."""
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}_loss"] for name in trainer.eval_dataset}


@dataclass(frozen=True)
class Learned:
    """Number of new examples, without the replayed ones."""

    trained: int
    held_out: int
    unit: str  # chats, windows of 64 tokens


def save(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    before: dict[str, float],
    learned: Learned,
    prompt: str,
) -> None:
    """Write the output folder; print the losses before and after, and the next commands with `prompt`."""
    after = losses(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if tuning.lora_rank:
        model.save_pretrained(tuning.folder / "adapter")
        model = model.merge_and_unload()
    model.config.use_cache = True  # Trainer turns it off, which would make generation slow
    model.save_pretrained(tuning.folder)
    vocabulary.save(tokenizer, tuning.folder, model.config.max_position_embeddings)
    rows = (f"| {name} | {old:.4f} | {after[name]:.4f} | {after[name] - old:+.4f} |" for name, old in before.items())
    table = "\n".join(["| held-out loss | before | after | change |", "|---|--:|--:|--:|", *rows])
    (tuning.folder / "README.md").write_text(card(model, trainer, tokenizer, tuning, table, learned), encoding="utf-8")
    folder = shlex.quote(str(tuning.folder))
    print(
        f"{table}\nThe model is in {tuning.folder}. Next:\n"
        f"  python generate.py {folder} --prompt {shlex.quote(prompt)}\n"
        f"  python push_to_hub.py {folder} --repo_id YOUR_NAME/{shlex.quote(tuning.folder.name)}"
    )


def card(
    model: PreTrainedModel,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    table: str,
    learned: Learned,
) -> str:
    """Return the model card, without local paths. Publishing replaces its section Use."""
    base = None if Path(tuning.model).exists() else tuning.model
    tags = ["gpt2scratch", "fine-tuned"]
    metadata = ModelCardData(library_name="transformers", pipeline_tag="text-generation", base_model=base, tags=tags)
    method = f"LoRA of rank {tuning.lora_rank} on attention and MLP, merged" if tuning.lora_rank else "all weights"
    libraries = dict.fromkeys([type(trainer).__module__.split(".")[0], "transformers", "torch"])
    libraries |= {"peft": None} if tuning.lora_rank else {}
    context, replayed = model.config.max_position_embeddings, len(trainer.train_dataset) - learned.trained
    share = (
        f"{replayed:,} windows of {context} tokens, {tuning.replay_fraction:.0%} of all examples"
        if replayed
        else "none"
    )
    original = ", and on held-out text of the pre-training (`original`)" if "| original |" in table else ""
    name = tuning.folder.name if tuning.folder.is_absolute() else tuning.folder.as_posix()
    prompt = '[{"role": "user", "content": "Hello"}]' if tokenizer.chat_template else '"Once"'
    return f"""---
{metadata.to_yaml()}
---

# {tuning.folder.name}

{tuning.name}, fine-tuned on {learned.trained:,} {learned.unit} of {Path(tuning.data).name}: {model.num_parameters():,}
parameters, a context of {context} tokens.

## Results

{table}

Loss in nats per token on {learned.held_out:,} held-out {learned.unit} of the same file{original}.

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
