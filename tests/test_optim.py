from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import assert_equal, weights
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training import optim
from training.optim import Moment, OptimArguments, build_optimizer, schedule

OPTIMIZER_FILE = "training_state/optimizer.safetensors"
COSINE = OptimArguments(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (100, 0.1)])
def test_cosine_schedule_with_warmup_at_known_steps(step, rate):
    assert schedule(step, 15, COSINE) == pytest.approx(rate, abs=1e-12)


def test_linear_and_constant_schedules_and_a_minimum_above_the_peak():
    linear = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=0, lr_scheduler_type="linear")
    assert [schedule(step, 5, linear) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2, lr_scheduler_type="constant")
    assert [schedule(step, 5, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule(0, 1, OptimArguments(learning_rate=1.0, warmup_steps=0)) == 1.0  # a run of one step
    assert OptimArguments(1e-3, 1e-3).problems() == []
    expected = "min_learning_rate is 0.002; it must be between 0 and learning_rate, 0.001."
    assert OptimArguments(1e-3, 2e-3).problems() == [expected]


def test_weight_decay_applies_only_to_matrices():
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    optimizer = build_optimizer(model, OptimArguments(weight_decay=0.1), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.1 if parameter.dim() == 2 else 0.0), name
    assert len(decay) == len(list(model.parameters()))


class SGD(torch.optim.SGD):
    """A second optimizer: only optim.py depends on AdamW."""

    moments = (Moment("momentum_buffer"),)

    @classmethod
    def build(cls, groups: list[dict[str, Any]], arguments: OptimArguments, device: torch.device) -> "SGD":
        return cls(groups, momentum=arguments.adam_beta1)  # the fused kernel does not support sharded tensors


def test_another_optimizer_trains_saves_and_resumes_bit_for_bit(train, tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "OPTIMIZER", SGD)
    whole = train(tmp_path / "whole")
    saved = load_file(whole / "checkpoints" / "step_00000003" / OPTIMIZER_FILE)
    assert {name.split("/")[1] for name in saved} == {"momentum_buffer"}
    assert len(saved) == len(weights(whole))
    branch = train(tmp_path / "branch", resume_from_checkpoint=whole / "checkpoints" / "step_00000003")
    assert_equal(weights(branch), weights(whole))
    ours, theirs = (load_file(run / "checkpoints" / "step_00000006" / OPTIMIZER_FILE) for run in (branch, whole))
    assert_equal(ours, theirs)
