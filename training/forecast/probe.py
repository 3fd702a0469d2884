"""A few real steps, to see how fast they are and what memory they take. Nothing of them is kept."""

import time

from accelerate import Accelerator

from training.batches import TrainBatches
from training.config import TrainConfig
from training.device import Setup
from training.flops import flops_per_token
from training.forecast.forecast import Throughput
from training.hardware import name_of, peak_flops
from training.plan import Plan
from training.speed import peak_memory
from training.step import build_train_step
from training.tokens import Tokens

WARM = 3  # steps that are not counted, besides the first, which compiles: they find their memory
LEAST_SECONDS = 3.0
REPORTING = 50_000_000  # bytes of code that a run loads to sample and to draw


def measure(
    config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, tokens: Tokens, steps: int
) -> Throughput:
    """Called by every process. The learning rate is 0: the model stays what it is."""
    began = time.perf_counter()
    batches = TrainBatches(tokens, plan.order, plan.batches, accelerator.process_index)
    train_step = build_train_step(plan.model, None, batches, config.optim, setup, accelerator)

    def do(first: int, number: int) -> float:
        """So many steps; returns the time when the device is done with them."""
        for step in range(first, first + number):
            step_loss, _ = train_step(step, rate_factor=0.0)
        float(step_loss)  # waits for the device
        return time.perf_counter()

    first_step = do(0, 1) - began
    since = now = do(1, WARM)
    done = 0
    while now - since < LEAST_SECONDS:
        now = do(1 + WARM + done, steps)
        done += steps
    tokens_per_second = done * plan.tokens_per_step / (now - since)
    peak = peak_flops(name_of(accelerator.device), accelerator.mixed_precision)
    mfu = None
    if peak is not None:
        mfu = tokens_per_second * flops_per_token(plan.model) / (peak * accelerator.num_processes)
    known = f"measured in {done} steps; the first came after {first_step:.1f} s"
    peak = peak_memory(accelerator.device)
    if plan.memory.copies_to_host:  # the probe neither saves, nor samples and draws
        peak += plan.memory.fixed()["copy that is saved"] + REPORTING
    return Throughput(tokens_per_second, known, mfu, peak, first_step)
