"""Build a token store: plan the work once, process it in any number of processes, merge the parts, move the store."""

import math
import operator
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from common.errors import Problems, UserError, counted, disk_errors, first_of, require_room
from common.progress import track
from common.removal import MARK, discard, is_marked, mark, renew
from common.terminal import show
from tokenizer.build import output, report
from tokenizer.build.merge import Merger
from tokenizer.build.recipe import Recipe
from tokenizer.build.worker import HASHED_CHARACTERS, DocumentSettings, Part, StorePlan, Workers, cleaned, done_parts
from tokenizer.cleaning import cleaning
from tokenizer.cleaning.dedup import MinHasher
from tokenizer.corpus.documents import NO_LIMIT, Counts, Limit
from tokenizer.corpus.files import TOLERATED_SHARE
from tokenizer.corpus.hub import HubDataset, open_dataset
from tokenizer.corpus.named_data import find, licenses
from tokenizer.corpus.units import UNIT_BYTES, Corpus, TextError, Unit
from tokenizer.encoding import encode, vocabulary
from tokenizer.encoding.vocabulary import VocabularyArguments
from tokenizer.store.store import RESUMES, STORE_FILES, TokenStore, dtype_of

# Patterns of the files of unfinished work.
WORK_FILES = (
    *("plan.json*", "merged.json*", "parts/*", "text/*/*.jsonl", MARK),
    *(f"store/{name}" for name in STORE_FILES),
)
SAMPLED_UNITS = 4096  # maximum number of units to train a tokenizer on, if these have enough text
SECONDS_BETWEEN_LINES = 30.0  # about the progress
ESTIMATED_FROM = 1 << 16  # characters that are tokenized to estimate the size of the store


def pretokenize(
    recipe: Recipe,
    folder: Path,
    say: Callable[[str], None] = show,
    num_proc: int | None = None,
    shard: tuple[int, int] | None = None,
    is_merge: bool = False,
    is_cache: bool = False,
) -> TokenStore | None:
    """Build the store of `recipe` in `folder`, resume building it, or open it if it exists. Return None after a shard.
    A cache belongs to this project: a process waits while another one builds it, and unfinished work is discarded if a
    file has another time. Raise a `UserError` if text or settings are bad or differ from those of the unfinished work,
    `folder` is in use or is not a store, or the disk is too small. Finished work is kept, unless the text as a whole
    is bad: it would be refused with the corrected text."""
    Problems(recipe.problems()).refuse()
    folder = output.resolved(folder)
    workers = Workers(num_proc)
    with disk_errors(folder, RESUMES), closing(workers):
        builder = StoreBuilder(recipe, folder, say, workers, is_cache)
        with output.locked(folder, "", wait=is_cache or shard is not None, is_cache=is_cache, say=say):
            if TokenStore.is_store(folder):
                return builder.open_finished()
            if shard is None:
                output.refuse_busy_shards(folder)
                try:
                    return builder.finish(is_merge)
                except TextError:
                    if not is_merge:  # several machines have worked on it
                        discard(builder.work, WORK_FILES)
                    raise
            units = list(range(len(builder.plan.units)))
            share, shares = shard
            lock = output.locked(folder, f".shard-{share}-of-{shares}", wait=False)
        with lock:
            number = len(builder.do_units(units[share::shares]))
            say(
                f"Shard {share}/{shares} is done: {number:,} of {len(units):,} units. After the last shard, run the "
                f"same command with --merge instead of --shard."
            )
    return None


