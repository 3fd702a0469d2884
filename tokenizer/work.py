"""Units of work -> parts of a store, by any number of processes; what is done stays done.

The folder of unfinished work holds `plan.json`, `store/` with the tokenizer, and `parts/`. A part is what one unit has become:

000012.train, 000012.val   its ids
000012.rows                a row for each piece of a document, in order
000012.json                what was counted, written last: without it there is no part

python -P -m tokenizer.work     a worker: reads folders and numbers of units, one a line, and answers each with its counts
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

import numpy as np
import xxhash

from atomic import write_atomic
from errors import UserError, check_format, disk_errors
from tokenizer import encode, schema
from tokenizer.byte_range import ByteRange
from tokenizer.chat import ChatTemplate
from tokenizer.cleaning import Cleaner, RuleStats
from tokenizer.corpus import Unit
from tokenizer.dedup import BANDS, MinHasher, keys_per_document
from tokenizer.documents import Counts, Piece, Reader
from tokenizer.store import RESUMES, SPLITS

PLAN_VERSION = 1
ROOT = Path(__file__).parent.parent
BATCH_BYTES = 4 << 20  # encoded together: fewer hold more distinct words for their size, more take more memory


@dataclass(frozen=True)
class Settings:
    """What is done with every document."""

    sample_by: Literal["document", "paragraph", "line"]
    cleaning: list[str]
    dedup: Literal["no", "exact", "near"]
    validation_fraction: float
    seed: int = field(metadata={"signed": True})
    chat_template: str | None
    control_tokens: list[str]
    template_variables: dict[str, str]  # the tokenizer's `bos_token`, `eos_token` ..., of which templates make use
    dtype: Literal["uint16", "uint32"] = "uint16"
    eos: int | None = None

    def reader(self) -> Reader:
        if self.chat_template is None:
            return Reader(self.sample_by)
        chat = ChatTemplate(self.chat_template, tuple(self.control_tokens), self.template_variables)
        return Reader(self.sample_by, chat)


@dataclass
class Plan:
    """`plan.json`: what was decided before the work began."""

    settings_of_user: dict[str, Any]
    inputs: list[tuple[str, int, int]]
    settings: Settings
    units: list[Unit]
    skipped: Counts = field(default_factory=Counts)
    format_version: int = PLAN_VERSION  # a plan without one is of format 1 too

    @staticmethod
    def read(folder: Path) -> "Plan":
        """Return the plan; raise a `UserError` where it is of a newer format, or damaged."""
        path = folder / "plan.json"
        try:
            content = schema.read(path, dict[str, Any])
            check_format(folder, content.get("format_version"), PLAN_VERSION)
            return schema.build(content, Plan)
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); delete {folder} to begin again.") from error

    def write(self, folder: Path) -> None:
        write_atomic(
            folder / "plan.json", schema.sealed(asdict(self) | {"units": [unit.to_json() for unit in self.units]})
        )


@dataclass
class Part:
    """What a unit has become, as its `.json` has it."""

    unit: int
    tokens: dict[str, int]
    counts: Counts
    outcomes: dict[str, RuleStats]  # of the cleaning
    lost_bytes: int  # that the tokenizer has no tokens for
    hashes: dict[str, str]  # xxh3 of its files: a power cut may leave less of them than was written

    @staticmethod
    def read(folder: Path, number: int) -> "Part | None":
        """None where it is not done, or was done by a version that did not record as much."""
        try:
            part = schema.read(part_file(folder, number, "json"), Part)
        except (FileNotFoundError, ValueError):
            return None
        return part if {*SPLITS, "rows"} <= part.hashes.keys() and part.tokens.keys() >= {*SPLITS} else None


def part_file(folder: Path, number: int, name: str) -> Path:
    return folder / "parts" / f"{number:06d}.{name}"


def row_type(keys: int) -> np.dtype:
    """A piece of a document. The keys for finding repeated documents stand in the last row of a document or of a part."""
    return np.dtype(
        [
            *(("tokens", "<u4"), ("bytes", "<u4"), ("copies", "<u2")),
            *(("val", "?"), ("starts", "?"), ("ends", "?"), ("keys", "<u8", (keys,))),
        ]
    )


@dataclass
class Job:
    """A worker's view of an unfinished store."""

    folder: Path
    settings: Settings
    units: list[Unit]
    encoder: encode.Encoder = field(init=False)

    def __post_init__(self):
        rust = encode.load_rust(self.folder / "store" / "tokenizer" / "tokenizer.json")
        self.dtype = np.dtype(self.settings.dtype).newbyteorder("<")
        self.encoder = encode.encoder(rust, self.dtype)
        self.lengths = encode.text_lengths(rust)
        self.control = {token: rust.token_to_id(token) for token in self.settings.control_tokens}
        self.min_hasher = MinHasher() if self.settings.dedup == "near" else None
        self.eos = encode.NOTHING if self.settings.eos is None else self.settings.eos
        parts = (part for unit in self.units for part in unit.ranges)
        self.heads = {part.path: part for part in parts if part.start == 0 and part.stop is not None}

    @staticmethod
    def open(folder: Path) -> "Job":
        plan = Plan.read(folder)
        return Job(folder, plan.settings, plan.units)

    def do(self, number: int) -> Part:
        """Do a unit; raise a `UserError` for text that cannot be read or encoded, or a full disk."""
        with disk_errors(self.folder / "parts", RESUMES), PartWriter(self, number) as writer:
            for part in self.units[number].ranges:
                if self.continues(part):
                    writer.go_on_with(self.first_piece(part.path))
                for piece in writer.reader.pieces(part):
                    writer.add(piece)
            return writer.finish()

    def continues(self, part: ByteRange) -> bool:
        """Whether a part begins within a document."""
        return part.start > 0 and part.kind == "text" and self.settings.sample_by == "document"

    def first_piece(self, path: str) -> str:
        """The head of a file that is one document, which decides for all of it."""
        head = next(self.settings.reader().pieces(self.heads[path]), None)  # None: it is no text
        return "" if head is None else Cleaner(self.settings.cleaning)(head.text, whole=False)


