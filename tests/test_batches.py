"""Order of batches, and tokens of a split: equal batches from every storage, and separate documents."""

import mmap
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import assert_user_error
from training.data.batches import (
    BatchArguments,
    BatchPlan,
    DataPosition,
    TrainBatches,
    WindowOrder,
    permute,
    plan_batches,
)
from training.data.tokens import IGNORE_INDEX, Tokens, positions_in_segments

CPU = torch.device("cpu")


def mapped(path, ids: np.ndarray) -> Tokens:
    ids.tofile(path)
    return Tokens.mapped(np.memmap(path, ids.dtype, mode="r"), CPU)


def held(ids: np.ndarray, segments: np.ndarray | None = None) -> Tokens:
    return Tokens(torch.from_numpy(ids.view(f"<i{ids.itemsize}")), CPU, segments)


@pytest.mark.parametrize(("dtype", "vocab_size"), [("<u2", 300), ("<u2", 65_000), ("<u4", 2**31 - 1)])
def test_batches_are_the_same_from_memory_and_from_a_file(tmp_path, dtype, vocab_size):
    ids = np.random.default_rng(0).integers(0, vocab_size, 5000).astype(dtype)
    starts = np.array([0, 4983, 17, 17])
    for tokens in (held(ids), mapped(tmp_path / "train.bin", ids)):
        inputs, targets, positions = tokens.batch(starts, 16)
        for row, start in enumerate(starts.tolist()):
            assert inputs[row].tolist() == ids[start : start + 16].tolist()
            assert targets[row].tolist() == ids[start + 1 : start + 17].tolist()
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert positions is None


def test_unsigned_integers_are_widened_for_devices_without_them(monkeypatch):
    tensors = []
    monkeypatch.setattr(
        "training.data.tokens._sent", lambda tensor, device: tensors.append(tensor) or tensor.to(device)
    )
    ids = np.array([1, 2, 65_000, 4], dtype=np.uint16)
    batch = Tokens(torch.from_numpy(ids.view("<i2")), torch.device("meta")).batch(np.array([0]), 3)
    assert tensors[-1].tolist() == [[1, 2, 65_000, 4]]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()


@pytest.mark.parametrize("n", [4, 9, 12])
def test_targets_beyond_the_end_are_ignored(tmp_path, n):
    ids = np.arange(100, 100 + n, dtype=np.uint16)
    for tokens in (held(ids), mapped(tmp_path / "val.bin", ids)):
        inputs, targets, _ = tokens.batch(np.array([0, n - 3, n]), 8)
        expectation = ids[1:9].tolist() + [IGNORE_INDEX] * (9 - n)
        assert targets.tolist() == [expectation, [98 + n, 99 + n] + [IGNORE_INDEX] * 6, [IGNORE_INDEX] * 8]
        assert inputs[1, :3].tolist() == ids[n - 3 :].tolist()
        assert inputs.min() >= 100  # always ids of the vocabulary


class Advice(bytes):
    """Replacement of a memory map that records `madvise` calls."""

    def madvise(self, option: int, start: int, size: int) -> None:
        assert (option, start % mmap.PAGESIZE) == (mmap.MADV_WILLNEED, 0)
        assert 0 < size <= len(self) - start
        self.ranges.append((start, start + size))


def test_a_batch_announces_itself_and_the_next(tmp_path):
    tokens = mapped(tmp_path / "train.bin", np.zeros(100_000, dtype=np.uint16))
    batches = TrainBatches(tokens, WindowOrder(100_000, 64, seed=1), BatchPlan(64, 4, 2, 2), rank=1)
    for moment, following in (((0, 0), (0, 1)), ((0, 1), (1, 0))):  # step and micro-step of a batch and the next
        batches.tokens = replace(tokens, file=(advice := Advice(200_000)))
        advice.ranges = []
        batches(*moment)
        windows = np.concatenate([batches._starts(*moment), batches._starts(*following)]).tolist()
        for window, (start, end) in zip(windows, advice.ranges, strict=True):
            assert start <= 2 * window
            assert end >= 2 * (window + 65)
    for n in (mmap.PAGESIZE // 2, 3000):  # ends at a page boundary, or not
        tokens = mapped(tmp_path / "val.bin", np.zeros(n, dtype=np.uint16))
        tokens.announce(np.array([0, n - 3, n]), 17)  # the real map would refuse a range beyond its end


def test_batch_positions_continue_beyond_the_end_of_the_text():
    ids = np.arange(12, dtype=np.uint16)
    tokens = held(ids, np.array([0, 4, 6, 12]) - 1)
    _, targets, result = tokens.batch(np.array([0, 8, 12]), 8)
    assert result.dtype == torch.int64
    assert result.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4], list(range(8))]
    assert (targets[1] != IGNORE_INDEX).tolist() == [True] * 3 + [False] * 5


def test_positions_of_many_documents_equal_a_loop():
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], rng.integers(0, 40, 500).cumsum()])  # some documents are empty
    starts = rng.integers(0, offsets[-1] - 64, 50)
    for has_eos in (True, False):
        first_places = set((offsets - has_eos).tolist())
        result = positions_in_segments(offsets - has_eos, starts, 64).tolist()
        for start, row in zip(starts.tolist(), result, strict=True):
            expectation = [0]
            for place in range(start + 1, start + 64):
                expectation.append(0 if place in first_places else expectation[-1] + 1)
            assert row == expectation


