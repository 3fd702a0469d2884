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
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging as transformers_logging

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from command_line import FlagParser, run
from errors import UserError
from limits import setting
from publishing.card import is_kept
from publishing.hub_folder import OURS, TWIN, FolderArguments, assemble, check_code
from publishing.revisions import branch_of
from publishing.source import Source, all_sources, find_source
from publishing.upload import check_access, check_repo_id, download, published_files, upload
from publishing.verify import Expected, Published, expect, verify
from removal import discard
from training.checkpoint import as_os_error
from training.run_folder import HUB_FILES


@dataclass
class PushArguments:
    run: str | None = setting(None, "A run, a checkpoint or a model folder; may be given without its flag.")
    repo_id: str | None = setting(None, "The repository on the Hub, as user/name.")
    checkpoint: str | None = setting(
        None, "Of a run: last, best (the lowest validation loss of those kept) or a step; last where left out."
    )
    revisions: bool = setting(False, "Also every kept checkpoint, as a branch such as step0001000-tokens33M.")
    private: bool = setting(False, "Make a new repository private.")
    dry_run: bool = setting(False, "Assemble and verify, but do not upload.")

    def check(self) -> None:
        problems = []
        if missing := [name for name in ("run", "repo_id") if getattr(self, name) is None]:
            problems.append(f"{' and '.join(missing)} missing: python push_to_hub.py runs/x --repo_id user/name")
        for needed, find in (
            (self.repo_id, lambda: check_repo_id(self.repo_id)),
            (self.run, lambda: find_source(Path(self.run), self.checkpoint)),
        ):
            try:
                if needed is not None:
                    find()
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))


def main(arguments: list[str]) -> None:
    parser = FlagParser((PushArguments, FolderArguments), __doc__.splitlines()[0], positional="run")
    (push, wanted), _ = parser.parse(arguments, check=lambda push, _: push.check())
    source = find_source(Path(push.run), push.checkpoint)
    if push.revisions and source.run is None:
        raise UserError(f"{source.model} is a model without a run, so there are no checkpoints for --revisions.")
    # All or none: a damaged one is found before the first is published.
    checkpoints = all_sources(source.run) if push.revisions else []
    if wanted.has_code and not wanted.trust_folder_code:
        for each in (source, *checkpoints):
            check_code(each)
    if not push.dry_run:
        check_access(push.repo_id, push.private)

    with _told_of_the_disk(source), _alone(source):
        url = publish(source, push, wanted)
        for checkpoint in checkpoints:
            publish(checkpoint, push, wanted, branch_of(checkpoint))
    if url is not None:
        print(f"Published: {url}")


@contextmanager
def _alone(source: Source) -> Iterator[None]:
    """Two that publish the same would verify one folder and upload another."""
    lock = FileLock(source.hub.with_name(f".{source.hub.name}.lock"), timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise UserError(f"{source.model} is being published by another process; wait for its end.") from error


@contextmanager
def _told_of_the_disk(source: Source) -> Iterator[None]:
    """A full disk, a folder that cannot be written, a checkpoint that the run deletes for a newer one, as one sentence."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what we print
        raise
    except Exception as error:
        of_the_disk = as_os_error(error)
        if not isinstance(of_the_disk, OSError):
            raise
        raise UserError(f"Could not publish {source.model}: {of_the_disk}; mend that, then run this again.") from error


def publish(source: Source, push: PushArguments, wanted: FolderArguments, branch: str | None = None) -> str | None:
    """Assembles the folder, verifies it, uploads it, verifies what is there then; returns the address."""
    folder = source.hub if branch is None else source.hub.with_name(f"{source.hub.name}-{branch}")
    expected = expect(source)
    assemble(source, push.repo_id, wanted, folder, expected.text, branch)
    print(f"{source.model}{f' as {branch}' if branch else ''}:")
    check(Published(str(folder.resolve()), has_code=wanted.has_code), expected, wanted)
    sizes = {name: path.stat().st_size for name, path in published_files(folder).items()}
    for name, size in [*sizes.items(), ("in all", sum(sizes.values()))]:
        print(f"  {size:>15,} bytes  {name}", flush=True)
    if push.dry_run:
        where = f"{push.repo_id}{f' as {branch}' if branch else ''}"
        print(f"Not uploaded (--dry_run): {folder} is what would go to {where}.")
        return None
    uploaded = upload(folder, push.repo_id, private=push.private, branch=branch, ours=OURS, keep=is_kept)
    with tempfile.TemporaryDirectory() as cache:
        download(push.repo_id, uploaded.commit, Path(cache), folder)
        there = Published(push.repo_id, uploaded.commit, has_code=wanted.has_code, cache=Path(cache))
        check(there, expected, wanted)
    if branch is not None:
        discard(folder, HUB_FILES)
    return uploaded.url


def check(published: Published, expected: Expected, wanted: FolderArguments) -> None:
    """
    Raises:
        UserError: it does not work for a stranger as it does here.
    """
    verified = verify(published, expected)
    loss = f"validation loss not compared: {expected.no_loss_because}"
    if verified.loss is not None:
        loss = f"validation loss {verified.loss:.4f} (the run: {expected.run_loss:.4f})"
    print(
        f"Verified in a fresh process ({published.where}): no missing or unexpected weights, logits differ by "
        f"{verified.largest_difference:.1e}, {loss}. It writes:\n  {verified.prompt!r} -> {verified.text!r}"
    )
    if wanted.has_twin:
        twin = verify(published.twin(TWIN), expected.without_loss())
        print(f"The native twin, without remote code: logits differ by {twin.largest_difference:.1e}.")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