class PartWriter:
    """Encodes the documents of one unit and writes its part."""

    def __init__(self, job: Job, number: int):
        self.job, self.number, self.unit = job, number, job.units[number]
        self.reader = job.settings.reader()
        self.cleaner = Cleaner(job.settings.cleaning)
        (job.folder / "parts").mkdir(exist_ok=True)
        self.files = {split: self._unfinished(split).open("wb") for split in SPLITS}
        self.hashes = {split: xxhash.xxh3_64() for split in SPLITS}
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.lost_bytes = 0
        self.row_type = row_type(keys_per_document(job.settings.dedup))
        self.rows: list[np.ndarray] = []
        self.last_follower = encode.NOTHING
        self._new_batch()
        self._new_document("")

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *_) -> None:
        for split, file in self.files.items():
            with suppress(OSError):  # a full disk was reported already
                file.close()
            self._unfinished(split).unlink(missing_ok=True)

    def _unfinished(self, name: str) -> Path:
        return part_file(self.job.folder, self.number, f"{name}.{os.getpid()}.tmp")

    def _in_place(self, name: str) -> None:
        os.replace(self._unfinished(name), part_file(self.job.folder, self.number, name))

    def _new_batch(self) -> None:
        self.texts: list[bytes] = []
        self.followed_by: list[int] = []
        self.described: list[tuple] = []  # copies, val, starts, ends, keys
        self.batch_bytes = 0

    def _new_document(self, first_piece: str) -> None:
        """Decides by the document's own text, so that copies of it are treated alike: its split, and how often it is
        trained on."""
        settings, text = self.job.settings, first_piece.encode()
        self.val = share(text, settings.seed) < settings.validation_fraction
        whole, part = divmod(self.unit.copies, 1)
        self.copies = int(whole) + (part > 0 and share(text, settings.seed + 1) < part)
        self.digest = xxhash.xxh3_128()

    go_on_with = _new_document

    def add(self, piece: Piece) -> None:
        whole = piece.starts_document and piece.ends_document and piece.control is None
        text = self.cleaner(piece.text, whole=whole)
        if text is None:
            return
        if whole and not text.strip():  # nothing but what cleaning takes away
            self.reader.counts.blank += 1
            self.reader.counts.documents -= 1
            return
        if piece.starts_document:
            self._new_document(text)
        if self.copies == 0:
            return
        encoded = text.encode()
        self.texts.append(encoded)
        self.last_follower = self._follower(piece)
        self.followed_by.append(self.last_follower)
        self.described.append(
            (self.copies, self.val, piece.starts_document, piece.ends_document, self._keys(piece, text, encoded))
        )
        self.batch_bytes += len(encoded)
        if self.batch_bytes >= BATCH_BYTES:
            self.flush()

    def _follower(self, piece: Piece) -> int:
        """What comes after the piece: a control token of a chat, or, once, the end of the text."""
        if piece.control is not None:
            return self.job.control[piece.control]
        if not piece.ends_document or (not piece.text and self.last_follower == self.job.eos):
            return encode.NOTHING
        return self.job.eos

    def _keys(self, piece: Piece, text: str, encoded: bytes) -> tuple[int, ...]:
        """The document's keys in its last row; what of it is known so far in the others."""
        if self.job.settings.dedup == "no":
            return ()
        self.digest.update(encoded)
        digest = divmod(self.digest.intdigest(), 1 << 64)
        if self.job.min_hasher is None:
            return digest
        if not (piece.starts_document and piece.ends_document):  # a long one is near only to itself
            return (*digest, *([digest[0]] * BANDS))
        return (*digest, *self.job.min_hasher.bands(text).tolist())

    def flush(self) -> None:
        if not self.texts:
            return
        ids, counts = self.job.encoder(self.texts, self.followed_by)
        rows = np.zeros(len(self.texts), dtype=self.row_type)
        rows["tokens"], rows["bytes"] = counts, list(map(len, self.texts))
        for name, column in zip(
            ("copies", "val", "starts", "ends", "keys"), zip(*self.described, strict=True), strict=True
        ):
            rows[name] = column
        if self.job.lengths is not None:
            self.lost_bytes += max(0, self.batch_bytes - int(self.job.lengths[ids].sum()))
        for split, chosen in (("train", ~rows["val"]), ("val", rows["val"])):
            chosen_ids = ids if chosen.all() else ids[np.repeat(chosen, counts)]
            self.files[split].write(chosen_ids)  # `tofile` does not say why it fails
            self.hashes[split].update(chosen_ids)
            self.tokens[split] += len(chosen_ids)
        self.rows.append(rows)
        self._new_batch()

    def finish(self) -> Part:
        """Closes the part. It exists from now on."""
        self.flush()
        for split, file in self.files.items():
            file.close()
            self._in_place(split)
        rows = np.concatenate([np.zeros(0, dtype=self.row_type), *self.rows]).tobytes()
        self._unfinished("rows").write_bytes(rows)
        self._in_place("rows")
        hashes = {split: digest.hexdigest() for split, digest in self.hashes.items()}
        hashes["rows"] = xxhash.xxh3_64_hexdigest(rows)
        part = Part(self.number, self.tokens, self.reader.counts, self.cleaner.stats, self.lost_bytes, hashes)
        self._unfinished("json").write_text(schema.sealed(asdict(part)), encoding="utf-8")
        self._in_place("json")
        return part


