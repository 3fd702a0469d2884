"""A few real steps, to see how fast they are and what memory they take. Nothing of them is kept."""

import time

import torch
from accelerate import Accelerator

from training.batches import TrainBatches
from training.config import TrainConfig
from training.device import Setup
from training.flops import flops_per_token
from training.forecast.forecast import Throughput
from training.loss import NextTokenLoss
from training.model import build_model
from training.optim import build_optimizer
from training.plan import Plan
from training.planning.datasheet import peak_flops
from training.speed import peak_memory
from training.step import Trainer, prepare_loss
from training.tokens import Tokens

WARM = 3  # steps that are not counted, besides the first, which compiles: they find their memory
LEAST_SECONDS = 3.0
REPORTING = 50_000_000  # bytes of code that a run loads to sample and to draw


def measure(
    config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, tokens: Tokens, steps: int
) -> Throughput:
    """Called by every process. The learning rate is 0: the model stays what it is."""
    began = time.perf_counter()
    torch.manual_seed(config.seed)
    model = build_model(plan.model, None, config.device, setup.attn_implementation)
    accelerator.gradient_accumulation_steps = plan.batches.accumulation
    loss = prepare_loss(NextTokenLoss(model).train(), accelerator, setup)
    optimizer = accelerator.prepare(build_optimizer(model, config.optim, accelerator.device))
    batches = TrainBatches(tokens, plan.order, plan.batches, accelerator.process_index, plan.position)
    trainer = Trainer(accelerator, loss, optimizer, batches, config.optim.max_grad_norm, config.seed)

    def do(first: int, number: int) -> float:
        """So many steps; returns the time when the device is done with them."""
        for step in range(first, first + number):
            step_loss, _ = trainer.step(step, learning_rate=0.0)
        float(step_loss)  # waits for the device
        return time.perf_counter()

    first_step = do(0, 1) - began
    since = now = do(1, WARM)
    done = 0
    while now - since < LEAST_SECONDS:
        now = do(1 + WARM + done, steps)
        done += steps
    tokens_per_second = done * plan.tokens_per_step / (now - since)
    peak = peak_flops(accelerator.device, accelerator.mixed_precision)
    mfu = None
    if peak is not None:
        mfu = tokens_per_second * flops_per_token(plan.model) / (peak * accelerator.num_processes)
    known = f"measured in {done} steps; the first came after {first_step:.1f} s"
    peak = peak_memory(accelerator.device)
    if plan.memory.copies_to_host:  # the probe neither saves, nor samples and draws
        peak += plan.memory.fixed()["copy that is saved"] + REPORTING
    return Throughput(tokens_per_second, known, mfu, peak, first_step)
