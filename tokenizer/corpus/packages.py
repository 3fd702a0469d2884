"""Text in installed Python packages, and their licenses."""

import fnmatch
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

STANDARD_LIBRARY, DEPENDENCIES = "python", "dependencies of "


def text_files(package: str, pattern: str, exclude: list[str]) -> list[Path]:
    """Return the files of a package in a fixed order. `python` is the standard library, and `dependencies of NAME` are
    all packages that NAME needs. `pattern` is compared with the end of the path, and `exclude` with the name of each
    file and folder. The list is empty if the package is not installed."""
    if package == STANDARD_LIBRARY:
        return list(_walk(Path(sysconfig.get_path("stdlib")), pattern, exclude))
    return sorted({path for part in _distributions(package) for path in _files(part, pattern, exclude)})


def licenses(package: str, pattern: str, exclude: list[str]) -> dict[str, str]:
    """Return the license of each package that `text_files` reads, by its name and version."""
    distributions = _distributions(package) if package != STANDARD_LIBRARY else []
    return {f"{part.name} {part.version}": _license(part) for part in distributions if _files(part, pattern, exclude)}


def _files(distribution: Distribution, pattern: str, exclude: list[str]) -> list[Path]:
    files = (file for file in distribution.files or () if file.match(pattern) and ".." not in file.parts)
    files = (file for file in files if not any(_matches(part, exclude) for part in file.parts))
    return [path for path in (Path(file.locate()) for file in files) if path.is_file()]


def _walk(folder: Path, pattern: str, exclude: list[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if _matches(path.name, exclude):
            continue
        if path.is_dir():
            yield from _walk(path, pattern, exclude)
        elif path.match(pattern) and path.is_file():
            yield path


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _distributions(package: str) -> list[Distribution]:
    """Return an installed package, or the installed packages that it needs without extras, sorted by name."""
    from packaging.requirements import Requirement

    root = package.removeprefix(DEPENDENCIES)
    distributions, names = {}, [root]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in distributions:
            continue
        try:
            distributions[name] = importlib.metadata.distribution(name)
        except PackageNotFoundError:  # not needed on this system
            continue
        if root != package:
            requirements = map(Requirement, distributions[name].requires or ())
            names += [part.name for part in requirements if part.marker is None or part.marker.evaluate({"extra": ""})]
    return [distributions[name] for name in sorted(distributions) if root == package or name != root]


def _license(distribution: Distribution) -> str:
    metadata = distribution.metadata
    kinds = [line.rsplit(" :: ", 1)[1] for line in metadata.get_all("Classifier") or () if line.startswith("License")]
    text = " ".join((metadata.get("License-Expression") or metadata.get("License") or "").split())
    return text[:200] or ", ".join(kinds) or "not stated"
