"""Text generation for `generate.py`, for samples at each validation, and for the memorization test."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from common.errors import UserError
from common.limits import free
from modeling_gpt2scratch.loading import ModelError
from modeling_gpt2scratch.prompts import LOWEST_TEMPERATURE, encode_prompt, end_tokens
from tokenizer.store.store import TokenStore

OPENING_TOKENS = 16  # first tokens of a validation document, used as a prompt if none is given


@dataclass
class SamplingArguments:
    sample_prompts: list[str] = free(
        [], "Prompts to continue at each validation. Default: openings of held-out documents.", free_text=True
    )
    sample_tokens: int = free(64, "New tokens per prompt; 0 for no samples.", maximum=100_000)
    sample_temperature: float = free(0.8, "Temperature of the samples; 0 picks the most likely token.", maximum=1000)
    sample_top_k: int = free(50, "Sample from this many most likely tokens; 0 for all.")


def generation_config(temperature: float, top_k: int = 0, top_p: float = 1.0, **options) -> GenerationConfig:
    """Return the configuration for the usual sampling flags. A temperature of 0 or near 0 means greedy decoding."""
    if temperature < LOWEST_TEMPERATURE:
        return GenerationConfig(do_sample=False, **options)
    return GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, **options)


def compiled(config: GenerationConfig) -> GenerationConfig:
    """Set `config` to generate with a compiled step and a static cache, whose shapes never change."""
    config.cache_implementation, config.compile_config = "static", CompileConfig()
    config.compile_config._compile_all_devices = True  # by default, Transformers compiles on accelerators only
    return config


class TextStream(BaseStreamer):
    """Streamer that decodes ids as they arrive and writes text as soon as its characters are complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        self.written = 0  # characters written so far
        self.prompt_follows = True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_follows:  # `generate` passes the prompt first
            self.prompt_follows = False
            return
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        text = text.rstrip("\ufffd")  # the end may be the first bytes of a character
        self.write(text[self.written :])
        self.written = max(self.written, len(text))  # Llama's decoder takes the characters before these back

    def end(self) -> None:
        self.prompt_follows = True


def continue_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    number: int,
    max_new_tokens: int,
    config: GenerationConfig,
    write: Callable[[str], object] | None = None,
) -> list[str]:
    """Return `number` continuations of `prompt`, generated in one batch. With one, `write` receives the text as it
    comes."""
    config.eos_token_id = end_tokens(model) or None
    config.pad_token_id = model.config.pad_token_id
    room = model.config.max_position_embeddings - 1  # a prompt that fills the context leaves none for new tokens
    tokens = torch.tensor([encode_prompt(tokenizer, prompt, model)[-room:]] * number, device=model.device)  # (B, T)
    stream = None if write is None else TextStream(tokenizer, write)
    texts = continue_tokens(model, tokens, max_new_tokens, config, stream)
    return tokenizer.batch_decode(texts, skip_special_tokens=True)


@torch.no_grad()
def continue_tokens(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    max_new_tokens: int,
    config: GenerationConfig,
    stream: TextStream | None = None,
) -> list[list[int]]:
    """Continue each row of `tokens` (B, T) until an end of text, even beyond the model's context.
    When the context is full, the second half of each unfinished text becomes its new prompt."""
    context, eos = model.config.max_position_embeddings, config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    texts: list[list[int]] = [[] for _ in tokens]
    rows = texts  # unfinished texts, which `tokens` holds
    while max_new_tokens > 0 and rows:
        T = tokens.shape[1]
        config.max_new_tokens = min(max_new_tokens, context - T)
        mask = torch.ones_like(tokens)  # no padding, even if the prompt contains the id of the padding token
        output = model.generate(tokens, attention_mask=mask, generation_config=config, streamer=stream)
        max_new_tokens -= config.max_new_tokens
        new = output[:, T:].tolist()
        lengths = [next((i for i, id in enumerate(ids) if id in ends), None) for ids in new]  # padding follows an end
        for row, ids, length in zip(rows, new, lengths, strict=True):
            row += ids[:length]
        unfinished_rows = [i for i, length in enumerate(lengths) if length is None]
        rows = [rows[i] for i in unfinished_rows]
        tokens = output[unfinished_rows, -max(1, context // 2) :]
    return texts


def with_prompts(
    arguments: SamplingArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> SamplingArguments:
    """Return the arguments with the given prompts, or with the openings of the first three validation documents.
    The tokenizer must be able to encode given prompts."""
    if arguments.sample_prompts:
        try:
            for prompt in arguments.sample_prompts:
                encode_prompt(tokenizer, prompt)
        except ModelError as error:
            raise UserError(f"sample_prompts: {error}") from error
        return arguments
    tokens, offsets = store.memory_map("val"), store.offsets("val")
    documents = islice(((start, end) for start, end in pairwise(offsets) if end > start + 1), 3)
    openings = [tokens[start : end - 1][:OPENING_TOKENS] for start, end in documents] or [tokens[:OPENING_TOKENS]]
    has_turns = tokenizer.chat_template is not None  # whose control tokens belong to the text

    def whole_characters(ids: list[int]) -> str:
        texts = (tokenizer.decode(ids[: len(ids) - cut], skip_special_tokens=not has_turns) for cut in range(4))
        return max((text.rstrip("\ufffd") for text in texts), key=len)

    return replace(arguments, sample_prompts=[whole_characters(opening.tolist()) for opening in openings])


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: SamplingArguments, seed: int
) -> list[tuple[str, str]]:
    """Return each prompt with its continuation. The same weights and seed give the same text."""
    if arguments.sample_tokens == 0:
        return []
    torch.manual_seed(seed)
    config = generation_config(arguments.sample_temperature, arguments.sample_top_k)
    training = model.training
    model.eval()
    samples = [
        (prompt, continue_texts(model, tokenizer, prompt, 1, arguments.sample_tokens, config)[0])
        for prompt in arguments.sample_prompts
    ]
    model.train(training)
    return samples
