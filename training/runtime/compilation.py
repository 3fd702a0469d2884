"""Compilation with torch.compile: the decision for this machine, and the locks and files of its cache.

Inductor lets the linker write directly into its cache. If the process is killed during that, the truncated file crashes
every later run: an empty file with an error, a partial one with SIGBUS and no message. Such files are deleted.
"""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import threading
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch._inductor
from filelock import FileLock, Timeout
from torch._inductor import async_compile, codecache, cpu_vec_isa
from torch._inductor.decomposition import decompositions
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.utils import _filelock

from common.command_line import reports_for_all
from common.errors import UserError
from training.runtime.console import say
from training.runtime.kernels import GraphKernels

SILENCE = 30.0  # seconds until a wait for a lock is reported
LINK_SECONDS = 5.0  # a file without a write for this many seconds is not being linked by any process
# Operations of a run, for each thread of a CPU, below which compiling takes longer than it saves: with two layers it
# takes 14 s, and steps without it have 0.67 of the speed (two cores, docs/log.md). The validation, which is compiled
# separately, takes 5 s, and without it has 0.7 of the speed.
SHORT_RUN, SHORT_VALIDATION = 3.1e12, 1.4e12
OFF_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # variables that PyTorch reads
CPP_COMPILER = "a C++ compiler for C++20 (g++ 10 or later, or the one that CXX names)"
FIRST_KERNEL = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* out) { *out = 1.0f; }\n'
ELF = struct.Struct("<16s2HI3QI6H")  # header of a 64-bit file
# Inductor would compute the gradient of a lookup with atomic additions from several threads. Their order, and so the
# rounding, differs between runs (seen on two CPU threads: other weights from step 4 to 8 on). Without its own form, it
# calls PyTorch's kernel, which adds the rows of a token in batch order, on CPUs and on GPUs.
decompositions.pop(torch.ops.aten.embedding_dense_backward.default, None)


def decide_compilation(choice: str, notes: list[str]) -> bool:
    """Return whether to compile. With `auto`, add the reason for not compiling to `notes`."""
    if choice.lower() not in ("auto", "true"):  # `DeviceArguments.problems` refuses other words than false
        return False
    problem = _missing_to_compile()
    if problem and not is_automatic(choice):
        raise UserError(f"Steps cannot be compiled here: {problem} Or set --torch_compile false.")
    if problem:
        notes.append(f"torch.compile is off, which makes steps slower: {problem}")
        return False
    # Compilation for Apple GPUs is still a prototype.
    return not (is_automatic(choice) and torch.backends.mps.is_available())


def is_automatic(choice: str) -> bool:
    """Return whether neither the command nor the launcher decides about compilation."""
    return choice.lower() == "auto" and os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() == "NO"


def pays_off(flops: float, threshold: float) -> bool:
    """Return whether compiling saves more time than it takes in so many operations of each process. On a GPU, it is
    taken for granted, because no time was measured there."""
    return torch.accelerator.is_available() or flops > threshold * torch.get_num_threads()


def _missing_to_compile() -> str:
    """Return the missing requirements of Inductor with their remedy, or an empty string if nothing is missing.
    Inductor compiles C++ for CPUs, and Triton compiles C for GPUs. Both need Python's headers."""

    def is_missing(variable: str, *names: str) -> bool:
        return not any(shutil.which(name) for name in (os.environ.get(variable, ""), *names))

    has_gpu = torch.cuda.is_available()
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    requirements = [
        (is_missing("CXX", "g++", "clang++") if has_gpu else not _compiles_cpp(), CPP_COMPILER, "g++"),
        (not has_headers, "Python's headers (Python.h)", "python3-dev"),
        (has_gpu and is_missing("CC", "gcc", "clang"), "a C compiler (gcc or clang)", "gcc"),
    ]
    parts, paths = [], [torch.__file__, os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())]
    if not torch.accelerator.is_available() and re.search(r"[\s'\"\\]", "".join(paths)):
        parts.append(f"PyTorch cannot compile for CPUs in paths with blanks or quotes ({', '.join(paths)}); move them.")
    cache = Path(paths[-1]).absolute()
    disk = next(path for path in (cache, *cache.parents) if path.exists())
    if os.statvfs(disk).f_flag & getattr(os, "ST_NOEXEC", 0):
        parts.append(f"{disk} is mounted noexec; name a folder of another disk with TORCHINDUCTOR_CACHE_DIR.")
    if not os.access(disk, os.W_OK):
        parts.append(f"{disk} cannot be written; name another folder with TORCHINDUCTOR_CACHE_DIR.")
    if needed := {name: package for is_needed, name, package in requirements if is_needed}:
        parts.append(f"{', '.join(needed)} not found; on Debian and Ubuntu: apt install {' '.join(needed.values())}.")
    if has_gpu and torch.version.hip is None and torch.cuda.get_device_capability() < (7, 0):
        parts.append("Triton supports GPUs from compute capability 7.0 on (V100, T4 and newer).")
    if has_gpu and importlib.util.find_spec("triton") is None:
        parts.append("Triton is not installed (pip install triton).")
    parts += [f"{name} is 1; unset it." for name in OFF_SWITCHES if os.environ.get(name) == "1"]
    return " ".join(parts)


