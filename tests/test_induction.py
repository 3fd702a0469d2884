"""Tests of initial weights with an induction circuit."""

from dataclasses import replace

import pytest
import torch

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.step.induction import add_induction, induction_problems
from training.step.model import ModelArguments

SHAPE = {"normalization": "rms_norm", "use_bias": False, "initializer_range": 0.05, "vocab_size": 500}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("n_embd", "n_head", "scale", "least"), [(128, 2, None, 0.9), (256, 4, 0.17, 0.9), (128, 4, None, 0.6)]
)
def test_the_heads_attend_to_the_previous_token_and_after_an_earlier_occurrence(n_embd, n_head, scale, least):
    torch.manual_seed(0)
    shape = {"n_embd": n_embd, "n_head": n_head, "n_layer": 2, "n_positions": 64, "attention_scale": scale}
    model = GPT2ScratchForCausalLM._from_config(
        GPT2ScratchConfig(**SHAPE, **shape, rope_parameters=ROPE), attn_implementation="eager"
    )
    add_induction(model)
    once = torch.randperm(500)[:32]
    ids = torch.cat([once, once])[None]  # (1, 64): each token occurs twice, with distance 32
    first, second = model(ids, output_attentions=True).attentions  # (1, n_head, 64, 64) each
    positions = torch.arange(1, 64)
    assert torch.equal(first[0, 0].argmax(-1)[1:], positions - 1)
    repeated = positions[31:]
    hits = second[0, 0].argmax(-1)[repeated] == repeated - 31
    assert hits.float().mean() > least
    # The other heads are random: they attend to the previous token about as often as to any other.
    assert (first[0, 1].argmax(-1)[1:] == positions - 1).float().mean() < 0.2


def test_other_architectures_are_refused():
    model = ModelArguments(n_layer=2, n_head=2, normalization="rms_norm", rope_theta=10_000.0)
    assert [*induction_problems(model)] == []
    changes = [{"n_layer": 1}, {"n_head": 1}, {"n_head": 256}, {"rope_theta": 0}, {"tie_word_embeddings": True}]
    for change in (*changes, {"normalization": "layer_norm"}):
        [problem] = induction_problems(replace(model, **change))
        assert "rope_theta, tie_word_embeddings false, 2 layers, and 2 heads of at least 4 channels" in problem
