"""Where a run stands in its data: arithmetic on a few numbers that every checkpoint holds.

Samples are counted over all processes. A step trains on the next `sequences` of them; what a run was told to pass over is
jumped. So any other number of processes, or another micro-batch, sees the same samples in the same order.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Position:
    """After `step` steps."""

    step: int = 0
    sample: int = 0  # that the next step begins with
    tokens: int = 0  # trained on so far
    passed_over: tuple[tuple[int, int], ...] = ()  # ranges of samples, [first, end), that no step is trained on

    def first_sample(self, step: int, sequences: int) -> int:
        """The sample that step `step`, at or after this position, begins with, at `sequences` samples a step.

        A step that would reach into a range begins behind it.
        """
        now, sample = self.step, self.sample
        for first, end in sorted(self.passed_over):
            whole = max(0, first - sample) // sequences  # steps that fit before the range
            if sample < end and now + whole <= step:
                now, sample = now + whole, end
        return sample + (step - now) * sequences

    def after(self, step: int, sequences: int, context: int) -> "Position":
        """The position after `step` steps in all."""
        tokens = self.tokens + (step - self.step) * sequences * context
        return replace(self, step=step, sample=self.first_sample(step, sequences), tokens=tokens)


START = Position()
