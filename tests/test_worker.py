"""Worker processes that are killed at any time, and shards on several machines: the store is the same to the byte."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Timer

import psutil
import pytest

import conftest
from conftest import REPOSITORY, assert_user_error, error_of, is_running, prose, wait_until
from tokenizer.build import worker
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import StoreBuilder, pretokenize
from tokenizer.build.worker import Part, UnitProcessor, Workers
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus import units as corpus
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments
from tokenizer.store.store import TokenStore

UNIT_BYTES = 30_000
# The command with units of 30 kB instead of 16 MiB, so that a small text has many units.
PROGRAM = f"""
import resource, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from common.command_line import run
from tokenizer.corpus import units
from tokenizer.pretokenize import main
units.UNIT_BYTES = {UNIT_BYTES}
resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
sys.stdout.reconfigure(line_buffering=True)
run(main)
"""
FLAGS = ("--output", "store", "--vocab_size", "400", "--sample_bytes", "100000", "--dedup", "exact")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Folder with 0.9 MB of text in all kinds of files; some documents occur twice, some span several units."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(prose(i % 9, 8000), encoding="utf-8")
    (folder / "long.txt").write_text("naïve 雪 " + prose(20, 60_000), encoding="utf-8")
    records = [{"text": f"{i % 400}: {prose(i % 400, 60)}"} for i in range(1000)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def start(texts, popen, tmp_path_factory):
    """Function that starts the command in a folder, where files can have up to `file_bytes`."""
    programs = tmp_path_factory.mktemp("programs")

    def begin(folder: Path, *more: object, file_bytes: int = resource.RLIM_INFINITY) -> subprocess.Popen:
        program = programs / f"limit{file_bytes}.py"
        if not program.exists():  # a running process may read it
            program.write_text(PROGRAM.replace("FILE_BYTES", str(file_bytes)))
        return popen(program, "--input", texts, *FLAGS, *more, folder=folder)

    return begin


def finish(process: subprocess.Popen) -> str:
    said, wrong = process.communicate(timeout=600)
    assert (process.returncode, wrong) == (0, "")
    return said


def failed(process: subprocess.Popen) -> str:
    """Return the only error line of a process that fails."""
    _, wrong = process.communicate(timeout=600)
    assert process.returncode == 1, wrong
    assert re.fullmatch(r"error: .*\.\n", wrong)
    return wrong.strip()


def contents(store: Path) -> dict[str, bytes]:
    """Return the content of all files of a store, without the recorded command."""
    found = conftest.contents(store)
    command = json.loads(found["metadata.json"])["command"]
    for name in ("metadata.json", "report.md"):
        for text in (json.dumps(command, ensure_ascii=False), command):
            found[name] = found[name].replace(text.encode(), b"")
    return found


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    assert "603 documents that repeat" in finish(start(folder, "--num_proc", 1))
    assert len(os.listdir(folder)) == 2, "the store and its lock"
    return contents(folder / "store")


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def recipe_of(texts: Path) -> Recipe:
    vocabulary = VocabularyArguments(vocab_size=400, sample_bytes=100_000)
    return Recipe([str(texts)], vocabulary=vocabulary, dedup=DedupArguments("exact"))


@pytest.fixture
def planned(texts, tmp_path, monkeypatch) -> StoreBuilder:
    monkeypatch.setattr(corpus, "UNIT_BYTES", UNIT_BYTES)
    builder = StoreBuilder(recipe_of(texts), tmp_path / "store", lambda text: None, Workers(1))
    assert builder.plan.units
    return builder


@pytest.mark.parametrize(
    "file", ["store/tokenizer/tokenizer.json", "plan.json", "parts/000001.json", "store/train.bin", "merged.json"]
)
def test_same_command_resumes_after_a_kill_at_any_file(start, expected, tmp_path, file):
    with start(tmp_path, "--num_proc", 2) as process:
        wait_until((tmp_path / ".store.unfinished" / file).exists)
        workers = workers_of(process)
        process.kill()
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers))
    done = len(list(tmp_path.glob(".store.unfinished/parts/*.json")))
    said = finish(start(tmp_path, "--num_proc", 3))  # any number of processes builds the same store
    if "merge" in file:
        assert f"Resuming store: {done} of {done} units of work are done." in said
    assert contents(tmp_path / "store") == expected
    assert sorted(os.listdir(tmp_path)) == [".store.lock", "store"]


def test_spawned_processes_all_start_and_end(monkeypatch):
    monkeypatch.setattr(worker, "START_METHOD", "spawn")  # of macOS
    with closing(Workers(2)) as workers:
        workers.start(20)
        assert len(workers.processes) == 2
        for process in workers.processes:
            os.kill(process.pid, signal.SIGINT)  # Ctrl-C during its imports
        assert workers.pool.submit(int).result() == 0
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    wait_until(lambda: not multiprocessing.active_children())


def test_killed_worker_is_reported_in_one_sentence(planned):
    sentence = r"^A worker process was killed, often because memory ran out\. .*--num_proc 1 uses the least memory\.$"
    with closing(Workers(2)) as workers:
        workers.start(20)
        for process in workers.processes:
            os.kill(process.pid, signal.SIGSTOP)  # no unit can be done before the kill
        Timer(0.2, process.kill).start()
        assert_user_error(sentence, lambda: list(workers.process(planned.work, list(range(20)))))
    wait_until(lambda: not multiprocessing.active_children())


def test_ctrl_c_ends_all_processes_and_the_same_command_resumes(start, expected, tmp_path):
    with start(tmp_path, "--num_proc", 2) as process:
        wait_until((tmp_path / ".store.unfinished" / "parts" / "000000.json").exists)
        workers = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to all processes of the group
        _, wrong = process.communicate(timeout=600)
    assert (process.returncode, wrong) == (130, "interrupted\n")
    assert not any(worker.is_running() for worker in workers)
    finish(start(tmp_path, "--num_proc", 2))
    assert contents(tmp_path / "store") == expected


@pytest.mark.parametrize("file_bytes", [0, 1000, 40_000])
def test_full_disk_ends_in_one_sentence_and_the_same_command_resumes(start, expected, tmp_path, file_bytes):
    """A limit on file sizes stops the first file, the tokenizer, or the merged tokens."""
    with start(tmp_path, "--num_proc", 2, file_bytes=file_bytes) as process:
        sentence = failed(process)
    assert re.search(r"\(File too large|\(os error 27\)", sentence)
    assert "correct that, and the same command resumes." in sentence
    finish(start(tmp_path, "--num_proc", 2))
    assert contents(tmp_path / "store") == expected


@pytest.mark.parametrize(("weights", "needed"), [([], 2), ([3.0, 0.5], 4.5), ([0.5, 0.5], 1)])
def test_missing_disk_space_is_reported_before_the_work(tmp_path, monkeypatch, weights, needed):
    for path in (files := [tmp_path / "a.txt", tmp_path / "b.txt"]):
        path.write_text("x" * 10**6)
    corpus, vocabulary = CorpusArguments(sample_by="line"), VocabularyArguments(tokenizer_type="character")
    recipe = Recipe([*map(str, files)], corpus, vocabulary, weights=weights)
    for free, fits in ((needed * 2 * 10**6 - 9, False), (needed * 2 * 10**6 + 9, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(0, 0, free))
        builder = StoreBuilder(recipe, tmp_path / "store", lambda text: None, Workers(1))
        if fits:
            assert builder.plan.units
        else:
            sentence = r"tokens will need about \d\.\d MB, and .* has \d\.\d MB free; make room"
            assert_user_error(sentence, lambda builder=builder: builder.plan)
            assert not list(tmp_path.rglob("plan.json"))  # with which the same command would resume


@pytest.fixture
def begun(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkdir("texts")
    for name in "abc":
        Path(f"texts/{name}.txt").write_text(prose(ord(name), 800))
    assert StoreBuilder(recipe_of(Path("texts")), Path("store"), print, Workers(1)).plan.units
    return tmp_path


def refused(recipe: Recipe) -> str:
    [sentence] = error_of(pretokenize, recipe, Path("store"), lambda text: None).splitlines()
    assert sentence.startswith("store was started with other text or settings (")
    assert sentence.endswith("; undo the change, or delete .store.unfinished to start over.")
    return sentence.split("(")[1].split(")")[0]


CHANGED = (b'"seed": 1337', b'"seed": 1338', "it was changed since it was written")
NOT_UTF_8 = (b'"', b"\xff", "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte")


@pytest.mark.parametrize(("old", "new", "problem"), [CHANGED, NOT_UTF_8])
def test_changed_plan_is_refused(begun, old, new, problem):
    path = Path(".store.unfinished/plan.json")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    sentence = f"{path} is damaged ({problem}); delete .store.unfinished to start over."
    assert error_of(pretokenize, recipe_of(Path("texts")), Path("store")) == sentence


def test_changed_settings_and_files_are_named_and_undoing_them_resumes(begun):
    of = {"inputs": ["texts"], "vocabulary": recipe_of(begun).vocabulary, "dedup": DedupArguments("exact")}
    assert refused(Recipe(**of, seed=2)) == "seed was 1337 and is 2"
    several = Recipe(**of, corpus=CorpusArguments(strict=True, sample_by="line", text_column="x"), weights=[2.0])
    assert refused(several).endswith("; strict was False and is True; and 1 more")
    recipe, file = recipe_of(Path("texts")), Path("texts/b.txt")
    (other := Path("texts/d.txt")).write_text("new")
    assert refused(recipe) == "texts/d.txt is new"
    other.unlink()
    content, stat = file.read_text(), file.stat()
    file.unlink()
    assert refused(recipe) == "texts/b.txt is not among the inputs now"
    file.write_text(content + "more")
    assert refused(recipe) == "texts/b.txt was changed"
    file.write_text(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    metadata = pretokenize(recipe, Path("store"), (said := []).append).metadata
    assert said[0] == "Resuming store: 0 of 1 units of work are done."
    assert metadata.train.documents + metadata.val.documents >= 3


@pytest.mark.parametrize("change", [lambda text: text + "more", lambda text: ""])
def test_file_changed_while_it_is_read_is_named(begun, monkeypatch, change):
    file, process = Path("texts/b.txt"), Workers.process

    def changed_meanwhile(*arguments) -> Iterator[Part]:
        file.write_text(change(file.read_text()))
        return process(*arguments)

    monkeypatch.setattr(Workers, "process", changed_meanwhile)
    sentence = r"^texts/b\.txt was changed while it was read: it had [\d,]+ bytes and now has [\d,]+\. "
    assert_user_error(sentence, pretokenize, recipe_of(Path("texts")), Path("store"), lambda text: None)
    assert not Path("store").exists()


def test_files_added_to_the_output_during_the_work_are_kept(planned, tmp_path, monkeypatch):
    (store := tmp_path / "store").mkdir()
    (store / "notes.txt").write_text("mine")
    sentence = "store exists and is not an empty folder, or a mount; choose another --output"
    assert_user_error(sentence, planned.finish, is_merge=False)
    shutil.rmtree(store)
    with monkeypatch.context() as patch:  # its folder could not be replaced
        patch.setattr(Path, "is_mount", lambda path: True)
        assert_user_error(sentence, planned.finish, is_merge=False)
    planned.finish(is_merge=False)
    assert TokenStore.is_store(store)


def test_concurrent_shards_and_a_merge_build_the_same_store_even_after_a_kill(start, expected, tmp_path):
    """As on several machines, which share only a folder."""
    shard = partial(start, tmp_path, "--num_proc", 1, "--shard")
    with shard("0/3") as killed:
        wait_until(lambda: list(tmp_path.glob(".store.unfinished/parts/*.json")) or killed.poll() is not None)
        killed.kill()
    for number, process in enumerate([shard(f"{i}/3") for i in range(3)]):
        assert finish(process).splitlines()[-1].startswith(f"Shard {number}/3 is done: ")
    assert not (tmp_path / "store").exists()
    finish(start(tmp_path, "--merge"))
    assert contents(tmp_path / "store") == expected


def test_merge_requires_all_shards_and_the_plain_command_completes_units_in_any_order(planned, expected, tmp_path):
    command = partial(pretokenize, planned.recipe, planned.folder, planned.say, 1)
    assert command(shard=(1, 3)) is None
    sentence = r"units of \S+ are not done; run the missing shards, or run the command without --merge"
    assert_user_error(sentence, command, is_merge=True)
    assert not (tmp_path / "store").exists()
    processor = UnitProcessor(planned.work)
    for number in reversed(range(2, len(processor.units), 3)):
        processor.process(number)
    command()
    assert contents(tmp_path / "store") == expected


def test_the_documented_steps_of_datatrove_build_the_same_store(texts, expected, tmp_path, launch):
    """datatrove pickles them with dill, and a task loads them in a process without their program."""
    pytest.importorskip("datatrove")
    page = (REPOSITORY / "docs" / "large_corpora.md").read_text(encoding="utf-8")
    steps = re.search(r"```python\n(.*?)\nslurm = ", page, re.DOTALL)[1]
    steps = re.sub("flags = .*", f"flags = {['--input', str(texts), *FLAGS]}", steps)
    (tmp_path / "steps.py").write_text(f"{steps}\nimport dill\ndill.dump([shard, merge], open('steps', 'wb'))")
    task = "import dill\nfrom tokenizer.corpus import units\nshard, merge = dill.load(open('steps', 'rb'))\n"
    task += f"units.UNIT_BYTES = {UNIT_BYTES}\nshard(None, 0, 2), shard(None, 1, 2), merge(None, 0, 1)"
    for command in (("steps.py",), ("-c", task)):
        done = launch(*command, folder=tmp_path, PYTHONPATH=str(REPOSITORY))
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "store") == expected
