"""Configuration of a run, composed of the modules' dataclasses.
Flags override a YAML file: --config, the file of the resumed run, or the quickstart's file by default."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from common.command_line import FlagParser, fill
from common.errors import UserError
from common.settings_file import read_yaml
from tokenizer.build.recipe import Recipe
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments
from training.checkpoints.backup import BackupArguments, earlier_run
from training.checkpoints.checkpoint import CheckpointArguments
from training.checkpoints.loading import find_model
from training.checkpoints.pretrained import architecture_of
from training.checkpoints.run_folder import CONFIG_FILE, RunArguments, run_of
from training.data.batches import BatchArguments
from training.data.run_data import DataArguments, is_store, name_of
from training.evaluation.sampling import SamplingArguments
from training.evaluation.scoring import EvaluationArguments
from training.guard.health import HealthArguments
from training.guard.stopping import StoppingArguments
from training.log.profile import ProfileArguments
from training.log.trackers import LoggingArguments
from training.plan.compatibility import MAY_DIFFER, ChangeArguments, RunSettings
from training.plan.plan import LengthArguments
from training.runtime.device import DeviceArguments
from training.runtime.hardware import CostArguments
from training.runtime.price import BudgetArguments
from training.step.induction import induction_problems
from training.step.model import ModelArguments
from training.step.optim import OptimArguments, with_defaults

TEXT_PARTS = (CorpusArguments, VocabularyArguments, CleaningArguments, DedupArguments)
TEXT_SETTINGS = {part.name for kind in TEXT_PARTS for part in fields(kind)}
MODEL_SETTINGS = {part.name for part in fields(ModelArguments)}
# A checkpoint records the hashes of text and tokenizer, and its config.json, instead of these settings.
DERIVED_SETTINGS = TEXT_SETTINGS | MODEL_SETTINGS - MAY_DIFFER
MAIN = (  # flags that --help explains
    *("config", "data", "tokenizer", "output_dir", "resume_from_checkpoint", "init_from", "plan", "budget"),
    *("n_layer", "n_embd", "tokens_per_step", "max_steps", "learning_rate"),
)
LENGTHS = {part.name for part in fields(LengthArguments)}  # three ways to state one length
# Settings that --budget and --depth choose with the model, unless they are given. The vocabulary is chosen before.
OPTIMIZATION = {part.name for part in fields(OptimArguments)}
CHOICES = MODEL_SETTINGS | LENGTHS | OPTIMIZATION
CHOICES |= {"tokens_per_step", "eval_steps", "max_eval_samples", "save_steps", "save_total_limit", "logging_steps"}
CHOICES |= {"load_best_model_at_end"}
# A run's config.yaml has none of these, because they apply to one command.
COMMAND_SETTINGS = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir", "allow_change", "profile"}
COMMAND_SETTINGS |= {"plan", "plan_device", "plan_steps", "verbose"}
PRESETS = Path(__file__).parent.parent / "presets"
QUICKSTART, CONTINUATION = PRESETS / "quickstart.yaml", PRESETS / "continued.yaml"
FILES = {"config", "resume_from_checkpoint"}  # flags that name the file of settings
# file: named by the command, or of the pretrained model or run that it continues. quickstart: the file that is read
# otherwise. chosen: by --budget, the optimizer or the data. A setting without a source has its default.
Source = Literal["flag", "file", "quickstart", "chosen"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run. Nothing changes them: `with_settings` makes another configuration."""

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
    sources: Mapping[str, Source]  # of each setting that has not its default
    in_file: frozenset[str]  # names of the settings in the file of the command, also if a flag replaces them

    @property
    def flags(self) -> set[str]:
        """Names of the settings given on the command line."""
        return {name for name, source in self.sources.items() if source == "flag"}

    @property
    def given(self) -> set[str]:
        """Names of the settings given on the command line or in a file. No choice replaces them."""
        return {name for name, source in self.sources.items() if source in ("flag", "file")}

    @property
    def text(self) -> bool:
        """True if `data` is text, which must be tokenized first."""
        return not is_store(self.data.data)

    @property
    def checkpoints_kept(self) -> int | None:
        """Number of checkpoints to keep: at least two with rollback, because the newest may be from a spike."""
        limit = self.checkpoint.save_total_limit
        return max(limit, 2) if limit is not None and self.health.on_spike == "rollback" else limit

    @property
    def recipe(self) -> Recipe:
        """Recipe of the token store. It has its own seed: runs with other seeds are scored on the same text."""
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

    @property
    def has_model_file(self) -> bool:
        """True if a file names the model, whose size flags may change."""
        return "n_layer" in self.in_file | (self.given - self.flags)

    def overridden_vocab_size(self, actual: int) -> int | None:
        """Return the requested `vocab_size` if the vocabulary of the data has another number of tokens, `actual`."""
        size = self.vocabulary.vocab_size
        return None if self.trains_bpe or size == actual else size

    @property
    def is_resolved(self) -> bool:
        """True if budget or depth are those of a file, and the run or the user decided the length afterwards."""
        has_length = "max_steps" in self.given or bool(LENGTHS & self.flags)
        is_sized = {"max_nonfinite_steps", "spike_z_score"} <= self.in_file  # a run has written it; presets lack these
        return not {"budget", "depth"} & self.flags and has_length and is_sized

    @property
    def values(self) -> dict[str, Any]:
        """Every setting by flag name."""
        return {name: value for part in PART_NAMES for name, value in asdict(getattr(self, part)).items()}

    def with_settings(self, settings: Mapping[str, Any], source: Source = "chosen") -> "TrainConfig":
        """Return the configuration with other values, by flag name, from `source` unless they were given."""
        sources = {**self.sources, **dict.fromkeys(settings.keys() - self.given, source)}
        return TrainConfig(*fill(PARTS, self.values | settings), sources, self.in_file)

    def flat(self) -> dict[str, Any]:
        """Return every setting of the run by flag name. Settings about text are included only if `data` is text."""
        return {name: value for name, value in self.values.items() if self.text or name not in TEXT_SETTINGS}

    @property
    def settings(self) -> RunSettings:
        """Every setting with its default and its effect on resuming."""
        effects = {part.name: part.metadata.get("resume") for kind in PARTS for part in fields(kind)}
        if self.budget.budget is not None and not self.is_resolved:  # the length is an estimate
            effects |= dict.fromkeys({"max_steps"} | {"max_train_tokens"} - self.given, "free")
        effects |= dict.fromkeys(DERIVED_SETTINGS, "derived")
        if "initializer_range" not in self.given:  # chosen for new weights; older runs may have another rule's
            effects["initializer_range"] = "free"
        return RunSettings(self.flat(), DEFAULTS, effects, self.changes.allowed)

    def problems(self) -> Iterator[str]:
        """Yield the problems that can be found without access to the data or the device."""
        parts = (self.run, self.length, self.budget, self.batch, self.optim, self.settings, self.logging, self.cost)
        if self.budget.chooses and not {"learning_rate", "min_learning_rate"} <= self.given:  # `resolve` checks them
            parts = tuple(part for part in parts if part is not self.optim)
        for part in parts:
            yield from part.problems()
        yield from self.backup.problems(self.run.output_dir)
        sources = {"data": self.data.data, "tokenizer": self.vocabulary.tokenizer, "init_from": self.pretrained_source}
        sources |= {"resume_from_checkpoint": self.run.resume_from_checkpoint}
        folder = self.run.folder.path.resolve()
        for name, source in sources.items() if self.run.overwrite_output_dir else ():
            if source is not None and os.path.exists(source) and Path(source).resolve().is_relative_to(folder):
                yield (
                    f"{name} {source} is in {self.run.output_dir}, which --overwrite_output_dir replaces; "
                    f"use another --output_dir."
                )
        for name in sorted(self.flags & TEXT_SETTINGS - {"vocab_size"}) if not self.text else ():
            yield f"{name} applies to text only, but {self.data.data} is already a token store; leave it out."
        layers, family = self.model.n_layer, "modern" if self.model.is_modern else "gpt2"
        reasons = {
            "init_from": "resume_from_checkpoint" in self.flags and "resume_from_checkpoint has other weights",
            "depth": "n_layer" in self.given and self.budget.depth != layers and f"n_layer is {layers}",
            "family": self.has_model_file and self.budget.family != family and f"the model is of the family {family}",
            "vocab_size": self.text and self.pretrained_source and "text is tokenized with the tokenizer of init_from",
            "plan_steps": not self.cost.plan and "it needs --plan",
            "torch_compile_mode": self.device.torch_compile.lower() == "false" and "torch_compile is false",
            "tokenizer_type": self.vocabulary.tokenizer and f"the tokenizer is {self.vocabulary.tokenizer}",
        }
        for name, reason in reasons.items():
            if name in self.flags and reason:
                yield f"{name} would be ignored, because {reason}; leave one of them out."


