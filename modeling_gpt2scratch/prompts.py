"""Prompts and chats for a model as ids, and the tokens that end a text. This file is not uploaded with models."""

import copy
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_gpt2scratch.loading import ModelError, check_tokenizer, load_model, load_tokenizer, one_sentence

CONTEXT = 2048  # tokens of a window, for models whose positions have no limit
LOWEST_TEMPERATURE = 1e-6  # logits divided by a smaller number may overflow in float32


def load_with_tokenizer(
    source: str | Path, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer. The context of models without a limit, such as Bloom, is set to `CONTEXT`; models
    for images and text get the sizes of their text model. Raise a `ModelError` if one cannot be loaded or they do not
    match."""
    model = load_model(source, dtype)  # first: it checks config.json, which the tokenizer reads too
    tokenizer = load_tokenizer(source)
    check_tokenizer(source, model, tokenizer)
    if (end := add_turn_end(model, tokenizer)) is not None:
        token = tokenizer.added_tokens_decoder[end]  # some tokenizers add it as a usual one, which is shown as text
        token.special = True
        tokenizer.add_tokens([token], special_tokens=True)
    if not hasattr(model.config, "max_position_embeddings"):
        model.config.max_position_embeddings = CONTEXT
    for name in ("pad_token_id", "vocab_size", "hidden_size"):
        if not hasattr(model.config, name):
            setattr(model.config, name, getattr(model.config.get_text_config(), name, None))
    return model, tokenizer


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a text, including the token that ends a turn of a chat model."""
    ends = model.generation_config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the added token that ends an assistant's turn in the chat template, or None."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 3 4"}]  # three tokens or more
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    while ids and not tokenizer.decode(ids[-1:]).strip():  # a line break may follow, of several tokens
        ids.pop()
    return next((id for id in ids[-1:] if id in tokenizer.added_tokens_decoder), None)


def add_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Add the token that ends a turn to the tokens that end a text, and return it, or None if there is none."""
    with suppress(Exception):  # no template, or one that does not render a chat
        if (end := turn_end(tokenizer)) is not None and end not in (ends := end_tokens(model)):
            model.generation_config.eos_token_id = [*ends, end]
        return end
    return None


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], room: int) -> tuple[list[int], int]:
    """Return at most `room` ids of a chat with an open turn of the assistant, and the number of oldest messages left
    out for that. A system message stays. Raise a `ModelError` if no template renders the chat or if the last message
    alone is too long."""
    if tokenizer.chat_template is None:
        raise ModelError("This model has no chat template; fine-tune it on chats first (docs/finetuning.md).")
    system = messages[:1] if messages[0]["role"] == "system" else []
    for start in (i for i, message in enumerate(messages) if message["role"] == "user"):
        ids = _encode_chat(tokenizer, system + messages[start:])
        if len(ids) <= room:
            return ids, start - len(system)
    subject = "The message and the system message have" if system else "The message has"
    raise ModelError(f"{subject} {len(ids)} tokens, but at most {room} fit; write a shorter text.")


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a chat. Text of a message that looks like a control token stays text."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'})")
    # If there is such text, private-use characters replace the first characters of all control tokens while the
    # template renders.
    is_masked = any(control.search(message["content"]) for message in messages)
    contents = {character for message in messages for character in message["content"]}
    free = (mask for mask in range(0x100000, 0x10FFFE) if chr(mask) not in contents)
    masks = dict(zip((ord(token[0]) for token in special), free, strict=False)) if is_masked else {}
    chat = [message | {"content": message["content"].translate(masks)} for message in messages]
    with one_sentence("The chat template", "does not render this chat"):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        if not text:
            raise ModelError("it renders an empty text")
    if not is_masked:
        return encode(tokenizer, text)
    first_characters, ids = {mask: character for character, mask in masks.items()}, []
    tokenizer = copy.deepcopy(tokenizer)  # for `split_special_tokens`, a flag that other threads would see
    parts = control.split(text)  # text, control token, text, ..., text
    tokens = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    for i in range(1, len(parts), 2):  # a control token may take the blanks next to it
        parts[i - 1] = parts[i - 1].rstrip() if tokens[parts[i]].lstrip else parts[i - 1]
        parts[i + 1] = parts[i + 1].lstrip() if tokens[parts[i]].rstrip else parts[i + 1]
    for i, part in enumerate(parts):
        ids += encode(tokenizer, part.translate(first_characters), split_special_tokens=i % 2 == 0)
        if getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", None) == "first":
            tokenizer.backend_tokenizer.pre_tokenizer.prepend_scheme = "never"  # for the parts after the first one
    return ids


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, model: PreTrainedModel | None = None) -> list[int]:
    """Return the ids of `prompt`, or if it is empty the token before a text: that of the end of the text before, which
    this project's models are trained on, or the beginning-of-text token. A `model` of another project also gets this
    token before a prompt if its tokenizer adds it. Raise a `ModelError` for an empty prompt if the tokenizer lacks both
    tokens, or for a character that it cannot encode."""
    ids, bos, eos = encode(tokenizer, prompt), tokenizer.bos_token_id, tokenizer.eos_token_id
    is_own = model is None or model.config.model_type == "gpt2scratch"
    start = eos if is_own and eos is not None else bos
    is_added = not is_own and tokenizer.encode("")[:1] == [bos]
    if start is not None and (not ids or (is_added and ids[0] != bos)):
        ids = [start, *ids]
    if not ids:
        raise ModelError(
            "The prompt is empty, and this model's tokenizer has no beginning-of-text token; give a prompt."
        )
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    """Return the ids of `text`. Raise a `ModelError` if it is not UTF-8 or has a character that the tokenizer cannot
    encode."""
    try:
        text.encode()
        return tokenizer.encode(text, add_special_tokens=False, verbose=False, **options)
    except UnicodeEncodeError as error:
        raise ModelError("The text is not UTF-8.") from error
    except Exception as error:  # the Rust library raises plain exceptions
        unknown = ", ".join(map(repr, sorted(set(text) - set(tokenizer.get_vocab()))[:10]))
        raise ModelError(
            f"The text contains {unknown}, which is not among this model's {len(tokenizer)} characters; remove it."
        ) from error
