"""How long a run is: in steps, in epochs, or in tokens."""

import math
from dataclasses import dataclass

from limits import setting
from training.batches import BatchPlan


@dataclass
class LengthArguments:
    """One of the three; one epoch where none is given."""

    max_steps: int | None = setting(None, "Length of the run in steps.", minimum=1)
    num_train_epochs: float | None = setting(None, "Length of the run in passes over the text.", above=0, maximum=10**6)
    max_train_tokens: int | None = setting(None, "Length of the run in tokens.", minimum=1)

    def problems(self) -> list[str]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) <= 1:
            return []
        pairs = " and ".join(f"{name} {value}" for name, value in given.items())
        return [f"{pairs} are given together; the length of a run is only one of them."]


def steps_of(arguments: LengthArguments, batches: BatchPlan, windows: int) -> int:
    """The number of steps. A last step that is begun is done whole."""
    if arguments.max_steps is not None:
        return arguments.max_steps
    if arguments.max_train_tokens is not None:
        return math.ceil(arguments.max_train_tokens / (batches.sequences * batches.context))
    return math.ceil((arguments.num_train_epochs or 1) * windows / batches.sequences)
