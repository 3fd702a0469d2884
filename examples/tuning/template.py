"""Chat template, and the token that ends the assistant's turn."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from modeling_gpt2scratch.prompts import turn_end
from tokenizer.cleaning.cleaning import Cleaner

# Template for a tokenizer without one. No token is added: a turn of the assistant ends with the end-of-text token,
# which the model already knows from pre-training. TRL computes the loss on the text between the `generation` tags.
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


@contextmanager
def template_errors() -> Iterator[None]:
    """Raise a `UserError` if the chat template is damaged or refuses a chat. Used as a decorator."""
    try:
        yield
    except TemplateError as error:
        raise UserError(
            f"The model's chat template does not render a chat ({error}); correct chat_template.jinja or the chats."
        ) from error


def without_control_tokens(messages: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return messages, normalized as by --cleaning normalize, without text that the tokenizer would encode as a control
    token, which would end the turn or begin another one. A text, which may be a whole chat, keeps such text."""
    normalize = Cleaner(["normalize"])
    if not isinstance(messages, list):
        return normalize(messages)
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")

    def plain(text: str) -> str:
        text = normalize(text)
        while (shorter := pattern.sub("", text)) != text:  # a removal can create another token
            text = shorter
        return text

    return [message | {"content": plain(message["content"])} for message in messages]


def give_template(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the tokenizer a chat template if it has none; return the id of the token that ends the assistant's turn.
    Raise a `UserError` if no added token ends it."""
    if tokenizer.chat_template is None and tokenizer.eos_token is None:
        raise UserError(
            f"The tokenizer of {len(tokenizer)} tokens has no end-of-text token, so answers would never stop; use a "
            "model with a BPE tokenizer."
        )
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TURNS
    if (end := turn_end(tokenizer)) is None:
        raise UserError("The tokenizer's chat template ends the assistant's turn without an added token; correct it.")
    return end
