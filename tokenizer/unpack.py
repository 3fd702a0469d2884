"""Unpack a packed token store and verify it.

python -m tokenizer.unpack data/my.tar.zst
python -m tokenizer.unpack data/my.tar.zst --output data/elsewhere

A packed store is a tar file compressed with zstandard, which `pack` writes. `metadata.json` is its first member and states
the sizes and hashes of the tokens; all other members share one limit. An unknown or too large member, or a member that is
not a plain file, is refused after its header of 512 bytes. `tarfile` would read more, including a name of unlimited
length.
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.atomic import fsync, unfinished_path
from common.command_line import FlagParser, run
from common.errors import UserError, disk_errors, require_room
from common.limits import setting
from tokenizer.build import megatron
from tokenizer.store.store import SPLITS, STORE_FILES, TokenStore, index_file, read_metadata, tokens_file

SUFFIX = ".tar.zst"
ROOT = "store/"
# Accept only names that fit in a header of 512 bytes.
TOKENIZER_FILE = re.compile(r"tokenizer/(additional_chat_templates/)?\w[\w.-]{0,50}\.(json|jinja|txt|model)", re.ASCII)
# Indexes for Megatron are not packed because they are derived from the other indexes.
FILES = (
    *("metadata.json", "inputs.json", "report.md", "tokenizer/tokenizer.json"),
    *(name for split in SPLITS for name in (index_file(split), tokens_file(split))),
)
METADATA_BYTES = 32 << 20  # maximum size of metadata.json
OTHER_BYTES, OTHER_FILES = 256 << 20, 64  # maximum total of all files whose sizes the metadata do not state
COPIED_BYTES = 1 << 20  # bytes copied at a time
# Level 3 compresses Shakespeare and Python sources to 47% at 150-180 MB/s per core; level 12 to 43% at 22 MB/s.
ZSTD_LEVEL = 3


def pack(store: TokenStore) -> Path:
    """Pack a store into one file next to it, unless the store is already packed. The same store gives the same bytes."""
    import zstandard

    store.require_indexes()
    path = store.folder.with_name(store.folder.name + SUFFIX)
    if path.exists():
        if _begins_with(path, (store.folder / "metadata.json").read_bytes()):
            return path
        raise UserError(f"{path} exists and is not the packed {store.folder}; move it away or delete it.")
    store.check_hashes()
    tokenizer_files = (file.relative_to(store.folder).as_posix() for file in store.folder.glob("tokenizer/**/*"))
    others = sorted(name for name in tokenizer_files if TOKENIZER_FILE.fullmatch(name) and name not in FILES)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1, write_checksum=True)
    with disk_errors(path), unfinished_path(path, ".packing") as unfinished, unfinished.open("wb") as file:
        with (
            compressor.stream_writer(file, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT, copybufsize=COPIED_BYTES) as tar,
        ):
            for name in ("metadata.json", *others, *FILES[1:]):
                info = tarfile.TarInfo(ROOT + name)  # no owner and no time, so that the bytes are the same
                info.size = (store.folder / name).stat().st_size
                with (store.folder / name).open("rb") as source:
                    tar.addfile(info, source)
        fsync(file)
    return path


def unpack(archive: Path, folder: Path) -> TokenStore:
    """Unpack a store. Raise a `UserError` for a wrong, damaged or malicious file, an existing folder, or a full disk."""
    if not archive.is_file():
        raise UserError(f"{archive} does not exist or is not a file.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; choose another folder with --output.")
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_path(folder.resolve(), ".unpacking", STORE_FILES) as unfinished:
            try:
                with _opened(archive) as packed:
                    _write_members(packed, archive, unfinished)
                if missing := [name for name in FILES if not (unfinished / name).is_file()]:
                    raise UserError(
                        f"{archive} lacks {' and '.join(missing)}: it is truncated or damaged; copy it again."
                    )
                store = TokenStore(unfinished)
                store.check_hashes()
            except UserError as error:
                raise UserError(str(error).replace(str(unfinished), str(archive))) from error
            megatron.write_indexes(unfinished, store.metadata.dtype)
    return TokenStore(folder)


def _write_members(packed: BinaryIO, archive: Path, folder: Path) -> None:
    """Write the files of an archive to `folder`."""
    sizes, left, number = {}, METADATA_BYTES, 0
    while any(header := packed.read(tarfile.BLOCKSIZE)):  # a block of zeros ends the archive
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        name = info.name.removeprefix(ROOT)
        known = name == "metadata.json" if number == 0 else name in FILES or TOKENIZER_FILE.fullmatch(name)
        is_plain = info.type == tarfile.REGTYPE and info.size >= 0 and ROOT + name == info.name
        if not known or not is_plain or (folder / name).exists() or number > OTHER_FILES:
            raise UserError(
                f"{archive} is not a packed store: its {info.name[:200]!r} is not a plain file of a store. Do not trust it."
            )
        left -= 0 if name in sizes else info.size
        if left < 0 or info.size != sizes.get(name, info.size):
            raise UserError(f"{archive} is not a packed store: its {name} has {info.size:,} bytes. Do not trust it.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            while block := packed.read(min(info.size - file.tell(), COPIED_BYTES)):
                file.write(block)
            if file.tell() < info.size:
                raise EOFError(f"it ends within {name}")
            fsync(file)
        packed.read(-info.size % tarfile.BLOCKSIZE)
        if number == 0:
            files = read_metadata(folder).files
            sizes, left = {name: size for name, (_, size) in files.items() if size is not None}, OTHER_BYTES
            remedy = "make room or name a folder on another disk"
            require_room(folder.parent.absolute(), sum(sizes.values()), f"{archive} unpacks to", remedy)
        number += 1
    packed.read(tarfile.RECORDSIZE)  # reads to the end, where zstandard verifies the checksum


@contextmanager
def _opened(archive: Path) -> Iterator[BinaryIO]:
    """Open an archive. Raise a `UserError` if it turns out to be truncated or damaged."""
    import zstandard

    try:
        with archive.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as packed:
            yield packed
    except (EOFError, ValueError, tarfile.TarError, zstandard.ZstdError) as error:
        raise UserError(f"{archive} is truncated, damaged or not a packed store ({error}); copy it again.") from error


def _begins_with(archive: Path, metadata: bytes) -> bool:
    """Return whether a file is a packed store with these metadata."""
    try:
        with _opened(archive) as packed:
            return packed.read(tarfile.BLOCKSIZE + len(metadata))[tarfile.BLOCKSIZE :] == metadata
    except (OSError, UserError):
        return False


@dataclass
class UnpackArguments:
    archive: str | None = setting(
        None, "Packed store.", needed=("a packed store", "python -m tokenizer.unpack data/my.tar.zst")
    )
    output: str | None = setting(None, "Folder to unpack to; by default the archive's name without .tar.zst.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((UnpackArguments,), __doc__.splitlines()[0], positional="archive").parse(arguments)
    if options.output is None and not options.archive.endswith(SUFFIX):
        raise UserError(f"{options.archive} does not end in {SUFFIX}; name a folder with --output.")
    path = Path(options.archive).expanduser()
    store = unpack(path, Path(options.output or str(path).removesuffix(SUFFIX)).expanduser())
    print(
        f"{store.folder} has {store.metadata.train.tokens:,} tokens for training and {store.metadata.val.tokens:,} for "
        f"validation; all hashes are correct."
    )


if __name__ == "__main__":
    run(main)
