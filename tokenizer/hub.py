"""Datasets of the Hub, streamed through `datasets`: nothing of them need fit on this disk."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from errors import UserError

ID = re.compile(
    r"(?P<name>[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*)(:(?P<config>[^:@]+))?(:(?P<split>[^:@]+))?(@(?P<revision>\S+))?"
)


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

        try:
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except Exception as error:  # the HTTP library behind the Hub, and its exceptions, differ by version
            if isinstance(error, RevisionNotFoundError):
                raise UserError(
                    f"{self.name} has no revision {self.revision} on the Hub; leave it out or name another."
                ) from error
            reason = (
                "has no such dataset" if isinstance(error, RepositoryNotFoundError) else "cannot be reached to look"
            )
            raise UserError(f"{self.name} is no file or folder here, and the Hub {reason}.") from error
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
            raise UserError(f"{self} cannot be read from the Hub: {_reason(error)}.") from error

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
                f"{self} cannot be read further: {_reason(error)}. The same command goes on from here."
            ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


@cache
def opened(pinned: str) -> HubDataset:
    """What `str` has written of a dataset, whatever folders there are by now."""
    return HubDataset(**ID.fullmatch(pinned).groupdict())
