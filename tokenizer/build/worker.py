"""Worker processes that convert units of work into parts of a store. Finished parts survive an interruption.

The folder of unfinished work has `plan.json`, `store/` with the tokenizer, and `parts/` with the result of each unit:

000012.train, 000012.val   token ids
000012.rows                one row per piece of a document, in order
000012.json                counts, and hashes of the other files, written last: without it, the part does not exist
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, field
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from common import schema
from common.atomic import write_atomic
from common.errors import UserError, check_format, disk_errors
from common.machine import cores, free_memory, keep_freed_memory
from tokenizer.cleaning.cleaning import Cleaner, RuleStats
from tokenizer.cleaning.dedup import BANDS, KEYS, MinHasher
from tokenizer.corpus.chat import ChatTemplate
from tokenizer.corpus.documents import NO_LIMIT, Counts, Limit, Piece, Reader
from tokenizer.corpus.units import Unit, stream
from tokenizer.encoding import encode
from tokenizer.store.store import RESUMES, SPLITS

PLAN_VERSION = 1
HASHED_CHARACTERS = 1 << 19  # of a document, which the first piece of every longer one has
BATCH_BYTES = 4 << 20  # bytes encoded together: smaller batches reuse fewer words, larger batches need more memory
START_METHOD = "fork" if sys.platform == "linux" else "spawn"  # forked processes of macOS may crash in its libraries
# Of memory for one process, with a margin. A spawned one imports the program again.
WORKER_BYTES = 300_000_000 if START_METHOD == "fork" else 500_000_000


@dataclass(frozen=True)
class DocumentSettings:
    """Settings that apply to every document."""

    sample_by: Literal["document", "paragraph", "line"]
    cleaning: list[str]
    dedup: Literal["no", "exact", "near"]
    validation_fraction: float
    seed: schema.SignedInteger
    chat_template: str | None
    control_tokens: list[str]
    template_variables: dict[str, str]  # the tokenizer's `bos_token`, `eos_token` and others, for templates
    dtype: Literal["uint16", "uint32"] = "uint16"
    eos: int | None = None
    hashed_characters: int | None = None  # None in the plan of an older version: the whole first piece

    def reader(self, limit: Limit = NO_LIMIT) -> Reader:
        chat = self.chat_template
        if chat is not None:
            chat = ChatTemplate(chat, tuple(self.control_tokens), self.template_variables)
        return Reader(self.sample_by, chat, limit=limit)


@dataclass
class StorePlan:
    """Content of `plan.json`: the decisions made before the work starts."""

    settings_of_user: dict[str, Any]
    inputs: list[tuple[str, int, int]]
    settings: DocumentSettings
    units: list[Unit]
    skipped: Counts = field(default_factory=Counts)
    format_version: int = PLAN_VERSION  # a plan without a version also has format 1

    @staticmethod
    def read(folder: Path) -> "StorePlan":
        """Return the plan. Raise a `UserError` if it is damaged or of a newer format."""
        path = folder / "plan.json"
        try:
            content = schema.read(path, dict[str, Any])
            check_format(folder, content.get("format_version"), PLAN_VERSION)
            return schema.build(content, StorePlan)
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); delete {folder} to start over.") from error

    def write(self, folder: Path) -> None:
        # `schema.build` also accepts lists of the values, which are shorter than objects.
        content = asdict(self) | {"units": list(map(astuple, self.units))}
        write_atomic(folder / "plan.json", schema.sealed(content))


@dataclass
class Part:
    """Result of a unit, the content of its `.json`."""

    unit: int
    tokens: dict[str, int]
    counts: Counts
    outcomes: dict[str, RuleStats]  # effects of the cleaning rules
    lost_bytes: int  # bytes that the tokenizer has no tokens for
    hashes: dict[str, str]  # xxh3 of its files: a power failure can truncate files that were written
    is_cut: bool = False  # true if the text of the unit continues, but the limit was reached

    @staticmethod
    def read(folder: Path, number: int) -> "Part | None":
        """Return the part of unit `number`, or None if it is not done, or damaged, or of an older version."""
        with suppress(FileNotFoundError, ValueError):
            return schema.read(part_file(folder, number, "json"), Part)
        return None


def part_file(folder: Path, number: int, name: str) -> Path:
    return folder / "parts" / f"{number:06d}.{name}"


def row_type(keys: int) -> np.dtype:
    """Return the dtype of a row, which describes a piece of a document. Its keys are those of the document up to there,
    from the document's beginning in this part."""
    flags = [("val", "?"), ("starts", "?"), ("ends", "?")]
    return np.dtype([("tokens", "<u4"), ("bytes", "<u4"), ("copies", "<u2"), *flags, ("keys", "<u8", (keys,))])


def cleaned(unit: Unit, reader: Reader, cleaner: Cleaner) -> Iterator[tuple[Piece, str, str]]:
    """Yield the pieces of a unit, their cleaned texts and the paths of their files. Documents that cleaning drops or
    empties are left out."""
    for example in stream([unit], reader):
        path, piece = example.pop("path"), Piece(**example)
        is_whole = piece.starts_document and piece.ends_document and piece.control is None
        text = cleaner(piece.text, whole=is_whole)
        if is_whole and text is not None and not text.strip():
            reader.counts.blank += 1
            reader.counts.documents -= 1
        elif text is not None:
            yield piece, text, path


