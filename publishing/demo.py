"""Web page to try and compare up to four models: continue a prompt, chat, and see the loss of each token.

python -m publishing.demo runs/a runs/b
python -m publishing.demo runs/a/checkpoints/step_00001000 runs/a openai-community/gpt2 --port 7900
python -m publishing.demo user/a user/b --space user/demo          # as a Space on the Hub; --dry_run does not upload
python -m publishing.demo runs/a runs/b --static page              # files: the models run in the visitor's browser
"""

# First: torch reads its settings; also for Ctrl-C during the other imports.
import training.runtime.threads  # noqa: F401

import json
import shlex
import shutil
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal

from huggingface_hub import SpaceCard, SpaceCardData
from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

from common.command_line import FlagParser, run
from common.errors import Problems, UserError
from common.limits import setting
from common.removal import renew
from common.settings_file import read_yaml
from modeling_gpt2scratch.loading import TOKENIZER
from publishing.demo_models import EXAMPLES, MAX_MODELS, DemoModel, on_hub
from publishing.upload import Repository, check_access, check_models, check_repo_id, upload
from training.checkpoints.checkpoint import complete_checkpoints, step_of
from training.checkpoints.loading import find_model, model_errors
from training.checkpoints.metrics import read_metrics
from training.checkpoints.run_folder import RunFolder, is_checkpoint, run_of
from training.checkpoints.samples import read_samples
from training.report.facts import PROMPT_CHARACTERS
from training.runtime.hardware import check_kernels

MAX_EXAMPLES = 6  # maximum number of example prompts on the page
REPOSITORY = Path(__file__).parent.parent
SPACE = {f"app{suffix}": f"publishing/demo_page{suffix}" for suffix in (".py", ".css", ".html.j2")}
# No code of the models is run.
NAMES = ("__init__", "configuration_gpt2scratch", "modeling_gpt2scratch", "loading", "prompts")
CODE_FILES = ["publishing/__init__.py", "publishing/demo_models.py", *(f"modeling_gpt2scratch/{it}.py" for it in NAMES)]
SPACE |= {name: name for name in CODE_FILES}
FILES = (*SPACE, "models.json", "requirements.txt", "README.md", "modeling_gpt2scratch/*.py", "**/*.pyc")
# A Space installs gradio and Jinja2 by its sdk_version.
SPACE_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


@dataclass
class DemoArguments:
    models: list[str] = setting(
        [],
        "Runs, checkpoints, model folders or Hub ids (user/name or user/name@revision); without --static, up to 4.",
        needed=("one or more models", "python -m publishing.demo runs/x"),
    )
    port: int | None = setting(None, "Port of the page. Default: first free port from 7860.", minimum=1, maximum=65_535)
    share: bool = setting(False, "Make the page public for a week through Gradio.")
    space: str | None = setting(None, "Publish the page as this Space (user/name); the models must be on the Hub.")
    static: str | None = setting(
        None,
        "Write a page whose models run in the browser to this folder (default: runs/spaces/static); with --space, "
        "publish it. Models on the Hub must have ONNX files (push_to_hub.py --format onnx), and stay there.",
        nargs="?",
        const="runs/spaces/static",
    )
    onnx: Literal["fp32", "q8"] | None = setting(
        None, "Type of the models of a static page: 32 (default) or 8 bits per weight."
    )
    examples: list[str] = setting([], "Example prompts of a static page; default: those of the runs.", free_text=True)
    cdn: bool = setting(False, "Let a static page load onnxruntime-web from a CDN instead of its own files.")
    private: bool = setting(False, "Create a new Space as private.")
    dry_run: bool = setting(False, "Assemble the Space's folder, but do not upload it.")

    def check(self) -> None:
        problems = Problems()
        if len(self.models) > MAX_MODELS and self.static is None:
            problems.add(f"{len(self.models)} models are given; the page shows at most {MAX_MODELS}.")
        if self.space is not None:
            problems.add_of(check_repo_id, self.space)
            for name in self.models if self.static is None else []:
                if Path(name).exists() or name.partition("@")[0].count("/") != 1 or name.startswith("runs/"):
                    problems.add(
                        f"{name} is not a model on the Hub; push it with push_to_hub.py and use its user/name."
                    )
        for names, is_refused, reason in (
            (("private", "dry_run"), self.space is None, "applies only to a Space; add --space user/name."),
            (("port", "share"), self.space or self.static, "applies only to a page that this machine serves."),
            (("cdn", "examples", "onnx"), self.static is None, "applies only to a static page; add --static FOLDER."),
        ):
            for name in names if is_refused else []:
                if getattr(self, name):
                    problems.add(f"--{name} {reason}")
        problems.refuse()


def main(arguments: list[str]) -> None:
    parser = FlagParser((DemoArguments,), __doc__, positional="models")
    (options,) = parser.parse(arguments, check=DemoArguments.check)
    if options.static is None and find_spec("gradio") is None:
        raise UserError("The demo needs the package gradio: run pip install -e '.[demo]'.")
    if options.space or options.static:
        publish(options)
    else:
        show(options.models, options.port, options.share)


