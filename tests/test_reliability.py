"""Kills, stops, memory and disk errors and damaged files, with real processes; the final weights are equal."""

import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_publishing import card_of

import generate
import train_accelerate
from common.removal import mark
from conftest import (
    ACCELERATE,
    TINY,
    TWO_PROCESSES,
    Bomb,
    append,
    assert_equal,
    assert_same_run,
    assert_user_error,
    checkpoint_of,
    contents,
    error_of,
    flags,
    lines,
    logged,
    metrics,
    prose,
    reset_accelerate,
    status,
    tokenized,
    untimed,
    wait_until,
    weights,
)
from training.checkpoints.checkpoint import _seal, complete_checkpoints, damage, load_state
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.saver import refuse_full_disk
from training.checkpoints.status import write_status
from training.guard.lock import locked
from training.runtime.device import DeviceArguments, decide
from training.runtime.launcher import launch_words
from training.step.tensors import read_tensors

DROPOUT = {"resid_pdrop": 0.1, "attn_pdrop": 0.1}
LONG = {**TINY, **DROPOUT, "max_steps": 150, "save_steps": 1, "save_total_limit": 1, "eval_steps": 40}


@pytest.fixture
def run(finished_copy):
    return finished_copy


@pytest.fixture
def start(spawn, store):
    def begin(output_dir: Path, *options: str, launch=(), threads: str | None = "1", **settings) -> subprocess.Popen:
        settings = {"data": store.folder, "output_dir": output_dir, **TINY, **settings}
        return spawn(*launch, "train_accelerate.py", *flags(**settings), *options, OMP_NUM_THREADS=threads)

    return begin


def steps_logged(run) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.is_file() else 0


def test_a_run_killed_at_random_moments_loses_nothing(train, start, tmp_path):
    settings = LONG | {"max_steps": 100}
    straight = train(tmp_path / "straight", **settings)
    run, chance, newest = tmp_path / "killed", random.Random(0), 0
    for _ in range(4):
        original, newest = newest, kill_after_a_save(start(run, **settings), run, newest, chance.uniform(0.0, 0.3))
        complete = complete_checkpoints(run / "checkpoints")
        assert [damage(checkpoint) for checkpoint in complete] == [None] * len(complete) != []
        assert newest >= original
    train(run, **settings)
    assert_same_run(straight, run)
    assert not list((run / "checkpoints").glob(".*"))
    kinds = [event["event"] for event in lines(run / "events.jsonl")]
    assert (kinds.count("begun"), kinds.count("resumed"), kinds[-1]) == (1, 4, "finished")


def test_a_killed_run_ends_with_the_same_weights_at_default_settings(start, tmp_path):
    """As a long run: compiled if there is a C++ compiler, in the device's precision, on two threads; the sizes work for
    both."""
    compiles = decide(DeviceArguments(), 64).torch_compile
    settings = {"torch_compile": compiles, "mixed_precision": None, "n_layer": 1, "n_embd": 96, "n_positions": 64}
    settings |= {**DROPOUT, "tokens_per_step": 1024, "max_steps": 24, "save_steps": 4, "eval_steps": 12, "threads": "2"}
    straight, killed_run = tmp_path / "straight", tmp_path / "killed"
    output, errors = start(straight, **settings).communicate(timeout=1200)
    assert ("CPU (2 threads)" in output, errors) == (True, "")
    newest = kill_after_a_save(start(killed_run, **settings), killed_run, 0, 0.1)
    assert 0 < newest < 24
    assert start(killed_run, **settings).wait(1200) == 0
    assert_equal(weights(straight), weights(killed_run))
    expectation, result = ([line for line in untimed(run) if line["step"] > newest] for run in (straight, killed_run))
    assert result == expectation


def kill_after_a_save(process: subprocess.Popen, run: Path, original: int, seconds: float) -> int:
    """Return the step of the newest checkpoint after the kill."""
    wait_until(lambda: RunFolder(run).newest_step() > original or process.poll() is not None)
    time.sleep(seconds)
    process.kill()
    process.wait()
    return RunFolder(run).newest_step()


