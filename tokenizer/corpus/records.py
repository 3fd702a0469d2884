"""Readers of records: jsonl, json, csv, parquet and arrow files, and Hub datasets.

Local files are read here because one broken line or byte stops the readers of `datasets`. Hub datasets are streamed
with `datasets`. Each record comes with its place in the file; a broken record is None.
"""

import codecs
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TextIO

from tokenizer.corpus import files, hub
from tokenizer.corpus.byte_range import ByteRange, bounds
from tokenizer.corpus.chat import normalized
from tokenizer.corpus.files import LONGEST_RECORD

BATCH_BYTES = 4 << 20  # bytes read from a parquet file at a time
TEXT_COLUMNS, CHAT_COLUMNS = ("text", "content"), ("messages", "conversations")
NUMBER = re.compile(r"[-+.,\d]+(e[-+]?\d+)?%?|nan|inf", re.IGNORECASE)
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a field of a table
# A line whose last field begins with a quote that it does not close, after whole fields with their tabs.
FIELD = r'(?>"(?:[^"]|"")*+"[^\t]*|[^"\t][^\t]*|(?=\t))\t'
OPEN = re.compile(rf'(?:{FIELD})*+"(?:[^"]|"")*+')
ENCLOSED = re.compile(r'"[^"]*"|\([^)]*\)')  # in quotes or parentheses
Records = Iterator[tuple[dict[str, Any] | None, dict[str, int]]]


def records(part: ByteRange) -> Records:
    """Yield the records of a part. Raise a `UserError` if the file cannot be read to its end, or for a huge record."""
    with files.readable(part.path):
        if part.kind in ("jsonl", "json", "csv") and part.start == 0:
            files.check_text(files.head(part.path), part.path, part.may_skip)
        yield from itertools.islice(READERS[part.kind](part), part.limit if part.kind == "parquet" else None)


def _lines(file: BinaryIO | TextIO, part: ByteRange, start: int = 0) -> Iterator[bytes | str]:
    """Yield the lines from byte `start` on. Raise a `ValueError` for a line that is too long for a record."""
    for number in itertools.count():
        if not (line := file.readline(LONGEST_RECORD)):
            return
        if len(line) == LONGEST_RECORD:
            number += files.line_number(part.path, start)
            raise ValueError(f"line {number:,} is longer than {LONGEST_RECORD >> 20} MiB, too long for one record")
        yield line


def _jsonl(part: ByteRange) -> Records:
    start, stop, _ = bounds(part, "line")
    with files.opened(part.path, part.limit) as file:
        position = file.seek(start) if start else 0
        lines = _lines(file, part, start)
        while (stop is None or position < stop) and (line := next(lines, b"")):
            record = line if position else line.removeprefix(codecs.BOM_UTF8)
            if record and not record.isspace():
                yield parsed(record), {"byte": position}
            position += len(line)


