"""Generate text with a run, a checkpoint, a model folder or a Hub id.

python generate.py runs/x --prompt "Once upon a time"
python generate.py runs/x/checkpoints/step_00001000 --prompt "Once" --temperature 0
python generate.py openai-community/gpt2 --prompt "Once" --max_new_tokens 200 --top_p 0.9
python generate.py runs/x --prompt "Once" --num_return_sequences 32 --dtype bfloat16
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from command_line import FlagParser, run
from errors import UserError
from limits import setting
from modeling_gpt2scratch.loading import arrange_weights
from training.loading import find_model, load_with_tokenizer
from training.sampling import compiled, continue_texts, encode_prompt, generation_config

AT_ONCE = 32  # continuations per batch; GPT-2's keys and values take 75 MB per continuation at full context in fp32


@dataclass
class GenerateArguments:
    model: str | None = setting(
        None, "The model to load.", needed=("a model", 'python generate.py runs/x --prompt "Once"')
    )
    prompt: str = setting("", "Text to continue; empty starts a new text.", free_text=True)
    max_new_tokens: int = setting(100, "Number of tokens to generate; may exceed the context length.", minimum=1)
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
    (options,) = FlagParser((GenerateArguments,), __doc__.splitlines()[0], positional="model").parse(arguments)
    source = find_model(options.model)
    model, tokenizer = load_with_tokenizer(source, options.dtype)
    # Keep only the end-of-text tokens. The flags set all other values. A max_length here would cause a warning in every window.
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
    ids = encode_prompt(tokenizer, options.prompt)
    with torch.no_grad():
        if not model(torch.tensor([ids[-1:]], device=model.device)).logits.isfinite().all():
            raise UserError(f"{source} computes logits that are not finite: its weights or config.json are damaged.")
    n_prompt, context = len(ids), model.config.max_position_embeddings
    if n_prompt >= context:
        print(f"The prompt has {n_prompt} tokens; only the last {context - 1} are used.", file=sys.stderr)
    write = partial(print, end="", flush=True)
    if options.num_return_sequences == 1:
        write(options.prompt)
        continue_texts(model, tokenizer, options.prompt, 1, options.max_new_tokens, config, write)
        write("\n")
        return
    for done in range(0, options.num_return_sequences, AT_ONCE):
        number = min(AT_ONCE, options.num_return_sequences - done)
        for text in continue_texts(model, tokenizer, options.prompt, number, options.max_new_tokens, config):
            write(f"{options.prompt}{text}\n")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
