"""Average of the weights: its values, the model that is validated and saved, and exact resuming."""

import torch
from safetensors.torch import load_file
from torch import nn

from conftest import MODERN_RUN, assert_equal, assert_user_error, lines
from training.step.average import WeightAverage
from training.step.optim import WEIGHT


def test_the_average_follows_its_definition():
    """Three steps count alike until the horizon of two; then the last one has half of the weight."""
    model = nn.Linear(2, 1, bias=False)
    average = WeightAverage(model, horizon=2)
    for step, value in enumerate((1.0, 3.0, 5.0)):
        nn.init.constant_(model.weight, value)
        average.update(step)
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 3.5))  # ((1 + 3) / 2 + 5) / 2
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 5.0))


def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors"), load_file(checkpoint / "training_state/optimizer.safetensors")


def test_the_saved_model_is_the_average_and_a_run_of_muon_resumes_to_the_bit(train, tmp_path):
    """A run with a horizon has the weights of one without. Resumed from its middle, it ends with the same average."""
    extra = MODERN_RUN | {"optimizer": "muon", "tie_word_embeddings": False, "second_target_weight": 0.3}
    extra |= {"induction_init": True}
    plain = train(tmp_path / "plain", **extra)
    run = train(tmp_path / "run", weight_average=5, **extra)
    weights, _ = tensors(plain / "checkpoints/step_00000006")
    averages, state = tensors(run / "checkpoints/step_00000006")
    assert all(torch.equal(state[f"{name}/{WEIGHT}"], weight) for name, weight in weights.items())
    assert all(not torch.equal(averages[name], weights[name]) for name in weights)
    *_, last = (entry for entry in lines(run / "metrics.jsonl") if "eval_loss" in entry)
    *_, of_plain = (entry for entry in lines(plain / "metrics.jsonl") if "eval_loss" in entry)
    assert last["eval_loss"] != of_plain["eval_loss"]
    assert load_file(run / "model/model.safetensors").keys() == averages.keys()
    middle = run / "checkpoints/step_00000003"
    resumed = train(tmp_path / "resumed", resume_from_checkpoint=middle, weight_average=5, **extra)
    for actual, expectation in zip(tensors(resumed / "checkpoints/step_00000006"), (averages, state), strict=True):
        assert_equal(actual, expectation)
    train(tmp_path / "shorter", resume_from_checkpoint=middle, weight_average=5, **extra | {"max_steps": 4})
    sentence = "weight_average changed from 5 to 3, so its moments do not fit; start a new run"
    settings = extra | {"resume_from_checkpoint": middle, "weight_average": 3}
    assert_user_error(sentence, train, tmp_path / "other", **settings)


def test_an_average_that_cannot_be_is_refused(finished, train, tmp_path):
    sentence = "weight_average is 7, more than the 6 steps of the run; use fewer"
    assert_user_error(sentence, train, tmp_path / "run", weight_average=7)
    middle = finished / "checkpoints/step_00000003"
    sentence = "weight_average changed from None to 3, so its moments do not fit; start a new run"
    assert_user_error(sentence, train, tmp_path / "run", resume_from_checkpoint=middle, weight_average=3)
