"""Command `python -m tokenizer.pretokenize`: output, safe repetition, and error messages."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from filelock import FileLock
from test_corpus import write, write_records
from test_merge import documents
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import error_of, prose
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import StoreBuilder
from tokenizer.build.store_builder import pretokenize as make
from tokenizer.build.worker import Workers
from tokenizer.corpus import units
from tokenizer.corpus.byte_range import last_cut
from tokenizer.corpus.units import Corpus
from tokenizer.encoding import vocabulary
from tokenizer.encoding.vocabulary import VocabularyArguments, train_bpe
from tokenizer.pretokenize import main
from tokenizer.store.store import TokenStore

LINES = "".join(f"Line {i} of a text, naïve and short.\n" for i in range(300))
SMALL = ("--vocab_size", "300")
BODY = ("--text_column", "body", "--validation_fraction", "0.2")


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "my text.txt", LINES)


@pytest.fixture
def command(text, tmp_path):
    """Arguments that build a small store from the text."""
    return ("--input", text, "--output", tmp_path / "store", *SMALL)


def pretokenize(*arguments) -> None:
    main([str(argument) for argument in arguments])


def refused(*arguments) -> str:
    sentence = error_of(pretokenize, *arguments)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


def decoded(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokens = [np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="r") for split in ("train", "val")]
    return tokenizer.decode(np.concatenate(tokens))


def test_one_command_builds_a_store(launch, tmp_path, text):
    output = tmp_path / "データ" / "my store"
    done = launch("-m", "tokenizer.pretokenize", "--input", text, f"--output={output}", "--vocab-size", "300")
    assert (done.returncode, done.stderr) == (0, "")
    assert decoded(output) == LINES + "<|endoftext|>"
    counted = "1 document found, 2 in the store, 0.0 MB read (left out or changed: 1 document split in two"
    assert done.stdout.splitlines()[-1].startswith(counted)
    command = json.loads((output / "metadata.json").read_text(encoding="utf-8"))["command"]
    assert command.startswith(f"python -m tokenizer.pretokenize --input '{text}'")


def test_second_process_with_the_same_output_is_refused_and_one_with_a_cache_waits(tmp_path, text, command):
    with FileLock(tmp_path / ".store.lock"):
        sentence = f"Another process is writing {tmp_path / 'store'}; wait for it, or choose another --output."
        assert refused(*command) == sentence
    recipe, said = Recipe([str(text)], vocabulary=VocabularyArguments(vocab_size=300)), []
    with ThreadPoolExecutor() as thread:
        with FileLock(tmp_path / ".cache.lock"):
            waiting = thread.submit(make, recipe, tmp_path / "cache", said.append, is_cache=True)
            make(recipe, tmp_path / "other", is_cache=True)
            assert not waiting.done()
            (tmp_path / "other").rename(tmp_path / "cache")
        assert waiting.result().metadata.train.tokens > 0
    waiting = f"Waiting for another process, which is writing {tmp_path / 'cache'} ..."
    assert said == [waiting, f"{tmp_path / 'cache'} already contains these tokens."]


def test_unfinished_cache_of_another_text_is_discarded(tmp_path, text):
    recipe = Recipe([str(text)], vocabulary=VocabularyArguments(vocab_size=300))
    assert StoreBuilder(recipe, tmp_path / "cache", print, Workers(1), is_cache=True).plan.units
    text.write_text("other text\n" * 100)
    make(recipe, tmp_path / "cache", is_cache=True)
    assert decoded(tmp_path / "cache") == "other text\n" * 100 + "<|endoftext|>"


def test_work_on_text_without_documents_is_discarded(tmp_path, command):
    assert "None of" in refused(*command, "--sample_by", "line", "--cleaning", "quality")
    pretokenize(*command)
    assert TokenStore(tmp_path / "store").metadata.train.tokens
    record = write_records(tmp_path / "one.jsonl", [{"text": LINES}])
    sentence = refused("--input", record, "--output", tmp_path / "half", *SMALL, "--weights", "0.001")
    assert "None of 1 document" in sentence
    assert "greater weights" in sentence


def test_same_command_reuses_the_store_and_other_settings_are_refused(tmp_path, command, capsys):
    pretokenize(*command)
    written = (tmp_path / "store" / "train.bin").stat().st_mtime_ns
    capsys.readouterr()
    pretokenize(*command)
    assert capsys.readouterr().out == f"{tmp_path / 'store'} already contains these tokens.\n"
    assert (tmp_path / "store" / "train.bin").stat().st_mtime_ns == written
    before = TokenStore(tmp_path / "store").metadata
    vocabulary = "vocab_size was 300 and is None; tokenizer_type was 'bpe' and is 'character'"
    for arguments, changed in (
        ([*command, "--cleaning", "none"], "cleaning was ['normalize'] and is ['none']"),
        ([*command[: -len(SMALL)], "--tokenizer_type=character"], vocabulary),
    ):
        sentence = f"store was built from other text or settings ({changed}); choose another --output"
        assert sentence in refused(*arguments)
        assert TokenStore(tmp_path / "store").metadata == before


def test_changed_text_kind_requires_another_output(tmp_path, text, command):
    write_records(text, [{"text": f"document {i}"} for i in range(300)])
    pretokenize(*command)
    records = text.rename(tmp_path / "a.jsonl")
    sentence = f"{text} is not among the inputs now; {records} is new)"
    assert sentence in refused("--input", records, *command[2:])
    text.write_text(records.read_text().replace("299", "298"))
    sentence = f"was built from other text or settings ({text} was changed); choose another --output"
    assert sentence in refused(*command)


def test_changed_tokenizer_requires_another_output(tmp_path, text):
    theirs = tmp_path / "theirs"
    command = ("--input", text, "--output", tmp_path / "store", "--tokenizer", theirs)
    vocabulary.save(train_bpe([LINES], 300), theirs)
    pretokenize(*command)
    vocabulary.save(train_bpe(["quite another text " * 20], 280), theirs)
    assert "text or settings (tokenizer_json was '" in refused(*command)


def test_tokenizer_that_joins_wide_characters_is_accepted(tmp_path):
    text = write(tmp_path / "zh.txt", "今天\uff0c好\uff01" * 999)  # a wide comma and exclamation mark
    letters = [("<unk>", -9.0), ("</s>", -9.0), *((letter, -1.0) for letter in "今天好,!")]
    rust = Tokenizer(models.Unigram(letters, unk_id=0))
    rust.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "wide")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("天", "")  # which loses text
    tokenizer.save_pretrained(tmp_path / "loses")
    command = ("--input", text, "--output", tmp_path / "store", "--tokenizer")
    assert "cannot encode this text: " in refused(*command, tmp_path / "loses")
    pretokenize(*command, tmp_path / "wide")
    metadata = TokenStore(tmp_path / "store").metadata
    assert metadata.train.tokens + metadata.val.tokens == 5 * 999 + 1


def test_lossy_tokenizer_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    lossy = Tokenizer(models.BPE())  # without an alphabet of all bytes and an unknown token, unseen text is dropped
    lossy.pre_tokenizer, lossy.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lossy.train_from_iterator(["only these letters\n"], trainers.BpeTrainer(vocab_size=100, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=lossy).save_pretrained(tmp_path / "lossy")
    command = ("--output", tmp_path / "store", "--tokenizer", tmp_path / "lossy", "--input")
    error = refused(*command, text)
    assert f"{tmp_path / 'lossy'} cannot encode this text: " in error
    lost, size = re.search(r"([\d,]+) of ([\d,]+) bytes would be lost", error).groups()
    assert int(lost.replace(",", "")) < int(size.replace(",", "")) / 2  # refused after the first of several units
    first = write(tmp_path / "first.txt", "only these letters\n" * 60)
    pretokenize(*command, first, text, "--max_bytes", "1000")  # what it loses is behind the limit


def test_missing_and_unknown_flags_are_named():
    required = ["--input is required. See --help.", "--output is required. See --help."]
    assert error_of(main, []).splitlines() == required
    assert refused("my.txt", "b/", "--output", "x") == "my.txt has no flag. Did you mean --input my.txt b/?"
    wrong = ["Unknown flag --inptu. Did you mean --input?", "sample_bytes is 0; it must be at least 1."]
    assert error_of(main, ["--inptu", "a.txt", "--sample_bytes", "0"]).splitlines() == [*wrong, required[1]]
    assert error_of(main, ["--input", "no.txt"]).startswith(f"{required[1]}\nno.txt matches no local file or folder")


def test_invalid_values_are_reported_in_one_sentence(tmp_path, command, monkeypatch):
    command = command[: -len(SMALL)]
    with monkeypatch.context() as context:
        context.setenv("WORLD_SIZE", "2")
        context.setenv("TORCHELASTIC_RUN_ID", "none")
        assert refused(*command) == "One process uses all cores, but 2 were started; leave out the launcher."
    for shard in ("3/3", "1", "0/0"):
        assert f"shard is {shard}; it must be i/n with i from 0 to n - 1" in refused(*command, "--shard", shard)
    assert "invalid choice: 'strickt' (choose from" in refused(*command, "--cleaning", "strickt")
    assert "No tokenizer can be loaded from /nowhere" in refused(*command, "--tokenizer", "/nowhere/at/all")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("output", ["full", "full/", "full/notes.txt", "full/notes.txt/store", ".", "full/../full"])
def test_existing_output_is_kept(tmp_path, text, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    notes = write(tmp_path / "full" / "notes.txt", "mine")
    assert "choose another --output" in refused("--input", text, "--output", output, *SMALL)
    assert notes.read_text() == "mine"
    assert not list(tmp_path.glob(".full.lock"))


def test_large_seeds_tilde_and_empty_output_folders_are_accepted(tmp_path, text, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    long = "".join(f"{i} bottles of beer on the wall\r\n" for i in range(20_000))
    write(text, long)
    for seed in ("0", str(2**63 - 1)):
        (tmp_path / seed).mkdir()
        flags = ("--tokenizer_type", "character", "--cleaning", "none", "--seed", seed)
        pretokenize("--input", "~/my text.txt", "--output", f"~/{seed}", *flags)
        assert decoded(tmp_path / seed) == long


@pytest.mark.parametrize(
    ("more", "kept", "split"),
    [
        ([], 5, "1 document split in two, with the end held out for validation"),
        (["--weights", "2"], 9, "5 documents more after --weights and the validation split"),
    ],
)
def test_document_counts_add_up(tmp_path, capsys, more, kept, split):
    texts = [prose(i % 4, 400) for i in range(6)] + ["7 7 7 7"] * 3 + ["\n"]
    records = write_records(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ["--cleaning", "normalize", "quality", "--dedup", "exact", *more]
    pretokenize("--input", records, "--output", tmp_path / "store", *SMALL, *flags)
    counted = f"10 documents found, {kept} in the store"
    counts = "1 blank document; 3 documents dropped by quality.short; 2 documents that repeat an earlier one"
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{counted}, 0.0 MB read (left out or changed: {counts}; {split})")
    metadata = TokenStore(tmp_path / "store").metadata
    assert metadata.train.documents + metadata.val.documents == kept
    assert counted in (tmp_path / "store" / "report.md").read_text()


def test_skipped_files_are_counted_after_a_merge_of_shards(tmp_path, text, capsys):
    table = write(tmp_path / "in" / "numbers.csv", "a,b\n1,2\n")
    text.rename(tmp_path / "in" / "words.txt")
    command = ["--input", tmp_path / "in", "--output", tmp_path / "store", *SMALL]
    pretokenize(*command, "--shard", "0/1")
    pretokenize(*command, "--merge")
    assert "left out or changed: 1 table without a text column" in capsys.readouterr().out
    assert f"column ({table})" in (tmp_path / "store" / "report.md").read_text()


@pytest.fixture
def small_units(monkeypatch):
    for module in ("corpus.units", "build.store_builder"):
        monkeypatch.setattr(f"tokenizer.{module}.UNIT_BYTES", 4096)


def stopped_before_the_merge():
    return patch.object(Corpus, "refuse_changes", side_effect=KeyboardInterrupt)  # which is called after all units


@pytest.mark.parametrize(
    ("flag", "value", "kept"),
    [("--max_bytes", "30KB", 30_000), ("--max_bytes", "1 kib", 1024), ("--max_documents", "700", 700)],
)
@pytest.mark.usefixtures("small_units")
def test_limited_text_is_the_beginning_with_any_number_of_processes(tmp_path, flag, value, kept):
    by = "document" if flag == "--max_bytes" else "line"
    first, second = prose(1), prose(2, 8000)
    inputs = (write(tmp_path / "a.txt", first), write(tmp_path / "b.txt", second))
    command = ("--input", *inputs, "--sample_by", by, *SMALL, "--validation_fraction", "0.2", flag, value)
    with stopped_before_the_merge(), pytest.raises(KeyboardInterrupt):
        pretokenize(*command, "--output", tmp_path / "2", "--num_proc", 2)
    for processes in (1, 2):
        pretokenize(*command, "--output", tmp_path / str(processes), "--num_proc", processes)
    if by == "document":
        *whole, cut = [first[:kept], second[: kept - len(first)]] if kept > len(first) else [first[:kept]]
        texts = [*whole, cut[: last_cut(cut, 0)]]
    else:
        texts = ["".join((first + second).splitlines(keepends=True)[:kept])]
    for name, beginning in zip("ab", texts, strict=False):
        write(tmp_path / "beginning" / f"{name}.txt", beginning)
    pretokenize("--input", tmp_path / "beginning", "--output", tmp_path / "3", *command[3:-2])
    stores = [TokenStore(tmp_path / name) for name in "123"]
    for split in ("train", "val"):
        one, other, beginning = ((store.folder / f"{split}.bin").read_bytes() for store in stores)
        assert one == other == beginning


@pytest.mark.usefixtures("small_units")
def test_characters_beyond_the_limit_are_not_read(tmp_path):
    def metadata(name: str, text: str, *limit):
        pretokenize("--input", write(tmp_path / f"{name}.txt", text), "--output", tmp_path / name, *limit)
        return TokenStore(tmp_path / name).metadata

    limit = ("--max_bytes", "10KB", "--tokenizer_type", "character", "--num_proc", 2)
    assert metadata("a", "some words\n" * 1000 + "雨\n" * 4000, *limit).vocab_size == len(set("some words\n"))
    lines = ["\x01\n" if number % 3 else f"line {number} ends\n" for number in range(90)]
    limit = ("--max_documents", "20", "--tokenizer_type", "character", "--sample_by", "line")
    counts = metadata("b", "".join(lines), *limit).counts
    assert (counts["documents"], counts["blank"]) == (20, 38)  # cleaning makes the other lines blank
    assert metadata("c", "acgt" * 2000, "--max_bytes", "5KB", *SMALL).counts["bytes"] == 5000  # no place to cut


def saved(folder: Path, **splits: list[str]) -> Path:
    parts = {name: Dataset.from_dict({"title": ["a"] * len(texts), "body": texts}) for name, texts in splits.items()}
    DatasetDict(parts).save_to_disk(folder, max_shard_size="4KB")
    return folder


@pytest.mark.parametrize("limit", [(), ("--max_bytes", "9000"), ("--max_documents", "150")])
def test_split_validation_of_a_saved_dataset_is_the_validation_text(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 4096)
    texts = [f"Document {i:04} of a {'雨雪'[i // 300] * 13}.\n" for i in range(400)]  # of 60 bytes
    other, train, validation = texts[:20], [texts[303], *texts[20:300]], texts[300:]
    records = write_records(tmp_path / "other.jsonl", [{"body": text} for text in other])
    folder = saved(tmp_path / "saved", train=train, validation=validation)
    command = ("--input", records, folder, *BODY, "--weights", "1", "2", *limit)
    command = (*command, "--tokenizer_type", "character", "--dedup", "exact")
    with stopped_before_the_merge(), pytest.raises(KeyboardInterrupt):
        pretokenize(*command, "--output", tmp_path / "2", "--num_proc", 2)
    for processes in (1, 2):
        pretokenize(*command, "--output", tmp_path / str(processes), "--num_proc", processes)
    one, two = (TokenStore(tmp_path / name) for name in "12")
    assert one.metadata.identity == two.metadata.identity
    used = train[1 : 130 if limit else None]  # without the text that repeats one of the split validation
    assert (documents(one, "train"), documents(one, "val")) == (other + used * 2, validation[: 30 if limit else None])
    assert one.metadata.validation_splits == [str(folder / "validation")]


def test_split_validation_without_text(tmp_path):
    texts, blank = [f"{i} words" for i in range(99)], tmp_path / "blank"
    saved(blank, train=texts, validation=[" "] * 5)
    command = (*SMALL, *BODY, "--output", tmp_path / "store", "--input", blank)
    assert "name only the training split (user/name::train or FOLDER/train)" in refused(*command)
    empty = saved(tmp_path / "empty", train=texts, validation=[])
    for folder in (empty, blank / "train", saved(blank, train=texts)):  # `datasets` leaves the old folder of a split
        output = folder.with_name(f"{folder.name}-store")
        pretokenize(*SMALL, *BODY, "--output", output, "--input", folder)
        metadata = TokenStore(output).metadata
        assert (metadata.train.documents + metadata.val.documents, metadata.validation_splits) == (99, [])


def test_limits_have_units_and_need_the_whole_text(command):
    assert "max_bytes is '2 apples'; it must be a number above 0" in refused(*command, "--max_bytes", "2 apples")
    assert "cannot be combined with shard" in refused(*command, "--max_bytes", "2KB", "--shard", "0/2")
