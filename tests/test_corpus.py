"""Corpus: files of `--input`, their kinds and text columns, units, and error messages."""

import csv
import gzip
import json
import os
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from datasets.arrow_writer import ArrowWriter

from common.removal import mark
from conftest import assert_user_error, error_of, without_root
from tokenizer.corpus.byte_range import ByteRange
from tokenizer.corpus.documents import Counts, Reader
from tokenizer.corpus.named_data import licenses
from tokenizer.corpus.records import records
from tokenizer.corpus.units import Corpus, CorpusArguments, kind_of

GOOD = "good words " * 100
NO_FILES = "has no files except hidden files, token stores, runs and links (only a glob follows links);"


def corpus(*inputs, weights=(), **arguments) -> Corpus:
    return Corpus([str(entry) for entry in inputs], CorpusArguments(**arguments), list(weights))


def read(*inputs, **arguments) -> tuple[list[str], Counts]:
    """Return all documents and the counts."""
    source = corpus(*inputs, **arguments)
    reader = Reader(source.arguments.sample_by)
    texts, ended = [], True
    for part in (part for unit in source.units() for part in unit.ranges):
        for piece in reader.pieces(part):
            assert piece.starts_document == ended
            if piece.starts_document:
                texts.append("")
            texts[-1] += piece.text
            ended = piece.ends_document
    assert ended
    reader.counts.add(source.finder.skipped)
    source.check(reader.counts)
    return texts, reader.counts


def documents(*inputs, **arguments) -> list[str]:
    return read(*inputs, **arguments)[0]


def refusal(*inputs, **arguments) -> str:
    sentence = error_of(read, *inputs, **arguments)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_records(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        write_table(path, [records[0].keys(), *(record.values() for record in records)])
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=50)
    elif path.suffix == ".json":
        write(path, json.dumps(records))
    else:
        write(path, "".join(json.dumps(record) + "\n" for record in records))
    return path


def write_table(path: Path, rows: list) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    return path


def test_folder_is_read_in_name_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden.txt", ".git/config", "sub/.cache/d.txt"):
        write(tmp_path / "books" / name, name)
    assert documents(tmp_path / "books") == ["a.txt", "b.txt", "sub/c.md"]
    given = [tmp_path / "books" / name for name in ("b.txt", ".hidden.txt", "a.txt")]
    assert documents(*given) == ["b.txt", ".hidden.txt", "a.txt"]  # order and hidden files as given


def test_glob_finds_every_file_once_in_a_fixed_order(tmp_path):
    names = ["a.txt", "b.txt", "deep/er/c.txt", "deep/no.md", "en/d.txt"]
    for name in (*reversed(names), "deep/.hidden"):
        write(tmp_path / name, name)
    for link in ("deep/loop", "en/loop"):  # the paths through both never end
        (tmp_path / link).symlink_to(tmp_path)
    (tmp_path / "a loop").symlink_to(tmp_path / "a loop")
    (tmp_path / "linked").symlink_to(write(tmp_path.with_name("elsewhere") / "e.txt", "elsewhere").parent)
    assert documents(tmp_path / "*.txt") == names[:2]
    assert documents(tmp_path / "**/*.txt") == [*names[:3], names[4], "elsewhere"]
    assert documents(tmp_path / "**") == [*names, "elsewhere"]
    assert documents(tmp_path / "*e*") == [*names[2:], "elsewhere"]  # matches folders
    assert documents(tmp_path / "en/loop/e*/*.txt") == [names[4]]  # through a link


@pytest.mark.parametrize("name", ["my notes", "Über 雪 👩‍👩‍👧", "50% #2?", "draft [1]", "a::b"])
def test_files_can_have_any_name(tmp_path, name):
    for path in (tmp_path / "a folder" / f"{name}.txt", tmp_path / "a folder" / name):
        assert documents(write(path, "text")) == ["text"]
    assert documents(write_records(tmp_path / "a folder" / f"{name}.jsonl", [{"text": "one"}])) == ["one"]


def test_missing_input_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "books" / "a.txt", "text")
    write(tmp_path / "empty" / ".hidden", "text")
    for entry in ("nothing.txt", "no*.txt", "a b/c.txt", "~/nothing here", "one/two/three.txt", "books/b.txt"):
        assert refusal(entry).startswith(f"{entry} matches no local file or folder and is neither a Hub dataset nor")
    assert refusal("boks/a.txt").startswith("boks/a.txt is not a local path, and the Hub cannot be reached (HF_HUB")
    sentence = "revision is v1, but no input is a Hub dataset without its own; leave it out."
    for entry in ("books/a.txt", "user/a@v2", "shakespeare"):
        assert_user_error(sentence, corpus, entry, revision="v1")
    assert [hub.revision for hub in corpus("user/a@v2", "user/b", revision="v1").hub] == ["v2", "v1"]
    assert refusal("empty").startswith(f"empty {NO_FILES} ")


