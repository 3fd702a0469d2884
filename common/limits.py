"""Limits of settings: ranges of numbers, and names that are not empty.

`setting` creates a field of a dataclass of flags. A number without a range must be between 0 and `LARGEST`. A string is
a name (a path, a Hub id, a choice) unless it is `free_text`. A required setting has `needed`: its noun, and an example
command. `common.command_line.FlagParser` checks every value once, from flags and from files.
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


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Return a field with its `--help` text and its limits (see `BOUNDS`): `setting(1, "Batches.", minimum=1)`.
    `resume` decides what happens if the value differs from the resumed checkpoint's. By default the change
    is reported. "free": it is not reported. "refused": it requires --allow_change. "fixed": it cannot change.
    "derived": the checkpoint records a value computed from the setting instead, such as `max_steps` or the hash of the
    data. Most settings of the model and all of the text are derived, see `training/config.py`.
    `type` converts a word, as in argparse. A shell leaves `~` in `--output_dir=~/x`: see `RunArguments`."""
    metadata = {"help": help, **limits}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def free(default: Any, help: str, **limits: Any) -> Any:
    """Return a `setting` that may differ from the resumed checkpoint's, without a report."""
    return setting(default, help, resume="free", **limits)


def problem(name: str, value: Any, metadata: Mapping[str, Any]) -> str | None:
    """Return an error sentence for an invalid value (for a list, its first invalid item), or None."""
    if isinstance(value, list):
        return next(filter(None, (problem(name, item, metadata) for item in value)), None)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return _problem_of_text(name, value, "free_text" in metadata)
    lower = {key: metadata[key] for key in ("minimum", "above") if key in metadata} or {"minimum": 0}
    upper = {key: metadata[key] for key in ("maximum", "below") if key in metadata}
    bounds = lower | (upper or {"maximum": LARGEST})
    if all(BOUNDS[key][1](value, limit) for key, limit in bounds.items()):  # nan fails every comparison
        return None
    ranges = bounds if value > LARGEST else lower | upper
    rule = " and ".join(f"{BOUNDS[key][0]} {limit:,}" for key, limit in ranges.items())
    return f"{name} is {str(value)[:40]}; it must be {rule}."


def _problem_of_text(name: str, text: str, is_free: bool) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name} is {ascii(text)[:300]}, which is not UTF-8 text; correct it, or rename the file."
    if not (is_free or text.strip()):
        return f"{name} is empty (an unset shell variable?); give it a value or leave it out."
    return None
