"""Advice on problems of a run, from log lines that the tests write."""

import json
import math
import random
import re
from types import SimpleNamespace

import pytest

from training.checkpoints.run_folder import RunFolder
from training.log.advice import Advisor

HEALTHY = {"learning_rate": 1e-3, "data_share": 0.01, "peak_memory_gb": 30.0, "grad_norm": 0.5}


def advisor(folder, place="ram", usual_mfu=None) -> Advisor:
    plan = SimpleNamespace(placement=SimpleNamespace(where=place), max_steps=100_000)
    return Advisor(RunFolder(folder), plan, usual_mfu)


def texts_of(it: Advisor, entries, waiting_share=0.5) -> list[str]:
    return [text for entry in entries for text in it.look(entry, waiting_share).values()]


def lines(losses, first=10, **options) -> list[dict]:
    return [HEALTHY | {"step": first + 10 * i, "loss": loss} | options for i, loss in enumerate(losses)]


def noisy(loss, number, fall=0.0, noise=0.002):
    """Return `number` noisy losses that fall by `fall` from the first to the last."""
    draw = random.Random(1).gauss
    return [loss - fall * i / number + draw(0, noise) for i in range(number)]


def evaluations(*losses) -> list[dict]:
    columns = {"epoch": 1.0, "eval_perplexity": 9.0, "eval_bits_per_byte": 1.0, "eval_tokens": 64}
    return [{"step": 100 * (i + 1), "eval_loss": loss} | columns for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    "entries",
    [
        lines([3 + 7 / (1 + i / 20) for i in range(400)]),
        lines([0.0] * 60, grad_norm=0.0),  # a text of one repeated character
        lines(noisy(3.0, 300, noise=0.2)),  # the noise hides the trend
        lines(noisy(3.0, 200), first=95_000),  # flat at the end of the run
        *(evaluations(3.0, 2.0, 2.005, 2.009), evaluations(3.0, 2.0, 2.1, 2.05)),
        *(evaluations(3.0, 2.0, 2.1), evaluations(2.0, 2.1)),
        [*evaluations(3.0, 2.0, 2.05), {"step": 400, "eval_loss": 2.2, "eval_sampled_loss": 2.01}],  # on more text
    ],
)
def test_healthy_run_gets_no_advice(tmp_path, entries):
    assert texts_of(advisor(tmp_path), entries) == []


def test_device_waiting_for_data_is_reported(tmp_path):
    five = lines([3.0] * 5, data_share=0.35)
    [text] = texts_of(advisor(tmp_path, place="mmap"), five, waiting_share=0.05)
    assert re.search("waits for its batches 30% .* use --data_placement ram .* or a faster disk", text)
    assert texts_of(advisor(tmp_path), five, waiting_share=0.3) == []  # the device was the bottleneck anyway
    assert texts_of(advisor(tmp_path), five[:4], waiting_share=0.0) == []  # too few lines
    assert "so stop them or give the run more cores." in texts_of(advisor(tmp_path), five, waiting_share=0.0)[0]


def test_mfu_far_below_reported_values_is_reported(tmp_path):
    five = lines([3.0] * 5, mfu=0.12)
    [text] = texts_of(advisor(tmp_path, usual_mfu=0.38), five)
    assert re.search("MFU is 12%, but others reach about 38% .* check the Device line .* use --profile", text)
    assert texts_of(advisor(tmp_path, usual_mfu=None), five) == []
    assert texts_of(advisor(tmp_path, usual_mfu=0.38), [*five[:4], *lines([3.0], mfu=0.3)]) == []


def test_collapsed_loss_scale_is_reported(tmp_path):
    [text] = texts_of(advisor(tmp_path), lines([3.0] * 5, loss_scale=0.5))
    assert re.search(r"scale of fp16 fell to 0\.5: .* Use --mixed_precision bf16 .* or lower learning_rate", text)
    assert texts_of(advisor(tmp_path), lines([3.0] * 5, loss_scale=1.0)) == []


def test_flat_rising_and_oscillating_losses_are_reported(tmp_path):
    falling = noisy(5.0, 200, fall=2)
    [flat] = texts_of(advisor(tmp_path), lines(falling + noisy(3.0, 80)))
    assert flat.startswith("The loss is flat over the last 510 steps: mean 3.001, then 3.000 (± 0.000). ")
    [rising] = texts_of(advisor(tmp_path), lines(falling + noisy(3.0, 60, fall=-0.3)))
    assert rising.startswith("The loss is rising: mean 3.0")
    [oscillating] = texts_of(advisor(tmp_path), lines([3.0 + 0.1 * math.sin(i / 2) for i in range(60)]))
    assert re.search(r"oscillates: .* by ± 0\.0[67]\d .* Divide learning_rate by 3, to 3\.3e-04", oscillating)


def test_rising_validation_loss_is_reported_once_even_after_a_resume(tmp_path):
    rising = evaluations(3.0, 2.0, 2.05, 2.2, 2.3)
    [text] = texts_of(advisor(tmp_path), rising)
    assert "is rising, from 2.0000 at step 200 to 2.2000: the model overfits" in text
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rising[:3]))
    assert len(texts_of(advisor(tmp_path), rising[3:])) == 1  # earlier log lines are read
    advice = {"time": "2026-01-01T10:00:00+00:00", "event": "advice", "step": 400, "about": "overfitting", "text": "."}
    (tmp_path / "events.jsonl").write_text(json.dumps(advice) + "\n")
    assert texts_of(advisor(tmp_path), rising[3:]) == []
