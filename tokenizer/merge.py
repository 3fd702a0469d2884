"""Parts -> the files of both splits: repeated documents left out, the others as often as asked, all in their order.

A document goes to the split that its hash chose, but a long one gives its end for validation and the rest for training.

Merging goes on where it was interrupted: `merged.json` has on record what stands in the files, and the ids of a part are
deleted only once they are on record.
"""

import itertools
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
import xxhash

from atomic import write_atomic
from errors import UserError
from tokenizer import dedup, encode, schema
from tokenizer.store import SPLITS, index_file, tokens_file
from tokenizer.work import Part, Settings, part_file, row_type

BLOCK_TOKENS = 1 << 21
TAIL_BLOCK_TOKENS = 1 << 21  # of these, two or three are looked at for a place to cut, which may depend on it
LONG_BYTES = 1 << 20  # a document beyond this, and beyond the validation share of the text, gives its end
BYTES_BETWEEN_RECORDS = 64 << 20
SORTED_BYTES = 128 << 20
NOWHERE, TRAIN, VAL, HEAD = range(4)  # where a row goes; HEAD: to train, and what follows in its document does not
TARGETS = {"train": (TRAIN, HEAD), "val": (VAL,)}
MIX = np.uint64(0x9E3779B97F4A7C15)


Place = tuple[int, int]  # a part, and a row of it


@dataclass(frozen=True)
class Tail:
    """The end of a long document, which becomes text to validate with."""

    first: Place  # of the document
    cut: Place  # where the tail begins,
    tokens: int  # after so many tokens
    bytes: int  # and bytes of that row
    last: Place


