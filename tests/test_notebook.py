"""The notebooks in a real kernel: examples/colab.ipynb with its interruptions, and those of docs/understand."""

import functools
import os
import re
import shutil
import sys

import pytest

from conftest import REPOSITORY, TINY, flags
from tokenizer.corpus import packages

nbformat = pytest.importorskip("nbformat", reason="notebooks need: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="notebooks need: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="notebooks need: pip install nbclient ipykernel")

NOTEBOOK = REPOSITORY / "examples" / "colab.ipynb"
LESSONS = sorted((REPOSITORY / "docs" / "understand").glob("*.ipynb"))
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
SHORTER = {"steps=80": "steps=8", "text(79": "text(7", "in range(400)": "in range(40)", "repeat=5": "repeat=1"}
MACHINE_PATH = re.compile(r"/(home|mnt|opt|private|root|tmp|Users|var|work)/")


def execute(last: str, **parameters) -> dict[str, str]:
    """Run the notebook in its folder, with other parameters, until the cell titled `last`. Return the printed texts."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    titles = re.findall(r"\*\*\d\. (.*?)\.\*\*", "".join(cell.source for cell in notebook.cells))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(titles) == len(code)
    for name, value in parameters.items():
        setting = f"{name} = {value!r}".replace("\\", r"\\")
        code[0].source, times = re.subn(rf"(?m)^{name} = .*(?=  # @param)", setting, code[0].source)
        assert times == 1, name
    notebook.cells = code[: titles.index(last) + 1]
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    return {
        title: "".join(output.text for output in cell.outputs)
        for title, cell in zip(titles, notebook.cells, strict=False)
    }


def test_it_is_committed_as_it_should_be():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert code[0].metadata.tags == ["parameters"]
    assert notebook.metadata.accelerator == "GPU"  # what Colab gives it
    assert NOTEBOOK.stat().st_size < 10_000


def test_a_machine_is_lost_and_the_same_cells_go_on(store, tmp_path, monkeypatch):
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("HF_HOME", str(tmp_path / "home"))):
        monkeypatch.setenv(name, value)
    run, drive = tmp_path / "machine" / "tiny", tmp_path / "drive"
    parameters = {"DATA": str(store.folder), "RUN": str(run), "DRIVE": str(drive), "PROMPT": 'the "$x'}
    parameters["FLAGS"] = " ".join(flags(**TINY, vocab_size=300))
    (run.parent / "compiled").mkdir(parents=True)
    (run.parent / "compiled" / "kernel").touch()  # as if the run had compiled something
    (tool := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: a GPU\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = execute("Measure the speed", **parameters)
    assert "Device:  CPU" in said["Measure the speed"]
    assert "step_00000006 is in" in said["Measure the speed"]

    shutil.rmtree(run.parent)
    shutil.rmtree(drive / "tiny" / "checkpoints" / "step_00000006")  # the machine went before it was copied
    said = execute("End the session", **parameters)
    assert (run.parent / "compiled" / "kernel").is_file()
    assert "step_00000003 is restored" in said["Train"]
    assert "resuming from step_00000003" in " ".join(said["Train"].split())  # wrapped to the terminal
    lines = re.findall(r"(?m)^step (\d)/6  loss .* lr .*$", said["Train"])
    assert lines == ["4", "5", "6"]  # and no progress bar:
    assert not any("\x1b" in text for text in said.values())
    assert said["Generate text"].startswith("the")
    assert "Not uploaded (--dry_run)" in said["Publish"]
    assert [path.name for path in sorted((drive / "tiny" / "checkpoints").glob("step_*"))][-1] == "step_00000006"


def assert_no_errors(notebook) -> None:
    """Raise an AssertionError for an error, a warning or a path of this machine in an output."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not MACHINE_PATH.search(text), text


@every_lesson
def test_a_lesson_is_committed_with_its_outputs(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # once, from top to bottom
    assert not any("execution" in cell.metadata for cell in notebook.cells)  # timestamps
    assert_no_errors(notebook)
    assert lesson.stat().st_size < 250_000


@every_lesson
def test_a_lesson_runs(lesson, monkeypatch, capfd):
    """In this process, because a kernel takes as long to start as a lesson, and on a tenth of the standard library."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="lessons need: pip install matplotlib")
    text_files = packages.text_files
    monkeypatch.setattr(packages, "text_files", lambda *parts: text_files(*parts)[::10])
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(lesson.parent)
    names = {"__name__": "__main__"}
    for cell in nbformat.read(lesson, as_version=4).cells:
        if cell.cell_type == "code":
            source = functools.reduce(lambda text, words: text.replace(*words), SHORTER.items(), cell.source)
            exec(compile(source, lesson.name, "exec"), names)
    if "folder" in names:
        names["folder"].cleanup()
    said = capfd.readouterr()
    assert not MACHINE_PATH.search(said.out)
    assert [line for line in said.err.splitlines() if not line.startswith("USDT:")] == []  # by PyTorch's profiler