def test_tilde_is_expanded_and_stores_and_pipes_are_not_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "text")
    os.mkfifo(tmp_path / "pipe")
    assert documents("~/a.txt") == documents("~/*.txt") == documents("~") == ["text"]
    assert "is a folder, a pipe or a device" in refusal("~/pipe")
    write(tmp_path / "store" / "report.md", "report")
    write(tmp_path / "store-notes.txt", "notes")
    source = Corpus([str(tmp_path)], CorpusArguments(), left_out=tmp_path / "store")
    assert [Path(file.path).name for file in source.all_files] == ["a.txt", "store-notes.txt"]


def test_standard_library_excludes_tests_and_tables():
    root, files = Path(sysconfig.get_path("stdlib")), corpus("python-standard-library").all_files
    paths = [Path(file.path).relative_to(root) for file in files]
    assert {"argparse.py", "json/decoder.py", "email/message.py"} <= {path.as_posix() for path in paths}
    assert {path.suffix for path in paths} == {".py"}
    assert not any({"test", "tests", "encodings", "pydoc_data", "site-packages"} & set(path.parts) for path in paths)
    others = corpus("python-standard-library", exclude=["email", "arg*.py"]).all_files
    names = [{Path(file.path).relative_to(root).parts[0] for file in some} for some in (files, others)]
    assert names[0] - names[1] == {"email", "argparse.py"}


def test_packages_and_their_licenses_are_read(tmp_path, monkeypatch):
    files = corpus("python-packages").all_files
    names = [Path(file.path).as_posix().split("site-packages/")[-1] for file in files]
    assert {"torch/nn/functional.py", "transformers/trainer.py", "sympy/core/add.py"} <= set(names)
    assert names == sorted(names)
    assert not any({"test", "tests", "testing"} & set(name.split("/")) for name in names)
    assert licenses(["python-packages", "python-standard-library", "other"])[f"torch {version('torch')}"]
    info = tmp_path / "gpt2scratch_text-1.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: gpt2scratch-text\nVersion: 1\nLicense: MIT\n")
    write(info / "RECORD", "speeches/a.txt,,\nspeeches/b.txt,,\nspeeches/skipped/c.txt,,\n../d.txt,,\ne.py,,\n")
    for name in ("speeches/a.txt", "speeches/b.txt", "speeches/skipped/c.txt", "e.py"):
        write(tmp_path / name, name)
    yaml = "package: gpt2scratch-text\nfiles: speeches/*.txt\nexclude: [b.*, skipped]\nheld_out: [speeches]\n"
    mine = str(write(tmp_path / "mine.yaml", f"{yaml}install: pip install it\n"))
    assert f"{mine} is text of gpt2scratch-text, which is not installed: run `pip install it`." == refusal(mine)
    monkeypatch.syspath_prepend(tmp_path)
    assert documents(mine) == ["speeches/a.txt"]
    assert [file.val for file in corpus(mine).all_files] == [True]
    assert {"rich", "jinja2", "fsspec", "implementations"} == {Path(file.path).parts[-2] for file in files if file.val}
    assert licenses([mine]) == {"gpt2scratch-text 1": "MIT"}


def test_links_are_followed_only_if_given_by_name(tmp_path):
    write(tmp_path / "elsewhere" / "b.txt", "out")
    write(tmp_path / "books" / "a.txt", "in")
    (tmp_path / "links").mkdir()
    links = {"books/b.txt": "elsewhere/b.txt", "books/folder": "elsewhere", "books/broken": "nothing"}
    links |= {"books/round": "books", "a.txt": "elsewhere/b.txt", "folder": "elsewhere"}
    links |= {"links/b.txt": "elsewhere/b.txt", "broken": "nothing", "round": "round"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    assert documents(tmp_path / "books") == ["in"]
    assert corpus(tmp_path / "books").left_out_words(Counts()) == "4 links that were not followed"
    assert "is not clean (4 links that were not followed), which" in refusal(tmp_path / "books", strict=True)
    assert documents(tmp_path / "a.txt") == documents(tmp_path / "folder") == documents(tmp_path / "*.txt") == ["out"]
    assert NO_FILES in refusal(tmp_path / "links")
    assert documents(tmp_path / "links" / "*") == ["out"]
    for link in (tmp_path / "broken", tmp_path / "round"):
        assert refusal(link) == f"{link} is a broken link; fix it or exclude it."


def test_duplicate_input_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "books" / "a.txt", "text")
    sentence = "books/a.txt is given twice, by books and by books/a.txt; give it once, with --weights 2 to use it"
    assert refusal("books", "books/a.txt") == f"{sentence} twice."
    assert "is given twice, by books and by ./books" in refusal("books", "./books")
    assert "is given twice, by books/*.txt and by books/a*" in refusal("books/*.txt", "books/a*")


