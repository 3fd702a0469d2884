"""Messages to the user. Imports nothing, so that worker processes start at once."""

# What reading the content of a file raises that another program wrote, or none.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, StopIteration)


class UserError(Exception):
    """Something the user can mend. Its text is what they read: what is wrong, with the values involved, and the remedy.

    Several problems found together are raised together, one a line.
    """

    is_said = False  # by another process


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 file` or `1,234 files`; `many`: a plural that does not end in s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def check_format(path: object, version: object, newest: int) -> None:
    """Refuse what a newer version of this project wrote. What an older one wrote has a reader of its own.

    Raises:
        UserError: `version`, as `path` states it, is above `newest`.
    """
    if isinstance(version, int) and version > newest:
        raise UserError(
            f"{path} was written by a newer version of GPT2Scratch (format {version}; this version reads formats up to "
            f"{newest}). Update with `git pull`."
        )