def show(names: list[str], port: int | None, share: bool) -> None:
    """Serve the page until interrupted. Raise a `UserError` if a model cannot be loaded or the port is in use."""
    check_kernels()
    from publishing import demo_page  # imports gradio, an optional extra

    groups, examples, samples = find_all(names)  # before a model is loaded
    with model_errors():
        for entry, *_ in groups:
            entry.load()
    text = [*samples, examples[0]][0]  # a prompt alone may be one token, which has no loss
    try:
        demo_page.serve(groups, "Language models", examples, text, server_port=port, share=share)
    except OSError as error:
        raise UserError(
            f"Port {port} is in use; set another with --port, or leave --port out to use the first free port."
        ) from error


def find_all(names: list[str]) -> tuple[list[list[DemoModel]], list[str], list[str]]:
    """Return for each name the model with its checkpoints or branches, and example prompts and samples of all."""
    groups, prompts, samples = zip(*map(find_models, names), strict=True)
    return [*groups], list(dict.fromkeys(chain(*prompts)))[:MAX_EXAMPLES] or [*EXAMPLES], [*chain(*samples)]


def find_models(name: str) -> tuple[list[DemoModel], list[str], list[str]]:
    """Return the named model with the other checkpoints or branches, and the prompts and the last samples of its
    run."""
    repository, _, revision = name.partition("@")
    if revision and not Path(name).exists():
        return on_hub(f"{find_model(repository)}@{revision}"), [], []
    path = Path(find_model(name))
    try:
        run = RunFolder(run_of(path))
    except UserError:
        own = [DemoModel(path.resolve().name, str(path.resolve()), [])]
        return own if path.exists() else on_hub(name), [], []
    scores = {entry["step"]: entry for entry in read_metrics(run.metrics) if "eval_loss" in entry}
    models, title = [], run.path.resolve().name
    for folder in dict.fromkeys([path, *complete_checkpoints(run.checkpoints)]):
        checkpoint = folder if is_checkpoint(folder) else run.checkpoint_of_model()
        step = checkpoint and step_of(checkpoint)  # None if the checkpoint was deleted
        facts = [f"step {step:,}"] if step else []
        if entry := scores.get(step):
            facts += [f"validation loss {entry['eval_loss']:.2f}", f"{entry['eval_bits_per_byte']:.2f} bits per byte"]
        models.append(DemoModel(f"{title}, {facts.pop(0)}" if is_checkpoint(folder) else title, str(folder), facts))
    samples = [*chain(*[*read_samples(run.samples).values()][-1:])]
    is_chat = (run.model / TOKENIZER[-1]).is_file()  # its texts begin with control tokens
    openings = [text[:PROMPT_CHARACTERS] for text in samples if not is_chat]
    prompts = read_yaml(run.config).get("sample_prompts") or openings
    return models, prompts, samples


def publish(options: DemoArguments) -> None:
    """Write the files of a static page, or of a Space in runs/spaces/. Upload them to the Space, if one is given and
    this is not a dry run."""
    sdk = "gradio" if options.static is None else "static"
    space = Repository(options.space, "space", options.private, sdk=sdk) if options.space else None
    title = space.id.partition("/")[2] if space else "Language models"
    folder = Path(options.static or f"runs/spaces/{title}")
    if space and not options.dry_run:
        check_access(space)
    if sdk == "gradio":
        if not options.dry_run:
            check_models(options.models)
        assemble_space(options.models, folder, title)
    else:
        from publishing.static_page import write_page  # needs the extra onnx

        groups, examples, _ = find_all(options.models)
        entries = [entry for entry, *_ in groups]
        write_page(entries, folder, title, options.examples or examples, options.onnx or "fp32", options.cdn)
        write_card(folder, SpaceCardData(title=title, sdk=sdk, short_description="Models that run in your browser"))
    if space is None:
        print(f"Wrote {folder}: serve it with python -m http.server --bind 127.0.0.1 -d {shlex.quote(str(folder))}")
    elif options.dry_run:
        print(f"Not uploaded (--dry_run): {folder} would be uploaded to {space.id}.")
    else:
        print(f"Published: {upload(folder, space).repo_url}")


def write_card(folder: Path, data: SpaceCardData) -> None:
    card = SpaceCard.from_template(data, template_path=str(Path(__file__).parent / "templates" / "space.md.j2"))
    card.save(folder / "README.md")


def assemble_space(models: list[str], destination: Path, title: str) -> Path:
    """Write a Space for `models` (Hub ids) to `destination`, replacing an earlier one, and return the folder.
    It contains the page and everything that it needs to run without this repository."""
    renew(destination, "space", FILES)
    for name, source in SPACE.items():
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / source, destination / name)
    (destination / "models.json").write_text(json.dumps({"title": title, "models": models}, indent=2) + "\n")
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    requirements = [line for line in setup["options"]["install_requires"].split() if line.startswith(SPACE_PACKAGES)]
    (destination / "requirements.txt").write_text("\n".join(requirements) + "\n")
    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=version("gradio"),
        python_version="3.11",
        app_file="app.py",
        models=list(dict.fromkeys(name.partition("@")[0] for name in models)),
        short_description="Try and compare language models",
    )
    write_card(destination, data)
    return destination


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # huggingface_hub's progress bars
    run(main)
