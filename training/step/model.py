"""Model of a run: a `GPT2ScratchForCausalLM` built from the flags and the token store."""

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from common.errors import UserError
from common.limits import setting
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.runtime.device import Setup

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class ModelArguments:
    """Fields of `GPT2ScratchConfig` with their names and defaults, except `rope_theta` and `initializer_range`. The
    store has the vocabulary."""

    n_layer: int = setting(12, "Transformer blocks.", minimum=1, maximum=1000)
    n_head: int = setting(12, "Heads per block; must divide n_embd.", minimum=1, maximum=1024)
    n_embd: int = setting(768, "Width of the model.", minimum=1, maximum=65_536)
    n_positions: int = setting(512, "Context length in tokens.", minimum=2, maximum=1_048_576)
    n_inner: int | None = setting(None, "Width of the MLP. Default: 4 * n_embd.", minimum=1, maximum=262_144)
    activation_function: str = setting("gelu", "gelu (exact), gelu_new (GPT-2's tanh) or relu2 (squared ReLU).")
    normalization: Literal["layer_norm", "rms_norm"] = setting(
        "layer_norm",
        "rms_norm has no weights, also normalizes the embedding, queries and keys, and zeroes output projections "
        "at the start.",
    )
    rope_theta: float | None = setting(
        None, "Base of rotary positions, such as 10000. Default, and 0: learned positions.", minimum=0
    )
    use_bias: bool = setting(True, "Biases in linear layers and LayerNorms.")
    attention_scale: float | None = setting(
        None, "Factor of attention scores. Default: 1 / sqrt(n_embd / n_head).", above=0, maximum=1000
    )
    tie_word_embeddings: bool = setting(False, "Share the token embedding with the head.")
    embd_pdrop: float = setting(0.0, "Dropout probability after the embeddings.", minimum=0, below=1)
    attn_pdrop: float = setting(0.0, "Dropout probability of the attention weights.", minimum=0, below=1)
    resid_pdrop: float = setting(0.0, "Dropout probability of the outputs of attention and MLP.", minimum=0, below=1)
    layer_norm_epsilon: float = setting(1e-5, "Added to the variance in normalizations.", minimum=1e-12, maximum=1)
    initializer_range: float | None = setting(
        None,
        "Standard deviation of the initial weights. Default: 0.02; with rms_norm 0.577 / sqrt(n_embd).",
        minimum=1e-6,
        maximum=10,
    )

    is_modern, has_large_embedding = GPT2ScratchConfig.is_modern, GPT2ScratchConfig.has_large_embedding

    @property
    def usual_initializer_range(self) -> float:
        """`initializer_range` of GPT-2, or for rms_norm that of modded-nanogpt: uniform in (-1, 1) / sqrt(n_embd)."""
        return round(0.577 / math.sqrt(self.n_embd), 4) if self.is_modern else 0.02


def model_config(
    arguments: ModelArguments, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> GPT2ScratchConfig:
    """Return the model's configuration. Raise a `UserError` for inconsistent values, one problem per line."""
    special = {name: getattr(tokenizer, name, None) for name in TOKEN_IDS}
    fields = asdict(arguments)
    theta = fields.pop("rope_theta")
    fields["initializer_range"] = arguments.initializer_range or arguments.usual_initializer_range
    rope = {"rope_type": "default", "rope_theta": theta} if theta else None
    try:
        return GPT2ScratchConfig(vocab_size=vocab_size, rope_parameters=rope, **fields, **special)
    except StrictDataclassError as error:
        raise UserError("\n".join(f"{problem}." for problem in str(error.__cause__ or error).split("; "))) from error


def model_settings(config: GPT2ScratchConfig) -> dict[str, Any]:
    """Return the values of `ModelArguments` for a configuration."""
    names = [part.name for part in fields(ModelArguments) if part.name != "rope_theta"]
    theta = config.rope_parameters["rope_theta"] if config.rope_parameters else None
    return {name: getattr(config, name) for name in names} | {"rope_theta": theta}


def build_model(
    config: GPT2ScratchConfig, setup: Setup, seed: int, load: Callable[[nn.Module], None] | None = None
) -> GPT2ScratchForCausalLM:
    """Build the model in fp32, with initial weights from `seed` or those that `load` writes."""
    torch.manual_seed(seed)
    with torch.device("cpu" if load is None else "meta"):  # skips an initialization that would be overwritten
        model = GPT2ScratchForCausalLM._from_config(config, attn_implementation=setup.attention(config.n_positions))
    if load is not None:
        model.to_empty(device="cpu").tie_weights()
        load(model)
    model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in TOKEN_IDS})
    if setup.gradient_checkpointing:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # Transformers 5.17 lacks the new name
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if setup.bf16_residual:
        model.transformer.drop.register_forward_hook(_to_autocasts_precision)
    return model


def _to_autocasts_precision(_module: nn.Module, _arguments: tuple, stream: torch.Tensor) -> torch.Tensor:
    """Cast the start of the residual stream (B, T, C) to autocast's precision, in which the blocks add to it."""
    device = stream.device.type
    return stream.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else stream