TWO = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("A.JSONL", TWO), ("a.ndjson", TWO), ("a.b.jsonl", TWO), ("a.json", TWO.rstrip())),
        ("a.json", '[{"text": "one"}, {"text": "two"}]'),
        ("a.json", '\ufeff \n[\n  {"text": "one"},\n  {"text": "two"}\n]\n'),
        ("a.json", '["one", "two"]'),
        ("a.json", '\ufeff{"prose": "one"}\n{"prose": "two"}\n'),
    ],
)
def test_suffix_selects_the_format_and_json_can_be_a_list_or_lines(tmp_path, name, content):
    assert documents(write(tmp_path / name, content)) == ["one", "two"]


def test_json_without_records_is_text(tmp_path):
    one = '{"id": 1, "prose": "one"}\n'
    lines = '{\n  "prose": "all on its own lines"\n}\n'
    for content in ('{"name": "GPT", "layers": 12}', lines, "[1, 2, 3]", "5", '{"broken": ', '{\n"text": {}\n}', one):
        assert documents(write(tmp_path / "config.json", content)) == [content]
    assert documents(tmp_path / "config.json", text_column="prose") == ["one"]
    assert documents(write(tmp_path / "a.json", "\ufeff" + lines), text_column="prose") == ["all on its own lines"]
    assert documents(write(tmp_path / "a.json", lines.replace("prose", "text"))) == ["all on its own lines"]
    assert kind_of(str(write(tmp_path / "a.json", '{\n"text": null\n}'))) == "json"  # a record without text
    assert "a.txt has no records" in refusal(write(tmp_path / "a.txt", "Some words."), text_column="prose")
    assert documents(write(tmp_path / "a.json", one.replace("prose", "content"))) == ["one"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_each_record_is_a_document_and_its_text_column_is_detected_or_chosen(tmp_path, suffix):
    texts = ['He said, "Ü 雪\n\n  twice".', " one\ttwo\r\n", "plain"]
    for column in ("text", "content", "prose"):
        records = [{"id": i, column: text} for i, text in enumerate(texts)]
        assert documents(write_records(tmp_path / f"records.{suffix}", records)) == texts
    path = write_records(tmp_path / f"a.{suffix}", [{"text": "no", "summary": "yes"}])
    assert documents(path, text_column="summary") == ["yes"]
    path = write_records(tmp_path / f"b.{suffix}", [{"question": "a", "answer": "b"}])
    given = "its columns are question, answer: choose one with --text_column."
    assert refusal(path, text_column="texts") == f"{path} has no column 'texts'; {given}"
    assert refusal(path) == f"{path} has no obvious text column; {given}"


def test_text_column_precedes_content_and_other_columns(tmp_path):
    records = [{"title": "no", "content": "no", "text": "yes"}, {"title": "no", "content": "no", "text": "too"}]
    assert documents(write_records(tmp_path / "a.jsonl", records)) == ["yes", "too"]
    assert documents(write(tmp_path / "a.csv", "id,score,prose\n1,-0.5,one\n2,3,two\n")) == ["one", "two"]  # no number
    rows = [{"id": "a", "prose": None}, {"id": 2, "prose": "7"}, *({"id": 3, "prose": word} for word in ("two", "six"))]
    assert "no obvious text column" in refusal(write_records(tmp_path / "b.jsonl", rows))
    assert documents(write_records(tmp_path / "b.jsonl", rows[1:])) == ["7", "two", "six"]
    write(tmp_path / "a.csv", "id,score,prose\n1,,one\n2,1e-05,two\n3,nan,3\n4,5%,four\n")  # missing and other numbers
    assert documents(tmp_path / "a.csv") == ["one", "two", "3", "four"]
    one = {"title": "one", "tags": ["a", "bc"] * 9, "deep": json.loads("[" * 600 + "]" * 600)}
    rows = [one | {"image": {"bytes": "", "path": None}}, {"title": "two", "scores": [1e-05, True, 3.5] * 9}]
    assert documents(write_records(tmp_path / "c.jsonl", rows)) == ["one", "two"]
    rows = [{"id": "a1", "conversation": [{"role": "user", "content": "Hello"}]}, {"id": "b2", "conversation": []}]
    assert "no obvious text column" in refusal(write_records(tmp_path / "c.jsonl", rows))
    answer = [{"role": "assistant", "content": "It is 0."}]
    rows = [{"prompt": "What is 0? Please answer at length.", "chosen": answer, "rejected": answer}]
    assert "no obvious text column" in refusal(write_records(tmp_path / "c.jsonl", rows))
    lines = ["broken", '{"id": 1}', *[json.dumps({"id": 1, "text": str(i)}) for i in range(300)]]
    assert documents(write(tmp_path / "a.jsonl", "\n".join(lines))) == [str(i) for i in range(300)]


def test_quotes_and_separators_of_tables(tmp_path):
    rows = ['1\t"Yes, he said', '1\t"Yes," he said', "2\ttwo", '3\t"three"']
    rows += ['4\t"of ""two"" quotes', 'and lines"', '5\t"6"" long']
    texts = ['"Yes, he said', '"Yes," he said', "two", "three", 'of "two" quotes\nand lines', '"6"" long']
    assert documents(write(tmp_path / "a.tsv", "\n".join(["id\ttext", *rows]))) == texts
    rows = ['"Hello ""world"""\t6" pipe', "two\t2"]
    assert documents(write(tmp_path / "b.tsv", "\n".join(["prose\tsize (x, y)", *rows]))) == ['Hello "world"', "two"]
    quoted = '1\t"Title\n\n""Who?"" he\tasked.\n"\n2\t"A ""b""\n""c"""\n'
    assert documents(write(tmp_path / "c.tsv", f"id\ttext\n{quoted}")) == ['Title\n\n"Who?" he\tasked.\n', 'A "b"\n"c"']
    rows = ['1\t"Big" 5" pipe', "", '2\t"Yes" said she', '3\t"Unclosed', "4\tfour"]
    texts = ['Big 5" pipe', '"Yes" said she', '"Unclosed', "four"]  # a field before a blank line is the reader's
    assert documents(write(tmp_path / "e.tsv", "\n".join(["id\ttext", *rows]))) == texts
    methods = [f"class A{i}:\n\tx = {i}\n\ty = ''\n" for i in range(9000)]  # each line looks like a record
    assert documents(write_table(tmp_path / "f.tsv", [["id", "text"], *enumerate(methods)])) == methods
    texts = [f"text {i}" for i in range(9)] + ['Table:\na\tb\n"c"']  # the second line looks like a record
    assert documents(write_table(tmp_path / "g.tsv", [["id", "text"], *enumerate(texts)])) == texts
    rows = '"Title\nof ""two""\nlines"\n"Yes" he said\n"No"\n'
    assert documents(write(tmp_path / "d.tsv", f"text\n{rows}")) == ['Title\nof "two"\nlines', '"Yes" he said', "No"]
    assert documents(write(tmp_path / "b.csv", "prose,label (0;1;2)\none,0\ntwo,1\n")) == ["one", "two"]
    assert documents(write(tmp_path / "c.csv", "id;prose;size (x, y)\n1;one;3\n2;two;4\n")) == ["one", "two"]
    path = write(tmp_path / "a.csv", 'id;note;"a,\tb,c"\n1;2;one\n3;4;two\n')
    assert documents(path, text_column="a,\tb,c") == ["one", "two"]
    write(path, "text\n" + '"first line\nsecond line"\n' * 40)
    for size in range(200, 230):  # a sample of a file that is read whole may end within quotes
        sample = [record["text"] for record, _ in records(ByteRange(str(path), "csv", limit=size))]
        assert {*sample} == {"first line\nsecond line"}


def test_column_names_are_printed_on_one_line(tmp_path):
    path = write(tmp_path / "a.csv", '"the\nquestion",answer\none,two\n')
    assert "its columns are the question, answer: choose one with --text_column." in refusal(path)
    assert documents(path, text_column="the\nquestion") == ["one"]
    for name in ("a", "b"):  # the error names all files without a clear text column
        write_records(tmp_path / "in" / f"{name}.jsonl", [{"question": "a", "answer": "b"}])
    named = error_of(corpus(tmp_path / "in").units).splitlines()
    assert [Path(line.split()[0]).name for line in named] == ["a.jsonl", "b.jsonl"]


def test_chat_column_is_used_without_a_text_column(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    for column in ("messages", "conversations"):
        records = [{"id": "1", column: []}, {"id": "2", column: chat}]
        source = corpus(write_records(tmp_path / f"{column}.jsonl", records))
        [unit] = source.units()
        assert (unit.ranges[0].column, source.has_chats) == (column, True)
    source = corpus(write_records(tmp_path / "a.jsonl", [{"text": "one", "messages": chat}]))
    source.units()
    assert not source.has_chats


def ranges(source: Corpus) -> list[list[tuple]]:
    return [[(Path(s.path).name, s.start, s.stop) for s in unit.ranges] for unit in source.units()]


def test_units_group_small_files_and_divide_large_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 100)
    for name, size in {"a.txt": 40, "b.txt": 60, "c.txt": 1, "d.txt": 250, "e.txt.gz": 1000}.items():
        write(tmp_path / name, "x" * size)
    write_records(tmp_path / "f.json", [{"text": "x" * 1000}])
    small = [[("a.txt", 0, None), ("b.txt", 0, None)], [("c.txt", 0, None)]]
    large = [[("d.txt", 0, 100)], [("d.txt", 100, 200)], [("d.txt", 200, None)]]
    assert ranges(corpus(tmp_path)) == [*small, *large, [("e.txt.gz", 0, None)], [("f.json", 0, None)]]
    names = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "f.json")]  # as a shell expands a pattern
    packed = [tmp_path / "packed" / name for name in ("g.txt.gz", "h.txt.gz")]  # of more text than their size
    for path in packed:
        write(path, gzip.compress(b"words " * 1000))
    assert ranges(corpus(*packed)) == [[(path.name, 0, None)] for path in packed]
    assert ranges(corpus(*names, weights=[1, 1, 2, 2])) == [*small, [("f.json", 0, None)]]


