"""Merge the parts into the files of both splits: drop repeated documents and write the copies that `--weights` sets.

The hash of a document selects its split, but the end of a long document goes to validation and the rest to training.
If a dataset has a validation split, that split is the validation text and no other text is held out. Interrupted
merging resumes: `merged.json` records the sizes of the files, and the ids of a part are deleted only after they are
recorded.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from common import schema
from common.atomic import fsync, write_atomic
from common.errors import UserError
from tokenizer.build.worker import DocumentSettings, Part, part_file, row_type
from tokenizer.cleaning import dedup
from tokenizer.corpus.units import TextError, Unit
from tokenizer.store.store import SPLITS, index_file, tokens_file

BLOCK_TOKENS = 1 << 21
LONG_BYTES = 1 << 20  # a document above this and above the validation share of the text is divided between the splits
CUT_REACH = 4 << 20  # bytes around the target position that are searched for the beginning of a line
BYTES_BETWEEN_RECORDS = 64 << 20
NOWHERE, TRAIN, VAL, HEAD = range(4)  # destinations of a row; HEAD goes to train, the rest of its document to val
TARGETS = {"train": (TRAIN, HEAD), "val": (VAL,)}


@dataclass(frozen=True)
class Tail:
    """End of a long document, or of all text, that becomes validation text. Rows are numbered across all parts."""

    first: int  # first row of the document
    cut: int  # row in which the tail begins
    tokens: int  # tokens of that row before the tail
    bytes: int  # bytes of that row before the tail
    last: int  # last row of the document


@dataclass
class SplitSize:
    tokens: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass
class MergeProgress:
    """Content of `merged.json`."""

    done: int  # number of uses of parts that were merged so far, in order
    splits: dict[str, SplitSize]
    tails: list[Tail]  # tails of long documents
    end: Tail | None  # tail of all text, if the hashes of the documents leave a split empty


class Merger:
    def __init__(self, work: Path, folder: Path, settings: DocumentSettings, units: list[Unit], texts: list[bytes]):
        """Read and verify the parts of `units` in `work`, whose files will go to `folder`. `texts`: text of each token.
        Raise a `UserError` if a part is damaged, or there is too little text."""
        self.work, self.folder, self.settings, self.texts = work, folder, settings, texts
        self.copies, self.has_validation_split = [unit.copies for unit in units], any(unit.val for unit in units)
        self.dtype = np.dtype(settings.dtype).newbyteorder("<")
        self.row_type = row_type(dedup.KEYS[settings.dedup])
        self.parts = [Part.read(work, unit) for unit in range(len(units))]
        self.intact: set[Path] = set()  # files of ids whose hashes were checked
        self.first_row, self.first_document = [0], [0]  # for each unit, then the total
        for unit in range(len(units)):
            rows = self._rows(unit)
            self._verify(unit, "rows", xxhash.xxh3_64_hexdigest(rows))
            self.first_row.append(self.first_row[-1] + len(rows))
            self.first_document.append(self.first_document[-1] + int(rows["ends"].sum()))
        self.repeats = np.zeros(self.first_document[-1] + 1, bool)
        if settings.dedup != "no":
            self.repeats[:-1] = dedup.repeated(settings.dedup, self._keys)
        self.repeated = int(self.repeats.sum())
        self.documents, size, is_split, long = self._survey()
        self.record = work / "merged.json"
        if not self.record.is_file():
            self.progress = self._plan(size, is_split, long)
            return
        try:
            self.progress = schema.read(self.record, MergeProgress)
        except ValueError as error:
            raise UserError(
                f"{self.record} is damaged or was written by an older version ({error}); delete {work} to start over."
            ) from error

    def _plan(self, size: int, is_split: bool, long: list[tuple[int, int, int]]) -> MergeProgress:
        """Return the progress before merging, with the tails that `_survey` requires.
        Raise a `TextError` for too little text."""
        share = self.settings.validation_fraction
        tails = [self._tail(n_bytes * share, n_bytes, *rows) for n_bytes, *rows in long]
        progress = MergeProgress(0, {split: SplitSize() for split in SPLITS}, list(filter(None, tails)), None)
        if self.documents and not is_split and not progress.tails:
            if self.has_validation_split:
                raise TextError(
                    "The split validation or the split train has no text left; name only the training split "
                    "(user/name::train or FOLDER/train) to hold out text of it."
                )
            progress.end = self._tail(size * share, size, 0, self.first_row[-1] - 1, CUT_REACH)
            if progress.end is None:
                raise TextError(
                    f"The text is too short: {size} bytes cannot be split into training text and validation text."
                )
        return progress

    def _rows(self, unit: int) -> np.ndarray:
        return np.fromfile(part_file(self.work, unit, "rows"), dtype=self.row_type)

    def _verify(self, unit: int, name: str, digest: str) -> None:
        """Raise a `UserError` if a file of a part changed after it was written, and mark the part as not done."""
        if digest != self.parts[unit].hashes[name]:
            part_file(self.work, unit, "json").unlink()
            raise UserError(
                f"{part_file(self.work, unit, name)} was damaged, by a power failure or a broken disk; the same "
                f"command, without --merge, writes it again and resumes."
            )

    def _keys(self, column: int) -> Iterator[np.ndarray]:
        """Yield one column of keys, (documents of a part,) uint64. A document in several parts gets a mix of theirs."""
        head = np.zeros(1, dtype=np.uint64)  # key of a document that continues in the next part
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            keys = rows["keys"][rows["ends"], column]
            if len(keys):
                keys[:1] ^= head
                head[:] = 0
            if len(rows) and not rows["ends"][-1]:
                head = (head ^ rows["keys"][-1:, column]) * np.uint64(dedup.GOLDEN)
            yield keys

    def _chosen(self, unit: int, rows: np.ndarray, nth: int) -> np.ndarray:
        """Return a mask of the rows that are used the nth time, (rows,) bool."""
        document = self.first_document[unit] + np.cumsum(rows["ends"]) - rows["ends"]
        return (rows["copies"] > nth) & ~self.repeats[document]

    def _survey(self) -> tuple[int, int, bool, list[tuple[int, int, int]]]:
        """Return documents and bytes without copies, whether hashes give two tokens to both splits, and long documents.
        A long document, as (bytes, first row, last row), exceeds both `LONG_BYTES` and the validation share of all
        text: assigned by its hash, it would leave the validation split without any of its text, or fill it."""
        long, documents, size, tokens = [], 0, 0, np.zeros(2)  # tokens for training and for validation
        start, first_row = 0, 0  # bytes before the current document, and its first row
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            mask = self._chosen(unit, rows, 0)
            documents += int((rows["ends"] & mask).sum())
            tokens += np.bincount(rows["val"][mask], rows["tokens"][mask], minlength=2)
            until = size + np.cumsum(np.where(mask, rows["bytes"], 0), dtype=np.int64)
            ends = np.flatnonzero(rows["ends"])
            sizes, lasts = np.diff(until[ends], prepend=start), self.first_row[unit] + ends
            for i in np.flatnonzero(sizes > LONG_BYTES).tolist():
                long.append((int(sizes[i]), int(lasts[i - 1]) + 1 if i else first_row, int(lasts[i])))
            if len(ends):
                start, first_row = int(until[ends[-1]]), int(lasts[-1]) + 1
            size = int(until[-1]) if len(until) else size
        minimum = self.settings.validation_fraction * size
        is_divided = documents > 1 and not self.has_validation_split
        long = [document for document in long if document[0] > minimum and is_divided]
        return documents, size, bool((tokens > 1).all()), long

    def _tail(self, target: float, size: int, first_row: int, last_row: int, reach: int = 0) -> Tail | None:
        """Return about `target` bytes at the end of a text of `size` bytes, or None if there is no place to cut.
        The tail begins at the start of a line or document if there is one in the row or, with `reach`, within `reach`
        bytes; otherwise at the start of a character."""
        minimum, maximum = max(target / 2, target - reach), min(2 * target, target + reach)
        best_cost, tail = (True, math.inf), None
        rest_bytes = 0  # bytes of text after the current row
        for unit in range(int(np.searchsorted(self.first_row, last_row, side="right")) - 1, -1, -1):
            rows, start = self._rows(unit), self.first_row[unit]
            mask = self._chosen(unit, rows, 0)[: last_row - start + 1]
            for row in np.flatnonzero(mask)[::-1].tolist():
                n_bytes = int(rows["bytes"][row])
                if rest_bytes + n_bytes >= minimum:
                    cost, tokens, n_head = self._best_cut(unit, row, rows, rest_bytes, size, target)
                    if cost <= best_cost:
                        best_cost, tail = cost, Tail(first_row, start + row, tokens, n_head, last_row)
                rest_bytes += n_bytes
                if start + row == first_row or (tail and rest_bytes >= maximum):
                    return tail
        return tail

    def _best_cut(
        self, unit: int, row: int, rows: np.ndarray, rest_bytes: int, size: int, target: float
    ) -> tuple[tuple[float, float], int, int]:
        """Return the cost of the best cut in a row (infinite without one), and the row's tokens and bytes before it.
        `rest_bytes`: bytes of the text after the row."""
        ids = self._ids(unit, row, rows)
        lengths, starts_character, ends_line = self.table
        from_end = rest_bytes + lengths[ids][::-1].cumsum()[::-1]
        if len(ids) and (not rows["starts"][row] or rest_bytes + rows["bytes"][row] >= size):
            from_end[0] = size  # the head keeps a token, unless a later document begins here
        is_place = starts_character[ids] & (from_end < size)
        is_place[-1:] &= rest_bytes > 0  # the first of the tail's tokens is not a target: it needs two
        cuts = np.flatnonzero(is_place)
        if not len(cuts):
            return (math.inf, math.inf), 0, 0
        distance = np.abs(from_end[cuts] - target)
        opens = np.where(cuts > 0, ends_line[ids[cuts - 1]], True) & (from_end[cuts] > target / 2)
        opens &= from_end[cuts] < 2 * target
        best = int(np.lexsort((distance, ~opens))[0])
        token = int(cuts[best])
        n_bytes = max(0, int(rows["bytes"][row]) - (int(from_end[token]) - rest_bytes))
        return (not opens[best], float(distance[best])), token, n_bytes

    def _ids(self, unit: int, row: int, rows: np.ndarray) -> np.ndarray:
        """Return the ids of a row, after checking the hash of their file."""
        split = "val" if rows["val"][row] else "train"
        path = part_file(self.work, unit, split)
        if path not in self.intact:  # checked once, because a text of many short documents has many rows
            with path.open("rb") as file:
                self._verify(unit, split, hashlib.file_digest(file, xxhash.xxh3_64).hexdigest())
            self.intact.add(path)
        start = int(rows["tokens"][:row][rows["val"][:row] == rows["val"][row]].sum(dtype=np.int64))
        return np.fromfile(path, self.dtype, count=rows["tokens"][row], offset=start * self.dtype.itemsize)

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Table of tokens: bytes of each token, whether it starts a character, and whether it ends a line."""
        return (
            np.array([len(text) for text in self.texts], dtype=np.int64),
            np.array([bool(text) and not 0x80 <= text[0] < 0xC0 for text in self.texts]),
            np.array([text.endswith(b"\n") for text in self.texts]),
        )

    def merge(self) -> None:
        """Write both splits. Raise an `OSError` for a full disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path, size in self._files():  # cut off data that was written but not recorded
            path.touch()
            os.truncate(path, size)
        passes = range(math.ceil(max(self.copies)))
        # Copies of a document are written one epoch of their source apart.
        order = [(unit, nth) for nth in passes for unit, copies in enumerate(self.copies) if nth < math.ceil(copies)]
        last_use = {unit: position for position, (unit, _) in enumerate(order)}
        # Deletes these again, in case the deletion was interrupted.
        obsolete = [unit for unit, position in last_use.items() if position < self.progress.done]
        record_bytes = sum(size for _, size in self._files())
        for position in range(self.progress.done, len(order)):
            unit, nth = order[position]
            for split in SPLITS:
                self._append(unit, split, nth)
            self.progress.done = position + 1
            if last_use[unit] == position:
                obsolete.append(unit)
            n_bytes = sum(size for _, size in self._files())
            if n_bytes > record_bytes + BYTES_BETWEEN_RECORDS or self.progress.done == len(order):
                for path, _ in self._files():
                    fsync(path)
                write_atomic(self.record, schema.sealed(asdict(self.progress)))
                for part, split in itertools.product(obsolete, SPLITS):
                    part_file(self.work, part, split).unlink(missing_ok=True)
                obsolete, record_bytes = [], n_bytes

    def _append(self, unit: int, split: str, nth: int) -> None:
        """Append a part's file for `split` to the files of the store, in blocks."""
        rows, to = self._destinations(unit, split, nth)
        if nth > 0 and not to.any():
            return
        block_of_row = np.cumsum(rows["tokens"], dtype=np.int64) // BLOCK_TOKENS
        bounds = [0, *(np.flatnonzero(np.diff(block_of_row)) + 1).tolist(), len(rows)]
        digest = xxhash.xxh3_64()
        with part_file(self.work, unit, split).open("rb") as source:
            for start, stop in itertools.pairwise(bounds):
                block, places = rows[start:stop], to[start:stop]
                count = int(block["tokens"].sum(dtype=np.int64))
                ids = np.fromfile(source, dtype=self.dtype, count=count)
                digest.update(ids)
                if len(ids) < count:  # the file is truncated, so its hash differs
                    break
                for target in SPLITS:
                    use = np.isin(places, TARGETS[target])
                    if use.any():
                        selection = ids if use.all() else ids[np.repeat(use, block["tokens"])]
                        self._write(target, block[use], selection, places[use] == HEAD)
        self._verify(unit, split, digest.hexdigest())

    def _destinations(self, unit: int, source: str, nth: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows in the file `source` of a part, and their destinations in the nth use of the part, (rows,).
        A row in which a tail begins becomes two rows."""
        rows, progress = self._rows(unit), self.progress
        mask = self._chosen(unit, rows, nth)
        to = np.where(rows["val"], VAL, TRAIN)
        for tail in [progress.end] if progress.end else progress.tails[::-1]:
            places = np.array([tail.first, tail.cut, tail.last]) - self.first_row[unit]
            first_row, row, last_row = np.clip(places, -1, len(rows)).tolist()
            to[max(first_row, 0) : max(row, 0)] = TRAIN
            to[row + 1 : last_row + 1] = VAL
            if not 0 <= row < len(rows):
                continue
            to[row] = VAL
            if tail.tokens:
                rows, mask, to = (np.insert(array, row, array[row]) for array in (rows, mask, to))
                rows["tokens"][row : row + 2] = tail.tokens, rows["tokens"][row] - tail.tokens
                rows["bytes"][row : row + 2] = tail.bytes, rows["bytes"][row] - tail.bytes
                rows["ends"][row], rows["starts"][row + 1] = True, True
                to[row] = TRAIN if tail is progress.end and max(self.copies) <= 1 else HEAD
        to[~mask | ((to == VAL) & (nth > 0))] = NOWHERE
        in_file = rows["val"] == (source == "val")
        return rows[in_file], to[in_file]

    def _write(self, split: str, rows: np.ndarray, ids: np.ndarray, is_head: np.ndarray) -> None:
        """Append rows and their ids to a split. Each head gets its own end-of-text token."""
        size, tokens = self.progress.splits[split], rows["tokens"].astype(np.int64)
        if self.settings.eos is not None and is_head.any():
            ids, tokens = np.insert(ids, np.cumsum(tokens)[is_head], self.settings.eos), tokens + is_head
        with (self.folder / tokens_file(split)).open("ab") as file:
            file.write(ids)  # `tofile` does not report why it fails
        until = size.tokens + np.cumsum(tokens)
        with (self.folder / index_file(split)).open("ab") as file:
            file.write(until[rows["ends"]].astype("<u8"))
        size.tokens += len(ids)
        size.documents += int(rows["ends"].sum())
        size.bytes += int(rows["bytes"].sum(dtype=np.int64))

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield every file of the splits with its recorded size."""
        for split, size in self.progress.splits.items():
            yield self.folder / tokens_file(split), size.tokens * self.dtype.itemsize
            yield self.folder / index_file(split), size.documents * 8
