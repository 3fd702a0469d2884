"""Pretrained model whose architecture, tokenizer and weights a new run starts from (--init_from)."""

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import nn
from transformers import GPT2Config

from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM, loading
from tokenizer.store.store import TokenStore
from training.checkpoints.loading import check_store, model_errors
from training.step.model import ModelArguments, model_settings

DROPOUTS = {"embd_pdrop", "attn_pdrop", "resid_pdrop"}  # settings of the run, not of the pretrained model
POSITIONS = "transformer.wpe.weight"


def read_architecture(source: str) -> GPT2ScratchConfig:
    """Return the configuration of a pretrained model of GPT2Scratch or GPT-2, a folder or a Hub id. Raise a `UserError` for others."""
    from modeling_gpt2scratch.conversion_gpt2scratch import scratch_config

    with model_errors():
        folder = loading.fetch(source, loading.CONFIG)
        with loading.one_sentence(source):
            described = loading.read_model_config(folder)
            if (kind := described["model_type"]) == "gpt2scratch":
                return GPT2ScratchConfig.from_dict(described)
            if kind != "gpt2":
                raise loading.ModelError(f"it is a {kind} model; only GPT2Scratch and GPT-2 models can be trained")
            return scratch_config(GPT2Config.from_dict(described))


def model_of(source: str, command: ModelArguments, flags: set[str]) -> ModelArguments:
    """Return the settings of a pretrained model, with the dropout of the command and, if the flag is given, its context. Raise a
    `UserError` if a flag contradicts the model, one problem per line."""
    own = model_settings(read_architecture(source))
    asked = {part.name: getattr(command, part.name) for part in fields(command)}
    free = DROPOUTS | ({"n_positions"} & flags)
    wrong = [name for name in asked if name in flags - free and asked[name] != own[name]]
    problems = [f"{name} is {asked[name]}, but {source} has {own[name]}; leave {name} out." for name in wrong]
    if not own["rope_theta"] and asked["n_positions"] > own["n_positions"] and "n_positions" in flags:
        problems.append(
            f"n_positions is {asked['n_positions']}, but {source} has learned only {own['n_positions']} positions; use at most these."
        )
    if problems:
        raise UserError("\n".join(problems))
    return ModelArguments(**own | {name: asked[name] for name in free})


def vocabulary_problems(source: str, store: TokenStore) -> Iterator[str]:
    """Yield the reason why the pretrained model cannot be trained on the store: another tokenizer, or another number of tokens."""
    with model_errors():
        tokenizer = loading.load_tokenizer(source)
    check_store(source, tokenizer, store)
    size, embedded = store.metadata.vocab_size, read_architecture(source).vocab_size
    if size != embedded:
        yield f"{source} has {embedded:,} embeddings for a vocabulary of {size:,} tokens; remove the others before training."


def load_pretrained(source: str, model: nn.Module) -> None:
    """Copy the weights of a pretrained model into `model`, in fp32. Learned positions beyond its context are left out."""
    from modeling_gpt2scratch.conversion_gpt2scratch import from_gpt2

    with model_errors():
        found = loading.load_model(source, torch.float32)
        own = found if isinstance(found, GPT2ScratchForCausalLM) else from_gpt2(found)
    weights = own.state_dict()
    if wrong := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"{source} has weights that are not finite ({', '.join(wrong[:3])}); start from another model.")
    if POSITIONS in weights:
        weights[POSITIONS] = weights[POSITIONS][: model.config.n_positions]
    model.load_state_dict(weights)
