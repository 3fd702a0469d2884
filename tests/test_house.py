"""Tests of the architecture: imports between packages and folders, README's tree, and sizes of interfaces."""

import ast
import graphlib
import inspect
import re
from dataclasses import fields

import pytest

from conftest import REPOSITORY, TINY, flags
from training.plan.run import Run

PACKAGES = ("common", "modeling_gpt2scratch", "tokenizer", "training", "publishing")
MAY_IMPORT = {
    "common": set(),
    "modeling_gpt2scratch": set(),
    "tokenizer": {"common"},
    "training": {"common", "tokenizer", "modeling_gpt2scratch"},
    "publishing": {"common", "tokenizer", "training", "modeling_gpt2scratch"},
}
OURS = {*PACKAGES, "train_accelerate", "push_to_hub", "generate", "benchmarks", "examples", "tests"}
# A folder imports itself and the folders to its left. Files at a package's root import all of them, and only budget/
# imports such files.
ORDER = {
    "tokenizer": "corpus cleaning encoding store build".split(),
    "training": "runtime data step checkpoints evaluation plan log report guard budget".split(),
}
ACCEPT_RUN = set(
    "budget.forecast budget.pacer guard.faults guard.run_guard log.profile log.run_log plan.run".split()
    + ["report.validation"]
)


def imported(path) -> set[str]:
    """Return all modules that a file imports, also inside functions and for type checkers, without relative imports."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def files_of(package: str) -> list:
    return [path for path in sorted((REPOSITORY / package).rglob("*.py")) if path.name != "__init__.py"]


def module_of(path) -> str:
    return path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_allowed_packages(package):
    assert files_of(package)
    for path in files_of(package):
        assert {name.split(".")[0] for name in imported(path)} & OURS <= MAY_IMPORT[package] | {package}, path.name


@pytest.mark.parametrize("package", ORDER)
def test_folders_import_only_folders_before_them(package):
    order = ORDER[package]
    folders = [path.name for path in (REPOSITORY / package).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(order) == sorted(folders)
    modules = {module_of(path): path for path in files_of(package)}
    for path in modules.values():
        [*_, folder], imports = path.relative_to(REPOSITORY).parts[:-1], imported(path) & modules.keys()
        if folder == package:
            continue
        predecessors = order[: order.index(folder) + 1]
        imported_folders = [name.split(".")[1] for name in imports if name.count(".") == 2]
        assert set(imported_folders) <= set(predecessors), path
        assert len(imported_folders) == len(imports) or folder == "budget", (
            f"{path} imports a file of the package's root"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycle(package):
    modules = {module_of(path): path for path in files_of(package)}
    graph = {name: imported(path) & modules.keys() for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_readme_shows_the_folders():
    """README's tree has the scripts and folders of the repository and, in the order of imports, of its packages."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [tree] = re.findall(r"^```\n(train_accelerate\.py .*?)^```", readme, re.DOTALL | re.MULTILINE)
    tree_entries: dict[str, list[str]] = {}
    for inner, name in re.findall(r"^([├└]── )?(\w+(?:\.py|/)) ", tree, re.MULTILINE):
        if inner:
            tree_entries[[*tree_entries][-1]].append(name.rstrip("/"))
        else:
            tree_entries[name.rstrip("/")] = []
    exclusions = {name.strip("/") for name in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").split()}
    entries = [path for path in REPOSITORY.iterdir() if path.is_dir() or path.suffix == ".py"]
    names = {path.name for path in entries if not path.match(".*") and path.suffix != ".egg-info"}
    assert names - exclusions - {"__pycache__"} == set(tree_entries)
    assert {package: tree_entries[package] for package in ORDER} == ORDER


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
    result = launch(
        "-c", f"{without('torch', 'transformers', 'datasets', 'huggingface_hub')} import tokenizer.build.worker"
    )
    assert result.returncode == 0, result.stderr
