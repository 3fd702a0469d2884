"""What becomes of a run, for people and programs that look in from outside.

status.json    how it stands: running, finished, stopped or failed; why; the step of its newest checkpoint
events.jsonl   what happened to it, and when, one object a line: begun, resumed (with the settings changed, the hardware and
               libraries, and the reason for a restart), saving, saved, spike, advice, finished, stopped, failed
"""

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from atomic import write_atomic
from errors import NONSENSE, check_format

State = Literal["running", "finished", "stopped", "failed"]
FORMAT_VERSION = 1  # of the run folder; a status.json without one is of format 1 too


def write_status(path: Path, state: State, step: int, reason: str = "") -> None:
    """Replaces status.json whole, if the disk lets it: no run fails for this. `step`: that of the newest checkpoint."""
    status = {"format_version": FORMAT_VERSION, "state": state, "reason": reason, "step": step, "time": now()}
    status |= {"host": socket.gethostname(), "pid": os.getpid()}
    with suppress(OSError):
        write_atomic(path, json.dumps(status, indent=2) + "\n")


def mark_failed(path: Path, step: int, reason: str) -> None:
    """Replace the status of a running run by `failed`; a run that has ended keeps its status."""
    if _read(path).get("state") == "running":
        write_status(path, "failed", step, reason)


def is_status(path: Path) -> bool:
    """Whether a file is a status.json of this project, of any format."""
    status = _read(path)
    return status.get("state") in get_args(State) and {"step", "reason", "time"} <= status.keys()


def check_run_format(path: Path) -> None:
    """Raise a `UserError` where a newer version of this project wrote the run folder of this status.json."""
    check_format(path.parent, _read(path).get("format_version"), FORMAT_VERSION)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a status.json; nothing where there is none, or not one of ours."""
    with suppress(OSError, *NONSENSE):
        return dict(json.loads(path.read_bytes()))
    return {}


def record(path: Path, event: str, step: int, **details: Any) -> None:
    """Adds a line to events.jsonl, if the disk lets it; after one that a crash cut off, on a line of its own."""
    with suppress(OSError), path.open("ab+") as file:
        file.seek(-min(1, file.seek(0, os.SEEK_END)), os.SEEK_END)
        is_cut = file.read() not in (b"", b"\n")
        file.write(
            b"\n" * is_cut + json.dumps({"time": now(), "event": event, "step": step, **details}).encode() + b"\n"
        )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def starts_in_force(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts that the run as it is now results from, each after `step` steps, oldest first.

    A resume discards what came after its checkpoint, and with it the starts there. Those of the run whose checkpoint
    this one branched off from are its `earlier` ones.
    """
    starts: list[dict[str, Any]] = []
    for event in events:
        if event["event"] in ("begun", "resumed"):
            kept = [start for start in starts if start["step"] < event["step"]]
            own = {name: event[name] for name in ("step", "changes", "environment") if name in event}
            starts = [*event.get("earlier", []), *kept, own]
    return starts


def hours(events: list[dict[str, Any]], now: datetime) -> float:
    """That the run has taken until now, by its events.jsonl. The time between the last event before a stop or a kill and
    the next start does not count."""
    moments = [(event["event"] in ("begun", "resumed"), datetime.fromisoformat(event["time"])) for event in events]
    spans = [later - before for (_, before), (starts, later) in pairwise([*moments, (False, now)]) if not starts]
    return sum(max(0.0, span.total_seconds()) for span in spans) / 3600  # a clock that was set back adds nothing
