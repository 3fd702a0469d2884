"""Position of a run in its data, compared with its definition applied step by step."""

import random

from training.batches import DataPosition


def walked(position: DataPosition, step: int, sequences: int) -> int:
    """Return the sample by definition: step by step, skipping every range that a step would reach."""
    sample = position.sample
    for now in range(position.step, step + 1):
        while reached := [end for first, end in position.passed_over if sample < end and sample + sequences > first]:
            sample = min(reached)
        if now < step:
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
        expected = walked(position, step, sequences)
        assert position.first_sample(step, sequences) == expected
        halfway = position.after(chance.randint(position.step, step), sequences, 1)
        assert halfway.first_sample(step, sequences) == expected
