"""Runs that do not learn, because a part of training was replaced by one that does nothing."""

import math

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from conftest import MODERN_RUN, assert_one_sentence, lines, metrics
from modeling_gpt2scratch.modeling_gpt2scratch import GPT2ScratchMLP
from training.guard.learning import FAR
from training.step import loss, optim
from training.step.loss import linear_cross_entropy

MUON = {"optimizer": "muon", "learning_rate": None, "min_learning_rate": None, "warmup_steps": None}
MUON |= {"initializer_range": None, "tie_word_embeddings": "false"}


def without_gradients(states: torch.Tensor, weight: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(states.detach(), weight.detach(), *targets) + 0 * states.sum()


def test_gradients_of_zero_end_the_run_at_the_first_log_line(train, tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "linear_cross_entropy", without_gradients)
    assert_one_sentence("All gradients are exactly zero: the model does not learn", train, tmp_path / "run")
    assert [entry["event"] for entry in lines(tmp_path / "run" / "events.jsonl")] == ["begun", "failed"]


@pytest.mark.parametrize("settings", [{}, MODERN_RUN | MUON], ids=["adamw", "muon"])
def test_weights_that_do_not_change_end_the_run(train, tmp_path, monkeypatch, settings):
    """A run that learns is not stopped: after four steps, every parameter has a gradient, also if projections start at
    zero."""
    train(tmp_path / "learns", logging_steps=4, **settings)
    forward_pass = GPT2ScratchMLP.forward
    number = "4 of 10" if settings else "12 of 28"
    sentence = rf"{number} parameters have no gradient or only zeros \(transformer.h.0"
    for name, cut in (("none", torch.Tensor.detach), ("zeros", lambda x: x.detach() + 0 * x)):
        with monkeypatch.context() as patch:
            patch.setattr(GPT2ScratchMLP, "forward", lambda self, x, cut=cut: cut(forward_pass(self, x)))
            assert_one_sentence(sentence, train, tmp_path / name, **settings)
    monkeypatch.setattr(AcceleratedOptimizer, "step", lambda self: None)
    assert_one_sentence("No weight has changed", train, tmp_path / "nothing", **settings)


def test_optimizers_without_moments_and_parameters_of_one_number_learn(train, tmp_path, monkeypatch):
    make, forward_pass = GPT2ScratchMLP.__init__, GPT2ScratchMLP.forward

    def make_with_gain(self, config):
        make(self, config)
        self.gain = nn.Parameter(torch.ones(()))

    with monkeypatch.context() as patch:
        patch.setattr(GPT2ScratchMLP, "__init__", make_with_gain)
        patch.setattr(GPT2ScratchMLP, "forward", lambda self, x: self.gain * forward_pass(self, x))
        train(tmp_path / "gain", logging_steps=4)
    monkeypatch.setitem(optim.MOMENTS, "adam", ())
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused: torch.optim.SGD(groups))
    train(tmp_path / "sgd", logging_steps=4)


def test_a_first_loss_far_from_that_of_a_new_model_is_reported(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loss, "linear_cross_entropy", lambda *parts: 2 * linear_cross_entropy(*parts))
    train(tmp_path / "run")
    assert "WARNING: The first loss is 11.38" in capsys.readouterr().out
    [advice] = [entry for entry in lines(tmp_path / "run" / "events.jsonl") if entry["event"] == "advice"]
    assert "a new model with 300 tokens starts near 5.70, their logarithm" in advice["text"]


def test_a_new_modern_model_with_a_tied_head_predicts_its_input(train, tmp_path, capsys):
    """The input's own logit is 64 * 0.15 = 9.6."""
    shape = MODERN_RUN | {"tie_word_embeddings": True, "n_embd": 64, "initializer_range": 0.15, "max_steps": 1}
    train(tmp_path / "run", **shape)
    first, *_ = (entry["loss"] for entry in metrics(tmp_path / "run") if "loss" in entry)
    assert first > math.log(300) + FAR + 64 * 0.15**2
    assert "WARNING" not in capsys.readouterr().out


def test_a_loss_that_stays_the_same_ends_the_run(train, tmp_path):
    settings = {"max_steps": 600, "logging_steps": 64, "save_strategy": "no", "eval_strategy": "no"}
    settings |= {"learning_rate": 1e-9, "tokens_per_step": 128}
    assert_one_sentence(
        r"The loss is 5.7\d+ after 256 steps, the same as at the first", train, tmp_path / "run", **settings
    )
