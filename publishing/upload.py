"""Upload of a folder to a repository on the Hub, in one commit, with the token of `hf auth login` or of the
environment.

Large files are sent before the commit that adds them. After an interruption the repository is unchanged, and files that
arrived are not sent again. (`upload_folder` makes several commits if Xet is installed.)
"""

import filecmp
import glob
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    RepoCard,
    SpaceInfo,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from common.errors import FULL_DISK, UserError
from common.removal import MARK
from modeling_gpt2scratch.loading import ADAPTER, INDEX, WEIGHTS
from training.checkpoints.run_folder import HUB_FILES

TOKENS = "https://huggingface.co/settings/tokens"
# Line in a model's card. A card on the Hub without this line is not replaced.
SIGNATURE = (
    "<!-- Written by push_to_hub.py, which replaces this page at each push. Delete this line to keep your changes. -->"
)
NEW_SPACE = {".gitattributes", "README.md", "index.html", "style.css"}  # files of the Hub's own first commit
PUBLISHED_KINDS = {"gpt2scratch", "gpt2", "apertus"}  # values of model_type
COMMIT_MESSAGE = "Upload with GPT2Scratch"
OWN_TAGS = {*PUBLISHED_KINDS, "from-scratch", "fine-tuned"}
LOADED_SUBFOLDERS = ("additional_chat_templates/", "native/")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*?(?:\n|\Z)", re.DOTALL)
SIGNATURE_PATTERN = re.compile("<!-- Written by push_to_hub.py, which .*-->")  # also matches lines of older versions


@dataclass(frozen=True)
class Repository:
    """Target of an upload."""

    id: str
    type: Literal["model", "space"] = "model"
    private: bool = False  # applies if the repository is created
    branch: str | None = None  # None means main
    sdk: str | None = None  # of a Space


