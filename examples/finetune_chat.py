"""Fine-tune a model on chats with TRL's SFTTrainer, by default with LoRA.

python -m examples.finetune_chat runs/x --data chats.jsonl    # one {"messages": [{"role", "content"}, ...]} per line
python -m examples.finetune_chat runs/x --data chats.jsonl --lora_rank 0    # all weights
python -m examples.finetune_chat runs/x --data smoltalk       # the first 20,000 chats of a named data set or a Hub id
"""

import training.runtime.threads  # noqa: F401  (first: torch reads its settings; for Ctrl-C during other imports)

from itertools import islice
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError
from examples.tuning.base import load
from examples.tuning.measurements import MEASURED, Learned, mean_loss, score, until
from examples.tuning.records import UselessError, read_examples, splits, with_system
from examples.tuning.settings import parse, start
from examples.tuning.template import give_template, template_errors, without_control_tokens
from examples.tuning.trainer import lora, shared_settings, train_and_save
from tokenizer.corpus.chat import normalized

Messages = list[dict[str, str]]


def chat_of(record: dict[str, Any]) -> dict[str, Messages]:
    """Return the chat of a record as `messages`: of `messages`, of ShareGPT's `conversations`, of TRL's `prompt` and
    `completion`, or of Alpaca's `instruction`, `input` and `output`. Raise a `ValueError` if it has no assistant's
    turn that answers another one, or a `UselessError` if an answer is empty."""
    found = next((record[name] for name in ("messages", "conversations") if record.get(name) is not None), None)
    if found is None and {"prompt", "completion"} <= record.keys():
        found = turns(record["prompt"], "user") + turns(record["completion"], "assistant")
    if found is None and {"instruction", "output"} <= record.keys():
        asked = "\n\n".join(str(part) for part in (record["instruction"], record.get("input")) if part)
        found = turns(asked, "user") + turns(record["output"], "assistant")
    if found is None:
        hint = "; examples.finetune_preferences reads pairs" if "rejected" in record else ""
        raise ValueError(
            f"has no chat, but only {', '.join(filter(None, record)) or 'no field'}{hint}; each record must be "
            '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        )
    if (chat := normalized(found)) is None:
        raise ValueError("has a message without a role or without text; each message needs both (role and content)")
    chat = with_system(record, chat)
    roles = [message["role"] for message in chat]
    if "assistant" not in roles[1:]:
        raise ValueError(f"has no answer of the role assistant, but only {', '.join(dict.fromkeys(roles))}")
    if not all(message["content"].strip() for message in chat if message["role"] == "assistant"):
        raise UselessError("has an empty answer of the role assistant")
    return {"messages": chat}


def turns(said: Any, role: str) -> Messages:
    """Return a text as a message of `role`; messages stay."""
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def prompt_of(messages: Messages) -> Messages:
    """Return the messages before the assistant's first answer."""
    return messages[: next(i for i, message in enumerate(messages) if i and message["role"] == "assistant")]


def first_answer(messages: Messages, tokenizer: PreTrainedTokenizerBase, turn_end: int) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt for the assistant's first answer, and of this answer with the token that ends it."""
    asked = prompt_of(messages)
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    ids = tokenizer.apply_chat_template(messages[: len(asked) + 1])["input_ids"]
    start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
    return ids[:start], until(turn_end, ids[start:])


@template_errors()
def main(arguments: list[str]) -> None:
    tuning = parse(__doc__, arguments, "trl")
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import has_generation_markers

    chats = read_examples(tuning, chat_of)
    model, tokenizer, original = load(tuning)
    chats = [{"messages": without_control_tokens(chat["messages"], tokenizer)} for chat in chats]
    prompts = [prompt_of(chat["messages"]) for chat in chats]
    train, held_out = splits(chats, prompts, tuning, "chats with different prompts")
    turn_end = give_template(tokenizer)
    model.generation_config.eos_token_id = sorted({turn_end, tokenizer.eos_token_id} - {None})
    context = model.config.max_position_embeddings
    trainer = SFTTrainer(
        model,
        SFTConfig(
            max_length=context,
            assistant_only_loss=has_generation_markers(tokenizer.chat_template),
            gradient_checkpointing=False,
            train_sampling_strategy="group_by_length",  # batches of short chats, and of windows of the original text
            **shared_settings(tuning),
        ),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora(tuning),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    whole = sum(length < context for length in lengths)
    n_late = len(train) - len(lengths)
    others = f"{len(lengths) - whole} are cut to it, and {n_late}, whose answers start after it, are left out"
    print(
        f"{whole} of {len(train)} chats are shorter than the context of {context} tokens"
        f"{f'; {others}' if whole < len(train) else ''}."
    )
    answers = (first_answer(chat, tokenizer, turn_end) for chat in held_out["messages"])
    answers = [*islice((pair for pair in answers if len(pair[0]) < context), MEASURED)]
    if not (lengths and len(trainer.eval_dataset) and answers):  # TRL drops examples without an answer
        which, remedy = ("held-out chats", ", or choose another --seed") if lengths else ("chats", "")
        raise UserError(
            f"In {tuning.data}, the assistant's turns of all {which} start after the context of {context} tokens; "
            f"shorten them{remedy}."
        )
    scored = trainer.eval_dataset.select(range(min(MEASURED, len(trainer.eval_dataset))))

    def measure(model: PreTrainedModel) -> dict[str, float]:
        is_exact = [is_greedy for _, is_greedy in score(model, answers)]
        return {"loss": mean_loss(model, scored)[0], "exact match": sum(is_exact) / len(is_exact)}

    sizes = len(trainer.train_dataset), len(trainer.eval_dataset)
    tokens = trainer.train_dataset.select_columns(["input_ids", "labels"])
    trainer.train_dataset = original.mixed_into(tokens, tuning.replay_fraction)
    train_and_save(trainer, tokenizer, tuning, original, Learned("fine-tuned", *sizes, "chats", "--chat", measure))


if __name__ == "__main__":
    start(main)