def share(text: bytes, seed: int) -> float:
    """A number from 0 to 1 that the text and the seed decide."""
    return xxhash.xxh3_64_intdigest(text, seed=seed % 2**64) / 2**64


# Arrays of some megabytes come and go: glibc is told to keep their memory, where giving it back to the system each time
# took a fifth of a worker's time.
WORKER_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "USE_TORCH": "0",  # `datasets` imports it, where a Hub dataset is read
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "MALLOC_ARENA_MAX": "1",
}


# ---- workers ------------------------------------------------------------------------------------------------------------


def done_parts(folder: Path, units: list[int]) -> list[Part]:
    return list(filter(None, (Part.read(folder, number) for number in units)))


class Workers:
    """Processes that do units: started ahead of the work, because that takes them half a second, and ended after it."""

    def __init__(self):
        self.workers: list[Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def end(self) -> None:
        while self.workers:
            self.workers.pop().close()

    def start(self, count: int) -> None:
        """There are `count` of them at least from now on."""
        while len(self.workers) < count:
            self.workers.append(Worker())

    def do(self, folder: Path, units: list[int], on_part: Callable[[Part], None]) -> None:
        """Does `units`, in this process where there are no others; `on_part` hears of each.

        Raises:
            UserError: the first problem that any of them met; a process that was killed.
        """
        if not self.workers:
            job = Job.open(folder)
            for number in units:
                on_part(job.do(number))
            return
        waiting: SimpleQueue[int] = SimpleQueue()
        for number in units:
            waiting.put(number)
        with ThreadPoolExecutor(len(self.workers)) as threads:
            driven = [threads.submit(worker.drive, folder, waiting, on_part) for worker in self.workers]
            try:
                for future in as_completed(driven):
                    future.result()
            except BaseException:
                for worker in self.workers:  # which ends the threads that wait for them
                    worker.process.kill()
                raise


class Worker:
    """A process that does units. It ends when its input does, so at once when this process is killed."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenizer.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for us
            env=os.environ | WORKER_ENVIRONMENT,
        )

    def drive(self, folder: Path, waiting: SimpleQueue[int], on_part: Callable[[Part], None]) -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            answer = self._ask(folder, number)
            if "problem" in answer:
                raise UserError(answer["problem"])
            on_part(schema.build(answer, Part))

    def _ask(self, folder: Path, number: int) -> dict[str, Any]:
        try:
            print(json.dumps([str(folder.absolute()), number]), file=self.process.stdin, flush=True)
            if line := self.process.stdout.readline():
                return json.loads(line)
        except BrokenPipeError:
            pass
        raise UserError(
            f"A worker process ended with status {self.process.wait()} (-9: killed, often for want of memory). The same "
            f"command goes on; with --num_proc 1 it needs the least memory."
        )

    def close(self) -> None:
        with suppress(BrokenPipeError):  # what a process that was killed has not read
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main() -> None:
    gc.set_threshold(
        100_000
    )  # tokens from Rust are objects that live for a moment, and looking for cycles doubled their cost
    asked: SimpleQueue[tuple[str, int]] = SimpleQueue()
    Thread(target=_listen, args=(asked,), daemon=True).start()
    import pyarrow  # noqa: F401  needed by most, and not before there is something to do

    open_job = cache(Job.open)
    while True:
        folder, number = asked.get()
        try:
            answer = asdict(open_job(Path(folder)).do(number))
        except UserError as error:
            answer = {"problem": str(error)}
        print(json.dumps(answer), flush=True)


def _listen(asked: SimpleQueue[tuple[str, int]]) -> None:
    with open(0, "rb", buffering=0) as questions:  # a buffer would be locked when the process ends
        for line in questions:
            asked.put(json.loads(line))
    os._exit(0)  # whoever asked has all answers, or is gone


if __name__ == "__main__":
    main()