def test_parquet_files_are_divided_by_row_groups(tmp_path, monkeypatch):
    texts = [f"{i} " * 50 for i in range(10)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=2)
    assert ranges(corpus(tmp_path)) == [[("a.parquet", 0, 5)]]
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 1)
    assert ranges(corpus(tmp_path)) == [[("a.parquet", i, i + 1)] for i in range(5)]
    assert documents(tmp_path) == texts


def test_folders_that_datasets_saved_are_read_without_their_other_files(tmp_path, monkeypatch):
    texts = [f"{i} " * 50 for i in range(10)]
    saved = Dataset.from_dict({"id": list(range(10)), "text": texts})
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    load_from_disk(tmp_path / "one").map(lambda row: {"text": "from the cache"})  # writes cache-*.arrow into the folder
    assert len(list((tmp_path / "one").glob("*.arrow"))) > 2
    DatasetDict({"train": saved.filter(lambda row: row["id"] > 6), "test": saved}).save_to_disk(tmp_path / "two")
    assert documents(tmp_path / "one") == texts
    assert documents(tmp_path / "two") == texts[7:]
    mark(tmp_path / "more" / "run", "run")
    write(tmp_path / "more" / "run" / "report.md", "A run that trains on this folder is in it.")
    DatasetDict({"train_sft": saved}).save_to_disk(tmp_path / "more" / "three")
    assert "three has no split train; name the folder of a split (train_sft)" in refusal(tmp_path / "more" / "three")
    write(tmp_path / "more" / "a.txt", "Some words.")
    assert documents(tmp_path / "more") == ["Some words."]
    write(tmp_path / "one" / "state.json", "{}")  # not of `datasets`: an ordinary folder
    assert len(documents(tmp_path / "one")) > 10
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 1)
    with ArrowWriter(path=str(tmp_path / "batches.arrow"), writer_batch_size=2) as writer:
        for text in texts:
            writer.write({"text": text})
        writer.finalize()
    assert ranges(corpus(tmp_path / "batches.arrow")) == [[("batches.arrow", i, i + 1)] for i in range(5)]
    assert documents(tmp_path / "batches.arrow") == texts
    table = pa.table({"text": texts})
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:  # as Polars writes it
        writer.write_table(table, max_chunksize=2)
    assert documents(tmp_path / "file.arrow") == texts


