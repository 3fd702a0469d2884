"""Tokens of a split during training, and the batches gathered from them.

The code is the same for tokens on the device, in RAM, or in a memory-mapped file. Nothing here loops over the rows of a
batch, except for the system calls that read ahead in a cold file.
"""

import mmap
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

IGNORE_INDEX = -100  # target that cross-entropy ignores
UNSIGNED_TYPES = {torch.int16: torch.uint16, torch.int32: torch.uint32}


class Batch(NamedTuple):
    """Batch on the device, (B, T) int64 each."""

    inputs: torch.Tensor
    targets: torch.Tensor  # -100 beyond the end of the text
    positions: torch.Tensor | None  # from 0 in each document; None if attention crosses documents


def positions_in_segments(segments: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Return each token's distance from the start of its segment, or of its row if later, (B, context) int64.
    `segments`: see `Tokens`. `starts`: the first tokens of the rows, (B,)."""
    first_segments = np.searchsorted(segments, starts, side="right") - 1  # (B,): segments where rows start
    beyond = np.searchsorted(segments, starts + context, side="left")
    counts = beyond - first_segments  # (B,): segments of each row
    rows = np.repeat(np.arange(len(starts)), counts)  # (segments of all rows,)
    numbers = np.arange(len(rows)) + np.repeat(beyond - counts.cumsum(), counts)
    in_row = np.maximum(segments[numbers] - starts[rows], 0)
    first_places = rows * context + in_row  # in the flattened batch
    size = len(starts) * context
    flat = np.arange(size) - np.repeat(first_places, np.diff(first_places, append=size))
    return flat.reshape(len(starts), context)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a split on a device, in RAM or in a memory map.

    Attention may stay within segments, which are documents. The end-of-text token of a document is the first token of
    the next segment, as in generation, where a prompt starts with it. So a document's first token is predicted from
    end-of-text alone, and end-of-text from the document that it ends. Without end-of-text tokens, a segment starts with
    the document's first token. This token is then predicted from the previous document: the loss is divided by a fixed
    number of targets, so no target is left out."""

    values: torch.Tensor  # (n,) int16 or int32: the bits of uint16 or uint32, which not all backends index
    device: torch.device  # device of the batches
    segments: np.ndarray | None = None  # (segments + 1,) int64: the start of each segment, and the end of the last
    file: mmap.mmap | None = None  # not None if `values` is a memory map

    @classmethod
    def mapped(cls, ids: np.memmap, device: torch.device, segments: np.ndarray | None = None) -> "Tokens":
        ids.base.madvise(mmap.MADV_RANDOM)  # read-ahead of megabytes per window stalls a cold file for 100 ms and more
        with warnings.catch_warnings():
            # The warning says that the map is read-only. Linux refuses a writable map of a file larger than memory.
            warnings.simplefilter("ignore", UserWarning)
            values = torch.from_numpy(ids.view(f"<i{ids.itemsize}"))
        return cls(values, device, segments, file=ids.base)

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, starts: np.ndarray, context: int) -> Batch:
        """Return the windows that begin at `starts`, (B,) int64, with the next tokens as targets, without waiting."""
        rows = self._gather(starts, context + 1)  # (B, T + 1)
        if self.device.type in ("cpu", "cuda"):
            rows = _sent(rows, self.device).view(UNSIGNED_TYPES[rows.dtype])
        else:  # Apple GPUs do not support all unsigned types
            rows = _sent(rows.view(UNSIGNED_TYPES[rows.dtype]).long(), self.device)
        inputs, targets = rows[:, :-1].long().contiguous(), rows[:, 1:].long().contiguous()
        n_targets = len(self) - 1 - starts
        if n_targets.min() < context:
            beyond = np.arange(context) >= n_targets[:, None]
            targets.masked_fill_(_sent(torch.from_numpy(beyond), self.device), IGNORE_INDEX)
        positions = None
        if self.segments is not None:
            positions = _sent(torch.from_numpy(positions_in_segments(self.segments, starts, context)), self.device)
        return Batch(inputs, targets, positions)

    def announce(self, starts: np.ndarray, length: int) -> None:
        """Ask the system to read windows of a memory map in the background, all at once, instead of waiting for each.
        Pass a batch and the next one: the batch itself was announced before, unless it is the first of a run.
        The only loop over rows, because a system call takes one range: 1 us per row that is already in memory."""
        itemsize = self.values.element_size()
        page_starts = starts * itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        sizes = np.minimum(starts + length, len(self)) * itemsize - page_starts
        for start, size in zip(page_starts.tolist(), sizes.tolist(), strict=True):
            if size > 0:
                self.file.madvise(mmap.MADV_WILLNEED, start, size)

    def _gather(self, starts: np.ndarray, length: int) -> torch.Tensor:
        """Return rows (B, length) on the device of the tokens. Beyond the end, the last token is repeated."""
        if starts.max() + length <= len(self):
            index = _sent(torch.from_numpy(starts), self.values.device)
            return self.values.unfold(0, length, 1).index_select(0, index)  # creates a view, then copies each row once
        index = np.minimum(starts[:, None] + np.arange(length), len(self) - 1)
        return self.values[_sent(torch.from_numpy(index), self.values.device)]


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. The copy from pinned memory does not wait for the device."""
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")  # on MPS, the source may be freed before the copy