def _compiles_cpp() -> bool:
    """Return whether the compiler that Inductor will call for a CPU exists and knows the C++ that it is given."""
    command = [torch._inductor.config.cpp.cxx[1], "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
    with suppress(OSError):
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    return False


def prepare_compiler() -> None:
    """Prepare Inductor and its cache for this process."""
    _filelock.FileLock.acquire = _acquire
    remove_incomplete_libraries()
    # Building flex_attention's mask warns, which a graph cannot contain.
    torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
    # A cache on a shared disk may have C++ code for the vectors of another CPU, which would compute nonsense here.
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    if not torch.accelerator.is_available():
        async_compile.AsyncCompile = GraphKernels  # the modules of compiled graphs import this class
        _begin_to_compile(cache_dir())


@cache
def _begin_to_compile(_folder: str) -> None:
    """Start the parts of a compilation for a CPU that need no model, in a thread, while text is read and the model is
    traced. With empty caches, they take 10 s."""
    threading.Thread(target=_compile_first_kernel, name="first kernel", daemon=True).start()


def _compile_first_kernel() -> None:
    """Find the vector instructions that the C++ compiler and this CPU support, and compile the header of all kernels.
    If this fails, the compilation of the model fails in the same way, and reports it."""
    with suppress(Exception):
        names = set(cpu_vec_isa.x86_isa_checker())  # empty for other processors
        best = next((isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= names), None)
        if "ATEN_CPU_CAPABILITY" not in os.environ and best:  # builds and loads a library
            cpu_vec_isa.valid_vec_isa_list = lambda: [best]  # which would try all others, too
        kernels = codecache.CppPythonBindingsCodeCache
        try:
            kernels.load_pybinding(["float*"], FIRST_KERNEL)
        except CppCompileError:  # perhaps because a killed process left a part of a compiled header
            for header in Path(default_cache_dir(), "precompiled_headers").glob("*.[gp]ch"):
                header.unlink()
            codecache._precompile_header.cache_clear()
            kernels.cache_clear()
            kernels.load_pybinding(["float*"], FIRST_KERNEL)


def _acquire(lock: FileLock) -> object:
    """Acquire a lock of Inductor, which would wait silently. Raise a `Timeout` if another process keeps it."""
    limit = lock.timeout if lock.timeout >= 0 else 600.0  # Inductor waits for some locks without a limit
    with suppress(Timeout):
        return FileLock.acquire(lock, min(SILENCE, limit / 2))
    if reports_for_all():
        say(
            f"Compiling waits for {lock.lock_file}. Unless a process of this run holds it, continue or end its holder, "
            "or set TORCHINDUCTOR_CACHE_DIR to another folder and run this command again. After "
            f"{limit:g} s, the run ends."
        )
    return FileLock.acquire(lock, limit)


def remove_incomplete_libraries() -> None:
    """Delete the shared libraries in Inductor's cache that are incomplete and that no process is writing."""
    libraries = (path for path in Path(cache_dir()).rglob("*.so") if os.access(path, os.W_OK))  # not of other users
    candidates = {path: path.stat().st_mtime_ns for path in libraries if not is_complete(path)}
    if candidates:
        time.sleep(LINK_SECONDS)
    for path, mtime in candidates.items():
        with suppress(FileNotFoundError):  # deleted by another process of the run
            if path.stat().st_mtime_ns == mtime:
                path.unlink()


def is_complete(library: Path) -> bool:
    """Return whether a shared library has its last part, the section table. Formats other than 64-bit ELF do."""
    size = library.stat().st_size
    with library.open("rb") as file:
        header = file.read(ELF.size)
    if len(header) < ELF.size or not any(header[:4]):
        return False
    if header[:5] != b"\x7fELF\x02":
        return True
    *_, table, _, _, _, _, entry_size, entries, _ = ELF.unpack(header)
    return table + entry_size * entries <= size
