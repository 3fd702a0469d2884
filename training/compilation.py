"""The compiler's cache on disk: libraries that a killed process left incomplete are removed.

Inductor lets the linker write straight into its cache. A file that was cut off there ends every later run: with an error
where it is empty, by SIGBUS without a word where its beginning is there.
"""

import struct
import time
from contextlib import suppress
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

LINKING = 5.0  # seconds without a write, after which no process is still linking a file
ELF = struct.Struct("<16s2HI3QI6H")  # header of a 64-bit file


def remove_incomplete_libraries(cache: Path | None = None) -> None:
    """Delete the shared libraries in Inductor's cache that are incomplete and that no process is writing."""
    libraries = Path(cache or cache_dir()).rglob("*.so")
    found = {path: path.stat().st_mtime_ns for path in libraries if not is_complete(path)}
    if found:
        time.sleep(LINKING)
    for path, mtime in found.items():
        with suppress(FileNotFoundError):  # another process of the run was faster
            if path.stat().st_mtime_ns == mtime:
                path.unlink()


def is_complete(library: Path) -> bool:
    """Whether a shared library has its last part, the table of sections. True for other formats than 64-bit ELF."""
    size = library.stat().st_size
    with library.open("rb") as file:
        header = file.read(ELF.size)
    if len(header) < ELF.size or not any(header[:4]):
        return False
    if header[:5] != b"\x7fELF\x02":
        return True
    *_, table, _, _, _, _, entry_size, entries, _ = ELF.unpack(header)
    return table + entry_size * entries <= size
