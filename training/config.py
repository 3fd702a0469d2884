"""Configuration of a run, composed of the modules' dataclasses.
Flags override a YAML file: --config, the file of the resumed run, or the quickstart's file by default."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from common.command_line import FlagParser
from common.errors import Problems, UserError
from tokenizer.build.recipe import Recipe
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments
from training.checkpoints.backup import BackupArguments
from training.checkpoints.checkpoint import CheckpointArguments
from training.checkpoints.loading import find_model
from training.checkpoints.pretrained import model_of
from training.checkpoints.run_folder import CONFIG_FILE, RunArguments, run_of
from training.data.batches import BatchArguments
from training.data.run_data import DataArguments, is_store, name_of
from training.evaluation.sampling import SamplingArguments
from training.evaluation.scoring import EvaluationArguments
from training.guard.health import HealthArguments
from training.guard.stopping import StoppingArguments
from training.log.profile import ProfileArguments
from training.log.trackers import LoggingArguments
from training.plan.compatibility import MAY_DIFFER, ChangeArguments, Settings
from training.plan.plan import LengthArguments
from training.runtime.budget import BudgetArguments
from training.runtime.device import DeviceArguments
from training.runtime.hardware import CostArguments
from training.step.model import ModelArguments
from training.step.optim import OptimArguments, with_defaults

TEXT_PARTS = (CorpusArguments, VocabularyArguments, CleaningArguments, DedupArguments)
TEXT_SETTINGS = {part.name for kind in TEXT_PARTS for part in fields(kind)}
# A checkpoint records the hashes of text and tokenizer, and its config.json, instead of these settings.
DERIVED = TEXT_SETTINGS | {part.name for part in fields(ModelArguments)} - MAY_DIFFER
MAIN = (  # flags that --help explains
    *("config", "data", "tokenizer", "output_dir", "resume_from_checkpoint", "init_from", "plan", "budget"),
    *("n_layer", "n_embd", "tokens_per_step", "max_steps", "learning_rate"),
)
# Settings that --budget and --depth choose, unless they are given.
CHOSEN = {part.name for kind in (ModelArguments, OptimArguments, LengthArguments) for part in fields(kind)}
LENGTHS = {part.name for part in fields(LengthArguments)}
CHOSEN |= {"tokens_per_step", "eval_steps", "max_eval_samples", "save_steps", "save_total_limit", "logging_steps"}
PRESETS = Path(__file__).parent.parent / "presets"
QUICKSTART, CONTINUED = PRESETS / "quickstart.yaml", PRESETS / "continued.yaml"


@dataclass(frozen=True)
class TrainConfig:
    run: RunArguments
    data: DataArguments
    corpus: CorpusArguments
    vocabulary: VocabularyArguments
    cleaning: CleaningArguments
    dedup: DedupArguments
    model: ModelArguments
    batch: BatchArguments
    length: LengthArguments
    budget: BudgetArguments
    optim: OptimArguments
    device: DeviceArguments
    evaluation: EvaluationArguments
    sampling: SamplingArguments
    checkpoint: CheckpointArguments
    backup: BackupArguments
    changes: ChangeArguments
    health: HealthArguments
    stopping: StoppingArguments
    logging: LoggingArguments
    cost: CostArguments
    profile: ProfileArguments
    flags: set[str] = field(default_factory=set)  # names of the settings given on the command line
    given: set[str] = field(default_factory=set)  # `flags`, and those in a file that the command names

    @property
    def text(self) -> bool:
        """True if `data` is text, which must be tokenized first."""
        return not is_store(self.data.data)

    @property
    def checkpoints_kept(self) -> int | None:
        """Number of checkpoints to keep. It is at least two with rollback, because the newest may be from the middle of a spike."""
        limit = self.checkpoint.save_total_limit
        return max(limit, 2) if limit is not None and self.health.on_spike == "rollback" else limit

    @property
    def recipe(self) -> Recipe:
        """Recipe of the token store. It has its own seed, so that runs with different seeds are scored on the same text."""
        parts = (self.corpus, self.vocabulary, self.cleaning, self.dedup)
        return Recipe([self.data.data], *parts, vocab_size_must_fit="vocab_size" in self.flags)

    @property
    def pretrained_source(self) -> str | None:
        """Folder or Hub id of the pretrained model that a new run starts from, or None."""
        source = self.run.init_from
        return find_model(source) if source is not None and self.run.resume_from_checkpoint is None else None

    @property
    def trains_bpe(self) -> bool:
        return self.text and self.vocabulary.tokenizer is None and self.vocabulary.tokenizer_type == "bpe"

    def overridden_vocab_size(self, actual: int) -> int | None:
        """Return the requested `vocab_size` if it cannot apply because the vocabulary of the data has `actual` tokens."""
        asked = self.vocabulary.vocab_size
        return None if self.trains_bpe or asked == actual else asked

    @property
    def is_resolved(self) -> bool:
        """True if the budget is that of a file, and the run or the user decided the length afterwards."""
        return "budget" in self.given - self.flags and bool({"max_steps"} & self.given or LENGTHS & self.flags)

    def with_settings(self, settings: dict[str, Any]) -> "TrainConfig":
        """Return the configuration with other values, by flag name."""
        parts = {name: getattr(self, name) for name in PART_NAMES}
        values = {name: {key: settings[key] for key in vars(part) if key in settings} for name, part in parts.items()}
        return replace(self, **{name: replace(part, **values[name]) for name, part in parts.items()})

    def flat(self) -> dict[str, Any]:
        """Return every setting of the run by flag name. Settings about text are included only if `data` is text."""
        settings = {name: value for part in PART_NAMES for name, value in asdict(getattr(self, part)).items()}
        return settings if self.text else {name: settings[name] for name in settings if name not in TEXT_SETTINGS}

    @property
    def settings(self) -> Settings:
        """Every setting with its default and its effect on resuming."""
        defaults = {name: value for kind in PARTS for name, value in asdict(kind()).items()}
        stated = {part.name: part.metadata.get("resume") for kind in PARTS for part in fields(kind)}
        if self.budget.budget is not None:  # the length is an estimate until the run corrects it
            stated["max_steps"] = "free"
        return Settings(self.flat(), defaults, stated | dict.fromkeys(DERIVED, "derived"), self.changes.allowed)

    def problems(self) -> Iterator[str]:
        """Yield the problems that can be found without access to the data or the device."""
        for part in (self.run, self.length, self.budget, self.optim, self.settings, self.logging, self.cost):
            yield from part.problems()
        yield from self.backup.problems(self.run.output_dir)
        sources = {"data": self.data.data, "tokenizer": self.vocabulary.tokenizer, "init_from": self.pretrained_source}
        sources |= {"resume_from_checkpoint": self.run.resume_from_checkpoint}
        folder = self.run.folder.path.resolve()
        for name, source in sources.items() if self.run.overwrite_output_dir else ():
            if source is not None and os.path.exists(source) and Path(source).resolve().is_relative_to(folder):
                yield f"{name} {source} is in {self.run.output_dir}, which --overwrite_output_dir replaces; use another --output_dir."
        for name in sorted(self.flags & TEXT_SETTINGS - {"vocab_size"}) if not self.text else ():
            yield f"{name} applies to text only, but {self.data.data} is already a token store; leave it out."
        layers, family = self.model.n_layer, "modern" if self.model.is_modern else "gpt2"
        has_file = "n_layer" in self.given - self.flags
        ignored = {
            "init_from": "resume_from_checkpoint" in self.flags and "resume_from_checkpoint has other weights",
            "depth": "n_layer" in self.given and self.budget.depth != layers and f"n_layer is {layers}",
            "family": has_file and self.budget.family != family and f"the model is of the family {family}",
            "vocab_size": self.text and self.pretrained_source and "text is tokenized with the tokenizer of init_from",
            "plan_steps": not self.cost.plan and "it needs --plan",
            "torch_compile_mode": self.device.torch_compile.lower() == "false" and "torch_compile is false",
        }
        for name, reason in ignored.items():
            if name in self.flags and reason:
                yield f"{name} would be ignored, because {reason}; leave one of them out."


PART_NAMES = tuple(part.name for part in fields(TrainConfig) if part.name not in ("flags", "given"))
PARTS = tuple(part.type for part in fields(TrainConfig) if part.name in PART_NAMES)


def read_config(arguments: list[str], check: Callable[[TrainConfig], None] = lambda config: None) -> TrainConfig:
    """Read the configuration from the command line. Raise a `UserError` like `FlagParser.parse`, and if the run to resume does
    not exist, no data is named, or `check` finds problems."""
    parser = FlagParser(PARTS, "Train a GPT-2-class model on text or a token store.", main=MAIN)
    names = ("config", "resume_from_checkpoint")
    named, source = (Path(value) if (value := parser.value_of(name, arguments)) else None for name in names)
    problems = Problems()
    resumed = problems.add_of(run_of, [source]) if source is not None else None
    if named and resumed:
        problems.add(f"{resumed} has its own {CONFIG_FILE}; leave out --config and override settings with flags.")

    def compose(parts: tuple) -> TrainConfig:
        problems.refuse()
        return _composed(parts, parser.named_flags(arguments), parser.in_file, named, resumed)

    default = CONTINUED if parser.value_of("init_from", arguments) else QUICKSTART
    default = named or (resumed / CONFIG_FILE if resumed else default)
    return compose(parser.parse(arguments, default_config=default, check=lambda *parts: check(compose(parts))))


def _composed(
    parts: tuple, flags: set[str], in_file: set[str], named: Path | None, resumed: Path | None
) -> TrainConfig:
    given = flags | in_file if named or resumed or "init_from" in flags else flags
    if "budget" in in_file & flags:  # the file's length was the choice for another budget
        given -= LENGTHS - flags
    config = TrainConfig(*parts, flags=flags, given=given)
    if config.data.data is None:
        raise UserError("No training data is named: set --data to a text file, a folder or a token store.")
    config.data.data = os.path.normpath(config.data.data)
    if config.pretrained_source is not None:
        config = _with_pretrained(config)
    optim = with_defaults(config.optim, flags | in_file, config.batch.tokens_per_step, config.model)
    config = replace(config, optim=optim)
    if not (named or resumed):
        _drop_quickstart_text_settings(config)
    if config.run.output_dir is None:
        config.run.output_dir = str(resumed or Path("runs") / _run_name(named, config))
    return config


def _with_pretrained(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the architecture and, for text, the tokenizer of the pretrained model."""
    source, vocabulary = config.pretrained_source, config.vocabulary
    model = model_of(source, config.model, config.flags)
    if config.text and vocabulary.tokenizer is None:
        vocabulary = replace(vocabulary, tokenizer=source, vocab_size=None)
    return replace(config, model=model, vocabulary=vocabulary, given=config.given | vars(model).keys())


