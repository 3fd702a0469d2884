"""The Hub: whether it can be reached, and its datasets, streamed through `datasets` so that nothing of them need fit on this disk."""

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from errors import UserError

ID = re.compile(
    r"(?P<name>[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*)(:(?P<config>[^:@]+))?(:(?P<split>[^:@]+))?(@(?P<revision>\S+))?"
)
REACHED_WITHIN = 10  # seconds


def unreachable() -> str | None:
    """Why the Hub cannot be reached, in words; None where it answers.

    Asks once in the life of a process. Left to themselves, its libraries try each file six times, for a minute and more. Where
    it does not answer, they are told to use their cache alone, and so are processes that are started later.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _offline_since.get(constants.ENDPOINT, "HF_HUB_OFFLINE is set")
    return _ask(constants.ENDPOINT)


_offline_since: dict[str, str] = {}  # this process found it out


@cache
def _ask(endpoint: str) -> str | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(endpoint, timeout=REACHED_WITHIN)
    except Exception as error:  # the HTTP library behind the Hub, and its exceptions, differ by version
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        _offline_since[endpoint] = f"{endpoint}: {shortened(error) or type(error).__name__}"
        return _offline_since[endpoint]
    return None


def require(name: str, what: str, *files: str) -> None:
    """Make sure that a Hub id can be loaded: from the Hub or, where it cannot be reached, from the cache, if one of `files`
    is there. Other names are left to whoever loads them.

    Raises:
        UserError: neither is the case. `what` is a noun with its article.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return
    if (why := unreachable()) is not None and not any(
        isinstance(try_to_load_from_cache(name, file), str) for file in files
    ):
        raise UserError(
            f"{name} is not a local path, the local cache of the Hub does not hold {what} of this name, and the Hub cannot be "
            f"reached ({why})."
        )


def shortened(error: Exception) -> str:
    """What an exception says, on one line of at most 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...").rstrip(".")


@dataclass
class HubDataset:
    """`user/name`, with `:config`, `:config:split` and `@revision` as needed."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, entry: str) -> Self | None:
        """None where `entry` is no such id, or names something on this disk."""
        found = ID.fullmatch(entry)
        if found is None or Path(entry).exists() or Path(entry.split("/")[0]).exists():
            return None
        return cls(**found.groupdict())

    def __str__(self) -> str:
        return ":".join(filter(None, [self.name, self.config, self.split])) + (
            f"@{self.revision}" if self.revision else ""
        )

    def pinned(self) -> Self:
        """The same at the commit where it stands now.

        Raises:
            UserError: there is no such dataset or revision, or the Hub cannot be reached.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        if (why := unreachable()) is not None:
            raise UserError(f"{self.name} is not a local path, and the Hub cannot be reached ({why}).")
        try:
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except Exception as error:  # the HTTP library behind the Hub, and its exceptions, differ by version
            if isinstance(error, RevisionNotFoundError):
                raise UserError(
                    f"{self.name} has no revision {self.revision} on the Hub; leave it out or name another."
                ) from error
            is_missing = isinstance(error, RepositoryNotFoundError)
            reason = "has no such dataset" if is_missing else f"cannot be asked for it ({shortened(error)})"
            raise UserError(f"{self.name} is not a local path, and the Hub {reason}.") from error
        return type(self)(self.name, self.config, self.split, commit)

    @cached_property
    def stream(self) -> Any:
        """The dataset as `datasets` streams it.

        Raises:
            UserError: no such configuration or split, or files that cannot be read.
        """
        import datasets

        try:
            return datasets.load_dataset(
                self.name, self.config, split=self.split or "train", revision=self.revision, streaming=True
            )
        except Exception as error:  # by version, and by what is behind the Hub
            raise UserError(f"{self} cannot be read from the Hub: {shortened(error)}.") from error

    def head(self, count: int) -> Iterator[dict[str, Any]]:
        """The first records."""
        return self._records(self.stream.take(count))

    def shard(self, number: int) -> Iterator[dict[str, Any]]:
        """The records of one of `stream.num_shards` shards."""
        return self._records(self.stream.shard(num_shards=self.stream.num_shards, index=number))

    def _records(self, stream: Any) -> Iterator[dict[str, Any]]:
        """
        Raises:
            UserError: the connection is lost, or the data are broken.
        """
        try:
            yield from stream
        except Exception as error:
            raise UserError(
                f"{self} cannot be read further: {shortened(error)}. The same command resumes from here."
            ) from error


@cache
def opened(pinned: str) -> HubDataset:
    """What `str` has written of a dataset, whatever folders there are by now."""
    return HubDataset(**ID.fullmatch(pinned).groupdict())