def test_identity_and_fingerprint_detect_changes(tmp_path):
    path = write(tmp_path / "雪.txt", "雪")
    os.utime(path, ns=(5, 7))
    assert corpus(tmp_path).identity() == [[str(path), 3, 7]]
    plain, packed = write(tmp_path / "a.txt", b"x" * 10), write(tmp_path / "b.txt.gz", b"x" * 100)
    source = corpus(plain, packed)
    assert (source.size, source.text_sizes, source.text_size) == (110, [10, 400], 410)  # an estimate
    first = corpus(write(tmp_path / "a.txt", '{"text": "one"}\n')).fingerprint()
    os.utime(tmp_path / "a.txt", (1, 1))
    assert corpus(tmp_path / "a.txt").fingerprint() == first
    assert corpus(write(tmp_path / "moved" / "b.md", '{"text": "one"}\n')).fingerprint() == first
    assert corpus(write(tmp_path / "a.jsonl", '{"text": "one"}\n')).fingerprint() != first
    assert corpus(write(tmp_path / "a.txt", '{"text": "two"}\n')).fingerprint() != first
    ab, c, a, bc = (write(tmp_path / f"{i}.txt", text) for i, text in enumerate(["ab", "c", "a", "bc"]))
    assert len({corpus(*inputs).fingerprint() for inputs in ((ab, c), (c, ab), (a, bc))}) == 3


