"""Settings in a YAML file: one name and its value, or a list of values, per line.

Of YAML this reads what settings need, and refuses the rest: a name that is given twice, nested values, anchors, aliases, tags,
several documents.
"""

import difflib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from errors import UserError

LARGEST_FILE = 1 << 20  # bytes; PyYAML reads about one megabyte in ten seconds
MOST_NAMES = 1000
DEEPEST = 20  # levels of nesting that are read, to name the setting that is nested
NULL = "tag:yaml.org,2002:null"


def read_yaml(path: Path, as_text: bool = False) -> dict[str, Any]:
    """Return the settings of a file. `as_text` leaves values as they are written, for the parser of flags: `007` is a name,
    `no` a precision. Otherwise decimal numbers, true and false are resolved, as in the files that this project writes. A
    nested value is an empty dictionary.

    Raises:
        UserError: the file does not exist or cannot be read, is not YAML, or holds more than settings.
    """
    try:
        if not path.is_file():
            siblings = sorted(str(path.parent / other.name) for other in path.parent.glob("*.yaml"))
            nearest = difflib.get_close_matches(str(path), siblings, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise UserError(f"There is no config file {path}.{hint}")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise UserError(f"{path} has {size:,} bytes; a file of settings has {LARGEST_FILE:,} at most.")
        pairs = _pairs(_Loader(path.read_bytes()).get_single_node())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}.") from error
    except _NotSettings as problem:
        raise UserError(f"{path}{problem}") from problem
    times = Counter(name for name, _ in pairs)
    if twice := [f"{path} has {name} {number:,} times; keep one." for name, number in times.items() if number > 1]:
        raise UserError("\n".join(twice))
    return {name: _value(node, as_text) for name, node in pairs}


class _NotSettings(Exception):  # noqa: N818 (becomes a UserError)
    """What the file has that settings have not; its text follows the file's name."""


class _Loader(yaml.SafeLoader):
    """Refuses events, before they become nodes, that settings do not have, and so takes no time that grows with nesting."""

    depth = 0

    def get_event(self) -> yaml.Event:
        event = super().get_event()
        where = f", line {event.start_mark.line + 1}"
        self.depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if self.depth > DEEPEST:
            raise _NotSettings(f"{where}: values are nested; settings are flat.")
        if getattr(event, "anchor", None) is not None:  # an alias has it too
            raise _NotSettings(
                f"{where}: &{event.anchor} or *{event.anchor} is an anchor of YAML, which settings do not have."
            )
        if getattr(event, "tag", None) not in (None, "!"):
            raise _NotSettings(f"{where}: {event.tag} is a tag of YAML, which settings do not have.")
        return event


def _pairs(node: yaml.Node | None) -> list[tuple[str, yaml.Node]]:
    """Names and values of the one document."""
    if node is None or node.tag == NULL:
        return []
    if not isinstance(node, yaml.MappingNode):
        kind = "text" if isinstance(node, yaml.ScalarNode) else "a list"
        raise _NotSettings(f" must be a list of `name: value` lines, but holds {kind}.")
    if len(node.value) > MOST_NAMES:
        raise _NotSettings(f" has more than {MOST_NAMES:,} names, which no file of settings has.")
    for name, _ in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise _NotSettings(f", line {name.start_mark.line + 1}: a name must be a word.")
    return [(name.value, value) for name, value in node.value]


def _value(node: yaml.Node, as_text: bool) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, as_text)
    is_flat = isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value)
    return [_scalar(item, as_text) for item in node.value] if is_flat else {}


def _scalar(node: yaml.ScalarNode, as_text: bool) -> Any:
    text = node.value
    if node.tag == NULL:
        return None
    if as_text or node.style is not None:  # in quotes
        return text
    if re.fullmatch(r"[-+]?\d{1,4000}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False}.get(text, text)
