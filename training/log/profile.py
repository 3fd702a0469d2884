"""Profile of a few steps, recorded by torch.profiler: time per step by category, and a trace."""

import json
import os
import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, schedule

from common.limits import free
from training.log.run_log import RunLog
from training.plan.run import Run

WARM_UP = 3  # steps: compilation, first allocations, and one under the profiler
STEPS = 3
PHASES = ("data", "optimizer")  # ranges of train_step.py; all operators inside count as this category
SHOWN = 8  # kernels in the table

# Category of an operator or kernel: the first pattern found in its name, otherwise elementwise. On a GPU, the matrix
# products of eager attention are named like any other product, and count as matmul.
CATEGORY_PATTERNS = {
    "communication": r"nccl|gloo|c10d",
    "copies": r"^mem(cpy|set)",
    "optimizer": r"adam|_foreach_|multi_tensor_apply|vector_norm",
    "loss": r"log_?softmax|logsumexp|nll_loss|cross_entropy",
    "attention": r"softmax|attention|sdpa|flash|fmha|cudnn|bmm",  # linear layers use no bmm
    "matmul": r"(^|_|::)(add)?mm(_|$)|linear|gemm|gemv|splitk|nvjet|cutlass|xmma|s16816|sm90",
}
# A compiled kernel is named after all operations fused in it, including views and casts of its neighbors.
FUSED_KERNEL = re.compile(r"(cpp|triton_(poi|red|per))_fused_")
FUSED_PATTERNS = {"loss": r"log_softmax|logsumexp|nll_loss|cross_entropy|_exp_", "attention": "softmax"}
# On the host: events with a namespace are operators, except autograd's and ranges of torch.compile.
OPERATOR = re.compile(r"^(?!autograd::|torch::)\w+::|^gloo:|cpp_fused_")
OVERLAPPING_CATEGORIES = ("copies", "communication")  # run during computation: only the remaining time counts
ORDER = ("data", "matmul", "attention", "elementwise", "loss", "optimizer", "copies", "communication", "host", "idle")


@dataclass
class ProfileArguments:
    profile: bool = free(False, f"Profile {STEPS} steps, from the run's fourth on: time per operation, and a trace.")


class Profiler:
    """Profiler used by every process, so that none waits longer than usual. The main one reports."""

    def __init__(self, arguments: ProfileArguments, run: Run, log: RunLog):
        self.first = run.start.step + WARM_UP if arguments.profile else None  # first step to record; None when done
        self.folder, self.accelerator, self.log = run.folder.profile, run.accelerator, log
        self.open = ExitStack()

    def __enter__(self) -> "Profiler":
        if self.first is not None and self.accelerator.device.type == "cpu":
            # On a CPU, compiled kernels have names only if this is set before the first step compiles them.
            self.open.enter_context(inductor.patch({"cpp.enable_kernel_profile": True}))
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch 2.13 prints messages into the bar
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.open.close()
        if self.first is not None and kind is None:
            self.log.say(f"Nothing was profiled: the run ended before step {self.first + STEPS}, the last to record.")

    def before(self, step: int) -> None:
        """Wait for the device and start recording before the first step to record."""
        if self.first is None or not self.first - 1 <= step <= self.first:
            return
        with self.log.pause():
            if step < self.first:
                self.profiled = self.open.enter_context(profile(schedule=schedule(wait=0, warmup=1, active=STEPS)))
            else:
                self._wait()
                self.profiled.step()  # records from here on
        self.began = time.perf_counter()

    def after(self, step: int, pauses: bool) -> None:
        """Wait for the device and finish after the last step to record, or before a pause in training (`pauses`)."""
        if self.first is None or step <= self.first or not (pauses or step == self.first + STEPS):
            return
        with self.log.pause():
            self._wait()
            wall = 1e6 * (time.perf_counter() - self.began)
            self.open.close()
            if self.accelerator.is_main_process:
                self._report(step, wall)
        self.first = None

    def _wait(self) -> None:
        torch.get_device_module(self.accelerator.device).synchronize()

    def _report(self, last_step: int, wall: float) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / "trace.json.gz"
        self.profiled.export_chrome_trace(str(trace))
        times = account(self.profiled.events(), wall)
        if self.accelerator.device.type == "cuda" and ("host", "host") in times:
            self.log.say("WARNING: the driver did not allow kernel recording; the table shows only host time.")
        summary = summarize_profile(times, wall, self.first + 1, last_step)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self.log.say(f"{table(summary)}\nTrace: {trace}; open it at https://ui.perfetto.dev.")


