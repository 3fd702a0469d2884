"""Inductor's cache after a kill, or locked: incomplete libraries are deleted, and a run does not wait silently."""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_step import tokens, train_step
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError

from conftest import REPOSITORY, TINY, flags, wait_until
from tokenizer.store.store import Split
from training.data.batches import BatchPlan
from training.evaluation.scoring import evaluate
from training.guard.faults import compiler_error
from training.runtime import compilation
from training.runtime.compilation import remove_incomplete_libraries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are not ELF files")
LIBRARY = Path(torch.__file__).parent / "lib" / "libshm.so"  # a small real library


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "LINK_SECONDS", 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    content = LIBRARY.read_bytes()
    (table,), sizes = struct.unpack_from("<Q", content, 40), struct.unpack_from("<2H", content, 58)
    content = content[: table + sizes[0] * sizes[1]]  # some builds of torch have bytes behind the section table
    parts = {"empty": b"", "header": content[:1000], "almost": content[:-1], "zeros": bytes(5000), "whole": content}
    for name, part in parts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.main.so").write_bytes(part)
    return tmp_path


def left(cache: Path) -> set[str]:
    return {path.name.split(".")[0] for path in cache.rglob("*.so")}


@pytest.mark.parametrize("folder", ["/my cache", "/Anna's", "/a\\b", '/"'])
def test_paths_that_a_shell_would_quote_turn_compilation_for_a_cpu_off(monkeypatch, folder):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    assert "PyTorch cannot compile for CPUs in paths with blanks or quotes (" in compilation._missing_to_compile()


@pytest.mark.parametrize(
    ("compiler", "is_missing"),
    [(shutil.which("g++") or "clang++", False), ("./old.sh", True), ("ccache g++", True), ("", True)],
)
def test_the_compiler_that_inductor_calls_must_know_its_standard(monkeypatch, tmp_path, compiler, is_missing):
    (tmp_path / "old.sh").write_text('#!/bin/bash\n! [[ "$*" == *c++20* ]]\n')
    (tmp_path / "old.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with torch._inductor.config.patch("cpp.cxx", (None, compiler)):
        assert ("a C++ compiler for C++20" in compilation._missing_to_compile()) is is_missing


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_variable_that_disables_compilation_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert f"{name} is 1; unset it." in compilation._missing_to_compile()


def test_the_error_of_a_compiler_has_its_output_without_the_command():
    failure = CppCompileError(["g++", "-I/" + "long/" * 99], "error: no omp.h\n")
    error = compiler_error(BackendCompilerFailed(None, failure, None), "", "run again")
    assert str(error).startswith("torch.compile failed (error: no omp.h). Delete its cache")


def test_a_cache_on_a_disk_without_execution_turns_compilation_off(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "not" / "yet"))
    flags = {tmp_path: os.ST_NOEXEC}
    monkeypatch.setattr(os, "statvfs", lambda disk: SimpleNamespace(f_flag=flags.get(disk, 0)))
    assert f"{tmp_path} is mounted noexec; " in compilation._missing_to_compile()


def test_incomplete_libraries_are_removed(cache):
    remove_incomplete_libraries()
    assert left(cache) == {"whole"}


def test_library_that_is_being_linked_is_kept(cache, monkeypatch):
    path = cache / "header" / "header.main.so"
    monkeypatch.setattr(time, "sleep", lambda _seconds: os.utime(path, ns=(0, 0)))  # as if written meanwhile
    remove_incomplete_libraries()
    assert left(cache) == {"whole", "header"}


