"""What would be better about a configuration, and why: what its plan shows, and what others had to learn the hard way."""

import shutil
from pathlib import Path

import psutil
import torch

from training.config import TrainConfig
from training.device import Setup, kernel_of_sdpa, memory_of_others
from training.forecast.forecast import TOKENS_A_PARAMETER, Forecast, describe_forecast
from training.hardware import FILLS_A_GPU
from training.optim import usual_learning_rate
from training.plan import Plan

FEW_TOKENS = 8192  # of a micro-batch, which leave a GPU idle between its kernels
MANY_EPOCHS = 4  # from which on repeated text teaches less and less (Muennighoff et al. 2023)
RATE_FACTOR = 6  # from the usual rate, either way
MUCH = 0.1  # of the time, spent on validation


def outlook(
    forecast: Forecast,
    config: TrainConfig,
    hardware: str,
    setup: Setup,
    device: torch.device,
    store: Path | str,
    estimated: str | None = None,
) -> str:
    """What the user reads before the first step: the forecast, and what would be better."""
    described = describe_forecast(forecast, config, hardware, setup.notes, store, estimated)
    on_gpu = device.type == "cuda" or config.cost.plan_device is not None
    return "\n".join([described, *(f"Better:  {sentence}" for sentence in advice(config, forecast, setup, on_gpu))])


def advice(config: TrainConfig, forecast: Forecast, setup: Setup, on_gpu: bool) -> list[str]:
    """A sentence for each thing."""
    plan, N = forecast.plan, forecast.plan.memory.parameters
    batches, told = plan.batches, []
    if config.data.data_placement == "mmap" and forecast.store_bytes < psutil.virtual_memory().available / 2:
        told.append(
            f"data_placement is mmap, but the store's {forecast.store_bytes / 1e9:.2f} GB fit in RAM, where no batch waits for a "
            f"disk; leave it at auto."
        )
    if not setup.torch_compile and (on_gpu or shutil.which("g++")):
        told.append("torch_compile is off; compiled, a step is faster, on a GPU by far.")
    if on_gpu and setup.mixed_precision == "no":
        told.append("mixed_precision is no, so tensor cores compute in TF32 at best; bf16 is about twice as fast.")
    if on_gpu and config.cost.plan_device is None:
        told += _about_the_gpu(plan, setup)
    usual = usual_learning_rate(N)
    if not usual / RATE_FACTOR <= config.optim.learning_rate <= usual * RATE_FACTOR:
        told.append(
            f"learning_rate is {config.optim.learning_rate:.1e}; models of {N / 1e6:,.1f}M parameters usually take about "
            f"{usual:.1e} (Kaplan et al. 2020)."
        )
    if config.optim.warmup_steps > plan.max_steps / 4:
        told.append(
            f"warmup_steps is {config.optim.warmup_steps:,} of {plan.max_steps:,} steps; a tenth or less is usual."
        )
    largest = plan.memory.largest_micro_batch(plan.available)
    if on_gpu and batches.micro_batch * batches.context < FEW_TOKENS and largest > batches.micro_batch:
        told.append(
            f"A micro-batch is {batches.micro_batch * batches.context:,} tokens, too few to fill a GPU; {largest:,} sequences would "
            f"fit: raise tokens_per_step, or per_device_train_batch_size."
        )
    epochs = plan.epoch(plan.max_steps)
    if epochs > MANY_EPOCHS:
        told.append(
            f"The text is read {epochs:.1f} times; from about {MANY_EPOCHS} on, more text helps more than more reading."
        )
    if N >= FILLS_A_GPU and forecast.tokens < N * TOKENS_A_PARAMETER / 10:  # laws of scale speak of no smaller models
        told.append(
            f"{forecast.tokens / N:.2g} tokens a parameter are few: a smaller model would reach a lower loss in the same time."
        )
    if forecast.evaluation_share > MUCH:
        told.append(
            f"Validation takes about {forecast.evaluation_share:.0%} of the time; raise eval_steps or set max_eval_samples."
        )
    return told


def _about_the_gpu(plan: Plan, setup: Setup) -> list[str]:
    told, model = [], plan.model
    if others := memory_of_others():
        told.append(f"{others}.")
    if setup.attn_implementation == "sdpa":
        device = torch.device("cuda")
        if kernel_of_sdpa(device, setup, model) == "math":
            told.append(
                f"Attention runs in PyTorch's math kernel, the slowest, which keeps all scores: heads are {model.n_embd / model.n_head:g} "
                f"wide, and the fast kernels need a multiple of 8 up to 256; change n_head or n_embd."
            )
    return told
