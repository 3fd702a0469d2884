"""What the value of a setting may be: the range of a number, and names that file systems accept.

`setting` makes a field of a dataclass of flags. A number without a range is at least 0 and at most `LARGEST`. A string is a
name (a path, a Hub id, a choice) unless it is `free_text`. A setting that must be given is `needed`: its noun, and an example
of the command. `command_line.FlagParser` checks every value once, from flags and from files.
"""

import operator
from collections.abc import Mapping
from dataclasses import field
from typing import Any

LARGEST = 10**15
BOUNDS = {
    "minimum": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("below", operator.lt),
}
KEYS = {*BOUNDS, "free_text", "resume", "needed"}  # of a field's metadata, which argparse does not know
NAME_BYTES, PATH_BYTES = 255, 4095  # of one part of a path, and of all of it; Linux and macOS allow no more


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Return a field with its text for `--help` and its limits, named by `KEYS`: `setting(1, "Batches.", minimum=1)`.

    `resume` states what a value means that differs from the resumed checkpoint's. It is reported where nothing is given;
    "free": it may differ without a word; "refused": only with --allow_change; "derived": the checkpoint records what
    follows from it instead, such as `max_steps`, or the hash of the data.
    """
    metadata = {"help": help, **limits}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def problem(name: str, value: Any, metadata: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a parsed value, as one sentence; of a list, with its first wrong item."""
    if isinstance(value, list):
        return next(filter(None, (problem(name, item, metadata) for item in value)), None)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return _problem_of_text(name, value, "free_text" in metadata)
    lower = {key: metadata[key] for key in ("minimum", "above") if key in metadata} or {"minimum": 0}
    upper = {key: metadata[key] for key in ("maximum", "below") if key in metadata}
    bounds = lower | (upper or {"maximum": LARGEST})
    if all(BOUNDS[key][1](value, bound) for key, bound in bounds.items()):  # never of nan
        return None
    shown = bounds if value > LARGEST else lower | upper
    rule = " and ".join(f"{BOUNDS[key][0]} {_shown(bound)}" for key, bound in shown.items())
    return f"{name} is {str(value)[:40]}; it must be {rule}."


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _problem_of_text(name: str, text: str, is_free: bool) -> str | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return f"{name} is {ascii(text)[:300]}, which is not UTF-8 text; correct it, or rename what it names."
    if is_free:
        return None
    if not text.strip():
        return f"{name} is empty, as an unset variable of a shell is; give it a value or leave it out."
    if "\0" in text:
        return f"{name} is {text[:300]!r}, which holds a null character; correct it."
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > NAME_BYTES or size > PATH_BYTES:
        return (
            f"{name} begins with {text[:40]!r} and has {size:,} bytes; a path may have {PATH_BYTES:,}, and a name in it "
            f"{NAME_BYTES}."
        )
    return None
