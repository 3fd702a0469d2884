"""Generate text or chat with a run, a checkpoint, a model folder or a Hub id.

python generate.py --prompt "def "                       # the model in this repository
python generate.py runs/x --prompt "Once upon a time"
python generate.py runs/x/checkpoints/step_00001000 --prompt "Once" --temperature 0
python generate.py openai-community/gpt2 --prompt "Once" --max_new_tokens 200 --top_p 0.9
python generate.py runs/x --prompt "Once" --num_return_sequences 32 --dtype bfloat16
python generate.py runs/x-chats --chat
"""

# First: torch reads its settings; also for Ctrl-C during the other imports.
import training.runtime.threads  # noqa: F401

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from common.terminal import printable
from modeling_gpt2scratch.loading import ModelError, arrange_weights, check_logits
from modeling_gpt2scratch.prompts import chat_ids, encode_prompt, end_tokens
from training.checkpoints.loading import find_model, load_any_model, model_errors
from training.evaluation.sampling import TextStream, compiled, continue_texts, continue_tokens, generation_config
from training.runtime.hardware import check_kernels

REPOSITORY = Path(__file__).parent
BATCH_SIZE = 32  # continuations per batch; GPT-2's keys and values take 75 MB per continuation at full context in fp32
CHAT_HELP = """\
/reset  forget the conversation     /system TEXT  also set the system message
/exit   end the chat, like Ctrl-D   Ctrl-C        stop an answer or a line"""


@dataclass
class GenerateArguments:
    model: str | None = setting(None, "The model to load; default: the one in this repository.")
    prompt: str = setting("", "Text to continue; empty starts a new text.", free_text=True)
    chat: bool = setting(False, "Chat in the terminal, or answer each line of stdin; prompt is the first message.")
    max_new_tokens: int | None = setting(None, "Maximum number of new tokens; default: 100, in a chat 400.", minimum=1)
    num_return_sequences: int = setting(1, "Number of continuations; several are generated as a batch.", minimum=1)
    temperature: float = setting(0.8, "Sampling temperature; 0 always picks the most likely token.", maximum=1000)
    top_k: int = setting(50, "Sample from this many most likely tokens; 0 for all.")
    top_p: float = setting(1.0, "Sample from the most likely tokens with this total probability.", above=0, maximum=1)
    repetition_penalty: float = setting(1.0, "Above 1, repeated tokens are less likely.", minimum=0.01, maximum=100)
    seed: int | None = setting(None, "Random seed; the same seed gives the same text.", below=2**63)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Precision; auto: as saved. bfloat16 reads half the bytes, but its rounding can change the text."
    )
    torch_compile: bool = setting(
        False, "Compile a decoding step, which takes seconds. For GPUs: on a CPU it gained little or nothing."
    )


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((GenerateArguments,), __doc__, positional="model").parse(arguments)
    if options.chat and (options.num_return_sequences > 1 or options.torch_compile):
        raise UserError("num_return_sequences and torch_compile do not apply to a chat; leave them out.")
    check_kernels()
    source = find_model(options.model or str(REPOSITORY))
    model, tokenizer = load_any_model(source, options.dtype)
    # Keep only the end-of-text tokens. The flags set all other values. A max_length here would cause a warning in every
    # window.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if options.num_return_sequences == 1:
        arrange_weights(model)
    config = generation_config(
        options.temperature, options.top_k, options.top_p, repetition_penalty=options.repetition_penalty
    )
    if options.torch_compile:
        config = compiled(config)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    with model_errors():
        check_logits(source, model)
        ids = [] if options.chat else encode_prompt(tokenizer, options.prompt, model)
    if options.chat:
        config.max_new_tokens = options.max_new_tokens or 400
        chat(model, tokenizer, options.prompt, config)
        return
    number, context = options.max_new_tokens or 100, model.config.max_position_embeddings
    if len(ids) >= context:
        print(f"The prompt has {len(ids)} tokens; only the last {context - 1} are used.", file=sys.stderr)
    if options.num_return_sequences == 1:
        write(options.prompt)
        continue_texts(model, tokenizer, options.prompt, 1, number, config, write)
        write("\n")
        return
    for start in range(0, options.num_return_sequences, BATCH_SIZE):
        batch = min(BATCH_SIZE, options.num_return_sequences - start)
        for text in continue_texts(model, tokenizer, options.prompt, batch, number, config):
            write(f"{options.prompt}{text}\n")


def chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, config: GenerationConfig) -> None:
    """Answer `prompt`, if given, and the lines of stdin. Ctrl-C stops an answer."""
    answer_limit, context = config.max_new_tokens, model.config.max_position_embeddings
    with model_errors():  # there may be no chat template, or one that renders no chat
        chat_ids(tokenizer, [{"role": "user", "content": ""}], context * 3 // 4)
    config.eos_token_id, config.pad_token_id = end_tokens(model) or None, model.config.pad_token_id
    note = partial(print, file=sys.stderr, flush=True)
    system, turns = [], []  # messages
    for line in map(str.strip, lines(prompt)):
        command, _, text = line.partition(" ")
        if command == "/exit":
            return
        if command in ("/reset", "/system"):
            turns = []
            if command == "/system":
                system = [{"role": "system", "content": text.strip()}] if text else []
            note(f"A new conversation starts, {'with' if system else 'without'} a system message.")
        elif command[:1] == "/" and command[1:].isalpha():
            note(CHAT_HELP if command == "/help" else f"Unknown command {command}.\n{CHAT_HELP}")
        elif line:
            chat = [*turns, {"role": "user", "content": line}]
            try:
                ids, left_out = chat_ids(tokenizer, system + chat, context * 3 // 4)
            except ModelError as problem:
                note(problem)
                continue
            if left_out:
                note(f"The context of {context:,} tokens is full: the oldest {left_out} messages are left out.")
            limit = min(answer_limit, context - len(ids))
            stream, new = TextStream(tokenizer, write), []
            with suppress(KeyboardInterrupt):
                [new] = continue_tokens(model, torch.tensor([ids], device=model.device), limit, config, stream)
            write("\n")
            if len(new) == limit:
                is_cut = limit == answer_limit
                reason = f"max_new_tokens is {limit}" if is_cut else f"the context of {context:,} tokens is full"
                note(f"The answer ends here: {reason}.")
            answer = tokenizer.decode(stream.ids, skip_special_tokens=True)
            turns = [*chat[left_out:], {"role": "assistant", "content": answer}]


def write(text: str) -> None:
    """Print a piece of text."""
    print(printable(text, sys.stdout), end="", flush=True)


def lines(prompt: str) -> Iterator[str]:
    """Yield `prompt`, if given, and the lines of stdin. In a terminal, lines can be edited, and Ctrl-C clears one: an
    answer may end just before it is stopped. Ctrl-C twice ends the chat."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 (None if stdin was closed)
    sys.stdin.reconfigure(errors="replace")
    if is_terminal := sys.stdin.isatty():
        print(CHAT_HELP)
        with suppress(ImportError):  # Windows lacks it
            import readline  # noqa: F401  line editing for input()
    yield prompt
    is_warned = False
    with suppress(EOFError):
        while True:
            try:
                yield input("\n> " if is_terminal else "")
                is_warned = False
            except KeyboardInterrupt:
                if not is_terminal or is_warned:
                    raise
                is_warned = True
                print("\nCtrl-C again or Ctrl-D ends the chat.", end="")
    print(end="\n" * is_terminal)


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
