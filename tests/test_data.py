"""Placement of tokens in memory, and document masking in whole runs."""

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from filelock import FileLock

from conftest import assert_user_error, metrics, wait_until
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer.build.recipe import Recipe
from tokenizer.corpus.units import Corpus, CorpusArguments, kind_of
from tokenizer.encoding.vocabulary import VocabularyArguments
from training import evaluate
from training.data import run_data
from training.data.run_data import choose_placement, find_recorded_store, open_store, processes_of_this_machine

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Set the reported free memory of RAM and of a simulated GPU."""

    def say(ram: int, gpu: int = 0) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=ram))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu, 2 * gpu))

    return say


@pytest.mark.parametrize(
    ("choice", "n_bytes", "device", "local_processes", "expectation"),
    [
        ("auto", 4 * GB, GPU, 1, ("device", 4 * GB)),
        ("auto", 5 * GB, GPU, 8, ("ram", 0)),  # more than a twentieth of 80 GB
        ("auto", 50 * GB, GPU, 1, ("ram", 0)),
        ("auto", 50 * GB, GPU, 2, ("mmap", 0)),  # each process has its own copy
        ("auto", 5 * GB, CPU, 1, ("ram", 5 * GB)),
        ("auto", 150 * GB, CPU, 1, ("mmap", 0)),
        ("device", 50 * GB, GPU, 1, ("device", 50 * GB)),
        ("device", 50 * GB, CPU, 1, ("ram", 50 * GB)),
        ("ram", 150 * GB, GPU, 1, ("ram", 0)),
        ("mmap", 1, GPU, 1, ("mmap", 0)),
    ],
)
def test_placement_depends_on_free_memory(free, choice, n_bytes, device, local_processes, expectation):
    free(ram=200 * GB, gpu=80 * GB)
    placement = choose_placement(choice, n_bytes, device, local_processes)
    assert (placement.where, placement.n_bytes) == expectation


def test_too_little_memory_is_refused_with_both_sizes(free):
    free(ram=8 * GB, gpu=2 * GB)
    for sentence, *arguments in (
        (r"the tokens need 3\.0 GB and the device has 2\.0 GB free; use ram", "device", 3 * GB, GPU, 1),
        (r"is ram, but the tokens need 9\.0 GB of RAM for 3 processes and 8\.0 GB", "ram", 3 * GB, GPU, 3),
        (r"is device, but the tokens need 9\.0 GB of RAM for 1 process and", "device", 9 * GB, CPU, 1),
    ):
        assert_user_error(sentence, choose_placement, *arguments)


def test_only_processes_of_this_machine_are_counted(monkeypatch):
    eight = SimpleNamespace(num_processes=8)
    for name in ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert processes_of_this_machine(eight) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert processes_of_this_machine(eight) == 2


def test_a_text_is_read_by_one_process_and_again_only_if_it_may_have_changed(tmp_path, monkeypatch):
    fingerprint, reads = Corpus.fingerprint, []
    monkeypatch.setattr(Corpus, "fingerprint", lambda corpus: reads.append(corpus) or fingerprint(corpus))
    monkeypatch.setattr(run_data, "CACHE", tmp_path / "cache")
    text = tmp_path / "mine.txt"
    recipe = Recipe([str(text)], vocabulary=VocabularyArguments(tokenizer_type="character"))

    def opened(content: str, time: int | None) -> str:
        text.write_text(content)
        if time is not None:
            os.utime(text, (time, time))
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: open_store(recipe, lambda line: None), range(2))
        assert first.folder == second.folder
        return first.metadata.identity

    first = opened("a text\n" * 9, 1000)
    assert (opened("a text\n" * 9, 1000), len(reads)) == (first, 1)
    assert (opened("a text\n" * 9, 2000), len(reads)) == (first, 2)  # another time, but the same content
    other = opened("tea at\n" * 9, 3000)  # of the same size
    assert (other != first, len(reads)) == (True, 3)
    (tmp_path / "cache" / run_data.TEXT_HASHES).write_text("{")
    assert (opened("a text\n" * 9, 2000), len(reads)) == (first, 4)
    assert (opened("tea at\n" * 9, None), len(reads)) == (other, 6)  # it may change within the same tick of the clock
    text.unlink()
    assert [find_recorded_store(str(text), identity).metadata.identity for identity in (first, other)] == [first, other]
    assert find_recorded_store(str(text), "unknown") is None
    rebuilt = next((tmp_path / "cache").glob("*/metadata.json")).parent
    assert find_recorded_store(str(rebuilt), "unknown") is None  # of a run on a store that was built again


def test_a_start_says_that_another_process_reads_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_data, "CACHE", tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    corpus = Corpus([str(tmp_path / "a.txt")], CorpusArguments())
    path = tmp_path / f"{run_data.TEXT_HASHES}.lock"
    with ThreadPoolExecutor(1) as pool, FileLock(path) as lock:  # as by a process that was suspended
        waiting = pool.submit(run_data._text_hash, corpus)
        wait_until(lambda: "holds" in "".join(capsys.readouterr()))
        assert not waiting.done()
        lock.release()
        assert waiting.result() == corpus.fingerprint()


def test_a_text_is_named_by_how_it_is_read_and_refused_if_it_changes_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, "CACHE", tmp_path / "cache")
    text, packed = tmp_path / "books" / "a.txt", tmp_path / "books" / "b.txt"
    text.parent.mkdir()
    (text.parent / "metadata.json").write_text('{"license": "CC0"}')  # not that of a store
    text.write_text("a text\n" * 9)
    packed.write_bytes(gzip.compress(b"other letters\n" * 9))
    recipe = Recipe([str(text.parent)], vocabulary=VocabularyArguments(tokenizer_type="character"))
    sizes = [len(open_store(recipe, lambda line: None).load_tokenizer())]
    packed.rename(packed.with_name("b.txt.gz"))
    sizes.append(len(open_store(recipe, lambda line: None).load_tokenizer()))
    assert sizes == [17, 20]

    def kind_while_it_changes(path: str) -> str:
        text.write_text("tea at\n" * 10)
        return kind_of(path)

    monkeypatch.setattr("tokenizer.corpus.units.kind_of", kind_while_it_changes)
    text.write_text("a text\n" * 8)
    assert_user_error(r"a\.txt was changed .* had 56 bytes and now has 70\. Run", open_store, recipe, lambda line: None)
    assert len([*(tmp_path / "cache").glob("books-*")]) == 2


@torch.no_grad()
def masked_loss(model: GPT2ScratchForCausalLM, ids: np.ndarray, offsets: np.ndarray, context: int) -> float:
    """Compute the loss by its definition: cut windows at document ends and run each piece alone."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    starts = sorted({*range(0, len(tokens) - 1, context), *(offsets[1:-1] - 1).tolist(), len(tokens) - 1})
    nats = 0.0
    for start, end in pairwise(starts):
        logits = model(tokens[None, start:end]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, tokens[start + 1 : end + 1], reduction="sum").item()
    return nats / (len(tokens) - 1)


