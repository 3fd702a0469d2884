"""The GPU path on a CUDA runtime that computes nothing. See README.md."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILD = Path(__file__).parent / "build"
CARDS = {  # name, compute capability, multiprocessors, GB
    "P100": "Tesla P100-PCIE-16GB,60,56,17.1",
    "V100": "Tesla V100-SXM2-16GB,70,80,16.9",
    "T4": "Tesla T4,75,40,15.8",
    "L4": "NVIDIA L4,89,58,23.7",
    "H100": "NVIDIA H100 80GB HBM3,90,132,85.0",
}


def on_card(card: str, *command: str | Path, **environment: str | Path) -> subprocess.CompletedProcess:
    """Runs Python with the arguments `command` on a machine with this card."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "FAKE_GPU": CARDS[card],
            "LD_PRELOAD": str(BUILD / "libcuda.so.1"),
            "TRITON_LIBCUDA_PATH": str(BUILD),
            "HF_HUB_OFFLINE": "1",
            **{name: str(value) for name, value in environment.items()},
        },
        capture_output=True,
        text=True,
        check=False,
    )


ATTENTION = """if True:
    import torch
    from modeling_gpt2scratch import GPT2ScratchConfig
    from training.device import kernel_of_sdpa
    for precision in ("fp16", "bf16", "no"):
        for dropout in (0.0, 0.1):
            for mask in (False, True):
                model = GPT2ScratchConfig(attn_pdrop=dropout)
                print(precision, dropout, mask, kernel_of_sdpa(torch.device("cuda"), precision, model, mask))
"""


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("T4", {"fp16 0.0 False": "efficient", "fp16 0.0 True": "efficient", "no 0.1 False": "efficient"}),
        ("L4", {"bf16 0.0 False": "flash", "bf16 0.0 True": "efficient", "bf16 0.1 False": "flash"}),
        ("H100", {"bf16 0.0 False": "cudnn", "bf16 0.1 False": "flash", "no 0.0 True": "efficient"}),
    ],
)
def test_attention_runs_in_the_fastest_kernel_of_the_card(card, expected):
    done = on_card(card, "-c", ATTENTION)
    assert done.returncode == 0, done.stderr
    chosen = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert "math" not in {kernel for case, kernel in chosen.items() if not (card == "T4" and "bf16" in case)}
    assert {case: chosen[case] for case in expected} == expected
