"""Compilation after a kill: incomplete libraries are deleted; complete ones and those being written are kept."""

import os
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_step import tokens, train_step

from tokenizer.store import Split
from training import compilation
from training.batches import BatchPlan
from training.compilation import remove_incomplete_libraries
from training.scoring import evaluate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are not ELF files")
LIBRARY = Path(torch.__file__).parent / "lib" / "libshm.so"  # a small real library


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "LINKING", 0.5)
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


def test_incomplete_libraries_are_removed(cache):
    remove_incomplete_libraries(cache)
    assert left(cache) == {"whole"}


def test_library_that_is_being_linked_is_kept(cache):
    path, done = cache / "header" / "header.main.so", threading.Event()

    def link() -> None:
        while not done.wait(0.01):
            os.utime(path, ns=(time.time_ns(), time.time_ns()))

    linker = threading.Thread(target=link)
    linker.start()
    try:
        remove_incomplete_libraries(cache)
    finally:
        done.set()
        linker.join()
    assert left(cache) == {"whole", "header"}


def test_a_validation_whose_compiler_fails_is_not_compiled(capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("killed")

    step = train_step(2, 1)
    split, plan = Split(3000, 1, 9000, "", ""), BatchPlan(16, 2, 1, 1)
    arguments = tokens(step.accelerator.device), split, plan, step.accelerator, 8
    expected = evaluate(step.loss, *arguments)
    assert capsys.readouterr().out == ""
    assert evaluate(torch.compile(step.loss, backend=fail), *arguments) == expected
    assert "WARNING: This validation was not compiled (RuntimeError('killed'))." in capsys.readouterr().out