def check_repo_id(repo_id: str) -> None:
    """Raise a `UserError` if `repo_id` is not a valid `user/name`."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:  # HFValidationError, with the rule that the name breaks
        raise UserError(f"repo_id {repo_id!r} is not a name that the Hub accepts: {_on_one_line(error)}.") from error
    if repo_id.count("/") != 1:
        raise UserError(f"repo_id is {repo_id!r}; it must be user/name.")


def check_access(repository: Repository) -> None:
    """Raise a `UserError` if login, token, owner or visibility prevent the upload. Nothing is changed."""
    hub, repo_id, owner = HfApi(), repository.id, repository.id.split("/")[0]
    with hub_errors(f"access {repo_id}"):
        user = hub.whoami()
        names = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(
                f"The token of {user['name']} is read-only: create a token with write access at {TOKENS}, then run "
                f"`hf auth login`."
            )
        if owner not in names:
            raise UserError(
                f"{repo_id} belongs to {owner}, but you are logged in as {user['name']}; use a repository of "
                f"{' or '.join(names)}, or log in with `hf auth login`."
            )
        try:
            info = hub.repo_info(repo_id, repo_type=repository.type)
        except RepositoryNotFoundError:
            return
        _check_content(repository, info)
        if repository.private and not info.private:
            raise UserError(
                f"{repo_id} exists and is public, so --private has no effect; make it private in its settings on the "
                f"Hub, or use another repository."
            )


def _check_content(repository: Repository, info: ModelInfo | SpaceInfo) -> None:
    """Raise a `UserError` if the repository holds files that an upload would replace, or that conflict with it."""
    repo_id, names = repository.id, {file.rfilename for file in info.siblings}
    if repository.type == "space" and "models.json" not in names and not _is_new(repo_id, names):
        raise UserError(f"{repo_id} is a Space of other files, which would be replaced; use another name.")
    kind = (getattr(info, "config", None) or {}).get("model_type", "gpt2scratch")
    if kind != "gpt2scratch" and not _is_native(repo_id, kind):
        raise UserError(
            f"{repo_id} holds a model of type {kind}, which would be replaced; use another name, or delete its "
            "config.json there."
        )
    if repository.type == "model" and ADAPTER in names:
        raise UserError(
            f"{repo_id} holds an adapter ({ADAPTER}), with which the model would not load; delete it there, or use "
            "another name."
        )


def _is_new(space: str, names: set[str]) -> bool:
    """Return whether a Space with files of these `names` has only those that the Hub wrote."""
    has_page = "index.html" in names  # the Hub's example, or the user's
    return names <= NEW_SPACE and not (has_page and len(HfApi().list_repo_commits(space, repo_type="space")) > 1)


def _is_native(repo_id: str, kind: str) -> bool:
    """Return whether a model of another type is a native twin: this program made a commit of the repository."""
    return kind in PUBLISHED_KINDS and any(
        commit.title == COMMIT_MESSAGE for commit in HfApi().list_repo_commits(repo_id)
    )


def check_models(names: list[str]) -> None:
    """Raise a `UserError` if a model, user/name or user/name@revision, has no weights that everybody can read."""
    absent = []
    with hub_errors(f"access {', '.join(names)}"):
        for name in names:
            repository, _, revision = name.partition("@")
            try:
                info = HfApi().model_info(repository, revision=revision or "main", token=False)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                info = None
            if info is None or info.gated or not {WEIGHTS, INDEX} & {file.rfilename for file in info.siblings}:
                absent.append(name)
    if absent:
        raise UserError(
            f"{', '.join(absent)} has no weights on the Hub that everybody can read; push it first, without --private."
        )


def published_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder to upload, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {path.relative_to(folder).as_posix(): path for path in files}


def metadata_on_hub(repo_id: str) -> dict[str, Any]:
    """Return the metadata of the card of a model repository that its owner may have set there, such as the license."""
    with hub_errors(f"read {repo_id}"):
        if not HfApi().file_exists(repo_id, "README.md"):
            return {}
        page = _page(repo_id)
    with suppress(ValueError, yaml.YAMLError):
        metadata = metadata_of(page)
        metadata.pop("model-index", None)
        return metadata | {"tags": [tag for tag in metadata.get("tags", []) if tag not in OWN_TAGS]}
    return {}


def _page(repo_id: str, branch: str | None = None) -> str:
    """Return the README.md of a model repository."""
    with tempfile.TemporaryDirectory() as cache:
        path = HfApi().hf_hub_download(repo_id, "README.md", revision=branch, cache_dir=cache)
        return Path(path).read_text(encoding="utf-8", errors="replace")


def metadata_of(page: str) -> dict[str, Any]:
    """Return the metadata at the beginning of a page. Raise a `ValueError` or `YAMLError` if they are not YAML."""
    block = FRONT_MATTER.match(page)
    metadata = yaml.safe_load(block[1]) if block else None
    if not isinstance(metadata, dict):
        return {}
    tags, language = (metadata.get(name) for name in ("tags", "language"))
    metadata["tags"] = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    if language is False or (isinstance(language, list) and False in language):  # `no`, Norwegian, in YAML 1.1
        metadata["language"] = ["no" if name is False else name for name in language or ["no"]]
    return metadata


def upload(folder: Path, repository: Repository) -> CommitInfo:
    """Upload the folder as one commit. Create the repository and the branch if they do not exist.
    In a model repository, files of this project that the folder lacks are deleted; all other files and an edited
    README.md stay. If the Hub refuses or cannot be reached, a `UserError` is raised and the repository is unchanged."""
    hub, repo_id, is_model = HfApi(), repository.id, repository.type == "model"
    target = {"repo_id": repo_id, "repo_type": repository.type}
    on_branch = target | {"revision": repository.branch}
    with hub_errors(f"upload to {repo_id}"):
        try:  # before anything is created
            RepoCard.load(folder / "README.md").validate(repository.type)
        except ValueError as error:
            problem = f"The Hub does not accept the metadata of {folder / 'README.md'}: {_on_one_line(error)}"
            raise UserError(f"{problem}; correct these values.") from error
        if not hub.repo_exists(**target):
            hub.create_repo(**target, private=repository.private, space_sdk=repository.sdk)
        paths = published_files(folder)
        if repository.branch is not None:
            additions = [CommitOperationAdd(name, path) for name, path in paths.items()]
            hub.preupload_lfs_files(**target, additions=additions)  # before the branch exists with the files of main
            hub.create_branch(**target, branch=repository.branch, exist_ok=True)
        parent = hub.repo_info(**on_branch).sha  # the Hub refuses the commit if the branch moves during the upload
        is_copy = repository.branch is not None and parent == hub.repo_info(**target).sha  # before its first upload
        names = hub.list_repo_files(**on_branch)
        stale = _own_files(repo_id, {*names} - paths.keys()) if is_model else []
        if is_model and "README.md" in names and not is_copy and _is_edited(_page(repo_id, repository.branch)):
            del paths["README.md"]
            branch = f" in its branch {repository.branch}" * (repository.branch is not None)
            print(
                f"The README.md of {repo_id}{branch} was edited and is kept; delete it there to publish the card "
                f"of {folder}."
            )
        operations = [CommitOperationAdd(name, path) for name, path in paths.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        message = {"commit_message": COMMIT_MESSAGE, "parent_commit": parent}
        commit = hub.create_commit(operations=operations, **message, **on_branch)
        if stale:
            print(f"Deleted from {repo_id}, because {folder} lacks them: {', '.join(stale)}.")
        return commit


def _own_files(repo_id: str, names: set[str]) -> list[str]:
    """Return the `names` in a model repository that match those of this project's files."""
    own = glob.escape(repo_id.split("/")[1])  # begins the names of this project's GGUF files
    patterns = [f"/{pattern}".replace("/*-", f"/{own}-") for pattern in HUB_FILES]
    # `*` does not match a slash.
    return [name for name in sorted(names) if any(map(PurePosixPath("/", name).match, patterns))]