def test_work_interrupted_by_a_kill_is_completed(finished, run, train):
    """Moments that a random kill rarely hits."""
    shutil.copytree(run / "model", run / ".model.unfinished")
    shutil.rmtree(run / "model")  # as if killed between the two renames of its replacement
    (unfinished := run / "checkpoints" / ".step_00000009.unfinished").mkdir()
    (unfinished / ".tmpBLcpas").touch()  # a temporary file of safetensors
    checkpoint_of(run, 6).rename(run / "checkpoints" / ".step_00000006.removed")
    append(run / "metrics.jsonl", '{"step": 5, "loss": 3.')  # a truncated line
    train(run)
    assert_same_run(finished, run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    shutil.rmtree(checkpoint_of(run, 6))
    original = (run / "metrics.jsonl").read_text().splitlines(True)
    (run / "metrics.jsonl").write_text("".join(original[:3]))  # killed between save and validation
    train(run)
    assert_same_run(finished, run)


def test_killing_the_launcher_ends_a_process_that_is_starting(start, tmp_path):
    launcher = start(tmp_path / "run", launch=ACCELERATE, max_steps=10**6)
    [process] = wait_until(psutil.Process(launcher.pid).children)
    time.sleep(0.3)
    launcher.kill()
    process.wait(timeout=120)
    assert not (tmp_path / "run").exists()


def test_a_deleted_run_folder_ends_in_one_sentence(start, tmp_path):
    process = start(tmp_path / "run", max_steps=10**6, save_steps=20, eval_strategy="no")
    wait_until(lambda: RunFolder(tmp_path / "run").newest_step() > 0)
    (tmp_path / "run").rename(tmp_path / "away")
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.count("\n")) == (1, 1)
    assert re.search("No such file or directory| is missing| has no manifest", errors)


def test_a_branch_does_not_change_its_run_and_the_same_command_resumes_it(run, train, tmp_path):
    arguments = ("--resume_from_checkpoint", str(checkpoint_of(run, 3)))
    other = train(tmp_path / "other", max_steps=1)
    assert_user_error("other contains another run", train, other, *arguments)
    assert_user_error("continued from step_00000003 to step_00000006", train, run, *arguments)
    branch = train(tmp_path / "branch", *arguments)
    assert_equal(weights(run), weights(branch))
    assert [entry["step"] for entry in logged(branch)] == [4, 5, 6]
    shutil.rmtree(checkpoint_of(branch, 6))
    checkpoint_of(branch, 3).mkdir()  # a state that no killed run leaves
    assert_user_error("damaged", train, branch, *arguments)
    for folder in (checkpoint_of(branch, 3), branch / "model"):  # otherwise refused
        shutil.rmtree(folder)
    train(branch, *arguments)
    assert_equal(weights(run), weights(branch))
    train(branch, *arguments)  # finished
    assert_user_error(r"contains another run \(learning_rate", train, branch, *arguments, learning_rate=0.02)
    sentence = r"contains another run \(first step 3 -> 6\)"
    assert_user_error(sentence, train, branch, resume_from_checkpoint=checkpoint_of(run, 6))
    (branch / "events.jsonl").unlink()
    train(branch, *arguments)  # its first step is not known


def test_a_lost_branch_is_restored_from_its_backup(run, train, tmp_path, capsys):
    (drive := tmp_path / "drive").mkdir()
    settings = {"resume_from_checkpoint": checkpoint_of(run, 3), "backup_dir": drive, "max_steps": 9}
    branch = train(tmp_path / "branch", **settings)
    shutil.rmtree(branch)
    train(branch, **settings)
    assert f"step_00000009 is restored from {drive}/branch" in capsys.readouterr().out
    shutil.rmtree(branch)
    assert_user_error("drive/branch contains another run", train, branch, **settings, learning_rate=0.02)
    later = settings | {"resume_from_checkpoint": checkpoint_of(run, 6)}
    assert_user_error(r"drive/branch contains another run \(first step 3 -> 6\)", train, branch, **later)
    settings |= {"resume_from_checkpoint": checkpoint_of(drive / "branch", 6), "max_steps": 12}
    train(branch, "--plan", "--plan_steps", "0", **settings)  # copies the checkpoint, as a command that fails
    train(branch, **settings, logging_steps=2)
    assert [entry["step"] for entry in logged(branch)] == [4, 5, 6, 8, 10, 12]
    assert [path.name for path in complete_checkpoints(drive / "branch" / "checkpoints")][-1] == "step_00000012"


