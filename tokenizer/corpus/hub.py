"""Hugging Face Hub: connection check, and streamed datasets, which need not fit on the disk."""

import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from common.errors import UserError

ID = re.compile(
    r"(?P<name>[.-]*\w[\w.-]*/[.-]*\w[\w.-]*)(:(?P<config>[^:@]+)|:(?=:))?(:(?P<split>[^:@]+))?(@(?P<revision>\S+))?"
)
REACHED_WITHIN = 10  # in seconds
# By a name without owner, which the Hub's libraries once accepted.
HINTS = {name: f" Did you mean openai-community/{name}?" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
HINTS["distilgpt2"] = " Did you mean distilbert/distilgpt2?"


@cache
def unreachable() -> str | None:
    """Return the reason why the Hub cannot be reached, or None if it answers.
    The check runs once per process: by default, the Hub's libraries try each file six times, for a minute or more.
    Without an answer, the libraries of this process and its children are set to use only their cache."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACHED_WITHIN)
    except Exception as error:  # the Hub's HTTP library, and so its exceptions, differ by version
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"{constants.ENDPOINT}: {shortened(error) or type(error).__name__}"
    return None


@contextmanager
def offline_only_inside() -> Iterator[None]:
    """Context for use in another program, which `unreachable` must not leave offline."""
    from huggingface_hub import constants

    is_offline = constants.HF_HUB_OFFLINE
    try:
        yield
    finally:
        if is_offline != constants.HF_HUB_OFFLINE:
            constants.HF_HUB_OFFLINE = is_offline
            os.environ["HF_HUB_OFFLINE"] = "0"
        unreachable.cache_clear()


def require(name: str, noun: str, *files: str) -> None:
    """Raise a `UserError` for a Hub id if the Hub cannot be reached and none of `files` is cached.
    Names that are not Hub ids are not checked. `noun` has its article."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except HFValidationError:
        return
    if (reason := unreachable()) is not None and not is_cached:
        raise UserError(
            f"{name} is not a local path, the local Hub cache lacks {noun} with this name, and the Hub cannot be "
            f"reached ({reason}).{HINTS.get(name, '')}"
        )


def shortened(error: Exception) -> str:
    """Return the message of an exception on one line of at most 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...").rstrip(".")


def without_media(part: Any) -> Any:
    """Return a dataset whose pictures, sound and video stay bytes when a record is read, without a format."""
    import datasets

    features = datasets.Features(_undecoded(part.features or {}))
    if repr(features) == repr(part.features or {}):  # they are equal whether or not they are decoded
        return part
    if not hasattr(part, "num_rows"):
        return part.cast(features)
    part = part.with_format(None)  # a copy; `cast` would write all records to the cache
    part.info.features = features
    return part


def _undecoded(feature: Any) -> Any:
    """Return a feature of `datasets` without decoding, also in lists and dictionaries."""
    if isinstance(feature, dict):
        return {name: _undecoded(part) for name, part in feature.items()}
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    has_media = hasattr(feature, "decode") and type(feature).__name__ != "Json"  # which is text
    return replace(feature, decode=False) if has_media else feature


@dataclass
class HubDataset:
    """Hub dataset, written as `user/name`, `user/name:config`, `user/name:config:split` or `user/name::split`, each
    with an optional `@revision`. Without a split, `train` is its text and `validation`, if it exists, its validation
    text."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, entry: str) -> Self | None:
        """Return the dataset that `entry` names, or None if it is not such an id, or is a local path."""
        match = ID.fullmatch(entry)
        if match is None or Path(entry).exists() or Path(entry.split("/")[0]).exists():
            return None
        return cls(**match.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = self.config or (self.split and "")
        return ":".join(part for part in (self.name, config, self.split) if part is not None) + revision

    def pinned(self) -> Self:
        """Return the dataset at its current commit.
        Raise a `UserError` if the dataset or its revision does not exist, or the Hub cannot be reached."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        if (reason := unreachable()) is not None:
            raise UserError(
                f"{self.name} is not a local path, and the Hub cannot be reached ({reason}); if you have a "
                "token store of it, name that folder (data/...)."
            )
        reasons = {
            RepositoryNotFoundError: "has no such dataset, or it is private: log in with `hf auth login`",
            GatedRepoError: "requires that you accept its conditions: open its page, then log in with `hf auth login`",
            RevisionNotFoundError: f"has no revision {self.revision} of this dataset; omit the revision or "
            "choose another one",
        }
        try:
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except Exception as error:  # the Hub's HTTP library, and so its exceptions, differ by version
            reason = reasons.get(type(error), f"does not return it ({shortened(error)})")
            raise UserError(f"{self.name} is not a local path, and the Hub {reason}.") from error
        return type(self)(self.name, self.config, self.split, commit)

    @cached_property
    def streams(self) -> list[Any]:
        """Stream of the named split or of `train`, and a second one if no split is named and `validation` exists.
        Access raises a `UserError` for an unknown configuration or split, or unreadable files."""
        import datasets

        try:
            source = {"split": self.split, "revision": self.revision}
            splits = datasets.load_dataset(self.name, self.config, **source, streaming=True)
            if self.split is None and "train" not in splits:
                raise ValueError(f"it has no split train; name one of its splits, {', '.join(splits)}")
            return [splits] if self.split else [splits[name] for name in ("train", "validation") if name in splits]
        except Exception as error:  # depends on the versions of `datasets` and of the Hub's HTTP library
            raise UserError(f"{self} cannot be read from the Hub: {shortened(error)}.") from error

    @property
    def facts(self) -> Any:
        """What the dataset states about the split of its text, with `num_examples` and `num_bytes`, or None."""
        return (self.streams[0].info.splits or {}).get(self.split or "train")

    def records(self, shard: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records of the dataset, or of one of its `num_shards` shards.
        Raise a `UserError` if the connection is lost, or the data are broken."""
        stream = self.streams[0] if shard is None else self.streams[0].shard(self.streams[0].num_shards, shard)
        try:
            yield from without_media(stream)
        except Exception as error:
            raise UserError(f"Reading {self} stopped: {shortened(error)}. Run the same command again.") from error


@cache
def open_dataset(name: str) -> HubDataset:
    """Open a dataset by its name, `str(dataset)`, even if a local folder now has the same name."""
    return HubDataset(**ID.fullmatch(name).groupdict())
