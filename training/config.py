"""The configuration of a run: the modules' own dataclasses, composed; flags over a YAML file, which is the quickstart's
where none is named and the run's own where one is resumed."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from command_line import FlagParser
from errors import UserError
from tokenizer.cleaning import CleaningArguments
from tokenizer.corpus import CorpusArguments
from tokenizer.dedup import DedupArguments
from tokenizer.recipe import Recipe
from tokenizer.vocabulary import VocabularyArguments
from training.backup import BackupArguments
from training.batches import BatchArguments
from training.checkpoint import CheckpointArguments
from training.compatibility import ChangeArguments, Settings
from training.data import DataArguments, is_store, name_of
from training.device import DeviceArguments
from training.guard.stopping import StoppingArguments
from training.hardware import CostArguments
from training.health import HealthArguments
from training.model import ModelArguments
from training.optim import OptimArguments
from training.plan import LengthArguments
from training.profile import ProfileArguments
from training.run_folder import CONFIG_FILE, RunArguments, run_of
from training.sampling import SamplingArguments
from training.scoring import EvaluationArguments
from training.trackers import JournalArguments

ABOUT = (CorpusArguments, VocabularyArguments, CleaningArguments, DedupArguments)
ABOUT_TEXT = {part.name for kind in ABOUT for part in fields(kind)}
MAIN = (  # flags that --help explains
    *("config", "data", "output_dir", "resume_from_checkpoint", "plan"),
    *("n_layer", "n_embd", "tokens_per_step", "max_steps", "learning_rate"),
)
QUICKSTART = Path(__file__).parent.parent / "presets" / "quickstart.yaml"


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
    optim: OptimArguments
    device: DeviceArguments
    evaluation: EvaluationArguments
    sampling: SamplingArguments
    checkpoint: CheckpointArguments
    backup: BackupArguments
    changes: ChangeArguments
    health: HealthArguments
    stopping: StoppingArguments
    journal: JournalArguments
    cost: CostArguments
    profile: ProfileArguments
    flags: set[str] = field(default_factory=set)  # what the user set on the command line

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def text(self) -> bool:
        """Whether `data` is text, which has to be tokenized first."""
        return not is_store(self.data.data)

    @property
    def checkpoints_kept(self) -> int | None:
        """Two at least where a run may go back: the newest may have been written in the middle of a spike."""
        limit = self.checkpoint.save_total_limit
        return max(limit, 2) if limit is not None and self.health.on_spike == "rollback" else limit

    @property
    def recipe(self) -> Recipe:
        """Of the tokens. Its seed is not the run's: runs that differ in seed are scored on the same text."""
        parts = (self.corpus, self.vocabulary, self.cleaning, self.dedup)
        return Recipe([self.data.data], *parts, vocab_size_must_fit="vocab_size" in self.flags)

    @property
    def trains_bpe(self) -> bool:
        return self.text and self.vocabulary.tokenizer is None and self.vocabulary.tokenizer_type == "bpe"

    def overridden_vocab_size(self, actual: int) -> int | None:
        """Return the `vocab_size` that was asked for and cannot apply, because the data brought `actual` tokens."""
        asked = self.vocabulary.vocab_size
        return None if self.trains_bpe or asked == actual else asked

    def flat(self) -> dict[str, Any]:
        """Every setting of the run under its flag's name; those about text only where there is text to read."""
        parts = [getattr(self, part.name) for part in fields(self) if part.name != "flags"]
        settings = {name: value for part in parts for name, value in asdict(part).items()}
        return settings if self.text else {name: value for name, value in settings.items() if name not in ABOUT_TEXT}

    @property
    def settings(self) -> Settings:
        """Every setting with its default, and what it means for resuming."""
        defaults = {name: value for kind in PARTS for name, value in asdict(kind()).items()}
        meanings = {
            part.name: part.metadata["resume"] for kind in PARTS for part in fields(kind) if "resume" in part.metadata
        }
        return Settings(self.flat(), defaults, meanings | dict.fromkeys(ABOUT_TEXT, "derived"), self.changes.allowed)

    def problems(self) -> list[str]:
        """What can be seen to be wrong without looking at data or device."""
        found = [
            problem
            for part in (self.run, self.length, self.optim, self.settings, self.journal, self.cost)
            for problem in part.problems()
        ]
        found += self.backup.problems(self.run.output_dir)
        if not self.text:
            for name in sorted(self.flags & ABOUT_TEXT - {"vocab_size"}):
                found.append(f"{name} is about text, but {self.data.data} is a token store already; leave it out.")
        return found


PARTS = tuple(part.type for part in fields(TrainConfig) if part.name != "flags")


def read_config(arguments: list[str], check: Callable[[TrainConfig], None] = lambda config: None) -> TrainConfig:
    """Read the configuration from the command line; raise a `UserError` as `FlagParser.parse` does, where the run to resume does
    not exist, no data is named, or for what `check` finds."""
    parser = FlagParser(PARTS, "Train a GPT-2-class model on text or a token store.", main=MAIN)
    names = ("config", "resume_from_checkpoint")
    named, source = (Path(value) if (value := parser.value_of(name, arguments)) else None for name in names)
    resumed, no_source = None, None
    try:
        resumed = run_of(source) if source is not None else None
        if named and resumed:
            no_source = f"{resumed} brings its own {CONFIG_FILE}; leave --config out and override settings by flags."
    except UserError as error:
        no_source = str(error)

    def compose(parts: tuple) -> TrainConfig:
        if no_source is not None:
            raise UserError(no_source)
        return _composed(parts, set(parser.named_flags(arguments)), named, resumed)

    behind = named or (resumed / CONFIG_FILE if resumed else QUICKSTART)
    filled, _ = parser.parse(arguments, default_config=behind, check=lambda *parts: check(compose(parts)))
    return compose(filled)


def _composed(parts: tuple, flags: set[str], named: Path | None, resumed: Path | None) -> TrainConfig:
    config = TrainConfig(*parts, flags=flags)
    if config.data.data is None:
        raise UserError("Name what to train on: --data, a text file, a folder or a token store.")
    config.data.data = os.path.normpath(config.data.data)
    if not (named or resumed):
        _forget_its_text(config)
    if config.run.output_dir is None:
        config.run.output_dir = str(resumed or Path("runs") / _run_name(named, config))
    return config


def _forget_its_text(config: TrainConfig) -> None:
    """What the quickstart says of its own text does not hold for the user's."""
    if "vocab_size" not in config.flags and not config.trains_bpe:
        config.vocabulary.vocab_size = None
    if "data" in config.flags and "sample_prompts" not in config.flags:
        config.sampling.sample_prompts = []


def _run_name(named: Path | None, config: TrainConfig) -> str:
    """The name of the config file (of its folder, for a run's own); without one, of the data, or `quickstart`."""
    if named is not None:
        return named.resolve().parent.name if named.name == CONFIG_FILE else named.stem
    return name_of(config.data.data) if "data" in config.flags else QUICKSTART.stem


def dump_config(config: TrainConfig) -> str:
    """Return the YAML that `--config` reads back to the same run."""
    told_elsewhere = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir", "allow_change", "profile"}
    told_elsewhere |= {"plan", "plan_device", "plan_steps"}
    content = {name: value for name, value in config.flat().items() if value is not None and name not in told_elsewhere}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