def _is_edited(page: str) -> bool:
    """Return whether a person wrote or edited a card, so that it is not replaced."""
    is_empty = not FRONT_MATTER.sub("", page).strip()  # as the Hub writes it for a license
    return not is_empty and SIGNATURE_PATTERN.search(page) is None


def download(repo_id: str, commit: str, cache: Path, compare_with: Path) -> None:
    """Download the repository into a separate cache. Raise a `UserError` if a file differs from the uploaded one."""
    with hub_errors(f"read {repo_id} back"):
        names = {*HfApi().list_repo_files(repo_id, revision=commit)} - published_files(compare_with).keys()
        unused = [glob.escape(name) for name in names if not is_loaded(name)]  # of the user, perhaps large
        options = {"cache_dir": cache, "ignore_patterns": unused}
        snapshot = Path(HfApi().snapshot_download(repo_id, revision=commit, **options))
    names = [name for name in published_files(compare_with) if name != "README.md"]  # the Hub's own may have been kept
    _, *differences = filecmp.cmpfiles(compare_with, snapshot, names, shallow=False)
    if names := sorted(chain(*differences)):
        raise UserError(
            f"Files of {repo_id} on the Hub differ from the uploaded ones ({', '.join(names[:5])}); run this command "
            f"again."
        )


def is_loaded(name: str) -> bool:
    """Return whether Transformers may load a file of a repository, so that it could conflict with a model there."""
    is_in_root = "/" not in name or name.startswith(LOADED_SUBFOLDERS)
    return is_in_root and not name.endswith((".gguf", ".onnx"))


@contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Turn errors of the Hub and of the network into one sentence."""
    remedy = "run this command again; files that arrived are not sent twice"
    try:
        yield
    except KeyboardInterrupt as error:
        # On a line of its own, after a progress bar.
        raise KeyboardInterrupt(f"\nInterrupted, could not {action}; {remedy}.") from error
    except (LocalTokenNotFoundError, UnicodeEncodeError) as error:
        problem = "You are not logged in to the Hub, or the token contains invalid characters"
        raise UserError(f"{problem}: run `hf auth login`, then this command again.") from error
    except HfHubHTTPError as error:
        raise UserError(f"Could not {action}: the Hub refused: {_on_one_line(error)}; {remedy}.") from error
    # RuntimeError: from Xet. ValueError: a response that is not from the Hub.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if getattr(error, "errno", None) in FULL_DISK:
            raise UserError(f"Could not {action}: the disk of TMPDIR is full; set TMPDIR to a larger one.") from error
        raise UserError(f"Could not {action}: the Hub cannot be reached ({_on_one_line(error)}); {remedy}.") from error


def _on_one_line(error: Exception) -> str:
    """Return an error message on one line, with the Hub token masked."""
    line, token = " ".join(str(error).split()) or type(error).__name__, get_token()
    return (line.replace(token, "(token)") if token else line)[:300].rstrip(".")
