"""Checkpoint -> world: a model on the Hugging Face Hub, verified before it is uploaded and again after.

python push_to_hub.py runs/x --repo_id user/name
python push_to_hub.py runs/x --repo_id user/name --dry_run                        # all but the upload; the folder stays
python push_to_hub.py runs/x --repo_id user/name --checkpoint best --revisions    # each checkpoint as a branch, too
python push_to_hub.py runs/x --repo_id user/name --format both --gguf f16 q8_0    # also for vLLM, llama.cpp and others
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

# isort: split
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging as transformers_logging

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from command_line import FlagParser, Problems, run
from errors import UserError
from limits import setting
from publishing.card import Edition, FolderArguments, is_kept
from publishing.hub_folder import TWIN, assemble, check_code
from publishing.source import Source, all_sources, find_source
from publishing.upload import Repository, check_access, check_repo_id, download, published_files, upload
from publishing.verify import Expected, Published, expect, verify
from removal import discard
from training.checkpoint import as_os_error
from training.run_folder import HUB_FILES

EXAMPLE = "python push_to_hub.py runs/x --repo_id user/name"


@dataclass
class PushArguments:
    run: str | None = setting(
        None, "A run, a checkpoint or a model folder; may be given without its flag.", needed=("a run", EXAMPLE)
    )
    repo_id: str | None = setting(None, "The repository on the Hub, as user/name.", needed=("a repository", EXAMPLE))
    checkpoint: str | None = setting(
        None, "Of a run: last, best (the lowest validation loss of those kept) or a step; last where left out."
    )
    revisions: bool = setting(False, "Also every kept checkpoint, as a branch such as step0001000-tokens33M.")
    private: bool = setting(False, "Make a new repository private.")
    dry_run: bool = setting(False, "Assemble and verify, but do not upload.")


def check(push: PushArguments, options: FolderArguments) -> None:
    """Raise a `UserError` with all that is wrong with repository and model."""
    found = Problems()
    found.add_of(check_repo_id, [push.repo_id])
    found.add_of(find_source, [Path(push.run), push.checkpoint])
    found.refuse()


def main(arguments: list[str]) -> None:
    parser = FlagParser((PushArguments, FolderArguments), __doc__.splitlines()[0], positional="run")
    (push, options), _ = parser.parse(arguments, check=check)
    source = find_source(Path(push.run), push.checkpoint)
    if push.revisions and source.run is None:
        raise UserError(f"{source.model} is a model without a run, so there are no checkpoints for --revisions.")
    # All or none: a damaged one is found before the first is published.
    checkpoints = all_sources(source.run) if push.revisions else []
    if options.has_code and not options.trust_folder_code:
        for each in (source, *checkpoints):
            check_code(each)
    if not push.dry_run:
        check_access(Repository(push.repo_id, private=push.private))

    with _disk_errors(source), _publishing_alone(source):
        url = publish(source, push, Edition(push.repo_id, options=options))
        for checkpoint in checkpoints:
            publish(checkpoint, push, Edition(push.repo_id, checkpoint.branch, options))
    if url is not None:
        print(f"Published: {url}")


@contextmanager
def _publishing_alone(source: Source) -> Iterator[None]:
    """Refuse a second process: it would verify one folder and upload another."""
    try:
        with FileLock(source.hub.with_name(f".{source.hub.name}.lock"), timeout=0):
            yield
    except Timeout as error:
        raise UserError(f"{source.model} is being published by another process; wait for its end.") from error


@contextmanager
def _disk_errors(source: Source) -> Iterator[None]:
    """Turn a full disk, a folder that cannot be written, a checkpoint that the run deletes meanwhile into one sentence."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what we print
        raise
    except Exception as error:
        of_the_disk = as_os_error(error)
        if not isinstance(of_the_disk, OSError):
            raise
        sentence = f"Could not publish {source.model}: {of_the_disk}; correct that, then run this again."
        raise UserError(sentence) from error


def publish(source: Source, push: PushArguments, edition: Edition) -> str | None:
    """Assemble the folder, verify it, upload it, verify what is there then; return the address."""
    folder, branch, options = source.hub, edition.branch, edition.options
    if branch is not None:
        folder = folder.with_name(f"{folder.name}-{branch}")
    as_branch = f" as {branch}" if branch is not None else ""
    expected = expect(source)
    assemble(source, edition, folder, expected.text)
    print(f"{source.model}{as_branch}:")
    check_published(Published(str(folder.resolve()), has_code=options.has_code), expected, options)
    sizes = {name: path.stat().st_size for name, path in published_files(folder).items()}
    for name, size in [*sizes.items(), ("total", sum(sizes.values()))]:
        print(f"  {size:>15,} bytes  {name}", flush=True)
    if push.dry_run:
        print(f"Not uploaded (--dry_run): {folder} is what would go to {push.repo_id}{as_branch}.")
        return None
    repository = Repository(push.repo_id, private=push.private, branch=branch)
    uploaded = upload(folder, repository, ours=HUB_FILES, keep=is_kept)
    with tempfile.TemporaryDirectory() as cache:
        download(push.repo_id, uploaded.commit, Path(cache), folder)
        there = Published(push.repo_id, uploaded.commit, has_code=options.has_code, cache=Path(cache))
        check_published(there, expected, options)
    if branch is not None:
        discard(folder, HUB_FILES)
    return uploaded.url


def check_published(published: Published, expected: Expected, options: FolderArguments) -> None:
    """Verify a folder or repository and print the result; raise a `UserError` where it does not work for others."""
    verified = verify(published, expected)
    loss, where = verified["loss"], "the Hub" if published.cache is not None else "the folder"
    compared = f"validation loss not compared: {expected.no_loss_because}"
    if loss is not None:
        compared = f"validation loss {loss:.4f} (the run: {expected.run_loss:.4f})"
    print(
        f"Verified in a fresh process (from {where}): no missing or unexpected weights, logits differ by "
        f"{verified['difference']:.1e}, {compared}. It writes:\n  {verified['prompt']!r} -> {verified['text']!r}"
    )
    if options.has_twin:
        twin = replace(published, subfolder=TWIN, has_code=False)
        differs_by = verify(twin, replace(expected, windows={}, run_loss=None))["difference"]
        print(f"The native twin, without remote code: logits differ by {differs_by:.1e}.")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
