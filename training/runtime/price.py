"""Amounts of time, dollars, Colab compute units or floating-point operations, and the prices of devices."""

import math
import os
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.errors import UserError
from common.limits import setting
from training.runtime.hardware import DOLLARS_PER_COLAB_UNIT, PRICES_OF, RENTALS, device_model

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
LONGEST = 100 * 365 * 86_400  # seconds of a budget
NUMBER = r"(\d{1,15}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)"
AMOUNT_PATTERN = re.compile(rf"{NUMBER}\s*({'|'.join(SECONDS)}|usd|units|flops)", re.ASCII)
# Kaggle has Colab's image.
IN_COLAB = "COLAB_RELEASE_TAG" in os.environ and "KAGGLE_KERNEL_RUN_TYPE" not in os.environ
FORMS = "such as 90m, 3h, 5usd, 120units (of Colab) or 2e18flops"


class Amount(NamedTuple):
    number: float
    unit: str  # a key of SECONDS, usd, units or flops

    def __str__(self) -> str:
        names = {"usd": "dollars", "flops": "FLOPs", "m": "min"}
        return f"{self.number:.6g} {names.get(self.unit, self.unit)}"


@dataclass
class BudgetArguments:
    """Settings that replace a choice of vocabulary, model, tokens, batch and rates by hand (sizing.py)."""

    budget: str | None = setting(None, f"Choose the model for a budget, {FORMS}.", resume="derived")
    family: Literal["gpt2", "modern"] | None = setting(
        None, "With --budget or --depth: architecture and optimizer. Default: modern.", resume="derived"
    )
    depth: int | None = setting(
        None, "Choose the rest for this number of layers, of width 64 each.", minimum=1, maximum=100, resume="derived"
    )

    @property
    def amount(self) -> Amount | None:
        match = AMOUNT_PATTERN.fullmatch(self.budget.strip().lower()) if self.budget is not None else None
        return Amount(float(match[1]), match[2]) if match else None

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

    def seconds(self, amount: Amount) -> float:
        """Return the seconds that an amount of time or money pays for. Raise a `UserError` if the price in its unit is
        unknown, or if they are more than 100 years."""
        is_money, price = amount.unit == "usd", self.dollars if amount.unit == "usd" else self.units
        if amount.unit in SECONDS:
            seconds = amount.number * SECONDS[amount.unit]
        elif price is not None:
            seconds = 3600 * amount.number / price if price else math.inf
        else:
            remedy = "add --hourly_price" if is_money else "give a time such as 3h"
            raise UserError(
                f"budget is {amount}, but the hourly price of {self.device or 'this CPU'} in this unit is not known; "
                f"{remedy}, or use --plan with a device of known price, such as --plan_device "
                f"{'a100-80gb' if is_money else 'a100-40gb'}, for a text of 20 MB or more."
            )
        if seconds > LONGEST:
            values = f"{amount}, at {price:g} dollars per hour" if is_money else f"{amount}"
            raise UserError(f"budget is {values}, more than 100 years; use a smaller one, or a time such as 3h.")
        return seconds

    def so_far(self, seconds: float, eta: float | None) -> str:
        """Return the known costs of a run after `seconds`, of those at its end in `eta` seconds, if known:
        `$0.40 of $1.20  4.00 of 12.00 units`."""
        costs, hours = [], [seconds / 3600] + ([] if eta is None else [(seconds + eta) / 3600])
        if self.dollars is not None:
            costs.append(" of ".join(f"${value * self.dollars:,.2f}" for value in hours))
        if self.units is not None:
            costs.append(" of ".join(f"{value * self.units:,.2f}" for value in hours) + " units")
        return "  ".join(costs)

    def verdict(self, amount: Amount, seconds: float) -> str:
        """Compare an amount of time or money with the `seconds` that a run needs: `120 units available, 96 needed:
        sufficient, 20% margin`. All known prices follow."""
        share, hours = seconds / self.seconds(amount), seconds / 3600
        state = f"sufficient, {1 - share:.0%} margin" if share <= 1 else f"NOT sufficient, {share - 1:.0%} too little"
        costs = {"dollars": self.dollars, "Colab units": self.units}
        prices = [f"{hours * price:,.2f} {name}" for name, price in costs.items() if price is not None]
        source = f"; {hours:,.2f} hours cost {' or '.join(prices)} ({self.source})" if prices else ""
        needed = share * amount.number
        return f"{amount} available, {needed:{',.0f' if needed >= 999.5 else '.3g'}} needed: {state}{source}"


def price_in_log(device: str, hourly_price: float | None, processes: int) -> Price:
    """Return the price whose costs a log line shows: dollars if `hourly_price` was given, units if Colab takes them."""
    units = price_of(device, None, hourly_price, processes).units if IN_COLAB else None
    return Price(device, hourly_price, units, "hourly_price")


def price_of(device: str, plan_device: str | None, hourly_price: float | None, processes: int) -> Price:
    """Return the price of `processes` devices. `device`: name of the local GPU. `hourly_price`: dollars for all of
    them. Of a range of prices, the highest counts."""
    similar = [rental for rental in RENTALS.values() if device and rental.datasheet == device_model(device)]
    rentals = similar if plan_device is None else [RENTALS[plan_device]]
    units = next((rental.colab_units * processes for rental in rentals if rental.colab_units is not None), None)
    dollars = next((rental.dollars[1] * processes for rental in rentals if rental.dollars is not None), None)
    if hourly_price is not None:
        return Price(device, hourly_price, units, "hourly_price")
    if dollars is None and units is not None:
        dollars = units * DOLLARS_PER_COLAB_UNIT
    return Price(device if plan_device is None else rentals[0].name, dollars, units, f"prices of {PRICES_OF}")
