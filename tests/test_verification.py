"""A token store that changed after it was made: the run ends, and none of its checkpoints becomes complete."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from atomic import file_sha256
from errors import UserError
from tokenizer.export import to_parquet
from tokenizer.store import TokenStore
from training import evaluate
from training.run_folder import RunFolder


def flip(path: Path) -> None:
    """Change one bit: an id stays below the vocabulary's size, an index stays ascending."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 // 8 * 8] ^= 1
    path.write_bytes(content)


@pytest.fixture
def copy(store, tmp_path):
    return Path(shutil.copytree(store.folder, tmp_path / "store"))


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.bin.index", "val.bin.index"])
@pytest.mark.parametrize("placement", ["ram", "mmap"])
def test_a_flipped_bit_ends_the_run_before_a_checkpoint_is_complete(train, copy, tmp_path, name, placement):
    stated = file_sha256(copy / name)
    flip(copy / name)
    sentence = (
        rf"{name} was changed or damaged: its SHA-256 is {file_sha256(copy / name)}, but metadata.json states {stated}"
    )
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", data=copy, data_placement=placement)
    run = RunFolder(tmp_path / "run")
    assert run.newest_step() == 0
    assert not run.model.exists()
    assert '"state": "failed"' in run.status.read_text()


def test_a_bit_that_flips_between_two_starts_ends_the_resumed_run(train, copy, tmp_path):
    run = train(tmp_path / "run", data=copy, max_steps=3)
    flip(copy / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin was changed or damaged"):
        train(None, "--resume_from_checkpoint", str(run), data=copy, max_steps=6)
    assert RunFolder(run).newest_step() == 3
    shutil.copy(train.args[0].folder / "train.bin", copy / "train.bin")
    train(None, "--resume_from_checkpoint", str(run), data=copy, max_steps=6)
    assert RunFolder(run).newest_step() == 6


def test_training_does_not_wait_for_the_hashes_but_the_first_checkpoint_does(train, tmp_path, monkeypatch):
    """The hashes take until the third step is done, and the checkpoint of the second waits for them."""
    is_hashed, logged = threading.Event(), tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setattr(TokenStore, "check_hashes", lambda self: is_hashed.wait(60))

    def release():
        while not (logged.exists() and '"step": 3' in logged.read_text()):
            time.sleep(0.01)
        assert RunFolder(tmp_path / "run").newest_step() == 0
        is_hashed.set()

    thread = threading.Thread(target=release)
    thread.start()
    train(tmp_path / "run", save_steps=2, eval_strategy="no", max_steps=5)
    thread.join()
    assert RunFolder(tmp_path / "run").newest_step() == 5


def test_a_verification_that_fails_otherwise_ends_the_run_too(train, tmp_path, monkeypatch):
    def check_hashes(self):
        raise RuntimeError("no more threads")

    monkeypatch.setattr(TokenStore, "check_hashes", check_hashes)
    with pytest.raises(RuntimeError, match="no more threads"):
        train(tmp_path / "run", save_strategy="no", max_steps=1)
    assert RunFolder(tmp_path / "run").newest_step() == 0


def test_several_processes_end_together(launch, copy, tmp_path):
    from conftest import TINY, flags

    flip(copy / "train.bin")
    arguments = flags(data=copy, output_dir=tmp_path / "run", **TINY)
    launcher = ("-m", "accelerate.commands.launch", "--config_file", "launch/two_cpu_processes.yaml")
    result = launch(*launcher, "train_accelerate.py", *arguments)
    assert result.returncode != 0
    assert result.stderr.count("train.bin was changed or damaged: its SHA-256 is") == 1
    assert RunFolder(tmp_path / "run").newest_step() == 0


def test_no_score_and_no_export_of_changed_tokens(train, copy, tmp_path, capsys):
    run = train(tmp_path / "run", data=copy)
    flip(copy / "val.bin")
    with pytest.raises(UserError, match=r"val\.bin was changed or damaged"):
        evaluate.main([str(run)])
    assert not (run / "evaluation").exists()
    with pytest.raises(UserError, match=r"val\.bin was changed or damaged"):
        to_parquet(TokenStore(copy))
