"""Only files written by this project are deleted; a user's folders with the names of a run are not changed."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train_accelerate
from common.atomic import unfinished_path, write_atomic
from common.removal import MARK, discard, is_marked, mark, renew
from conftest import REPOSITORY, TINY, append, assert_user_error, checkpoint_of, contents, flags, flip
from publishing import gguf_file
from publishing.demo import assemble_space
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import pretokenize
from tokenizer.corpus.units import CorpusArguments
from training import compare_runs, evaluate, sweep
from training.checkpoints.loading import find_model
from training.checkpoints.run_folder import RunFolder, may_hold_run
from training.step.model import ModelArguments

STATUS = ("status.json", "events.jsonl")
THEIRS = ("config.yaml", "report.md", "model/model.safetensors", "checkpoints/epoch-3/model.safetensors")
THEIRS += ("hub/README.md", "evaluation/results.csv", "lm_eval/results_1.json", "profile/me.txt", *STATUS)
NO_RUNS = [THEIRS, THEIRS[:1], (".git/config",), STATUS, ("checkpoints/step_00000003/manifest.json",)]


def write(folder: Path, *names: str) -> dict[str, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"name: {name}\n")
    return contents(folder)


def refuse(folder: Path, sentence: str, function: Callable, *arguments, **settings) -> None:
    """Assert that a call is refused with a sentence and changes nothing in the folder."""
    original = contents(folder)
    assert_user_error(sentence, function, *arguments, **settings)
    assert contents(folder) == original


@pytest.mark.parametrize("names", NO_RUNS)
def test_a_folder_that_is_not_a_run_is_refused_and_unchanged(train, tmp_path, names):
    write(tmp_path, "file", *(f"p/{name}" for name in names))
    sentence = "p exists and is not a run folder; use another --output_dir"
    refuse(tmp_path, sentence, train, tmp_path / "p", "--overwrite_output_dir")
    refuse(tmp_path, "p is neither a run folder nor a", train, None, resume_from_checkpoint=tmp_path / "p")
    sentence = "p exists and is not a backup of a run; choose another --backup_dir"
    refuse(tmp_path, sentence, train, tmp_path / "runs" / "p", backup_dir=tmp_path)
    refuse(tmp_path, "file exists and is not a run folder", train, tmp_path / "file")
    sentence = r"backup_dir is .*/file, which is a file; name a folder on another drive"
    refuse(tmp_path, sentence, train, tmp_path / "run", backup_dir=tmp_path / "file")


def test_overwriting_a_run_keeps_the_files_that_no_run_wrote(train, finished_copy, capsys):
    run = finished_copy
    assert is_marked(run, "run")
    user_files = ("thesis.txt", "model/notes.md", "checkpoints/step_00000003/eval.json")
    user_files += ("evaluation/mine.csv", "hub/README.md", "lm_eval/my/own/results_1.json")
    content = write(run, *user_files)
    train(run, "--overwrite_output_dir", "--save_total_limit", "1", max_steps=3)
    files = contents(run)
    for name in user_files:
        remains = re.sub("^(model|checkpoints|evaluation|lm_eval)/", r"replaced.kept/\1/", name)
        assert files[remains] == content[name]
    sentence = f"Files in {run} that no run wrote, or that are in use, were moved to {run}/replaced.kept."
    assert sentence in capsys.readouterr().out
    assert [*(run / "checkpoints").iterdir()] == [checkpoint_of(run, 3)]


def test_a_planted_link_is_neither_followed_nor_kept(finished_copy, train, tmp_path):
    run, events, thesis = finished_copy, finished_copy / "events.jsonl", tmp_path / "thesis.md"
    original = write(tmp_path, "thesis.md")["thesis.md"]
    for name in ("status.json.tmp", "new/.gpt2scratch.json.tmp"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(thesis)
    write_atomic(run / "status.json", "{}")
    mark(run / "new", "run")
    assert is_marked(run / "new", "run")
    events.unlink()
    events.symlink_to(thesis)
    assert_user_error(r"events\.jsonl is a link, through which the run would write elsewhere", train, run, max_steps=7)
    assert thesis.read_bytes() == original
    events.unlink()
    append(run / "config.yaml", "overwrite_output_dir: true\n")
    resumes = ["--resume_from_checkpoint", str(run), "--max_steps", "7"]
    assert_user_error(r"config\.yaml sets overwrite_output_dir, which only a comm", train_accelerate.main, resumes)


def test_files_of_the_user_are_not_replaced_by_files_of_the_same_name(finished_copy, tmp_path, monkeypatch):
    run, user_files = finished_copy, tmp_path / "mine"
    original = write(user_files, "thesis.txt", "comparison.png", "evaluation/evaluation.md")
    (user_files / "link.png").symlink_to("thesis.txt")
    (run / "evaluation").symlink_to(user_files / "evaluation")
    monkeypatch.chdir(user_files)
    sentence = "exists and was not written by this command; move it elsewhere"
    for name in ("thesis.txt", "link.png", "evaluation"):
        assert_user_error(sentence, gguf_file.main, [str(run), name])
        assert_user_error(sentence, compare_runs.main, [str(run), "--output", name])
    assert_user_error(sentence, compare_runs.main, [str(run)])
    assert_user_error(sentence, evaluate.main, [str(run), "--memorization"])
    assert_user_error(sentence, sweep.main, ["--vary", "seed=1", "--output_dir", "."])
    assert contents(user_files).items() >= original.items()
    (run / "evaluation").unlink()
    for _ in range(3):  # the same command again; the last time, the folder is like that of an older version
        gguf_file.main([str(run), "mine.gguf"])
        compare_runs.main([str(run), "--output", "mine.png"])
        evaluate.main([str(run), "--compare", "--compare_documents", "1"])
        (run / "evaluation" / MARK).unlink()


def test_a_run_is_not_replaced_if_the_new_one_cannot_start(train, store, finished, finished_copy, tmp_path):
    run, defaults = finished_copy, dict.fromkeys(vars(ModelArguments()))
    write(run, "mine/a.txt")
    (tmp_path / "link").symlink_to(run / "model")

    def refuse_run(sentence, source, data=store.folder, **options):
        settings = {"init_from": source, "data": data, **defaults, **options}
        refuse(run, sentence, train, run, "--overwrite_output_dir", **settings)

    for source in (run, run / "model", checkpoint_of(run, 3), tmp_path / "link"):
        refuse_run("^init_from .* is in .*run, which --overwrite_output_dir replaces; use another --output_dir", source)
    sentence = "data .* is in .*\ntokenizer .* is in .*\nresume_from_checkpoint .* is in"
    refuse_run(sentence, None, run / "mine", tokenizer=run / "model", resume_from_checkpoint=run)
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1000]), spoil):
        broken = shutil.copytree(finished / "model", tmp_path / "broken", dirs_exist_ok=True)
        damage(broken / "model.safetensors")
        sentence = "cannot be loaded" if damage != spoil else r"broken has weights that are not finite \(transformer"
        refuse_run(sentence, broken)
    flip(shutil.copytree(store.folder, tmp_path / "changed") / "train.bin")
    refuse_run("train.bin", finished / "model", tmp_path / "changed")


def spoil(path: Path) -> None:
    tensors = {name: tensor / 0 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_replaced_run_is_kept_until_the_first_checkpoint(train, store, finished_copy, spawn):
    run, replaces, original = finished_copy, "--overwrite_output_dir", contents(finished_copy)
    endless = TINY | {"data": store.folder, "output_dir": run, "max_steps": 10**6, "save_steps": 10**6, "seed": 7}
    for _ in range(2):  # the same command again
        process = spawn("train_accelerate.py", *flags(**endless), replaces)
        assert any(line.startswith("First step") for line in process.stdout)  # reads until then
        process.kill()
        process.wait()
        assert contents(run / "replaced").items() > {(name, original[name]) for name in original if name != MARK}
    hint = f"there is no checkpoint yet, and the run before it is in {run}/replaced"
    assert_user_error(f"run holds no model yet: {hint}", find_model, str(run))
    assert_user_error(hint, train, None, resume_from_checkpoint=run)
    assert_user_error("contains another run .*seed", train, run, seed=7)  # without the flag, the run is put back
    assert contents(run) == original
    mark(run / "replaced", "replaced")
    (run / "checkpoints").rename(run / "replaced" / "checkpoints")  # as if killed after the first of several renames
    train(run)
    assert RunFolder(run).newest_step() == 6
    train(run, replaces, max_steps=3)
    assert (RunFolder(run).newest_step(), (run / "replaced").exists()) == (3, False)


def test_pruning_keeps_the_files_that_no_run_wrote(train, a_copy):
    first = checkpoint_of(a_copy, 3)
    (first / "eval.json").write_text("mine")
    (a_copy / "model" / "notes.md").write_text("mine")
    train(None, resume_from_checkpoint=a_copy, save_total_limit=1, max_steps=9)
    assert not first.exists()
    assert (first.with_suffix(".kept") / "eval.json").read_text() == "mine"
    assert [path.name for path in (a_copy / "model.kept").iterdir()] == ["notes.md"]


@pytest.mark.parametrize("remainder", ["checkpoints", "status"])
def test_an_old_run_without_a_mark_is_recognized_and_marked_on_resume(train, a_copy, remainder):
    (a_copy / MARK).unlink()
    if remainder == "checkpoints":
        for name in STATUS:
            (a_copy / name).unlink()
        train(None, resume_from_checkpoint=a_copy, max_steps=6)
    else:  # killed before its first checkpoint
        for name in ("checkpoints", "model"):
            shutil.rmtree(a_copy / name)
        train(a_copy, max_steps=3)
    assert is_marked(a_copy, "run")


def test_a_model_without_its_checkpoints_is_not_replaced(train, run, a_copy):
    shutil.rmtree(a_copy / "checkpoints")
    sentence = "tiny contains a model, but no checkpoint that this command can resume"
    for options in ({}, {"seed": 3}, {"resume_from_checkpoint": run, "eval_strategy": "no"}):
        refuse(a_copy, sentence, train, a_copy, **options, max_steps=3)
    train(a_copy, "--overwrite_output_dir", max_steps=3)
    (a_copy / "config.yaml").unlink()
    assert_user_error(r"tiny has no config.yaml; restore it from a backup", train, a_copy, max_steps=3)


def test_a_folder_with_another_name_is_not_a_checkpoint(train, a_copy):
    run = a_copy
    shutil.copytree(checkpoint_of(run, 3), run / "checkpoints" / "step_9")
    train(None, resume_from_checkpoint=run, max_steps=6)
    assert RunFolder(run).newest_step() == 6
    shutil.copytree(run / "model", run / "checkpoints" / "my_step_00000003" / "model")
    copies = {name: data for name, data in contents(run / "checkpoints").items() if not name.startswith("step_0")}
    train(run, "--overwrite_output_dir", max_steps=3)
    assert contents(run / "replaced.kept" / "checkpoints") == copies


def test_a_space_folder_keeps_other_files(tmp_path):
    pytest.importorskip("gradio")
    write(tmp_path / "demo", "app.py")
    sentence, assemble = "demo exists and was not written by this command", partial(assemble_space, ["me/tiny"])
    refuse(tmp_path, sentence, assemble, tmp_path / "demo", "Demo")
    space = assemble(tmp_path / "space", "Demo")
    (space / "mine.txt").write_text("mine")
    assert assemble(space, "Demo") == space
    assert (tmp_path / "space.kept" / "mine.txt").read_text() == "mine"


def test_an_unfinished_folder_keeps_other_files(tmp_path):
    write(tmp_path / ".x.unpacking", "train.bin", "mine.txt")
    with unfinished_path(tmp_path / "x", ".unpacking", ("train.bin",)) as draft:
        write(draft, "train.bin")
    assert sorted(contents(tmp_path)) == [".x.unpacking.kept/mine.txt", "x/train.bin"]


@pytest.mark.parametrize("names", [("parts/mine.txt", "store/thesis/a.txt"), ("plan.json",)])
def test_pretokenizing_replaces_no_other_files(tmp_path, names):
    write(tmp_path / "text", "a.txt", "b.txt")
    unfinished, store, disk = (tmp_path / name for name in (".store.unfinished", "store", "disk"))
    write(unfinished, *names)
    recipe = Recipe([str(tmp_path / "text")], CorpusArguments(validation_fraction=0.5))
    sentence = r"\.store\.unfinished(/plan\.json is damaged| exists and was not written by)"
    refuse(unfinished, sentence, pretokenize, recipe, store)
    shutil.rmtree(unfinished)
    disk.mkdir()
    store.symlink_to(disk)
    assert pretokenize(recipe, store).folder == disk
    original = write(tmp_path / ".disk.unfinished", *names)
    pretokenize(recipe, store)
    assert contents(tmp_path / ".disk.unfinished") == original
    (store / "inputs.json").write_text("{")
    assert_user_error(r"inputs\.json is missing or damaged \(Expecting", pretokenize, recipe, store)


def test_discard_deletes_only_known_files_and_follows_no_link(tmp_path):
    write(tmp_path / "elsewhere", "a.bin")
    for _ in range(2):
        write(tmp_path / "x", "a.bin", "sub/a.bin", ".DS_Store", "sub/.tmpBLcpas")
        (tmp_path / "x" / "link").symlink_to(tmp_path / "elsewhere")
        remains = discard(tmp_path / "x", ("a.bin", "sub/*"))
    assert remains == tmp_path / "x.kept.1"
    assert [path.name for path in remains.iterdir()] == ["link"]
    assert (tmp_path / "elsewhere" / "a.bin").exists()
    write(tmp_path / "x", "a.bin", ".nfs0001")  # NFS keeps a deleted file that a process reads
    assert discard(tmp_path / "x", ("a.bin",)) == tmp_path / "x.kept.2"
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    assert discard(tmp_path / "linked", ("*",)) is None
    assert not (tmp_path / "linked").is_symlink()
    assert (tmp_path / "elsewhere" / "a.bin").exists()


def test_a_mark_that_could_not_be_written_is_no_file_of_a_user(tmp_path):
    """As on a full drive: the file was created, but has no content."""
    (run := tmp_path / "run").mkdir()
    for name, is_ours in ((".gpt2scratch.json.tmp", True), ("notes.tmp", False)):
        (run / name).touch()
        assert may_hold_run(RunFolder(run)) is is_ours


def test_a_folder_with_only_its_lock_may_hold_a_run(tmp_path):
    for name in ("run", "run[1]"):
        write(tmp_path / name, f".{name}.lock")
        assert may_hold_run(RunFolder(tmp_path / name))


def test_a_killed_removal_is_completed(tmp_path):
    write(tmp_path / ".x.removed", "a.bin", "mine.txt")
    write(tmp_path / "x", "a.bin")
    write(tmp_path / "fresh", "b.bin")
    assert discard(tmp_path / "x", ("a.bin",), replacement=tmp_path / "fresh") == tmp_path / "x.kept"
    assert sorted(contents(tmp_path)) == ["x.kept/mine.txt", "x/b.bin"]


def test_a_mark_is_valid_for_one_kind(tmp_path):
    mark(tmp_path / "x", "run")
    assert is_marked(tmp_path / "x", "run")
    assert_user_error("x exists and was not written by this command", renew, tmp_path / "x", "hub", ())
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert_user_error("link exists", renew, tmp_path / "link", "run", ())
    write(tmp_path / "y", "a.bin")
    (tmp_path / "y" / MARK).symlink_to(tmp_path / "x" / MARK)
    assert not is_marked(tmp_path / "y", "run")
    mark(tmp_path / "y", "hub")
    assert is_marked(tmp_path / "x", "run")
    for content in ("of another program", ""):
        (tmp_path / "z").mkdir(exist_ok=True)
        (tmp_path / "z" / MARK).write_text(content)
        assert not may_hold_run(RunFolder(tmp_path / "z"))


def test_no_other_code_deletes_folders():
    folders = "common modeling_gpt2scratch tokenizer training publishing examples".split()
    files = [*REPOSITORY.glob("*.py"), *(path for name in folders for path in (REPOSITORY / name).rglob("*.py"))]
    assert len(files) > 80
    assert [path.name for path in files if "rmtree(" in path.read_text(encoding="utf-8")] == []
