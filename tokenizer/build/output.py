"""Output folder of a store: its lock, and a finished store or other files that are already there."""

import glob
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common import schema
from common.errors import UserError
from common.terminal import show
from tokenizer.store.store import TokenStore

CACHE_REMEDY = "tokenize with python -m tokenizer.pretokenize --output on another disk, for --data"


def resolved(folder: Path) -> Path:
    """Return the folder that a link leads to, and `.` by its name: locks and unfinished work are next to it."""
    return folder.resolve() if folder.is_symlink() or not folder.name else folder


def check_writable(folder: Path) -> None:
    """Raise a `UserError` if something else than a store is at the folder. Another process may have just written it."""
    has_content = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if folder.is_symlink() or ((has_content or folder.is_mount()) and not TokenStore.is_store(folder)):
        raise UserError(f"{folder} exists and is not an empty folder, or a mount; choose another --output.")


def open_finished(
    folder: Path, settings: dict[str, Any], inputs: list[list], say: Callable[[str], None], is_cache: bool = False
) -> TokenStore:
    """Open the store in `folder`. Raise a `UserError` if it has other settings or inputs, unless it is a cache."""
    store, path = TokenStore(folder), folder / "inputs.json"
    if store.metadata.format_version == 1:
        say(
            f"{folder} is a store of format 1, which does not record its text and settings; it is used unchanged. To "
            f"build it again, choose another --output."
        )
        return store
    try:
        old_inputs = schema.read(path, list[tuple[str, int, int]])
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path} is missing or damaged ({error}). Delete {folder} and build it again.") from error
    different = changes(store.metadata.settings, old_inputs, settings, inputs)
    if different and not is_cache:  # the name of a cache contains the hash of its text
        raise UserError(
            f"{folder} was built from other text or settings ({different}); choose another --output or delete it."
        )
    say(f"{folder} already contains these tokens.")
    return store


def changes(old_settings: dict[str, Any], old_inputs: list, settings: dict[str, Any], inputs: list[list]) -> str:
    """Return the settings and files that differ from earlier work, as words, or an empty string."""
    settings = json.loads(json.dumps(settings))
    if "named_data" not in old_settings:  # of an older version
        settings.pop("named_data", None)
    keys = [key for key in old_settings | settings if old_settings.get(key) != settings.get(key)]
    words = [f"{key} was {old_settings.get(key)!r:.60} and is {settings.get(key)!r:.60}" for key in keys]
    old_files, files = ({name: numbers for name, *numbers in entries} for entries in (old_inputs, inputs))
    words += [f"{name} is not among the inputs now" for name in old_files if name not in files]
    names = [name for name in files if old_files.get(name) != files[name]]
    words += [f"{name} {'was changed' if name in old_files else 'is new'}" for name in names]
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")


def locked(
    folder: Path, suffix: str, wait: bool, is_cache: bool = False, say: Callable[[str], None] = show
) -> AbstractContextManager:
    """Lock a store's folder. Raise a `UserError` if something else is there, or a process holds the lock."""
    check_writable(folder)  # before a lock file is written next to the folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}{suffix}.lock"))
        return acquired(lock, f"writing {folder}", say) if wait else lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"Another process is writing {folder}; wait for it, or choose another --output.") from error
    except OSError as error:
        path = error.filename or folder  # for example another user's lock file
        remedy = CACHE_REMEDY if is_cache else "choose another --output"
        raise UserError(f"{folder} cannot be created ({path}: {error.strerror}); {remedy}.") from error


def acquired(lock: FileLock, work: str, say: Callable[[str], None] = show) -> AbstractContextManager:
    """Acquire a lock. `work`: what a process that holds it is doing, for the line about the wait."""
    with suppress(Timeout):
        return lock.acquire(timeout=0)
    say(f"Waiting for another process, which is {work} ...")
    return lock.acquire()


def refuse_busy_shards(folder: Path) -> None:
    """Raise a `UserError` if a shard is running. No shard can start while the folder is locked."""
    for lock in folder.parent.glob(f".{glob.escape(folder.name)}.shard-*.lock"):
        with locked(folder, lock.name.removeprefix(f".{folder.name}").removesuffix(".lock"), wait=False):
            pass
