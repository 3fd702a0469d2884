"""GPT-2 from scratch (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), also modernized.

Reads bottom-up, smallest part first: attention, MLP, block, model, language model. Parameter names are GPT-2's, with
`nn.Linear` in place of `Conv1D`. Shapes: B batch, T tokens, C = n_embd, nh = n_head, hs = C / nh, V = vocab_size.

Fields of the configuration choose between the two families. The modern family has rotary instead of learned positions,
RMSNorm without weights (also after the embedding and on queries and keys), no biases, and squared ReLU.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init
from transformers import modeling_layers
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_gpt2scratch import GPT2ScratchConfig

logger = logging.get_logger("transformers.generation.utils")  # the logger of `generate`, whose verbosity applies
# Transformers' name of keys and values of earlier calls, in arguments and outputs: `cache` since 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,  # (B, nh, T, hs)
    key: torch.Tensor,  # (B, nh, S, hs), S = cached + T
    value: torch.Tensor,  # (B, nh, S, hs)
    attention_mask: torch.Tensor | None,  # (B or 1, 1, T, S), added to the scores
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention (Vaswani et al. 2017, equation 1). Return output (B, T, nh, hs) and weights (B, nh, T, S)."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling  # (B, nh, T, S)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def residual_projection(config: GPT2ScratchConfig, in_features: int) -> nn.Linear:
    """Return a linear layer into the residual stream, initialized as in GPT-2, section 2.3, or to zero with RMSNorm.

    The `nn.Linear` itself holds their standard deviation because Transformers does not call `_init_weights` for modules
    of custom code that have no parameters of their own, such as attention and MLP.
    """
    linear = nn.Linear(in_features, config.n_embd, bias=config.use_bias)
    linear.initial_std = 0.0 if config.is_modern else config.initializer_range / math.sqrt(2 * config.n_layer)
    return linear


def normalization(config: GPT2ScratchConfig) -> nn.Module:
    """Return the normalization of the residual stream (..., C)."""
    if config.is_modern:
        return nn.RMSNorm(config.n_embd, eps=config.layer_norm_epsilon, elementwise_affine=False)
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.use_bias)


def rotary_embedding(config: GPT2ScratchConfig, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return cosine and sine of each position's angles (Su et al. 2021, eq. 15): (B or 1, T, 1, hs / 2) in fp32.

    They are computed in each call: a buffer would hold random memory in a model that was loaded from the meta device.
    """
    if config.rope_parameters is None:
        return None
    hs, rope, device = config.n_embd // config.n_head, config.rope_parameters, position_ids.device
    exponents = torch.arange(0, hs, 2, device=device, dtype=torch.float32) / hs
    frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, None  # (hs / 2,)
    if rope["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
    angles = position_ids[:, :, None, None].float() * frequencies
    cosine, sine = angles.cos(), angles.sin()
    # A product with 1 would cost a compiled step on a GPU four more kernels per block.
    return (cosine, sine) if scale is None else (cosine * scale, sine * scale)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + hs / 2) of query or key channels (B, T, nh, hs) by the angle of its position."""
    a, b = heads.chunk(2, dim=-1)  # (B, T, nh, hs / 2) each
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


class GPT2ScratchAttention(nn.Module):
    """Causal multi-head self-attention, computed by the implementation that `attn_implementation` names."""

    def __init__(self, config: GPT2ScratchConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.n_embd // config.n_head
        self.scaling = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.is_causal = True
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.use_bias)
        self.c_proj = residual_projection(config, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]  # (B, T)
        fused, shape = self.c_attn(hidden_states), (*input_shape, -1, self.head_dim)  # (B, T, 3C)
        query, key, value = (part.view(shape) for part in fused.chunk(3, dim=-1))  # (B, T, nh, hs) each
        if self.config.is_modern:  # QK-norm (Henry et al. 2020), without weights
            eps = self.config.layer_norm_epsilon
            query, key = (nn.functional.rms_norm(heads, (self.head_dim,), eps=eps) for heads in (query, key))
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        query, key = query.to(value.dtype), key.to(value.dtype)  # both of the above may return fp32
        # Only now, because attention returns its output in the layout of the queries: (B, T, C) without a copy.
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, nh, T, hs)
        if (cache := kwargs.pop(CACHE, None)) is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)  # (B, nh, S, hs)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attn_pdrop if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )  # (B, T, nh, hs)
        output = output.reshape(*input_shape, -1).contiguous()  # (B, T, C)
        return self.resid_dropout(self.c_proj(output)), weights


class GPT2ScratchMLP(nn.Module):
    """Two linear layers with an activation in between."""

    def __init__(self, config: GPT2ScratchConfig):
        super().__init__()
        n_inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, n_inner, bias=config.use_bias)
        # One kernel; Transformers' `gelu_new` keeps three more (B, T, 4C) tensors for the backward pass.
        is_tanh = config.activation_function == "gelu_new"
        self.act = nn.GELU(approximate="tanh") if is_tanh else ACT2FN[config.activation_function]
        self.c_proj = residual_projection(config, n_inner)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class GPT2ScratchBlock(GradientCheckpointingLayer):
    """Attention and MLP, each after a normalization and added to the residual stream."""

    def __init__(self, config: GPT2ScratchConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = normalization(config)
        self.attn = GPT2ScratchAttention(config, layer_idx)
        self.ln_2 = normalization(config)
        self.mlp = GPT2ScratchMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask, **kwargs)[0]
        hidden_states = hidden_states + self.mlp(self.ln_2(hidden_states))
        return hidden_states


class GPT2ScratchPreTrainedModel(PreTrainedModel):
    """Base class: weight initialization and the features that Transformers may use."""

    config_class = GPT2ScratchConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPT2ScratchBlock"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": GPT2ScratchBlock, "attentions": GPT2ScratchAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if (std := getattr(module, "initial_std", None)) is not None:
            init.normal_(module.weight, mean=0.0, std=std)

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        """Load a language model's checkpoint without a warning about its head.

        `_keys_to_ignore_on_load_unexpected` would do the same, but vLLM reads it as a list of weights to drop and would
        serve an untied model with a random head.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        loading_info.unexpected_keys -= {"lm_head.weight"}


