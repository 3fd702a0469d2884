"""Settings in a YAML file: one name and its value, or a list of values, per line.

Of YAML this reads what settings need, and refuses the rest: a name that is given twice, nested values, anchors, aliases, tags,
several documents. The file is read event by event, so that no file takes long, however it is nested.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from errors import UserError

LARGEST_FILE = 1 << 20  # bytes; PyYAML reads about one megabyte in ten seconds
MOST_NAMES = 1000
DEEPEST = 20  # levels of nesting that are read, to name the setting that is nested
NULLS = ("", "~", "null", "Null", "NULL")


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
        pairs = list(islice(_pairs(yaml.parse(path.read_bytes(), yaml.SafeLoader), as_text), MOST_NAMES + 1))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}.") from error
    except _NotSettings as problem:
        raise UserError(f"{path}{problem}") from problem
    if len(pairs) > MOST_NAMES:
        raise UserError(f"{path} has more than {MOST_NAMES:,} names, which no file of settings has.")
    times = Counter(name for name, _ in pairs)
    if twice := [f"{path} has {name} {number:,} times; keep one." for name, number in times.items() if number > 1]:
        raise UserError("\n".join(twice))
    return dict(pairs)


class _NotSettings(Exception):  # noqa: N818 (becomes a UserError)
    """What the file has that settings have not; its text follows the file's name."""


def _pairs(events: Iterator[yaml.Event], as_text: bool) -> Iterator[tuple[str, Any]]:
    documents, events = 0, map(_checked, events)
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _NotSettings(" holds several documents (---); keep one.")
        elif isinstance(event, yaml.ScalarEvent) and not event.value and event.implicit[0]:
            continue  # a document without content
        elif isinstance(event, (yaml.ScalarEvent, yaml.SequenceStartEvent)):
            kind = "text" if isinstance(event, yaml.ScalarEvent) else "a list"
            raise _NotSettings(f" must be a list of `name: value` lines, but holds {kind}.")
        elif isinstance(event, yaml.MappingStartEvent):
            while not isinstance(key := next(events), yaml.MappingEndEvent):
                if not isinstance(key, yaml.ScalarEvent):
                    raise _NotSettings(f", line {key.start_mark.line + 1}: a name must be a word.")
                yield key.value, _value(next(events), events, as_text)


def _checked(event: yaml.Event) -> yaml.Event:
    where = f", line {event.start_mark.line + 1}"
    if getattr(event, "anchor", None) is not None:  # an alias has it too
        raise _NotSettings(
            f"{where}: &{event.anchor} or *{event.anchor} is an anchor of YAML, which settings do not have."
        )
    if getattr(event, "tag", None) not in (None, "!"):
        raise _NotSettings(f"{where}: {event.tag} is a tag of YAML, which settings do not have.")
    return event


def _value(event: yaml.Event, events: Iterator[yaml.Event], as_text: bool) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, as_text)
    is_list = isinstance(event, yaml.SequenceStartEvent)
    items, depth = [], 1
    while depth:
        event = next(events)
        if isinstance(event, yaml.CollectionStartEvent):
            is_list, depth = False, depth + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif is_list:
            items.append(_scalar(event, as_text))
        if depth > DEEPEST:
            raise _NotSettings(f", line {event.start_mark.line + 1}: values are nested; settings are flat.")
    return items if is_list else {}


def _scalar(event: yaml.ScalarEvent, as_text: bool) -> Any:
    text, is_plain = event.value, event.implicit[0]
    if is_plain and text in NULLS:
        return None
    if as_text or not is_plain:
        return text
    if re.fullmatch(r"[-+]?\d{1,4000}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False}.get(text, text)
