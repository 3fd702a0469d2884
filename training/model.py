"""The model of a run: flags, and what the token store decides, become a `GPT2ScratchForCausalLM`."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from limits import setting
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.checkpoint import load_weights
from training.device import DeviceArguments
from training.embedding import make_embeddings_deterministic


@dataclass
class ModelArguments:
    """The fields of `GPT2ScratchConfig`, under its names and with its defaults; the vocabulary is the store's."""

    n_layer: int = setting(12, "Number of transformer blocks.", minimum=1, maximum=1000)
    n_head: int = setting(12, "Attention heads a block; must divide n_embd.", minimum=1, maximum=1024)
    n_embd: int = setting(768, "Width of the residual stream.", minimum=1, maximum=65_536)
    n_positions: int = setting(512, "Context length in tokens.", minimum=1, maximum=1_048_576)
    n_inner: int | None = setting(None, "Width of the MLP; 4 * n_embd where left out.", minimum=1, maximum=262_144)
    activation_function: str = setting("gelu", "gelu (exact) or gelu_new (GPT-2's tanh).")
    tie_word_embeddings: bool = setting(False, "Use the token embedding as the head too.")
    embd_pdrop: float = setting(0.0, "Dropout probability after the embeddings.", minimum=0, below=1)
    attn_pdrop: float = setting(0.0, "Dropout probability on the attention weights.", minimum=0, below=1)
    resid_pdrop: float = setting(0.0, "Dropout probability on what a block adds.", minimum=0, below=1)
    layer_norm_epsilon: float = setting(1e-5, "Added to the variance in LayerNorm.", minimum=1e-12, maximum=1)
    initializer_range: float = setting(0.02, "Standard deviation of the initial weights.", minimum=1e-6, maximum=10)


def model_config(
    arguments: ModelArguments, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[GPT2ScratchConfig | None, list[str]]:
    """The configuration, or the problems that forbid it."""
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return GPT2ScratchConfig(vocab_size=vocab_size, **asdict(arguments), **special), []
    except StrictDataclassError as error:
        return None, [f"{problem}." for problem in str(error.__cause__ or error).split("; ")]


def build_model(
    config: GPT2ScratchConfig, resume_from: Path | None, device: DeviceArguments, attention: str
) -> GPT2ScratchForCausalLM:
    """In fp32: fresh weights from the current random state, or those of a checkpoint.

    Raises:
        UserError: the checkpoint's weights do not fit.
    """
    if resume_from is not None:
        with torch.device("meta"):  # nothing is drawn that would be replaced
            model = GPT2ScratchForCausalLM._from_config(config, attn_implementation=attention)
        model.to_empty(device="cpu").tie_weights()
        load_weights(resume_from, model)
    else:
        model = GPT2ScratchForCausalLM._from_config(config, attn_implementation=attention)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    make_embeddings_deterministic(model.transformer)
    if device.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if device.bf16_residual:
        model.transformer.drop.register_forward_hook(_to_autocasts_precision)
    return model


def _to_autocasts_precision(_module: nn.Module, _arguments: tuple, stream: torch.Tensor) -> torch.Tensor:
    """Where the residual stream begins (B, T, C). All that blocks add to it is in this precision already."""
    device = stream.device.type
    return stream.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else stream
