"""Convert text, or a dataset of a Python program, into a token store.

python -m tokenizer.pretokenize --input my.txt --output data/my
python -m tokenizer.pretokenize --input books/ notes.jsonl.zst --output data/books --vocab_size 16000 --dedup near
python -m tokenizer.pretokenize --input user/dataset:config:split@revision --tokenizer user/model --output data/theirs
python -m tokenizer.pretokenize --import_tokens train.bin --dtype uint16 --tokenizer user/model --output data/ids
python -m tokenizer.pretokenize --input crawl/ --output data/crawl --shard 3/64   # on one of 64 machines; then --merge

    from tokenizer import pretokenize
    store = pretokenize(dataset, "data/mine", vocab_size=32_000)          # a Dataset or an IterableDataset

After an interruption, the same command resumes. The store is the same to the byte for any number of processes.
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import numbers
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from common.command_line import FlagParser, run
from common.errors import Problems, UserError
from common.limits import setting
from common.terminal import show
from tokenizer.build import export, store_builder
from tokenizer.build.imported import ImportArguments, import_store
from tokenizer.build.recipe import SEED, Recipe
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.documents import NO_LIMIT
from tokenizer.corpus.files import unpack_command
from tokenizer.corpus.given import GivenDataset
from tokenizer.corpus.hub import offline_only_inside
from tokenizer.corpus.named_data import listed
from tokenizer.corpus.units import Corpus, CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments
from tokenizer.store.store import TokenStore

SETTING_TYPES = (str, os.PathLike, numbers.Number, list, tuple, type(None))  # of the settings of `pretokenize`
MAIN = (  # flags that `--help` explains
    *("input", "output", "vocab_size", "tokenizer_type", "tokenizer", "cleaning", "dedup", "text_column"),
    *("validation_fraction", "num_proc"),
)


@dataclass
class PretokenizeArguments:
    input: list[str] = setting(
        [],
        "Text: files, folders or globs (plain text, jsonl, json, csv, tsv, also as .gz, .zst or .bz2; parquet), Hub "
        "datasets as user/name:config:split@revision, or names of --list.",
    )
    output: str | None = setting(None, "Folder of the token store to write.")
    weights: list[float] = setting(
        [],
        "Number of times that the documents of each input are used for training: 2, 0.5 (half of them), ...",
        above=0,
        maximum=1000,
    )
    seed: int = setting(
        SEED,
        "Seed for selecting validation documents, and the documents of a weight such as 0.5.",
        minimum=-(10**30),
        maximum=10**30,
    )
    num_proc: int | None = setting(None, "Worker processes; by default at most one per core.", minimum=1, maximum=1024)
    shard: str | None = setting(
        None, "Process only shard i of n, given as i/n with i from 0 to n - 1; run once with --merge afterwards."
    )
    merge: bool = setting(False, "Merge the shards. All of them must be finished.")
    export: Literal["parquet"] | None = setting(None, "Also write a Hub dataset, with a card, to OUTPUT-parquet.")
    compress: bool = setting(
        False,
        "Also pack the store into OUTPUT.tar.zst, which `tar` unpacks and `python -m tokenizer.inspect` verifies.",
    )
    quiet: bool = setting(False, "Print errors only.")
    list: bool = setting(False, "Print the data sets that have a name, and exit.")  # the last: it hides the type

    @property
    def share(self) -> tuple[int, int] | None:
        return tuple(map(int, self.shard.split("/"))) if self.shard is not None else None

    def problems(self) -> Iterator[str]:
        if self.shard is None:
            return
        flags = [name for name in ("merge", "export", "compress") if getattr(self, name)]
        if not re.fullmatch(r"\d{1,9}/\d{1,9}", self.shard) or not self.share[0] < self.share[1]:
            yield f"shard is {self.shard}; it must be i/n with i from 0 to n - 1: 0/4, 1/4, 2/4, 3/4."
        if flags:
            yield f"shard cannot be combined with {' and '.join(flags)}: run all shards first, then --merge."

    def recipe(self, given: dict[str, GivenDataset], *parts) -> Recipe:
        return Recipe(self.input, *parts, self.seed, self.weights, given)


def check(given: dict[str, GivenDataset], options: PretokenizeArguments, ids: ImportArguments, *parts) -> None:
    """Raise a `UserError` with all problems that can be found before the text is read, one per line."""
    if options.list:
        return
    recipe, is_import = options.recipe(given, *parts), ids.import_tokens is not None
    problems = Problems(ids.problems(recipe.vocabulary.tokenizer))
    flags = ("output",) if is_import else ("input", "output")
    problems.sentences += [f"--{name} is required. See --help." for name in flags if not getattr(options, name)]
    if is_import:
        if names := _names_of_text(options, *parts):
            problems.add(f"{', '.join(names)} cannot be combined with import_tokens, which reads no text.")
    else:
        problems.sentences += [*options.problems(), *recipe.problems()]
        if options.shard is not None and recipe.corpus.limit != NO_LIMIT:
            problems.add(
                "max_bytes and max_documents cannot be combined with shard, because a shard does not know the text "
                "before it."
            )
        if problems.sentences:  # only if this check fails: otherwise `build` finds the text
            problems.add_of(Corpus, recipe.inputs, recipe.corpus, given=given)
    problems.refuse()


def _names_of_text(*parts) -> list[str]:
    """Return the names of the settings that were given but do not apply to imported ids."""
    flags = ("output", "tokenizer", "validation_fraction", "quiet", "compress", "export")
    pairs = ((part, name) for part in parts for name in vars(part) if name not in flags)
    return [name for part, name in pairs if getattr(part, name) != getattr(type(part)(), name)]


def parse(arguments: list[str], given: dict[str, GivenDataset]) -> tuple[PretokenizeArguments, ImportArguments, Recipe]:
    kinds = (CorpusArguments, VocabularyArguments, CleaningArguments, DedupArguments)
    parser = FlagParser((PretokenizeArguments, ImportArguments, *kinds), __doc__, main=MAIN)
    options, ids, *parts = parser.parse(arguments, check=partial(check, given))
    return options, ids, options.recipe(given, *parts)


def build(options: PretokenizeArguments, ids: ImportArguments, recipe: Recipe) -> TokenStore | None:
    """Build the store, and what `compress` and `export` ask for. Return None after a shard."""
    say = (lambda text: None) if options.quiet else show
    folder = Path(os.path.expanduser(options.output))
    if ids.import_tokens is not None:
        store = import_store(ids, recipe.vocabulary.tokenizer, recipe.corpus.validation_fraction, folder, say)
    else:
        store = store_builder.pretokenize(recipe, folder, say, options.num_proc, options.share, options.merge)
    if store is not None and options.compress:
        archive = export.to_archive(store)
        say(f"{archive} is the packed store; to unpack it, run {unpack_command(archive)}.")
    if store is not None and options.export:
        say(f"{export.to_parquet(store)} is the store as a Hub dataset.")
    return store


def pretokenize(data: Any, output: str | Path, **settings: Any) -> TokenStore | None:
    """Convert `data` into the token store `output`, as the command does, or resume that after an interruption.
    `data` is a `Dataset`, an `IterableDataset` or a dict of splits (train, validation) with a text or chat column, a
    path, a Hub id, or a list of these. `settings` are the flags of the command by name. Raise a `UserError` for wrong
    data or settings. From files and from datasets with the same documents in the same order, the tokens are the same to
    the byte if the tokenizer exists, or the text is smaller than `sample_bytes`."""
    datasets, inputs = {}, []
    for number, item in enumerate(_listed(data), 1):
        if not isinstance(item, str | Path):
            dataset = GivenDataset.of(item, number)
            datasets[dataset.name] = dataset
            item = dataset.name
        inputs.append(str(item))
    if problems := [name for name, value in settings.items() if not isinstance(value, SETTING_TYPES)]:
        kind = type(settings[problems[0]]).__name__
        raise UserError(f"{problems[0]} is of the type {kind}; give a name, a folder or a number.")
    flags = {"input": inputs, "output": str(output)} | settings
    values = {name: _listed(value) for name, value in flags.items() if value is not None}
    words = [[f"--{name}", *map(str, value)] for name, value in values.items() if value or name == "cleaning"]
    with offline_only_inside():
        return build(*parse([word for flag in words for word in flag], datasets))


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


class _CallableModule(ModuleType):
    """Type of this module, which is also the function: `from tokenizer import pretokenize` gives both."""

    __call__ = staticmethod(pretokenize)


sys.modules[__name__].__class__ = _CallableModule


def main(arguments: list[str]) -> None:
    options, ids, recipe = parse(arguments, {})
    if "TORCHELASTIC_RUN_ID" in os.environ and (processes := os.environ["WORLD_SIZE"]) != "1" and not options.shard:
        raise UserError(f"One process uses all cores, but {processes} were started; leave out the launcher.")
    if options.list:
        print("\n".join(listed()))
    else:
        build(options, ids, recipe)


if __name__ == "__main__":
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` and Transformers would import torch, which takes 1.5 s
    run(main)
