"""Error messages for the user. Imports nothing large, so that worker processes start fast."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Exceptions that damaged files, or files of other programs, can raise.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, StopIteration)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # also a quota, and a limit of the shell


class UserError(Exception):
    """Problem that the user can fix. The text names the problem, the values involved, and the remedy.
    Several problems are raised together, one per line."""

    is_reported = False  # true if another process has printed it


class Problems:
    """Problems of a command, collected and reported together."""

    def __init__(self, sentences: Iterable[str] = ()):
        self.sentences = list(sentences)
        self.unsure: set[str] = set()  # settings without a known value because the given value is wrong

    def add(self, sentence: str, *names: str) -> None:
        """Add a problem. Because of it, the values of the settings `names` are not known."""
        self.sentences.append(sentence)
        self.unsure |= set(names)

    def add_of(self, check: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `check`. If it raises, add its sentences, except those that name an unknown value."""
        try:
            return check(*args, **kwargs)
        except UserError as error:
            self.sentences += [
                line for line in str(error).splitlines() if not self.unsure & set(re.findall(r"\w+", line))
            ]

    def refuse(self) -> None:
        """Raise a `UserError` with all problems, if any."""
        if self.sentences:
            raise UserError("\n".join(dict.fromkeys(self.sentences)))


def as_os_error(error: Exception) -> OSError:
    """Return the OSError for an error of safetensors or tokenizers that ends in `(os error 28)`. Raise all others."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of all files that were not copied
        _, path, problem = error.args[0][0]
        return OSError(errno.EIO, problem, path)
    if isinstance(error, OSError):
        return error
    if (match := re.search(r"\(os error (\d+)\)", str(error))) is None:
        raise error
    return OSError(int(match[1]), os.strerror(int(match[1])))


@contextmanager
def disk_errors(path: object, remedy: str = "correct that and try again") -> Iterator[None]:
    """Turn disk errors (no permission, no space, no such file) into a `UserError` that ends with `remedy`.
    The error names `path` if the exception does not name a file."""
    try:
        yield
    except BrokenPipeError:  # the program that reads stdout has ended
        raise
    except Exception as error:
        problem = as_os_error(error)
        name = problem.filename2 or problem.filename or path
        subject = f"{name} cannot be read or written ({problem.strerror or problem})"
        raise UserError(f"{subject}; {remedy}.") from error


def require_room(folder: object, n_bytes: float, subject: str, remedy: str) -> None:
    """Raise a `UserError`, which begins with `subject` and its verb, if `folder` has less than `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        unit, name = (1e9, "GB") if n_bytes >= 1e9 else (1e6, "MB")
        sizes = f"{n_bytes / unit:,.1f} {name}, and {folder} has {free / unit:,.1f} {name}"
        raise UserError(f"{subject} {sizes} free; {remedy}.")


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 file`, `1,234 files`. `plural`: one that is not formed with s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def first_of(items: Sequence[Any]) -> str:
    """Return up to eight items for a sentence, and the number of the others."""
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8:,} more" if len(items) > 8 else "")


def check_format(path: object, version: object, newest: int) -> None:
    """Raise a `UserError` for a format that a newer version wrote. Older formats have their own readers."""
    if isinstance(version, int) and version > newest:
        raise UserError(
            f"{path} was written by a newer version of GPT2Scratch (format {version}; this version reads formats up to "
            f"{newest}). Update with `git pull`."
        )
