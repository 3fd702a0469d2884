"""Typed JSON files: the content must match a dataclass, so a changed file is refused as soon as it is read."""

import dataclasses
import functools
import hashlib
import json
import math
import reprlib
import types
from pathlib import Path
from typing import Any, Literal, NewType, NoReturn, Union, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1
_hints = functools.cache(get_type_hints)
SignedInteger = NewType("SignedInteger", int)  # an integer of any sign and size
SEAL = "sha256"  # key of a file's own hash; older versions did not write it and ignore it


def read(path: Path, kind: Any = Any) -> Any:
    """Return the content of a JSON file as a `kind` (see `build`). Raise a one-line `ValueError` if it differs."""
    if path.exists() and not path.is_file():  # reading a pipe would wait, reading a device may never end
        raise ValueError("it is not a regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(content, dict) and SEAL in content and content.pop(SEAL) != _sha256(content):
        raise ValueError("it was changed since it was written")
    return build(content, kind)


def sealed(content: dict[str, Any], indent: int | None = None) -> str:
    """Return `content` as JSON with its own hash, which `read` checks."""
    return json.dumps(content | {SEAL: _sha256(content)}, indent=indent)


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it contains {constant}")


def build(value: Any, kind: Any, name: str = "it") -> Any:
    """Return a JSON value as a `kind`: a type, a `typing` construct, or a dataclass (from an object or a list).
    An integer is at least 0, unless `kind` is `SignedInteger`.
    Raise a `ValueError` if the value has another type; the message names both."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        [inner] = (part for part in parts if part is not type(None))  # only unions of one type and None are supported
        return None if value is None else build(value, inner, name)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(value, kind, name)
    if origin is dict:
        _require(isinstance(value, dict), value, name, "an object")
        return {key: build(item, parts[1], f"{name}.{key!r:.40}") for key, item in value.items()}
    if origin in (list, tuple):
        _require(isinstance(value, list), value, name, "a list")
        is_long = origin is list or parts[-1] is ...
        _require(is_long or len(value) == len(parts), value, name, f"a list of {len(parts)}")
        kinds = [parts[0]] * len(value) if is_long else parts
        return origin(build(value[i], kinds[i], f"{name}[{i}]") for i in range(len(value)))
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if origin is Literal:
        _require(value in parts, value, name, " or ".join(map(str, parts)))
    elif kind is int:
        _require(is_int and 0 <= value <= LARGEST, value, name, "a whole number of at least 0")
    elif kind is SignedInteger:
        _require(is_int, value, name, "a whole number")
    elif kind is float:
        is_finite = isinstance(value, float) and math.isfinite(value)
        _require(is_finite or (is_int and abs(value) <= LARGEST), value, name, "a number")
    else:
        _require(isinstance(value, kind), value, name, {str: "text", bool: "true or false"}.get(kind, kind.__name__))
    return value


def _build_dataclass(value: Any, kind: type, name: str) -> Any:
    fields, hints = {field.name: field for field in dataclasses.fields(kind)}, _hints(kind)
    if isinstance(value, list) and len(value) <= len(fields):
        value = dict(zip(fields, value, strict=False))
    _require(isinstance(value, dict), value, name, "an object")
    prefix = "" if name == "it" else f"{name}."
    if unknown := value.keys() - fields.keys():
        raise ValueError(f"it has the unknown key {prefix}{min(unknown)!r:.40}")
    for key, field in fields.items():
        if key not in value and field.default is field.default_factory:  # the field has no default
            raise ValueError(f"it has no {prefix}{key}")
    return kind(**{key: build(item, hints[key], prefix + key) for key, item in value.items()})


def _require(condition: bool, value: Any, name: str, noun: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {noun}")
