"""Merging: parts become the files of both splits, without repeated documents and with each document as often as asked.

A document goes to the split that its hash chose, but a long one gives its end for validation and the rest for training.
Interrupted merging resumes: `merged.json` records the sizes of the files, and the ids of a part are deleted only once
they are recorded.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import xxhash

from atomic import write_atomic
from errors import UserError
from tokenizer import dedup, encode, schema
from tokenizer.store import SPLITS, index_file, tokens_file
from tokenizer.worker import Part, Settings, part_file, row_type

BLOCK_TOKENS = 1 << 21
LONG_BYTES = 1 << 20  # a document beyond this, and beyond the validation share of the text, gives its end
CUT_REACH = 4 << 20  # bytes around the wanted place that are searched for a line to cut a text at
BYTES_BETWEEN_RECORDS = 64 << 20
SORTED_BYTES = 128 << 20
DROPPED, TRAIN, VAL, HEAD = range(4)  # destinations of a row; HEAD: train, while the rest of its document goes to val
TARGETS = {"train": (TRAIN, HEAD), "val": (VAL,)}
MIX = np.uint64(0x9E3779B97F4A7C15)


Place = tuple[int, int]  # a part, and a row of it


@dataclass(frozen=True)
class Tail:
    """The end of a long document, or of all text, which becomes validation text."""

    first: Place  # of the document
    cut: Place  # where the tail begins,
    tokens: int  # after so many tokens
    bytes: int  # and bytes of that row
    last: Place


@dataclass
class SplitSize:
    tokens: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass
class MergeProgress:
    """`merged.json`."""

    done: int = 0  # parts, in the order in which they are used
    splits: dict[str, SplitSize] = field(default_factory=lambda: {split: SplitSize() for split in SPLITS})
    tails: list[Tail] | None = None  # of long documents; None until they are found
    end: Tail | None = None  # of all text, where the documents' hashes leave a split empty


class Merger:
    def __init__(self, work: Path, folder: Path, settings: Settings, copies: list[float]):
        """`work` holds the parts; the files go to `folder`. `copies`: of each unit."""
        self.work, self.folder, self.settings, self.copies = work, folder, settings, copies
        self.dtype = np.dtype(settings.dtype).newbyteorder("<")
        passes = range(math.ceil(max(copies)))
        # Copies of a document lie an epoch of their source apart.
        self.order = [(unit, nth) for nth in passes for unit in range(len(copies)) if nth < math.ceil(copies[unit])]
        self.record = work / "merged.json"
        self.progress = self._recorded() if self.record.is_file() else MergeProgress()
        self.row_type = row_type(dedup.keys_per_document(settings.dedup))
        self.parts = [Part.read(work, unit) for unit in range(len(copies))]
        self.verified: set[Path] = set()  # files of parts that are searched for a place to cut
        for unit in range(len(copies)):
            self._verify(unit, "rows", xxhash.xxh3_64_hexdigest(self._rows(unit)))
        ends = [int(self._rows(unit)["ends"].sum()) for unit in range(len(copies))]
        self.before = np.cumsum([0, *ends]).tolist()  # documents before each unit, and of all
        self.kept = self._kept()
        self.repeated = 0 if self.kept is None else int((~self.kept).sum())
        if self.progress.tails is None:
            self.progress.tails = self._tails()
        self.totals = self._totals()
        self.documents = sum(total.documents for total in self.totals.values())

    def _recorded(self) -> MergeProgress:
        try:
            content = {"tails": []} | schema.read(self.record, dict[str, Any])  # versions before them held none out
            was_cut = content.pop("cut", None) is not None  # as older versions recorded the end of all text
            progress = schema.build(content, MergeProgress)
            if was_cut and progress.done < len(self.order):
                self._refuse_older_record()
            return replace(progress, splits={split: progress.splits[split] for split in SPLITS})
        except (ValueError, KeyError) as error:
            raise UserError(f"{self.record} is damaged ({error}); delete {self.work} to begin again.") from error

    def _refuse_older_record(self) -> NoReturn:
        """Older versions wrote all text for training before they cut its end off."""
        raise UserError(
            f"{self.record} was written by an older version in the middle of its work; delete {self.work} to begin again."
        )

    def _rows(self, unit: int) -> np.ndarray:
        return np.fromfile(part_file(self.work, unit, "rows"), dtype=self.row_type)

    def _verify(self, unit: int, name: str, digest: str) -> None:
        """Raise a `UserError` if a file of a part is not what was written. The part then counts as not done."""
        if digest != self.parts[unit].hashes[name]:
            part_file(self.work, unit, "json").unlink()
            raise UserError(
                f"{part_file(self.work, unit, name)} was damaged, by a power cut or a broken disk; the same command makes "
                f"it again and goes on."
            )

    # ---- which documents ------------------------------------------------------------------------------------------------

    def _kept(self) -> np.ndarray | None:
        """Return (documents,) bool, False for those that repeat an earlier one; None where repeats are kept."""
        columns = dedup.key_columns(self.settings.dedup)
        if not columns:
            return None
        memory = max(SORTED_BYTES, psutil.virtual_memory().available // 4)  # more is faster where keys are many
        repeats = [dedup.repeated(self._keys, self.before[-1], column, memory) for column in columns]
        return ~np.logical_or.reduce(repeats)

    def _keys(self) -> Iterator[np.ndarray]:
        """Yield (documents of a part, columns) uint64. The keys of a document of several parts are mixed from theirs."""
        columns = dedup.keys_per_document(self.settings.dedup)
        so_far = np.zeros(columns, dtype=np.uint64)  # of a document that the next part continues
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            keys = rows["keys"][rows["ends"]]
            if len(keys):
                keys[0] ^= so_far
                so_far[:] = 0
            if len(rows) and not rows["ends"][-1]:
                so_far = (so_far ^ rows["keys"][-1]) * MIX
            yield keys

    def _totals(self) -> dict[str, SplitSize]:
        """Return what each split gets from the first use of all parts."""
        totals = {split: SplitSize() for split in SPLITS}
        for unit, source in itertools.product(range(len(self.copies)), SPLITS):
            rows, to = self._destinations(unit, source, 0)
            for split, total in totals.items():
                chosen = np.isin(to, TARGETS[split])
                total.tokens += int(rows["tokens"][chosen].sum(dtype=np.int64))
                total.documents += int(rows["ends"][chosen].sum())
                total.bytes += int(rows["bytes"][chosen].sum(dtype=np.int64))
        return totals

    def _chosen(self, unit: int, rows: np.ndarray, nth: int) -> np.ndarray:
        """Return (rows,) bool: those that are used the nth time."""
        chosen = rows["copies"] > nth
        if self.kept is not None:
            chosen &= self.kept[self.before[unit] + np.cumsum(rows["ends"]) - rows["ends"]]
        return chosen

    def _destinations(self, unit: int, source: str, nth: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a part that lie in its file `source`, and (rows,) where they go the nth time. A row in which a
        tail begins becomes two."""
        rows = self._rows(unit)
        chosen = self._chosen(unit, rows, nth)
        to = np.where(rows["val"], VAL, TRAIN)
        end = self.progress.end
        for tail in [*([] if end is None else [end]), *reversed(self.progress.tails)]:
            first, cut, last = (_row_in(unit, place, len(rows)) for place in (tail.first, tail.cut, tail.last))
            to[max(first, 0) : max(cut, 0)] = TRAIN
            to[cut + 1 : last + 1] = VAL
            if tail.cut[0] == unit:
                to[cut] = VAL
                if tail.tokens:
                    rows, chosen, to = (np.insert(array, cut, array[cut]) for array in (rows, chosen, to))
                    rows["tokens"][cut : cut + 2] = tail.tokens, rows["tokens"][cut] - tail.tokens
                    rows["bytes"][cut : cut + 2] = tail.bytes, rows["bytes"][cut] - tail.bytes
                    rows["ends"][cut], rows["starts"][cut + 1] = True, True
                    to[cut] = TRAIN if tail is end else HEAD
        to[~chosen | ((to == VAL) & (nth > 0))] = DROPPED
        in_file = rows["val"] if source == "val" else ~rows["val"]
        return rows[in_file], to[in_file]

    # ---- writing --------------------------------------------------------------------------------------------------------

    def merge(self) -> None:
        """Write both splits; raise a `UserError` for too little text, and an `OSError` for a full disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._truncate()
        has_both = self.totals["train"].documents and self.totals["val"].tokens
        if self.progress.end is None and not has_both and self.progress.done < len(self.order):
            if self.progress.done:
                self._refuse_older_record()
            self.progress.end = self._end()
        last_use = {unit: position for position, (unit, _) in enumerate(self.order)}
        self._delete(unit for unit, position in last_use.items() if position < self.progress.done)
        used, unrecorded = [], 0
        for position in range(self.progress.done, len(self.order)):
            unit, nth = self.order[position]
            for split in SPLITS:
                unrecorded += self._append(unit, split, nth)
            if last_use[unit] == position:
                used.append(unit)
            self.progress.done = position + 1
            if unrecorded > BYTES_BETWEEN_RECORDS or self.progress.done == len(self.order):
                self._write_record()
                self._delete(used)
                used, unrecorded = [], 0

    def _delete(self, units: Iterable[int]) -> None:
        """Delete the ids of parts; some may be gone already."""
        for unit, split in itertools.product(units, SPLITS):
            part_file(self.work, unit, split).unlink(missing_ok=True)

    def _append(self, unit: int, split: str, nth: int) -> int:
        """Append what a part has in its file for `split`, in blocks; return the bytes written."""
        rows, to = self._destinations(unit, split, nth)
        if nth > 0 and not to.any():
            return 0
        block_of_row = np.cumsum(rows["tokens"], dtype=np.int64) // BLOCK_TOKENS
        bounds = [0, *(np.flatnonzero(np.diff(block_of_row)) + 1).tolist(), len(rows)]
        size, digest = 0, xxhash.xxh3_64()
        with part_file(self.work, unit, split).open("rb") as source:
            for first, stop in itertools.pairwise(bounds):
                block, places = rows[first:stop], to[first:stop]
                count = int(block["tokens"].sum(dtype=np.int64))
                ids = np.fromfile(source, dtype=self.dtype, count=count)
                digest.update(ids)
                if len(ids) < count:  # the hash differs then
                    break
                for target in SPLITS:
                    use = np.isin(places, TARGETS[target])
                    if use.any():
                        used = ids if use.all() else ids[np.repeat(use, block["tokens"])]
                        size += self._write(target, block[use], used, places[use] == HEAD)
        self._verify(unit, split, digest.hexdigest())
        return size

    def _write(self, split: str, rows: np.ndarray, ids: np.ndarray, is_head: np.ndarray) -> int:
        """Append rows and their ids to a split; a head gets an end-of-text of its own. Return the bytes written."""
        written, tokens = self.progress.splits[split], rows["tokens"].astype(np.int64)
        if self.settings.eos is not None and is_head.any():
            ids, tokens = np.insert(ids, np.cumsum(tokens)[is_head], self.settings.eos), tokens + is_head
        with (self.folder / tokens_file(split)).open("ab") as file:
            file.write(ids)  # `tofile` does not say why it fails
        until = written.tokens + np.cumsum(tokens)
        with (self.folder / index_file(split)).open("ab") as file:
            file.write(until[rows["ends"]].astype("<u8"))
        written.tokens += len(ids)
        written.documents += int(rows["ends"].sum())
        written.bytes += int(rows["bytes"].sum(dtype=np.int64))
        return ids.nbytes

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield every file with its recorded size."""
        for split, written in self.progress.splits.items():
            yield self.folder / tokens_file(split), written.tokens * self.dtype.itemsize
            yield self.folder / index_file(split), written.documents * 8

    def _write_record(self) -> None:
        for path, _ in self._files():
            with path.open("ab") as file:
                os.fsync(file.fileno())
        write_atomic(self.record, schema.sealed(asdict(self.progress)))

    def _truncate(self) -> None:
        """Cut off what was written and not recorded."""
        for path, size in self._files():
            path.touch()
            os.truncate(path, size)

    # ---- tails ----------------------------------------------------------------------------------------------------------

    def _tails(self) -> list[Tail]:
        """Return the ends of documents that are longer than `LONG_BYTES` and than the validation share of all text: by
        their hash, they would leave the validation split without any of their text, or fill it."""
        found, total, documents = [], 0, 0
        carried, first = 0, (0, 0)  # bytes and beginning of the document that continues
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            until = np.cumsum(np.where(self._chosen(unit, rows, 0), rows["bytes"], 0), dtype=np.int64)
            ends = np.flatnonzero(rows["ends"])
            sizes = np.diff(until[ends], prepend=-carried)
            for i in np.flatnonzero(sizes > LONG_BYTES).tolist():
                found.append((int(sizes[i]), (unit, int(ends[i - 1]) + 1) if i else first, (unit, int(ends[i]))))
            if len(ends):
                carried, first = -int(until[ends[-1]]), (unit, int(ends[-1]) + 1)
            carried += int(until[-1]) if len(until) else 0
            first = first if carried else (unit + 1, 0)
            documents += int((sizes > 0).sum())
            total += int(until[-1]) if len(until) else 0
        share = self.settings.validation_fraction
        long = [] if documents < 2 else [place for place in found if place[0] > share * total]
        return list(filter(None, (self._tail(size * share, size, first, last) for size, first, last in long)))

    def _end(self) -> Tail:
        """Return the end of all text, about `validation_fraction` of its bytes; raise a `UserError` for too little text."""
        tokens, size = (sum(getattr(total, name) for total in self.totals.values()) for name in ("tokens", "bytes"))
        last = len(self.copies) - 1
        place = (last, len(self._rows(last)) - 1)
        tail = self._tail(size * self.settings.validation_fraction, size, (0, 0), place, CUT_REACH)
        if tail is None:
            raise UserError(
                f"The text is too short: {size} bytes in {tokens} tokens cannot be split into text to train on and text to "
                f"validate with."
            )
        return tail

    def _tail(self, wanted: float, size: int, first: Place, last: Place, reach: int = 0) -> Tail | None:
        """Return about `wanted` bytes at the end of a text of `size`: from the start of a line or document if there is one
        in the row or, with `reach`, within so many bytes; otherwise from that of a character. None: no place to cut."""
        least, most = max(wanted / 2, wanted - reach), min(2 * wanted, wanted + reach)
        best, found = (True, math.inf), None
        behind = 0  # bytes
        for unit, row, rows in self._backward(last):
            n_bytes = int(rows["bytes"][row])
            if behind + n_bytes >= least and (cut := self._best_cut(unit, row, rows, behind, size, wanted)):
                quality, tokens, bytes_before = cut
                if quality <= best:
                    best, found = quality, Tail(first, (unit, row), tokens, bytes_before, last)
            behind += n_bytes
            if (unit, row) == first or (found and behind >= most):
                break
        return found

    def _backward(self, last: Place) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the used rows up to `last`, the last one first: part, row, and all rows of the part."""
        for unit in range(last[0], -1, -1):
            rows = self._rows(unit)
            used = self._chosen(unit, rows, 0)
            for row in np.flatnonzero(used[: last[1] + 1] if unit == last[0] else used)[::-1].tolist():
                yield unit, row, rows

    def _best_cut(
        self, unit: int, row: int, rows: np.ndarray, behind: int, size: int, wanted: float
    ) -> tuple[tuple[bool, float], int, int] | None:
        """Return how good the best cut in a row is, smaller is better, and its tokens and bytes before the cut.
        `behind`: bytes of the text after the row."""
        split = "val" if rows["val"][row] else "train"
        path = part_file(self.work, unit, split)
        if path not in self.verified:  # a text of many short documents has many rows to look at
            with path.open("rb") as file:
                self._verify(unit, split, hashlib.file_digest(file, xxhash.xxh3_64).hexdigest())
            self.verified.add(path)
        start = int(rows["tokens"][:row][rows["val"][:row] == rows["val"][row]].sum(dtype=np.int64))
        ids = np.fromfile(path, self.dtype, count=rows["tokens"][row], offset=start * self.dtype.itemsize)
        lengths, starts_character, ends_line = self.table
        from_end = behind + lengths[ids][::-1].cumsum()[::-1]
        if len(ids) and (not rows["starts"][row] or behind + rows["bytes"][row] >= size):
            from_end[0] = size  # the head keeps a token, unless a document begins here that is not the first
        cuts = np.flatnonzero(starts_character[ids] & (from_end < size))
        if not len(cuts):
            return None
        distance = np.abs(from_end[cuts] - wanted)
        opens = np.where(cuts > 0, ends_line[ids[cuts - 1]], True) & (from_end[cuts] > wanted / 2)
        opens &= from_end[cuts] < 2 * wanted
        best = int(np.lexsort((distance, ~opens))[0])
        cut = int(cuts[best])
        n_bytes = max(0, int(rows["bytes"][row]) - (int(from_end[cut]) - behind))
        return (not opens[best], float(distance[best])), cut, n_bytes

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of each token, whether it starts a character, whether it ends a line."""
        texts = encode.token_bytes(encode.load_rust(self.folder / "tokenizer" / "tokenizer.json"))
        return (
            np.array([len(text) for text in texts], dtype=np.int64),
            np.array([bool(text) and not 0x80 <= text[0] < 0xC0 for text in texts]),
            np.array([text.endswith(b"\n") for text in texts]),
        )


def _row_in(unit: int, place: Place, rows: int) -> int:
    """Return the row of `place` as seen from a unit of so many rows: -1 if it lies before, their number if after it."""
    of, row = place
    return row if of == unit else -1 if of < unit else rows