PART_NAMES = tuple(part.name for part in fields(TrainConfig) if part.name not in ("sources", "in_file"))
PARTS = tuple(part.type for part in fields(TrainConfig) if part.name in PART_NAMES)
DEFAULTS = {name: value for kind in PARTS for name, value in asdict(kind()).items()}  # of every setting


def read_config(arguments: list[str], check: Callable[[TrainConfig], None] = lambda config: None) -> TrainConfig:
    """Read the configuration from the command line. Raise a `UserError` like `FlagParser.parse`, and if the run to
    resume does not exist, no data is named, or `check` finds problems."""

    def default_file(flags: dict[str, Any]) -> Path:
        if "resume_from_checkpoint" in flags:
            return run_of(Path(flags["resume_from_checkpoint"])) / CONFIG_FILE
        return CONTINUATION if "init_from" in flags else QUICKSTART

    def build(flags: dict[str, Any], file: dict[str, Any], path: Path) -> TrainConfig:
        config = _decide(_given(flags, file, path), flags, path)
        check(config)
        return config

    parser = FlagParser(PARTS, "Train a GPT-2-class model on text or a token store.", main=MAIN)
    return parser.parse(arguments, default_file=default_file, build=build)


def _given(flags: dict[str, Any], file: dict[str, Any], path: Path) -> TrainConfig:
    """Return the configuration with the values of flags and of the file at `path`, which replace the defaults."""
    if "config" in flags and (source := (file | flags).get("resume_from_checkpoint")) is not None:
        run = run_of(Path(source))
        raise UserError(f"{run} has its own {CONFIG_FILE}; leave out --config and override settings with flags.")
    ignored = set()  # settings of the file
    if "resume_from_checkpoint" in flags:
        ignored = {"output_dir"}  # the first versions wrote it, and the run may have left that folder
        if names := sorted(COMMAND_SETTINGS & file.keys() - ignored):
            raise UserError(f"{path} sets {', '.join(names)}, which only a command may; remove it there.")
    if LENGTHS & flags.keys() or ("budget" in flags and file.get("budget")):  # the file's length is for its own budget
        ignored |= LENGTHS
    if "init_from" in flags and "config" not in flags:  # the rates of the default file are AdamW's
        is_other = flags.get("optimizer", DEFAULTS["optimizer"]) != DEFAULTS["optimizer"]
        ignored |= CHOICES if "budget" in flags else OPTIMIZATION if is_other else set()
    file = {name: value for name, value in file.items() if name not in ignored}
    values = file | flags
    if values.get("data") is None:
        raise UserError("No training data is named: set --data to a text file, a folder or a token store.")
    data, normal = values["data"], os.path.normpath(values["data"])
    real, real_of_normal = (os.path.realpath(os.path.expanduser(path)) for path in (data, normal))
    values["data"] = normal if real == real_of_normal else str(Path(data))  # `..` may follow a link
    source = "file" if (FILES | {"init_from"}) & flags.keys() else "quickstart"
    sources = {name: source for name, value in file.items() if value is not None}
    in_file = frozenset(sources) if source == "file" else frozenset()
    sources |= dict.fromkeys(flags.keys() - {"config"}, "flag")
    return TrainConfig(*fill(PARTS, values), sources, in_file)


