"""Run status for users and external monitoring.

status.json    the state (running, finished, stopped or failed), its reason, and the step of the newest checkpoint
events.jsonl   events with their times, one object per line: begun, resumed (with changed settings, hardware, libraries
               and the reason of a restart), saving, saved, backup_failed, spike, advice, paced (a budget's final
               length), finished, stopped, failed
"""

import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from common import schema
from common.atomic import write_atomic
from common.errors import NONSENSE, check_format

State = Literal["running", "finished", "stopped", "failed"]
FORMAT_VERSION = 1  # of the run folder; a status.json without a version has format 1


def write_status(path: Path, state: State, step: int, reason: str = "") -> None:
    """Replace status.json atomically, or on a full disk in its place. Ignore other disk errors. `step` is the newest
    checkpoint's step."""
    status = {"format_version": FORMAT_VERSION, "state": state, "reason": reason, "step": step, "time": now()}
    status |= {"host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps(status, indent=2) + "\n"
    try:
        write_atomic(path, text)
    except OSError:
        with suppress(OSError), path.open("r+", encoding="utf-8") as file:  # "w" would give its space to other files
            file.write(text)
            file.truncate()


def check_run_format(path: Path) -> None:
    """Raise a `UserError` if a newer version of this project wrote the run folder of this status.json."""
    check_format(path.parent, read_status(path).get("format_version"), FORMAT_VERSION)


def read_status(path: Path) -> dict[str, Any]:
    """Return the content of a status.json, or an empty dictionary if the file is missing or unreadable."""
    with suppress(OSError, *NONSENSE):
        return schema.read(path, dict[str, Any])
    return {}


def record(path: Path, event: str, step: int, **details: Any) -> None:
    """Append a line to events.jsonl, but ignore disk errors. After a line cut off by a crash, start a new line."""
    with suppress(OSError), path.open("ab+") as file:
        file.seek(-min(1, file.seek(0, os.SEEK_END)), os.SEEK_END)
        is_cut = file.read() not in (b"", b"\n")
        entry = {"time": now(), "clock": round(time.monotonic(), 1), "event": event, "step": step, **details}
        file.write(b"\n" * is_cut + json.dumps(entry).encode() + b"\n")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def starts_in_force(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts that led to the current state of the run, each after `step` steps, oldest first.
    A resume discards everything after its checkpoint, including later starts. `earlier` holds the starts of the run
    whose checkpoint this run branched off from."""
    starts: list[dict[str, Any]] = []
    for event in events:
        if event["event"] in ("begun", "resumed"):
            earlier_starts = [start for start in starts if start["step"] < event["step"]]
            start = {name: event[name] for name in ("step", "changes", "environment") if name in event}
            starts = [*event.get("earlier", []), *earlier_starts, start]
    return starts


def first_step(events: list[dict[str, Any]]) -> int:
    """Return the steps of another run that this one branched off from, or 0."""
    return next((event["step"] for event in events if event["event"] in ("begun", "resumed")), 0)


def hours(events: list[dict[str, Any]], end: datetime | None = None, clock: float | None = None) -> float:
    """Return the run's hours until `end` and its monotonic `clock`, by default until its last event, from its
    events.jsonl. The time between the last event before a stop or a kill and the next start does not count, nor does
    the sleep of a laptop, which its monotonic clock leaves out."""
    if end is not None:
        events = [*events, {"event": "end", "time": end.isoformat(), "clock": clock}]
    seconds = 0.0
    # A backup may fail days after the end of a run, or before the next start.
    for before, after in pairwise(event for event in events if event["event"] != "backup_failed"):
        if after["event"] not in ("begun", "resumed"):
            span = (datetime.fromisoformat(after["time"]) - datetime.fromisoformat(before["time"])).total_seconds()
            if None not in (before.get("clock"), after.get("clock")):  # older versions wrote none
                span = after["clock"] - before["clock"]
            seconds += max(0.0, span)  # the clock may be set back
    return seconds / 3600
