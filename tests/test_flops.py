"""FLOPs per token and peak FLOP/s of devices, which together give MFU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import MODERN
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.log.speed import flops_per_token
from training.runtime import hardware
from training.runtime.hardware import peak_flops
from training.step.size import size_of


@pytest.mark.parametrize(
    "shape",
    [
        {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16, "vocab_size": 32},
        {"n_layer": 3, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 50, "n_inner": 24},
        {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 7, "tie_word_embeddings": True},
        MODERN | {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 40},
    ],
)
def test_flops_formula_matches_the_count_of_torch(shape):
    """Eager attention multiplies whole T x T matrices."""
    config = GPT2ScratchConfig(**shape)
    model = GPT2ScratchForCausalLM._from_config(config, attn_implementation="eager")
    windows = torch.zeros(3, config.n_positions, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(windows, labels=windows).loss.backward()
    assert counter.get_total_flops() == flops_per_token(config, causal=False) * windows.numel()
    attention = 12 * config.n_layer * config.n_embd * config.n_positions
    assert flops_per_token(config) == flops_per_token(config, causal=False) - attention // 2


def test_untied_model_has_two_sizes():
    shape = {"vocab_size": 50257, "n_positions": 1024, "n_head": 6}
    assert size_of(GPT2ScratchConfig(**MODERN, **shape))[:2] == (162_129_408, 123_532_032)
    assert size_of(GPT2ScratchConfig(**shape, tie_word_embeddings=True))[:2] == (124_439_808, 123_532_032)


PEAKS = [  # every form of a name that drivers report
    *(("NVIDIA H200", "bf16", 989.4), ("NVIDIA H200 NVL", "bf16", 835.5), ("NVIDIA H100 80GB HBM3", "bf16", 989.4)),
    *(("NVIDIA A100-SXM4-40GB", "bf16", 312), ("NVIDIA A100 80GB PCIe", "fp16", 312), ("NVIDIA L40S", "bf16", 362)),
    *(("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2), ("NVIDIA GeForce RTX 4090", "bf16", 165.2)),
    *(("AMD Instinct MI300X OAM", "bf16", 1307.4), ("Tesla V100-PCIE-32GB", "fp16", 112), ("Tesla T4", "no", 8.1)),
]


@pytest.mark.parametrize(("name", "precision", "teraflops"), PEAKS)
def test_peak_flops_match_the_datasheets(name, precision, teraflops):
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12)


# The first two are fractions of a device.
NOT_LISTED = ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10-24Q", "AMD Radeon Graphics", "Quadro RTX 6000", ""]
NOT_LISTED += ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3080 Ti"]
NOT_LISTED += ["NVIDIA L40", "NVIDIA H20", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"]


@pytest.mark.parametrize("name", NOT_LISTED)
def test_unlisted_device_has_no_peak(name):
    assert peak_flops(name, "bf16") is None


def test_every_device_in_the_table_is_found():
    for name, (half, _) in hardware._DATA["datasheets"].items():
        assert peak_flops(name, "bf16") == half * 1e12