def parsed(line: bytes) -> dict | None:
    """Return the record of a jsonl line, or None if the line is broken."""
    try:
        record = json.loads(line.decode("utf-8", errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _json(part: ByteRange) -> Records:
    """Read one list of records or texts, or one record."""
    with files.opened(part.path) as file:
        content = file.read(LONGEST_RECORD)
    if len(content) == LONGEST_RECORD:
        raise ValueError(f"it is a list of over {LONGEST_RECORD >> 20} MiB; convert it to jsonl, one record per line")
    items = json.loads(content.decode("utf-8-sig", errors="surrogateescape"))
    for i, record in enumerate(items if isinstance(items, list) else [items]):
        record = {part.column or TEXT_COLUMNS[0]: record} if isinstance(record, str) else record
        yield (record if isinstance(record, dict) else None), {"record": i + 1}


def _csv(part: ByteRange) -> Records:
    csv.field_size_limit(LONGEST_RECORD)
    with io.TextIOWrapper(files.opened(part.path, part.limit), "utf-8-sig", "surrogateescape", newline="") as file:
        lines = _lines(file, part)
        header = next(lines, "")
        delimiter = max("\t,;" if files.suffix(part.path) == ".tsv" else ",\t;", key=ENCLOSED.sub("", header).count)
        is_strict = delimiter != "\t" or _quotes_like_csv(part.path, header.count("\t"))
        if not is_strict:
            lines = _with_quotes(lines, header.count("\t"))
        reader = csv.DictReader(itertools.chain([header], lines), delimiter=delimiter, strict=is_strict)
        while True:
            try:
                if (record := next(reader, False)) is False:
                    return
            except csv.Error as error:
                if "expected after" not in str(error):  # the error for text after a quoted field
                    if part.limit is not None:  # the sample ends within a quoted field
                        return
                    raise ValueError(f"{error}, in line {reader.line_num + 1:,}") from error
                record = None
            if record and any(value.strip() for value in record.get(None, [])):
                record = None  # more values than columns: a separator within an unquoted text
            yield record, {"line": reader.reader.line_num}


def _quotes_like_csv(path: str, tabs: int) -> bool:
    """Return whether a file with `tabs` tabs in its header quotes texts as csv does: at its start, all records are
    whole, and a line has another number of tabs, or a third of the records need quotes for tabs or lines."""
    lines = list(io.StringIO(files.head(path).decode("utf-8-sig", "replace"), newline=""))
    rows = []
    try:
        rows.extend(csv.reader(lines, delimiter="\t", strict=True))
    except csv.Error as error:
        if "unexpected end" not in str(error):  # which is that of the sample
            return False
    whole_lines = (line for line in lines if line.strip() and line.endswith(("\n", "\r")))  # the last one may be cut
    is_broken = tabs > 0 and any(line.count("\t") != tabs for line in whole_lines)
    n_quoted = sum(any(set("\t\r\n").intersection(field) for field in row) for row in rows)
    return (is_broken or n_quoted > len(rows) / 3) and {len(row) for row in rows[:-1] if row} == {len(rows[0])}


def _with_quotes(lines: Iterator[str], tabs: int) -> Iterator[str]:
    """Yield lines of a file separated by tabs. Quotes that do not enclose a field are text, if line and next line are
    whole records: a field that begins with one is quoted, so the reader keeps it and does not look for its end. With
    one column, a field that a line does not close continues in the next."""
    is_open = False  # a field in quotes began in an earlier line
    for line, following in itertools.pairwise(itertools.chain(lines, [""])):
        leaves_open = bool(OPEN.fullmatch('"' * is_open + line))
        is_whole = not is_open and line.count("\t") == tabs and (not following or following.count("\t") == tabs)
        is_whole &= tabs > 0 or not leaves_open
        if is_whole and '"' in line:
            fields = line.rstrip("\r\n").split("\t")
            is_text = [field.startswith('"') and not QUOTED.fullmatch(field) for field in fields]
            doubled = ['"' + field.replace('"', '""') + '"' for field in fields]
            line = "\t".join(doubled[i] if is_text[i] else fields[i] for i in range(len(fields))) + "\n"
        else:
            is_open = leaves_open
        yield line


def _parquet(part: ByteRange) -> Records:
    from pyarrow import parquet

    with parquet.ParquetFile(part.path) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
        for i in range(part.start, file.num_row_groups if part.stop is None else part.stop):
            group = file.metadata.row_group(i)
            batch_rows = max(1, min(1024, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in file.iter_batches(batch_rows, row_groups=[i], columns=part.column and [part.column]):
                for record in _rows(batch):
                    row += 1
                    yield record, {"record": row}


def _arrow(part: ByteRange) -> Records:
    row = 0
    for i, batch in enumerate(itertools.islice(arrow_batches(part.path), part.stop)):
        if i >= part.start:
            batch.validate(full=True)  # otherwise a damaged length can end the process
            columns = batch.select([part.column]) if part.column else batch
            yield from ((record, {"record": row + j}) for j, record in enumerate(_rows(columns), start=1))
        row += batch.num_rows


def arrow_batches(path: str) -> Iterator[Any]:
    """Yield the record batches of an arrow file, without copying them: in the stream format that `datasets` writes, or
    in the file format."""
    import pyarrow as pa

    with pa.memory_map(path) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = pa.ipc.open_stream(file)
        for batch in batches:
            batch.validate()
            yield batch


def _rows(batch: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # the parquet file declares UTF-8
        for i, column in enumerate(batch.schema):
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                batch = batch.set_column(i, column.name, batch.column(i).cast(pa.large_binary()))
        return batch.to_pylist()


def _hub(part: ByteRange) -> Records:
    for i, record in enumerate(hub.open_dataset(part.path).records(part.start)):
        yield record, {"record": i + 1}


READERS = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow, "hub": _hub}


def text_column(records: list[dict[str, Any]], name: str | None) -> str | None:
    """Return the column with the text or chat of records, or None if it is ambiguous."""
    values = [item for record in records for item in record.items()]
    names = {column for column, _ in values}
    if name is not None:
        return name if name in names else None
    chats = {column for column, value in values if isinstance(value, list)}
    if named := [*(text for text in TEXT_COLUMNS if text in names), *(chat for chat in CHAT_COLUMNS if chat in chats)]:
        return named[0]
    nested = [value for _, value in values if isinstance(value, (list, dict))]  # may hold the text, next to a title
    if any(map(normalized, nested)):  # a chat in another column, such as `chosen`, next to its prompt
        return None
    strings = [(column, value) for column, value in values if isinstance(value, str) and value.strip()]
    balance = Counter(column for column, _ in strings)  # values that are not numbers, minus those that are
    balance.subtract(2 * [column for column, value in strings if NUMBER.fullmatch(value.strip())])
    columns = [column for column in balance if balance[column] > 0]
    is_longest = _longest(nested) <= _longest(value for column, value in strings if column in columns)
    return columns[0] if len(columns) == 1 and is_longest else None


def _longest(values: Iterable[Any]) -> int:
    """Return the length of the longest string in values, lists and dictionaries."""
    remainder, length = list(values), 0
    while remainder:
        value = remainder.pop()
        if isinstance(value, (list, dict)):
            remainder += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            length = max(length, len(value))
    return length
