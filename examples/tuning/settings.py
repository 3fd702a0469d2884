"""Flags of the recipes."""

import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from common.command_line import FlagParser, reports_for_all, run
from common.errors import UserError, counted
from common.limits import setting
from tokenizer.corpus import files
from tokenizer.corpus.hub import HubDataset
from tokenizer.corpus.named_data import dataset_of
from tokenizer.corpus.units import Corpus, CorpusArguments, kind_of
from training.checkpoints.loading import name_of_model
from training.runtime.device import keep_accelerate_from_sharding

EXAMPLE = "{program} runs/x --data FILE"
REPLAY = 0.5  # measured in benchmarks/results/finetuning-cpu.json
HUB_RECORDS = 20_000  # of a Hub dataset


@dataclass
class Tuning:
    model: str | None = setting(None, "A run, a checkpoint, a model folder or a Hub id.", needed=("a model", EXAMPLE))
    data: str | None = setting(
        None,
        "File, folder or pattern of the new text, chats or pairs, a name of `python -m tokenizer.pretokenize --list`, "
        "or a Hub dataset.",
        needed=("a file", EXAMPLE),
    )
    max_documents: int | None = setting(
        None,
        f"Use only the first N records or text files; default: {HUB_RECORDS:,} of a Hub dataset, all of a file.",
        minimum=1,
    )
    output_dir: str | None = setting(None, "New folder for the model; default: runs/MODEL-DATA.")
    lora_rank: int = setting(16, "Rank of the adapters; 0 trains all weights, without LoRA.", maximum=1024)
    learning_rate: float | None = setting(
        None, "Peak learning rate; default: from the model's width.", above=0, maximum=100
    )
    num_train_epochs: float = setting(3.0, "Passes over the new data.", above=0, maximum=10**6)
    per_device_train_batch_size: int = setting(16, "Examples per step and device.", minimum=1, maximum=65_536)
    replay_fraction: float | None = setting(
        None, f"Fraction of examples from the original training text; default: {REPLAY} if it is available.", below=1
    )
    original_data: str | None = setting(None, "Token store of the original text; default: the run's own.")
    seed: int = setting(1337, "Random seed for order, adapters and the held-out split.", below=2**32)
    # Of the learning rate: Schulman et al. 2025, "LoRA Without Regret", with `lora_alpha` 32 as here.
    lora_factor = 10

    def __post_init__(self) -> None:
        for name in ("model", "data", "output_dir"):  # a shell expands `~` neither in a file nor after `=`
            setattr(self, name, (path := getattr(self, name)) and os.path.expanduser(path))

    @property
    def folder(self) -> Path:
        """Output folder."""
        suffix = files.suffix(self.data_name) if os.path.isfile(self.data) else ""
        return Path(self.output_dir or f"runs/{self.name}-{self.data_name.removesuffix(suffix)}")

    @property
    def data_name(self) -> str:
        """Name of the Hub dataset, of the file without the suffix of its compression, or of the folder.
        A pattern has the name of the folder before its first wildcard."""
        if dataset_of(self.data) is not None:
            return Path(self.data.split(":")[0].split("@")[0]).name
        beginning, *pattern = re.split(r"[*?[]", self.data, maxsplit=1)
        is_pattern = pattern and not os.path.lexists(self.data)
        path = Path(os.path.abspath(os.path.dirname(beginning) if is_pattern else self.data))
        return path.stem if files.is_compressed(path.name) else path.name

    @property
    def name(self) -> str:
        """Name of the base model."""
        return Path(name_of_model(self.model)).name

    @cached_property
    def hub(self) -> HubDataset | None:
        """Dataset on the Hub at its current commit, or None for a file."""
        dataset = dataset_of(self.data)
        return dataset and dataset.pinned()

    @cached_property
    def files(self) -> dict[str, str]:
        """Kind of each file of `data`. These are the files with records, if there are any: a folder of them may also
        have a README.md, for example. Otherwise, they are the files of text."""
        kinds = {file.path: kind_of(file.path) for file in Corpus([self.data], CorpusArguments()).all_files}
        used = {path: kind for path, kind in kinds.items() if kind != "text"}
        wanted = "records" if used else "text"
        skipped = files.BinaryError if os.path.isfile(self.data) else files.UnreadableError
        for path in () if used else kinds:
            with suppress(skipped), files.readable(path):
                files.check_text(files.head(path), path)
                used[path] = "text"
        if not used:
            raise UserError(f"{self.data} has only binary or damaged files; pass text or records.")
        if left_out := sorted(kinds.keys() - used.keys()):
            more = " ..." * (len(left_out) > 1)
            print(f"Left out {counted(len(left_out), 'file')} without readable {wanted}: {left_out[0]}{more}")
        return used

    @property
    def is_text(self) -> bool:
        return self.hub is None and set(self.files.values()) <= {"text"}

    def check(self) -> None:
        if dataset_of(self.data) is None:
            _ = self.files  # raises a `UserError` if there are none
        if not self.folder.name or self.folder.is_mount():
            raise UserError(f"{self.folder} cannot be replaced by the finished model; name a new folder in it.")
        if self.folder.is_file() or any(self.folder.glob("*")):  # empty after a stopped or refused command
            raise UserError(f"{self.folder} already exists; choose a new folder with --output_dir.")

    def decide(self, width: int, has_original: bool) -> None:
        """Set options that were left out, for a model of this width, and print them."""
        if self.learning_rate is None:  # `get_lr` of the Tinker cookbook (Thinking Machines) for models like Llama
            factor = self.lora_factor if self.lora_rank else 1
            self.learning_rate = float(f"{factor * 5e-5 * (2000 / width) ** 0.781:.2g}")
        if self.replay_fraction is None:
            self.replay_fraction = REPLAY if has_original else 0.0
        replay = f"{self.replay_fraction:.0%} of the examples are" if self.replay_fraction else "no example is"
        print(f"Peak learning rate {self.learning_rate:g} (width {width}); {replay} replayed original text.")


def start(recipe: Callable[[list[str]], None]) -> None:
    """Run a recipe as a command. Of several processes, only the first one prints to stdout. Without a launcher, only
    the first GPU is visible: Trainer would use all of them in one process (`DataParallel`). The model is not sharded,
    even if the launcher asks for it, because one process saves it."""
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # TRL and PEFT use an old name
    keep_accelerate_from_sharding()
    disable_progress_bars()  # of `datasets`: short, and several for each step of TRL
    transformers_logging.disable_progress_bar()
    if not reports_for_all():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until the process ends
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if "LOCAL_RANK" not in os.environ else ():
        if name in os.environ or name.startswith("CUDA"):
            os.environ[name] = os.environ.get(name, "0").split(",")[0]
    run(recipe)


def parse(documentation: str, arguments: list[str], *packages: str, kind: type[Tuning] = Tuning) -> Any:
    """Return the settings of the flags; raise a `UserError` with all problems, or if a package is not installed."""
    parser = FlagParser((kind,), documentation, positional="model")
    (tuning,) = parser.parse(arguments, check=kind.check)
    packages += ("peft",) if tuning.lora_rank else ()
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"Fine-tuning needs {' and '.join(missing)}: run pip install -e '.[finetuning]'")
    return tuning