def test_a_validation_whose_compiler_fails_is_not_compiled(capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("killed")

    step = train_step(2, 1)
    split, plan = Split(3000, 1, 9000, "", ""), BatchPlan(16, 2, 1, 1)
    arguments = tokens(step.accelerator.device), split, plan, step.accelerator, 8
    expectation = evaluate(step.loss, *arguments)
    assert capsys.readouterr().out == ""
    assert evaluate(torch.compile(step.loss, backend=fail), *arguments) == expectation
    assert "WARNING: This validation was not compiled (RuntimeError('killed'))." in capsys.readouterr().out


def test_instructions_and_header_of_all_kernels_are_ready_before_a_model_is_traced(tmp_path):
    """The compiler writes empty libraries and logs its arguments. Only one set of instructions is tried. A header that
    a killed process left, of which the compiler reads only a part, is compiled again."""
    compiler, log = tmp_path / "compiler.sh", tmp_path / "log"
    script = f'#!/bin/bash\n[ $# = 1 ] && echo g++ 12 && exit\necho "$*" >> {log}\n'
    script += f'[[ "$*" == *-include* ]] && grep -qsr damaged {tmp_path} --include=*.?ch && exit 1\n'
    script += 'while [ "$1" != -o ]; do shift; done\nexec g++ -shared -x c++ -o "$2" /dev/null\n'
    compiler.write_text(script)
    compiler.chmod(0o755)
    wait = "[each.join() for each in threading.enumerate() if each.name == 'first kernel']"
    program = "import threading\nfrom training.runtime.compilation import prepare_compiler\nprepare_compiler()\n" + wait
    environment = os.environ | {"CXX": str(compiler), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def begin() -> list[list[str]]:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=REPOSITORY)
        calls = [line.split() for line in log.read_text().splitlines()]
        log.unlink()
        return calls

    calls = begin()
    best = {argument for argument in calls[0] if argument.startswith("-m")}
    assert all(best <= {*call} for call in calls)  # no smaller set was tried
    assert ["c++-header" in call for call in calls].count(True) == 1
    assert "-shared" in calls[-1]  # a kernel
    (header,) = tmp_path.rglob("*.?ch")
    header.write_text("damaged")
    for kernel in tmp_path.rglob("*.main.so"):
        kernel.unlink()
    *_, failed, header_again, kernel_again = [call for call in begin() if "-E" not in call]
    assert ["c++-header" in call for call in (failed, header_again, kernel_again)] == [False, True, False]
    assert not header.read_bytes().startswith(b"damaged")


PREPARED = """
import torch
from training.runtime import compilation
compilation._begin_to_compile = str
compilation.cpu_vec_isa.valid_vec_isa_list = list  # no search for vector instructions
compilation.prepare_compiler()
x, i = torch.rand(8, 8), torch.arange(8)
def triple(x): return x * 3
"""


def test_a_graph_has_one_file_per_thread_and_no_code_for_the_vectors_of_another_cpu(tmp_path):
    """On a shared disk, code for another CPU gave losses that are not finite, or crashed."""
    program = """
def graph(x, i): return [(x @ x).relu() + i, (x @ x @ x).exp(), x.cumsum(0) + 2, x @ x * 3, x[i] - 1]
for torch._inductor.config.compile_threads, indices in ((2, i), (1, i.int())):
    torch.testing.assert_close(torch.compile(graph)(x, indices), graph(x, indices))
torch.compile(triple)(x)
torch.compile(graph)(x, i + 1)
"""
    other_cpu = """
from torch._dynamo.utils import counters
print(torch.compile(triple)(torch.ones(8, 8)).mean().item(), counters["inductor"]["fxgraph_cache_hit"])
"""

    def run(text: str, capability: str) -> subprocess.CompletedProcess:
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        options = {"env": os.environ | variables | {"ATEN_CPU_CAPABILITY": capability}, "cwd": REPOSITORY}
        command = [sys.executable, "-c", PREPARED + text]
        return subprocess.run(command, check=False, capture_output=True, text=True, **options)

    result = run(program, "avx2")
    assert re.search(r"\nRuntimeError: .*index out of bounds", result.stderr), result.stderr
    modules = [path.read_text() for path in tmp_path.rglob("*.py")]
    counts = [module.count("async_compile.cpp_pybinding") for module in modules]
    assert sorted(counts) == [1, 4, 4]
    assert len(list(tmp_path.rglob("*.main.so"))) == 2 + 1 + 1
    assert run(other_cpu, "default").stdout.split() == ["3.0", "0"]


def test_a_run_reports_that_a_suspended_process_locks_the_cache_and_ends(spawn, store, tmp_path):
    """Their compilers only write their arguments to a log, and hang."""

    def begin(name: str, **environment: str) -> subprocess.Popen:
        compiler, log = tmp_path / f"{name}.sh", tmp_path / f"{name}.log"
        lines = ("#!/bin/bash", '[[ $# = 1 || "$*" == *-fsyntax-only* ]] && echo g++ 12 && exit')
        lines += (f'echo "$*" >> {log}', "exec sleep 600")
        compiler.write_text("\n".join(lines))
        compiler.chmod(0o755)
        settings = TINY | {"data": store.folder, "output_dir": tmp_path / name, "torch_compile": "true"}
        environment |= {"CXX": str(compiler), "TMPDIR": str(tmp_path)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
        return spawn("train_accelerate.py", *flags(**settings), fresh=True, **environment)

    holder_run = begin("suspended")
    wait_until((tmp_path / "suspended.log").is_file, 120)
    holder_run.send_signal(signal.SIGSTOP)
    run = begin("run", TORCHINDUCTOR_FILE_LOCK_TIMEOUT="2")
    output, errors = run.communicate(timeout=120)
    lock = rf"{tmp_path}/cache/locks/\w+\.lock"
    assert re.search(rf"\nCompiling waits for {lock}\. Unless a process of this run holds it, .* the run ends", output)
    assert re.search(rf"error: torch.compile failed \(Timeout.*{lock}.*Delete its cache, {tmp_path}/cache", errors)
    assert (run.returncode, (tmp_path / "run.log").exists()) == (1, False)
