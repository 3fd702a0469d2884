"""Advice before a run: what its plan shows, and what would be better. diagnosis.py advises while it trains."""

import shutil

import psutil
import torch

from training.device import kernel_of_sdpa, memory_of_others
from training.forecast.forecast import TOKENS_A_PARAMETER, Forecast, describe_forecast
from training.hardware import FILLS_A_GPU
from training.optim import usual_learning_rate

FEW_TOKENS = 8192  # of a micro-batch, which leave a GPU idle between its kernels
MANY_EPOCHS = 4  # from which on repeated text teaches less and less (Muennighoff et al. 2023)
RATE_FACTOR = 6  # from the usual rate, either way
MUCH = 0.1  # of the time, spent on validation


def outlook(forecast: Forecast, hardware: str, data: str | None = None) -> str:
    """Return what is printed before the first step: the forecast, and what would be better."""
    better = (f"Better:  {sentence}" for sentence in advice(forecast))
    return "\n".join([describe_forecast(forecast, hardware, data), *better])


def advice(forecast: Forecast) -> list[str]:
    config, setup, plan = forecast.config, forecast.setup, forecast.plan
    batches, model, N, on_gpu = plan.batches, plan.model, plan.memory.parameters, plan.memory.on_gpu
    is_here = on_gpu and config.cost.plan_device is None
    others = memory_of_others() if is_here else ""
    is_math = (
        is_here and setup.attn_implementation == "sdpa" and kernel_of_sdpa(torch.device("cuda"), setup, model) == "math"
    )
    rate, usual, warmup = config.optim.learning_rate, usual_learning_rate(N), config.optim.warmup_steps
    tokens, largest = batches.micro_batch * batches.context, plan.memory.largest_micro_batch(plan.available)
    epochs, fits_ram = plan.epoch(plan.max_steps), forecast.store_bytes < psutil.virtual_memory().available / 2
    checks = [
        (
            config.data.data_placement == "mmap" and fits_ram,
            f"data_placement is mmap, but the store's {forecast.store_bytes / 1e9:.2f} GB fit in RAM, where no batch waits for a "
            f"disk; leave it at auto.",
        ),
        (
            not setup.torch_compile and (on_gpu or shutil.which("g++")),
            "torch_compile is off; compiled, a step is faster, on a GPU by far.",
        ),
        (
            on_gpu and setup.mixed_precision == "no",
            "mixed_precision is no, so tensor cores compute in TF32 at best; bf16 is about twice as fast.",
        ),
        (others, f"{others}."),
        (
            is_math,
            f"Attention runs in PyTorch's math kernel, the slowest, which keeps all scores: heads are {model.n_embd / model.n_head:g} "
            f"wide, and the fast kernels need a multiple of 8 up to 256; change n_head or n_embd.",
        ),
        (
            not usual / RATE_FACTOR <= rate <= usual * RATE_FACTOR,
            f"learning_rate is {rate:.1e}; models of {N / 1e6:,.1f}M parameters usually take about {usual:.1e} (Kaplan et al. 2020).",
        ),
        (
            warmup > plan.max_steps / 4,
            f"warmup_steps is {warmup:,} of {plan.max_steps:,} steps; a tenth or less is usual.",
        ),
        (
            on_gpu and tokens < FEW_TOKENS and largest > batches.micro_batch,
            f"A micro-batch is {tokens:,} tokens, too few to fill a GPU; {largest:,} sequences would fit: raise tokens_per_step, or "
            f"per_device_train_batch_size.",
        ),
        (
            epochs > MANY_EPOCHS,
            f"The text is read {epochs:.1f} times; from about {MANY_EPOCHS} on, more text helps more than more reading.",
        ),
        (
            N >= FILLS_A_GPU and forecast.tokens < N * TOKENS_A_PARAMETER / 10,  # scaling laws are of no smaller models
            f"{forecast.tokens / N:.2g} tokens a parameter are few: a smaller model would reach a lower loss in the same time.",
        ),
        (
            forecast.evaluation_share > MUCH,
            f"Validation takes about {forecast.evaluation_share:.0%} of the time; raise eval_steps or set max_eval_samples.",
        ),
    ]
    return [sentence for holds, sentence in checks if holds]
