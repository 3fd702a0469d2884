"""What the recipes share: their flags, LoRA, the original text, and the folder they leave.

OUT/
    config.json, model.safetensors, tokenizer.json ...   a model like any other, its adapter merged into it
    README.md      its card: what it was made from, how, and the losses before and after
    adapter/       with LoRA: the adapter alone, as PEFT saves it
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets
from huggingface_hub import ModelCardData
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer

import modeling_gpt2scratch  # noqa: F401  registers the architecture: our models need no trust_remote_code here
from command_line import FlagParser
from errors import UserError
from tokenizer import vocabulary
from tokenizer.store import TokenStore
from training.evaluate import store_and_masking
from training.run_folder import find_model

HELD_OUT = 0.1  # of the new text
ORIGINAL_WINDOWS = 200  # of the original validation text, each of one context


@dataclass
class Tuning:
    model: str | None = field(
        default=None,
        metadata={"help": "A run, a checkpoint, a model folder or a Hub id; may be given without its flag."},
    )
    data: str | None = field(default=None, metadata={"help": "The file to learn from."})
    output_dir: str | None = field(
        default=None, metadata={"help": "A new folder for the model; runs/MODEL-DATA where left out."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters; 0 trains all weights, without LoRA."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Its peak; 2e-4 for LoRA and 2e-5 for all weights where left out."}
    )
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the file."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Examples a step, on each device."})
    replay_fraction: float = field(
        default=0.0, metadata={"help": "Share of the examples that are windows of the original training text."}
    )
    original_data: str | None = field(
        default=None, metadata={"help": "Token store of the original text; the run's own where left out."}
    )
    seed: int = field(default=1337, metadata={"help": "Decides order, adapters and what is held out."})

    @property
    def rate(self) -> float:
        """LoRA wants about ten times the rate of all weights (Schulman et al. 2025, "LoRA Without Regret")."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2e-4 if self.lora_rank else 2e-5

    @property
    def folder(self) -> Path:
        """Where the tuned model goes."""
        return Path(self.output_dir or f"runs/{self.name}-{Path(self.data).stem}")

    @property
    def name(self) -> str:
        """What the model to begin with is called."""
        path = Path(self.model)
        return path.parent.name if path.name == "model" else path.name

    def check(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; it must be {rule}."
            for name, rule, good in (
                ("lora_rank", "at least 0", self.lora_rank >= 0),
                ("learning_rate", "above 0", self.rate > 0),
                ("num_train_epochs", "above 0", self.num_train_epochs > 0),
                ("per_device_train_batch_size", "at least 1", self.per_device_train_batch_size >= 1),
                ("replay_fraction", "at least 0 and below 1", 0 <= self.replay_fraction < 1),
            )
            if not good
        ]
        if self.model is None or self.data is None:
            problems.append("Name a model and a file: python -m examples.finetune_chat runs/x --data chats.jsonl")
        elif not Path(self.data).is_file():
            problems.append(f"There is no file {self.data}.")
        elif self.folder.exists():
            problems.append(f"{self.folder} exists already; name a new folder with --output_dir.")
        if problems:
            raise UserError("\n".join(problems))


def parse(documentation: str, arguments: list[str]) -> Tuning:
    """
    Raises:
        UserError: what cannot be, all at once.
    """
    parser = FlagParser((Tuning,), documentation.splitlines()[0], positional="model")
    (tuning,), _ = parser.parse(arguments)
    tuning.check()
    return tuning


