"""Damaged or edited files of a run: every reader skips or refuses them, without a traceback."""

import json
import os
import random
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from datasets import Dataset
from test_publishing import card_of

from common.errors import UserError
from examples.tuning.base import record_of
from examples.tuning.settings import Tuning
from tokenizer.corpus import files, named_data
from tokenizer.corpus.records import records
from tokenizer.corpus.units import Corpus, CorpusArguments
from tokenizer.encoding.vocabulary import SavedTokenizer
from tokenizer.store.store import TokenStore
from training import evaluate
from training.checkpoints import checkpoint as checkpoints
from training.checkpoints.metrics import best_step, forget_after, read_events
from training.checkpoints.run_folder import RunFolder, find_checkpoint
from training.checkpoints.status import check_run_format, hours, starts_in_force
from training.report import report

OTHERS = ("finetuning.json", "tokenizer_config.json", "named.yaml", "chats.arrow")
NEWEST = "checkpoints/step_00000006"
VALUES = [None, True, -1, 10**30, 1e308, float("nan"), "", "x", "\ud800", [], {}, [[]], "9" * 5000]


def places(value, place=()):
    """Yield the path of every key and index below a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield (*place, key)
        yield from places(below, (*place, key))


def other_value(line: bytes, rng: random.Random) -> bytes:
    content = json.loads(line)
    *way, last = rng.choice(list(places(content)))
    inside = content
    for key in way:
        inside = inside[key]
    if rng.random() < 0.3:
        del inside[last]
    else:
        inside[last] = rng.choice(VALUES)
    return json.dumps(content).encode(errors="surrogatepass")


def mutated(original: bytes, name: str, rng: random.Random) -> bytes:
    """Return a mutation: a value exchanged or removed, bytes changed, the end cut off, or endless nesting."""
    kind = rng.random() if "json" in name else rng.uniform(0.7, 1)
    if kind < 0.7:
        lines = original.splitlines() if name.endswith(".jsonl") else [original]
        at = rng.randrange(len(lines))
        lines[at] = other_value(lines[at], rng)
        return b"\n".join(lines)
    if kind < 0.8:
        return original[: rng.randrange(len(original))]
    if kind < 0.82:
        return b"[" * 100_000
    changed = bytearray(original)
    for _ in range(rng.choice([1, 5])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@pytest.fixture(scope="module")
def finished(finished, tmp_path_factory):
    run = shutil.copytree(finished, tmp_path_factory.mktemp("runs") / "finished")
    evaluate.main([str(run), "--memorization"])
    record = {"steps": ["x"], "base_model": None, "datasets": ["me/x"], "original_data": None}
    (run / "finetuning.json").write_text(json.dumps(record))
    shutil.copy(run / "model" / "tokenizer_config.json", run)
    (run / "named.yaml").write_text("dataset: me/x\nconfig: a\ntext_column: text\nchat_template: chatml\n")
    Dataset.from_dict({"text": ["a é"] * 50, "more": [[1]] * 50}).save_to_disk(run / "saved")
    shutil.move(next((run / "saved").glob("*.arrow")), run / "chats.arrow")
    return run


def read_logs(run: Path, store: TokenStore) -> None:
    with suppress(UserError):
        find_checkpoint(run, "best")
    events = read_events(run / "events.jsonl")
    starts_in_force(events)
    hours(events, datetime.now(UTC))
    best_step(run / "metrics.jsonl", range(100))
    card_of(run)
    report.write_report(RunFolder(run))
    forget_after(run / "metrics.jsonl", 3)


def read_status(run: Path, store: TokenStore) -> None:
    check_run_format(run / "status.json")
    assert RunFolder(run).is_run()
    (run / ".gpt2scratch.json").rename(run / "mark")
    assert RunFolder(run).is_run()
    (run / "mark").rename(run / ".gpt2scratch.json")


def read_other(run: Path, store: TokenStore) -> None:
    record_of(Tuning(str(run)))
    SavedTokenizer.read(run)
    named_data.find(str(run / "named.yaml"))
    for part in Corpus([str(run / "chats.arrow")], CorpusArguments(text_column="text")).units()[0].ranges:
        with files.readable(part.path):
            list(records(part))


def read_checkpoint(run: Path, store: TokenStore) -> None:
    checkpoints.damage(run / NEWEST)
    RunFolder(run).newest_checkpoint(lambda text: None)
    checkpoints.load_state(run / NEWEST)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((name, read_logs) for name in ("report.json", "evaluation/evaluation.json")),
        ("status.json", read_status),
        *((name, read_other) for name in OTHERS),
        *((f"{NEWEST}/{name}", read_checkpoint) for name in ("manifest.json", "training_state/state.json")),
    ],
)
def test_changed_files_are_skipped_or_refused(finished, store, tmp_path, monkeypatch, name, read):
    monkeypatch.setattr(report, "plot_loss", lambda entries, until, path: False)
    monkeypatch.setattr(report, "plot_course", lambda entries, path: False)
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    original, rng = (run / name).read_bytes(), random.Random(name)
    for _ in range(40):
        (run / name).write_bytes(mutated(original, name, rng))
        with suppress(UserError):
            read(run, store)


def test_pipes_in_place_of_files_do_not_block(finished, store, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for name in ".gpt2scratch.json status.json report.json evaluation/evaluation.json tokenizer_config.json".split():
        (run / name).unlink()
        os.mkfifo(run / name)
    read_logs(run, store)
    assert RunFolder(run).is_run()
    assert SavedTokenizer.read(run) is None
