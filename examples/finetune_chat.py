"""Fine-tune a model on chats with TRL's SFTTrainer, by default with LoRA.

python -m examples.finetune_chat runs/x --data chats.jsonl                  # one {"messages": [{"role", "content"}, ...]} per line
python -m examples.finetune_chat runs/x --data chats.jsonl --lora_rank 0    # all weights
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import warnings

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
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
    save,
    shared_settings,
    splits,
)
from tokenizer.chat import normalized

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


def read_chats(tuning: Tuning) -> Dataset:
    """Return the chats, each as `messages`; raise a `UserError` for a line that is not a chat with an assistant's turn."""
    chats = []
    for number, record in read_records(tuning.data):
        chat = normalized(record.get("messages", record.get("conversations")))
        if chat is None or not any(message["role"] == "assistant" for message in chat):
            raise UserError(
                f"{tuning.data}, line {number} is not a chat with an assistant; each line must be "
                '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.'
            )
        chats.append({"messages": chat})
    return Dataset.from_list(chats)


def give_template(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the tokenizer a chat template if it has none; return the id of the token that ends the assistant's turn.

    Raise a `UserError` if there is no such token.
    """
    if tokenizer.chat_template is None and tokenizer.eos_token is None:
        raise UserError(
            f"The tokenizer of {len(tokenizer)} tokens has no end-of-text token, so answers would never stop; use a model "
            "with a BPE tokenizer."
        )
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TURNS
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(chat)["input_ids"]
    ends = [i for i in ids[-2:] if i in tokenizer.added_tokens_decoder]  # a line break may follow
    if not ends:
        raise UserError("The tokenizer's chat template ends the assistant's turn without a special token; correct it.")
    return ends[-1]


def question(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt for the assistant's first turn."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return tokenizer.apply_chat_template(messages[:first], tokenize=False, add_generation_prompt=True)


def main(arguments: list[str]) -> None:
    tuning = parse(__doc__, arguments)
    need("trl", *["peft"] * bool(tuning.lora_rank))
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # TRL uses the old name of the option
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import has_generation_markers

    chats = splits(read_chats(tuning), tuning, shuffle=True)
    model, tokenizer, original = load(tuning)
    turn_end = give_template(tokenizer)
    model.generation_config.eos_token_id = sorted({turn_end, tokenizer.eos_token_id} - {None})
    context = model.config.max_position_embeddings
    trainer = SFTTrainer(
        model,
        SFTConfig(
            max_length=context,
            assistant_only_loss=has_generation_markers(tokenizer.chat_template),
            gradient_checkpointing=False,
            **shared_settings(tuning),
        ),
        train_dataset=chats["train"],
        eval_dataset={"chats": chats["test"], **original.held_out},
        processing_class=tokenizer,
        peft_config=lora(tuning),
    )
    whole = sum(len(ids) < context for ids in trainer.train_dataset["input_ids"])
    print(
        f"{whole} of {len(chats['train'])} chats are shorter than the context of {context} tokens; the others are cut."
    )
    if not (len(trainer.train_dataset) and len(trainer.eval_dataset["chats"])):  # TRL drops examples without an answer
        raise UserError(
            f"In {tuning.data}, the assistant's turns start after the context of {context} tokens; shorten the chats."
        )
    learned = Learned(len(trainer.train_dataset), len(trainer.eval_dataset["chats"]), "chats")
    tokens = trainer.train_dataset.select_columns(["input_ids", "labels"])
    trainer.train_dataset = original.mixed_into(tokens, tuning.replay_fraction)

    before = losses(trainer)
    trainer.train()
    save(trainer, tokenizer, tuning, before, learned, question(chats["test"][0]["messages"], tokenizer))


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
