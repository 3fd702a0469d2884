"""Profile of a few steps, recorded by torch.profiler: time per step of the slowest kernels, and a trace."""

import json
import os
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
SHOWN = 12  # kernels in the table


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
        summary = summarize_profile(self.profiled.events(), wall, self.first + 1, last_step)
        if self.accelerator.device.type == "cuda" and all(row["name"] != "no kernel" for row in summary["kernels"]):
            self.log.say("WARNING: the driver did not allow kernel recording; the table shows only host time.")
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self.log.say(f"{table(summary)}\nTrace: {trace}; open it at https://ui.perfetto.dev.")


def summarize_profile(events: list[FunctionEvent], wall: float, first_step: int, last_step: int) -> dict[str, Any]:
    """Return milliseconds per step for `first_step` to `last_step` (counted from 1), which took `wall` microseconds:
    of the device's kernels, otherwise of operators and ranges without what they call. Format of summary.json."""
    on_device = any(event.device_type != DeviceType.CPU for event in events)
    times: Counter[str] = Counter()
    for event in events:
        if not on_device:
            times[event.name] += event.self_cpu_time_total
        elif event.device_type != DeviceType.CPU and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us()
    if on_device:
        times["no kernel"] = max(0, wall - times.total())
    microseconds = 1000 * (last_step - first_step + 1)
    kernels = [{"name": name, "ms": round(us / microseconds, 4)} for name, us in times.most_common()]
    step_ms = round(wall / microseconds, 4)
    return {"first_step": first_step, "last_step": last_step, "step_ms": step_ms, "kernels": kernels}


def table(summary: dict[str, Any]) -> str:
    """Format a summary as a table for the log."""
    total = summary["step_ms"]
    lines = [f"Time per step (steps {summary['first_step']:,} to {summary['last_step']:,}): {total:,.2f} ms"]
    for kernel in summary["kernels"][:SHOWN]:
        name = kernel["name"] if len(kernel["name"]) <= 72 else f"{kernel['name'][:45]}…{kernel['name'][-26:]}"
        lines.append(f"{kernel['ms']:12,.2f} ms {kernel['ms'] / total:6.1%}  {name}")
    return "\n".join(lines)