def need(*packages: str) -> None:
    """
    Raises:
        UserError: one of them is not installed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"Fine-tuning needs {' and '.join(missing)}, which is not installed: pip install -e '.[finetuning]'"
        )


# ---- what there is to learn from --------------------------------------------------------------------------------------


def read_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a jsonl file, with the number of their line.

    Raises:
        UserError: a line is not a JSON object, or the file is no text.
    """
    try:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise UserError(f"{path}, line {number} is no JSON object.")
                yield number, record
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number} is not JSON: {error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text.") from error


def splits(examples: Dataset, tuning: Tuning, shuffle: bool) -> DatasetDict:
    """`train`, and a tenth held out as `test`: at random, or the tail.

    Raises:
        UserError: there are fewer than two examples.
    """
    if len(examples) < 2:
        raise UserError(f"{tuning.data} holds {len(examples)} examples; one is held out, so give at least 2.")
    return examples.train_test_split(test_size=max(1, int(len(examples) * HELD_OUT)), shuffle=shuffle, seed=tuning.seed)


# ---- the original text ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OriginalText:
    """What the model was pre-trained on, where it is at hand."""

    store: TokenStore | None
    context: int

    @property
    def held_out(self) -> dict[str, Dataset]:
        """Windows of the validation split, to see what is forgotten; the same ones each time."""
        return {} if self.store is None else {"original": self._windows("val", ORIGINAL_WINDOWS)}

    def mixed_into(self, new: Dataset, fraction: float) -> Dataset:
        """`new`, with so many windows of the training split that they are `fraction` of all examples."""
        if fraction == 0:
            return new
        windows = self._windows("train", round(len(new) * fraction / (1 - fraction)))
        return concatenate_datasets([new, windows.cast(new.features)])

    def _windows(self, split: str, number: int) -> Dataset:
        """At most `number` windows of one context, evenly spread."""
        tokens = self.store.memory_map(split)
        number = min(number, max(1, len(tokens) // self.context))
        starts = np.linspace(0, max(0, len(tokens) - self.context), number).astype(int)
        windows = [tokens[start : start + self.context].tolist() for start in starts]
        return Dataset.from_dict({"input_ids": windows, "labels": windows})


def original_text(tuning: Tuning, model: PreTrainedModel) -> OriginalText:
    """
    Raises:
        UserError: it is asked for and not to be had, or was made with another tokenizer.
    """
    context = model.config.max_position_embeddings
    try:
        store, _ = store_and_masking(tuning.model, tuning.original_data)
    except UserError as error:
        if tuning.original_data is not None or tuning.replay_fraction:
            raise
        print(f"What is forgotten is not measured, for want of --original_data: {error}")
        return OriginalText(None, context)
    if store.metadata.vocab_size != model.config.vocab_size:
        raise UserError(
            f"{tuning.model} has a vocabulary of {model.config.vocab_size} tokens, {store.folder} one of "
            f"{store.metadata.vocab_size}; give an --original_data that was made with its tokenizer."
        )
    return OriginalText(store, context)


# ---- model, training, folder ------------------------------------------------------------------------------------------


def load(tuning: Tuning) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in fp32, and its tokenizer.

    Raises:
        UserError: it cannot be loaded.
    """
    source = find_model(tuning.model)
    try:
        # Safetensors only: a pickle is never opened.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    # A text ends at the context. Left to themselves, pipelines ask for 256 new tokens, which a small context has not.
    model.generation_config.max_length = model.config.max_position_embeddings
    return model, vocabulary.load(source)


def lora(tuning: Tuning):
    """PEFT's configuration, or None for all weights.

    PEFT has default layers for the architectures that it lists, by `model_type`, and a model has no way to name its own.
    `all-linear` are the four matrices of each block, in attention and MLP, and never the head: so a head that is tied to
    the embedding stays so.
    """
    from peft import LoraConfig

    if tuning.lora_rank == 0:
        return None
    return LoraConfig(
        r=tuning.lora_rank, lora_alpha=2 * tuning.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def shared_settings(tuning: Tuning) -> dict[str, Any]:
    """What `TrainingArguments` and `SFTConfig` are both told."""
    return {
        "output_dir": str(tuning.folder),
        "learning_rate": tuning.rate,
        "num_train_epochs": tuning.num_train_epochs,
        "per_device_train_batch_size": tuning.per_device_train_batch_size,
        "per_device_eval_batch_size": tuning.per_device_train_batch_size,
        "seed": tuning.seed,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # of all steps
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "logging_steps": 10,
        "save_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
    }


def losses(trainer: Trainer) -> dict[str, float]:
    """The loss on each text that is held out, in nats a token."""
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}_loss"] for name in trainer.eval_dataset}


def save(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    """Writes the folder; prints what was learned and what was forgotten."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if tuning.lora_rank:
        model.save_pretrained(tuning.folder / "adapter")
        model = model.merge_and_unload()
    model.config.use_cache = True  # Trainer turns it off to train, and generation would stay slow
    model.save_pretrained(tuning.folder)
    vocabulary.save(tokenizer, tuning.folder, model.config.max_position_embeddings)
    rows = [
        f"| {name} | {before[name]:.4f} | {after[name]:.4f} | {after[name] - before[name]:+.4f} |" for name in before
    ]
    table = "\n".join(["| held-out loss | before | after | change |", "|---|--:|--:|--:|", *rows])
    prompt = '[{"role": "user", "content": "Hello"}]' if tokenizer.chat_template else '"Once"'
    libraries = dict.fromkeys([type(trainer).__module__.split(".")[0], "transformers", "torch"])
    (tuning.folder / "README.md").write_text(
        card(tuning, len(trainer.train_dataset), table, prompt, [*libraries, *["peft"] * bool(tuning.lora_rank)]),
        encoding="utf-8",
    )
    print(f"{table}\n{tuning.folder} holds the model.")


def card(tuning: Tuning, examples: int, table: str, prompt: str, libraries: list[str]) -> str:
    """The model card, without a path of this machine."""
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if Path(tuning.model).exists() else tuning.model,
        tags=["gpt2scratch", "fine-tuned"],
    )
    method = f"LoRA of rank {tuning.lora_rank} on attention and MLP, merged" if tuning.lora_rank else "all weights"
    return f"""---
{metadata.to_yaml()}
---

# {tuning.folder.name}

{tuning.name}, fine-tuned on {examples:,} examples of {Path(tuning.data).name}.

{table}

| | |
|---|---|
| trained | {method} |
| learning rate, epochs, seed | {tuning.rate:g}, {tuning.num_train_epochs:g}, {tuning.seed} |
| replayed original text | {tuning.replay_fraction:.0%} of the examples |
| libraries | {", ".join(f"{name} {version(name)}" for name in libraries)} |

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{tuning.folder.name}", trust_remote_code=True)
generator({prompt})
```
"""