class UnitProcessor:
    """Processor of the units of an unfinished store."""

    def __init__(self, folder: Path):
        plan = StorePlan.read(folder)
        self.folder, self.settings, self.units = folder, plan.settings, plan.units
        rust = encode.load_rust(folder / "store" / "tokenizer" / "tokenizer.json")
        self.encoder = encode.encoder(rust, np.dtype(self.settings.dtype).newbyteorder("<"))
        self.loss_counter = encode.LossCounter(rust)
        self.token_to_id = rust.token_to_id
        added = rust.get_added_tokens_decoder()  # a control token may take the blanks next to it
        self.takes_left = {token.content for token in added.values() if token.lstrip}
        self.takes_right = {i for i, token in added.items() if token.rstrip}
        self.min_hasher = MinHasher() if self.settings.dedup == "near" else None
        self.eos = encode.NO_TOKEN if self.settings.eos is None else self.settings.eos
        ranges = (part for unit in self.units for part in unit.ranges)
        self.heads = {part.path: part for part in ranges if part.start == 0 and part.stop is not None}

    def process(self, number: int, limit: Limit = NO_LIMIT) -> Part:
        """Process a unit, up to the limit. Raise a `UserError` for unreadable or unknown text, or a full disk."""
        with disk_errors(self.folder / "parts", RESUMES), ExitStack() as stack:
            (self.folder / "parts").mkdir(exist_ok=True)
            files = {split: stack.enter_context(part_file(self.folder, number, split).open("wb")) for split in SPLITS}
            writer = PartWriter(self, number, files, limit)
            previous_path = None
            for piece, text, path in cleaned(self.units[number], writer.reader, writer.cleaner):
                if path != previous_path and not piece.starts_document:  # the document began in an earlier unit
                    writer.begin_document(self._first_piece(path))
                writer.add(piece, text)
                previous_path = path
            return writer.finish()

    def _first_piece(self, path: str) -> str:
        """Return the cleaned head of a file that is one document, which decides split and copies of the whole file."""
        head = next(self.settings.reader().pieces(self.heads[path]), None)  # None: the file is not text
        return "" if head is None else Cleaner(self.settings.cleaning)(head.text, whole=False)


class PartWriter:
    """Writer of one part: it encodes the documents of a unit into `files`, one per split."""

    def __init__(self, processor: UnitProcessor, number: int, files: dict[str, BinaryIO], limit: Limit):
        self.processor, self.settings, self.files = processor, processor.settings, files
        self.number, self.unit = number, processor.units[number]
        self.reader = self.settings.reader(limit)
        self.cleaner = Cleaner(self.settings.cleaning)
        self.hashes = {split: xxhash.xxh3_64() for split in SPLITS}
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.lost_bytes = 0
        self.rows = [np.zeros(0, row_type(KEYS[self.settings.dedup]))]
        self.batch: list[tuple] = []  # text, id that follows, copies, val, starts, ends, keys
        self.batch_bytes = 0
        self.last_follower = encode.NO_TOKEN
        self.begin_document("")

    def begin_document(self, text: str) -> None:
        """Choose the split and the number of copies by the beginning of a document or chat, so that equal documents are
        alike. The length of a first piece depends on the kind of file."""
        text = text[: self.settings.hashed_characters].encode()
        is_held_out = share(text, self.settings.seed) < self.settings.validation_fraction
        self.val = is_held_out if self.unit.val is None else self.unit.val
        number, part = divmod(self.unit.copies, 1)
        self.copies = int(number) + (part > 0 and share(text, self.settings.seed + 1) < part)
        self.digest = xxhash.xxh3_128()

    def add(self, piece: Piece, text: str) -> None:
        if piece.starts_document:
            self.begin_document(text if piece.chat is None else piece.chat)
        if self.copies == 0:
            return
        if not piece.starts_document and self.last_follower in self.processor.takes_right:
            text = text.lstrip()
        if piece.control in self.processor.takes_left:
            text = text.rstrip()
        utf8 = text.encode()
        self.last_follower = self._follower(piece)
        row = (self.copies, self.val, piece.starts_document, piece.ends_document, self._keys(piece, text, utf8))
        self.batch.append((utf8, self.last_follower, *row))
        self.batch_bytes += len(utf8)
        if self.batch_bytes >= BATCH_BYTES:
            self.flush()

    def _follower(self, piece: Piece) -> int:
        """Return the id that follows the piece: a chat's control token, the end-of-text token (once), or NO_TOKEN."""
        if piece.control is not None:
            return self.processor.token_to_id(piece.control)
        if not piece.ends_document or (not piece.text and self.last_follower == self.processor.eos):
            return encode.NO_TOKEN
        return self.processor.eos

    def _keys(self, piece: Piece, text: str, utf8: bytes) -> tuple[int, ...]:
        """Return the keys of the part of the document that was read so far."""
        if self.settings.dedup == "no":
            return ()
        self.digest.update(utf8)
        if piece.control is not None:  # chats also differ in the roles of their messages
            self.digest.update(b"\xff" + piece.control.encode())
        digest = divmod(self.digest.intdigest(), 1 << 64)
        if self.processor.min_hasher is None:
            return digest
        if not (piece.starts_document and piece.ends_document):  # a long document matches only identical ones
            return (*digest, *([digest[0]] * BANDS))
        return (*digest, *self.processor.min_hasher.bands(text).tolist())

    def flush(self) -> None:
        if not self.batch:
            return
        texts, followed_by, *columns = map(list, zip(*self.batch, strict=True))
        ids, counts = self.processor.encoder(texts, followed_by, starts=columns[2])
        rows = np.zeros(len(texts), self.rows[0].dtype)
        for name, column in zip(rows.dtype.names, (counts, list(map(len, texts)), *columns), strict=True):
            rows[name] = column
        self.lost_bytes += self.processor.loss_counter.lost_bytes(texts, ids)
        for split, file in self.files.items():
            mask = rows["val"] == (split == "val")
            chosen_ids = ids if mask.all() else ids[np.repeat(mask, counts)]
            file.write(chosen_ids)  # `tofile` does not report why it fails
            self.hashes[split].update(chosen_ids)
            self.tokens[split] += len(chosen_ids)
        self.rows.append(rows)
        self.batch, self.batch_bytes = [], 0

    def finish(self) -> Part:
        """Write the rest of the part and then its `.json`, which marks the part as done. Return the part."""
        self.flush()
        for file in self.files.values():
            file.close()
        rows = np.concatenate(self.rows).tobytes()
        hashes = {split: digest.hexdigest() for split, digest in self.hashes.items()}
        hashes["rows"] = xxhash.xxh3_64_hexdigest(rows)
        counts, is_cut = self.reader.counts, self.reader.is_cut
        part = Part(self.number, self.tokens, counts, self.cleaner.stats, self.lost_bytes, hashes, is_cut)
        part_file(self.processor.folder, self.number, "rows").write_bytes(rows)
        part_file(self.processor.folder, self.number, "json").write_text(schema.sealed(asdict(part)), encoding="utf-8")
        return part


