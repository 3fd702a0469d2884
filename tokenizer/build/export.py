"""Export a token store: as one packed file, or as a dataset for the Hub, parquet files of ids with a dataset card."""

import shlex
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.atomic import unfinished_path
from common.errors import UserError, disk_errors
from tokenizer.build import report
from tokenizer.build.output import locked
from tokenizer.build.recipe import Recipe
from tokenizer.corpus.files import PACKED_STORE
from tokenizer.corpus.given import TYPES
from tokenizer.corpus.hub import HubDataset
from tokenizer.encoding.vocabulary import leads_out
from tokenizer.store.store import HUB_SPLITS, SPLITS, STORE_FILES, Metadata, TokenStore

# Level 3 compresses Shakespeare and Python sources to 47% at 150-180 MB/s per core; level 12 to 43% at 22 MB/s.
ZSTD_LEVEL = 3
COPIED_BYTES = 1 << 20  # bytes packed at a time
ROW_TOKENS = 1 << 20  # maximum tokens of a row; a longer document continues in the next
GROUP_TOKENS = 1 << 22  # tokens per row group, which a writer and a reader hold in memory
SHARD_BYTES = 1 << 29  # bytes of ids per file
MADE_OF = b"token_store"  # key of the store's identity in the parquet metadata
NO_FLAGS = ("input", "tokenizer_json", "chat_template_source", "named_data", "named_templates")  # settings, not flags


def to_archive(store: TokenStore) -> Path:
    """Pack a store into `NAME.tar.zst` next to it, unless it is already there. The same store gives the same bytes."""
    path = store.folder.with_name(store.folder.name + PACKED_STORE)
    if not path.exists():
        with locked(store.folder, ".packing", wait=True):
            if not path.exists():  # another process may have packed it meanwhile
                _pack(store, path)
    if not _begins_with(path, (store.folder / "metadata.json").read_bytes()):
        raise UserError(f"{path} exists and is not the packed {store.folder}; move it away or delete it.")
    return path


def _pack(store: TokenStore, path: Path) -> None:
    import zstandard

    store.check_hashes()
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1, write_checksum=True)
    with (
        disk_errors(path),
        unfinished_path(path, ".packing") as draft,
        draft.open("wb") as archive,
        compressor.stream_writer(archive, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, copybufsize=COPIED_BYTES) as tar,
    ):
        for file in sorted(_files_of(store), key=lambda file: (file.name != "metadata.json", file)):  # metadata first
            info = tarfile.TarInfo(f"store/{file.relative_to(store.folder).as_posix()}")  # no owner and no time
            info.size = file.stat().st_size
            with file.open("rb") as content:
                tar.addfile(info, content)


def _files_of(store: TokenStore) -> set[Path]:
    """Return the files of a store. Raise a `UserError` for a link out of its folder, whose content would be published;
    those to files whose hashes were checked are followed, and those to old indexes, which nothing reads, left out."""
    files = {file for pattern in STORE_FILES for file in store.folder.glob(pattern) if file.is_file()}
    checked = {store.folder / name for name in store.metadata.files}
    links = {file for file in files - checked if leads_out(file, store.folder)}
    if link := next((file for file in links if file.suffix != ".idx"), None):
        raise UserError(f"{link} is a link out of the store, whose content would be exported; replace it by the file.")
    return files - links


def _begins_with(archive: Path, metadata: bytes) -> bool:
    """Return whether a file is a packed store with these metadata."""
    import zstandard

    with suppress(OSError, zstandard.ZstdError), zstandard.open(archive) as content:
        return content.read(tarfile.BLOCKSIZE + len(metadata))[tarfile.BLOCKSIZE :] == metadata
    return False


def to_parquet(store: TokenStore) -> Path:
    """Write a store as a Hub dataset to `NAME-parquet/` next to it, unless it was already exported there."""
    folder = store.folder.with_name(f"{store.folder.name}-parquet")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if exported_identity(folder) == store.metadata.identity:
            return folder
        raise UserError(f"{folder} exists and is not an export of {store.folder}; move it away or delete it.")
    store.check_hashes()
    files, copied = ("data/*.parquet", "tokenizer/*", "README.md"), _files_of(store)
    with disk_errors(folder), unfinished_path(folder.resolve(), ".exporting", files) as draft:
        (draft / "data").mkdir()
        for split in SPLITS:
            _write_shards(store, split, draft / "data")
        for file in copied:
            if (copy := draft / file.relative_to(store.folder)).parent != draft:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        (draft / "README.md").write_text(_card(store), encoding="utf-8")
    return folder


