"""Settings in a YAML file: one name with a value or a list of values per line."""

import difflib
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from common.errors import NONSENSE, UserError

LARGEST_FILE = 1 << 20  # bytes; PyYAML reads about one megabyte in ten seconds
NULLS = {"", "~", "null", "Null", "NULL"}  # unless they are in quotes


class TextLoader(yaml.BaseLoader):
    """Reads values as they are written, except null. Tags construct no objects. A name is a word that occurs once."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return None if node.style is None and node.value in NULLS else node.value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {name.start_mark.line + 1}: a name must be a word")
        times = Counter(name.value for name, _ in node.value)
        if duplicates := [f"it contains {name} {n:,} times; keep one" for name, n in times.items() if n > 1]:
            raise yaml.YAMLError(". ".join(duplicates))
        return {name.value: self.construct_object(value) for name, value in node.value}


def read_yaml(path: Path, as_text: bool = False) -> dict[str, Any]:
    """Return the settings in a file. Raise a `UserError` if it cannot be read or does not contain settings.
    `as_text` leaves values as they are written, for the flag parser: `007` is a name, `no` a precision. Otherwise they
    are read as YAML's types, as `yaml.safe_dump` writes them in files of this project."""
    try:
        if not path.is_file():
            folder = path if path.is_dir() else path.parent
            siblings = sorted(map(str, folder.glob("*.yaml")))
            names = difflib.get_close_matches(str(path), siblings, n=1)
            hint = f" Did you mean {names[0]}?" if names else ""
            problem = "is a folder; name a YAML file" if path.is_dir() else "does not exist"
            raise UserError(f"Config file {path} {problem}.{hint}")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise UserError(f"{path} has {size:,} bytes; a settings file may have at most {LARGEST_FILE:,}.")
        content = yaml.load(path.read_bytes(), TextLoader if as_text else yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, *NONSENSE) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "text"
        raise UserError(f"{path} must contain lines of the form `name: value`, but it contains {kind}.")
    return content
