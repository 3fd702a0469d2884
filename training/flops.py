"""What a token costs: the operations that the model needs, however they are computed."""

from modeling_gpt2scratch import GPT2ScratchConfig


def flops_per_token(config: GPT2ScratchConfig, causal: bool = True) -> int:
    """Floating-point operations to train on one token of a full context, forward and backward:

        6 N + 6 L C T, where N = L (4 C^2 + 2 C n_inner) + V C

    Each of the N weights in matrix products costs 2 operations in the forward pass and 4 in the backward pass (Kaplan et
    al. 2020, section 2.1); V C is the head, tied or not. Attention costs 12 L C T where all T tokens see each other,
    which is how PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT count: `causal=False`. Half of that is not
    needed, because no token sees what comes after it.

    Left out: embedding lookups, LayerNorm, softmax, activations, biases, loss, optimizer. Recomputation under gradient
    checkpointing is not counted either: the model does not need it. That makes the utilisation one of model FLOPs (MFU),
    not of hardware FLOPs (HFU).
    """
    L, C, T, V = config.n_layer, config.n_embd, config.n_positions, config.vocab_size
    n_inner = config.n_inner if config.n_inner is not None else 4 * C
    N = L * (4 * C**2 + 2 * C * n_inner) + V * C
    return 6 * N + (6 if causal else 12) * L * C * T
