"""What a device could do at best, by its datasheet: what model FLOPs utilisation (MFU) is measured against; and its power."""

import re

import torch

# TFLOP/s of matrix products, dense: vendors like to print the sparse number, twice as much. First in bf16 and fp16,
# accumulated in fp32; then in fp32, which is TF32 where tensor cores have it (device.py asks for it). None: not known.
# Last, the watts that the board takes at most.
# The keys are what `model_of` leaves of a device's name. A device belongs here only if its vendor gives its number.
TERAFLOPS_AND_WATTS = {
    # NVIDIA Blackwell: datasheets of HGX B200 and GB200 NVL72, divided by their devices
    "GB200": (2500, 1250, 1200),
    "B200": (2250, 1125, 1000),
    # NVIDIA Hopper: datasheets of H100, H200 and GH200; bare names are the SXM modules
    "GH200": (989.4, 494.7, 700),
    "H200": (989.4, 494.7, 700),
    "H200 NVL": (835.5, 417.5, 600),
    "H100": (989.4, 494.7, 700),
    "H100 NVL": (835.5, 417.5, 400),
    "H100 PCIE": (756.5, 378, 350),
    # NVIDIA Ampere: datasheets of A100, A30, A10, A40, A10G (of AWS) and RTX A6000, A5000, A4000
    "A100": (312, 156, 400),
    "A100 PCIE": (312, 156, 300),
    "A30": (165, 82, 165),
    "A10": (125, 62.5, 150),
    "A10G": (70, 35, 300),
    "A40": (149.7, 74.8, 300),
    "RTX A6000": (154.8, 77.4, 300),
    "RTX A5000": (111.1, 55.6, 230),
    "RTX A4000": (76.7, 38.3, 140),
    # NVIDIA Ada: datasheets of L4, L40S and RTX Ada Generation. That of L40 disagrees with that of L40S, the same chip.
    "L4": (121, 60, 72),
    "L40S": (362, 183, 350),
    "RTX 6000 ADA": (364.2, 182.1, 300),
    "RTX 5000 ADA": (261.1, 130.5, 250),
    "RTX 4000 ADA": (106.9, 53.4, 130),
    # GeForce: appendices of the architecture whitepapers (GA102, Ada, RTX Blackwell). Its tensor cores are half as fast
    # when they accumulate in fp32, as training does.
    "RTX 5090": (209.5, 104.8, 575),
    "RTX 5080": (112.6, 56.3, 360),
    "RTX 5070 TI": (87.9, 43.9, 300),
    "RTX 4090": (165.2, 82.6, 450),
    "RTX 4080": (97.5, 48.7, 320),
    "RTX 4070": (58.3, 29.1, 200),
    "RTX 4060 TI": (44.1, 22.1, 160),
    "RTX 3090": (71, 35.6, 350),
    "RTX 3080": (59.5, 29.8, 320),
    "RTX 3070": (40.6, 20.3, 220),
    "RTX 3060": (25.5, 12.7, 170),
    # RTX Blackwell PRO whitepaper
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": (503.8, 251.9, 600),
    # NVIDIA Turing and Volta: datasheets of T4 and V100; neither has bf16 or TF32
    "T4": (65, 8.1, 70),
    "V100": (125, 15.7, 300),
    "V100 PCIE": (112, 14, 250),
    # AMD CDNA: datasheets of MI325X, MI300X and MI250X, half of which is a device to torch; TF32 is off there
    "MI325X": (1307.4, None, 1000),
    "MI300X": (1307.4, None, 750),
    "MI250X": (191.5, None, 280),
}
# Words of a device's name that change nothing about its speed. What else is in a name, as in `RTX 4090 Laptop GPU` or
# `A100-SXM4-40GB MIG 1g.5gb`, makes it another device.
NOT_THE_MODEL = re.compile(r"NVIDIA|AMD|TESLA|GEFORCE|INSTINCT|GENERATION|OAM|SXM\d?|HBM3E?|\d+GB")


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """FLOP/s of one device at best, where `mixed_precision` is no, bf16 or fp16; None where that is not known."""
    return peak_of(torch.cuda.get_device_name(device), mixed_precision) if device.type == "cuda" else None


def peak_of(name: str, mixed_precision: str) -> float | None:
    """The same for a device's name."""
    half, single, _ = TERAFLOPS_AND_WATTS.get(model_of(name), (None, None, None))
    teraflops = single if mixed_precision == "no" else half
    return None if teraflops is None else teraflops * 1e12


def watts(device: torch.device) -> float | None:
    """That one device takes at most; None where that is not known."""
    return watts_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def watts_of(name: str) -> float | None:
    """The same for a device's name."""
    return TERAFLOPS_AND_WATTS.get(model_of(name), (None, None, None))[2]


def model_of(name: str) -> str:
    """NVIDIA A100-SXM4-80GB -> A100"""
    return " ".join(word for word in re.split("[ -]", name.upper()) if not NOT_THE_MODEL.fullmatch(word))
