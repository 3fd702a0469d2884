"""A page to try models on: up to four, side by side on one prompt.

python -m publishing.demo runs/a runs/b
python -m publishing.demo runs/a/checkpoints/step_00001000 runs/a openai-community/gpt2 --port 7900
python -m publishing.demo user/a user/b --space user/demo          # as a Space on the Hub; --dry_run looks first
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

# isort: split
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from command_line import FlagParser, run
from errors import UserError
from limits import setting
from publishing.space import assemble_space
from publishing.upload import Repository, check_access, check_models, check_repo_id, upload
from settings_file import read_yaml
from training.checkpoint import step_of
from training.loading import find_model, model_errors
from training.metrics import read_metrics
from training.run_folder import RunFolder, is_checkpoint, run_of

MAX_MODELS = 4  # cards that fit side by side
MAX_EXAMPLES = 6  # prompts to click


@dataclass
class DemoArguments:
    models: list[str] = setting(
        [],
        "One to four run folders, checkpoints, model folders or Hub ids; may be given without the flag.",
        needed=("one or more models", "python -m publishing.demo runs/x"),
    )
    port: int | None = setting(None, "Port of the page; the first free one from 7860 on.", minimum=1, maximum=65_535)
    share: bool = setting(False, "Lend the page a public address for a week, by Gradio.")
    space: str | None = setting(None, "Publish the page as this Space, as user/name; the models must be on the Hub.")
    private: bool = setting(False, "Make a new Space private.")
    dry_run: bool = setting(False, "Assemble the Space's folder, but do not upload it.")

    def check(self) -> None:
        problems = []
        if len(self.models) > MAX_MODELS:
            problems.append(f"{len(self.models)} models are given; at most {MAX_MODELS} fit side by side.")
        if self.space is None:
            of_the_other, words = ("private", "dry_run"), "is for a Space; add --space user/name."
        else:
            of_the_other, words = ("port", "share"), "is for the page here; leave it out with --space."
            problems += [
                f"{name} is not on the Hub, from where a Space loads its models: push it with push_to_hub.py and give "
                f"its user/name."
                for name in self.models
                if Path(name).exists() or name.count("/") != 1 or name.startswith("runs/")
            ]
        problems += [f"--{name} {words}" for name in of_the_other if getattr(self, name)]
        if problems:
            raise UserError("\n".join(problems))


def main(arguments: list[str]) -> None:
    parser = FlagParser((DemoArguments,), __doc__.splitlines()[0], positional="models")
    (options,), _ = parser.parse(arguments, check=DemoArguments.check)
    if options.space is None:
        show(options.models, options.port, options.share)
    else:
        publish(options)


def show(names: list[str], port: int | None, share: bool) -> None:
    """Serve the page until it is interrupted.

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
        name, facts, prompts = describe(source)
        with model_errors():
            models.append(demo_page.load(source, name, facts))
        examples += prompts
    examples = list(dict.fromkeys(examples))[:MAX_EXAMPLES] or demo_page.EXAMPLES
    try:
        demo_page.serve(models, "Side by side", examples, port, share)
    except OSError as error:
        raise UserError(
            f"Port {port} is taken; --port takes another, or leave it out for the first free one."
        ) from error


def describe(source: str) -> tuple[str, list[str], list[str]]:
    """Return a model's name, what is known of its training, and the prompts of its run; of a model without one, its name."""
    path = Path(source)
    try:
        run = RunFolder(run_of(path))
    except UserError:
        return (path.name if path.exists() else source), [], []
    step = step_of(path) if is_checkpoint(path) else run.newest_step()
    prompts = read_yaml(run.config).get("sample_prompts") or []
    facts = [f"step {step:,}"] if step else []  # without its checkpoints: nothing
    evaluated = [entry for entry in read_metrics(run.metrics) if entry["step"] == step and "eval_loss" in entry]
    for entry in evaluated[-1:] if step else []:
        facts += [f"validation loss {entry['eval_loss']:.2f}", f"{entry['eval_bits_per_byte']:.2f} bits per byte"]
    return run.path.resolve().name, facts, prompts


def publish(options: DemoArguments) -> None:
    """Assemble the Space under runs/ and upload it, unless this is a dry run."""
    check_repo_id(options.space)
    space = Repository(options.space, "space", options.private)
    if not options.dry_run:
        check_access(space)
        check_models(options.models)
    name = space.id.split("/")[1]
    folder = assemble_space(options.models, Path("runs") / "spaces" / name, title=name)
    if options.dry_run:
        print(f"Not uploaded (--dry_run): {folder} is what would go to {space.id}.")
    else:
        print(f"Published: {upload(folder, space).url}")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
