"""Pretokenization as a step of a datatrove pipeline: each task does a share of the units, on any machine.

from datatrove.executor import SlurmPipelineExecutor
from tokenizer.cluster import Pretokenize

flags = ["--input", "crawl/", "--output", "data/crawl"]
shards = SlurmPipelineExecutor([Pretokenize(flags)], tasks=64, ...)
SlurmPipelineExecutor([Pretokenize([*flags, "--merge"])], tasks=1, depends=shards, ...).run()
"""

from dataclasses import dataclass
from typing import Any

from tokenizer import pretokenize


@dataclass(frozen=True)
class Pretokenize:
    """`python -m tokenizer.pretokenize` with these flags, of which each task does its shard. A single task does all."""

    flags: list[str]

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        """Do the shard; raise a `ValueError` where steps before it give documents, which it would not read, and a `UserError`
        as the command does: the executor counts the task as failed, and does it again when run again."""
        if data is not None:
            raise ValueError("Pretokenize reads its own --input; it has to be the first step of the pipeline.")
        shard = ["--shard", f"{rank}/{world_size}"] if world_size > 1 else []
        pretokenize.main([*self.flags, *shard])
