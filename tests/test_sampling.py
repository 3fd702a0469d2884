"""Generation of several texts at once, beyond the context, with a model of eight letters."""

import pytest
import torch

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import arrange_weights
from tokenizer.vocabulary import character_tokenizer
from training.sampling import continue_texts, generation_config

CONTEXT, HALF, END = 8, 4, 7


@pytest.fixture
def letters():
    """A model of eight letters, whose last letter ends a text, and its tokenizer."""
    torch.manual_seed(0)
    fields = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=8, eos_token_id=END, pad_token_id=0, **fields)).eval()
    return model, character_tokenizer(["abcdefgh"])


@torch.no_grad()
def test_texts_in_a_batch_continue_and_end_independently(letters):
    """Every letter is among the four most likely ones after the letters of its own text that the model saw."""
    model, tokenizer = letters
    torch.manual_seed(1)
    config = generation_config(1.0, top_k=4)
    texts = continue_texts(model, tokenizer, "a", 64, 30, config)
    assert len({len(text) for text in texts}) > 5  # some end early, in one window or another
    assert max(map(len, texts)) == 30
    for text in texts:
        seen = [0]
        for id in [*tokenizer.encode(text), END][:30]:
            seen = seen[-HALF:] if len(seen) == CONTEXT else seen
            assert id in model(torch.tensor([seen])).logits[0, -1].topk(4).indices
            seen.append(id)
        assert END not in tokenizer.encode(text)


@torch.no_grad()
def test_any_of_several_end_tokens_ends_a_text_and_arranging_weights_keeps_them(letters):
    model, tokenizer = letters
    model.generation_config.eos_token_id = [END, 3]  # like a chat model, whose config names only one
    torch.manual_seed(1)
    texts = continue_texts(model, tokenizer, "a", 64, 30, generation_config(1.0, top_k=4))
    assert not {END, 3} & {id for text in texts for id in tokenizer.encode(text)}
    assert max(map(len, texts)) > CONTEXT
    model, _ = letters
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    arrange_weights(model)
    assert model.lm_head.weight.stride() == (1, 8)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
