"""The configuration of a run: the modules' own dataclasses, composed; flags over a YAML file over the quickstart."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from command_line import FlagParser, UserError
from tokenizer.corpus import CorpusArguments
from tokenizer.vocabulary import VocabularyArguments
from training.batches import BatchArguments
from training.checkpoint import CheckpointArguments
from training.data import DataArguments, is_store
from training.device import DeviceArguments
from training.evaluate import EvaluationArguments
from training.journal import JournalArguments, tracker_problems
from training.length import LengthArguments
from training.model import ModelArguments
from training.optim import OptimArguments
from training.run_folder import CONFIG_FILE, RunArguments, resume_source
from training.sampling import SamplingArguments

QUICKSTART = Path(__file__).parent.parent / "presets" / "quickstart.yaml"


@dataclass(frozen=True)
class TrainConfig:
    run: RunArguments
    data: DataArguments
    corpus: CorpusArguments
    vocabulary: VocabularyArguments
    model: ModelArguments
    batch: BatchArguments
    length: LengthArguments
    optim: OptimArguments
    device: DeviceArguments
    evaluation: EvaluationArguments
    sampling: SamplingArguments
    checkpoint: CheckpointArguments
    journal: JournalArguments
    given: set[str] = field(default_factory=set)  # what the user set, by flag or in a config file of their own

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def text(self) -> bool:
        """Whether `data` is text, which has to be tokenized first."""
        return not is_store(self.data.data)

    @property
    def trains_bpe(self) -> bool:
        return self.text and self.vocabulary.tokenizer is None and self.vocabulary.tokenizer_type == "bpe"

    def flat(self) -> dict[str, Any]:
        """Every field under its flag's name."""
        parts = [getattr(self, part.name) for part in fields(self) if part.name != "given"]
        return {name: value for part in parts for name, value in asdict(part).items()}

    def problems(self) -> list[str]:
        """What can be seen to be wrong without looking at data or device."""
        found = self.optim.problems() + tracker_problems(self.journal.report_to)
        for name, value in (
            ("eval_steps", self.evaluation.eval_steps),
            ("save_steps", self.checkpoint.save_steps),
            ("logging_steps", self.journal.logging_steps),
            ("max_eval_samples", self.evaluation.max_eval_samples),
            ("save_total_limit", self.checkpoint.save_total_limit),
        ):
            if value is not None and value < 1:
                found.append(f"{name} is {value}; it must be at least 1.")
        if self.sampling.sample_tokens < 0 or self.sampling.sample_temperature < 0:
            found.append("sample_tokens and sample_temperature must not be negative.")
        return found


PARTS = tuple(part.type for part in fields(TrainConfig) if part.name != "given")


def read_config(arguments: list[str]) -> TrainConfig:
    """From the command line. Where a run is resumed, its own config.yaml stands behind the flags.

    Raises:
        UserError: see `FlagParser.parse`; or the run to resume is not there.
    """
    parser = FlagParser(PARTS, "Train a GPT-2-class model: python train_accelerate.py --data TEXT_OR_TOKEN_STORE")
    resumed = resume_source(arguments)
    filled, given = parser.parse(arguments, default_config=resumed / CONFIG_FILE if resumed else QUICKSTART)
    config = TrainConfig(*filled, given=given)
    if config.data.data is None:
        raise UserError("Name what to train on: --data, a text file, a folder or a token store.")
    if "vocab_size" not in given and not config.trains_bpe:
        config.vocabulary.vocab_size = None  # the quickstart's word on it is about text
    if resumed and "output_dir" not in given:
        config.run.output_dir = str(resumed)
    elif config.run.output_dir is None:
        config.run.output_dir = str(Path("runs") / _run_name(arguments, config, parser))
    return config


def _run_name(arguments: list[str], config: TrainConfig, parser: FlagParser) -> str:
    """The name of the config file; without one, of the data; without either, `quickstart`."""
    if named := parser.named_config(arguments):
        return named.stem
    return Path(config.data.data).stem if "data" in config.given else QUICKSTART.stem


def write_config(config: TrainConfig, path: Path) -> None:
    """A file that `--config` reads back to the same run."""
    told_elsewhere = ("resume_from_checkpoint", "overwrite_output_dir")
    content = {name: value for name, value in config.flat().items() if value is not None and name not in told_elsewhere}
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
