"""Training speed measurements. docs/speed.md explains each number."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator

from modeling_gpt2scratch import GPT2ScratchConfig
from training.data.batches import TrainBatches
from training.runtime.hardware import device_name, peak_flops
from training.step.size import size_of

# Measurements by name in metrics.jsonl, with their format on the screen. Widths are fixed, so that columns of the log
# do not shift.
SHOWN = {
    "tokens_per_second": "{:>7,.0f} tok/s",
    "seconds_per_step": "{:.4f} s/step",
    "mfu": "MFU {:3.0%}",
    "data_share": "data {:5.1%}",
    "peak_memory_gb": "peak {:.1f} GB",
}


class Speed:
    """Clock of the steps since the last log line. It never synchronizes: read it right after waiting for the device."""

    def __init__(self, batches: TrainBatches, model: GPT2ScratchConfig, accelerator: Accelerator):
        self.batches = batches
        self.device = accelerator.device
        peak = peak_flops(device_name(accelerator.device), accelerator.mixed_precision)
        # Tokens per second of all devices together at their peak FLOP/s.
        self.at_peak = None if peak is None else peak * accelerator.num_processes / flops_per_token(model)
        self.restart()

    def restart(self) -> None:
        self.steps, self.waited = 0, 0.0
        self.batches.seconds = 0.0
        self.since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the `with` block from the training time."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the `with` block as waiting for the device."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since

    def measured(self, tokens_per_step: int) -> dict[str, float]:
        """Return the measurements by name in metrics.jsonl, without communication. Data and memory are local."""
        values = {}
        if self.steps:
            seconds = self.seconds
            speed = self.steps * tokens_per_step / seconds
            values["tokens_per_second"] = round(speed, 1)
            values["seconds_per_step"] = round(seconds / self.steps, 5)
            if self.at_peak is not None:
                values["mfu"] = round(speed / self.at_peak, 4)
            values["data_share"] = round(self.batches.seconds / seconds, 4)
        values["peak_memory_gb"] = round(peak_memory(self.device) / 1e9, 3)
        return values


def flops_per_token(config: GPT2ScratchConfig, causal: bool = True) -> int:
    """Return the floating-point operations to train on one token of a full context, forward and backward.

        6 N + 6 L C T, where N is the number of weights in matrix products, with the head, tied or not

    docs/speed.md derives it. An untied embedding is only looked up: GPT-2 with 124M parameters and its modern variant
    with 162M both have 123.5M weights in products. With `causal=False`, each token attends to all T tokens: 12 L C T,
    as PaLM and nanoGPT count."""
    attention = config.n_layer * config.n_embd * config.n_positions
    return 6 * size_of(config).products + (6 if causal else 12) * attention


def in_words(measurements: dict[str, float]) -> str:
    """Format measurements: `683,000 tok/s  0.7676 s/step  MFU 47%  data  0.0%  peak 11.2 GB`."""
    return "  ".join(form.format(measurements[name]) for name, form in SHOWN.items() if name in measurements)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of the device in bytes, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # the current value: Metal records no peak
    import resource  # not at the top: Windows lacks this module; there, models are used but not trained

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
