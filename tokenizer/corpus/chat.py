"""Chat templates: render the messages of a record as text (Jinja, as in Transformers)."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError

# OpenAI's ChatML, as in most templates on the Hub. TRL can limit the loss to the text between the `generation` marks.
# With `add_generation_prompt`, a chat ends with an open turn of the assistant.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
TURN_MARK = re.compile(r"<\|\w+\|>")
MASKS = range(0x100000, 0x10FFFE)  # private-use characters that mask text that looks like a control token
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # role names of ShareGPT


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    control_tokens: tuple[str, ...]  # tokens that the template writes
    variables: dict[str, str] = field(default_factory=dict)  # the tokenizer's `bos_token`, `eos_token` and others

    @staticmethod
    def read(name: str) -> str:
        """Return the source of the built-in template `chatml` or of a file. Raise a `UserError` for another file, such
        as a plain text, which would be every document, and part of the published model."""
        from jinja2 import TemplateSyntaxError

        if name == "chatml":
            return CHATML
        path = Path(os.path.expanduser(name))
        try:
            if not path.is_file():
                raise ValueError("it is not a file")
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(
                f"The chat template {name} cannot be read ({error}); give a Jinja file, or chatml."
            ) from error
        if "{{" not in source and "{%" not in source:
            raise UserError(f"{name} does not write the messages of a chat; give a Jinja template, or chatml.")
        try:
            ChatTemplate(source, ()).segments([{"role": "user", "content": ""}])
        except ValueError as error:  # only the syntax is checked; a template may refuse this chat
            if isinstance(syntax := error.__cause__, TemplateSyntaxError):
                raise UserError(f"{name}, line {syntax.lineno}: {syntax.message}; correct the template.") from error
        return source

    @cached_property
    def control(self) -> re.Pattern:
        tokens = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

    @property
    def marks(self) -> list[str]:
        """Marks such as `<|user|>` that it writes for the usual roles, also if it composes them of a role's name."""
        texts = []
        for roles in (("system", "user", "assistant"), ("user", "assistant")):  # a template may refuse `system`
            with suppress(ValueError):
                texts += [text for text, _ in self.segments([{"role": role, "content": "1"} for role in roles])]
        return TURN_MARK.findall("".join(texts))

    @property
    def ends_turns(self) -> bool:
        """Whether a control token, and at most blanks after it, ends the assistant's answer; also if the template
        refuses the chat that this is tried with."""
        try:
            *answer, (tail, _) = self.segments([{"role": role, "content": "1"} for role in ("user", "assistant")])
        except ValueError:
            return True
        return bool(answer) and not tail.strip()

    def segments(self, messages: Any) -> list[tuple[str, str | None]]:
        """Render a chat as pairs: text, and the control token after it or None. Raise a `ValueError` if that fails.
        Message text that looks like a control token stays text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = normalized(messages)
        if chat is None:
            raise ValueError("it is not a list of messages with role and content")
        content = "".join(part for message in chat for part in message.values())
        marks: dict[str, str] = {}  # by the first character of a token, which they replace
        if self.control.search(content):
            free = (chr(mark) for mark in MASKS if chr(mark) not in content)
            marks = dict(zip(dict.fromkeys(token[0] for token in self.control_tokens), free, strict=False))
            for message in chat:
                for name in message:
                    while self.control.search(message[name]):  # a token can contain another one
                        message[name] = self.control.sub(lambda token: marks[token[0][0]] + token[0][1:], message[name])
        try:
            [result], _ = render_jinja_template([chat], chat_template=self.source, **self.variables)
        except Exception as error:  # a template can raise any exception
            raise ValueError(f"the chat template cannot render it: {' '.join(str(error).split())[:200]}") from error
        *parts, tail = self.control.split(result)  # text, token, text, token, ..., text
        originals = {ord(mark): character for character, mark in marks.items()}
        texts = [part.translate(originals) if marks else part for part in (*parts[::2], tail)]
        return list(zip(texts, [*parts[1::2], None], strict=True))


def normalized(messages: Any) -> list[dict[str, str]] | None:
    """Return `role` and `content` of every message, or None if `messages` is not a chat."""
    if not isinstance(messages, list) or not messages:
        return None
    chat = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list):  # a list of parts, of which some are text
            texts = (part.get("text") for part in content if isinstance(part, dict))
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        chat.append({"role": ROLES.get(role, role), "content": content})
    return chat
