"""Pretokenization as a step of a datatrove pipeline: each task processes a share of the units, on any machine.

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
    """Pipeline step that runs `python -m tokenizer.pretokenize` with `flags`. Each task processes one shard."""

    flags: list[str]

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        """Process shard `rank` of `world_size`.
        Raise a `ValueError` if an earlier step yields documents, which this step would not read, and a `UserError` like the
        command. The executor counts the task as failed and repeats it in its next run."""
        if data is not None:
            raise ValueError("Pretokenize reads its own --input; it must be the first step of the pipeline.")
        shard = ["--shard", f"{rank}/{world_size}"] if world_size > 1 else []
        pretokenize.main([*self.flags, *shard])