def test_a_run_is_not_continued_by_the_backup_of_the_run_that_it_replaced(train, tmp_path):
    (drive := tmp_path / "drive").mkdir()
    run = train(tmp_path / "run", backup_dir=drive)
    train(run, "--overwrite_output_dir", backup_dir=tmp_path / "absent", learning_rate=0.02, max_steps=3)
    shutil.rmtree(run / "checkpoints")  # as if it was killed before its first checkpoint
    settings = {"resume_from_checkpoint": run, "backup_dir": drive, "learning_rate": None}
    assert_user_error(r"drive/run contains another run \(learning_rate", train, run, **settings)


def test_an_edited_report_is_renamed_when_its_run_continues(run, train):
    (run / "report.md").write_text("My page.")
    train(run, resume_from_checkpoint=run, max_steps=7)
    assert [path.read_text() for path in run.glob("report.edited-*.md")] == ["My page."]
    assert "My page." not in (run / "report.md").read_text()


def test_a_command_that_discards_steps_is_not_advised_again(run, start):
    shutil.rmtree(checkpoint_of(run, 6))
    for arguments in (["--resume_from_checkpoint", str(checkpoint_of(run, 3))], ["--overwrite_output_dir"]):
        process = start(run, *arguments, max_steps=10**6, save_steps=10**6, eval_strategy="no")
        next(line for line in process.stdout if line.startswith("step       9/"))
        process.terminate()
        output, errors = process.communicate(timeout=600)
        assert f"To resume, run:\n  python train_accelerate.py --resume_from_checkpoint {run}\n" in output, errors


def test_a_resumed_run_keeps_its_micro_batch(run, train):
    path = run / "events.jsonl"

    def resumed(max_steps: int, **batches: int) -> int:
        for event in (events := lines(path)):
            event.get("batches", {}).update(batches)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        train(run, resume_from_checkpoint=run, max_steps=max_steps)
        return [event["batches"]["micro_batch"] for event in lines(path) if "batches" in event][-1]

    assert resumed(7) == 4
    assert resumed(8, micro_batch=2, is_auto=False) == 4
    assert resumed(8, micro_batch=2) == 2
    assert resumed(9, micro_batch=2, processes=2) == 4


def test_a_launcher_that_starts_one_process_instead_of_two_is_refused(launch, tmp_path):
    command = (*ACCELERATE, "--cpu", "--num_processes", "2", "train_accelerate.py", "--output_dir", tmp_path / "run")
    result = launch(*command, fresh=True)  # the run reads the launcher's command line
    sentence = "error: accelerate launch was asked for several processes but started one"
    assert result.stderr.splitlines()[-1].startswith(sentence)
    assert (result.returncode, list(tmp_path.iterdir())) == (1, [])


