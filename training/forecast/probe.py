"""A few real steps, to measure their speed and memory. Nothing of them is kept."""

import time

from accelerate import Accelerator

from training.batches import TrainBatches
from training.config import TrainConfig
from training.device import Setup
from training.forecast.forecast import Throughput
from training.plan import Plan
from training.speed import Speed
from training.step import build_train_step
from training.tokens import Tokens

WARM = 3  # steps that are not counted, besides the first, which compiles: they find their memory
LEAST_SECONDS = 3.0
REPORTING = 50_000_000  # bytes of code that a run loads to sample and to draw


def measure(config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, tokens: Tokens) -> Throughput:
    """Called by every process. The learning rate is 0: the model stays what it is."""
    began = time.perf_counter()
    batches = TrainBatches(tokens, plan.order, plan.batches, accelerator.process_index)
    train_step = build_train_step(plan.model, None, batches, config.optim, setup, accelerator)
    speed = Speed(batches, plan.model, accelerator)

    def do(first: int, number: int) -> None:
        for step in range(first, first + number):
            step_loss, _ = train_step(step, rate_factor=0.0)
            speed.count(plan.tokens_per_step)
        float(step_loss)  # waits for the device

    do(0, 1)
    first_step = time.perf_counter() - began
    do(1, WARM)
    speed.restart()
    while speed.seconds < LEAST_SECONDS:
        do(1 + WARM + speed.steps, config.cost.plan_steps)
    measured = speed.measured()
    known = f"measured in {speed.steps} steps; the first came after {first_step:.1f} s"
    peak = 1e9 * measured["peak_memory_gb"]
    if plan.memory.copies_to_host:  # the probe neither saves, nor samples and draws
        peak += plan.memory.fixed()["copy that is saved"] + REPORTING
    return Throughput(measured["tokens_per_second"], known, measured.get("mfu"), peak, first_step)
