"""Configuration of a GPT2Scratch model: all fields that determine what the network computes."""

import math
from typing import TYPE_CHECKING

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# Transformers keeps the code of a local folder under a hash of this file and of its relative imports. Without the
# modeling file in it, the model/ folders of two runs, loaded in one process, would both use the code of the first.
if TYPE_CHECKING:
    from .modeling_gpt2scratch import GPT2ScratchModel  # noqa: F401

# Written to every saved config.json, so that a folder or a Hub repository includes its code. All classes are listed,
# because saving one registers only itself: vLLM and SGLang load models through `AutoModel`.
AUTO_MAP = {
    "AutoConfig": "configuration_gpt2scratch.GPT2ScratchConfig",
    "AutoModel": "modeling_gpt2scratch.GPT2ScratchModel",
    "AutoModelForCausalLM": "modeling_gpt2scratch.GPT2ScratchForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gpt2scratch.GPT2ScratchForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gpt2scratch.GPT2ScratchForTokenClassification",
}

# Rotary positions for a longer context. The frequencies of Transformers' other types depend on the length of the input.
SCALED_ROPE = ("linear", "yarn", "llama3")
LARGEST = 10**8  # limit for sizes: far above any model, and the product of two fits 64 bits


@strict
class GPT2ScratchConfig(PreTrainedConfig):
    r"""Configuration of a GPT-2-class decoder (Radford et al. 2019). Without arguments: 134,601,216 parameters.

    The modern family has `rope_parameters`, `normalization="rms_norm"`, `use_bias=False` and
    `activation_function="relu2"`; most of its presets also set `attention_scale` and `layer_norm_epsilon`.

    Args:
        vocab_size: number of tokens of the embedding and the head.
        n_positions: context length in tokens; longer inputs are refused.
        n_embd: width of the residual stream.
        n_layer: number of blocks.
        n_head: number of attention heads; divides `n_embd`.
        n_inner: width of the MLP; `None` means `4 * n_embd`.
        activation_function: a name from Transformers' `ACT2FN` but xielu: `gelu` is exact, `gelu_new` GPT-2's tanh
            approximation, `relu2` squared ReLU (So et al. 2021, "Primer").
        rope_parameters: `{"rope_type": "default", "rope_theta": 10000.0}` for rotary positions (Su et al. 2021,
            "RoFormer"); Transformers' `linear`, `yarn` and `llama3` scale them to a longer context. `None` for learned
            positions.
        normalization: `layer_norm`, or `rms_norm` without weights (Zhang and Sennrich 2019), also after the embedding
            and on the queries and keys of each head. With `rms_norm`, projections into the residual stream start at
            zero; so does an untied head, and its embedding starts with standard deviation 1.
        use_bias: biases in linear layers and LayerNorms. The head has none.
        attention_scale: factor of the attention scores; `None` means 1 / sqrt(n_embd / n_head).
        embd_pdrop: dropout probability after the embeddings.
        attn_pdrop: dropout probability on the attention weights.
        resid_pdrop: dropout probability on the outputs of attention and MLP.
        layer_norm_epsilon: added to the variance, or to the mean square, in every normalization.
        initializer_range: standard deviation of the initial weights; projections into the residual stream use
            `initializer_range / sqrt(2 * n_layer)` (GPT-2, section 2.3).
        use_cache: return keys and values for the next generation step.
        tie_word_embeddings: use the token embedding as the head (OpenAI's GPT-2 does).
        bos_token_id, eos_token_id, pad_token_id: ids of the special tokens; `None` if the tokenizer has none.

    Raises:
        StrictDataclassError: a field has the wrong type, or the fields do not fit together; all problems are listed.
    """

    model_type = "gpt2scratch"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the name in Transformers before 5.24, and since
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 32000
    n_positions: int = 512
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu"
    rope_parameters: dict | None = None
    normalization: str = "layer_norm"
    use_bias: bool = True
    attention_scale: float | int | None = None
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0
    resid_pdrop: float | int = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def is_modern(self) -> bool:
        """True if the model has the parts that come with `rms_norm`: see `normalization`."""
        return self.normalization == "rms_norm"

    @property
    def has_large_embedding(self) -> bool:
        """True if the embedding is normalized and not a head: it starts with standard deviation 1, the head at zero."""
        return self.is_modern and not self.tie_word_embeddings

    def validate_architecture(self):
        """Raise a `ValueError` with all problems. `@strict` calls this after construction and before saving."""
        problems = []
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if not 1 <= getattr(self, name) <= LARGEST:
                problems.append(f"{name} is {getattr(self, name)} but must be at least 1 and at most {LARGEST:,}")
        if self.n_inner is not None and not 1 <= self.n_inner <= LARGEST:
            problems.append(
                f"n_inner is {self.n_inner} but must be at least 1 and at most {LARGEST:,}, or None for 4 * n_embd"
            )
        if self.n_head >= 1 and self.n_embd % self.n_head:
            problems.append(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.activation_function not in ACT2FN:
            problems.append(
                f"activation_function {self.activation_function!r} is unknown to Transformers (GPT-2's is 'gelu_new')"
            )
        elif self.activation_function == "xielu":
            problems.append("activation_function 'xielu' has buffers of its own, which are not saved; choose another")
        if self.normalization not in ("layer_norm", "rms_norm"):
            problems.append(f"normalization is {self.normalization!r} but must be 'layer_norm' or 'rms_norm'")
        if self.attention_scale is not None and not 0.0 < self.attention_scale < math.inf:
            problems.append(f"attention_scale is {self.attention_scale} but must be above 0 and finite, or None")
        problems += self._rope_problems()
        for name in ("initializer_range", "layer_norm_epsilon"):
            if not 0.0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)} but must be at least 0 and finite")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                problems.append(f"{name} is {getattr(self, name)} but must be at least 0 and below 1")
        if problems:
            raise ValueError("; ".join(problems))

    def _rope_problems(self) -> list[str]:
        if self.rope_parameters is None:
            return []
        rope, problems = self.rope_parameters, []
        theta, factor, kind = rope.get("rope_theta"), rope.get("factor", 1.0), rope.get("rope_type")
        are_numbers = isinstance(theta, float | int) and isinstance(factor, float | int)
        is_plain = rope == {"rope_type": "default", "rope_theta": theta}
        is_scaled = kind in SCALED_ROPE and "partial_rotary_factor" not in rope
        if not (is_plain or is_scaled) or not are_numbers or not (1.0 < theta < math.inf and factor >= 1.0):
            problems.append(
                f"rope_parameters is {rope} but must be {{'rope_type': 'default', 'rope_theta': N}} with a finite N "
                f"above 1, the parameters of {', '.join(SCALED_ROPE)} with a factor of at least 1, or None for learned "
                "positions"
            )
        if self.n_head >= 1 and self.n_embd % (2 * self.n_head) == self.n_head:
            problems.append(
                f"rope_parameters rotates pairs of channels but a head has n_embd / n_head = "
                f"{self.n_embd // self.n_head}, an odd number"
            )
        return problems

    def convert_rope_params_to_dict(self, **kwargs):
        """Complete `rope_parameters`, also from a lone `rope_theta`. Transformers would replace None by its default."""
        if self.rope_parameters is None and kwargs.get("rope_theta") is None:
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save `config.json` with an `auto_map` for the code files that are saved with it, also those of a subclass."""
        own = {
            auto_class: name
            for auto_class, name in (getattr(self, "auto_map", None) or {}).items()
            if "/" not in name and name.rpartition(".")[2] in (self.architectures or ())
        }
        self.auto_map = AUTO_MAP | own
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


__all__ = ["GPT2ScratchConfig"]