def _decide(config: TrainConfig, flags: dict[str, Any], path: Path) -> TrainConfig:
    """Return the configuration with what a pretrained model, the optimizer and the data decide."""
    if (source := config.pretrained_source) is not None:
        is_own_file = "init_from" not in config.flags  # the file's context is for this model
        flags_of_model = config.flags | ({"n_positions"} & config.given if is_own_file else set())
        settings = architecture_of(source, config.model, flags_of_model)
        if config.text and "tokenizer" not in config.flags and config.vocabulary.tokenizer != source:
            settings |= {"tokenizer": source, "vocab_size": None}
        config = config.with_settings(settings, "file")
    is_pretrained = config.pretrained_source is not None
    optim = with_defaults(config.optim, {*config.sources}, config.batch.tokens_per_step, config.model, is_pretrained)
    settings = {name: value for name, value in vars(optim).items() if name not in config.sources}
    if not FILES & flags.keys():  # the settings of the default file for its own text
        if "vocab_size" not in flags and not config.trains_bpe:
            settings["vocab_size"] = None
        if "data" in flags and "sample_prompts" not in flags:
            settings["sample_prompts"] = []
    is_other = is_pretrained or (flags.keys() & MODEL_SETTINGS and any(induction_problems(config.model)))
    if "induction_init" not in flags and is_other:  # a model that the file does not know
        settings["induction_init"] = False
    if config.run.output_dir is None:
        settings["output_dir"] = _default_folder(config, flags, path)
    config = config.with_settings(settings)
    if (initializer_range := config.model.initializer_range) is None:
        earlier = earlier_run(config.run, config.backup.backup_dir)  # whose weights an older version may have made
        has_begun = earlier is not None and earlier.newest_step()
        recorded = read_yaml(earlier.config).get("initializer_range") if has_begun else None
        initializer_range = recorded or config.model.usual_initializer_range
    return config.with_settings({"initializer_range": initializer_range})


def _default_folder(config: TrainConfig, flags: dict[str, Any], path: Path) -> str:
    """Return the run that is resumed, or a folder with the name of the config file (of its folder if it is a run's
    own), otherwise of the data and the pretrained model, or `quickstart`."""
    if "resume_from_checkpoint" in flags:
        return str(path.parent)
    data = name_of(config.data.data)
    if "config" in flags:
        name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    elif config.run.init_from is not None:
        name = f"{data}-from-{name_of(config.run.init_from)}"
    else:
        name = data if "data" in flags else QUICKSTART.stem
    return str(Path("runs") / name)


def dump_config(config: TrainConfig, omits_defaults: bool = False) -> str:
    """Return the YAML that `--config` reads back to the same run, with all settings or those that differ from
    defaults."""
    # A budget decides the choices.
    defaults = {name: value for name, value in DEFAULTS.items() if name not in CHOICES} if omits_defaults else {}
    content = {
        name: value
        for name, value in config.flat().items()
        if value != defaults.get(name) and name not in COMMAND_SETTINGS
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
