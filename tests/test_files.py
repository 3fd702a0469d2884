"""Plain and compressed files: intact archives are read, and damaged ones are refused."""

import bz2
import gzip
import os
import struct

import pytest
import zstandard
from test_corpus import documents, refusal, write

from common.errors import UserError
from tokenizer.corpus import files

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
TEXT = "".join(f"Line {i}: naïve 雪 🙂\r\n" for i in range(2000))


@pytest.fixture(params=COMPRESS)
def suffix(request):
    return request.param


def content(path) -> bytes:
    with files.opened(str(path)) as file:
        return file.read()


def test_plain_files_are_read_unchanged_even_if_named_like_a_suffix(tmp_path, suffix):
    assert content(write(tmp_path / "a.txt", b"one\xff\r\n")) == b"one\xff\r\n"
    assert documents(write(tmp_path / f".{suffix}", "text")) == ["text"]


def test_records_are_read_from_compressed_files(tmp_path, suffix):
    jsonl, csv = '\ufeff{"text": "one"}\n{"text": "two"}', '\ufefftext,id\n"one",1\ntwo,2\n'
    for name, text in {"A.JSONL": jsonl, "a.json": '["one", "two"]', "a.csv": csv}.items():
        path = write(tmp_path / f"{name}.{suffix.upper()}", COMPRESS[suffix](text.encode()))
        assert documents(path) == ["one", "two"]


def test_frames_can_end_anywhere_and_skippable_frames_are_not_text(tmp_path):
    for size in range(490, 520):  # the file is read in blocks of 512 bytes
        text = os.urandom(size)
        assert content(write(tmp_path / "a.zst", COMPRESS["zst"](text) + COMPRESS["zst"](b"end"))) == text + b"end"
    table = struct.pack("<II", 0x184D2A5E, 700) + b"x" * 700  # seekable archives end with such a frame
    one, two = (COMPRESS["zst"](text) for text in (b"one ", b"two"))
    assert content(write(tmp_path / "a.zst", table + one + table + two + table)) == b"one two"
    assert content(write(tmp_path / "a.gz", gzip.compress(b"text") + b"\0" * 1000)) == b"text"


@pytest.mark.parametrize("window_log", [0, 27])  # the default, and the longest that readers accept by default
def test_frames_of_unknown_size_and_long_windows_are_read(tmp_path, window_log):
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=window_log > 0)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    archive = b"".join(frame.compress(line.encode()) for line in TEXT.splitlines(True)) + frame.flush()
    assert content(write(tmp_path / "a.zst", archive)) == TEXT.encode()


def test_compressed_text_is_read_for_any_name_and_block_size(tmp_path, suffix):
    text = "a" + "雪🙂é" * 100_000
    for name in (f"a.txt.{suffix}", f"Notes of 5.7.{suffix}"):
        path = write(tmp_path / name, COMPRESS[suffix](text.encode()))
        assert documents(path) == documents(path, sample_by="line") == [text]
    assert documents(write(tmp_path / f"a.{suffix}", COMPRESS[suffix](b'{"text": "one"}'))) == ['{"text": "one"}']


def test_empty_archives_are_blank_and_concatenated_archives_one_text(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix](b""))
    assert content(path) == b""
    assert refusal(path) == f"{path} contains no text: 1 blank document."
    parts = [TEXT[:1000], "", TEXT[1000:1001], TEXT[1001:]]
    path = write(tmp_path / f"a.{suffix}", b"".join(COMPRESS[suffix](part.encode()) for part in parts))
    assert content(path) == TEXT.encode()


@pytest.mark.parametrize("kept", [0.5, -1, 5, 0])
def test_truncated_archives_are_refused(tmp_path, suffix, kept):
    archive = COMPRESS[suffix](TEXT.encode())
    archive = archive[: int(kept * len(archive)) if isinstance(kept, float) else kept]
    path = write(tmp_path / f"a.{suffix}", archive)
    sentence = refusal(path)
    assert sentence.startswith(f"{path} cannot be read: ")
    assert sentence.endswith("; fix it, decompress it or exclude it.")


def test_truncated_archives_are_read_partly_and_damaged_ones_refused(tmp_path, suffix):
    text = os.urandom(1_000_000).hex().encode()
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix](text)[:-100])
    with files.opened(str(path)) as file:
        assert file.read(1_000_000) == text[:1_000_000]
        with pytest.raises(UserError, match="cannot be read"), files.readable(str(path)):
            file.read()
    damaged = bytearray(COMPRESS[suffix](TEXT.encode()))
    damaged[len(damaged) // 2] ^= 0x55
    for archive in (bytes(damaged), b"just text\n" * 100):
        assert "cannot be read" in refusal(write(tmp_path / f"a.txt.{suffix}", archive))
    followed = write(tmp_path / "a.zst", COMPRESS["zst"](b"text") + b"more")
    assert "cannot be read" in refusal(followed)