def test_resume_command_names_the_options_of_the_launcher(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train_accelerate.py", "--data", "my.txt"])
    accelerate = "/home/me/bin/accelerate launch --quiet"
    torchrun = "torchrun --nnodes 2 --nproc_per_node 1 --master_addr 10.0.0.1"
    for given, expected in (
        (f"{accelerate} --use_fsdp", "accelerate launch --quiet --use_fsdp --num_processes 2"),
        (f"{accelerate} --num_processes=2 --config_file=a/b.yaml",) * 2,
        (f"/home/me/bin/{torchrun}", torchrun),
        ("-u -m torch.distributed.run", "python -u -m torch.distributed.run"),
        ("-m accelerate.commands.launch", "python -m accelerate.commands.launch --num_processes 2"),
    ):
        monkeypatch.setattr("training.runtime.launcher.LAUNCHER_LINE", [sys.executable, *given.split(), sys.argv[0]])
        assert launch_words() == [*expected.removeprefix("/home/me/bin/").split(), "train_accelerate.py"]


def test_sigterm_and_ctrl_c_save_print_the_resume_command_and_the_run_resumes_exactly(train, start, tmp_path):
    settings = {**LONG, "save_steps": 1000}
    straight, run = train(tmp_path / "straight", **settings), tmp_path / "run"
    ctrl_c = " Press Ctrl-C again to end the run immediately, without saving."
    for name, options, exit_code in (("SIGTERM", "", 143), ("SIGINT", ctrl_c, 130)):
        original, process = steps_logged(run), start(run, **settings)
        wait_until(lambda original=original: steps_logged(run) >= original + 4)
        process.terminate() if name == "SIGTERM" else os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=600)
        assert (process.returncode, errors) == (exit_code, f"Stopping after this step ({name}) and saving.{options}\n")
        step = steps_logged(run)
        newest = checkpoint_of(run, step)
        assert output.endswith(
            f"\nStopped after step {step} of 150 ({name}); {newest} is the last good checkpoint. To resume, run the "
            f"same command again, or:\n  python train_accelerate.py --resume_from_checkpoint {run}\n"
        )
        assert [status(run)[key] for key in ("state", "reason", "step")] == ["stopped", name, step]
        assert damage(newest) is None
    train(run, **settings)
    assert_same_run(straight, run)


def test_a_closed_output_does_not_end_the_run(start, tmp_path):
    """As with `| head` or a closed terminal."""
    run = tmp_path / "run"
    process = start(run, max_steps=200, eval_strategy="no", save_steps=200)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=600) == 0, process.stderr.read()
    assert status(run)["state"] == "finished"


LIMITED = """
import resource, psutil, train_accelerate
from common.command_line import run
from training.runtime.restart import restarting
%s
run(restarting(train_accelerate.main))
"""
STARVED = """if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
    limit = psutil.Process().memory_info().vms + (640 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))"""
LARGE = {"tokens_per_step": 262144, "max_steps": 2, "save_steps": 1, "eval_strategy": "no", "sample_tokens": 0}


def test_out_of_memory_halves_the_micro_batch_in_a_fresh_process(launch, store, train, tmp_path):
    run, settings = tmp_path / "run", TINY | LARGE
    # One arena, because each one reserves 64 MB of the address space. Limits from 480 to 820 MB gave the same result.
    limited_launch = partial(launch, "-c", LIMITED % STARVED, MALLOC_ARENA_MAX="1")
    result = limited_launch(*flags(data=store.folder, output_dir=run, **settings))
    assert result.returncode == 0, result.stderr
    assert "Out of memory with a micro-batch of 16,384" in result.stdout
    *_, batches = (event["batches"] for event in lines(run / "events.jsonl") if "batches" in event)
    assert batches["micro_batch"] * batches["accumulation"] == 16384 > batches["micro_batch"]
    settings |= {"per_device_train_batch_size": 16384}
    plenty = train(tmp_path / "plenty", **settings)
    actual, reference = ([entry["loss"] for entry in logged(path)] for path in (run, plenty))
    assert actual == pytest.approx(reference, abs=1e-6)
    refusal = limited_launch(*flags(data=store.folder, output_dir=tmp_path / "other", **settings))
    assert (refusal.returncode, "Traceback" in refusal.stderr) == (1, False)
    assert "Resume with --per_device_train_batch_size auto, which finds a size that fits" in refusal.stderr


def test_out_of_memory_in_one_process_of_two_halves_the_micro_batch_of_both(launch, store, tmp_path):
    """The restart needs no new thread, which could not start without memory."""
    script = tmp_path / "script.py"
    path = f"import os, sys; sys.path.insert(0, {os.getcwd()!r})\n"
    limit = 'if os.environ["LOCAL_RANK"] == "1" and resource.getrlimit'
    script.write_text(path + LIMITED % STARVED.replace("if resource.getrlimit", limit))
    settings = LARGE | {"tokens_per_step": 524288, "max_steps": 1, "data": store.folder, "output_dir": tmp_path / "run"}
    result = launch(*TWO_PROCESSES, script, *flags(**TINY | settings), MALLOC_ARENA_MAX="1")
    assert result.returncode == 0, result.stderr
    assert "Out of memory with a micro-batch of 16,384" in result.stderr
    assert status(tmp_path / "run")["state"] == "finished"


