"""Data sets with a name, such as `tinystories`: one YAML file each in tokenizer/corpus/named/, or a file of the user."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from common.errors import UserError
from common.settings_file import read_yaml
from tokenizer.corpus.hub import ID, HubDataset

FOLDER = Path(__file__).parent / "named"
LANGUAGE = "{language}"


@dataclass(frozen=True)
class NamedData:
    """Dataset on the Hub, with the settings to read it."""

    dataset: str  # Hub id
    config: str | None = None  # may contain LANGUAGE, which is the part of the name after the colon
    split: str | None = None  # None: train, and validation if it exists
    revision: str | None = None
    text_column: str | None = None
    chat_template: str | None = None
    license: str | None = None
    use: str | None = None  # purpose
    tokens: str | None = None  # size, with the source of the number
    citation: str | None = None

    @property
    def hub(self) -> HubDataset:
        return HubDataset(self.dataset, self.config, self.split, self.revision)


def find(entry: str) -> NamedData | None:
    """Return the data set for a name, a name with a language (`wikipedia:de`) or a YAML file with a line `dataset:`, or None.
    A local path with the same name is not a named data set. Raise a `UserError` for a wrong file or a missing language."""
    path, (name, _, language) = Path(entry), entry.partition(":")
    if path.suffix == ".yaml" and path.is_file():
        return _read(path) if re.search(rb"^dataset:", path.read_bytes()[:4096], re.MULTILINE) else None
    if path.exists() or name not in names():
        return None
    found = _read(FOLDER / f"{name}.yaml")
    if (LANGUAGE in (found.config or "")) != bool(language):
        raise UserError(
            f"{entry} {'has no languages' if language else f'needs a language, such as {name}:de'}; see --list."
        )
    return NamedData(**vars(found) | {"config": found.config and found.config.replace(LANGUAGE, language)})


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def dataset_of(entry: str) -> HubDataset | None:
    """Return the Hub dataset of a named data set or a Hub id, or None for a local path."""
    named = find(entry)
    return named.hub if named is not None else HubDataset.parse(entry)


def template_of(entry: str) -> str | None:
    """Return the chat template of a named data set, or None."""
    named = find(entry)
    return named and named.chat_template


def listed() -> Iterator[str]:
    """Yield the text of `--list`."""
    for name in names():
        found = _read(FOLDER / f"{name}.yaml")
        shown = f"{name}:LANGUAGE" if LANGUAGE in (found.config or "") else name
        yield f"{shown:<20} {found.hub}"
        for label in ("use", "tokens", "license", "citation"):
            yield f"    {label + ':':<10} {getattr(found, label) or 'not known'}"


def _read(path: Path) -> NamedData:
    content, known = read_yaml(path), {part.name for part in fields(NamedData)}
    wrong = sorted(content.keys() - known) + [name for name in content if not isinstance(content[name], str | None)]
    if wrong or not content.get("dataset"):
        raise UserError(
            f"{path}: {', '.join(wrong) or 'dataset'} is unknown, missing or not text; it may have {', '.join(sorted(known))}."
        )
    if ID.fullmatch(str(NamedData(**content).hub)) is None:
        raise UserError(
            f"{path}: {content['dataset']!r:.100} with its config and split is not a dataset on the Hub; correct it."
        )
    return NamedData(**content)
