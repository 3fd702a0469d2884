"""Budget of a run in time, dollars, Colab compute units or floating-point operations."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from errors import UserError
from limits import setting
from training.hardware import DOLLARS_PER_COLAB_UNIT, PRICES_OF, RENTALS, Rental, model_of

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
WRITTEN = re.compile(
    rf"(\d{{1,15}}(?:\.\d{{1,9}})?(?:e\+?\d{{1,2}})?)\s*({'|'.join(SECONDS)}|usd|units|flops)", re.ASCII
)
FORMS = "such as 90m, 3h, 5usd, 120units (of Colab) or 2e18flops"


class Amount(NamedTuple):
    number: float
    unit: str  # a key of SECONDS, usd, units or flops

    def __str__(self) -> str:
        names = {"usd": "dollars", "flops": "FLOPs", "m": "min"}
        return f"{self.number:.6g} {names.get(self.unit, self.unit)}"


@dataclass
class BudgetArguments:
    """Settings that replace a choice of model, tokens, batch and rates by hand (sizing.py)."""

    budget: str | None = setting(
        None,
        f"Choose model size, tokens, batch and rates for this budget, {FORMS}, and end the run at it.",
        resume="free",
    )
    family: Literal["gpt2", "modern"] | None = setting(
        None, "With --budget or --depth: architecture and optimizer. Default: modern.", resume="free"
    )
    depth: int | None = setting(
        None,
        "Make the same choice for this number of layers, of width 64 each; without --budget, for the best number of tokens.",
        minimum=1,
        maximum=100,
        resume="free",
    )

    @property
    def amount(self) -> Amount | None:
        found = WRITTEN.fullmatch(self.budget.strip().lower()) if self.budget is not None else None
        return Amount(float(found[1]), found[2]) if found else None

    @property
    def chooses(self) -> bool:
        return self.budget is not None or self.depth is not None

    def problems(self) -> list[str]:
        if self.budget is not None and not (self.amount and self.amount.number):
            return [f"budget is {self.budget!r}; it must be a number above 0 with a unit, {FORMS}."]
        if self.family is not None and not self.chooses:
            return [f"family is {self.family}, which only applies with --budget or --depth; add one of them."]
        return []


@dataclass(frozen=True)
class Price:
    """Price of all devices of a run per hour. None: unknown."""

    device: str
    dollars: float | None
    units: float | None
    source: str

    def seconds(self, amount: Amount) -> float | None:
        """Return the seconds that an amount pays for, or None for FLOPs. Raise a `UserError` if the price in its unit is unknown."""
        if amount.unit == "flops":
            return None
        if amount.unit in SECONDS:
            return amount.number * SECONDS[amount.unit]
        per_hour = self.dollars if amount.unit == "usd" else self.units
        if per_hour is None:
            known = [key for key, rental in RENTALS.items() if getattr(rental, _FIELDS[amount.unit]) is not None]
            remedy = (
                "add --hourly_price, or give a time such as 3h" if amount.unit == "usd" else "give a time such as 3h"
            )
            raise UserError(
                f"budget is {amount}, but the price of {self.device or 'this device'} in {_NAMES[amount.unit]} is not known; "
                f"{remedy}, or use --plan with --plan_device {' or '.join(known)}."
            )
        return 3600 * amount.number / per_hour

    def verdict(self, amount: Amount, seconds: float) -> str:
        """Compare an amount of time or money with the `seconds` that a run needs: `120 units available, 96 needed: sufficient, 20%
        margin`."""
        share = seconds / self.seconds(amount)
        state = "sufficient" if share <= 1 else "NOT sufficient"
        margin = f"{1 - share:.0%} margin" if share <= 1 else f"{share - 1:.0%} too little"
        return f"{amount} available, {share * amount.number:,.3g} needed: {state}, {margin}{self.cost(seconds)}"

    def cost(self, seconds: float) -> str:
        """Return the cost of `seconds` in every known unit, as a clause, or an empty string."""
        hours, parts = seconds / 3600, []
        if self.dollars is not None:
            parts.append(f"{hours * self.dollars:,.2f} dollars")
        if self.units is not None:
            parts.append(f"{hours * self.units:,.1f} Colab units")
        return f"; {hours:,.2f} hours are {' or '.join(parts)} ({self.source})" if parts else ""


_FIELDS = {"usd": "dollars", "units": "colab_units"}
_NAMES = {"usd": "dollars", "units": "Colab units"}


def price_of(device: str, plan_device: str | None, hourly_price: float | None, processes: int) -> Price:
    """Return the price of `processes` devices. `device`: name of the local GPU. `hourly_price`: dollars for all of them. Of a range of
    prices, the highest counts."""
    rentals = [RENTALS[plan_device]] if plan_device is not None else _like(device)
    units = next((rental.colab_units for rental in rentals if rental.colab_units is not None), None)
    dollars = next((rental.dollars[1] for rental in rentals if rental.dollars is not None), None)
    source = f"prices of {PRICES_OF}"
    if dollars is None and units is not None:
        dollars = units * DOLLARS_PER_COLAB_UNIT
    dollars, units = (None if one is None else one * processes for one in (dollars, units))
    if hourly_price is not None:
        dollars, source = hourly_price, "hourly_price"
    return Price(rentals[0].name if plan_device is not None else device, dollars, units, source)


def _like(device: str) -> list[Rental]:
    return [rental for rental in RENTALS.values() if device and rental.datasheet == model_of(device)]
