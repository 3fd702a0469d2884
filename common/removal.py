"""Deletion and replacement of files that this project wrote. All other files are kept.

A command deletes a folder only if it contains a mark, which is a file that only this project writes. Within a marked
folder, files with known names are deleted and all other files are kept. A single file is replaced only if it contains a
mark itself.
"""

import itertools
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from common.errors import UserError

MARK = ".gpt2scratch.json"
UNFINISHED_MARK = f"{MARK}.tmp"
FILE_MARK, HEAD_BYTES = "gpt2scratch.file", 4096  # a key of the metadata in PNG and GGUF, among the first bytes
# Files that operating systems create, and the temporary file of safetensors.
LITTER = ("**/.DS_Store", "**/._*", "**/Thumbs.db", "**/desktop.ini", "**/.tmp??????")


def mark(folder: Path, kind: str) -> None:
    """Create a folder if it does not exist, and mark it as written by this project."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_marked(folder, kind):
        draft = folder / UNFINISHED_MARK  # a partly written file is not a mark
        draft.unlink(missing_ok=True)  # a link would be followed
        draft.write_text(_content(kind), encoding="utf-8")
        draft.replace(folder / MARK)


def is_marked(folder: Path, kind: str) -> bool:
    """Return whether the folder has this project's mark of this kind."""
    with suppress(OSError, ValueError):
        path = folder / MARK
        return path.is_file() and not path.is_symlink() and path.read_text(encoding="utf-8") == _content(kind)
    return False


def _content(kind: str) -> str:
    return json.dumps({"written_by": "GPT2Scratch", "kind": kind}) + "\n"


def refuse_replacing(path: Path) -> None:
    """Raise a `UserError` if anything other than a file with this project's mark is at `path`."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                if FILE_MARK.encode() in file.read(HEAD_BYTES):
                    return
    if os.path.lexists(path):
        raise UserError(f"{path} exists and was not written by this command; move it elsewhere, or name another file.")


def renew(folder: Path, kind: str, patterns: Iterable[str]) -> None:
    """Replace a folder that has this mark with an empty, marked folder. Raise a `UserError` for anything else."""
    if os.path.lexists(folder):
        is_empty = folder.is_dir() and {path.name for path in folder.iterdir()} <= {UNFINISHED_MARK}
        if folder.is_symlink() or not (is_empty or is_marked(folder, kind)):
            raise UserError(f"{folder} exists and was not written by this command; move it elsewhere, or delete it.")
        discard(folder, (*patterns, MARK))
    mark(folder, kind)


def discard(path: Path, patterns: Iterable[str], replacement: Path | None = None) -> Path | None:
    """Delete a file, a link (not its target), or the files in a folder whose relative paths match a pattern in
    `patterns`. `*` does not match a slash; `**/` before a name matches any folder. A folder is first renamed away, and
    `replacement`, if given, renamed to its place; then its files are deleted. A folder with remaining files is renamed
    to `NAME.kept`; its path is returned."""
    trash = path.with_name(f".{path.name.lstrip('.')}.removed")
    remains = _empty(trash, patterns, path)  # a killed process may have left files
    if path.is_dir() and not path.is_symlink():
        path.rename(trash)
    else:
        path.unlink(missing_ok=True)
    if replacement is not None:
        replacement.rename(path)
    return _empty(trash, patterns, path) or remains


def _empty(trash: Path, patterns: Iterable[str], path: Path) -> Path | None:
    if not trash.is_dir():
        return None
    has_others = False
    for folder, folders, files in os.walk(trash, topdown=False):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for file in (Path(folder, name) for name in (*files, *links)):
            if is_known(file.relative_to(trash).as_posix(), patterns):
                file.unlink(missing_ok=True)
            else:
                has_others = True
        with suppress(OSError):  # the folder may not be empty
            os.rmdir(folder)
    if not has_others:
        return None
    names = itertools.chain([f"{path.name}.kept"], (f"{path.name}.kept.{number}" for number in itertools.count(1)))
    remains = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    return trash.rename(remains)


def is_known(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a relative path, or that of the file whose `write_atomic` was killed, matches a pattern in
    `patterns` or in `LITTER`."""
    patterns = [f"/{pattern}".removeprefix("/**/") for pattern in (*LITTER, *patterns)]
    paths = [PurePosixPath("/", path) for path in (name, name.removesuffix(".tmp"))]
    return any(path.match(pattern) for path in paths for pattern in patterns)  # without a first slash: at the end