def classify(name: str) -> str:
    """Return the category of a kernel or an operator: a key of `CATEGORY_PATTERNS`, or elementwise."""
    patterns = FUSED_PATTERNS if FUSED_KERNEL.search(name) else CATEGORY_PATTERNS
    return next((kind for kind, words in patterns.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def account(events: list[FunctionEvent], wall: float) -> Counter[tuple[str, str]]:
    """Return microseconds by (category, name) within a span of `wall` microseconds.
    With a device: the times of its kernels, and `idle` without any kernel. On a CPU: the self times of the operators,
    and `host` for the rest (Python). The `OVERLAPPING_CATEGORIES` get at most the time that the others leave."""
    on_device = any(event.device_type != DeviceType.CPU for event in events)
    times: Counter[tuple[str, str]] = Counter()
    for event in events:
        is_work = not event.is_user_annotation if on_device else OPERATOR.search(event.name) or event.name == "data"
        if not is_work or (event.device_type != DeviceType.CPU) != on_device:
            continue
        phase = event
        while phase is not None and phase.name not in PHASES:
            phase = phase.cpu_parent
        duration = event.time_range.elapsed_us() if on_device or event.is_async else event.self_cpu_time_total
        category = classify(event.name) if phase is None else phase.name
        times[category, "data" if category == "data" else event.name] += duration
    overlap = sum(us for (category, _), us in times.items() if category in OVERLAPPING_CATEGORIES)
    share = max(0, min(1, (wall - (times.total() - overlap)) / (overlap or 1)))
    for key in times:
        if key[0] in OVERLAPPING_CATEGORIES:
            times[key] *= share
    remainder = "idle" if on_device else "host"
    times[remainder, remainder] = max(0, wall - times.total())
    return times


def summarize_profile(times: Counter[tuple[str, str]], wall: float, first_step: int, last_step: int) -> dict[str, Any]:
    """Return milliseconds per step for `first_step` to `last_step` (counted from 1), in the format of summary.json."""
    microseconds = 1000 * (last_step - first_step + 1)
    categories = Counter()
    for (category, _), duration in times.items():
        categories[category] += duration
    kernels = [
        {"name": name, "category": category, "ms": round(duration / microseconds, 4)}
        for (category, name), duration in times.most_common()
        if name != category
    ]
    return {
        "first_step": first_step,
        "last_step": last_step,
        "step_ms": round(wall / microseconds, 4),
        "ms": {name: round(categories[name] / microseconds, 4) for name in ORDER if categories[name]},
        "kernels": kernels,
        "attention": [kernel["name"] for kernel in kernels if kernel["category"] == "attention"],
    }


def table(summary: dict[str, Any]) -> str:
    """Format a summary as a table for the log."""
    total = summary["step_ms"]
    lines = [f"Time per step (steps {summary['first_step']:,} to {summary['last_step']:,}):"]
    lines += [f"{ms:12,.2f} ms {ms / total:6.1%}  {category}" for category, ms in summary["ms"].items()]
    lines += [f"{total:12,.2f} ms {1:6.1%}  total", "Slowest kernels:"]
    for kernel in summary["kernels"][:SHOWN]:
        name = kernel["name"] if len(kernel["name"]) <= 72 else f"{kernel['name'][:45]}…{kernel['name'][-26:]}"
        lines.append(f"{kernel['ms']:12,.2f} ms {kernel['ms'] / total:6.1%}  {kernel['category']:<13} {name}")
    return "\n".join([*lines, f"Attention ran in {', '.join(summary['attention'][:2]) or 'no separate kernel'}."])
