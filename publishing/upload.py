"""From a verified folder to a repository on the Hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from errors import UserError


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        UserError: not `user/name` as the Hub spells it.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id {repo_id!r} is not a name the Hub accepts: {_first_line(error)}") from error
    if repo_id.count("/") != 1:
        raise UserError(f"repo_id is {repo_id!r}; it must be user/name.")


def upload(folder: Path, repo_id: str, private: bool) -> str:
    """Creates the repository where there is none, uploads the folder in one commit, and returns its address. The token
    is the one of `hf auth login` or of the environment.

    Raises:
        UserError: not logged in, no rights, a bad name, or the Hub cannot be reached.
    """
    hub = HfApi()
    try:
        hub.whoami()
        repository = hub.create_repo(repo_id, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload model")
    except LocalTokenNotFoundError as error:
        raise UserError("You are not logged in to the Hub: run `hf auth login`, then this command again.") from error
    except HfHubHTTPError as error:
        raise UserError(f"The Hub refused {repo_id}: {_first_line(error)}") from error
    except OSError as error:
        raise UserError(f"The Hub cannot be reached ({_first_line(error)}); {folder} stays, run this again.") from error
    return str(repository)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
