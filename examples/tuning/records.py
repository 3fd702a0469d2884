"""New text, chats or pairs: the records of a file or a Hub dataset, and the held-out ones."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from common.errors import UserError, counted
from examples.tuning.settings import HUB_RECORDS, Tuning
from tokenizer.corpus import files
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.records import records

HELD_OUT = 0.1  # fraction of the new text


def read_texts(tuning: Tuning) -> list[str]:
    """Return the text of each file; raise a `UserError` if it is not UTF-8."""
    texts = []
    for path in list(tuning.files)[: tuning.max_documents]:
        with files.readable(path), files.opened(path) as file:
            content = file.read()
        try:
            texts.append(content.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text; convert it, or name the other files by a pattern.") from error
    return texts


class UselessError(ValueError):
    """Error for a record that is left out and counted, also in a file."""


def read_examples(tuning: Tuning, example_of: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Return `example_of` each record of the files, or of the beginning of a Hub dataset.
    It raises a `ValueError` for a wrong record. In a file this is a `UserError` with the line; in a Hub dataset, which
    a user cannot correct, the record is left out and counted."""
    limit, left_out, examples = tuning.max_documents, Counter(), []
    if tuning.hub is not None:
        limit = limit or HUB_RECORDS
        print(f"Reading the first {limit:,} records of {tuning.hub}.")
        found = (("", record, {}) for record in tuning.hub.records())
    elif tuning.is_text:
        hint = "examples.finetune_text reads text"
        raise UserError(f"{tuning.data} has no records; pass jsonl, json, csv, parquet or arrow files ({hint}).")
    else:
        parts = itertools.starmap(ByteRange, tuning.files.items())
        found = ((part.path, *of_part) for part in parts for of_part in records(part))
    for path, record, place in itertools.islice(found, limit):
        try:
            if record is None:
                raise ValueError("is not a JSON object")
            json.dumps(record, ensure_ascii=False, default=str).encode()
            examples.append(example_of(record))
        except ValueError as error:
            reason = "is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
            if tuning.hub is None and not isinstance(error, UselessError):
                unit, number = next(iter(place.items()))
                if unit == "byte":
                    unit, number = "line", files.line_number(path, number)
                raise UserError(f"{path}, {unit} {number:,} {reason}.") from error
            left_out[reason] += 1
    for reason, number in left_out.items():
        print(f"Left out {counted(number, 'record')} of {tuning.data}: each {reason}.")
    return examples


def with_system(record: dict[str, Any], messages: Any) -> Any:
    """Return messages, after the record's `system` prompt if they have none and are no text. Raise a `ValueError` if
    the record has earlier turns elsewhere."""
    if record.get("history"):
        raise ValueError("has earlier turns in history, which is not read; write them as messages")
    system = record.get("system")
    if not (system and isinstance(system, str) and isinstance(messages, list)) or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def splits(examples: list[Any], prompts: list[Any], tuning: Tuning, unit: str) -> tuple[Dataset, Dataset]:
    """Split into examples for training and a held-out tenth of the prompts, with all of their examples. A prompt may be
    a list of messages. Raise a `UserError` for fewer than two prompts."""
    keys = [json.dumps(prompt) for prompt in prompts]
    unique = list(dict.fromkeys(keys))
    if len(unique) < 2:
        raise UserError(f"At least 2 {unit} are needed, because one is held out; {tuning.data} provides {len(unique)}.")
    random.Random(tuning.seed).shuffle(unique)
    held_out = set(unique[: max(1, int(len(unique) * HELD_OUT))])
    parts = ([], [])
    for key, example in zip(keys, examples, strict=True):
        parts[key in held_out].append(example)
    return tuple(map(Dataset.from_list, parts))
