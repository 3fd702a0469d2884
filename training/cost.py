"""What a run costs: hours, money, energy, and the carbon dioxide of it; and whether to say so before it is begun."""

from dataclasses import dataclass

from accelerate import Accelerator

from limits import setting
from training import hardware
from training.hardware import RENTALS


@dataclass
class CostArguments:
    hourly_price: float | None = setting(
        None, "What an hour of all devices together costs, in dollars: for plan, report and model card.", resume="free"
    )
    plan: bool = setting(
        False, "Say what the run will take, and what is wrong with it, without training.", resume="free"
    )
    plan_device: str | None = setting(
        None,
        f"With --plan: for one of these, by its datasheet, not for what is here: {', '.join(RENTALS)}.",
        resume="free",
    )
    plan_steps: int = setting(
        10, "With --plan: steps that are really done, to measure; 0 for none.", maximum=10_000, resume="free"
    )

    def problems(self) -> list[str]:
        if self.plan_device is not None and self.plan_device not in RENTALS:
            return [f"plan_device is {self.plan_device!r}; it must be one of {', '.join(RENTALS)}."]
        if self.plan_device is not None and not self.plan:
            return [f"plan_device is {self.plan_device} without --plan, which it is for; add --plan, or leave it out."]
        return []


def watts_of_all(accelerator: Accelerator) -> float | None:
    """What all devices together take at most; None where that is not known."""
    each = hardware.watts(hardware.name_of(accelerator.device))
    return None if each is None else each * accelerator.num_processes
