"""Files that one entry of `--input` names: a file, a folder, a glob, or text of installed packages."""

import difflib
import glob
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from common import schema
from common.errors import UserError
from common.removal import is_marked
from tokenizer.corpus.documents import Counts
from tokenizer.corpus.named_data import files_of, names

STORE = {"metadata.json", "tokenizer", "train.bin"}  # in the folder of a token store, such as those in data/
EXPORT = {"README.md", "data", "tokenizer"}  # all of the folder that --export parquet writes


@dataclass(frozen=True, slots=True)
class TextFile:
    path: str
    size: int  # in bytes
    modified: int  # time in nanoseconds
    is_named: bool = False  # given on the command line, not found in a folder or by a glob
    val: bool = False  # of a split `validation`, or of the packages that named data holds out

    @staticmethod
    def at(path: str | Path, is_named: bool = False, val: bool = False) -> "TextFile":
        """Return the file at `path`. Raise a `UserError` if it cannot be read twice (a broken link, a pipe)."""
        try:
            status = os.stat(path)
        except OSError as error:
            problem = "is a broken link" if os.path.islink(path) else f"cannot be read: {error.strerror}"
            raise UserError(f"{path} {problem}; fix it or exclude it.") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is a folder, a pipe or a device, but it is read twice; name a file.")
        modified = max(0, status.st_mtime_ns)  # negative before 1970
        return TextFile(str(path), status.st_size, modified, is_named, val)


@dataclass
class FileFinder:
    """Finder of files. `links` counts links in folders, which are not followed. `skipped` counts what cannot be read.
    `exclude` has patterns of files and folders to skip."""

    exclude: list[str]
    links: int = 0
    skipped: Counts = field(default_factory=Counts)

    def find(self, entry: str) -> list[TextFile]:
        """Return the files of one entry of `--input` in a fixed order. Raise a `UserError` if there are none."""
        if (paths := files_of(entry)) is not None:
            root = os.path.commonpath([path.parent for path in paths])
            paths = {path: val for path, val in paths.items() if not self._is_excluded(path, root)}
            if not paths:
                raise UserError(f"--exclude matches all files of {entry}; name fewer patterns.")
            return [TextFile.at(path, val=val) for path, val in paths.items()]
        path = str(Path(os.path.expanduser(entry)))
        is_one = os.path.lexists(path)
        matches = [path] if is_one else sorted({*globbed(path)}, key=lambda match: Path(match).parts)
        root = os.path.dirname(re.split(r"[*?[]", path)[0])
        result = []
        for match in matches:
            if not is_one and self._is_excluded(match, root):
                continue
            if os.path.isfile(match) or (is_one and not os.path.isdir(match)):
                result.append(TextFile.at(match, is_named=is_one))
            elif os.path.isdir(match) and "**" not in entry:  # `**` matches folders, and also all files in them
                result += self._walk(match, match)
        if result:
            return result
        problem = "matches no local file or folder and is neither a Hub dataset nor a name in "
        problem += "`python -m tokenizer.pretokenize --list`"
        if matches:
            problem = "has no files except hidden files, token stores, runs and links (only a glob follows links)"
            problem += ", and files that --exclude matches" * bool(self.exclude)
        near = difflib.get_close_matches(entry, names(), n=1)
        raise UserError(
            f"{' '.join(entry.split())[:200]} {problem}; {f'did you mean {near[0]}?' if near else 'check the path.'}"
        )

    def _is_excluded(self, path: str | Path, root: str) -> bool:
        """Return whether a pattern of --exclude matches the end of `path`, below its input `root`, or of a parent
        folder. A pattern may begin with the input, as paths in error messages do, or with its name."""
        below, whole = PurePath(os.path.relpath(path, root or ".")), PurePath(os.path.abspath(root or "."))
        parents = (below, *below.parents)[: len(below.parts)]
        for pattern in (str(PurePath(pattern.removeprefix("**/"))) for pattern in self.exclude):
            starts = [start for start in ("", whole.name, root, str(whole)) if pattern.startswith(start)]
            if any(PurePath(start, parent).match(pattern) for start in starts for parent in parents):
                return True
        return False

    def _walk(self, folder: str, root: str, val: bool = False) -> Iterator[TextFile]:
        """Yield the files in a folder of the input `root`."""
        try:
            with os.scandir(folder) as items:
                entries = [entry for entry in items if not entry.name.startswith(".")]
        except OSError as error:
            problem = UserError(f"{folder} cannot be read: {error.strerror}; fix it or exclude it.")
            if folder == root:
                raise problem from error
            self.skipped.note_unreadable(folder, 0, problem)
            return
        entry_names = {entry.name for entry in entries}
        is_export = entry_names == EXPORT and any(Path(folder, "data").glob("train-00000-of-*.parquet"))
        if entry_names >= STORE or is_export or is_marked(Path(folder), "run"):
            return
        records = _saved_by_datasets(folder, entry_names)
        if records == set() and folder == root:
            splits = ", ".join(sorted(entry.name for entry in entries if entry.is_dir()))
            raise UserError(f"{folder} has no split train; name the folder of a split ({splits or 'none is there'}).")
        for entry in sorted(entries, key=lambda entry: entry.name):
            if (records is not None and entry.name not in records) or self._is_excluded(entry.path, root):
                continue
            if entry.is_symlink():
                self.links += 1
            elif entry.is_dir():
                yield from self._walk(entry.path, root, val or (records is not None and entry.name == "validation"))
            elif entry.is_file():
                yield TextFile.at(entry.path, val=val)


def globbed(pattern: str) -> Iterator[str]:
    """Yield the matches of a glob, some of them twice. `**` follows links, except back to a folder above: two such
    links would never end."""
    parts = PurePath(pattern).parts
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    for root in glob.iglob(str(PurePath(*parts[:place]))):
        for folder in _folders(root):
            yield from globbed(str(PurePath(glob.escape(folder), *(parts[place + 1 :] or ("*",)))))


def _folders(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a folder and all folders in it that are not hidden. `above`: the real paths of those that lead to it."""
    if (path := os.path.realpath(folder)) in above:
        return
    yield folder
    _, names, _ = next(os.walk(folder), ("", [], []))  # none of a folder that cannot be read
    for name in names:
        if not name.startswith("."):
            yield from _folders(os.path.join(folder, name), (*above, path))


def _saved_by_datasets(folder: str, names: set[str]) -> set[str] | None:
    """Return the names in a folder of `Dataset.save_to_disk` that hold its records, or None for another folder. Of a
    `DatasetDict`, these are the splits `train` and `validation`."""
    is_dict = "dataset_dict.json" in names
    if not is_dict and not {"state.json", "dataset_info.json"} <= names:
        return None
    with suppress(ValueError, LookupError, TypeError):
        content = schema.read(Path(folder) / ("dataset_dict.json" if is_dict else "state.json"))
        if is_dict:
            return {"train", "validation"} & {*content["splits"]} if "train" in content["splits"] else set()
        return {part["filename"] for part in content["_data_files"]}
    return {"train"} if is_dict else None
