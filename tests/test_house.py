"""Tests of the architecture: imports between packages and between the files of training/, and sizes of interfaces."""

import ast
import inspect
from dataclasses import fields

import pytest

from conftest import REPOSITORY, TINY, flags
from training.run import Run

PACKAGES = ("modeling_gpt2scratch", "tokenizer", "training", "publishing")
MAY_IMPORT = {
    "modeling_gpt2scratch": set(),
    "tokenizer": {"command_line"},
    "training": {"command_line", "tokenizer", "modeling_gpt2scratch"},
    "publishing": {"command_line", "tokenizer", "training", "modeling_gpt2scratch"},
}
OURS = {*PACKAGES, "command_line", "train_accelerate", "push_to_hub", "generate", "benchmarks", "tests"}
# The rings of training/, from the inside out. A file imports inner rings, and files to its left in the same ring.
RINGS = {
    "ground": "launcher threads fsdp_settings console restart hardware scaling budget tensors muon optim status metrics compilation",
    "data and step": "tokens data batches loss sharding embedding device model distributed step sampling scoring",
    "on disk": "samples checkpoint run_folder trackers backup saver loading pretrained",
    "decisions": "memory plan compatibility resume run",
    "while it runs": "health speed screen advice reference log profile report.plots report.facts report.report"
    " validation guard.learning guard.lock guard.stopping"
    " guard.watchdog guard.faults guard.guard",
    "configuration": "config preflight",
    "leaves": "compare.baselines compare.panel compare.memorization evaluate compare_runs sweep throughput sizing pacer forecast",
}
ORDER = [name for ring in RINGS.values() for name in ring.split()]
FOR_COMMANDS = {name for ring in ("configuration", "leaves") for name in RINGS[ring].split()}
ACCEPT_RUN = {"forecast", "guard.faults", "guard.guard", "log", "pacer", "profile", "run", "validation"}


def imported(path) -> set[str]:
    """Return all modules that a file imports, also inside functions and for type checkers, without relative imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files_of(package: str) -> list:
    return [path for path in sorted((REPOSITORY / package).rglob("*.py")) if path.name != "__init__.py"]


def module_of(path) -> str:
    return path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_allowed_packages(package):
    assert files_of(package)
    for path in files_of(package):
        assert {name.split(".")[0] for name in imported(path)} & OURS <= MAY_IMPORT[package] | {package}, path.name


def test_files_of_training_import_only_inner_rings_and_files_to_their_left():
    modules = {module_of(path).removeprefix("training."): path for path in files_of("training")}
    assert sorted(ORDER) == sorted(modules)
    for name, path in modules.items():
        found = imported(path)
        inner = [other for other in ORDER if f"training.{other}" in found]
        assert not [other for other in inner if ORDER.index(other) >= ORDER.index(name)], name
        assert name in FOR_COMMANDS or not FOR_COMMANDS.intersection(inner), name


def test_the_training_script_imports_at_most_18_of_our_modules():
    modules = {module_of(path) for package in PACKAGES for path in files_of(package)}
    modules |= {path.stem for path in REPOSITORY.glob("*.py")}
    assert len(imported(REPOSITORY / "train_accelerate.py") & modules) <= 18


def functions_of(path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]


def test_constructors_take_at_most_six_parameters():
    for path in files_of("training"):
        for function in functions_of(path):
            if function.name == "__init__":
                arguments = function.args
                assert len(arguments.args) + len(arguments.kwonlyargs) <= 7, path.name  # with self
                assert arguments.kwarg is None, path.name


def test_few_functions_take_the_whole_run():
    def accepts_run(function: ast.FunctionDef) -> bool:
        return any(isinstance(a.annotation, ast.Name) and a.annotation.id == "Run" for a in function.args.args)

    accepting = {module_of(path) for path in files_of("training") if any(map(accepts_run, functions_of(path)))}
    assert accepting == {f"training.{name}" for name in ACCEPT_RUN}
    assert len(ACCEPT_RUN) <= 8
    assert len(fields(Run)) <= 8
    assert not [name for name, member in vars(Run).items() if inspect.isfunction(member) and not name.startswith("__")]


ONLY_FOR_TEXT = ("datasets", "pyarrow", "xxhash", "zstandard", "rensa")


def without(*modules: str) -> str:
    """Return code after which importing these modules fails, as if they were not installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules!r}));"


def test_a_run_and_a_worker_do_not_need_the_packages_of_other_commands(launch, store, tmp_path):
    arguments = flags(data=store.folder, output_dir=tmp_path / "run", **TINY)
    result = launch("-c", f"{without(*ONLY_FOR_TEXT)} import train_accelerate; train_accelerate.main({arguments!r})")
    assert result.returncode == 0, result.stderr
    result = launch("-c", f"{without('torch', 'transformers', 'datasets', 'huggingface_hub')} import tokenizer.worker")
    assert result.returncode == 0, result.stderr