def share(text: bytes, seed: int) -> float:
    """Return a number from 0 to 1 that depends on the text and the seed."""
    return xxhash.xxh3_64_intdigest(text, seed=seed % 2**64) / 2**64


def done_parts(folder: Path, units: list[int]) -> list[Part]:
    return list(filter(None, (Part.read(folder, number) for number in units)))


def most_workers() -> int:
    """Return the number of cores, or of processes for which there is memory."""
    return max(1, min(cores(logical=True), free_memory() // WORKER_BYTES))


class Workers:
    """Processes for units of work. They are forked before this process plans the work, because then it has few threads
    and little memory, and they import `datasets` meanwhile."""

    def __init__(self, maximum: int | None = None):
        self.maximum = maximum or most_workers()
        self.pool: ProcessPoolExecutor | None = None
        self.processes: set[multiprocessing.Process] = set()

    def start(self, units: int) -> None:
        """Start a process per unit, up to `maximum`, if none was started. A single unit is not worth a process."""
        count = min(self.maximum, units)
        if self.pool is not None or count < 2:
            return
        children, context = multiprocessing.active_children(), multiprocessing.get_context(START_METHOD)
        self.pool = ProcessPoolExecutor(count, context, _begin)
        # The processes inherit this: a spawned one imports for seconds before `_begin` ignores Ctrl-C.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):  # with fork, the first call starts all of them; with spawn, each starts one
                self.pool.submit(int)
            self.processes = set(multiprocessing.active_children()) - set(children)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def process(self, folder: Path, units: list[int], limit: Limit = NO_LIMIT) -> Iterator[Part]:
        """Process `units`, each up to the limit, and yield each part when it is done. Without processes, use this one.
        Raise a `UserError` with the first problem of any unit, or if a process was killed."""
        if self.pool is None:
            processor = UnitProcessor(folder) if units else None
            yield from (processor.process(number, limit) for number in units)
            return
        try:
            for part in as_completed([self.pool.submit(_process, folder, number, limit) for number in units]):
                yield part.result()
        except BrokenProcessPool as error:
            guard = " In a program of your own, call it below if __name__ == '__main__':" * (START_METHOD == "spawn")
            raise UserError(
                "A worker process was killed, often because memory ran out. The same command resumes; python -m "
                f"tokenizer.pretokenize with --num_proc 1 uses the least memory.{guard}"
            ) from error

    def close(self) -> None:
        """End all processes, also those that still work."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            for process in self.processes:
                process.kill()
                process.join()
            self.pool = None


def _begin() -> None:
    """Prepare a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, but only the main process handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.set_threshold(1_000_000)  # searching short-lived objects for reference cycles doubled their cost
    keep_freed_memory()
    import datasets  # noqa: F401  now, while the main process plans


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # returns if the parent was killed
    os._exit(1)


def _process(folder: Path, number: int, limit: Limit) -> Part:
    return _processor(folder).process(number, limit)


_processor = cache(UnitProcessor)
