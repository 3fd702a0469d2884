"""Documents in pieces: no text is lost at a cut, no cut changes a token, and repairs are counted."""

import gzip
import itertools
import json
import pickle
import random
import re
import time
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_corpus import GOOD, documents, read, refusal, write, write_records
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from conftest import CHATML_TOKENS, assert_user_error
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.chat import CHATML, ChatTemplate
from tokenizer.corpus.documents import PIECE_BYTES, Counts, Piece, Reader
from tokenizer.corpus.units import Corpus, CorpusArguments
from tokenizer.encoding.vocabulary import train_bpe

# The word pattern of Llama 3 and cl100k_base: line breaks may belong to the punctuation before them.
NEWER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
FRAGMENTS = [
    *"be not Straße don't we'll 's ' 日本語 e\u0301 👩‍👩‍👧 123 4 ² ... !? (".split(),
    *(" ", " ", " ", "  ", "      ", "\t", " \t ", "\n", "\n", "\n\n\n", " \n ", "\r\n", "\r\n\r\n", "\r"),
    *("\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"),
]


def jumble(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(FRAGMENTS, k=length))


def bpe(text: str) -> Tokenizer:
    return train_bpe([text], 400).backend_tokenizer


def newer_bpe(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(NEWER_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def pieces(path: Path, sample_by: str = "document") -> tuple[list[Piece], Counts]:
    """Return the pieces of all units and the counts."""
    reader = Reader(sample_by)
    parts = (part for unit in Corpus([str(path)], CorpusArguments(sample_by=sample_by)).units() for part in unit.ranges)
    return list(itertools.chain.from_iterable(map(reader.pieces, parts))), reader.counts


def joined(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize(
    ("sample_by", "text", "expected", "blank"),
    [
        ("line", "one\r\n  two \n\n \t\n3\r3\u2028\x853\nfour", ["one", "  two ", "3\r3\u2028\x853", "four"], 2),
        ("paragraph", "\n\n1\r\n1\r\n\r\n  2\n2  \n \t\n\u3000\n\nthree\n", ["1\n1", "  2\n2  ", "three"], 0),
    ],
)
def test_lines_and_paragraphs_can_be_documents(tmp_path, sample_by, text, expected, blank):
    texts, counts = read(write(tmp_path / "a.txt", text), sample_by=sample_by)
    assert texts == expected
    assert (counts.documents, counts.blank) == (len(expected), blank)
    assert documents(write_records(tmp_path / "a.jsonl", [{"text": text}]), sample_by=sample_by) == [text]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'id,text\r\n1,"He, ""no""\r\n\n  twice"\r\n2,plain\r\n', ['He, "no"\r\n\n  twice', "plain"]),
        ("a.csv", "id;text\n1;one, two\n", ["one, two"]),
        *((name, "id\ttext\n1\tone, two\n", ["one, two"]) for name in ("a.csv", "a.tsv")),
        ("a.csv", "text,id\rone\0one,1\rtwo,2", ["one\0one", "two"]),
        ("a.csv", "text\nword\nnull\nNA\nNone\nnan\n", ["word", "null", "NA", "None", "nan"]),
        ("a.csv", 'text\n"' + "words, and more\n" * 70_000 + '"\n', ["words, and more\n" * 70_000]),  # a megabyte
        ("a.jsonl", '{"text": "one"}\r\n\r\n{"text": "two"}', ["one", "two"]),
    ],
)
def test_text_of_record_fields(tmp_path, name, content, expected):
    assert documents(write(tmp_path / name, content)) == expected


def test_csv_rows_with_too_few_or_too_many_values_are_counted(tmp_path):
    rows = [*(f"{i},text {i}" for i in range(200)), "short", "a text, and more", "long,text,,"]
    texts, counts = read(write(tmp_path / "a.csv", "\n".join(["id,text", *rows, "1,a text, and more"])))
    assert texts == [*(f"text {i}" for i in range(200)), " and more", "text"]
    assert (counts.empty_records, counts.first["empty_records"]) == (2, {str(tmp_path / "a.csv"): [2, {"line": 202}]})
    texts, _ = read(write(tmp_path / "a.tsv", "text\nHello, world; how are you\n"))
    assert texts == ["Hello, world; how are you"]


