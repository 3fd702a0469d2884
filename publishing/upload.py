"""From a folder to a repository on the Hub, in one commit. The token is that of `hf auth login` or of the environment.

What is large goes first, and the commit that shows it last: broken off, the repository is as it was, and what has arrived is
not sent again.
"""

import filecmp
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, validate_repo_id

from errors import UserError
from removal import MARK

TOKENS = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Uploaded:
    url: str
    commit: str  # its hash


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        UserError: not `user/name` as the Hub spells it.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id {repo_id!r} is not a name the Hub accepts: {_first_line(error)}.") from error
    if repo_id.count("/") != 1:
        raise UserError(f"repo_id is {repo_id!r}; it must be user/name.")


def check_access(repo_id: str, private: bool = False, repo_type: str = "model") -> None:
    """Whether an upload can be expected to succeed; nothing is changed.

    Raises:
        UserError: not logged in, a token that may not write, another's name, a public repository that is to be private, or
            the Hub cannot be reached.
    """
    hub, owner = HfApi(), repo_id.split("/")[0]
    with _told(f"look at {repo_id}"):
        user = hub.whoami()
        names = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
        role = user.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise UserError(
                f"The token of {user['name']} is for reading only: make one that may write at {TOKENS}, then `hf auth login`."
            )
        if owner not in names:
            raise UserError(
                f"{repo_id} belongs to {owner}, and you are logged in as {user['name']}; name a repository of "
                f"{' or '.join(names)}, or log in with `hf auth login`."
            )
        try:
            is_public = not hub.repo_info(repo_id, repo_type=repo_type).private
        except RepositoryNotFoundError:
            return
        if private and is_public:
            raise UserError(
                f"{repo_id} exists and is public, so --private cannot hide what is uploaded; make it private in its "
                f"settings on the Hub, or name another repository."
            )


def check_models(names: list[str]) -> None:
    """
    Raises:
        UserError: one of them is not on the Hub, or is not for everyone to see.
    """
    with _told(f"look at {', '.join(names)}"):
        missing = [name for name in names if not HfApi().repo_exists(name, token=False)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} cannot be seen by everyone on the Hub; push it first, and not as private."
        )


def published_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that are uploaded, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {path.relative_to(folder).as_posix(): path for path in files}


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    repo_type: str = "model",
    space_sdk: str | None = None,
    branch: str | None = None,
    ours: tuple[str, ...] = (),
    keep: Callable[[str], bool] | None = None,
) -> Uploaded:
    """Creates the repository, and the branch, where there is none, and makes the folder its newest commit.

    Files of the repository that match a pattern of `ours` and are not in the folder are removed; all others stay. `keep` is
    given the README.md that the repository has, and says whether to leave it.

    Raises:
        UserError: the Hub refuses, or cannot be reached; nothing of the repository is changed then.
        KeyboardInterrupt: with the same sentence.
    """
    hub = HfApi()
    with _told(f"upload to {repo_id}"), _progress():
        _refuse_bad_metadata(folder / "README.md", repo_type)  # before anything is created
        if not hub.repo_exists(repo_id, repo_type=repo_type):
            _create(hub, repo_id, private, repo_type, space_sdk)
        if branch is not None:
            hub.create_branch(repo_id, repo_type=repo_type, branch=branch, exist_ok=True)
        there = hub.list_repo_files(repo_id, repo_type=repo_type, revision=branch)
        paths = published_files(folder)
        stale = [name for name in there if name not in paths and any(fnmatch(name, pattern) for pattern in ours)]
        if keep is not None and "README.md" in there and keep(_card(hub, repo_id, repo_type, branch)):
            del paths["README.md"]
            print(f"The README.md of {repo_id} is someone's own and stays; delete it there for the card of {folder}.")
        operations = [CommitOperationAdd(name, path) for name, path in paths.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        commit = hub.create_commit(
            repo_id, operations, commit_message="Upload with GPT2Scratch", repo_type=repo_type, revision=branch
        )
        return Uploaded(str(commit.repo_url), commit.oid)


def download(repo_id: str, commit: str, cache: Path, compare_with: Path) -> None:
    """Fetches what other people would get into a cache of its own, and compares it byte for byte.

    Raises:
        UserError: it is not what was uploaded, or the Hub cannot be reached.
    """
    with _told(f"read {repo_id} back"), _progress():
        there = Path(HfApi().snapshot_download(repo_id, revision=commit, cache_dir=cache))
    different = [
        name
        for name, path in published_files(compare_with).items()
        if name != "README.md"  # which may have been kept
        and not ((there / name).is_file() and filecmp.cmp(there / name, path, shallow=False))
    ]
    if different:
        raise UserError(f"{repo_id} on the Hub is not what was uploaded ({', '.join(different[:5])}); run this again.")


def _refuse_bad_metadata(card: Path, repo_type: str) -> None:
    """
    Raises:
        UserError: the Hub says that it would not take it.
    """
    try:
        RepoCard.load(card).validate(repo_type)
    except ValueError as error:
        try:
            reasons = "; ".join(problem["message"] for problem in json.loads(str(error))["errors"])
        except (ValueError, KeyError, TypeError):
            reasons = " ".join(str(error).split())[:300]
        raise UserError(f"The Hub does not take the metadata of {card}: {reasons}; mend what is named.") from error


def _card(hub: HfApi, repo_id: str, repo_type: str, branch: str | None) -> str:
    with tempfile.TemporaryDirectory() as cache:
        path = hub.hf_hub_download(repo_id, "README.md", repo_type=repo_type, revision=branch, cache_dir=cache)
        return Path(path).read_text(encoding="utf-8", errors="replace")


def _create(hub: HfApi, repo_id: str, private: bool, repo_type: str, space_sdk: str | None) -> None:
    try:
        hub.create_repo(repo_id, private=private, repo_type=repo_type, space_sdk=space_sdk)
    except HfHubHTTPError as error:
        if error.response.status_code == 409:
            raise UserError(
                f"{repo_id} is taken on the Hub by something that is no {repo_type}; name another."
            ) from error
        raise


@contextmanager
def _progress() -> Iterator[None]:
    """Shows the client's own bars, which the doors switch off with Transformers'."""
    enable_progress_bars()
    try:
        yield
    finally:
        disable_progress_bars()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the Hub, or the way to it, refuses, as one sentence."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f"Interrupted, could not {what}; run this again: what has arrived is not sent twice."
        ) from error
    except LocalTokenNotFoundError as error:
        raise UserError("You are not logged in to the Hub: run `hf auth login`, then this command again.") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"Could not {what}: HF_HUB_OFFLINE is set; unset it, or look with --dry_run.") from error
    except HfHubHTTPError as error:
        raise UserError(f"Could not {what}: the Hub refused: {_first_line(error)}.") from error
    except UnicodeEncodeError as error:
        raise UserError("The token has characters that no token has: run `hf auth login`, then this again.") from error
    except ValueError as error:  # metadata of the card that the Hub does not know, or an answer that is none of its own
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"Could not {what}: {reason}; mend what is named, then run this again.") from error
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: from Xet
        raise UserError(
            f"Could not {what}: the Hub cannot be reached ({_first_line(error)}); run this again: what has arrived is not "
            f"sent twice."
        ) from error


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    token = get_token()
    return line.replace(token, "(token)") if token else line
