"""Pretokenization on several machines, here processes that share only a folder: the same store to the byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, prose

# The command with units of 20 kB instead of 16 MiB.
SMALL_UNITS = "from tokenizer import corpus; corpus.UNIT_BYTES = 20_000"
PROGRAM = f"{SMALL_UNITS}; from command_line import run; from tokenizer.pretokenize import main; run(main)"
FLAGS = ["--input", "texts", "--vocab_size", "400", "--dedup", "exact", "--num_proc", "1"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(prose(i % 6, 3000 * (i % 3 + 1)))
    succeeds(tmp_path, "--output", "expected")
    return tmp_path


def start(folder: Path, *more: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *FLAGS, *more], cwd=folder, env=environment, **pipes)


def succeeds(folder: Path, *more: str) -> None:
    with start(folder, *more) as process:
        _, wrong = process.communicate(timeout=600)
    assert (process.returncode, wrong) == (0, "")


def tokens_of(store: Path) -> dict[str, bytes]:
    names = [f"{split}.{end}" for split in ("train", "val") for end in ("bin", "bin.index", "idx")]
    return {name: (store / name).read_bytes() for name in [*names, "inputs.json", "tokenizer/tokenizer.json"]}


def test_concurrent_shards_and_a_merge_build_the_same_store_even_after_a_kill(folder):
    with start(folder, "--output", "store", "--shard", "0/3") as killed:
        while not list(folder.glob(".store.unfinished/parts/*.json")) and killed.poll() is None:
            pass
        killed.kill()
    shards = [start(folder, "--output", "store", "--shard", f"{i}/3") for i in range(3)]
    said = [shard.communicate(timeout=600) for shard in shards]
    assert [wrong for _, wrong in said] == [""] * 3
    assert [out.splitlines()[-1].startswith(f"Shard {i}/3 is done: ") for i, (out, _) in enumerate(said)] == [True] * 3
    assert not (folder / "store").exists()
    succeeds(folder, "--output", "store", "--merge")
    assert tokens_of(folder / "store") == tokens_of(folder / "expected")
    assert json.loads((folder / "store" / "metadata.json").read_text())["repeated_documents"] == 2


def test_merge_requires_all_shards_and_the_plain_command_completes_them(folder):
    succeeds(folder, "--output", "store", "--shard", "1/3")
    with start(folder, "--output", "store", "--merge") as process:
        _, wrong = process.communicate(timeout=600)
    assert "units of store are not done; run the missing shards, or run the command without --merge" in wrong
    assert not (folder / "store").exists()
    succeeds(folder, "--output", "store")
    assert tokens_of(folder / "store") == tokens_of(folder / "expected")


PIPELINE = f"""
from datatrove.executor import LocalPipelineExecutor
from tokenizer.cluster import Pretokenize

def small_units(data, rank, world_size):
    {SMALL_UNITS}

if __name__ == "__main__":
    flags = {[*FLAGS, "--output", "store"]}
    steps = [small_units, Pretokenize(flags)]
    shards = LocalPipelineExecutor(steps, tasks=3, workers=2, logging_dir="logs/shards")
    LocalPipelineExecutor([Pretokenize([*flags, "--merge"])], logging_dir="logs/merge", depends=shards).run()
"""


def test_datatrove_executors_build_the_same_store(folder, launch):
    pytest.importorskip("datatrove")
    (folder / "pipeline.py").write_text(PIPELINE)
    done = launch("pipeline.py", folder=folder, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stderr
    assert tokens_of(folder / "store") == tokens_of(folder / "expected")
