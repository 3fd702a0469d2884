"""Fine-tune a model on text with Transformers' Trainer, by default with LoRA.

python -m examples.finetune_text runs/x --data recipes.txt    # or records, such as jsonl: one {"text": "..."} per line
python -m examples.finetune_text runs/x --data recipes.txt --lora_rank 0    # all weights
"""

import training.runtime.threads  # noqa: F401  (first: torch reads its settings; for Ctrl-C during other imports)

import shlex
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from common.errors import UserError
from examples.tuning.base import load
from examples.tuning.measurements import MEASURED, Learned, mean_loss
from examples.tuning.records import HELD_OUT, read_examples, read_texts
from examples.tuning.settings import parse, start
from examples.tuning.trainer import lora, shared_settings, train_and_save
from modeling_gpt2scratch.prompts import encode
from tokenizer.cleaning.cleaning import Cleaner
from training.checkpoints.loading import model_errors

OPENING_TOKENS = 8  # of held-out text, used as a prompt


def text_of(record: dict[str, Any]) -> str:
    if not isinstance(record.get("text"), str):
        raise ValueError('has no text; each record must be {"text": "..."}')
    return record["text"]


def windows(texts: list[str], tokenizer: PreTrainedTokenizerBase, context: int) -> Dataset:
    """Concatenate all texts, normalized as for pre-training, each with an end-of-text token, and cut them into windows
    of one context; drop the rest. Raise a `UserError` for a character that the tokenizer cannot encode."""
    normalize = Cleaner(["normalize"])
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    with model_errors():
        # As in pre-training, "<|endoftext|>" in a text is text, and no control token.
        ids = [i for text in texts for i in [*encode(tokenizer, normalize(text), split_special_tokens=True), *end]]
    rows = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main(arguments: list[str]) -> None:
    tuning = parse(__doc__, arguments)
    texts = read_texts(tuning) if tuning.is_text else read_examples(tuning, text_of)
    model, tokenizer, original = load(tuning)
    context = model.config.max_position_embeddings
    unit = f"windows of {context} tokens"
    rows = windows(texts, tokenizer, context)
    if len(rows) < 2:
        raise UserError(f"At least 2 {unit} are needed, because one is held out; {tuning.data} provides {len(rows)}.")
    texts = rows.train_test_split(test_size=max(1, int(len(rows) * HELD_OUT)), shuffle=False)  # the end is held out
    if tuning.lora_rank:
        from peft import get_peft_model

        set_seed(tuning.seed)  # Trainer sets it after the adapter has its random values
        model = get_peft_model(model, lora(tuning))
        model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(**shared_settings(tuning)),
        train_dataset=original.mixed_into(texts["train"], tuning.replay_fraction),
    )
    scored = texts["test"].select(range(min(MEASURED, len(texts["test"]))))

    def measure(model: PreTrainedModel) -> dict[str, float]:
        return {"loss": mean_loss(model, scored)[0]}

    opening = tokenizer.decode(texts["test"][0]["input_ids"][:OPENING_TOKENS]).strip("\ufffd")  # parts of a character
    opening = shlex.quote(" ".join(opening.split()))
    sizes = len(texts["train"]), len(texts["test"])
    learned = Learned("fine-tuned", *sizes, unit, f"--prompt={opening}", measure)
    train_and_save(trainer, tokenizer, tuning, original, learned)


if __name__ == "__main__":
    start(main)
