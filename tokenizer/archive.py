"""A store in one file, `NAME.tar.zst`, to carry to another machine.

The metadata come first in it and bound the rest: whatever is not one of a store's files is refused, and what comes out has
the hashes that the metadata name.
"""

import hashlib
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from atomic import fsync, unfinished_path
from errors import UserError
from tokenizer import megatron
from tokenizer.store import SPLITS, STORE_FILES, Metadata, TokenStore, index_file, read_metadata, tokens_file

SUFFIX = ".tar.zst"
ROOT = "store/"
COPIED = 1 << 20  # bytes at a time
TOKENIZER_FILE = re.compile(r"tokenizer/(additional_chat_templates/)?\w[\w.-]*\.(json|jinja|txt|model)", re.ASCII)
# The indexes for Megatron follow from the others.
FILES = (
    *("metadata.json", "inputs.json", "report.md", "tokenizer/tokenizer.json"),
    *(name for split in SPLITS for name in (index_file(split), tokens_file(split))),
)
LARGEST_OTHER = 256 << 20  # bytes of a file whose size the metadata do not say
ZSTD_LEVEL = 3  # leaves 47% of Shakespeare and of Python sources, at 150-180 MB/s a core; level 12 leaves 43%, at 22


def pack(store: TokenStore) -> Path:
    """Packs a store into one file beside it, unless that is there already. The same store gives the same bytes.

    Raises:
        UserError: there is another file of that name; a file of the store was changed; a store of format 1; a full disk.
    """
    import zstandard

    store.require_indexes()
    path = store.folder.with_name(store.folder.name + SUFFIX)
    if path.exists():
        if _packed_metadata(path) == (store.folder / "metadata.json").read_bytes():
            return path
        raise UserError(f"{path} exists and is not {store.folder}, packed; move it away or delete it.")
    tokenizer_files = (file.relative_to(store.folder).as_posix() for file in store.folder.glob("tokenizer/**/*"))
    others = sorted(name for name in tokenizer_files if TOKENIZER_FILE.fullmatch(name) and name not in FILES)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1, write_checksum=True)
    with unfinished_path(path, ".packing") as unfinished, unfinished.open("wb") as file:
        with (
            compressor.stream_writer(file, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT, copybufsize=COPIED) as tar,
        ):
            for name in ("metadata.json", *others, *FILES[1:]):
                _pack_file(store, name, tar)
        fsync(file)
    return path


def _pack_file(store: TokenStore, name: str, tar: tarfile.TarFile) -> None:
    info = tarfile.TarInfo(ROOT + name)  # of nobody and no time
    info.size = (store.folder / name).stat().st_size
    with (store.folder / name).open("rb") as source:
        content = Hashed(source)
        tar.addfile(info, content)
    if store.metadata.hashes.get(name, content.hexdigest) != content.hexdigest:
        raise UserError(f"{store.folder / name} was changed. Delete {store.folder} and make it again.")


def unpack(archive: Path, folder: Path) -> TokenStore:
    """Unpack a store; raise a `UserError` for any other, damaged or malicious file, an existing folder, or a full disk."""
    if not archive.is_file():
        raise UserError(f"There is no file {archive}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name another after {archive}.")
    with (
        unfinished_path(folder, ".unpacking", STORE_FILES) as unfinished,
        _opened(archive) as tar,
    ):
        hashes = dict(_unpacked(tar, archive, unfinished))
        if missing := [name for name in FILES if name not in hashes]:
            raise UserError(f"{archive} lacks {' and '.join(missing)}: it is truncated or damaged; get it anew.")
        metadata = read_metadata(unfinished)
        if wrong := [name for name, sha256 in metadata.hashes.items() if hashes[name] != sha256]:
            raise UserError(
                f"{archive} was changed or damaged: {' and '.join(wrong)} in it {'is' if len(wrong) == 1 else 'are'} not "
                f"what its metadata say; get it anew."
            )
        megatron.write_indexes(unfinished, metadata.dtype)
    return TokenStore(folder)


def _unpacked(tar: tarfile.TarFile, archive: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Writes every file of an archive. Yields its name and SHA-256."""
    sizes: dict[str, int] = {}
    for number, info in enumerate(tar):
        name = info.name.removeprefix(ROOT)
        known = name == "metadata.json" if number == 0 else name in FILES or TOKENIZER_FILE.fullmatch(name)
        if not known or not info.isreg() or ROOT + name != info.name or (folder / name).exists():
            raise UserError(
                f"{archive} is not a packed store: {info.name[:200]!r} in it is none of a store's files. Do not trust it."
            )
        if info.size != sizes.get(name, min(info.size, LARGEST_OTHER)):
            raise UserError(f"{archive} is not a packed store: {name} in it has {info.size:,} bytes. Do not trust it.")
        content = Hashed(tar.extractfile(info))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            shutil.copyfileobj(content, file, COPIED)
            fsync(file)
        yield name, content.hexdigest
        if number == 0:
            sizes = _metadata_of(archive, folder).sizes
            _check_room(archive, folder, sum(sizes.values()))


def _metadata_of(archive: Path, folder: Path) -> Metadata:
    try:
        return read_metadata(folder)
    except UserError as error:
        raise UserError(str(error).replace(str(folder), str(archive))) from error


def _check_room(archive: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{archive} unpacks to {needed / 1e9:,.1f} GB, and {folder.parent.absolute()} has {free / 1e9:,.1f} GB free; "
            f"make room or name a folder on another disk."
        )


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive; reading one that is truncated or damaged raises a `UserError`."""
    import zstandard

    try:
        with (
            archive.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as packed,
            tarfile.open(fileobj=packed, mode="r|") as tar,
        ):
            yield tar
    except (EOFError, tarfile.TarError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise UserError(f"{archive} is truncated, damaged or no packed store ({error}); get it anew.") from error


def _packed_metadata(archive: Path) -> bytes | None:
    """The metadata of a packed store; None where it is something else."""
    try:
        with _opened(archive) as tar:
            first = tar.next()
            return tar.extractfile(first).read() if first and first.name == f"{ROOT}metadata.json" else None
    except (OSError, UserError):
        return None


class Hashed:
    """A file whose SHA-256 is known when it has been read."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        self.sha256.update(content)
        return content

    @property
    def hexdigest(self) -> str:
        return self.sha256.hexdigest()
