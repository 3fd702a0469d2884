"""A mean over units of unequal size, such as the loss per token of documents, with its standard error."""

import math
from dataclasses import dataclass

import numpy as np

from errors import counted

ENOUGH_DOCUMENTS = 30
BLOCKS = 50  # that a text of fewer documents is cut into


@dataclass(frozen=True)
class Ratio:
    value: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.stderr:.4f}"


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Ratio:
    """Return the ratio of the sums of both, (units,) each. Units are taken to be independent of each other: the
    standard error of a ratio estimate by linearization (Cochran 1977, 6.4)."""
    total = denominators.sum()
    value = numerators.sum() / total
    n = len(numerators)
    deviations = numerators - value * denominators
    variance = n / (n - 1) * (deviations**2).sum() if n > 1 else math.nan
    return Ratio(float(value), math.sqrt(variance) / float(total))


def units(starts: np.ndarray) -> tuple[np.ndarray, str]:
    """Where the units begin, and the end, (units + 1,) int64, and what they are called.

    `starts` are those of the documents, and the end. Documents are units, because tokens within one are alike; where there
    are too few to tell how much they differ, the text is cut into blocks as long as one another.
    """
    documents, end = len(starts) - 1, int(starts[-1])
    if documents >= ENOUGH_DOCUMENTS:
        return starts, counted(documents, "document")
    blocks = min(BLOCKS, end)
    return np.arange(blocks + 1, dtype=np.int64) * end // blocks, f"{blocks} blocks of the text"
