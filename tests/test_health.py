"""Health checks of a run: skipped steps, divergence and loss spikes."""

import math
import random

import pytest
import torch
from accelerate import Accelerator

from training.checkpoints.checkpoint import TrainState
from training.data.batches import START
from training.guard.health import WINDOW, Health, HealthArguments
from training.step.loss import DivergenceError


def fed(*losses: float, norm: float = 1.0, **arguments) -> Health:
    health = Health(Accelerator(cpu=True), HealthArguments(**arguments), TrainState(START, {}))
    feed(health, *losses, norm=norm)
    return health


def feed(health: Health, *losses: float, norm: float = 1.0) -> None:
    for loss in losses:
        health.add(torch.tensor(loss), torch.tensor(norm))


def noise(n: int) -> list[float]:
    chance = random.Random(0)
    return [3.0 + chance.gauss(0, 0.05) for _ in range(n)]


def test_log_line_averages_finite_steps_and_too_many_other_steps_end_the_run():
    one = fed(2.0, math.nan, 4.0)
    assert one.read(3) is None
    assert one.take_reading() == {"loss": 3.0, "grad_norm": 1.0, "skipped_steps": 1}
    feed(one, math.inf)
    one.read(4)
    assert one.take_reading() == {"grad_norm": 1.0, "skipped_steps": 1}
    assert one.is_lost
    second = fed(2.0, norm=math.inf)  # skipped, but not lost
    second.read(1)
    assert second.losses == [None]
    assert not second.is_lost
    one = fed(2.0, math.nan, math.nan, max_nonfinite_steps=3)
    one.read(3)
    feed(one, math.nan)
    with pytest.raises(DivergenceError, match="3 consecutive steps, up to step 4") as divergence:
        one.read(4)
    assert divergence.value.weights_after == 1  # the last step that changed the weights
    one = fed(*[math.nan] * 150, max_nonfinite_steps=200)
    one.read(150)
    one.take_reading()
    feed(one, *[math.nan] * 50)
    with pytest.raises(DivergenceError, match="200 consecutive steps"):
        one.read(200)


def test_spike_is_six_deviations_above_the_mean_and_independent_of_when_it_is_read():
    one = fed(*noise(200), 3.2, 5.0, 6.0, 3.0)
    spike = one.read(204)
    assert (spike.step, spike.last, spike.loss) == (202, 203, 6.0)
    assert spike.z_score == pytest.approx(55, abs=8)  # of the highest loss
    assert "rose to 6.000 from step 202 to 203, 5" in str(spike)
    assert len(one.losses) == 204  # not in a log line yet
    one.take_reading()
    feed(one, 3.0)
    assert one.read(205) is None
    assert len(one.losses) == WINDOW
    assert fed(*noise(WINDOW // 2 - 1), 9.0).read(WINDOW // 2) is None  # with too few previous losses
    losses = [*noise(150), 5.0, *noise(20)]
    batch_health, pieces = fed(*losses), fed()
    spikes = []
    for start in range(0, len(losses), 7):
        feed(pieces, *losses[start : start + 7])
        spikes.append(pieces.read(min(start + 7, len(losses))))
    assert [spike for spike in spikes if spike is not None] == [batch_health.read(len(losses))]
    assert pieces.losses == batch_health.losses
