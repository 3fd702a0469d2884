"""Model to publish, with all facts for its card, its files and its verification. Only this module, `model_index` and
the demo read the run folder."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import CONFIG, TOKENIZER, own_file, tokenizer_files
from modeling_gpt2scratch.prompts import add_turn_end
from publishing.model_index import harness_results
from publishing.upload import FRONT_MATTER, SIGNATURE_PATTERN, metadata_of
from tokenizer.encoding import vocabulary
from tokenizer.store.store import TokenStore
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.loading import load_own_model, model_errors
from training.checkpoints.metrics import read_metrics
from training.checkpoints.run_folder import FOLDERS, RunFolder, find_checkpoint, is_checkpoint, run_of
from training.checkpoints.samples import read_samples
from training.config import TrainConfig, read_config
from training.data.run_data import find_recorded_store
from training.report.report import evaluation_of, facts_of, sections_of

ROOT_PAGE = "docs/root_model.md"  # page of the model in this repository, whose README.md is about the repository
LICENSE = {"license", "license_name", "license_link"}  # metadata that belong together


@dataclass(frozen=True)
class Training:
    """Training of a published checkpoint."""

    step: int
    tokens: int  # number of tokens that the checkpoint was trained on
    validation: dict[str, float] | None  # the run's metrics at this step
    config: TrainConfig
    store: TokenStore | None  # with the tokens that the checkpoint recorded, if it still exists
    samples: list[str]  # texts that the model wrote

    @property
    def branch(self) -> str:
        """Branch of the repository for this checkpoint, such as `step0001000-tokens33M` (a scheme like Pythia's)."""
        return f"step{self.step:07d}-tokens{in_short(self.tokens)}"


@dataclass(frozen=True)
class PublishedModel:
    """Model of a checkpoint, or of a folder without a run."""

    folder: Path
    model: GPT2ScratchForCausalLM  # in float32
    tokenizer: PreTrainedTokenizerBase
    training: Training | None  # None for a folder without a run
    facts: dict[str, Any] | None  # of report.json, or None if there is a page that a person wrote
    metadata: dict[str, Any]  # of the page that a person wrote
    sections: dict[str, str]  # of the page that a person wrote, by heading
    evaluation: dict[str, Any]  # results of evaluate.py for these weights
    harness: list[EvalResult]  # newest results of lm-eval for these weights, by task
    plots: list[Path]

    @staticmethod
    def read(folder: Path) -> "PublishedModel":
        """Read a folder of `find_folder`. Raise a `UserError` if a part is missing, damaged, or a link out of the
        folder."""
        run = RunFolder(run_of(folder)) if is_checkpoint(folder) else None
        if names := [name for name in (CONFIG, TOKENIZER[0]) if not (folder / name).is_file()]:
            raise UserError(f"{folder} cannot be published: it lacks {', '.join(names)}.")
        for path in run.files if run is not None else [folder / "README.md"]:
            _check_link(path.parent, path.name)
        model, facts = load_own_model(folder), facts_of(run) if run is not None else None
        for name in (*tokenizer_files(folder), ROOT_PAGE):
            _check_link(folder, name)
        tokenizer = vocabulary.load(folder)
        add_turn_end(model, tokenizer)  # older versions did not save it
        # A run may have results of other weights than these.
        home, page = run or RunFolder(folder), folder / "README.md" if run is None else run.report
        metadata, sections = read_page(page) if facts is None else ({}, {})
        if run is None and (folder / ROOT_PAGE).is_file():
            sections = read_page(folder / ROOT_PAGE)[1]
        return PublishedModel(
            folder=folder,
            model=model,
            tokenizer=tokenizer,
            training=_training(run, folder) if run is not None else None,
            facts=facts,
            metadata=metadata,
            sections=sections,
            evaluation=evaluation_of(home, folder) or {},
            harness=harness_results(home, folder),
            plots=[plot for plot in run.plots.values() if plot.is_file()] if run is not None else [],
        )

    def with_metadata(self, earlier: dict[str, Any]) -> "PublishedModel":
        """Return the model with the metadata of its repository where its own page has none, without those about the
        earlier model. Tags are joined."""
        dropped = set(LICENSE) if LICENSE & self.metadata.keys() else set()
        if self.training is not None:
            dropped |= {"datasets", "metrics"}
            dropped |= {"base_model", "base_model_relation"} if self.training.config.run.init_from is None else set()
        tags = [*self.metadata.get("tags", []), *earlier.get("tags", [])]
        metadata = {name: value for name, value in earlier.items() if name not in dropped}
        names = sorted({"base_model", "datasets"} & metadata.keys() - self.metadata.keys())
        if names and self.training is None:
            kept = ", ".join(f"{name} {metadata[name]}" for name in names)
            print(f"Kept from the card on the Hub: {kept}; if that is wrong, delete it there and push again.")
        return replace(self, metadata=metadata | self.metadata | {"tags": list(dict.fromkeys(tags))})


def find_folder(path: Path, choice: str | None) -> Path:
    """Return the checkpoint or model folder to publish. `choice` selects the checkpoint of a run: `last`, `best` or a
    step (None: that of the run's model). Raise a `UserError` if it does not exist or is damaged."""
    real = path.resolve()  # of `.` in a checkpoint or in a run's model/
    is_part = is_checkpoint(real) or (real.name in FOLDERS and RunFolder(real.parent).is_run())
    path = real if is_part else path
    if (path / CONFIG).is_file() and not is_part:
        if choice is not None:
            raise UserError(f"{path} is a model without a run and has no checkpoint {choice}; leave --checkpoint out.")
        return path
    run = RunFolder(run_of(path))
    if not checkpoints.complete_checkpoints(run.checkpoints):
        raise UserError(f"{run.path} cannot be published: it has no checkpoint yet; train until one is saved.")
    if is_checkpoint(path) and choice is None:
        return _whole(path, "Publish another checkpoint of the run.")
    return _whole(find_checkpoint(path, choice), "Publish another one with --checkpoint STEP.")


def all_folders(checkpoint: Path) -> list[Path]:
    """Return every kept checkpoint of the run, oldest first. Raise a `UserError` if one of them is damaged."""
    remedy = "Delete that folder, or publish without --revisions."
    return [_whole(path, remedy) for path in checkpoints.complete_checkpoints(checkpoint.parent)]


def _whole(checkpoint: Path, remedy: str) -> Path:
    if (problem := checkpoints.damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint} is damaged: {problem}. {remedy}")
    return checkpoint


def hub_folder_of(folder: Path) -> Path:
    """Return the folder in which the files for the Hub are assembled."""
    if is_checkpoint(folder):
        return RunFolder(run_of(folder)).hub
    return folder.resolve().with_name(f"{folder.resolve().name}-hub")


def copy_files(folder: Path, patterns: tuple[str, ...], destination: Path) -> None:
    """Copy the files of a model that match a pattern. Files that a checkpoint's manifest does not list are left out.
    Raise a `UserError` for a link that leads out of the folder."""
    listed = checkpoints.listed_files(folder) if is_checkpoint(folder) else None
    for path in (path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if listed is None or name in listed:
            _check_link(folder, name)
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, destination / name)  # without its mode, which may forbid writing


def _check_link(folder: Path, name: str) -> None:
    with model_errors(f"{folder} cannot be published: {{}}; replace the link by the file."):
        own_file(folder, name)


def in_short(number: int) -> str:
    """Return a number in short form with at least two digits: 33M, 1740K, and 2000M for 2 billion."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= 10 * size:
            return f"{round(number / size)}{unit}"
    return str(number)


def _training(run: RunFolder, checkpoint: Path) -> Training:
    state = checkpoints.load_state(checkpoint)
    config = read_config(["--resume_from_checkpoint", str(run.path.absolute())])
    validations = {entry["step"]: entry for entry in read_metrics(run.metrics) if "eval_loss" in entry}
    return Training(
        step=state.position.step,
        tokens=state.position.tokens,
        validation=validations.get(state.position.step),
        config=config,
        store=find_recorded_store(config.data.data, state.settings["data"]),
        samples=[text for texts in read_samples(run.samples).values() for text in texts if text],
    )


def read_page(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata and the sections of a page that was written by hand. Both are empty if it does not exist.
    Raise a `UserError` if the metadata is not YAML."""
    page = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    try:
        metadata = metadata_of(page)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The metadata of {path} is not YAML: {' '.join(str(error).split())}; correct it.") from error
    sections = sections_of(SIGNATURE_PATTERN.sub("", FRONT_MATTER.sub("", page)).strip())
    sections[""] = re.sub(r"\A# .*\n*", "", sections[""]).strip()
    return metadata, sections