QUOTES = "texts that contain separators need quotes"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        *(("a.txt", "", "1 blank document"), ("a.jsonl", '{"text": " "}\n', "1 blank document")),
        ("a.jsonl", "broken\n", "1 record without text; the first in {}, line 1 (broken)"),
        *((name, "", "nothing was found") for name in ("a.jsonl", "a.csv")),
        *(("a.jsonl", "\n\n", "nothing was found"), ("a.csv", "text,id\n", "nothing was found")),
        ("a.json", "[]\n", "nothing was found"),
        ("a.csv", "text\na, b\n", "1 record without text; the first in {}, line 2 (broken); " + QUOTES),
    ],
)
def test_input_without_text_is_refused(tmp_path, name, content, why):
    path = write(tmp_path / name, content)
    assert refusal(path) == f"{path} contains no text: {why.format(path)}."


def test_blank_documents_and_binary_files_are_counted_as_left_out(tmp_path):
    contents = {"a": "text", "b": "", "c": " \n\t\u3000\r\n", "d": b"\x89PNG\x00\x00", "e": "\n more"}
    for name, content in contents.items():
        write(tmp_path / name, content)
    texts, counts = read(tmp_path)
    assert texts == ["text", "\n more"]
    assert (counts.documents, counts.blank, counts.binary_files) == (2, 2, 1)
    assert corpus(tmp_path).left_out_words(counts) == "2 blank documents, 1 binary file"
    clean = write(tmp_path / "clean" / "a.txt", "très \ufffd clean\r\n")
    write(tmp_path / "clean" / "b.txt", "")
    assert documents(clean.parent, strict=True) == ["très \ufffd clean\r\n"]


def test_up_to_one_percent_of_bytes_can_be_invalid(tmp_path):
    def with_bad(number: int) -> Path:
        return write(tmp_path / "a.txt", b"x" * 490 + b"\n" + b"\xff" * number + b"x" * (509 - number))

    assert read(with_bad(10))[1].bad_bytes == 10
    path = with_bad(11)
    place = f"the first in {path}, line 2; convert it to UTF-8."
    assert refusal(path) == f"{path} is not UTF-8 text: 11 of 1,000 bytes are invalid; {place}"
    latin = write(tmp_path / "a.txt", "é".encode("latin-1"))
    assert "a.txt is not UTF-8 text: 1 of 1 bytes are invalid; the first in" in refusal(latin)
    assert documents(latin, write(tmp_path / "b.txt", GOOD)) == ["\ufffd", GOOD]  # the share of all files


BROKEN = ["broken", '{"id": 1}', "[]", '{"text": "cut o', '{"text": "caf\\u00']
NO_TEXT = ["null", "5", '["a"]', "[" * 10_000 + "]" * 10_000, "1" * 5000]


@pytest.mark.parametrize("broken", [*BROKEN, *(f'{{"text": {value}}}' for value in NO_TEXT)])
def test_up_to_one_percent_of_records_can_lack_text(tmp_path, broken):
    good = [json.dumps({"text": f"document {i}"}) for i in range(99)]
    texts, counts = read(write(tmp_path / "few.jsonl", "\n".join([*good[:50], broken, *good[50:]])))
    assert texts == [f"document {i}" for i in range(99)]
    assert counts.empty_records == 1
    path = write(tmp_path / "many.jsonl", "\n".join([*good[:50], broken, *good[50:], broken]))
    sentence = refusal(path)
    assert sentence.startswith(f"{path}: 2 records have no text and 99 have text; the first in {path}, line 51")
    remedies = ("line 51; remove them, or name the right column with --text_column.", "(broken); correct that.")
    assert sentence.endswith(remedies)


