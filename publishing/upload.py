"""From a folder to a repository on the Hub, in one commit. The token is that of `hf auth login` or of the environment.

What is large goes first, and the commit that shows it last: broken off, the repository is as it was, and what has arrived is
not sent again. (`upload_folder` would make several commits where Xet is installed.)
"""

import filecmp
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from errors import UserError
from removal import MARK
from training.run_folder import HUB_FILES

TOKENS = "https://huggingface.co/settings/tokens"
# In a model's card; the one on the Hub is kept as it is once this line is taken out of it.
WRITTEN = "<!-- Written by push_to_hub.py, which writes it anew each time. Take out this line to keep your changes. -->"


@dataclass(frozen=True)
class Repository:
    """Where a folder goes."""

    id: str
    type: Literal["model", "space"] = "model"
    private: bool = False  # if it is made
    branch: str | None = None  # where it is not the main one


def check_repo_id(repo_id: str) -> None:
    """Raise a `UserError` where it is not `user/name` as the Hub spells it."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id {repo_id!r} is not a name the Hub accepts: {_on_one_line(error)}.") from error
    if repo_id.count("/") != 1:
        raise UserError(f"repo_id is {repo_id!r}; it must be user/name.")


def check_access(repository: Repository) -> None:
    """Refuse an upload that cannot succeed: for a login, a token, an owner or a visibility; nothing is changed."""
    hub, repo_id, owner = HfApi(), repository.id, repository.id.split("/")[0]
    with _hub_errors(f"look at {repo_id}"):
        user = hub.whoami()
        names = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(
                f"The token of {user['name']} is for reading only: make one that may write at {TOKENS}, then `hf auth login`."
            )
        if owner not in names:
            raise UserError(
                f"{repo_id} belongs to {owner}, and you are logged in as {user['name']}; name a repository of "
                f"{' or '.join(names)}, or log in with `hf auth login`."
            )
        try:
            is_public = not hub.repo_info(repo_id, repo_type=repository.type).private
        except RepositoryNotFoundError:
            return
        if repository.private and is_public:
            raise UserError(
                f"{repo_id} exists and is public, so --private cannot hide what is uploaded; make it private in its "
                f"settings on the Hub, or name another repository."
            )


def check_models(names: list[str]) -> None:
    """Raise a `UserError` where one of them is not on the Hub, or is not for everyone to see."""
    with _hub_errors(f"look at {', '.join(names)}"):
        missing = [name for name in names if not HfApi().repo_exists(name, token=False)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} cannot be seen by everyone on the Hub; push it first, and not as private."
        )


def published_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that are uploaded, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {path.relative_to(folder).as_posix(): path for path in files}


def upload(folder: Path, repository: Repository) -> CommitInfo:
    """Create the repository and the branch, if they do not exist, and make the folder its newest commit.

    Of a model's repository, files that this project writes and the folder lacks are removed, all others stay, and so does
    a README.md that someone made their own. Where the Hub refuses or cannot be reached, a `UserError` is raised and nothing
    of the repository is changed; a KeyboardInterrupt says the same.
    """
    hub, repo_id, is_model = HfApi(), repository.id, repository.type == "model"
    there = {"repo_id": repo_id, "repo_type": repository.type}
    on_branch = there | {"revision": repository.branch}
    with _hub_errors(f"upload to {repo_id}"):
        _refuse_bad_metadata(folder / "README.md", repository.type)  # before anything is created
        if not hub.repo_exists(**there):
            try:
                hub.create_repo(**there, private=repository.private, space_sdk=None if is_model else "gradio")
            except HfHubHTTPError as error:
                if error.response.status_code != 409:
                    raise
                sentence = f"{repo_id} is taken on the Hub by something that is no {repository.type}; name another."
                raise UserError(sentence) from error
        if repository.branch is not None:
            hub.create_branch(**there, branch=repository.branch, exist_ok=True)
        paths, names = published_files(folder), hub.list_repo_files(**on_branch)
        ours = HUB_FILES if is_model else ()
        stale = [name for name in names if name not in paths and any(fnmatch(name, pattern) for pattern in ours)]
        if is_model and "README.md" in names:
            with tempfile.TemporaryDirectory() as cache:
                card = Path(hub.hf_hub_download(filename="README.md", cache_dir=cache, **on_branch))
                is_written_here = WRITTEN in card.read_text(encoding="utf-8", errors="replace")
            if not is_written_here:
                del paths["README.md"]
                print(
                    f"The README.md of {repo_id} is someone's own and stays; delete it there for the card of {folder}."
                )
        operations = [CommitOperationAdd(name, path) for name, path in paths.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        return hub.create_commit(operations=operations, commit_message="Upload with GPT2Scratch", **on_branch)


def download(repo_id: str, commit: str, cache: Path, compare_with: Path) -> None:
    """Fetch what other people would get into a cache of its own; refuse what is not, byte for byte, what was uploaded."""
    with _hub_errors(f"read {repo_id} back"):
        there = Path(HfApi().snapshot_download(repo_id, revision=commit, cache_dir=cache))
    names = [name for name in published_files(compare_with) if name != "README.md"]  # which may have been kept
    _, different, missing = filecmp.cmpfiles(compare_with, there, names, shallow=False)
    if wrong := sorted(different + missing):
        raise UserError(f"{repo_id} on the Hub is not what was uploaded ({', '.join(wrong[:5])}); run this again.")


def _refuse_bad_metadata(card: Path, repo_type: str) -> None:
    """Raise a `UserError` where the Hub says that it would not take the metadata."""
    try:
        RepoCard.load(card).validate(repo_type)
    except ValueError as error:
        try:
            reasons = "; ".join(problem["message"] for problem in json.loads(str(error))["errors"])
        except (ValueError, KeyError, TypeError):
            reasons = _on_one_line(error)
        raise UserError(f"The Hub does not take the metadata of {card}: {reasons}; correct what is named.") from error


@contextmanager
def _hub_errors(action: str) -> Iterator[None]:
    """Turn whatever the Hub, or the way to it, refuses into one sentence."""
    again = "run this again: what has arrived is not sent twice"
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"Interrupted, could not {action}; {again}.") from error
    except (LocalTokenNotFoundError, UnicodeEncodeError) as error:
        problem = "You are not logged in to the Hub, or by a token with characters that no token has"
        raise UserError(f"{problem}: run `hf auth login`, then this command again.") from error
    except HfHubHTTPError as error:
        raise UserError(f"Could not {action}: the Hub refused: {_on_one_line(error)}; {again}.") from error
    # RuntimeError: from Xet. ValueError: an answer that is none of the Hub's own.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"Could not {action}: the Hub cannot be reached ({_on_one_line(error)}); {again}.") from error


def _on_one_line(error: Exception) -> str:
    """Return the message without the token."""
    line, token = " ".join(str(error).split()) or type(error).__name__, get_token()
    return (line.replace(token, "(token)") if token else line)[:300].rstrip(".")