def test_a_full_disk_ends_in_one_sentence_and_keeps_the_last_checkpoint(launch, store, train, tmp_path):
    run = train(tmp_path / "run", max_steps=3)
    small_files = LIMITED % "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
    settings = TINY | {"data": store.folder, "resume_from_checkpoint": run, "save_total_limit": 1}
    result = launch("-c", small_files, *flags(**settings))
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (1, 1)
    for words in ("step 6 could not be written", "step_00000003 is the last good checkpoint"):
        assert words in result.stderr
    assert status(run)["state"] == "failed"
    assert [damage(path) for path in complete_checkpoints(run / "checkpoints")] == [None]
    assert not list((run / "checkpoints").glob(".*"))
    train(None, resume_from_checkpoint=run)
    assert status(run)["state"] == "finished"
    refuse_full_disk(RunFolder(run), 1000)  # checked before the first step
    words = r"^A checkpoint takes 1,333,333\.3 GB, and .* GB free; \S+step_00000006 is the last good checkpoint: free"
    assert_user_error(words, refuse_full_disk, RunFolder(run), 10**15)
    (run / "status.json.tmp").mkdir()  # no space for another file
    for reason in ("a longer reason", "full"):
        write_status(run / "status.json", "failed", 6, reason)
    assert (status(run)["state"], status(run)["reason"]) == ("failed", "full")


def test_every_missing_truncated_or_changed_file_is_detected(run):
    files = contents(checkpoint := checkpoint_of(run, 6))
    assert {"model.safetensors", OPTIMIZER, "training_state/state.json", "manifest.json"} <= files.keys()
    for path, content in ((checkpoint / name, content) for name, content in files.items()):
        for variant in (None, content[: len(content) // 2], bytes([content[0] ^ 1]) + content[1:]):
            path.unlink()
            if variant is not None:
                path.write_bytes(variant)
            assert damage(checkpoint) is not None, path.name
            assert RunFolder(run).newest_checkpoint(lambda text: None).name == "step_00000003"
            path.write_bytes(content)
    assert damage(checkpoint) is None


def test_pickles_are_never_loaded(run, train, tmp_path):
    crater = tmp_path / "crater"
    bomb = pickle.dumps(Bomb(crater))
    pickle.loads(bomb)
    crater.unlink()  # the bomb works
    names = "pytorch_model.bin optimizer.bin optimizer.pt scheduler.bin random_states_0.pkl rng_state.pth".split()
    checkpoints = list((run / "checkpoints").iterdir())
    for folder in [run / "model", *checkpoints, *(checkpoint / "training_state" for checkpoint in checkpoints)]:
        for name in names:
            (folder / name).write_bytes(bomb)
    train(None, resume_from_checkpoint=run, max_steps=8)
    (run / "model" / "model.safetensors").unlink()
    (run / "model" / "pytorch_model.bin").write_bytes(bomb)
    assert_user_error("cannot be loaded", generate.main, [str(run), "--prompt", "the"])
    assert not crater.exists()


def test_file_modes_follow_the_umask(train, tmp_path):
    original = os.umask(0o027)
    try:
        run = train(tmp_path / "run", max_steps=1)
    finally:
        os.umask(original)
    for name in contents(checkpoint := checkpoint_of(run, 1)):
        assert stat.S_IMODE((checkpoint / name).stat().st_mode) == 0o640, name


NONSENSE = [
    ({"position": {"step": 6, "sample": -5, "tokens": 0, "passed_over": []}}, "sample is -5"),
    ({"position": {"step": 3, "sample": 24, "tokens": 0, "passed_over": []}}, "step is 3"),
    ({"position": {"step": "6", "sample": 24, "tokens": 0, "passed_over": []}}, "step is '6'"),
    ({"position": {"step": 6, "sample": 24, "tokens": 0, "passed_over": [[9, 3]]}}, "passed_over"),
    ({"settings": {}}, "data"),
    ({"losses": [float("nan")]}, "it contains NaN"),
    ({"unlogged": 10**9}, "unlogged"),
    ({"grad_scaler": {"scale": "x"}}, "grad_scaler"),
]


@pytest.mark.parametrize(("change", "expectation"), NONSENSE)
def test_an_invalid_training_state_is_refused(run, change, expectation):
    state = checkpoint_of(run, 6) / "training_state" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | change))
    assert_user_error(f"state.json cannot be read .*{expectation}", load_state, checkpoint_of(run, 6))


