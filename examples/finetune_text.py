"""Fine-tune a model on text with Transformers' Trainer, by default with LoRA.

python -m examples.finetune_text runs/x --data recipes.txt                  # or a jsonl file: one {"text": "..."} per line
python -m examples.finetune_text runs/x --data recipes.txt --lora_rank 0    # all weights
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from command_line import run
from errors import UserError
from examples.tuning import (
    Learned,
    Tuning,
    load,
    lora,
    losses,
    need,
    parse,
    read_records,
    read_text,
    save,
    shared_settings,
    splits,
)

OPENING_TOKENS = 8  # of held-out text, used as a prompt


def read_texts(tuning: Tuning) -> list[str]:
    """Return the documents: the `text` of each jsonl record, or the whole file. Raise a `UserError` if there is no text."""
    if Path(tuning.data).suffix != ".jsonl":
        return [read_text(tuning.data)]
    texts = []
    for number, record in read_records(tuning.data):
        if not isinstance(record.get("text"), str):
            raise UserError(f'{tuning.data}, line {number} has no text; each line must be {{"text": "..."}}.')
        texts.append(record["text"])
    return texts


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
    texts = splits(windows(read_texts(tuning), tokenizer, model.config.max_position_embeddings), tuning, shuffle=False)
    if tuning.lora_rank:
        from peft import get_peft_model

        model = get_peft_model(model, lora(tuning))
        model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(**shared_settings(tuning)),
        train_dataset=original.mixed_into(texts["train"], tuning.replay_fraction),
        eval_dataset={"text": texts["test"], **original.held_out},
    )
    before = losses(trainer)
    trainer.train()
    learned = Learned(
        len(texts["train"]), len(texts["test"]), f"windows of {model.config.max_position_embeddings} tokens"
    )
    opening = tokenizer.decode(texts["test"][0]["input_ids"][:OPENING_TOKENS])
    save(trainer, tokenizer, tuning, before, learned, opening)


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
