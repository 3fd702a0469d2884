"""Reading text: what is found and in which order, what is mended and counted, and pieces that lose nothing."""

import csv
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from command_line import UserError
from tokenizer import corpus as corpus_module
from tokenizer.corpus import PIECE_BYTES, STANDARD_LIBRARY, Corpus, CorpusArguments
from tokenizer.vocabulary import encoder, train_bpe

# The word pattern of Llama 3 and cl100k_base: line breaks may belong to the punctuation before them.
NEWER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
FRAGMENTS = [
    *(
        "to be",
        "or not",
        "to be",
        "Straße",
        "don't",
        "we'll",
        "'s",
        "'",
        "日本語",
        "e\u0301",
        "👩‍👩‍👧",
        "123",
        "4",
        "²",
        "...",
        "!?",
        "(",
    ),
    *(" ", " ", " ", "  ", "      ", "\t", " \t ", "\n", "\n", "\n\n\n", " \n ", "\r\n", "\r\n\r\n", "\r"),
    *("\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"),
]


def corpus(*inputs, **arguments) -> Corpus:
    return Corpus([str(entry) for entry in inputs], CorpusArguments(**arguments))


def documents(source: Corpus) -> list[str]:
    texts, ended = [], True
    for piece in source.pieces():
        assert piece.starts_document == ended
        if piece.starts_document:
            texts.append("")
        texts[-1] += piece.text
        ended = piece.ends_document
    assert ended
    return texts


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_records(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def jumble(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(FRAGMENTS, k=length))


def newer_bpe(text: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(NEWER_PATTERN), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([text], trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


# ---- where text is found --------------------------------------------------------------------------------------------


def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path):
    text = "  First line\r\n\r\n\tsecond\u2028line \n\n"
    source = corpus(write(tmp_path / "a.txt", text))
    assert documents(source) == [text]
    assert source.counts["bytes"] == len(text.encode())


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden.txt", ".git/config", "sub/.cache/d.txt"):
        write(tmp_path / "books" / name, name)
    assert documents(corpus(tmp_path / "books")) == ["a.txt", "b.txt", "sub/c.md"]


def test_inputs_are_read_in_the_order_given(tmp_path):
    later, first = write(tmp_path / "a.txt", "later"), write(tmp_path / "b.txt", "first")
    assert documents(corpus(first, later)) == ["first", "later"]


def test_a_glob_finds_files_in_a_fixed_order(tmp_path):
    for name in ("b.txt", "a.txt", "no.md", "deep/er/c.txt"):
        write(tmp_path / name, name)
    assert documents(corpus(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert documents(corpus(tmp_path / "**" / "*.txt")) == ["a.txt", "b.txt", "deep/er/c.txt"]


@pytest.mark.parametrize("name", ["my notes.txt", "Über 雪 👩‍👩‍👧.txt", "draft [1].txt", "50% #2?.txt", "none"])
def test_a_text_file_may_have_any_name(tmp_path, name):
    assert documents(corpus(write(tmp_path / "a folder" / name, "text"))) == ["text"]


@pytest.mark.parametrize("name", ["my notes.jsonl", "雪 #1 50%.jsonl", "draft [1].jsonl", "why?.jsonl", "a::b.jsonl"])
def test_a_file_of_records_may_have_any_name(tmp_path, name):
    assert documents(corpus(write_records(tmp_path / "a folder" / name, [{"text": "one"}]))) == ["one"]


def test_a_record_format_is_known_by_its_suffix_in_capitals_too(tmp_path):
    assert documents(corpus(write_records(tmp_path / "A.JSONL", [{"text": "one"}, {"text": "two"}]))) == ["one", "two"]


@pytest.mark.parametrize("entry", ["nothing.txt", "no*.txt", "a b/c.txt", "~/nothing here", "one/two/three.txt"])
def test_what_is_not_there_is_named(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        corpus(entry)
    assert str(error.value) == f"{entry} is no file, folder, glob or Hub dataset; nothing to read there."


def test_an_empty_folder_is_named(tmp_path):
    write(tmp_path / ".hidden", "text")
    with pytest.raises(UserError, match="is an empty folder; nothing to read there"):
        corpus(tmp_path)


def test_the_standard_library_is_sources_without_tests_and_tables():
    source = corpus(STANDARD_LIBRARY)
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in source.files]
    assert {"argparse.py", "json/decoder.py", "email/message.py"} <= set(names)
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {path.suffix for path in source.files} == {".py"}
    assert not any({"test", "tests", "encodings", "pydoc_data", "site-packages"} & set(Path(n).parts) for n in names)
    assert 3e6 < source.size < 30e6


# ---- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["text", "content", "prose"])
def test_a_record_is_a_document_and_its_text_column_is_found(tmp_path, suffix, column):
    texts = ['He said, "Ü 雪\n\n  twice".', " one\ttwo\r\n", "plain"]
    records = [{"id": i, column: text} for i, text in enumerate(texts)]
    assert documents(corpus(write_records(tmp_path / f"records.{suffix}", records))) == texts


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_text_column_can_be_named(tmp_path, suffix):
    path = write_records(tmp_path / f"records.{suffix}", [{"text": "no", "summary": "yes"}])
    assert documents(corpus(path, text_column="summary")) == ["yes"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_text_column_that_is_not_there_is_answered_with_those_that_are(tmp_path, suffix):
    path = write_records(tmp_path / f"records.{suffix}", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match=r"has no column 'texts'; its columns are question, answer: .*--text_column"):
        documents(corpus(path, text_column="texts"))
    with pytest.raises(UserError, match=r"does not say which column .* question, answer: .*--text_column"):
        documents(corpus(path))


def test_words_that_csv_readers_take_for_nothing_are_text(tmp_path):
    path = write_records(tmp_path / "a.csv", [{"text": text} for text in ("word", "null", "NA", "None", "nan")])
    assert documents(corpus(path)) == ["word", "null", "NA", "None", "nan"]


@pytest.mark.parametrize(
    "line",
    [b'{"other": 1}', b'{"text": null}', b'{"text": 5}', b'{"text": "cut o', b"not json", b"[]"],
)
def test_a_broken_or_fieldless_line_is_counted_up_to_one_percent(tmp_path, line):
    good = [json.dumps({"text": f"document {i}"}).encode() for i in range(200)]
    source = corpus(write(tmp_path / "few.jsonl", b"\n".join([*good[:100], line, *good[100:]])))
    assert documents(source) == [f"document {i}" for i in range(200)]
    assert source.counts["empty_records"] == 1
    with pytest.raises(UserError, match=r"1 records without text.*--strict"):
        documents(corpus(tmp_path / "few.jsonl", strict=True))
    with pytest.raises(UserError):
        documents(corpus(write(tmp_path / "many.jsonl", b"\n".join([*good[:100], line, line]))))


def test_a_byte_in_a_record_that_is_not_utf8_is_replaced_and_counted(tmp_path):
    good = [json.dumps({"text": f"document {i}"}).encode() for i in range(200)]
    source = corpus(write(tmp_path / "a.jsonl", b"\n".join([*good, b'{"text": "caf\xe9"}'])))
    assert documents(source)[-1] == "caf\ufffd"
    assert source.counts["bad_bytes"] == 1


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    paths = [
        write(tmp_path / "a.txt", mark + "Ünder".encode()),
        write(tmp_path / "a.jsonl", mark + b'{"text": "two"}\n'),
        write(tmp_path / "a.csv", mark + b"text,id\r\nthree,1\r\n"),
    ]
    assert documents(corpus(*paths)) == ["Ünder", "two", "three"]


# ---- what is mended, left out, refused ------------------------------------------------------------------------------


def test_bytes_that_are_not_utf8_are_replaced_and_counted_up_to_one_percent(tmp_path):
    source = corpus(write(tmp_path / "a.txt", b"na\xefve " + b"plain words " * 100 + b"\xe2\x82"))
    assert documents(source) == ["na\ufffdve " + "plain words " * 100 + "\ufffd\ufffd"]
    assert source.counts["bad_bytes"] == 3
    assert "3 bytes that are not UTF-8" in source.summary()


def test_text_in_another_encoding_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", ("déjà vu à la crème " * 10).encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text: 40 of 190 bytes are invalid"):
        documents(corpus(path))


def test_utf16_text_is_called_by_its_name(tmp_path):
    path = write(tmp_path / "a.txt", "What Windows calls Unicode.\n".encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16"):
        documents(corpus(path))


@pytest.mark.parametrize("unclean", [b"one\xff" + b" word" * 100, b"\x00\x01\x02"])
def test_strict_refuses_what_is_otherwise_mended(tmp_path, unclean):
    write(tmp_path / "good.txt", "good words " * 100)
    write(tmp_path / "unclean.dat", unclean)
    documents(corpus(tmp_path))
    with pytest.raises(UserError, match=r"is not clean \(1 [a-zA-Z0-9 -]+\), and --strict allows nothing else"):
        documents(corpus(tmp_path, strict=True))


def test_strict_takes_clean_text_as_it_is(tmp_path):
    assert documents(corpus(write(tmp_path / "a.txt", "tr\u00e8s \ufffd clean\r\n"), strict=True)) == [
        "très \ufffd clean\r\n"
    ]


def test_blank_documents_and_binary_files_are_left_out_and_counted(tmp_path):
    for name, content in {
        "a": "text",
        "b": "",
        "c": " \n\t\u3000\r\n",
        "d": b"\x89PNG\x00\x00",
        "e": "\n more",
    }.items():
        write(tmp_path / name, content)
    source = corpus(tmp_path)
    assert documents(source) == ["text", "\n more"]
    assert (source.counts["documents"], source.counts["blank"], source.counts["binary_files"]) == (2, 2, 1)
    assert "2 blank documents, 1 binary files" in source.summary()


def test_a_document_that_begins_with_a_megabyte_of_nothing_is_kept(tmp_path):
    text = "\n" * 2_500_000 + "text\n"
    assert documents(corpus(write(tmp_path / "a.txt", text))) == [text]


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", " \n"), ("a.bin", b"\0\1"), ("a.jsonl", "")])
def test_input_without_any_text_is_refused(tmp_path, name, content):
    with pytest.raises(UserError, match=name) as error:
        documents(corpus(write(tmp_path / name, content)))
    assert "\n" not in str(error.value)


def test_every_pass_counts_anew(tmp_path):
    source = corpus(write(tmp_path / "a.txt", "text"))
    assert documents(source) == documents(source)
    assert source.counts["documents"] == 1


# ---- pieces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jumble", "crlf", "one line"])
def test_three_megabytes_come_in_pieces_that_encode_to_what_the_whole_does(tmp_path, kind):
    lines = [f"{i} naïve sentences, each of them short; they don't  end in a full stop" for i in range(45_000)]
    text = {
        "jumble": "".join(jumble(seed, 1000) for seed in range(1000)),
        "crlf": "\r\n".join(lines),
        "one line": " ".join(lines),
    }[kind]
    assert len(text.encode()) > 3_000_000
    pieces = list(corpus(write(tmp_path / "a.txt", text)).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.starts_document for piece in pieces].index(False) == 1
    assert [piece.ends_document for piece in pieces].index(True) == len(pieces) - 1
    tokenizer = train_bpe([text[:100_000]], 400)
    [whole] = tokenizer.backend_tokenizer.encode_batch_fast([text])
    ids = np.concatenate(encoder(tokenizer)([piece.text for piece in pieces]))
    assert np.array_equal(ids, whole.ids)


@pytest.mark.parametrize("make", [lambda text: train_bpe([text], 400), newer_bpe], ids=["GPT-2", "Llama 3"])
def test_no_cut_between_pieces_changes_a_token(tmp_path, monkeypatch, make):
    tokenizer = make(jumble(0, 2000))
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 600)
    for seed in range(10):
        text = "a" + jumble(seed, 3000)
        pieces = [piece.text for piece in corpus(write(tmp_path / "a.txt", text)).pieces()]
        assert "".join(pieces) == text
        assert len(pieces) > 5
        ids = np.concatenate(encoder(tokenizer)(pieces))
        assert ids.tolist() == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_a_long_record_comes_in_pieces_too(tmp_path):
    text = "A line of a long book.\n" * 150_000
    pieces = list(corpus(write_records(tmp_path / "a.jsonl", [{"text": text}])).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 1


def test_three_megabytes_without_any_white_space_are_kept(tmp_path):
    text = "長い" * 500_000
    assert documents(corpus(write(tmp_path / "a.txt", text))) == [text]


def test_characters_that_lie_across_read_blocks_are_kept(tmp_path):
    for lead in range(4):
        text = "a" * lead + "🙂" * (PIECE_BYTES // 4 + 1) + "é"
        source = corpus(write(tmp_path / "a.txt", text))
        assert documents(source) == [text]
        assert source.counts["bad_bytes"] == 0


def test_a_broken_character_across_read_blocks_is_counted_once(tmp_path):
    source = corpus(write(tmp_path / "a.txt", b"x" * (PIECE_BYTES - 1) + b"\xc3" + b"x" * 100))
    assert documents(source) == ["x" * (PIECE_BYTES - 1) + "\ufffd" + "x" * 100]
    assert source.counts["bad_bytes"] == 1
