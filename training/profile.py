"""Profile of a few steps of a run, recorded by torch.profiler: a table of where their time went, and a trace."""

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

from limits import setting
from training.log import RunLog
from training.run import Run

WARM_UP = 3  # steps: compilation, first allocations, and one under the profiler
STEPS = 3
PHASES = ("data", "optimizer")  # ranges of step.py whose operators all count as theirs
SHOWN = 8  # kernels

# Of an operator or a kernel by its name: the first that is found in it; what is none of these is elementwise. On a GPU,
# the products of written-out attention have the names of any other, and count as matmul.
NAMED = {
    "communication": r"nccl|gloo|c10d",
    "copies": r"^mem(cpy|set)",
    "optimizer": r"adam|_foreach_|multi_tensor_apply|vector_norm",
    "loss": r"log_?softmax|logsumexp|nll_loss|cross_entropy",
    "attention": r"softmax|attention|sdpa|flash|fmha|cudnn|bmm",  # linear layers use no bmm
    "matmul": r"(^|_|::)(add)?mm(_|$)|linear|gemm|gemv|splitk|nvjet|cutlass|xmma|s16816|sm90",
}
# A compiled kernel is named after all that is fused in it, its neighbours' views and casts included.
FUSED = re.compile(r"(cpp|triton_(poi|red|per))_fused_")
FUSED_NAMED = {"loss": r"log_softmax|logsumexp|nll_loss|cross_entropy|_exp_", "attention": "softmax"}
# On the host: what has a namespace is an operator, unless it is autograd's; a range of torch.compile is none either.
OPERATOR = re.compile(r"^(?!autograd::|torch::)\w+::|^gloo:|cpp_fused_")
OVERLAPPING = ("copies", "communication")  # run while something else computes: only what that leaves counts
ORDER = ("data", "matmul", "attention", "elementwise", "loss", "optimizer", "copies", "communication", "host", "idle")


@dataclass
class ProfileArguments:
    profile: bool = setting(
        False,
        f"Record {STEPS} steps, from the run's fourth on: where their time goes, and a trace of them.",
        resume="free",
    )


class Profiler:
    """Used by every process: each records, so that none waits for another more than in other steps; the main one reports."""

    def __init__(self, arguments: ProfileArguments, run: Run, log: RunLog):
        self.first = run.start.step + WARM_UP if arguments.profile else None  # step to record, until that is done
        self.folder, self.accelerator, self.log = run.folder.profile, run.accelerator, log
        self.open = ExitStack()

    def __enter__(self) -> "Profiler":
        if self.first is not None and self.accelerator.device.type == "cpu":
            # Compiled kernels have names there only if asked before they are compiled, which the first step does.
            self.open.enter_context(inductor.patch({"cpp.enable_kernel_profile": True}))
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch 2.13 says that it starts and stops, amid the bar
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.open.close()
        if self.first is not None and kind is None:
            self.log.say(f"Nothing was profiled: the run ended before step {self.first + STEPS}, the last to record.")

    def before(self, step: int) -> None:
        """Waits for the device before the first step that is recorded."""
        if self.first is None or not self.first - 1 <= step <= self.first:
            return
        with self.log.pause():
            if step < self.first:
                self.profiled = self.open.enter_context(profile(schedule=schedule(wait=0, warmup=1, active=STEPS)))
            else:
                self._wait()
                self.profiled.step()  # it records from here on
        self.began = time.perf_counter()

    def after(self, done: int, pauses: bool) -> None:
        """`pauses`: what follows is no part of a step. Waits for the device after the last step that is recorded."""
        if self.first is None or done <= self.first or not (pauses or done == self.first + STEPS):
            return
        with self.log.pause():
            self._wait()
            wall = 1e6 * (time.perf_counter() - self.began)
            self.open.close()
            if self.accelerator.is_main_process:
                self._report(done, wall)
        self.first = None

    def _wait(self) -> None:
        torch.get_device_module(self.accelerator.device).synchronize()

    def _report(self, done: int, wall: float) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / "trace.json.gz"
        self.profiled.export_chrome_trace(str(trace))
        spent = account(self.profiled.events(), wall)
        if self.accelerator.device.type == "cuda" and ("host", "host") in spent:
            self.log.say("WARNING: the driver let no kernel be recorded; what follows is the host's time alone.")
        summary = summarize(spent, wall, self.first + 1, done)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self.log.say(f"{table(summary)}\nThe trace is {trace}; open it at https://ui.perfetto.dev.")


def classify(name: str) -> str:
    """Return the category of a kernel or an operator: a key of `NAMED`, or elementwise."""
    named = FUSED_NAMED if FUSED.search(name) else NAMED
    return next((kind for kind, words in named.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def account(events: list[FunctionEvent], wall: float) -> Counter[tuple[str, str]]:
    """Return microseconds by (category, name), of `wall` microseconds.

    On a device, the times of its kernels, and `idle`, in which none ran. Without one, the self times of the operators, and `host`,
    the rest: Python. `OVERLAPPING` gets at most the time that the others leave.
    """
    on_device = any(event.device_type != DeviceType.CPU for event in events)
    spent: Counter[tuple[str, str]] = Counter()
    for event in events:
        is_work = not event.is_user_annotation if on_device else OPERATOR.search(event.name) or event.name == "data"
        if not is_work or (event.device_type != DeviceType.CPU) != on_device:
            continue
        phase = event
        while phase is not None and phase.name not in PHASES:
            phase = phase.cpu_parent
        own = event.time_range.elapsed_us() if on_device or event.is_async else event.self_cpu_time_total
        category = classify(event.name) if phase is None else phase.name
        spent[category, "data" if category == "data" else event.name] += own
    overlapping = sum(us for (category, _), us in spent.items() if category in OVERLAPPING)
    share = max(0, min(1, (wall - (spent.total() - overlapping)) / (overlapping or 1)))
    for key in spent:
        if key[0] in OVERLAPPING:
            spent[key] *= share
    rest = "idle" if on_device else "host"
    spent[rest, rest] = max(0, wall - spent.total())
    return spent


def summarize(spent: Counter[tuple[str, str]], wall: float, first_step: int, last_step: int) -> dict[str, Any]:
    """Return milliseconds per step, of the steps from `first_step` to `last_step` (counted from 1), as in summary.json."""
    microseconds = 1000 * (last_step - first_step + 1)
    categories = Counter()
    for (category, _), time_spent in spent.items():
        categories[category] += time_spent
    kernels = [
        {"name": name, "category": category, "ms": round(time_spent / microseconds, 4)}
        for (category, name), time_spent in spent.most_common()
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
    """Return the table that is printed."""
    whole = summary["step_ms"]
    lines = [f"Where the time of a step went (steps {summary['first_step']:,} to {summary['last_step']:,}):"]
    lines += [f"{ms:12,.2f} ms {ms / whole:6.1%}  {category}" for category, ms in summary["ms"].items()]
    lines += [f"{whole:12,.2f} ms {1:6.1%}  a step", "The heaviest kernels:"]
    for kernel in summary["kernels"][:SHOWN]:
        name = kernel["name"] if len(kernel["name"]) <= 72 else f"{kernel['name'][:45]}…{kernel['name'][-26:]}"
        lines.append(f"{kernel['ms']:12,.2f} ms {kernel['ms'] / whole:6.1%}  {kernel['category']:<13} {name}")
    return "\n".join([*lines, f"Attention ran in {', '.join(summary['attention'][:2]) or 'no kernel of its own'}."])