def test_a_fraction_of_one_document_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", GOOD)
    sentence = "a.txt is one document, of which the weight 0.5 uses all or nothing; add --sample_by paragraph"
    assert_user_error(sentence, corpus(path, weights=[0.5]).units)
    assert corpus(path, weights=[0.5], sample_by="line").units()
    assert corpus(path, weights=[1.5]).units()


def test_intermediate_check_uses_the_total_size(tmp_path):
    check = corpus(write(tmp_path / "a.txt", GOOD)).check
    check(Counts(documents=1, bytes=300, bad_bytes=11, empty_records=1), is_all=False)
    assert_user_error("12 of 1,100 bytes are invalid", check, Counts(1, bytes=300, bad_bytes=12), is_all=False)


UNCLEAN = [
    ("a.txt", GOOD.encode() + b"\xff", r"1 byte that is not UTF-8\).*; the first in \S*/a.txt, line 1\.$"),
    ("a.txt", GOOD.encode() + b"\n\ntwo \xe2\x82", r"2 bytes that are not UTF-8\).*; the first .*a.txt, line 3\.$"),
    ("a.dat", b"\x00\x00\x02", r"1 binary file\).*; the first in \S*/a.dat\.$"),
    ("a.jsonl", b'{"text": "one"}\n\nbroken\n', r"in full\).*a.jsonl \(has no text in 1 of 2 .*, the first in line 3 "),
    ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud800"}', r"1 byte .*; the first in \S*/a.jsonl, line 2\.$"),
    ("a.csv", b"text,id\none,1\n\xff,2\n", r"in full\).*a.csv \(is not UTF-8 text: 1 of .*, the first in line 3;"),
    ("a.json", b'[{"text": "one"}, {"text": 5}]', r"in full\).*a.json \(has no text in 1 of 2 .*in record 2\)\.$"),
    ("a.txt", b"x" * (1 << 20 | 1), r"1 text run cut without a word boundary\).*; the first in \S*/a.txt\.$"),
]


@pytest.mark.parametrize(("name", "content", "what"), UNCLEAN)
def test_strict_refuses_unclean_text_with_its_place(tmp_path, monkeypatch, name, content, what):
    monkeypatch.setattr("tokenizer.corpus.documents.LONGEST_RUN", 1 << 20)
    write(tmp_path / "good.txt", GOOD * 10)
    for i in range(100):
        write(tmp_path / f"good{i}.txt", "good")
    write(tmp_path / name, content)
    documents(tmp_path)
    assert_user_error(rf"is not clean \(.*{what}", documents, tmp_path, strict=True)


def folder_with(tmp_path: Path, name: str, content: bytes, words: str = GOOD * 100) -> Path:
    write(tmp_path / "in" / "words.txt", words)
    return write(tmp_path / "in" / name, content).parent


def test_text_before_the_damage_of_a_file_in_a_folder_is_read(tmp_path):
    texts, counts = read(folder_with(tmp_path, "a.csv", b'text,id\n"a",1\n"b,2\n"c",3\n"d",4\n'))
    assert texts == ["a", "d", GOOD * 100]
    assert counts.worst()["unreadable_files"][1]["why"].endswith("in 1 of 3 records, the first in line 4 (broken)")
    # The damage explains the broken records.
    _, counts = read(folder_with(tmp_path, "a.csv", b'text,id\n"a",1\n' + b"a,b,c\n" * 200 + b'"open,2\n'))
    assert (counts.empty_records, counts.unreadable_files, [*counts.first]) == (0, 1, ["unreadable_files"])


def test_the_lines_before_a_part_of_a_file_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 1000)
    folder = folder_with(tmp_path, "a.jsonl", b'{"text": "one"}\n' * 100 + b'{"text": null}\n')
    [why] = read(folder)[1].worst()["unreadable_files"][1]["why"].splitlines()
    assert why.endswith("has no text in 1 of 38 records, the first in byte 1,600")


def test_table_without_text_column_is_skipped_unless_given_by_name(tmp_path):
    folder = folder_with(tmp_path, "numbers.csv", b"a,b\n1,2\n3,4\n")
    counts = read(folder)[1]
    assert (counts.documents, counts.tables, counts.unreadable_files) == (1, 1, 0)
    assert read(folder / "*")[1].tables == 1
    assert "its columns are a, b: choose one with --text" in refusal(folder / "numbers.csv", folder / "words.txt")
    assert "1 table without a text column" in refusal(folder, strict=True)
    (folder / "words.txt").write_text("Short.")
    assert "its columns are a, b: choose one with --text_column, or skip the file" in refusal(folder)  # mostly tables


