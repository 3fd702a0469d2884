"""Publish a model on the Hugging Face Hub, and verify it before and after the upload.

python push_to_hub.py runs/x --repo_id user/name
python push_to_hub.py runs/x --repo_id user/name --dry_run                        # all steps except the upload
python push_to_hub.py runs/x --repo_id user/name --checkpoint best --revisions    # also each checkpoint as a branch
python push_to_hub.py runs/x --repo_id user/name --format both --gguf f16 q8_0    # also for vLLM, llama.cpp and others
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from common.removal import discard
from publishing.card import FolderArguments
from publishing.hub_folder import TWIN, assemble, check_code, check_native
from publishing.source import Source, all_sources, find_source
from publishing.upload import Repository, check_access, check_repo_id, download, published_files, upload
from publishing.verify import Expected, Published, expect, verify
from training.checkpoints.checkpoint import as_os_error
from training.checkpoints.run_folder import HUB_FILES

EXAMPLE = "python push_to_hub.py runs/x --repo_id user/name"


@dataclass
class PushArguments:
    run: str | None = setting(None, "A run, a checkpoint or a model folder.", needed=("a run", EXAMPLE))
    repo_id: str | None = setting(None, "The repository on the Hub, as user/name.", needed=("a repository", EXAMPLE))
    checkpoint: str | None = setting(
        None, "Checkpoint of the run: last (the default), best (lowest validation loss of those kept) or a step."
    )
    revisions: bool = setting(False, "Also publish every kept checkpoint as a branch such as step0001000-tokens33M.")
    private: bool = setting(False, "Create a new repository as private.")
    dry_run: bool = setting(False, "Assemble and verify, but do not upload.")


def main(arguments: list[str]) -> None:
    parser = FlagParser((PushArguments, FolderArguments), __doc__.splitlines()[0], positional="run")
    push, options = parser.parse(arguments, check=lambda push, options: check_repo_id(push.repo_id))
    source = find_source(Path(push.run), push.checkpoint)
    if push.revisions and source.run is None:
        raise UserError(
            f"{source.model} is a model without a run, so it has no checkpoints for --revisions; leave the flag out."
        )
    # All checkpoints are checked before the first one is published.
    checkpoints = all_sources(source.run) if push.revisions else []
    if options.has_code and not options.trust_folder_code:
        for each in (source, *checkpoints):
            check_code(each)
    if options.format != "gpt2scratch" or options.gguf:
        check_native(source)
    repository = Repository(push.repo_id, private=push.private)
    if not push.dry_run:
        check_access(repository)
    try:
        with FileLock(source.hub.with_name(f".{source.hub.name}.lock"), timeout=0):
            url = publish(source, repository, options, push.dry_run)
            for checkpoint in checkpoints:
                publish(checkpoint, replace(repository, branch=checkpoint.branch), options, push.dry_run)
    except Timeout as error:  # another process already verifies and uploads this folder
        raise UserError(f"{source.model} is being published by another process; wait until it ends.") from error
    except BrokenPipeError:  # the program that reads stdout has ended
        raise
    except Exception as error:  # a full disk, a folder without write permission, a checkpoint that the run just deleted
        sentence = f"Could not publish {source.model}: {as_os_error(error)}; fix that and run this command again."
        raise UserError(sentence) from error
    if url is not None:
        print(f"Published: {url}")


def publish(source: Source, repository: Repository, options: FolderArguments, dry_run: bool) -> str | None:
    """Assemble, verify and upload the folder, then verify the uploaded files. Return the URL, or None for a dry run."""
    folder, as_branch = source.hub, ""
    if repository.branch is not None:
        folder, as_branch = folder.with_name(f"{folder.name}-{repository.branch}"), f" as {repository.branch}"
    expected = expect(source)
    assemble(source, repository, options, folder, expected.text)
    print(f"{source.model}{as_branch}:")
    verify_formats(Published(str(folder.resolve()), options.has_code), expected, options)
    sizes = {name: path.stat().st_size for name, path in published_files(folder).items()}
    for name, size in [*sizes.items(), ("total", sum(sizes.values()))]:
        print(f"  {size:>15,} bytes  {name}", flush=True)
    if dry_run:
        print(f"Not uploaded (--dry_run): {folder} would be uploaded to {repository.id}{as_branch}.")
        return None
    uploaded = upload(folder, repository)
    with tempfile.TemporaryDirectory() as cache:
        download(repository.id, uploaded.oid, Path(cache), folder)
        there = Published(repository.id, options.has_code, uploaded.oid, Path(cache))
        verify_formats(there, expected, options)
    if repository.branch is not None:
        discard(folder, HUB_FILES)
    return str(uploaded.repo_url)


def verify_formats(published: Published, expected: Expected, options: FolderArguments) -> None:
    """Verify a folder or repository and its native twin, of which only the logits are compared."""
    verify(published, expected)
    if options.has_twin:
        verify(replace(published, subfolder=TWIN, has_code=False), replace(expected, windows={}, run_loss=None))


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # huggingface_hub's progress bars
    run(main)
