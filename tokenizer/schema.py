"""JSON files as the types that their dataclasses state: a file that was changed is refused where it is read, not where it is used."""

import dataclasses
import functools
import hashlib
import json
import math
import reprlib
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST = 2**63 - 1
SEAL = "sha256"  # a key of files that carry their own hash; older versions ignore it and wrote none


def read(path: Path, kind: Any = Any) -> Any:
    """Return the content of a JSON file of type `kind`.

    Raises:
        ValueError: it is no JSON, or of another type; in one line.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(content, dict) and SEAL in content and content.pop(SEAL) != _sha256(content):
        raise ValueError("it was changed since it was written")
    check(content, kind)
    return content


def sealed(content: dict[str, Any]) -> str:
    """Return `content` as JSON with its own hash, which `read` compares."""
    return json.dumps(content | {SEAL: _sha256(content)})


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def check(value: Any, kind: Any, name: str = "it") -> None:
    """Refuse a value of another type than `kind`: a type, a dataclass whose fields are keys, or what `typing` makes of them.

    An integer is at least 0, unless the metadata of its field say `signed`.

    Raises:
        ValueError: with the name of the value.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (Union, types.UnionType):
        [other] = (part for part in parts if part is not type(None))  # a type or None: we have no others
        if value is not None:
            check(value, other, name)
    elif origin is list:
        _require(isinstance(value, list), value, name, "a list")
        for i, item in enumerate(value):
            check(item, parts[0], f"{name}[{i}]")
    elif origin is tuple:
        _require(isinstance(value, list) and len(value) == len(parts), value, name, f"a list of {len(parts)}")
        for i, (item, part) in enumerate(zip(value, parts, strict=True)):
            check(item, part, f"{name}[{i}]")
    elif origin is dict:
        _require(isinstance(value, dict), value, name, "an object")
        for key, item in value.items():
            check(item, parts[1], f"{name}.{key!r:.40}")
    elif origin is Literal:
        _require(value in parts, value, name, " or ".join(map(str, parts)))
    elif dataclasses.is_dataclass(kind) or is_typeddict(kind):
        _check_fields(value, kind, name)
    elif kind is int:
        _require(_is_int(value) and 0 <= value <= LARGEST, value, name, "a number from 0 on")
    elif kind is float:
        _require(_is_int(value) or (isinstance(value, float) and math.isfinite(value)), value, name, "a number")
    else:
        _require(isinstance(value, kind), value, name, {str: "text", bool: "true or false"}.get(kind, kind.__name__))


def _check_fields(value: Any, kind: type, name: str) -> None:
    _require(isinstance(value, dict), value, name, "an object")
    hints, fields = (
        _hints(kind),
        {} if is_typeddict(kind) else {field.name: field for field in dataclasses.fields(kind)},
    )
    prefix = "" if name == "it" else f"{name}."
    for key in value:
        if key not in hints:
            raise ValueError(f"it has an unknown key {prefix}{key!r:.40}")
    for key, hint in hints.items():
        field = fields.get(key)
        if key not in value:
            if field is None or field.default is field.default_factory:  # both are missing
                raise ValueError(f"it has no {prefix}{key}")
        elif field is not None and field.metadata.get("signed"):
            _require(_is_int(value[key]), value[key], f"{prefix}{key}", "a whole number")
        else:
            check(value[key], hint, f"{prefix}{key}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, value: Any, name: str, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {wanted}")
