"""Settings in a YAML file: one name with a value or a list of values per line.

Only text is read from the YAML syntax tree; tags do not construct objects.
"""

import difflib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError

LARGEST_FILE = 1 << 20  # bytes; PyYAML reads about one megabyte in ten seconds
MOST_NAMES = 1000
NULL = "tag:yaml.org,2002:null"


def read_yaml(path: Path, as_text: bool = False) -> dict[str, Any]:
    """Return the settings in a file. Raise a `UserError` if it cannot be read or does not contain settings.
    `as_text` leaves values as they are written, for the flag parser: `007` is a name, `no` a precision. Otherwise decimal
    numbers, true and false are converted, as in files that this project writes. A nested value becomes an empty dictionary."""
    try:
        if not path.is_file():
            siblings = sorted(str(path.parent / other.name) for other in path.parent.glob("*.yaml"))
            nearest = difflib.get_close_matches(str(path), siblings, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise UserError(f"Config file {path} does not exist.{hint}")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise UserError(f"{path} has {size:,} bytes; a settings file may have at most {LARGEST_FILE:,}.")
        root = yaml.compose(path.read_bytes(), yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}.") from error
    if root is None or root.tag == NULL:
        return {}
    if not isinstance(root, yaml.MappingNode):
        kind = "text" if isinstance(root, yaml.ScalarNode) else "a list"
        raise UserError(f"{path} must contain lines of the form `name: value`, but it contains {kind}.")
    if len(root.value) > MOST_NAMES:
        raise UserError(f"{path} has more than {MOST_NAMES:,} names; it is not a settings file.")
    for name, _ in root.value:
        if not isinstance(name, yaml.ScalarNode):
            raise UserError(f"{path}, line {name.start_mark.line + 1}: a name must be a word.")
    times = Counter(name.value for name, _ in root.value)
    if twice := [f"{path} contains {name} {number:,} times; keep one." for name, number in times.items() if number > 1]:
        raise UserError("\n".join(twice))
    return {name.value: _value(node, as_text) for name, node in root.value}


def _value(node: yaml.Node, as_text: bool) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, as_text)
    is_flat = isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value)
    return [_scalar(item, as_text) for item in node.value] if is_flat else {}


def _scalar(node: yaml.ScalarNode, as_text: bool) -> Any:
    text = node.value
    if node.tag == NULL:
        return None
    if as_text or node.style is not None:  # the value is in quotes
        return text
    if re.fullmatch(r"[-+]?\d{1,4000}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False}.get(text, text)
