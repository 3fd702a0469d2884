"""What devices cost to rent, and what they hold: for a plan. Prices drift; --hourly_price knows better."""

from dataclasses import dataclass

PRICES_OF = "May 2026"


@dataclass(frozen=True)
class Rental:
    name: str  # in words
    datasheet: str  # under which datasheet.py knows it
    gigabytes: float  # of memory
    dollars: tuple[float, float] | None  # an hour of one, from the cheapest to the dearest of the common offers
    colab_units: float | None = None  # an hour, where Colab has it
    too_old: tuple[int, int] | None = None  # compute capability without kernels in PyTorch's current builds


# Prices: overviews of on-demand offers of that month. Colab's units: of the A100 by the account that this project grew from; of the T4
# as Colab told an account in September 2026. Others are not known here; Colab shows the rate once a device is connected.
RENTALS = {
    "a100-40gb": Rental("A100 40 GB", "A100", 40, None, 8),
    "a100-80gb": Rental("A100 80 GB", "A100", 80, (0.80, 3.00)),
    "h100-80gb": Rental("H100 80 GB", "H100", 80, (1.99, 5.00)),
    "h200-141gb": Rental("H200 141 GB", "H200", 141, (2.50, 7.00)),
    "rtx4090-24gb": Rental("RTX 4090", "RTX 4090", 24, (0.50, 2.10)),
    "rtx3090-24gb": Rental("RTX 3090", "RTX 3090", 24, None),
    "l4-24gb": Rental("L4", "L4", 24, None),
    "t4-16gb": Rental("T4", "T4", 16, None, 1.07),
    "v100-16gb": Rental("V100 16 GB", "V100", 16, None, too_old=(7, 0)),
}
DOLLARS_A_COLAB_UNIT = 0.10  # 9.99 for 100
# MFU that others report for GPT-2 of 124M to 135M parameters on one device (nanoGPT, llm.c, nanochat, and the account that this
# project grew from): the lowest, a usual one, the highest.
REPORTED_MFU = {"A100": (0.29, 0.32, 0.56), "H100": (0.33, 0.38, 0.46)}
REPORTED_MFU["H200"] = REPORTED_MFU["H100"]  # the same processor, with more memory
UNREPORTED_MFU = (0.20, 0.30, 0.45)  # guessed from those


def reported_mfu(datasheet: str) -> tuple[float, float, float]:
    return REPORTED_MFU.get(datasheet.split()[0], UNREPORTED_MFU)