def permuted(n: int, key: int) -> np.ndarray:
    return permute(np.arange(n, dtype=np.uint64), n, np.full(n, key, dtype=np.uint64))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permutation_covers_every_position_once_and_depends_on_the_key(n):
    one, second = permuted(n, key=7), permuted(n, key=2)
    assert sorted(one.tolist()) == list(range(n))
    if n >= 1000:
        assert (one == np.arange(n)).mean() < 0.02
        assert (one == second).mean() < 0.02


def test_batch_order_never_changes():
    """Literal numbers: a change here would break resuming for all existing runs."""
    assert WindowOrder(1000, 8, seed=1337).starts(0, 6).tolist() == [663, 911, 887, 975, 487, 671]
    order = WindowOrder(100_000, 16, seed=5)  # across two blocks
    assert order.starts(4090, 12).tolist() == [int(order.starts(g, 1)[0]) for g in range(4090, 4102)]
    assert len(WindowOrder(10**12, 1024, seed=0).starts(10**13 + 5, 8)) == 8  # every position has the same cost


@pytest.mark.parametrize(("n_tokens", "context"), [(10_000, 64), *((n, 8) for n in range(9, 40))])
def test_each_epoch_uses_every_window_once_with_its_own_order_and_offset(n_tokens, context):
    order = WindowOrder(n_tokens, context, seed=n_tokens)
    epochs = [order.starts(epoch * order.windows, order.windows) for epoch in range(20)]
    for starts in epochs:
        assert len(np.unique(starts)) == order.windows
        assert (np.diff(np.sort(starts)) == context).all()
        assert starts.min() >= 0
        assert starts.max() + context < n_tokens
    if n_tokens == 10_000:
        assert (epochs[0] != epochs[1]).any()
        assert len({int(starts.min()) for starts in epochs}) > 10


def test_all_tokens_of_a_short_text_are_targets():
    order = WindowOrder(1023, 256, seed=0)
    starts = order.starts(0, 2000 * order.windows)
    counts = np.zeros(1024, dtype=np.int64)
    np.add.at(counts, starts + 1, 1)
    np.add.at(counts, starts + 257, -1)
    assert counts.cumsum()[1:1023].min() > 0


@pytest.mark.parametrize(("micro_batch", "accumulation", "processes"), [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)])
def test_step_uses_the_same_samples_for_every_division_of_the_global_batch(micro_batch, accumulation, processes):
    tokens = np.arange(2000, dtype=np.uint16)
    plan = BatchPlan(16, micro_batch, accumulation, processes)
    order = WindowOrder(2000, 16, seed=1)
    samples = []
    for micro_step in range(accumulation):
        for rank in range(processes):
            inputs, targets, _ = TrainBatches(held(tokens), order, plan, rank)(5, micro_step)
            assert torch.equal(targets, inputs + 1)  # the tokens count up
            samples += inputs[:, 0].tolist()
    assert samples == order.starts(40, 8).tolist()


def test_auto_uses_the_largest_micro_batch_that_divides_and_errors_name_valid_values():
    plan = plan_batches(BatchArguments(tokens_per_step=48 * 16), 16, 2, largest_micro_batch=10)
    assert (plan.micro_batch, plan.accumulation, plan.processes) == (8, 3, 2)
    arguments = BatchArguments(tokens_per_step=1000, per_device_train_batch_size="4")
    sentence = r"1000 is not a multiple of 256 \(context 64 x 1 process x micro-batch 4\); the n.* 768 or 1024"
    assert_user_error(sentence, plan_batches, arguments, 64, 1, largest_micro_batch=100)
    assert_user_error("has 8 tokens, fewer than one context of 8", WindowOrder, 8, 8, seed=0)


@pytest.mark.parametrize("positions", [False, True], ids=["plain", "masked"])
def test_batch_needs_no_python_code_per_row(positions):
    """A batch of 64 rows makes as many Python calls as one of 4."""
    ids = np.arange(30_000, dtype=np.uint16)
    segments = np.arange(0, 30_001, 100) - 1 if positions else None

    def calls_of(micro_batch: int) -> int:
        batches = TrainBatches(held(ids, segments), WindowOrder(30_000, 64, 0), BatchPlan(64, micro_batch, 1, 1), 0)
        batches(0, 0)  # computes the block of starts
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            batches(1, 0)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert calls_of(4) == calls_of(64) > 0


def walked(position: DataPosition, step: int, sequences: int) -> int:
    """Return the sample by definition: step by step, skipping every range that a step would reach."""
    sample = position.sample
    for place in range(position.step, step + 1):
        while positions := [end for first, end in position.passed_over if sample < end and sample + sequences > first]:
            sample = min(positions)
        if place < step:
            sample += sequences
    return sample


def test_position_equals_its_definition():
    for seed in range(3000):
        chance = random.Random(seed)
        ranges, at = [], 0
        for _ in range(chance.randint(0, 4)):
            first = at + chance.randint(0, 30)
            at = first + chance.randint(1, 30)
            ranges.append((first, at))
        position = DataPosition(chance.randint(0, 3), chance.randint(0, 50), passed_over=tuple(ranges))
        sequences, step = chance.randint(1, 12), position.step + chance.randint(0, 20)
        expectation = walked(position, step, sequences)
        assert position.first_sample(step, sequences) == expectation
        halfway = position.after(chance.randint(position.step, step), sequences, 1)
        assert halfway.first_sample(step, sequences) == expectation
