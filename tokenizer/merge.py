"""Parts -> the files of both splits: repeated documents left out, the others as often as asked, all in their order.

It goes on where it was interrupted: `merged.json` has on record what stands in the files, and the ids of a part are deleted
only once they are on record.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import xxhash

from errors import UserError
from tokenizer import dedup, encode
from tokenizer.store import SPLITS, index_file, tokens_file, write_whole
from tokenizer.work import Part, Settings, part_file, row_type

BLOCK_TOKENS = 1 << 21
TAIL_BLOCK_TOKENS = 1 << 21  # of these, two or three are looked at for a place to cut, which may depend on it
BYTES_BETWEEN_RECORDS = 64 << 20
SORTED_BYTES = 128 << 20
MIX = np.uint64(0x9E3779B97F4A7C15)


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

    @staticmethod
    def from_json(content: dict) -> "Progress":
        splits = {name: Written(**split) for name, split in content["splits"].items()}
        return Progress(content["done"], splits, Written(**content["cut"]) if content["cut"] is not None else None)


class Merger:
    def __init__(self, work: Path, folder: Path, settings: Settings, copies: list[float]):
        """`work` holds the parts; the files go to `folder`. `copies`: of each unit."""
        self.work, self.folder, self.settings, self.copies = work, folder, settings, copies
        self.dtype = np.dtype(settings.dtype).newbyteorder("<")
        self.record = work / "merged.json"
        self.progress = Progress.from_json(json.loads(self.record.read_text())) if self.record.is_file() else Progress()
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
        first = np.array([[self._used(unit, split) for split in SPLITS] for unit in range(len(copies))])
        self.documents = int(first[..., 0].sum())
        self.all_train = not first[:, 0].any()  # all fell to validation
        # Tokens and bytes of the units before each, the first time that they are used.
        self.tokens_before, self.bytes_before = (
            np.cumsum([0, *first[..., column].sum(axis=1).tolist()]).tolist() for column in (1, 2)
        )

    def _rows(self, unit: int) -> np.ndarray:
        return np.fromfile(part_file(self.work, unit, "rows"), dtype=self.row_type)

    def _verify(self, unit: int, name: str, digest: str) -> None:
        """
        Raises:
            UserError: a file of a part is not what was written. The part counts as not done.
        """
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

    def _used(self, unit: int, split: str) -> tuple[int, int, int]:
        """Documents, tokens and bytes of what a part has for a split, the first time that it is used."""
        rows, chosen = self._choice(unit, split, 0)
        return tuple(int(rows[name][chosen].sum(dtype=np.int64)) for name in ("ends", "tokens", "bytes"))

    def _choice(self, unit: int, split: str, nth: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a part that lie in its file for `split`, and (rows,) bool: those that are used the nth time."""
        rows = self._rows(unit)
        chosen = rows["copies"] > nth
        if self.kept is not None:
            chosen &= self.kept[self.before[unit] + np.cumsum(rows["ends"]) - rows["ends"]]
        in_file = rows["val"] if split == "val" else ~rows["val"]
        return rows[in_file], chosen[in_file]

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
        """Appends what a part has for a split, in blocks. Returns the bytes written."""
        to = "train" if self.all_train else split
        if to == "val" and nth > 0:
            return 0
        rows, chosen = self._choice(unit, split, nth)
        if nth > 0 and self.progress.cut is not None:
            rows, chosen = self._up_to_cut(unit, split, rows, chosen)
        written = self.progress.splits[to]
        block_of_row = np.cumsum(rows["tokens"], dtype=np.int64) // BLOCK_TOKENS
        bounds = [0, *(np.flatnonzero(np.diff(block_of_row)) + 1).tolist(), len(rows)]
        size, digest = 0, xxhash.xxh3_64()
        with (
            part_file(self.work, unit, split).open("rb") as source,
            (self.folder / tokens_file(to)).open("ab") as tokens,
            (self.folder / index_file(to)).open("ab") as index,
        ):
            for first, stop in itertools.pairwise(bounds):
                block, use = rows[first:stop], chosen[first:stop]
                count = int(block["tokens"].sum(dtype=np.int64))
                ids = np.fromfile(source, dtype=self.dtype, count=count)
                digest.update(ids)
                if len(ids) < count:  # as the hash will say
                    break
                if not use.all():
                    ids, block = ids[np.repeat(use, block["tokens"])], block[use]
                tokens.write(ids)  # `tofile` does not say why it fails
                until = written.tokens + np.cumsum(block["tokens"], dtype=np.int64)
                index.write(until[block["ends"]].astype("<u8"))
                written.tokens += len(ids)
                written.documents += int(block["ends"].sum())
                written.bytes += int(block["bytes"].sum(dtype=np.int64))
                size += ids.nbytes
        self._verify(unit, split, digest.hexdigest())
        return size

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Every file with the size that is on record."""
        for split, written in self.progress.splits.items():
            yield self.folder / tokens_file(split), written.tokens * self.dtype.itemsize
            yield self.folder / index_file(split), written.documents * 8

    def _write_record(self) -> None:
        for path, _ in self._files():
            with path.open("ab") as file:
                os.fsync(file.fileno())
        write_whole(self.record, json.dumps(asdict(self.progress)))

    def _cut_back(self) -> None:
        """Cuts off what was written and not put on record."""
        for path, size in self._files():
            path.touch()
            os.truncate(path, size)
        if (cut := self.progress.cut) is not None:
            with (self.folder / index_file("train")).open("r+b") as index:  # the last document ends at the cut
                index.seek(8 * (cut.documents - 1))
                index.write(np.array([cut.tokens], dtype="<u8"))

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
        rust = encode.load_rust(self.folder / "tokenizer" / "tokenizer.json")
        texts = encode.token_bytes(rust)
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        starts_character = np.array([bool(text) and not 0x80 <= text[0] < 0xC0 for text in texts])
        ends_line = np.array([text.endswith(b"\n") for text in texts])
        train = self.progress.splits["train"]
        first, window, behind = self._window(lengths, wanted)
        from_end = behind + lengths[window][::-1].cumsum()[::-1]  # bytes from each id to the end
        cuts = np.flatnonzero(starts_character[window] & (from_end < train.bytes))
        if not len(cuts):
            raise UserError(
                f"The text is too short: {train.bytes} bytes in {train.tokens} tokens cannot be split into text to "
                f"train on and text to validate with."
            )
        opens = ends_line[window[cuts - 1]] | np.isin(cuts + first, offsets)
        opens &= (from_end[cuts] > wanted / 2) & (from_end[cuts] < 2 * wanted)
        cuts = cuts[opens] if opens.any() else cuts
        cut = cuts[np.abs(from_end[cuts] - wanted).argmin()]
        return first + int(cut), int(from_end[cut])

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

    def _up_to_cut(self, unit: int, split: str, rows: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_choice` for a further copy, without what became text to validate with. A piece that was cut is two rows."""
        cut, (_, used) = self.progress.cut, self._choice(unit, split, 0)
        tokens, n_bytes = (np.where(used, rows[name], 0).astype(np.int64) for name in ("tokens", "bytes"))
        until = self.tokens_before[unit] + np.cumsum(tokens)
        chosen = chosen & (until - tokens < cut.tokens)
        reaching = np.flatnonzero(used & (until >= cut.tokens))
        if len(reaching) and until[i := reaching[0]] - tokens[i] < cut.tokens:
            before = cut.tokens - (until[i] - tokens[i])
            bytes_before = np.clip(cut.bytes - (self.bytes_before[unit] + n_bytes[:i].sum()), 0, n_bytes[i])
            rows, chosen = np.insert(rows, i, rows[i]), np.insert(chosen, i + 1, False)
            rows["tokens"][i : i + 2] = before, tokens[i] - before
            rows["bytes"][i : i + 2] = bytes_before, n_bytes[i] - bytes_before
            rows["ends"][i] = True
        return rows, chosen