OPTIMIZER = "training_state/optimizer.safetensors"
HARMS = [("model.safetensors", b""), (OPTIMIZER, b"\x00" * 8), ("config.json", b""), ("config.json", b"\xff" * 100)]


@pytest.mark.parametrize(("file", "content"), [*HARMS, ("model.safetensors", None), (OPTIMIZER, None)])
def test_invalid_checkpoint_files_are_refused(run, train, file, content):
    """The manifest matches the invalid file, in which a value is infinite if `content` is None."""
    checkpoint = checkpoint_of(run, 6)
    path, tensors = checkpoint / file, load_file(checkpoint / (file if content is None else OPTIMIZER))
    next(iter(tensors.values())).fill_(math.inf)
    path.write_bytes(save(tensors) if content is None else content)
    (checkpoint / "manifest.json").unlink()
    _seal(checkpoint, 6)
    sentence = f"{path.name}.* (cannot be read|is not a configuration|is not finite)"
    assert_user_error(sentence, train, None, resume_from_checkpoint=run, max_steps=8)


WRONG_TENSORS = [
    ({"w": torch.full((4,), math.nan)}, "w is not finite"),
    ({"w": torch.zeros(4, dtype=torch.bfloat16)}, r"w is \(4,\) of torch.bfloat16 instead of \(4,\) of torch.float32"),
    ({"w": torch.zeros(3)}, r"w is \(3,\) of torch.float32 instead of \(4,\)"),
    ({"w": torch.zeros(4), "v": torch.zeros(4)}, "does not fit the model .*: v"),
    ({}, "does not fit the model .*: w"),
]


@pytest.mark.parametrize(("tensors", "sentence"), WRONG_TENSORS)
def test_tensors_that_no_run_saved_are_refused(tmp_path, tensors, sentence):
    save_file(tensors, tmp_path / "x")
    assert_user_error(sentence, lambda: dict(read_tensors(tmp_path / "x", {"w": torch.Size((4,))})))
    (tmp_path / "x").unlink()  # by the run that still trains
    assert_user_error("x cannot be read", lambda: dict(read_tensors(tmp_path / "x", {"w": torch.Size((4,))})))


def test_a_run_whose_file_of_settings_is_being_edited_continues(train, tmp_path, monkeypatch, capsys):
    run, texts = tmp_path / "run", iter(["data:", "seed: 1", "learning_rate: [0.1"])

    def schedule(step: int, *_: object) -> float:
        if step in (1, 4, 7):
            (run / "config.yaml").write_text(next(texts))
        return 0.01

    monkeypatch.setattr(train_accelerate, "schedule", schedule)
    train(run, max_steps=9)
    output = capsys.readouterr().out
    assert re.findall(r"step (\d): validation loss", output) == ["3", "6", "9"]
    assert output.count("WARNING: No report was written: ") == 2
    assert status(run)["state"] == "finished"


def test_user_notes_and_links_in_the_run_folder_are_harmless(run, train, tmp_path):
    (run / "samples.md").write_text("# my run\n\nnotes\n\n" + (run / "samples.md").read_text())
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[]\n5\n")
    train(None, resume_from_checkpoint=run, max_steps=8)
    assert "notes" in (run / "samples.md").read_text()
    assert metrics(run)[-1]["step"] == 8
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert_user_error("checkpoints is a link, through which", train, None, resume_from_checkpoint=run)
    train(run, "--overwrite_output_dir", max_steps=1)
    assert not (run / "checkpoints").is_symlink()
    assert (tmp_path / "elsewhere" / "step_00000006" / "model.safetensors").exists()


