"""Data sets with a name, such as `tinystories`: one YAML file each in tokenizer/corpus/named/, or a file of the user.

A data set is on the Hub or in installed Python packages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common import schema
from common.errors import UserError
from common.settings_file import read_yaml
from tokenizer.corpus import packages
from tokenizer.corpus.hub import ID, HubDataset

FOLDER = Path(__file__).parent / "named"
LANGUAGE = "{language}"


@dataclass(frozen=True)
class NamedData:
    """Dataset on the Hub, or files of installed packages, with the settings to read them."""

    dataset: str | None = None  # Hub id
    config: str | None = None  # may contain LANGUAGE, which is the part of the name after the colon
    split: str | None = None  # None: train, and validation if it exists
    revision: str | None = None
    text_column: str | None = None
    chat_template: str | None = None
    package: str | None = None  # installed package, or `dependencies of` one, or `python`: the standard library
    files: str | None = None  # pattern of the files of the package
    exclude: list[str] = field(default_factory=list)  # patterns of names of files and folders
    held_out: list[str] = field(default_factory=list)  # folders whose files are the validation text
    install: str | None = None  # command that installs the package
    license: str | None = None
    use: str | None = None  # purpose
    tokens: str | None = None  # size, with the source of the number
    citation: str | None = None

    @property
    def selection(self) -> dict[str, Any]:
        """Fields that determine the text."""
        about = ("install", "license", "use", "tokens", "citation")
        return {name: value for name, value in vars(self).items() if name not in about}

    @property
    def hub(self) -> HubDataset | None:
        return HubDataset(self.dataset, self.config, self.split, self.revision) if self.dataset is not None else None


def find(entry: str) -> NamedData | None:
    """Return the data set for a name, a name with a language (`wikipedia:de`) or a YAML file with a line `dataset:` or
    `package:`, or None. A local path with the same name is not a named data set. Raise a `UserError` for a wrong file
    or a missing language."""
    path, (name, _, language) = Path(entry), entry.partition(":")
    if path.suffix == ".yaml" and path.is_file():
        return _read(path) if re.search(rb"^(dataset|package):", path.read_bytes()[:4096], re.MULTILINE) else None
    if name not in names() or path.exists():
        return None
    data = _read(FOLDER / f"{name}.yaml")
    if (LANGUAGE in (data.config or "")) != bool(language):
        raise UserError(
            f"{entry} {'has no languages' if language else f'needs a language, such as {name}:de'}; see "
            "`python -m tokenizer.pretokenize --list`."
        )
    return replace(data, config=data.config and data.config.replace(LANGUAGE, language))


def files_of(entry: str) -> dict[Path, bool] | None:
    """Return the files of a data set that is in installed packages, with whether they are validation text, or None for
    another entry. Raise a `UserError` if the package is not installed."""
    data = find(entry)
    if data is None or data.package is None:
        return None
    files = packages.text_files(data.package, data.files, data.exclude)
    if not files:
        raise UserError(f"{entry} is text of {data.package}, which is not installed: run `{data.install}`.")
    # Only parts of the path inside of site-packages or dist-packages: a user may have a package's name.
    parts = {path: path.as_posix().rpartition("-packages/")[2].split("/") for path in files}
    return {path: not {*data.held_out}.isdisjoint(parts[path]) for path in files}


def licenses(entries: list[str]) -> dict[str, str]:
    """Return the licenses of the packages whose text the entries name, by package and version: also of those that
    --exclude leaves out."""
    licenses = {}
    for data in map(find, entries):
        if data is not None and data.package is not None:
            licenses |= packages.licenses(data.package, data.files, data.exclude)
    return licenses


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def dataset_of(entry: str) -> HubDataset | None:
    """Return the Hub dataset of a named data set or a Hub id, or None for a local path."""
    data = find(entry)
    return data.hub if data is not None else HubDataset.parse(entry)


def listed() -> Iterator[str]:
    """Yield the text of `--list`."""
    for name in names():
        data = _read(FOLDER / f"{name}.yaml")
        title = f"{name}:LANGUAGE" if LANGUAGE in (data.config or "") else name
        yield f"{title:<24} {data.hub or f'installed: {data.package}'}"
        for label in ("use", "tokens", "license", "citation"):
            yield f"    {label + ':':<10} {getattr(data, label) or 'not known'}"


def _read(path: Path) -> NamedData:
    try:
        data = schema.build(read_yaml(path, as_text=True), NamedData)
    except ValueError as error:
        keys = ", ".join(part.name for part in fields(NamedData))
        raise UserError(f"{path}: {error}; correct it. Its keys can be {keys}.") from error
    if data.dataset is None and None in (data.package, data.files):
        raise UserError(f"{path} has neither dataset nor package and files; add them.")
    if data.hub is not None and ID.fullmatch(str(data.hub)) is None:
        raise UserError(
            f"{path}: {data.dataset!r:.100} with its config and split is not a dataset on the Hub; correct it."
        )
    return data
