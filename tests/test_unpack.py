"""Packed stores: unpacking returns the same bytes, or reports one error."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import zstandard

from conftest import assert_user_error, contents, error_of
from tokenizer import unpack
from tokenizer.store.store import TokenStore


@pytest.fixture
def packed(store, tmp_path) -> Path:
    shutil.copytree(store.folder, tmp_path / "my.store")
    return unpack.pack(TokenStore(tmp_path / "my.store"))


def members(packed: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(zstandard.decompress(packed.read_bytes(), 1 << 30))) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar]


def repacked(packed: Path, files: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, text in files:
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    packed.write_bytes(zstandard.compress(content.getvalue()))
    return packed


def refused(packed: Path, folder: Path) -> str:
    [sentence] = error_of(unpack.unpack, packed, folder).splitlines()
    assert str(packed) in sentence
    assert sentence.endswith(".")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["my.store", "my.store.tar.zst"]
    return sentence


def test_unpacked_store_equals_the_original_and_changed_stores_are_not_packed(store, packed, tmp_path):
    assert packed.name == "my.store.tar.zst"
    unpacked = unpack.unpack(packed, tmp_path / "elsewhere" / "store")
    assert contents(unpacked.folder) == contents(store.folder)
    packed.unlink()
    path = tmp_path / "my.store" / "train.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    assert_user_error(r"train\.bin was changed or damaged", unpack.pack, TokenStore(tmp_path / "my.store"))
    assert {path.name for path in tmp_path.iterdir()} == {"my.store", "elsewhere"}


def test_packing_is_deterministic_and_keeps_other_files(packed, tmp_path):
    store, before = TokenStore(tmp_path / "my.store"), packed.stat().st_mtime_ns
    assert unpack.pack(store) == packed
    assert packed.stat().st_mtime_ns == before
    first = packed.rename(tmp_path / "first")
    (tmp_path / "my.store" / "train.bin").touch()
    assert unpack.pack(store).read_bytes() == first.read_bytes()
    packed.write_bytes(b"mine")
    assert_user_error(r"my\.store\.tar\.zst exists and is not the packed .*my\.store; move it away", unpack.pack, store)
    assert packed.read_bytes() == b"mine"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999, "changed"])
def test_truncated_or_changed_archives_are_refused(packed, tmp_path, share):
    content = bytearray(packed.read_bytes())
    if share == "changed":
        content[len(content) // 2] ^= 1
    else:
        content = content[: int(share * len(content))]
    packed.write_bytes(content)
    assert refused(packed, tmp_path / "out").endswith("copy it again.")


def changed(name: str, change):
    return lambda files: [(info, change(text) if info.name.endswith(name) else text) for info, text in files]


LONG = (tarfile.TarInfo("store/" + "x" * 100_000), b"")
CHANGES = {
    "other tokens": (changed("val.bin", lambda text: text[:-2] + b"\1\0"), "val.bin was changed or damaged: its SHA"),
    "larger": (changed("train.bin", lambda text: text + b"\0\0"), "its train.bin has"),  # refused before it is written
    "newer format": (
        changed("metadata.json", lambda text: json.dumps(json.loads(text) | {"format_version": 3}).encode()),
        "was written by a newer version of GPT2Scratch (format 3; this version reads formats up to 2). Update with `git pull`.",
    ),
    "lacking": (lambda files: files[:-1], "lacks val.bin: it is truncated or damaged"),
    "reversed": (lambda files: files[::-1], "is not a packed store"),  # metadata must come first
    "brackets": (changed("metadata.json", lambda text: b"[" * 200_000), "it is nested too deeply"),
    "long name": (lambda files: [LONG, *files], "'././@LongLink' is not a plain file of a store"),
    "long name at the end": (lambda files: [*files, LONG], "'././@LongLink' is not a plain file of a store"),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_members_that_contradict_the_metadata_are_refused(packed, tmp_path, change, sentence):
    assert sentence in refused(repacked(packed, change(members(packed))), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "store/../../evil", "store/evil.py", "store/tokenizer/../x.json", "store/train.bin"]
)
def test_unknown_members_are_not_written(packed, tmp_path, name):
    files = [*members(packed), (tarfile.TarInfo(name), b"evil")]
    assert "is not a packed store" in refused(repacked(packed, files), tmp_path / "out")
    assert not list(tmp_path.rglob("evil*"))
    assert not Path("/evil").exists()


@pytest.mark.parametrize(("limit", "value"), [("METADATA_BYTES", 1000), ("OTHER_BYTES", 1000), ("OTHER_FILES", 7)])
def test_other_members_share_one_limit(packed, tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(unpack, limit, value)
    assert "is not a packed store: " in refused(packed, tmp_path / "out")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_links_and_devices_are_refused(packed, tmp_path, kind):
    info = tarfile.TarInfo("store/report.md")
    info.type, info.linkname = kind, "/etc/passwd"
    files = [(info, b"") if known.name == info.name else (known, text) for known, text in members(packed)]
    assert "is not a plain file of a store" in refused(repacked(packed, files), tmp_path / "out")


def test_full_disk_and_existing_output_are_reported_before_unpacking(packed, tmp_path, monkeypatch):
    assert_user_error("is not an empty folder; choose another", unpack.unpack, packed, tmp_path / "my.store")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert "has 0.0 GB free; make room or name a folder on another disk." in refused(packed, tmp_path / "out")


def test_unpack_command_derives_the_folder_and_names_missing_arguments(packed, tmp_path, capsys):
    shutil.rmtree(tmp_path / "my.store")
    unpack.main([str(packed)])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'my.store'} has ")
    TokenStore(tmp_path / "my.store")
    assert_user_error("Name a packed store", unpack.main, [])
    for name, sentence in (("my.zip", r"my\.zip does not end in \.tar\.zst"), ("no.tar.zst", "does not exist")):
        assert_user_error(sentence, unpack.main, [name])
