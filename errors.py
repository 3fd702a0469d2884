"""Messages to the user. Imports nothing large, so that worker processes start at once."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# What reading the content of a file raises that another program wrote, or none.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, StopIteration)


class UserError(Exception):
    """Something the user can mend. Its text is what they read: what is wrong, with the values involved, and the remedy.

    Several problems found together are raised together, one a line.
    """

    is_said = False  # by another process


class Problems:
    """What is wrong with a command, to be reported together."""

    def __init__(self, sentences: Iterable[str] = ()):
        self.sentences = list(sentences)
        self.unsure: set[str] = set()  # settings whose value is not known, because what was given is wrong

    def add(self, sentence: str, *names: str) -> None:
        """Add a problem for which the values of the settings `names` are not known."""
        self.sentences.append(sentence)
        self.unsure |= set(names)

    def add_of(self, check: Callable[..., Any] | None, parts: Iterable[Any]) -> Any:
        """Return what `check` returns; where it raises, add its sentences, but those about settings whose value is not known."""
        try:
            return check(*parts) if check is not None else None
        except UserError as error:
            self.sentences += [
                line for line in str(error).splitlines() if not self.unsure & set(re.findall(r"\w+", line))
            ]

    def refuse(self) -> None:
        """Raise a `UserError` with all problems, if there are any."""
        if self.sentences:
            raise UserError("\n".join(dict.fromkeys(self.sentences)))


@contextmanager
def disk_errors(path: object, remedy: str = "correct that and try again") -> Iterator[None]:
    """Turn what the disk refuses (no permission, no room, no such file) into a `UserError` that ends with `remedy`. Of an error
    that names no file, `path` is named."""
    try:
        yield
    except BrokenPipeError:  # of an output that nobody reads
        raise
    except OSError as error:
        what = f"{error.filename2 or error.filename or path} cannot be read or written ({error.strerror or error})"
        raise UserError(f"{what}; {remedy}.") from error


def require_room(folder: object, n_bytes: float, what: str, remedy: str) -> None:
    """Raise a `UserError` where `n_bytes` do not fit on the disk of `folder`; `what` is the subject and verb of the sentence."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise UserError(f"{what} {n_bytes / 1e9:,.1f} GB, and {folder} has {free / 1e9:,.1f} GB free; {remedy}.")


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 file` or `1,234 files`; `many`: a plural that does not end in s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def check_format(path: object, version: object, newest: int) -> None:
    """Raise a `UserError` for what a newer version of this project wrote. What an older one wrote has a reader of its own."""
    if isinstance(version, int) and version > newest:
        raise UserError(
            f"{path} was written by a newer version of GPT2Scratch (format {version}; this version reads formats up to "
            f"{newest}). Update with `git pull`."
        )
