"""Base model: its weights and tokenizer, how it was made, and its original text."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, concatenate_datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common import schema
from common.errors import UserError
from examples.tuning.measurements import Learned, mean_loss
from examples.tuning.settings import Tuning
from tokenizer.store.store import TokenStore
from training.checkpoints.loading import check_store, find_model, load_any_model
from training.evaluate import store_and_masking
from training.evaluation.scoring import eval_metrics
from training.runtime.hardware import check_kernels

ORIGINAL_WINDOWS = 200  # of the original validation text, each of one context
WINDOWS_AT_ONCE = 1000  # Arrow needs 8 bytes per id, and Python lists 100
RECORD = "finetuning.json"


@dataclass
class Record:
    """Content of finetuning.json."""

    steps: list[str]
    base_model: str | None
    datasets: list[str]
    original_data: str | None


@dataclass(frozen=True)
class OriginalText:
    """Pre-training text of the model, if it is available."""

    store: TokenStore | None
    context: int
    record: dict[str, Any]  # of the recipes so far

    def bits_per_byte(self, model: PreTrainedModel) -> dict[str, float]:
        """Measure forgetting on fixed windows of the validation split, if it is available."""
        if self.store is None:
            return {}
        [windows] = self._windows("val", ORIGINAL_WINDOWS)
        loss, tokens = mean_loss(model, windows)
        return {"original, bits per byte": eval_metrics(loss, tokens, self.store.metadata.val)["eval_bits_per_byte"]}

    def mixed_into(self, new: Dataset, fraction: float) -> Dataset:
        """Return `new` with windows of the original training split, which are `fraction` of all examples."""
        if fraction == 0:
            return new
        if (length := len(self.store.memory_map("train"))) < self.context:
            raise UserError(
                f"{self.store.folder} has only {length} tokens for training, less than a window of {self.context}; "
                "name a longer text with --original_data, or set --replay_fraction 0."
            )
        windows = self._windows("train", round(len(new) * fraction / (1 - fraction)), new.features)
        return concatenate_datasets([new, *windows])

    def _windows(self, split: str, number: int, features: Features | None = None) -> list[Dataset]:
        """Return `number` evenly spaced windows of one context, in parts; in a small text they overlap."""
        tokens = self.store.memory_map(split)  # (tokens,)
        width = min(self.context, len(tokens))
        starts = np.linspace(0, len(tokens) - width, number).astype(int)
        parts = []
        for part in (starts[i : i + WINDOWS_AT_ONCE] for i in range(0, number, WINDOWS_AT_ONCE)):
            windows = tokens[part[:, None] + np.arange(width)].astype(np.int32)  # (windows, T)
            parts.append(Dataset.from_dict({"input_ids": windows, "labels": windows}, features))
        return parts


def load(tuning: Tuning) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, OriginalText]:
    """Load the model in fp32, its tokenizer and its original text; set the options that `tuning` leaves open.
    Raise a `UserError` if the model cannot be loaded, or requested original text is missing or of another tokenizer."""
    check_kernels()
    source = find_model(tuning.model)
    model, tokenizer = load_any_model(source, torch.float32)
    record = record_of(tuning)
    store = original_store(tuning, record, source, tokenizer)
    tuning.decide(model.config.hidden_size, store is not None)
    return model, tokenizer, OriginalText(store, model.config.max_position_embeddings, record)


def record_of(tuning: Tuning) -> dict[str, Any]:
    """Return what the recipe that made the model recorded, or a new record. Raise a `UserError` for a damaged one."""
    path = Path(tuning.model) / RECORD
    if os.path.lexists(path):
        try:
            record = vars(schema.read(path, Record))
            json.dumps(record, ensure_ascii=False).encode()  # text that is not UTF-8 could not be written into the card
            return record
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); correct it, or delete it.") from error
    base = None if Path(tuning.model).exists() else tuning.model
    return {"steps": [tuning.name], "base_model": base, "datasets": [], "original_data": None}


def extend_record(tuning: Tuning, learned: Learned, original: OriginalText, folder: Path) -> dict[str, Any]:
    """Write the record with this step into `folder`, and return it."""
    record = original.record
    source = str(tuning.hub or tuning.data_name)
    record["steps"] += [f"{learned.method} on {learned.trained:,} {learned.unit} of {source}"]
    record["datasets"] += [tuning.hub.name] if tuning.hub else []
    if original.store is not None:
        record["datasets"] += original.store.metadata.hub_datasets
        record["original_data"] = str(original.store.folder.resolve())
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def original_store(
    tuning: Tuning, record: dict[str, Any], source: str, tokenizer: PreTrainedTokenizerBase
) -> TokenStore | None:
    """Return the store of `original_data`, of the model's `record` or of the run; None if missing and not requested."""
    try:
        data = tuning.original_data or record["original_data"]
        store, _ = store_and_masking(tuning.model, data, "original_data", may_build=False)
        check_store(source, tokenizer, store)
    except UserError as error:
        if tuning.original_data is not None or tuning.replay_fraction:
            raise
        print(f"Forgetting is not measured: {error}")
        return None
    return store
