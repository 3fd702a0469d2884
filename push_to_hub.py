"""Publish a model on the Hugging Face Hub, and verify it before and after the upload.

python push_to_hub.py runs/x --repo_id user/name
python push_to_hub.py runs/x --repo_id user/name --dry_run                        # all steps except the upload
python push_to_hub.py runs/x --repo_id user/name --checkpoint best --revisions    # also each checkpoint as a branch
python push_to_hub.py runs/x --repo_id user/name --format both onnx --gguf f16    # also for vLLM, browsers, llama.cpp
python push_to_hub.py runs/x runs/y --space user/page --static    # a page on which both run in the visitor's browser
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from common.command_line import FlagParser, flag_name, is_flag, run
from common.errors import UserError, disk_errors
from common.limits import setting
from common.removal import discard
from publishing.card import FolderArguments
from publishing.hub_folder import TWIN, assemble, check_native
from publishing.onnx_file import check_onnx
from publishing.published_model import PublishedModel, all_folders, find_folder, hub_folder_of
from publishing.upload import (
    Repository,
    check_access,
    check_repo_id,
    download,
    metadata_on_hub,
    published_files,
    upload,
)
from publishing.verify import Expected, Location, expect, verify
from training.checkpoints.run_folder import HUB_FILES, is_checkpoint

EXAMPLE = "python push_to_hub.py runs/x --repo_id user/name"


@dataclass
class PushArguments:
    run: str | None = setting(None, "A run, a checkpoint or a model folder.", needed=("a run", EXAMPLE))
    repo_id: str | None = setting(
        None,
        "The repository on the Hub, as user/name. For a page: --space, see python -m publishing.demo --help.",
        needed=("a repository", EXAMPLE),
    )
    checkpoint: str | None = setting(
        None,
        "Checkpoint of the run: last, best (lowest validation loss of those kept) or a step. Default: that of model/.",
    )
    revisions: bool = setting(False, "Also publish every kept checkpoint as a branch such as step0001000-tokens33M.")
    private: bool = setting(False, "Create a new repository as private.")
    dry_run: bool = setting(False, "Assemble and verify, but do not upload.")


def main(arguments: list[str]) -> None:
    if any(is_flag(argument) and flag_name(argument) == "space" for argument in arguments):  # a page, not a model
        from publishing import demo

        demo.main(arguments)
        return
    parser = FlagParser((PushArguments, FolderArguments), __doc__, positional="run")
    push, options = parser.parse(arguments, check=lambda push, options: check_repo_id(push.repo_id))
    folder = find_folder(Path(push.run), push.checkpoint)
    if push.revisions and not is_checkpoint(folder):
        raise UserError(
            f"{folder} is a model without a run, so it has no checkpoints for --revisions; leave the flag out."
        )
    # All checkpoints are checked before the first one is published.
    checkpoints = all_folders(folder) if push.revisions else []
    if options.has_native or options.gguf:
        check_native(folder)
    if options.onnx_types:
        check_onnx(folder, options.onnx_types)
    repository, hub = Repository(push.repo_id, private=push.private), hub_folder_of(folder)
    if not push.dry_run:
        check_access(repository)
    with disk_errors(folder, "fix that and run this command again"):
        try:
            with FileLock(hub.with_name(f".{hub.name}.lock"), timeout=0):
                url = publish(PublishedModel.read(folder), hub, repository, options, push.dry_run)
                for checkpoint in checkpoints:
                    release = PublishedModel.read(checkpoint)
                    branch = replace(repository, branch=release.training.branch)
                    folder_of_branch = hub.with_name(f"{hub.name}-{branch.branch}")
                    publish(release, folder_of_branch, branch, options, push.dry_run)
                    discard(folder_of_branch, HUB_FILES)
        except Timeout as error:  # another process already verifies and uploads this folder
            raise UserError(f"{folder} is being published by another process; wait until it ends.") from error
    if url is not None:
        print(f"Published: {url}")


def publish(
    release: PublishedModel, hub: Path, repository: Repository, options: FolderArguments, dry_run: bool
) -> str | None:
    """Assemble the folder `hub`, verify and upload it, then verify the uploaded files.
    Return the URL, or None for a dry run."""
    as_branch = f" as {repository.branch}" if repository.branch is not None else ""
    if not dry_run:
        release = release.with_metadata(metadata_on_hub(repository.id))
    reference = expect(release)
    assemble(release, repository, options, hub, reference)
    print(f"{release.folder}{as_branch}:")
    verify_formats(Location(str(hub.resolve()), options.has_code), reference, options)
    sizes = {name: path.stat().st_size for name, path in published_files(hub).items()}
    for name, size in [*sizes.items(), ("total", sum(sizes.values()))]:
        print(f"  {size:>15,} bytes  {name}", flush=True)
    if dry_run:
        name = hub if repository.branch is None else "it"
        print(f"Not uploaded (--dry_run): {name} would be uploaded to {repository.id}{as_branch}.")
        return None
    commit = upload(hub, repository)
    with tempfile.TemporaryDirectory() as cache:
        download(repository.id, commit.oid, Path(cache), hub)
        verify_formats(Location(repository.id, options.has_code, commit.oid, Path(cache)), reference, options)
    return str(commit.repo_url)


def verify_formats(location: Location, reference: Expected, options: FolderArguments) -> None:
    """Verify a folder or repository and its native twin, of which only the logits are compared. ONNX files are verified
    when they are written, and the uploaded ones are equal."""
    if options.has_weights:
        verify(location, reference)
    if options.has_twin:
        verify(replace(location, subfolder=TWIN, has_code=False), replace(reference, windows={}))


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # huggingface_hub's progress bars
    run(main)