def test_a_spike_is_printed_and_recorded_and_a_rollback_skips_its_batches(launch, tmp_path):
    """An easy text has a stretch of noise."""
    run, easy = tmp_path / "run", "abcdefgh" * 16_000
    noise = "".join(random.Random(0).choice("ijklmnopqrstuvwxyz") for _ in range(200))
    (tmp_path / "text.txt").write_text(easy[:64_000] + noise + easy)
    text, corpus = tmp_path / "text.txt", {"validation_fraction": 0.05}
    store = tokenized(text, tmp_path / "store", corpus, tokenizer_type="character")
    settings = TINY | {"tokens_per_step": 128, "max_steps": 400, "save_steps": 50, "min_learning_rate": 0.005}
    settings |= {"eval_strategy": "no", "sample_prompts": "abc", "save_total_limit": 1, "on_spike": "rollback"}
    result = launch("train_accelerate.py", *flags(data=store.folder, output_dir=run, spike_z_score=20, **settings))
    assert result.returncode == 0, result.stderr
    assert "standard deviations above its mean" in result.stdout
    events = lines(run / "events.jsonl")
    spike = next(event for event in events if event["event"] == "spike")
    resume = next(event for event in events[events.index(spike) :] if event["event"] == "resumed")
    assert (spike["z_score"] > 20, resume["step"]) == (True, (spike["step"] - 2) // 50 * 50)
    assert "skipping samples" in resume["because"]
    position = load_state(checkpoint_of(run, 400)).position
    assert position.passed_over[0] == ((spike["step"] - 2) * 8, spike["last"] * 8)
    assert position.sample == 400 * 8 + sum(b - a for a, b in position.passed_over)
    assert [entry["step"] for entry in logged(run)] == list(range(1, 401))


def test_all_changed_settings_are_refused_in_one_message(run, train, tmp_path):
    (tmp_path / "other.txt").write_text(prose(99))
    second = tokenized(tmp_path / "other.txt", tmp_path / "store", vocab_size=290)
    original = (run / "metrics.jsonl").read_text()
    changes = {"n_layer": (2, 3), "n_head": (2, 4), "n_positions": (16, 32)}
    changes |= {"seed": (1337, 1), "tokens_per_step": (64, 128), "mixed_precision": ("no", "bf16")}
    settings = {"data": second.folder, "max_steps": 9} | {name: new for name, (_, new) in changes.items()}
    problems = error_of(train, None, resume_from_checkpoint=run, **settings)
    changes |= {"vocab_size": (300, 290)}
    expectation = [f"{name} changed from {old} to {new}" for name, (old, new) in changes.items()]
    for words in (*expectation, "the token store has other tokens", "tokenizer"):
        assert words in problems
    assert (run / "metrics.jsonl").read_text() == original
    command = ("--resume_from_checkpoint", str(run), "--allow_change")
    assert_user_error(r"'nonsense'; it may name data, .*, n_head, ", train, None, *command, "n_embd,nonsense")
    sentence = r"n_embd changed from \d+ to 32, so its weights do not fit; start a new run"
    assert_user_error(sentence, train, None, *command, "n_embd", n_embd=32)


def test_settings_in_allow_change_may_change(run, train, capsys):
    permission = ("--allow_change", "tokens_per_step,seed", "mixed_precision")
    changes = {"tokens_per_step": 128, "seed": 1, "mixed_precision": "bf16", "learning_rate": 0.02, "max_steps": 8}
    train(None, *permission, resume_from_checkpoint=run, **changes)
    output = capsys.readouterr().out
    rate = "learning_rate changed from 0.01 to 0.02"
    for change in ("tokens_per_step changed from 64 to 128", rate, "max_steps changed from 6 to 8"):
        assert f"Change:  {change}" in output
    resume = next(event for event in reversed(lines(run / "events.jsonl")) if event["event"] == "resumed")
    assert rate in resume["changes"]
    assert [entry["tokens"] for entry in logged(run)][-3:] == [384, 512, 640]
    assert len(load_state(checkpoint_of(run, 8)).losses) == 2  # those of another batch are no measure for a spike
    shutil.rmtree(checkpoint_of(run, 8))  # as if killed before it was written
    sentence = "seed changed from 1337 to 2; if this is intended, add --allow_change seed"
    resume = ["--resume_from_checkpoint", str(run)]
    assert_user_error(sentence, train_accelerate.main, [*resume, "--seed", "2"])
    reset_accelerate()
    train_accelerate.main(resume)  # with the run's own settings
    assert checkpoint_of(run, 8).is_dir()


def changes_of(page):
    """Return the lines of a report or card about changed settings."""
    _, _, section = page.partition("Settings that changed when the run was resumed:\n\n")
    return [line.removeprefix("- after ") for line in section.split("\n\n")[0].splitlines()]


def test_report_and_card_list_every_change_with_its_step(run, train, tmp_path):
    assert changes_of((run / "report.md").read_text()) == []
    train(None, resume_from_checkpoint=run, max_steps=9, learning_rate=0.02)
    shutil.rmtree(checkpoint_of(run, 9))  # as if killed before it was written: the changes after step 6 are repeated
    train(None, resume_from_checkpoint=run, max_steps=9, learning_rate=0.03)
    train(None, resume_from_checkpoint=run, max_steps=12, learning_rate=0.04)
    branch = train(tmp_path / "branch", resume_from_checkpoint=checkpoint_of(run, 9), max_steps=12, learning_rate=0.05)
    shared = ["step 6: max_steps changed from 6 to 9", "step 6: learning_rate changed from 0.01 to 0.03"]
    shared += ["step 9: max_steps changed from 9 to 12"]
    for folder, rate in ((run, 0.04), (branch, 0.05)):
        changes = [*shared, f"step 9: learning_rate changed from 0.03 to {rate}"]
        assert changes_of((folder / "report.md").read_text()) == changes_of(card_of(folder)) == changes


def test_a_run_killed_before_its_config_was_written_can_start(train, tmp_path):
    run = tmp_path / "run"
    mark(run, "run")
    (run / "checkpoints").mkdir()
    for name in ("config.yaml.tmp", "events.jsonl"):
        (run / name).touch()
    train(run, max_steps=1)


def test_two_runs_in_one_folder_are_refused(train, tmp_path, monkeypatch):
    monkeypatch.setattr("training.guard.run_guard.locked", partial(locked, patience=0.1))
    with locked(tmp_path / "run"):
        assert_user_error(f"is in use by process {os.getpid()} on ", train, tmp_path / "run")


def test_a_preempted_run_continues_on_an_empty_machine(train, start, tmp_path):
    """The launcher and its processes are killed at once, and only the backup is left, as on a spot instance."""
    settings = LONG | {"max_steps": 60, "save_steps": 4, "eval_steps": 20}
    straight, run, drive = train(tmp_path / "straight", **settings), tmp_path / "machine" / "run", tmp_path / "drive"
    drive.mkdir()
    command = partial(start, run, launch=ACCELERATE, backup_dir=drive, **settings)
    launcher, backup = command(), RunFolder(drive / "run")
    wait_until(lambda: backup.newest_step() > 0 or launcher.poll() is not None)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    for process in (launcher, *processes):
        process.kill()
    launcher.wait()
    psutil.wait_procs(processes)
    step = backup.newest_step()
    shutil.rmtree(run.parent)
    assert 0 < step < 60
    output, errors = command().communicate(timeout=1200)
    assert f"step_{step:08} is restored from {drive / 'run'}" in output, errors
    assert_same_run(straight, run)  # also with and without a launcher
    assert backup.newest_step() == 60  # the restored run continues its backup
    assert "\npython train_accelerate.py --config config.yaml --data " in (run / "report.md").read_text()
    shutil.rmtree(drive / "run")
    train(run, backup_dir=drive, **settings)  # a finished run updates its backup
    assert damage(checkpoint_of(drive / "run", 60)) is None
    assert status(drive / "run")["state"] == "finished"