def test_invalid_bytes_and_surrogates_in_records_are_replaced_and_counted(tmp_path):
    lines = [json.dumps({"text": GOOD}), '{"text": "a\\ud800b\\udc00"}', '{"text": "\\ud83d\\ude42"}']
    texts, counts = read(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert texts == [GOOD, "a\ufffdb\ufffd", "🙂"]
    assert (counts.bad_bytes, counts.bytes) == (2, len(GOOD) + 8 + 4)
    texts, counts = read(write(tmp_path / "a.jsonl", lines[0].encode() + b'\n{"text": "caf\xe9"}'))
    assert texts == [GOOD, "caf\ufffd"]
    assert (counts.bad_bytes, counts.worst()["bad_bytes"][1]["byte"]) == (1, len(GOOD) + 13)


def test_too_long_records_and_broken_lists_are_refused_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizer.corpus.records.LONGEST_RECORD", 1 << 20)
    records = [{"text": "one"}, {"text": "words " * 200_000}]
    for name, sentence in (
        ("a.jsonl", r"a\.jsonl cannot be read: line 2 is longer than 1 MiB, too long for one record; fix it"),
        ("a.json", "convert it to jsonl, one record per line"),
        ("a.csv", r"a\.csv cannot be read: line 3 is longer than 1 MiB, too long for one record; fix it"),
    ):
        assert re.search(sentence, refusal(write_records(tmp_path / name, records)))
    quoted = write_records(tmp_path / "b.csv", [{"text": "one"}, {"text": "words\n" * 200_000}])
    sentence = r"b\.csv cannot be read: field larger than field limit \(1048576\), in line [\d,]+; fix it"
    assert re.search(sentence, refusal(quoted))
    broken = refusal(write(tmp_path / "a.json", '[{"text": "one"}, {"text": "tw'))
    assert re.search(r"a\.json cannot be read: Unterminated string .*char 27\); fix it or exclude it\.$", broken)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())])
