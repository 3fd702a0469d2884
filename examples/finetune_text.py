"""Fine-tune a model on text with Transformers' Trainer, by default with LoRA.

python -m examples.finetune_text runs/x --data recipes.txt                  # or records, such as a jsonl file: one {"text": "..."} per line
python -m examples.finetune_text runs/x --data recipes.txt --lora_rank 0    # all weights
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import shlex
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from command_line import run
from examples.tuning import (
    Learned,
    Tuning,
    load,
    lora,
    need,
    parse,
    read_examples,
    read_text,
    shared_settings,
    splits,
    train_and_save,
)
from tokenizer.corpus import kind_of

OPENING_TOKENS = 8  # of held-out text, used as a prompt


def read_texts(tuning: Tuning) -> list[str]:
    """Return the documents: the `text` of each record, or the whole file. Raise a `UserError` if there is no text."""
    if tuning.hub is None and kind_of(tuning.data) == "text":
        return [read_text(tuning.data)]
    return read_examples(tuning, text_of)


def text_of(record: dict[str, Any]) -> str:
    if not isinstance(record.get("text"), str):
        raise ValueError('has no text; each record must be {"text": "..."}')
    return record["text"]


def windows(texts: list[str], tokenizer: PreTrainedTokenizerBase, context: int) -> Dataset:
    """Concatenate all texts, each with an end-of-text token, and cut them into windows of one context; drop the rest."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids = [i for text in texts for i in [*tokenizer.encode(text, add_special_tokens=False, verbose=False), *end]]
    rows = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main(arguments: list[str]) -> None:
    tuning = parse(__doc__, arguments)
    need(*["peft"] * bool(tuning.lora_rank))

    model, tokenizer, original = load(tuning)
    context = model.config.max_position_embeddings
    unit = f"windows of {context} tokens"
    texts = splits(windows(read_texts(tuning), tokenizer, context), tuning, unit, shuffle=False)
    if tuning.lora_rank:
        from peft import get_peft_model

        model = get_peft_model(model, lora(tuning))
        model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(**shared_settings(tuning)),
        train_dataset=original.mixed_into(texts["train"], tuning.replay_fraction),
        eval_dataset=texts["test"],
    )

    def measure() -> dict[str, float]:
        return {"loss": trainer.evaluate()["eval_loss"]}

    opening = shlex.quote(tokenizer.decode(texts["test"][0]["input_ids"][:OPENING_TOKENS]))
    sizes = len(texts["train"]), len(texts["test"])
    learned = Learned("fine-tuned", *sizes, unit, f"--prompt {opening}", measure)
    train_and_save(trainer, tokenizer, tuning, original, learned)


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
