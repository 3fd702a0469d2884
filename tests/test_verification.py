"""Tests of runs on a token store that changed after it was created: they end without a complete checkpoint."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from common.atomic import file_sha256
from conftest import TINY, TWO_PROCESSES, assert_user_error, flags, flip
from tokenizer.build.export import to_parquet
from tokenizer.store.store import TokenStore
from training import evaluate
from training.checkpoints import saver
from training.checkpoints.run_folder import RunFolder


@pytest.fixture
def copy(store, tmp_path):
    return Path(shutil.copytree(store.folder, tmp_path / "store"))


@pytest.mark.parametrize(
    ("name", "placement"),
    [("train.bin", "ram"), ("val.bin", "mmap"), ("train.bin.index", "mmap"), ("val.bin.index", "ram")],
)
def test_a_flipped_bit_ends_the_run_before_a_checkpoint_is_complete(train, copy, tmp_path, name, placement):
    original_hash = file_sha256(copy / name)
    flip(copy / name)
    hashes = f"its SHA-256 is {file_sha256(copy / name)}, but metadata.json states {original_hash}"
    sentence = f"{name} was changed or damaged: {hashes}"
    assert_user_error(sentence, train, tmp_path / "run", data=copy, data_placement=placement)
    run = RunFolder(tmp_path / "run")
    assert run.newest_step() == 0
    assert not run.model.exists()
    assert '"state": "failed"' in run.status.read_text()


def test_a_bit_flipped_between_two_starts_ends_the_resumed_run(train, copy, tmp_path):
    run = train(tmp_path / "run", data=copy, max_steps=3)
    flip(copy / "train.bin")
    settings = {"resume_from_checkpoint": run, "data": copy, "max_steps": 6}
    assert_user_error(r"train\.bin was changed or damaged", train, None, **settings)
    assert RunFolder(run).newest_step() == 3
    shutil.copy(train.args[0].folder / "train.bin", copy / "train.bin")
    train(None, **settings)
    assert RunFolder(run).newest_step() == 6


def test_the_first_checkpoint_waits_for_the_hashes_and_training_does_not(train, tmp_path, monkeypatch):
    """Here, hashing takes until the third step is finished, and the checkpoint of the second step waits for it."""
    is_hashed, in_time, log_file = threading.Event(), [], tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setattr(TokenStore, "check_hashes", lambda self: in_time.append(is_hashed.wait(60)))

    def release():
        while not (log_file.exists() and '"step": 3' in log_file.read_text()):
            time.sleep(0.01)
        assert RunFolder(tmp_path / "run").newest_step() == 0
        is_hashed.set()

    thread = threading.Thread(target=release)
    thread.start()
    train(tmp_path / "run", save_steps=2, eval_strategy="no", max_steps=5)
    thread.join()
    assert in_time == [True]
    assert RunFolder(tmp_path / "run").newest_step() == 5


def test_with_several_machines_training_waits_for_the_hashes_of_all(train, tmp_path, monkeypatch):
    """The main process does not know whether another machine's file differs."""
    actions = []
    monkeypatch.setattr(TokenStore, "check_hashes", lambda self: actions.append(time.sleep(1) or "hashed"))
    monkeypatch.setattr(saver, "processes_of_this_machine", lambda accelerator: 0)
    monkeypatch.setattr(saver, "wait_for_all", lambda accelerator: actions.append("waited"))
    train(tmp_path / "run", save_steps=2, eval_strategy="no", max_steps=5)
    assert actions == ["hashed", "waited"]


def test_all_processes_of_a_run_end_on_a_damaged_store(launch, copy, tmp_path):
    flip(copy / "train.bin")
    arguments = flags(data=copy, output_dir=tmp_path / "run", **TINY)
    result = launch(*TWO_PROCESSES, "train_accelerate.py", *arguments)
    assert result.returncode != 0
    assert result.stderr.count("train.bin was changed or damaged: its SHA-256 is") == 1
    assert RunFolder(tmp_path / "run").newest_step() == 0


def test_changed_tokens_are_neither_evaluated_nor_exported(train, copy, tmp_path, capsys):
    run = train(tmp_path / "run", data=copy)
    flip(copy / "val.bin")
    assert_user_error(r"val\.bin was changed or damaged", evaluate.main, [str(run)])
    assert not (run / "evaluation").exists()
    assert_user_error(r"val\.bin was changed or damaged", to_parquet, TokenStore(copy))