UNREADABLE = {
    "cut.txt.gz": (gzip.compress((GOOD * 3).encode())[:-9], "cannot be read"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "some words"}\n')[:-9], "cannot be read"),
    "not.parquet": (b"PAR1 and no more", "cannot be read"),
    "cut.json": (b'[{"text": "a"}, {"te', "cannot be read"),
    "japanese.txt": ("名前はまだ無い。".encode("iso2022_jp"), "is ISO-2022-JP text"),
    "wide.txt": ("some words".encode("utf-16"), "is UTF-16 text"),
    "quote.csv": (b'text,id\n"one",1\n"two,2\nthree,3\n', "cannot be read: unexpected end of data, in line 3"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_in_a_folder_are_skipped_up_to_half_of_the_bytes(tmp_path, name):
    content, reason = UNREADABLE[name]
    folder = folder_with(tmp_path, name, content)
    counts = read(folder)[1]
    assert (counts.unreadable_files, counts.unreadable_bytes) == (1, len(content))
    assert reason in refusal(folder / name, folder / "words.txt")
    write(folder / "words.txt", "a" * (len(content) - 1))
    sentence = refusal(folder)
    assert f"1 file of {len(content)} bytes cannot be read in full, more than half of" in sentence
    assert f"the first in {folder / name} ({reason}" in sentence
    assert sentence.endswith("correct that, or skip the file with --exclude.")
    assert read(folder, exclude=[name])[1].unreadable_files == 0


def test_error_names_the_file_with_the_most_and_the_remedy_for_it(tmp_path):
    few = write(tmp_path / "in" / "a.txt", GOOD.encode() + b"\xff")
    many = write(tmp_path / "in" / "b.txt", b"x\n" * 40_000 + b"\xff" * 2000)  # its head is clean
    sentence = f"2,000 of them in {many}, the first in line 40,001; convert it to UTF-8 or skip it with --exclude."
    assert refusal(tmp_path / "in").endswith(sentence)
    assert refusal(few, many).endswith("line 40,001; convert it to UTF-8.")


def test_file_without_permission_is_skipped_in_a_folder():
    with tempfile.TemporaryDirectory() as temporary:  # pytest's own folders are closed to other users
        folder = folder_with(Path(temporary), "closed/text.txt", GOOD.encode())
        write(Path(temporary) / "in" / "secret.txt", "secret")
        for path, mode in ((Path(temporary), 0o755), (folder, 0), (Path(temporary) / "in" / "secret.txt", 0)):
            path.chmod(mode)
        with without_root():
            counts = read(Path(temporary) / "in")[1]
            assert (counts.documents, counts.unreadable_files, counts.unreadable_bytes) == (1, 2, 6)
            assert "secret.txt cannot be read: Permission denied" in refusal(Path(temporary) / "in" / "secret.txt")
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["*.csv"], ["a.txt", "sub/node_modules/c.txt", "sub/tables/b.txt"]),
        (["node_modules", "tables/*.csv"], ["a.txt", "d.csv", "sub/tables/b.txt"]),
        (["sub"], ["a.txt", "d.csv"]),
        (["tables/*", "in"], ["a.txt", "d.csv", "sub/node_modules/c.txt"]),  # `in` is the input itself
        (["in/sub/tables", "in/d.csv"], ["a.txt", "sub/node_modules/c.txt"]),  # as error messages have them
        (["*/*.csv"], ["a.txt", "d.csv", "sub/node_modules/c.txt", "sub/tables/b.txt"]),
        (["**/sub"], ["a.txt", "d.csv"]),
    ],
)
@pytest.mark.parametrize("entry", ["in", "in/**"])
def test_exclude_skips_matching_files_and_folders(tmp_path, monkeypatch, patterns, found, entry):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "d.csv", "sub/node_modules/c.txt", "sub/tables/b.txt", "sub/tables/b.csv"):
        write(tmp_path / "in" / name, "text\nwords\n")
    assert sorted(os.path.relpath(file.path, "in") for file in corpus(entry, exclude=patterns).all_files) == found
    absolute = corpus(str(tmp_path / "in"), exclude=["in/sub", str(tmp_path / "in/d.csv")])
    assert [file.path for file in absolute.all_files] == [str(tmp_path / "in/a.txt")]
    assert len(corpus("in/d.csv", exclude=["*.csv"]).all_files) == 1  # a file given by name is never excluded
    assert "matches; check the path." in refusal(entry, exclude=["*"])