def _drop_quickstart_text_settings(config: TrainConfig) -> None:
    """Remove the settings that apply only to the quickstart's text."""
    if "vocab_size" not in config.flags and not config.trains_bpe:
        config.vocabulary.vocab_size = None
    if "data" in config.flags and "sample_prompts" not in config.flags:
        config.sampling.sample_prompts = []


def _run_name(named: Path | None, config: TrainConfig) -> str:
    """Return the name of the config file (of its folder if it is a run's own), otherwise of the data and the pretrained model, or
    `quickstart`."""
    if named is not None:
        return named.resolve().parent.name if named.name == CONFIG_FILE else named.stem
    if config.run.init_from is not None:
        return f"{name_of(config.data.data)}-from-{name_of(config.run.init_from)}"
    return name_of(config.data.data) if "data" in config.flags else QUICKSTART.stem


def dump_config(config: TrainConfig, only_changed: bool = False) -> str:
    """Return the YAML that `--config` reads back to the same run, with all settings or only those that are not the default."""
    excluded = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir", "allow_change", "profile"}
    excluded |= {"plan", "plan_device", "plan_steps", "verbose"}
    defaults = config.settings.defaults if only_changed else {}
    content = {
        name: value for name, value in config.flat().items() if value != defaults.get(name) and name not in excluded
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