@pytest.mark.parametrize(("placement", "output"), [("ram", "in RAM"), ("mmap", "memory-mapped")])
def test_run_with_mask_documents_scores_documents_separately(train, store, tmp_path, capsys, placement, output):
    run = train(tmp_path / "run", "--mask_documents", "true", "--verbose", data_placement=placement, eval_steps=6)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Data:"))
    assert f", {output}: " in line
    model = GPT2ScratchForCausalLM.from_pretrained(run / "model").eval()
    expectation = masked_loss(model, store.in_memory("val"), store.offsets("val"), 16)
    assert metrics(run)[-1]["eval_loss"] == pytest.approx(expectation, abs=1e-5)
    for arguments in ([str(run)], [str(run / "model"), "--data", str(store.folder)]):  # the first reads its config.yaml
        evaluate.main([*arguments, "--json"])
        assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(expectation, abs=1e-5)


def test_resume_with_mask_documents_refuses_a_changed_setting(train, a_copy, tmp_path, monkeypatch):
    sentence = r"another run \(mask_documents False -> True\)"
    assert_user_error(sentence, train, a_copy, mask_documents="true", max_steps=3)
    monkeypatch.setattr("training.runtime.device._check_attention", lambda *parts: None)  # as if it were installed
    sentence, flash = "mask_documents needs attn_implementation sdpa, eager or flex", "flash_attention_2"
    assert_user_error(sentence, train, tmp_path / "other", mask_documents="true", attn_implementation=flash)
    sentence, flex = "attn_pdrop is 0.1, but flex_attention has no dropout", "flex_attention"
    assert_user_error(sentence, train, tmp_path / "other", attn_pdrop=0.1, attn_implementation=flex)
