"""Estimate of a large text's store from a sample, compared with the real store for every kind of file."""

import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard
from test_corpus import write_records

from conftest import assert_user_error, prose
from tokenizer.build import estimate as estimate_module
from tokenizer.build.estimate import Estimate, estimate
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import pretokenize
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Treat 100,000 bytes as large."""
    for name, n_bytes in (("LARGE", 100_000), ("SAMPLE", 100_000), ("CHUNK", 4096), ("HEAD", 16384)):
        monkeypatch.setattr(estimate_module, f"{name}_BYTES", n_bytes)


def texts(number: int) -> list[str]:
    """Return 500 documents of prose with more digits, which need more tokens, in each further file."""
    choice = random.Random(number)
    digits = " ".join(str(choice.randrange(10**6)) for _ in range(3000 * number))
    return [prose(number * 1000 + i, 64) + digits[i * 40 * number : (i + 1) * 40 * number] for i in range(500)]


def written(folder: Path, suffix: str) -> Path:
    folder.mkdir()
    for number in range(4):
        path = folder / f"{number}.{suffix}"
        records = [{"id": i, "text": text} for i, text in enumerate(texts(number))]
        if suffix == "txt":
            path.write_text("".join(texts(number)))
        elif suffix == "jsonl.zst":
            with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
                for record in records:
                    file.write((json.dumps(record) + "\n").encode())
                    if record["id"] % 8 == 0:
                        file.flush(zstandard.FLUSH_BLOCK)
        else:
            write_records(path, records)
    return folder


def recipe(text: Path, **corpus) -> Recipe:
    return Recipe([str(text)], CorpusArguments(**corpus), VocabularyArguments(vocab_size=400))


def estimated(text: Path, tmp_path: Path, **corpus) -> Estimate | None:
    (tmp_path / "sample").mkdir()
    return estimate(recipe(text, **corpus), tmp_path / "sample", lambda line: None)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "jsonl.zst", "parquet"])
def test_estimate_is_close_to_the_real_store(suffix, tmp_path):
    text, tokens = written(tmp_path / "text", suffix), 234_778 if suffix == "txt" else 236_774
    made = pretokenize(recipe(text), tmp_path / "made", lambda line: None).metadata
    assert made.train.tokens + made.val.tokens == tokens
    found = estimated(text, tmp_path)
    whole = found.whole.metadata
    assert whole.vocab_size == 400
    error = 0.06 if suffix == "jsonl.zst" else 0.04  # the last block of the head of an archive is cut off
    assert whole.train.tokens + whole.val.tokens == pytest.approx(tokens, rel=error)
    assert whole.val.tokens == pytest.approx(0.01 * tokens, rel=error)
    tokens_read = sum(getattr(found.sample.metadata, split).tokens for split in ("train", "val"))
    assert 4 < tokens / tokens_read < 14


def test_small_text_is_not_estimated(tmp_path):
    (tmp_path / "a.txt").write_text(prose(0, 4000))
    assert estimated(tmp_path / "a.txt", tmp_path) is None


def test_limit_counts_a_file_that_is_read_in_part_as_a_part_of_a_document(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(prose(number * 1000, 48_000))
        (tmp_path / "text" / f"{number}.tar.gz").write_bytes(random.Random(number).randbytes(48_000))
    made = pretokenize(recipe(tmp_path / "text", max_documents=4), tmp_path / "made", lambda line: None).metadata
    whole = estimated(tmp_path / "text", tmp_path, max_documents=4).whole.metadata
    tokens = made.train.tokens + made.val.tokens
    assert whole.train.tokens + whole.val.tokens == pytest.approx(tokens, rel=0.04)


def test_errors_name_the_sample(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and more of it \n" * 10_000)
    sentence = r"^In a sample of .*a.txt: it is not UTF-8 text: [0-9,]+ of .* in .*/a.txt, line 1; convert it to UTF"
    assert_user_error(sentence, estimated, tmp_path / "a.txt", tmp_path)


def test_folder_of_only_damaged_files_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    packed = gzip.compress("".join(texts(3)).encode())
    (tmp_path / "text" / "a.txt.gz").write_bytes(packed[:1000] + b"\xff" * 9000 + packed[10_000:])
    sentence = r"^In a sample of .*text: it: 1 file of [\d,]+ bytes cannot be read in full, "
    sentence += r".*a\.txt\.gz \(cannot be read: Error"
    assert_user_error(sentence, estimated, tmp_path / "text", tmp_path)
