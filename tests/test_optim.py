import pytest
import torch

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.optim import OptimArguments, build_optimizer, schedule

COSINE = OptimArguments(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (100, 0.1)])
def test_cosine_with_warmup_at_known_steps(step, rate):
    assert schedule(step, 15, COSINE) == pytest.approx(rate, abs=1e-12)


def test_linear_and_constant_and_a_lowest_rate_above_the_peak():
    linear = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=0, lr_scheduler_type="linear")
    assert [schedule(step, 5, linear) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2, lr_scheduler_type="constant")
    assert [schedule(step, 5, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule(0, 1, OptimArguments(learning_rate=1.0, warmup_steps=0)) == 1.0  # a run of one step
    assert OptimArguments(1e-3, 1e-3).problems() == []
    expected = "min_learning_rate is 0.002; it must be between 0 and learning_rate, 0.001."
    assert OptimArguments(1e-3, 2e-3).problems() == [expected]


def test_only_matrices_decay():
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    optimizer = build_optimizer(model, OptimArguments(weight_decay=0.1), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.1 if parameter.dim() == 2 else 0.0), name
    assert len(decay) == len(list(model.parameters()))
