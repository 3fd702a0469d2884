"""Datasets of a Python program: `Dataset`, `IterableDataset`, or a dict with one per split.

Their text is first written to the disk, in order, as jsonl. The shards of an `IterableDataset` that is shuffled,
interleaved or limited contain other documents than the whole, so several processes cannot read it directly.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, require_room
from tokenizer.corpus import chat
from tokenizer.corpus.documents import Limit
from tokenizer.corpus.hub import shortened, without_media

COMPARED_RECORDS = 100  # at the beginning of an `IterableDataset`, which has no identity of its own
SPLITS = ("train", "validation")
BATCH_RECORDS = 100  # read at a time: they may be books
FREE_BYTES = 500_000_000  # disk space that a dataset of unknown size leaves
CHECKED_CHARACTERS = FREE_BYTES // 10  # between two checks; JSON writes a character in up to six bytes
TYPES = {"Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict", "dict"}  # first words of the names


@dataclass(frozen=True)
class GivenDataset:
    name: str
    splits: dict[str, Any]  # a `Dataset` or `IterableDataset` for train, and for validation if it exists

    @classmethod
    def of(cls, data: Any, number: int) -> "GivenDataset":
        """Return `data` as splits, named after its type and its number in the input, if that is not 1.
        Raise a `UserError` if it is not a dataset, or has no rows or no split train."""
        import datasets

        name = f"{type(data).__name__}{f' {number}' if number > 1 else ''}"
        splits = data if isinstance(data, dict) else {"train": data}
        if not all(isinstance(part, datasets.Dataset | datasets.IterableDataset) for part in splits.values()):
            raise UserError(
                f"The data are of the type {name}; give a Dataset, an IterableDataset, a dict of splits, or paths."
            )
        short = sorted(splits.keys() & {"val", "valid", "dev"})
        if short and "train" in splits and "validation" not in splits:
            raise UserError(f"{name} has a split {short[0]}, which is not read; name it validation.")
        splits = {split: splits[split] for split in SPLITS if split in splits}
        if "train" not in splits:
            raise UserError(f"{name} has no split train, only {', '.join(data) or 'none'}; give one split.")
        splits = {split: part for split, part in splits.items() if getattr(part, "num_rows", 1)}
        if "train" not in splits:
            raise UserError(f"{name} has no rows; give a dataset with text.")
        return cls(name, splits)

    def identity(self) -> list[list]:
        """Return name, rows (0 if unknown) and a hash of each split, to compare before interrupted work resumes."""
        identity = []
        for split, part in self.splits.items():
            rows = getattr(part, "num_rows", 0)
            if rows:
                content = part._fingerprint + "transformed" * _is_transformed(part)  # earlier stores lack the transform
            else:
                with closing(self.records(split)) as records:
                    head = [*itertools.islice(records, COMPARED_RECORDS)]
                # Addresses, in the texts of values that JSON does not know, differ between processes.
                content = json.dumps(head, default=lambda value: re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value)))
            identity.append([f"{self.name}/{split}", rows, int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)])
        return identity

    def records(self, split: str, column: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records of a split, or only one column of them. Raise a `UserError` if the dataset fails.
        Close the iterator before another one begins: `datasets` shares state between them, and threads that still
        prefetch for one would make the other skip a record."""
        part = self.splits[split]
        try:
            if not hasattr(part, "num_rows"):
                part = without_media(part.with_format(None))
            elif part.format["type"] != "custom":  # that is `with_transform`, which may use any column
                part = without_media(part).with_format(None, part.format["columns"], part.format["output_all_columns"])
                if column is not None:
                    batches = part.select_columns([column]).iter(BATCH_RECORDS)
                    part = ({column: value} for batch in batches for value in batch[column])
            yield from part
        except Exception as error:  # of the program that made the dataset
            reason = shortened(error) or type(error).__name__
            raise UserError(f"Reading {self.name} stopped: {reason}. Correct that, and run the same again.") from error

    def write(self, split: str, column: str, path: Path, limit: Limit) -> None:
        """Write the text of a split as jsonl, up to the limit or more. Raise a `UserError` before the disk is full."""
        documents = characters = next_check = 0
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # JSON's escape of a surrogate
            for record in self.records(split, column):
                value = record.get(column)
                if isinstance(value, bytes):
                    value = value.decode("utf-8", errors="surrogateescape")
                messages = chat.normalized(value) or ()
                text = value if isinstance(value, str) else "".join(each["content"] for each in messages)
                content = value if isinstance(value, str | list) else None
                file.write(json.dumps({column: content}, ensure_ascii=False, default=lambda value: None) + "\n")
                documents += bool(text.strip() or messages)
                characters += len(text)
                if documents > limit.documents or characters > limit.bytes:
                    return
                if characters > next_check:
                    next_check = characters + CHECKED_CHARACTERS
                    clause = f"{self.name} has more than {characters / 1e9:.1f} GB of text, and its rest needs at least"
                    remedy = "set max_bytes or max_documents, or name an output on another disk"
                    require_room(path.parent, FREE_BYTES, clause, remedy)


def _is_transformed(part: Any) -> bool:
    """Return whether `with_transform` or `with_format(columns=...)` hides columns of a `Dataset`."""
    some = {*part.format["columns"]} != {*part.column_names} and not part.format["output_all_columns"]
    return part.format["type"] == "custom" or some