def exported_identity(folder: Path) -> str | None:
    """Return the identity of the store that was exported to `folder`, or None if it is not an export."""
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(min((folder / "data").glob("train-00000-of-*.parquet")))
        return schema.metadata[MADE_OF].decode()
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException):
        return None


def _write_shards(store: TokenStore, split: str, folder: Path) -> None:
    """Write the parquet files of a split."""
    import pyarrow as pa
    from pyarrow import parquet

    tokens, offsets = store.memory_map(split), store.offsets(split)
    schema = pa.schema(
        [("document", pa.int64()), ("input_ids", pa.list_(pa.from_numpy_dtype(tokens.dtype.newbyteorder("="))))],
        {MADE_OF: store.metadata.identity},
    )
    counts = -(-np.diff(offsets) // ROW_TOKENS)  # (documents,) rows per document
    document = np.repeat(np.arange(len(counts)), counts)  # (rows,)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    bounds = np.append(offsets[document] + nth * ROW_TOKENS, len(tokens))  # (rows + 1,) in tokens
    # A row is in the shard, and in the row group, in which its first token is.
    shard_of_row = bounds[:-1] * tokens.itemsize // SHARD_BYTES
    shards = int(shard_of_row.max(initial=-1)) + 1
    for number in range(shards):
        path = folder / f"{HUB_SPLITS[split]}-{number:05d}-of-{shards:05d}.parquet"
        # No dictionary: it packs ids into odd numbers of bits, which zstd compresses to 71% instead of 59%.
        with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            of_shard = np.flatnonzero(shard_of_row == number)
            for rows in np.split(of_shard, np.flatnonzero(np.diff(bounds[of_shard] // GROUP_TOKENS)) + 1):
                ends = bounds[rows[0] : rows[-1] + 2]
                ids = pa.array(tokens[ends[0] : ends[-1]])
                lists = pa.ListArray.from_arrays(pa.array(ends - ends[0], pa.int32()), ids)
                writer.write_table(pa.Table.from_arrays([pa.array(document[rows]), lists], schema=schema))


def _card(store: TokenStore) -> str:
    from huggingface_hub import DatasetCardData

    metadata, name = store.metadata, store.folder.absolute().name
    files = [{"split": split, "path": f"data/{split}-*"} for split in HUB_SPLITS.values()]
    card_data = DatasetCardData(
        pretty_name=f"{name}, tokenized",
        license="unknown",
        task_categories=["text-generation"],
        tags=["pretokenized", "gpt2scratch"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    data = {
        "card_data": card_data.to_yaml(),
        "name": name,
        "metadata": metadata,
        "row_tokens": ROW_TOKENS,
        "sources": list(map(_public, metadata.sources)),
        # A command cannot name a dataset of a Python program.
        "command": None if {source.split()[0] for source in metadata.sources} & TYPES else _public_command(metadata),
    }
    return report.render("dataset_card.md.j2", data)


def _public(source: str) -> str:
    """Return the name of a source without the names of local folders."""
    return source if HubDataset.parse(source) is not None else Path(source).name


def _public_pattern(pattern: str) -> str:
    """Return a pattern of files without the names of local folders. A relative one is below an input."""
    return f"path/to/{Path(pattern).name}" if pattern.startswith(("/", "~")) else pattern


def _public_command(metadata: Metadata) -> str:
    """Return the command with all settings that differ from the defaults."""
    usual = Recipe(metadata.sources).settings()
    text = [] if "import_tokens" in metadata.settings else ["--input", *map(_public, metadata.sources)]
    parts = ["python", "-m", "tokenizer.pretokenize", *text]
    for name, value in metadata.settings.items():
        if name not in NO_FLAGS and value != usual.get(name) and value != []:
            values = value if isinstance(value, list) else [] if value is True else [value]
            of_this_machine = name in ("tokenizer", "chat_template", "import_tokens", "val")
            texts = map(_public if of_this_machine else str, values)
            parts += [f"--{name}", *(map(_public_pattern, texts) if name == "exclude" else texts)]
    return shlex.join(parts)