def test_parquet_text_can_have_any_type_and_many_row_groups(tmp_path, kind):
    texts = [f"naïve {i}" for i in range(50)]
    table = pa.table({"id": range(50), "text": pa.array(texts).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert documents(tmp_path / "a.parquet") == texts


def test_empty_parquet_files_nulls_and_invalid_utf8(tmp_path):
    schema = pa.schema([("text", pa.string())])
    pq.ParquetWriter(tmp_path / "a.parquet", schema).close()
    pq.write_table(schema.empty_table(), tmp_path / "b.parquet")
    assert "contains no text: nothing was found" in refusal(tmp_path)
    column = pa.array([GOOD.encode(), None, b"caf\xe9", *[b"more"] * 150]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    texts, counts = read(tmp_path / "a.parquet")
    assert texts == [GOOD, "caf\ufffd", *["more"] * 150]
    assert (counts.empty_records, counts.worst()["empty_records"][1]["record"]) == (1, 2)
    assert counts.bad_bytes == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: b[:4] + b[100:], lambda b: b"text"])
def test_damaged_parquet_files_are_refused(tmp_path, damage):
    path = write_records(tmp_path / "a.parquet", [{"text": f"{i} {GOOD}"} for i in range(9)])
    write(path, damage(path.read_bytes()))
    assert re.search(r"a\.parquet cannot be read: .*; fix it or exclude it\.$", refusal(path))


def test_byte_order_mark_is_removed_only_at_the_start(tmp_path):
    contents = {"a.txt": "Ün\ufeffder", "a.jsonl": '{"text": "two"}\n', "a.csv": "text,id\r\nthree,1\r\n"}
    contents |= {"a.json": '["four"]', "b.txt": "\ufefffive"}
    paths = [write(tmp_path / name, f"\ufeff{content}") for name, content in contents.items()]
    assert documents(*paths) == ["Ün\ufeffder", "two", "three", "four", "\ufefffive"]
    lines = write(tmp_path / "lines.txt", "\ufeffsix\n\ufeffseven")
    assert documents(lines, sample_by="line") == ["six", "\ufeffseven"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.json", "a.txt.gz"])
def test_utf16_text_is_refused_as_utf16(tmp_path, name, encoding):
    content = '\ufeff{"text": "What Windows calls Unicode."}\r\n'.encode(encoding)
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert refusal(path) == f"{path} is UTF-16 text; save it as UTF-8."


def test_binary_files_are_skipped_and_counted_once_and_invalid_bytes_replaced(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "one\0two" + GOOD)
    write(tmp_path / "b.txt", b"one" + b"\0two" * 100)
    texts, counts = read(tmp_path)
    assert texts == ["one\0two" + GOOD]
    assert (counts.binary_files, counts.first["binary_files"]) == (1, {str(tmp_path / "b.txt"): [1, {}]})
    content = b"na\xefve \xed\xa0\x80 \xc0\xaf \xf4\x90\x80\x80 " + b"plain words " * 100 + b"\xe2\x82"
    texts, counts = read(write(tmp_path / "a.txt", content))
    assert texts == ["na?ve ??? ?? ???? ".replace("?", "\ufffd") + "plain words " * 100 + "\ufffd" * 2]
    assert (counts.bad_bytes, counts.first["bad_bytes"]) == (12, {str(tmp_path / "a.txt"): [12, {}]})
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 10)  # many units of one binary file
    folder = write(tmp_path / "in" / "b.txt", (tmp_path / "b.txt").read_bytes()).parent
    assert "contains no text: 1 binary file; the first in" in refusal(folder)


BINARY = {
    "a.pdf": b"%PDF-1.4\n" + GOOD.encode(),
    "a.bin": zlib.compress(random.Random(0).randbytes(3000)),
    "a.pkl": pickle.dumps([GOOD]),
    "a.tar": b"name".ljust(257, b"\0") + b"ustar" + b"words " * 20_000,
    "a.safetensors": (1000).to_bytes(8, "little") + b'{"weight": ' + GOOD.encode(),
    "a.jsonl": zlib.compress(random.Random(1).randbytes(3000)),
    "a.csv.gz": gzip.compress(b"PK\3\4\x14\0\0\0\x08\0" + GOOD.encode()),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_files_are_recognized_skipped_in_a_folder_and_refused_by_name(tmp_path, name):
    write(tmp_path / "words.txt", GOOD)
    path = write(tmp_path / name, BINARY[name])
    texts, counts = read(tmp_path)
    assert (texts, counts.binary_files, list(counts.first["binary_files"])) == ([GOOD], 1, [str(path)])
    assert refusal(path, tmp_path / "words.txt") == f"{path} is a binary file; unpack it or convert it to text."


@pytest.mark.parametrize("text", ["\x1b[31mred\x1b[0m\n", "N\bNA words\n", "1\x01foo\x01bar\n", "Вначале было слово. "])
def test_text_with_control_characters_or_in_another_script_is_not_binary(tmp_path, text):
    assert documents(write(tmp_path / "in" / "a.txt", text * 300).parent) == [text * 300]


def test_megabytes_of_white_space_are_one_blank_document_unless_text_follows(tmp_path):
    found, counts = pieces(write(tmp_path / "a.txt", " \n" * 1_200_000))
    assert (found, counts.blank, counts.documents, counts.bytes) == ([], 1, 0, 0)
    text = "\n" * 2_500_000 + "text\n"
    assert documents(write(tmp_path / "a.txt", text)) == [text]


@pytest.mark.parametrize("make", [bpe, newer_bpe], ids=["GPT-2", "Llama 3"])
@pytest.mark.parametrize("cut_by", ["pieces", "units"])
def test_cuts_do_not_change_tokens(tmp_path, monkeypatch, make, cut_by):
    tokenizer = make(jumble(0, 2000))
    monkeypatch.setattr("tokenizer.corpus.documents.PIECE_BYTES", 600)
    monkeypatch.setattr("tokenizer.corpus.byte_range.WINDOW_BYTES", 600)
    if cut_by == "units":
        monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 250)
    for seed in range(10):
        text = "a" + jumble(seed, 3000)
        found, counts = pieces(write(tmp_path / "a.txt", text))
        assert (joined(found), counts.cut_words) == (text, 0)
        assert len(found) > 5
        encoded = [tokenizer.encode(piece.text, add_special_tokens=False).ids for piece in found]
        assert list(itertools.chain(*encoded)) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.json"])
def test_long_records_are_read_in_pieces(tmp_path, name):
    text = "A line of a long book.\n" * 150_000
    found, counts = pieces(write_records(tmp_path / name, [{"text": text}, {"text": "short"}]))
    assert (joined(found), counts.documents, counts.cut_words) == (text + "short", 2, 0)
    assert len(found) > 3
    assert max(len(piece.text) for piece in found) <= 2 * PIECE_BYTES


def test_long_chat_messages_are_read_in_pieces(tmp_path):
    long, chat = "A line of a long answer.\n" * 150_000, ChatTemplate(CHATML, CHATML_TOKENS)
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": long}]
    path = write_records(tmp_path / "a.jsonl", [{"messages": messages}])
    found = list(Reader(chat=chat).pieces(ByteRange(str(path), "jsonl", column="messages")))
    assert joined(found) == "user\nWhy?\nassistant\n" + long + "\n"
    assert [piece.control for piece in found if piece.control] == ["<|im_start|>", "<|im_end|>"] * 2
    assert [piece.starts_document for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(len(piece.text) for piece in found) <= 2 * PIECE_BYTES


@pytest.mark.parametrize(
    ("sample_by", "part"),
    [("document", "長い"), ("document", "/x"), ("document", "\u0301"), ("line", "x"), ("paragraph", "x")],
)
def test_line_without_a_place_to_cut_is_one_piece_up_to_a_limit(tmp_path, monkeypatch, sample_by, part):
    text = part * (2_200_000 // len(part))
    start = time.process_time()
    found, counts = pieces(write(tmp_path / "a.txt", text), sample_by)
    assert time.process_time() - start < 3  # a quadratic search would take minutes
    assert ([piece.text for piece in found if piece.text], counts.cut_words) == ([text], 0)
    monkeypatch.setattr("tokenizer.corpus.documents.LONGEST_RUN", 1_200_000)
    found, counts = pieces(tmp_path / "a.txt", sample_by)
    assert (joined(found), counts.documents, counts.cut_words) == (text, 1, 1)
    assert max(len(piece.text) for piece in found) <= 1_200_000 + PIECE_BYTES


@pytest.mark.parametrize("part", ["\r\n", "\n\r"])
@pytest.mark.parametrize("unit_bytes", [60, 61])
def test_line_breaks_are_never_split(tmp_path, monkeypatch, part, unit_bytes):
    monkeypatch.setattr("tokenizer.corpus.documents.PIECE_BYTES", 50)
    monkeypatch.setattr("tokenizer.corpus.documents.LONGEST_RUN", 50)
    monkeypatch.setattr("tokenizer.corpus.byte_range.WINDOW_BYTES", 50)
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", unit_bytes)
    text = "a" + part * 1000 + "b"
    texts = [piece.text for piece in pieces(write(tmp_path / "a.txt", text))[0] if piece.text]
    assert "".join(texts) == text
    assert len(texts) > 30
    assert not any(a.endswith("\r") and b.startswith("\n") for a, b in itertools.pairwise(texts))


CHARACTERS = [*"aaab1  \n\n\r\t,.é雪🙂\u0301\u3000\ufeff\x85\0", "\r\n", "\r\n\r\n", "\n\n", "word word"]


def random_text(seed: int) -> str:
    some = random.Random(seed)
    return "".join(some.choices(some.choices(CHARACTERS, k=8), k=some.choice([1, 5, 60, 200])))


def random_bytes(seed: int) -> bytes:
    parts = [b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x80" * 5, b"a", b"b", b" ", b"\n", b"\r\n", "雪".encode()]
    return b"a" + b"".join(random.Random(seed).choices(parts, k=40))


def whole_documents(text: str, sample_by: str) -> list[str]:
    text = text.removeprefix("\ufeff")
    if sample_by == "document":
        return [text] if text else []
    lines = text.replace("\r\n", "\n").split("\n")
    if sample_by == "line":
        return [line for line in lines if line.strip()]
    groups = itertools.groupby(lines, key=lambda line: bool(line.strip()))
    return ["\n".join(group) for visible, group in groups if visible]


@pytest.mark.parametrize("sample_by", ["document", "line", "paragraph"])
@pytest.mark.parametrize("unit_bytes", [1, 3, 7, 64])
def test_units_contain_all_documents_of_a_file(tmp_path, monkeypatch, sample_by, unit_bytes):
    """Bytes that are not UTF-8 are counted once, for any size of units and of the blocks that are read."""
    monkeypatch.setattr("tokenizer.corpus.files.check_text", lambda *_: None)  # random texts contain NUL bytes
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", unit_bytes)
    monkeypatch.setattr("tokenizer.corpus.documents.PIECE_BYTES", unit_bytes if unit_bytes > 3 else PIECE_BYTES)
    for content in [*(random_text(seed).encode() for seed in range(40)), *map(random_bytes, range(30))]:
        text, bad = re.subn("[\ud800-\udfff]", "\ufffd", content.decode(errors="surrogateescape"))
        found, counts = pieces(write(tmp_path / "a.txt", content), sample_by)
        starts = [i for i, piece in enumerate(found) if piece.starts_document]
        texts = [joined(found[start:end]) for start, end in itertools.pairwise([*starts, len(found)])]
        if texts or not text.removeprefix("\ufeff").isspace():
            assert texts == whole_documents(text, sample_by), content
        assert [i for i, piece in enumerate(found) if piece.ends_document] == [i - 1 for i in [*starts, len(found)][1:]]
        assert (counts.documents, counts.bytes, counts.bad_bytes) == (len(texts), len(joined(found).encode()), bad)


@pytest.mark.parametrize("unit_bytes", [1, 7, 30, 1000])
def test_units_contain_all_records_of_a_file(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", unit_bytes)
    texts = [text for text in map(random_text, range(30)) if text.strip()]
    lines = [json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    found, counts = pieces(write(tmp_path / "a.jsonl", "\ufeff" + "\r\n\n".join(lines)))
    assert [piece.text for piece in found] == texts
    assert (counts.documents, counts.empty_records) == (len(texts), 0)


def test_shortened_files_end_where_they_end_and_grown_files_are_read_to_the_end(tmp_path):
    """A corpus refuses a file that was changed after all text is read."""
    write(tmp_path / "a.text", "text")
    for kind in ("jsonl", "parquet"):
        write_records(tmp_path / f"a.{kind}", [{"text": "one"}])
    parts = (ByteRange(str(tmp_path / f"a.{kind}"), kind, 30, 1000, "text") for kind in ("text", "jsonl", "parquet"))
    text, records, table = map(Reader().pieces, parts)
    assert joined([*text, *records]) == ""
    assert_user_error(r"a\.parquet cannot be read: .*; fix it or exclude it\.", list, table)
    [unit] = Corpus([str(tmp_path / "a.text")], CorpusArguments()).units()
    write(tmp_path / "a.text", "text and more")
    assert joined(list(Reader().pieces(unit.ranges[0]))) == "text and more"
