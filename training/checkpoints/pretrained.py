"""Pretrained model whose architecture, tokenizer and weights a new run starts from (--init_from)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config

from common.errors import Problems, UserError
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM, loading
from tokenizer.store.store import TokenStore
from training.checkpoints.loading import check_store, model_errors
from training.step.model import ModelArguments, model_settings

DROPOUTS = {"embd_pdrop", "attn_pdrop", "resid_pdrop"}  # settings of the run, not of the pretrained model
EMBEDDING, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def read_architecture(source: str) -> GPT2ScratchConfig:
    """Return the configuration of a GPT2Scratch or GPT-2 model, local or on the Hub, or raise a `UserError`."""
    from modeling_gpt2scratch.conversion_gpt2scratch import scratch_config

    with model_errors():
        folder = loading.fetch(source)
        with loading.one_sentence(source):
            content = loading.read_model_config(folder)
            if (kind := content["model_type"]) == "gpt2scratch":
                return GPT2ScratchConfig.from_dict(content)
            if kind != "gpt2":
                raise loading.ModelError(f"it is a {kind} model; only GPT2Scratch and GPT-2 models can be trained")
            return scratch_config(GPT2Config.from_dict(content))


def architecture_of(source: str, command: ModelArguments, flags: set[str]) -> dict[str, Any]:
    """Return the settings of a pretrained model, with the dropout of the command and, if it is among `flags`, its
    context. Raise a `UserError` if a flag contradicts the model, one problem per line."""
    config, values = read_architecture(source), vars(command)
    settings = model_settings(config)
    free = DROPOUTS | ({"n_positions"} & flags)
    problems = [
        f"{name} is {value}, but {source} has {settings[name]}; leave {name} out."
        for name, value in values.items()
        if name in flags - free and value != settings[name]
    ]
    if config.rope_parameters and (kind := config.rope_parameters["rope_type"]) != "default":
        problems.append(f"{source} has rotary positions of type {kind}; train it with Transformers' Trainer.")
    context, most = values["n_positions"], settings["n_positions"]
    if "n_positions" in flags and not settings["rope_theta"] and context > most:
        problems.append(f"n_positions is {context}, but {source} has learned only {most} positions; use at most these.")
    Problems(problems).refuse()
    return settings | {name: values[name] for name in free}


def vocabulary_problems(source: str, store: TokenStore) -> Iterator[str]:
    """Yield a problem if the pretrained model has another number of tokens than the store. Raise a `UserError` if its
    tokenizer is another one."""
    with model_errors():
        tokenizer = loading.load_tokenizer(source)
    check_store(source, tokenizer, store)
    size, embeddings = store.metadata.vocab_size, read_architecture(source).vocab_size
    if size != embeddings:
        yield (
            f"{source} has {embeddings:,} embeddings for a vocabulary of {size:,} tokens; "
            f"remove the others before training."
        )


def load_pretrained(source: str, model: nn.Module) -> None:
    """Copy the weights of a pretrained model into `model`, in fp32, without learned positions beyond its context."""
    from modeling_gpt2scratch.conversion_gpt2scratch import from_gpt2

    with model_errors():
        initial_model = loading.load_model(source, torch.float32)
        if not isinstance(initial_model, GPT2ScratchForCausalLM):
            initial_model = from_gpt2(initial_model)
    weights = initial_model.state_dict()
    if wrong := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"{source} has weights that are not finite ({', '.join(wrong[:3])}); start from another model.")
    if model.config.tie_word_embeddings and not weights[HEAD].equal(weights[EMBEDDING]):
        raise UserError(f"{source} has a head of its own; set tie_word_embeddings to false in its config.json.")
    if POSITIONS in weights:
        weights[POSITIONS] = weights[POSITIONS][: model.config.n_positions]
    model.load_state_dict(weights)