class GPT2ScratchModel(GPT2ScratchPreTrainedModel):
    """GPT-2 without its head: token ids (B, T) -> hidden states (B, T, C), after the last normalization."""

    def __init__(self, config: GPT2ScratchConfig):
        super().__init__(config)
        config.validate_architecture()  # `from_pretrained(path, field=value)` changes one without a check
        config.validate()  # the rules of Transformers, by which it could not be saved
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wte.initial_std = 1.0 if config.has_large_embedding else None
        self.ln_e = normalization(config) if config.is_modern else nn.Identity()
        has_rope = config.rope_parameters is not None
        self.wpe = None if has_rope else nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([GPT2ScratchBlock(config, layer_idx) for layer_idx in range(config.n_layer)])
        self.ln_f = normalization(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states after the last normalization.

        Args:
            input_ids: (B, T) token ids, int64 or int32; or give `inputs_embeds`, (B, T, C).
            attention_mask: (B, cached + T), 1 for tokens and 0 for padding, or a prepared 4D mask.
            position_ids: (B, T). Default: the count of tokens that are not padding. Without an `attention_mask`, those
                that restart within a row mark packed documents, which do not attend to each other (FlashAttention:
                only with B = 1).
            past_key_values: keys and values of earlier calls, also accepted by the name `CACHE`.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds` are given, a sequence exceeds the context, or
                a cache has another name: without it, earlier tokens would be ignored.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if (cache := kwargs.pop(CACHE, None)) is not None:
            past_key_values = cache
        if names := [name for name, value in kwargs.items() if isinstance(value, Cache)]:  # renamed again
            raise ValueError(f"A cache is given as {names[0]}; give it as {CACHE}, or use newer code of the model.")
        if inputs_embeds is None:
            inputs_embeds = self.wte(input_ids)  # (B, T, C)
        self.check_context(inputs_embeds.shape[1], position_ids, past_key_values)

        # Build the mask before the cache and the default positions: packed documents are recognized only without a
        # cache, and under torch.compile, arange positions would be treated as packed and cost a (T, T) mask.
        causal_mask = None
        if not self.is_plainly_causal(attention_mask, position_ids, past_key_values):
            causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values, position_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        # FlashAttention receives only a caller's positions. It searches them for packed documents if there is one row,
        # which waits for the device and cannot be compiled.
        positions = position_ids
        if positions is None:
            positions = default_position_ids(inputs_embeds, attention_mask, past_key_values)

        hidden_states = self.ln_e(inputs_embeds)  # (B, T, C)
        if self.wpe is not None:
            hidden_states = hidden_states + self.wpe(positions).to(hidden_states.device)
        hidden_states = self.drop(hidden_states)
        position_embeddings = rotary_embedding(self.config, positions)
        for block in self.h[: self.config.n_layer]:  # `generate(assistant_early_exit=k)` sets n_layer to k for drafts
            hidden_states = block(
                hidden_states,
                attention_mask=causal_mask,
                position_ids=position_ids,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **{CACHE: past_key_values},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.ln_f(hidden_states), past_key_values)

    def is_plainly_causal(
        self, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, past_key_values: Cache | None
    ) -> bool:
        """Return whether SDPA's `is_causal` suffices. Transformers before 5.23 builds a (T, T) mask while compiling."""
        nothing_to_mask = attention_mask is None and position_ids is None and past_key_values is None
        return nothing_to_mask and self.config._attn_implementation == "sdpa" and not is_exporting()

    def check_context(self, length: int, position_ids: torch.Tensor | None, past_key_values: Cache | None):
        """Raise a `ValueError` if a sequence exceeds the context.

        Shapes decide where they can, so that the host need not wait for the device. In a compiled graph, an index
        beyond the position table would abort the process.
        """
        if is_exporting():
            return
        is_packed = not isinstance(past_key_values, Cache)  # also with the cache of continuous batching
        cached = 0 if is_packed else past_key_values.get_seq_length()
        if isinstance(cached, torch.Tensor):  # a static cache counts on the device; its capacity is a plain number
            total = max(length, past_key_values.get_max_length())
            is_read = total > self.config.n_positions or cached.device.type == "cpu"
            if is_read and not torch.compiler.is_compiling():
                # Waits for a GPU, but only if a caller made the cache larger than the context. A compiled graph cannot
                # read the count and uses the capacity.
                total = int(cached) + length
        else:
            total = cached + length
        if total > self.config.n_positions and is_packed and position_ids is not None:
            if torch.compiler.is_compiling():
                return
            total = int(position_ids.max()) + 1  # packed row: each document must fit, not the row
        if total > self.config.n_positions:
            raise ValueError(
                f"A sequence of {total} tokens does not fit the context of {self.config.n_positions} tokens "
                f"(n_positions); shorten the input or request fewer new tokens."
            )


def is_exporting() -> bool:
    """Return whether torch.export runs. Before torch 2.13, `torch.compiler.is_exporting` is true while compiling."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def default_position_ids(
    inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: Cache | None
) -> torch.Tensor:
    """Return positions, (B or 1, T), that continue the cache and, given a padding mask, do not count padding."""
    cached = past_key_values.get_seq_length() if past_key_values is not None else 0
    columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + cached  # (T,)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        # (B, cached + T), or the capacity of a static cache. An index beyond a shorter one would abort a GPU's process.
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0).to(columns.device)
        return positions[:, columns.clamp(max=positions.shape[1] - 1)]
    return columns.unsqueeze(0)


class GPT2ScratchForCausalLM(GPT2ScratchPreTrainedModel, GenerationMixin):
    """Language model: token ids (B, T) -> logits (B, T, V), and the loss if labels are given."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: GPT2ScratchConfig):
        super().__init__(config)
        self.transformer = GPT2ScratchModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.has_large_embedding:
            self.lm_head.initial_std = 0.0
        self.post_init()

    def _prepare_generated_length(self, generation_config, input_ids_length, inputs_tensor, **kwargs):
        """Limit generation to the context. `generate` sizes its cache and stops according to the length set here.

        Raises:
            ValueError: the prompt alone does not fit the context.
        """
        generation_config = super()._prepare_generated_length(
            generation_config, input_ids_length=input_ids_length, inputs_tensor=inputs_tensor, **kwargs
        )
        prompt_length = inputs_tensor.shape[1]  # ids or embeddings; input_ids_length does not count embeddings
        self.transformer.check_context(prompt_length, None, None)
        room = max(self.config.n_positions - prompt_length, 1)  # the token after a full context need not be read
        if generation_config.max_length > input_ids_length + room:
            logger.warning(
                f"The prompt has {prompt_length} tokens and the context {self.config.n_positions} (n_positions), so "
                f"generation stops after {room} new tokens."
            )
            generation_config.max_length = input_ids_length + room
        return generation_config

    def _get_candidate_generator(self, generation_config, **kwargs):
        """Cut drafts to the context: those of Transformers' prompt lookup do not stop at `max_length`."""
        generator = super()._get_candidate_generator(generation_config, **kwargs)
        draft, end = generator.get_candidates, generation_config.max_length - 1  # the model adds one token

        def draft_within_context(*inputs, **outputs):
            ids, logits = draft(*inputs, **outputs)
            return ids[:, :end], logits

        generator.get_candidates = draft_within_context
        return generator

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Compute logits and, if labels are given, the mean cross-entropy loss in nats.

        Args:
            labels: (B, T) of any integer type; they are shifted here, and -100 is ignored. `num_items_in_batch` divides
                the summed loss instead of the number of targets; `shift_labels` are used without shifting.
            logits_to_keep: compute logits only for the last k positions (0: all) or for the given positions.

        The other arguments are those of `GPT2ScratchModel`.
        """
        outputs: BaseModelOutputWithPast = self.transformer(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **kwargs
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)  # slice(0, None), everything, for 0
        logits = self.lm_head(hidden_states[:, logits_to_keep, :])  # (B, T, V)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels.long(), vocab_size=self.config.vocab_size, **kwargs)
        past_key_values = getattr(outputs, CACHE)
        return CausalLMOutputWithPast(loss, logits, past_key_values, outputs.hidden_states, outputs.attentions)


class GPT2ScratchClassifier(GPT2ScratchPreTrainedModel):
    """Base class of classifiers. Transformers' mixins have `forward`, but their `__init__` asks to trust code again."""

    accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the micro-batches

    def __init__(self, config: GPT2ScratchConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = GPT2ScratchModel(config)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.score = nn.Linear(config.n_embd, config.num_labels)
        self.post_init()


class GPT2ScratchForSequenceClassification(GPT2ScratchClassifier):
    """Classifier of texts: token ids (B, T) -> logits (B, num_labels), at each row's last token that is not padding."""

    forward = modeling_layers.GenericForSequenceClassification.forward


class GPT2ScratchForTokenClassification(GPT2ScratchClassifier):
    """Classifier of tokens: token ids (B, T) -> logits (B, T, num_labels)."""

    forward = modeling_layers.GenericForTokenClassification.forward


__all__ = [
    "GPT2ScratchForCausalLM",
    "GPT2ScratchForSequenceClassification",
    "GPT2ScratchForTokenClassification",
    "GPT2ScratchModel",
    "GPT2ScratchPreTrainedModel",
]