@dataclass
class StoreBuilder:
    """Builder of a store from a recipe. Unfinished work is in `.NAME.unfinished` next to the store."""

    recipe: Recipe
    folder: Path
    say: Callable[[str], None]
    workers: Workers
    is_cache: bool = False
    corpus: Corpus | None = None  # by default, all text of the recipe

    def __post_init__(self):
        self.work = self.folder.with_name(f".{self.folder.name}.unfinished")
        self.store = self.work / "store"
        recipe = self.recipe
        if self.corpus is None:
            self.corpus = Corpus(recipe.inputs, recipe.corpus, recipe.weights, self.folder, recipe.given)
        self.inputs = self.corpus.identity()

    @cached_property
    def rust(self) -> Tokenizer:
        return encode.load_rust(self.store / "tokenizer" / "tokenizer.json")

    def open_finished(self) -> TokenStore:
        if is_marked(self.work, "unfinished"):  # the process was killed before it was deleted
            discard(self.work, WORK_FILES)
        return output.open_finished(self.folder, self.recipe.settings(), self.inputs, self.say, self.is_cache)

    @cached_property
    def plan(self) -> StorePlan:
        """Plan of units, settings and tokenizer: new, or from the interrupted command that this one resumes."""
        if (self.work / "plan.json").is_file():
            plan = StorePlan.read(self.work)
            mark(self.work, "unfinished")  # older versions set no mark
            changes = output.changes(plan.settings_of_user, plan.inputs, self.recipe.settings(), self.inputs)
            if not changes:
                number = len(done_parts(self.work, range(len(plan.units))))
                self.say(f"Resuming {self.folder}: {number:,} of {len(plan.units):,} units of work are done.")
                return plan
            if not self.is_cache:
                raise UserError(
                    f"{self.folder} was started with other text or settings ({changes}); undo the change, or delete "
                    f"{self.work} to start over."
                )
        renew(self.work, "unfinished", WORK_FILES)
        plan = self._new_plan()
        plan.write(self.work)
        return plan

    def _new_plan(self) -> StorePlan:
        units = self._units()
        settings = self._document_settings()  # after the units, where the chats are found
        sample = Sample(units, settings, self.recipe.vocabulary, self.corpus)
        settings = self._with_tokenizer(settings, sample)
        self._require_room(sample, np.dtype(settings.dtype).itemsize)
        return StorePlan(self.recipe.settings(), self.inputs, settings, units, self.corpus.finder.skipped)

    def _units(self) -> list[Unit]:
        """Return the units of the corpus, after checks that need no text, and copies of datasets of the program."""
        recipe, corpus = self.recipe, self.corpus
        if recipe.dedup.dedup == "near":
            MinHasher()  # raises an error before any work if rensa is not installed
        if recipe.given:
            recipe.settings()  # raises an error for a wrong tokenizer or template before any text is copied
        for name in recipe.given:
            self.say(f"Copying the text of {name} to the disk ...")
        corpus.write_given(self.work / "text")
        files = f"{counted(len(corpus.all_files), 'file')}, {corpus.size / 1e6:.1f} MB"
        self.say(f"Reading {first_of(recipe.inputs)} ({files}) ...")
        self.workers.start(corpus.text_size // UNIT_BYTES)
        return corpus.units()

    def _document_settings(self) -> DocumentSettings:
        """Return the settings of documents. Raise a `UserError` if chats lack a template, or a template lacks chats."""
        recipe, has_chats = self.recipe, self.corpus.has_chats
        name = recipe.corpus.chat_template
        if name is not None and not has_chats:
            raise UserError(
                f"chat_template is {name}, but {first_of(recipe.inputs)} has no chat whose messages all have a role "
                "and text; leave out chat_template."
            )
        return DocumentSettings(
            recipe.corpus.sample_by,
            recipe.cleaning.cleaning,
            recipe.dedup.dedup,
            recipe.corpus.validation_fraction,
            recipe.seed,
            *(recipe.chat_template() if has_chats else (None, [], {})),
        )

    def _with_tokenizer(self, settings: DocumentSettings, sample: "Sample") -> DocumentSettings:
        """Save the tokenizer, existing or built from the sample. Return settings with the type and end of its ids."""
        recipe, control = self.recipe, settings.control_tokens
        tokenizer = vocabulary.build(
            recipe.vocabulary, recipe.existing_tokenizer, sample.texts, control, recipe.vocab_size_must_fit
        )
        if recipe.vocabulary.tokenizer is None:
            self.corpus.check(sample.counts, sample.is_all and sample.limit == recipe.corpus.limit)
        if settings.chat_template is not None:
            tokenizer.chat_template = settings.chat_template
        kind = recipe.vocabulary.tokenizer or recipe.vocabulary.tokenizer_type
        note = "" if tokenizer.eos_token_id is not None else ", and no end-of-text token"
        self.say(f"Tokenizer: {kind}, {len(tokenizer):,} tokens{note}.")
        vocabulary.save(tokenizer, self.store / "tokenizer")
        return replace(
            settings, dtype=dtype_of(len(tokenizer)), eos=tokenizer.eos_token_id, hashed_characters=HASHED_CHARACTERS
        )

    def _require_room(self, sample: "Sample", itemsize: int) -> None:
        """Raise a `UserError` if the store does not fit on its disk."""
        # The ids of a part stay on the disk until its last copy is written.
        copies = [source.copies + (source.copies > 1) for source in self.corpus.sources]
        size = sum(map(operator.mul, copies, self.corpus.text_sizes))
        size *= min(1.0, self.recipe.corpus.limit.bytes / max(1, self.corpus.text_size))
        size_is_unknown = self.recipe.corpus.limit.documents < math.inf
        # A token has a byte of text or more.
        if size_is_unknown or shutil.disk_usage(self.folder.parent).free > itemsize * size:
            return
        texts, head = sample.texts(), ""
        while len(head) < ESTIMATED_FROM and (text := next(texts, "")):
            head += text[:ESTIMATED_FROM]
        ids, _ = encode.encoder(self.rust, np.dtype("<u4"))([head.encode()], [encode.NO_TOKEN])
        per_byte = itemsize * len(ids) / max(1, len(head.encode()))
        other_disk = f", or {output.CACHE_REMEDY}" if self.is_cache else " or name an --output on another disk"
        remedy = f"make room{other_disk}"
        require_room(self.folder.parent.absolute(), per_byte * size, "The tokens will need about", remedy)

    def do_limited_units(self, limit: Limit) -> list[Part]:
        """Process units in order until their text reaches the limit, and return their parts. The last one is cut there.
        All text of validation splits is the first unit, which has its own limit."""
        counts, total = Counts(), len(self.plan.units)
        limit_of_validation = limit.of_validation(self.recipe.corpus.validation_fraction)
        parts = self.do_units([0], limit_of_validation) if any(unit.val for unit in self.plan.units) else []
        is_serial = encode.is_character(self.rust)  # it lacks the characters beyond the limit: none of them may be read
        is_of_any_size = self.corpus.is_of_any_size
        batch = 1 if is_of_any_size or limit.bytes == math.inf else math.ceil(limit.bytes / UNIT_BYTES)
        while len(parts) < total:
            units = range(len(parts), min(len(parts) + (1 if is_serial else batch), total))
            if is_of_any_size and len(units) > 1:
                self.workers.start(total - len(parts))  # later batches are larger
            # The exact limit of a unit is known after those before it.
            for part in self.do_units([*units], limit.after(counts)):
                remainder = limit.after(counts)
                if part.counts.bytes > remainder.bytes or part.counts.documents > remainder.documents:
                    parts += self.workers.process(self.work, [part.unit], remainder)
                else:
                    parts.append(part)
                if parts[-1].is_cut:
                    return parts
                counts.add(part.counts)
            share = max(counts.bytes / limit.bytes, counts.documents / limit.documents)
            batch = math.ceil(len(parts) * min(4, max(0, 1 / share - 1) if share else 4)) or 1
        return parts

    def do_units(self, units: list[int], limit: Limit = NO_LIMIT) -> list[Part]:
        """Process the units that are not done yet, each up to the limit. Return the parts of all `units` in order."""
        parts = {part.unit: part for part in done_parts(self.work, units)}
        remainder = [unit for unit in units if unit not in parts]
        counts, lost_bytes = Counts().add(self.plan.skipped), 0
        for part in parts.values():
            counts.add(part.counts)
            lost_bytes += part.lost_bytes
        start = said = time.monotonic()
        start_bytes, total = counts.bytes, len(remainder)
        self.workers.start(total)
        done = self.workers.process(self.work, remainder, limit)
        for number, part in enumerate(track(done, "Encoding", self.say is show and total > 1, total), start=1):
            parts[part.unit] = part
            counts.add(part.counts)
            lost_bytes += part.lost_bytes
            self.corpus.check(counts, is_all=False)
            if limit == NO_LIMIT:  # otherwise, this text may be behind the limit
                self._refuse_lost(lost_bytes, max(counts.bytes, self.corpus.most_bytes))
            if (moment := time.monotonic()) - said > SECONDS_BETWEEN_LINES:
                said, seconds, megabytes = moment, moment - start, (counts.bytes - start_bytes) / 1e6
                self.say(
                    f"{number:,} of {total:,} units, {megabytes:,.0f} MB, {megabytes / seconds:.1f} MB/s, about "
                    f"{seconds / number * (total - number) / 60:.0f} minutes left"
                )
        return [parts[unit] for unit in units]

    def finish(self, is_merge: bool) -> TokenStore:
        """Process the remaining units, merge the parts, and move the store into place."""
        if is_merge and not (self.work / "plan.json").is_file():
            raise UserError(f"No shard of {self.folder} has been run; check --output.")
        units = list(range(len(self.plan.units)))
        if is_merge and (number := len(units) - len(done_parts(self.work, units))):
            raise UserError(
                f"{number:,} of {len(units):,} units of {self.folder} are not done; run the missing shards, or run the "
                f"command without --merge to process the rest."
            )
        counts, limit = Counts().add(self.plan.skipped), self.recipe.corpus.limit
        texts = encode.token_bytes(self.rust)  # now, while the workers start
        parts = self.do_units(units) if limit == NO_LIMIT else self.do_limited_units(limit)
        for part in parts:
            counts.add(part.counts)
        outcomes = cleaning.merged(*(part.outcomes for part in parts))
        lost_bytes = sum(part.lost_bytes for part in parts)
        self.workers.close()  # merging may need their memory
        self.corpus.refuse_changes(f"Delete {self.work}, and run the command")
        self.corpus.check(counts)
        self._refuse_lost(lost_bytes, counts.bytes)
        merger = Merger(self.work, self.store, self.plan.settings, self.plan.units[: len(parts)], texts)
        if merger.documents == 0:
            drops = [f"{rule} {outcome.documents:,}" for rule, outcome in outcomes.items() if outcome.dropped]
            remedy = "use fewer cleaning stages or more text" if drops else "use greater weights or more text"
            raise TextError(
                f"None of {counted(counts.documents, 'document')} is left (dropped: "
                f"{', '.join(drops) or 'by --weights'}); {remedy}."
            )
        merger.merge()
        self._describe(counts, outcomes, merger)
        output.check_writable(self.folder)  # the folder may have changed in the meantime
        if self.folder.exists():
            self.folder.rmdir()
        self.store.rename(self.folder)
        discard(self.work, WORK_FILES)
        store = TokenStore(self.folder)
        self.say(report.summary(store, self.is_cache))
        return store

    def _refuse_lost(self, lost_bytes: int, size: float) -> None:
        """Raise a `TextError` if the tokenizer loses too much of `size` bytes of text."""
        if lost_bytes > TOLERATED_SHARE * size:
            raise TextError(
                f"{self.recipe.vocabulary.tokenizer} cannot encode this text: {lost_bytes:,} of {size:,} bytes would "
                f"be lost; use another tokenizer."
            )

    def _validation_splits(self) -> list[str]:
        """Return the names of the splits, folders or packages that the validation text comes from."""
        packages: dict[str, str] = {}  # by path of the file
        for source in self.corpus.sources:
            if (data := find(source.entry)) is not None and data.held_out:
                text = f"the packages {', '.join(data.held_out)} of {source.entry}"
                packages |= dict.fromkeys((file.path for file in source.files), text)
        parts = (part for unit in self.plan.units if unit.val for part in unit.ranges)
        copies = f"{self.work / 'text'}/"  # of given datasets
        names = (
            part.path.split("@")[0]
            if part.kind == "hub"
            else packages.get(part.path) or os.path.dirname(part.path).removeprefix(copies)
            for part in parts
        )
        return list(dict.fromkeys(names))

    def _describe(self, counts: Counts, outcomes: dict[str, cleaning.RuleStats], merger: Merger) -> None:
        counters = asdict(counts) | {"first": counts.worst()}
        report.describe(
            self.store,
            self.rust,
            {split: astuple(size) for split, size in merger.progress.splits.items()},
            self.inputs,
            eos_token_id=self.plan.settings.eos,
            sources=self.recipe.inputs,
            hub_datasets=[hub.name for hub in self.corpus.hub],
            commits={dataset.name: dataset.revision for dataset in hub_datasets(self.plan.units)},
            validation_splits=self._validation_splits(),
            licenses=licenses(self.recipe.inputs),
            settings=self.plan.settings_of_user,
            counts=counters | {"links": self.corpus.finder.links, "tails": len(merger.progress.tails)},
            cleaning=outcomes,
            repeated_documents=merger.repeated,
        )


def hub_datasets(units: list[Unit]) -> list[HubDataset]:
    """Return the datasets on the Hub, at their commits, whose shards are in `units`."""
    names = {part.path: None for unit in units for part in unit.ranges if part.kind == "hub"}
    return list(map(open_dataset, names))


class Sample:
    """Evenly spread sample of the text, to train a tokenizer on."""

    def __init__(self, units: list[Unit], settings: DocumentSettings, arguments: VocabularyArguments, corpus: Corpus):
        self.settings = settings
        self.limit = corpus.arguments.limit
        self.is_all = arguments.tokenizer_type == "character" or corpus.most_bytes <= arguments.sample_bytes
        if self.limit != NO_LIMIT and not self.is_all:  # the beginning: it is not known over how many units it extends
            self.limit, self.is_all = self.limit._replace(bytes=min(self.limit.bytes, arguments.sample_bytes)), True
        facts = filter(None, (dataset.facts for dataset in hub_datasets(units)))
        size = corpus.text_size + sum(fact.num_bytes or 0 for fact in facts)
        size = int(min(size, len(units) * UNIT_BYTES))  # less than the text if a packed file or a shard is one unit
        step = max(1, size // arguments.sample_bytes, len(units) // SAMPLED_UNITS)
        # After the units of a step, the others follow if these have too little text: the size that a dataset states is
        # that of all columns.
        self.units = units if self.is_all else [unit for first in range(step) for unit in units[first::step]]
        self.most_bytes = math.inf if self.is_all else arguments.sample_bytes
        self.bytes_of_unit = math.inf if self.is_all else self.most_bytes // max(1, math.ceil(len(units) / step)) + 1
        self.counts = Counts()

    def texts(self) -> Iterator[str]:
        cleaner, n_bytes = cleaning.Cleaner(self.settings.cleaning), 0.0
        limit, limit_of_validation = self.limit, self.limit.of_validation(self.settings.validation_fraction)
        for unit in self.units:
            reader = self.settings.reader(limit_of_validation if unit.val else limit)
            for _, text, _ in cleaned(unit, reader, cleaner):
                excess = max(0, reader.counts.bytes - self.bytes_of_unit)
                if text:
                    yield text if excess == 0 else text.encode()[: -int(excess)].decode(errors="ignore")
                if excess:
                    break
            self.counts.add(reader.counts)
            n_bytes += min(reader.counts.bytes, self.bytes_of_unit)
            if n_bytes >= self.most_bytes:
                return
            limit = limit if unit.val else limit.after(reader.counts)
            if reader.is_cut and not unit.val:
                return
