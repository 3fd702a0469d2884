"""A page to try models on: up to four, side by side on one prompt.

python -m publishing.demo runs/a runs/b
python -m publishing.demo runs/a/checkpoints/step_00001000 runs/a openai-community/gpt2 --port 7900
python -m publishing.demo user/a user/b --space user/demo          # as a Space on the Hub; --dry_run looks first
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

# isort: split
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from command_line import FlagParser, read_yaml, run
from errors import UserError
from modeling_gpt2scratch.loading import ModelError
from publishing.space import assemble_space
from publishing.upload import check_access, check_models, check_repo_id, upload
from training.checkpoint import step_of
from training.loading import find_model
from training.metrics import read_metrics
from training.run_folder import RunFolder, is_checkpoint, run_of

AT_MOST = 4  # cards that fit beside each other
CHIPS = 6  # example prompts


@dataclass
class DemoArguments:
    models: list[str] = field(
        default_factory=list,
        metadata={
            "help": "One to four run folders, checkpoints, model folders or Hub ids; may be given without the flag."
        },
    )
    port: int | None = field(
        default=None,
        metadata={"help": "Port of the page; the first free one from 7860 on.", "minimum": 1, "maximum": 65_535},
    )
    share: bool = field(default=False, metadata={"help": "Lend the page a public address for a week, by Gradio."})
    space: str | None = field(
        default=None, metadata={"help": "Publish the page as this Space, as user/name; the models must be on the Hub."}
    )
    private: bool = field(default=False, metadata={"help": "Make a new Space private."})
    dry_run: bool = field(default=False, metadata={"help": "Assemble the Space's folder, but do not upload it."})

    def check(self) -> None:
        problems = []
        if not self.models:
            problems.append("Name one or more models: python -m publishing.demo runs/x")
        if len(self.models) > AT_MOST:
            problems.append(f"{len(self.models)} models are given; at most {AT_MOST} fit side by side.")
        if self.space is None:
            problems += [
                f"--{name} is for a Space; add --space user/name."
                for name in ("private", "dry_run")
                if getattr(self, name)
            ]
        else:
            problems += [
                f"--{name} is for the page here; leave it out with --space."
                for name, given in (("port", self.port is not None), ("share", self.share))
                if given
            ]
            problems += [
                f"{name} is not on the Hub, from where a Space loads its models: push it with push_to_hub.py and give "
                f"its user/name."
                for name in self.models
                if Path(name).exists() or name.count("/") != 1 or name.startswith("runs/")
            ]
        if problems:
            raise UserError("\n".join(problems))


def main(arguments: list[str]) -> None:
    parser = FlagParser((DemoArguments,), __doc__.splitlines()[0], positional="models")
    (options,), _ = parser.parse(arguments, check=DemoArguments.check)
    if options.space is None:
        show(options.models, options.port, options.share)
    else:
        publish(options.models, options.space, options.private, options.dry_run)


def show(names: list[str], port: int | None, share: bool) -> None:
    """Serves the page until it is interrupted.

    Raises:
        UserError: gradio is not installed, a model cannot be loaded, or the port is taken.
    """
    try:
        from publishing import demo_page  # needs an extra
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError(
            "The demo needs gradio, which is not installed: pip install -e '.[demo]' installs it."
        ) from error

    sources = [find_model(name) for name in names]
    models, examples = [], []
    for source in sources:
        name, facts, prompts = from_its_run(source)
        try:
            models.append(demo_page.load(source, name, facts))
        except ModelError as error:
            raise UserError(str(error)) from error
        examples += prompts
    examples = list(dict.fromkeys(examples))[:CHIPS] or demo_page.EXAMPLES
    try:
        demo_page.serve(models, "Side by side", examples, port, share)
    except OSError as error:
        raise UserError(
            f"Port {port} is taken; --port takes another, or leave it out for the first free one."
        ) from error


def from_its_run(source: str) -> tuple[str, list[str], list[str]]:
    """A model's name, what is known of its training, and the prompts of its run; of a model outside of a run, its name."""
    path = Path(source)
    try:
        run = RunFolder(run_of(path))
    except UserError:
        return (path.name if path.exists() else source), [], []
    step = step_of(path) if is_checkpoint(path) else run.newest_step()
    evaluated = [entry for entry in read_metrics(run.metrics) if entry["step"] == step and "eval_loss" in entry]
    prompts = read_yaml(run.config).get("sample_prompts") or []
    known = trained(step, evaluated[-1] if evaluated else {}) if step else []  # without its checkpoints: nothing
    return run.path.resolve().name, known, prompts


def trained(step: int, evaluation: dict[str, Any]) -> list[str]:
    """How far it was trained, and its figures on held-out text."""
    facts = [f"step {step:,}"]
    for name, words in (("eval_loss", "validation loss {:.2f}"), ("eval_bits_per_byte", "{:.2f} bits per byte")):
        if name in evaluation:
            facts.append(words.format(evaluation[name]))
    return facts


def publish(models: list[str], space: str, private: bool, dry_run: bool) -> None:
    """Assembles the Space under runs/ and uploads it, if this is no dry run."""
    check_repo_id(space)
    if not dry_run:
        check_access(space, private, "space")
        check_models(models)
    name = space.split("/")[1]
    folder = assemble_space(models, Path("runs") / "spaces" / name, title=name)
    if dry_run:
        print(f"Not uploaded (--dry_run): {folder} is what would go to {space}.")
        return
    print(f"Published: {upload(folder, space, private=private, repo_type='space', space_sdk='gradio').url}")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
