"""The way of the data is a straight line: who may import whom."""

import ast

import pytest

from conftest import REPOSITORY, TINY, flags

ROOMS = ("modeling_gpt2scratch", "tokenizer", "training", "publishing")
MAY_IMPORT = {
    "modeling_gpt2scratch": set(),
    "tokenizer": {"command_line"},
    "training": {"command_line", "tokenizer", "modeling_gpt2scratch"},
    "publishing": {"command_line", "tokenizer", "training", "modeling_gpt2scratch"},
}
OURS = {*ROOMS, "command_line", "train_accelerate", "push_to_hub", "generate", "benchmarks", "tests"}


def imports_of(path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_the_arrows_run_one_way(room):
    files = list((REPOSITORY / room).rglob("*.py"))
    assert files
    for path in files:
        assert imports_of(path) & OURS <= MAY_IMPORT[room] | {room}, path.name


ONLY_FOR_TEXT = ("datasets", "pyarrow", "xxhash", "zstandard", "rensa")


def without(*modules: str) -> str:
    """`None` in sys.modules makes an import fail, as if it were not installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules!r}));"


def test_a_run_and_a_worker_need_nothing_that_only_others_need(launch, store, tmp_path):
    arguments = flags(data=store.folder, output_dir=tmp_path / "run", **TINY)
    result = launch("-c", f"{without(*ONLY_FOR_TEXT)} import train_accelerate; train_accelerate.main({arguments!r})")
    assert result.returncode == 0, result.stderr
    result = launch("-c", f"{without('torch', 'transformers', 'datasets', 'huggingface_hub')} import tokenizer.work")
    assert result.returncode == 0, result.stderr
