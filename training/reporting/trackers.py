"""What a run logs, how often, and to whom: the trackers that Accelerate knows."""

from dataclasses import dataclass, field

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType


@dataclass
class JournalArguments:
    logging_steps: int = field(
        default=10, metadata={"help": "Steps between log lines; each waits for the device once."}
    )
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "Trackers of Accelerate to log to: tensorboard, wandb, ... or all."}
    )

    def trackers(self) -> list[str] | None:
        """Those that Accelerate can open; what is wrong with the others is told with all other problems."""
        return [name for name in self.report_to if _tracker_problem(name) is None] or None

    def problems(self) -> list[str]:
        return [problem for name in self.report_to if (problem := _tracker_problem(name)) is not None]


def _tracker_problem(name: str) -> str | None:
    """What Accelerate would drop without a word, or end in a traceback for."""
    known = [str(tracker) for tracker in LoggerType]
    if name not in known:
        return f"report_to names {name!r}; the trackers are {', '.join(known)}."
    if name != "all" and name not in map(str, get_available_trackers()):
        return f"report_to names {name}, which is not installed: pip install {name}."
    return None


def for_trackers(name: str) -> str:
    """eval_loss -> eval/loss, loss -> train/loss, as Transformers' Trainer tells its trackers."""
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
