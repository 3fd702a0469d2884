"""Chats as text: a record's messages, written out by a chat template (Jinja, as Transformers has them)."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from errors import UserError

# OpenAI's ChatML, as most templates on the Hub have it. What is between the `generation` marks is the assistant's: TRL can
# take the loss of that alone. Chats that are to be answered end with an open turn of the assistant.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MARKS = range(0x100000, 0x10FFFE)  # private use: stand for the first characters of what only reads like a control token
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # as ShareGPT names them


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    control_tokens: tuple[str, ...]  # what the template writes that is no text
    variables: dict[str, str] = field(
        default_factory=dict
    )  # the tokenizer's `bos_token`, `eos_token` ..., for the template

    @staticmethod
    def read(name: str) -> str:
        """The source of `chatml` or of a file.

        Raises:
            UserError: there is no such file, or it is no template.
        """
        from jinja2 import TemplateSyntaxError

        if name == "chatml":
            return CHATML
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"There is no chat template {name}; give a file of Jinja source, or chatml.")
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{name} cannot be read: {error}; give a file of Jinja source, or chatml.") from error
        try:
            ChatTemplate(source, ()).segments([{"role": "user", "content": ""}])
        except ValueError as error:  # what this one chat makes it raise is no matter
            if isinstance(syntax := error.__cause__, TemplateSyntaxError):
                raise UserError(f"{name}, line {syntax.lineno}: {syntax.message}; mend the template.") from error
        return source

    @cached_property
    def control(self) -> re.Pattern:
        tokens = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

    def segments(self, messages: Any) -> list[tuple[str, str | None]]:
        """The chat as (text, the control token after it or None).

        What reads like a control token in a message stays text.

        Raises:
            ValueError: `messages` are no chat, or none that the template can write.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = normalised(messages)
        if chat is None:
            raise ValueError("no list of messages with role and content")
        said = "".join(part for message in chat for part in message.values())
        free = (chr(mark) for mark in MARKS if chr(mark) not in said)
        marks: dict[str, str] = {}

        def marked(found: re.Match) -> str:
            first = found[0][0]
            if first not in marks:
                marks[first] = next(free)
            return marks[first] + found[0][1:]

        for message in chat:
            for name in message:
                while self.control.search(message[name]):  # a token may hold another
                    message[name] = self.control.sub(marked, message[name])
        try:
            [rendered], _ = render_jinja_template([chat], chat_template=self.source, **self.variables)
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the chat template cannot write it: {' '.join(str(error).split())[:200]}") from error
        *parts, rest = self.control.split(rendered)  # text, token, text, token, ..., text
        unmarked = {ord(mark): first for first, mark in marks.items()}
        texts = [part.translate(unmarked) if marks else part for part in (*parts[::2], rest)]
        return list(zip(texts, [*parts[1::2], None], strict=True))


def normalised(messages: Any) -> list[dict[str, str]] | None:
    """`role` and `content` of every message, under those names; None for what is no chat."""
    if not isinstance(messages, list) or not messages:
        return None
    chat = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list):  # parts, of which those that are text count
            texts = (part.get("text") for part in content if isinstance(part, dict))
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        chat.append({"role": ROLES.get(role, role), "content": content})
    return chat
