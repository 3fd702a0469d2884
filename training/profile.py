"""Profile of a few steps of a run, recorded by torch.profiler: a table of where their time went, and a trace."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._inductor import config as inductor
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from limits import setting
from training.log import RunLog
from training.run import Run

WARM_UP = 3  # steps: compilation, first allocations, and one under the profiler
STEPS = 3
RECORDED = "recorded steps"
RANGES = (RECORDED, "data", "forward", "backward", "optimizer")  # the others are in step.py
SHORT_GAP = 20  # microseconds between two kernels, which launching them takes
SHOWN = 8  # kernels

# Of an operator or a kernel by its name: the first that is found in it; what is none of these is elementwise. On a GPU,
# the products of written-out attention have the names of any other, and count as matmul.
NAMED = {
    "communication": r"nccl|gloo|c10d",
    "copies": r"^mem(cpy|set)",
    "optimizer": r"adam|_foreach_|multi_tensor_apply",
    "loss": r"log_?softmax|logsumexp|nll_loss|cross_entropy",
    "attention": r"softmax|attention|sdpa|flash|fmha|cudnn|bmm",  # linear layers use no bmm
    "matmul": r"(^|_|::)(add)?mm(_|$)|linear|gemm|gemv|splitk|nvjet|cutlass|xmma|s16816|sm90",
}
# A compiled kernel is named after all that is fused in it, its neighbours' views and casts included.
FUSED = re.compile(r"(cpp|triton_(poi|red|per))_fused_")
FUSED_NAMED = {"loss": r"log_softmax|logsumexp|nll_loss|cross_entropy|_exp_", "attention": "softmax"}
# On the host: what has a namespace is an operator, unless it is autograd's; a range of torch.compile is none either.
OPERATOR = re.compile(r"^(?!autograd::|torch::)\w+::|^gloo:|cpp_fused_")
COMPUTATION = ("optimizer", "attention", "matmul", "loss", "elementwise")
WORK = (*COMPUTATION, "copies", "communication")  # of what goes on together, the first one counts
ORDER = ("data", "matmul", "attention", "elementwise", "loss", "optimizer", "copies", "communication", "host", "idle")


@dataclass
class ProfileArguments:
    profile: bool = setting(
        False,
        f"Record {STEPS} steps, from the run's fourth on: where their time goes, and a trace of them.",
        resume="free",
    )


class Event(NamedTuple):
    name: str
    start: float  # microseconds
    end: float
    on_device: bool  # a kernel, and not what launched it


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
                self.profiled = self.open.enter_context(profile())
            else:
                self._wait()
                self.open.enter_context(record_function(RECORDED))

    def after(self, done: int, pauses: bool) -> None:
        """`pauses`: what follows is no part of a step. Waits for the device after the last step that is recorded."""
        if self.first is None or done <= self.first or not (pauses or done == self.first + STEPS):
            return
        with self.log.pause():
            self._wait()
            self.open.close()
            if self.accelerator.is_main_process:
                self._report(done)
        self.first = None

    def _wait(self) -> None:
        torch.get_device_module(self.accelerator.device).synchronize()

    def _report(self, done: int) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / "trace.json.gz"
        self.profiled.export_chrome_trace(str(trace))
        events = events_of(self.profiled)
        if self.accelerator.device.type == "cuda" and not any(event.on_device for event in events):
            self.log.say("WARNING: the driver let no kernel be recorded; what follows is the host's time alone.")
        start, end = next((event.start, event.end) for event in events if event.name == RECORDED)
        summary = summarize(account(events, start, end), self.first + 1, done)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self.log.say(f"{table(summary)}\nThe trace is {trace}; open it at https://ui.perfetto.dev.")


def events_of(profiled: profile) -> list[Event]:
    """Return all events but the ranges of other libraries."""
    return [
        Event(event.name, event.time_range.start, event.time_range.end, event.device_type != DeviceType.CPU)
        for event in profiled.events()
        if not event.is_user_annotation or event.name in RANGES or event.name.startswith("gloo:")
    ]


def classify(name: str) -> str:
    """Return what a kernel or an operator is for, one of `WORK`."""
    named = FUSED_NAMED if FUSED.search(name) else NAMED
    return next((kind for kind, words in named.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def account(events: list[Event], start: float, end: float) -> Counter[tuple[str, str]]:
    """Microseconds by (category, name), which add up to `end - start`: each moment belongs to one of them.

    With a device, to a kernel; where none runs, to the making of data (`data`), to a host that is late (`host`) or to the
    launch of the next kernel (`idle`). Without, to the making of data or to the innermost operator; where none runs, to
    Python (`host`). Communication and copies get what no other work takes: hidden behind it, they cost nothing.
    """
    on_device = any(event.on_device for event in events)
    order = (*WORK, "data", "host") if on_device else ("data", *WORK, "host")
    nothing = (order.index("host"), 0.0, "host", "host")
    marks = [(start, True, nothing), (end, False, nothing)]
    optimizer_until = -math.inf
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if event.name == "optimizer" and event.on_device == on_device:
            optimizer_until = event.end
        category = _category(event, on_device)
        if category in COMPUTATION and event.start < optimizer_until:
            category = "optimizer"
        begin, stop = max(event.start, start), min(event.end, end)
        if category is not None and begin < stop:
            claim = (order.index(category), -event.start, category, event.name)  # the innermost is the least
            marks += [(begin, True, claim), (stop, False, claim)]

    spent, going_on, now = Counter(), Counter(), start
    for time, begins, claim in sorted(marks):
        if time > now:
            *_, category, name = min(going_on)
            if on_device and category == "host" and time - now <= SHORT_GAP:
                category = name = "idle"
            spent[category, name] += time - now
            now = time
        going_on[claim] += 1 if begins else -1
        if not going_on[claim]:
            del going_on[claim]
    return spent


def _category(event: Event, on_device: bool) -> str | None:
    """`data` or one of `WORK`; None for what takes no time of its own."""
    if event.name in RANGES:
        return "data" if event.name == "data" and not event.on_device else None
    if event.on_device != on_device or not (on_device or OPERATOR.search(event.name)):
        return None
    return classify(event.name)


def summarize(spent: Counter[tuple[str, str]], first_step: int, last_step: int) -> dict[str, Any]:
    """Return milliseconds per step, of the steps from `first_step` to `last_step` (counted from 1), as in summary.json."""
    steps = last_step - first_step + 1

    def ms(times: Iterable[float]) -> float:
        return round(sum(times) / steps / 1000, 4)

    kernels = [
        {"name": name, "category": category, "ms": ms([time])}
        for (category, name), time in spent.most_common()
        if category in WORK
    ]
    categories = {here: ms(time for (category, _), time in spent.items() if category == here) for here in ORDER}
    return {
        "first_step": first_step,
        "last_step": last_step,
        "step_ms": ms(spent.values()),
        "ms": {category: time for category, time in categories.items() if time},
        "kernels": kernels,
        "attention": [kernel["name"] for kernel in kernels if kernel["category"] == "attention"],
    }


def table(summary: dict[str, Any]) -> str:
    """Return the table that is printed."""
    whole = summary["step_ms"]

    def line(ms: float, text: str) -> str:
        return f"{ms:12,.2f} ms {ms / whole:6.1%}  {text}"

    return "\n".join(
        [
            f"Where the time of a step went (steps {summary['first_step']:,} to {summary['last_step']:,}):",
            *(line(ms, category) for category, ms in summary["ms"].items()),
            line(whole, "a step"),
            "The heaviest kernels:",
            *(
                line(kernel["ms"], f"{kernel['category']:<13} {_short(kernel['name'])}")
                for kernel in summary["kernels"][:SHOWN]
            ),
            f"Attention ran in {', '.join(summary['attention'][:2]) or 'no kernel of its own'}.",
        ]
    )


def _short(name: str) -> str:
    return name if len(name) <= 72 else f"{name[:45]}…{name[-26:]}"