@dataclass
class Written:
    """What of a split stands in its files."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass
class Progress:
    """`merged.json`."""

    done: int = 0  # parts, in the order in which they are used
    splits: dict[str, Written] = field(default_factory=lambda: {split: Written() for split in SPLITS})
    cut: Written | None = None  # what was left to train on where the end of it became the text to validate with
    tails: list[Tail] | None = None  # of long documents; None until they are found


class Merger:
    def __init__(self, work: Path, folder: Path, settings: Settings, copies: list[float]):
        """`work` holds the parts; the files go to `folder`. `copies`: of each unit."""
        self.work, self.folder, self.settings, self.copies = work, folder, settings, copies
        self.dtype = np.dtype(settings.dtype).newbyteorder("<")
        self.record = work / "merged.json"
        self.progress = self._recorded() if self.record.is_file() else Progress()
        passes = range(math.ceil(max(copies)))
        # Copies of a document lie an epoch of their source apart.
        self.order = [(unit, nth) for nth in passes for unit in range(len(copies)) if nth < math.ceil(copies[unit])]
        self.row_type = row_type(dedup.keys_per_document(settings.dedup))
        self.parts = [Part.read(work, unit) for unit in range(len(copies))]
        for unit in range(len(copies)):
            self._verify(unit, "rows", xxhash.xxh3_64_hexdigest(self._rows(unit)))
        self.ends = [int(self._rows(unit)["ends"].sum()) for unit in range(len(copies))]  # documents of each unit
        self.before = np.cumsum([0, *self.ends]).tolist()
        self.kept = self._kept()
        self.repeated = 0 if self.kept is None else int((~self.kept).sum())
        if self.progress.tails is None:
            self.progress.tails = self._tails()
        self.all_train = False
        first = np.array([self._used(unit) for unit in range(len(copies))])
        self.documents = int(first[..., 0].sum())
        self.all_train = not first[:, 0].any()  # all fell to validation
        # Tokens and bytes of the units before each, the first time that they are used.
        self.tokens_before, self.bytes_before = (
            np.cumsum([0, *first[..., column].sum(axis=1).tolist()]).tolist() for column in (1, 2)
        )

    def _recorded(self) -> Progress:
        try:
            content = {"tails": []} | schema.read(self.record, dict[str, Any])  # versions before them held none out
            progress = schema.build(content, Progress)
            return replace(progress, splits={split: progress.splits[split] for split in SPLITS})
        except (ValueError, KeyError) as error:
            raise UserError(f"{self.record} is damaged ({error}); delete {self.work} to begin again.") from error

    def _rows(self, unit: int) -> np.ndarray:
        return np.fromfile(part_file(self.work, unit, "rows"), dtype=self.row_type)

    def _verify(self, unit: int, name: str, digest: str) -> None:
        """Raise a `UserError` where a file of a part is not what was written. The part then counts as not done."""
        if digest != self.parts[unit].hashes[name]:
            part_file(self.work, unit, "json").unlink()
            raise UserError(
                f"{part_file(self.work, unit, name)} was damaged, by a power cut or a broken disk; the same command makes "
                f"it again and goes on."
            )

    # ---- which documents ------------------------------------------------------------------------------------------------

    def _kept(self) -> np.ndarray | None:
        """(documents,) bool: False for those that repeat an earlier one; None where repeats are kept."""
        columns = dedup.key_columns(self.settings.dedup)
        if not columns:
            return None
        memory = max(SORTED_BYTES, psutil.virtual_memory().available // 4)  # more is faster where keys are many
        repeats = [dedup.repeated(self._keys, sum(self.ends), column, memory) for column in columns]
        return ~np.logical_or.reduce(repeats)

    def _keys(self) -> Iterator[np.ndarray]:
        """(documents of a part, columns) uint64. The keys of a document of several parts are mixed from theirs."""
        columns = dedup.keys_per_document(self.settings.dedup)
        so_far = np.zeros(columns, dtype=np.uint64)  # of a document that goes on
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            keys = rows["keys"][rows["ends"]]
            if len(keys):
                keys[0] ^= so_far
                so_far[:] = 0
            if len(rows) and not rows["ends"][-1]:
                so_far = (so_far ^ rows["keys"][-1]) * MIX
            yield keys

    def _used(self, unit: int) -> list[tuple[int, int, int]]:
        """Documents, tokens and bytes that a part has to train on and to validate with, the first time that it is used."""
        routed = [self._routed(unit, split, 0) for split in SPLITS]
        rows, to = (np.concatenate(arrays) for arrays in zip(*routed, strict=True))
        return [
            tuple(int(rows[name][np.isin(to, places)].sum(dtype=np.int64)) for name in ("ends", "tokens", "bytes"))
            for places in TARGETS.values()
        ]

    def _chosen(self, unit: int, rows: np.ndarray, nth: int) -> np.ndarray:
        """(rows,) bool: those that are used the nth time."""
        chosen = rows["copies"] > nth
        if self.kept is not None:
            chosen &= self.kept[self.before[unit] + np.cumsum(rows["ends"]) - rows["ends"]]
        return chosen

    def _routed(self, unit: int, split: str, nth: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a part that lie in its file for `split`, and (rows,) where they go the nth time. A row in which a tail
        begins is two."""
        rows = self._rows(unit)
        chosen = self._chosen(unit, rows, nth)
        to = np.where(rows["val"] & (not self.all_train), VAL, TRAIN)
        for tail in reversed(self.progress.tails):
            first, cut, last = (_row_in(unit, place, len(rows)) for place in (tail.first, tail.cut, tail.last))
            to[max(first, 0) : max(cut, 0)] = TRAIN
            to[cut + 1 : last + 1] = VAL
            if tail.cut[0] == unit:
                rows, chosen, to = (np.insert(array, cut, array[cut]) for array in (rows, chosen, to))
                rows["tokens"][cut : cut + 2] = tail.tokens, rows["tokens"][cut] - tail.tokens
                rows["bytes"][cut : cut + 2] = tail.bytes, rows["bytes"][cut] - tail.bytes
                rows["ends"][cut], rows["starts"][cut + 1] = True, True
                to[cut : cut + 2] = HEAD, VAL
        to[~chosen | ((to == VAL) & (nth > 0))] = NOWHERE
        in_file = rows["val"] if split == "val" else ~rows["val"]
        return rows[in_file], to[in_file]

    # ---- writing --------------------------------------------------------------------------------------------------------

    def merge(self) -> None:
        """Writes both splits.

        Raises:
            UserError: not enough text for two splits.
            OSError: a full disk, say.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cut_back()
        used, needed = (
            {unit for unit, _ in order}
            for order in (self.order[: self.progress.done], self.order[self.progress.done :])
        )
        self._delete(used - needed)
        self._append_until(len(self.ends))  # all once
        if self.progress.splits["val"].tokens == 0:
            self._cut_off_tail()
        self._append_until(len(self.order))

    def _append_until(self, stop: int) -> None:
        last_use = {unit: position for position, (unit, _) in enumerate(self.order)}
        used, unrecorded = [], 0
        for position in range(self.progress.done, stop):
            unit, nth = self.order[position]
            for split in SPLITS:
                unrecorded += self._append(unit, split, nth)
            if last_use[unit] == position:
                used.append(unit)
            self.progress.done = position + 1
            if unrecorded > BYTES_BETWEEN_RECORDS or self.progress.done == stop:
                self._write_record()
                self._delete(used)
                used, unrecorded = [], 0

    def _delete(self, units: Iterable[int]) -> None:
        """The ids of parts; killed at this, some are there still."""
        for unit, split in itertools.product(units, SPLITS):
            part_file(self.work, unit, split).unlink(missing_ok=True)

    def _append(self, unit: int, split: str, nth: int) -> int:
        """Appends what a part has in its file for `split`, in blocks. Returns the bytes written."""
        rows, to = self._routed(unit, split, nth)
        if nth > 0 and self.progress.cut is not None:
            rows, to = self._up_to_cut(unit, split, rows, to)
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
                if len(ids) < count:  # as the hash will say
                    break
                for target in SPLITS:
                    use = np.isin(places, TARGETS[target])
                    if use.any():
                        used = ids if use.all() else ids[np.repeat(use, block["tokens"])]
                        size += self._write(target, block[use], used, places[use] == HEAD)
        self._verify(unit, split, digest.hexdigest())
        return size

    def _write(self, split: str, rows: np.ndarray, ids: np.ndarray, is_head: np.ndarray) -> int:
        """Appends rows and their ids to a split; a head gets an end-of-text of its own. Returns the bytes written."""
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
        """Every file with the size that is on record."""
        for split, written in self.progress.splits.items():
            yield self.folder / tokens_file(split), written.tokens * self.dtype.itemsize
            yield self.folder / index_file(split), written.documents * 8

    def _write_record(self) -> None:
        for path, _ in self._files():
            with path.open("ab") as file:
                os.fsync(file.fileno())
        write_atomic(self.record, schema.sealed(asdict(self.progress)))

    def _cut_back(self) -> None:
        """Cuts off what was written and not put on record."""
        for path, size in self._files():
            path.touch()
            os.truncate(path, size)
        if (cut := self.progress.cut) is not None:
            with (self.folder / index_file("train")).open("r+b") as index:  # the last document ends at the cut
                index.seek(8 * (cut.documents - 1))
                index.write(np.array([cut.tokens], dtype="<u8"))

    # ---- long documents ---------------------------------------------------------------------------------------------------

    def _tails(self) -> list[Tail]:
        """The ends of documents that are longer than `LONG_BYTES` and than the validation share of all text: by their hash,
        they would leave the validation split without any of their text, or fill it. A lone document is cut later."""
        found, total, documents = [], 0, 0
        size, first = 0, (0, 0)  # of the document that goes on
        for unit in range(len(self.copies)):
            rows = self._rows(unit)
            until = np.cumsum(np.where(self._chosen(unit, rows, 0), rows["bytes"], 0), dtype=np.int64)
            before = 0
            for last in np.flatnonzero(rows["ends"]).tolist():
                size += int(until[last]) - before
                if size > LONG_BYTES:
                    found.append((size, first, (unit, last)))
                documents += size > 0
                before, size, first = int(until[last]), 0, (unit, last + 1)
            rest = int(until[-1]) - before if len(until) else 0
            first = first if size or rest else (unit + 1, 0)
            size, total = size + rest, total + (int(until[-1]) if len(until) else 0)
        share = self.settings.validation_fraction
        longest = share * total
        long = [] if documents < 2 else [place for place in found if place[0] > longest]
        return list(filter(None, (self._tail(size * share, size, first, last) for size, first, last in long)))

    def _tail(self, wanted: float, size: int, first: Place, last: Place) -> Tail | None:
        """About `wanted` bytes at the end of a document of `size`; None where it has no place to cut."""
        behind, (unit, row) = 0, last
        rows = self._rows(unit)
        while behind + int(rows["bytes"][row]) < wanted:
            behind += int(rows["bytes"][row])
            row -= 1
            while row < 0:
                unit -= 1
                rows = self._rows(unit)
                row += len(rows)
        split = "val" if rows["val"][row] else "train"
        path = part_file(self.work, unit, split)
        with path.open("rb") as file:
            self._verify(unit, split, _xxh3(file))
        start = int(rows["tokens"][:row][rows["val"][:row] == rows["val"][row]].sum(dtype=np.int64))
        ids = np.fromfile(path, self.dtype, count=rows["tokens"][row], offset=start * self.dtype.itemsize)
        lengths, _, _ = self.table
        from_end = behind + lengths[ids][::-1].cumsum()[::-1]
        from_end[0] = size  # the head keeps a token of this row
        cut = self._best_cut(ids, from_end, size, wanted)
        if cut is None:
            return None
        n_bytes = max(0, int(rows["bytes"][row]) - (int(from_end[cut]) - behind))
        return Tail(first, (unit, row), cut, n_bytes, last)

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each token: bytes, whether it starts a character, whether it ends a line."""
        texts = encode.token_bytes(encode.load_rust(self.folder / "tokenizer" / "tokenizer.json"))
        return (
            np.array([len(text) for text in texts], dtype=np.int64),
            np.array([bool(text) and not 0x80 <= text[0] < 0xC0 for text in texts]),
            np.array([text.endswith(b"\n") for text in texts]),
        )

    def _best_cut(
        self, ids: np.ndarray, from_end: np.ndarray, size: int, wanted: float, opens: np.ndarray | bool = False
    ) -> int | None:
        """The id before which to cut a text of `size` bytes, so that about `wanted` are left: where a line starts or the text
        `opens`, if there is such a place nearby, else where a character does. `from_end`: bytes from each id to the end."""
        _, starts_character, ends_line = self.table
        cuts = np.flatnonzero(starts_character[ids] & (from_end < size))
        if not len(cuts):
            return None
        at_start = (ends_line[np.roll(ids, 1)] | opens)[cuts]
        at_start &= (from_end[cuts] > wanted / 2) & (from_end[cuts] < 2 * wanted)
        cuts = cuts[at_start] if at_start.any() else cuts
        return int(cuts[np.abs(from_end[cuts] - wanted).argmin()])

    # ---- a lone document ------------------------------------------------------------------------------------------------

    def _cut_off_tail(self) -> None:
        """No document fell to validation: the end of the text does, about `validation_fraction` of all bytes, from the
        start of a line or of a document on where there is one nearby, else from that of a character.

        Raises:
            UserError: not enough text for two splits.
        """
        wanted, train = (
            self.settings.validation_fraction * self.progress.splits["train"].bytes,
            self.progress.splits["train"],
        )
        offsets = np.concatenate([[0], np.fromfile(self.folder / index_file("train"), dtype="<i8")])
        kept, tail_bytes = self._cut(offsets, wanted)
        ends = offsets[offsets > kept] - kept
        with (
            (self.folder / tokens_file("train")).open("rb") as source,
            (self.folder / tokens_file("val")).open("wb") as tail,
        ):
            source.seek(kept * self.dtype.itemsize)
            shutil.copyfileobj(source, tail, 1 << 20)
        (self.folder / index_file("val")).write_bytes(ends)
        self.progress.cut = Written(kept, int((offsets[1:] < kept).sum()) + 1, train.bytes - tail_bytes)
        rest = Written(train.tokens - kept, len(ends), tail_bytes)
        self.progress.splits = {"train": replace(self.progress.cut), "val": rest}
        self._write_record()
        self._cut_back()

    def _cut(self, offsets: np.ndarray, wanted: float) -> tuple[int, int]:
        """The id before which to cut, and the bytes from there on."""
        train = self.progress.splits["train"]
        lengths, _, _ = self.table
        first, window, behind = self._window(lengths, wanted)
        from_end = behind + lengths[window][::-1].cumsum()[::-1]  # bytes from each id to the end
        starts = np.isin(np.arange(first, first + len(window)), offsets)
        cut = self._best_cut(window, from_end, train.bytes, wanted, starts)
        if cut is None:
            raise UserError(
                f"The text is too short: {train.bytes} bytes in {train.tokens} tokens cannot be split into text to "
                f"train on and text to validate with."
            )
        return first + cut, int(from_end[cut])

    def _window(self, lengths: np.ndarray, wanted: float) -> tuple[int, np.ndarray, int]:
        """A few million ids around the place `wanted` bytes from the end: the number of the first, the ids, and the bytes
        after them."""
        tokens = np.memmap(self.folder / tokens_file("train"), dtype=self.dtype, mode="r")
        behind = [0]  # bytes after the last block, the last two, ...
        while behind[-1] < wanted and TAIL_BLOCK_TOKENS * (len(behind) - 1) < len(tokens):
            stop = len(tokens) - TAIL_BLOCK_TOKENS * (len(behind) - 1)
            behind.append(behind[-1] + int(lengths[tokens[max(0, stop - TAIL_BLOCK_TOKENS) : stop]].sum()))
        blocks = len(behind) - 1  # the last of them has the place
        first, stop = (max(0, len(tokens) - TAIL_BLOCK_TOKENS * n) for n in (blocks + 1, max(0, blocks - 2)))
        return first, np.array(tokens[first:stop]), behind[max(0, blocks - 2)]

    def _up_to_cut(self, unit: int, split: str, rows: np.ndarray, to: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_routed` for a further copy, without what became text to validate with. A piece that was cut is two rows."""
        cut, used = self.progress.cut, self._routed(unit, split, 0)[1] != NOWHERE
        tokens, n_bytes = (np.where(used, rows[name], 0).astype(np.int64) for name in ("tokens", "bytes"))
        until = self.tokens_before[unit] + np.cumsum(tokens)
        to = np.where(until - tokens < cut.tokens, to, NOWHERE)
        reaching = np.flatnonzero(used & (until >= cut.tokens))
        if len(reaching) and until[i := reaching[0]] - tokens[i] < cut.tokens:
            before = cut.tokens - (until[i] - tokens[i])
            bytes_before = np.clip(cut.bytes - (self.bytes_before[unit] + n_bytes[:i].sum()), 0, n_bytes[i])
            rows, to = np.insert(rows, i, rows[i]), np.insert(to, i + 1, NOWHERE)
            rows["tokens"][i : i + 2] = before, tokens[i] - before
            rows["bytes"][i : i + 2] = bytes_before, n_bytes[i] - bytes_before
            rows["ends"][i] = True
        return rows, to


def _row_in(unit: int, place: Place, rows: int) -> int:
    """The row of `place` as seen from a unit of so many rows: -1 where it lies before it, their number where after it."""
    of, row = place
    return row if of == unit else -1 if of < unit else rows


def _xxh3(file: BinaryIO) -> str:
    digest = xxhash.xxh3_64()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
