"""A run -> a model on the Hugging Face Hub, verified before it is uploaded.

python push_to_hub.py runs/x --repo_id user/name
python push_to_hub.py runs/x --repo_id user/name --dry_run     # all but the upload; the folder stays for inspection
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging as transformers_logging

from command_line import FlagParser, run
from errors import UserError
from publishing.hub_folder import assemble
from publishing.upload import check_repo_id, upload
from publishing.verify import verify
from training.run_folder import RunFolder, run_of


@dataclass
class PushArguments:
    run: str | None = field(default=None, metadata={"help": "The run folder; may be given without its flag."})
    repo_id: str | None = field(default=None, metadata={"help": "The repository on the Hub, as user/name."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})
    license: str | None = field(
        default=None, metadata={"help": "Licence of the weights for the model card, such as mit."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Assemble and verify, but do not upload."})


def main(arguments: list[str]) -> None:
    parser = FlagParser((PushArguments,), __doc__.splitlines()[0], positional="run")
    (push,), _ = parser.parse(arguments)
    missing = [name for name in ("run", "repo_id") if getattr(push, name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing: python push_to_hub.py runs/x --repo_id user/name")
    check_repo_id(push.repo_id)
    source = RunFolder(run_of(Path(push.run)))

    folder = assemble(source, push.repo_id, push.license, source.hub)
    verified = verify(folder)
    print(
        f"Verified in a fresh process: no missing or unexpected weights, logits differ by {verified.largest_difference:.1e}."
    )
    for path in sorted(folder.iterdir()):
        print(f"  {path.stat().st_size:>13,} bytes  {path.name}")
    if push.dry_run:
        print(f"Not uploaded (--dry_run): {folder} is what would go to {push.repo_id}.")
        return
    print(f"Published: {upload(folder, push.repo_id, push.private)}")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
