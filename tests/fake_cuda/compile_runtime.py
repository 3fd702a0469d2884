"""Compile the fake CUDA runtime into one library for the Python environment that runs this script.

python tests/fake_cuda/compile_runtime.py FOLDER

CUDA functions that torch's libraries import and the C files do not define are generated. They return success and do
nothing. Functions that would compute are recorded as a kernel. The rest of the driver, which Triton links against, is
also generated.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libcuda.so.1"
IMPORTED = re.compile(r"(?:__)?cuda[A-Z]|cublas|cudnnBackend")
COMPUTES = re.compile(r"cublas.*(?:gemm|Gemm|gemv|dot|Dot|axpy|scal|Scal|trsm|Matmul$)|cudnnBackendExecute")


def build(folder: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    # The only complete set of headers in torch's dependencies.
    headers = packages / "triton" / "backends" / "nvidia" / "include"
    wanted = {
        name for library in (packages / "torch" / "lib").glob("*.so") for name in _symbols(library, "--undefined-only")
    }
    wanted = {name for name in wanted if IMPORTED.match(name)} | _driver(headers / "cuda.h")
    compile_ = ["gcc", "-O1", "-g", "-fPIC", "-Wall", "-Werror", f"-I{headers}"]
    objects = []
    for source in sorted(HERE.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*compile_, "-c", source, "-o", objects[-1]], check=True)
    defined = {name for path in objects for name in _symbols(path, "--defined-only", dynamic=False)}
    stubs = folder / "stubs.c"
    stubs.write_text('#include "fake.h"\n' + "".join(map(_stub, sorted(wanted - defined))), encoding="utf-8")
    command = [*compile_, f"-I{HERE}", "-shared", f"-Wl,-soname,{LIBRARY}", "-o", folder / LIBRARY, stubs, *objects]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    link = folder / "libcuda.so"  # the name that linkers search for
    link.unlink(missing_ok=True)
    link.symlink_to(LIBRARY)


def _symbols(library: Path, which: str, dynamic: bool = True) -> set[str]:
    listed = subprocess.run(
        ["nm", *(["-D"] if dynamic else []), which, library], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


def _driver(header: Path) -> set[str]:
    text = header.read_text(encoding="utf-8")
    declared = re.findall(r"\bCUDAAPI (cu[A-Z]\w+)\(", text)
    renamed = re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d+)\b", text)
    return {*declared, *renamed}


def _stub(name: str) -> str:
    recorded = f'fake_record("KERNEL", "%s", "{name}"); ' if COMPUTES.match(name) else ""
    return f"int {name}() {{ {recorded}return 0; }}\n"


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
