"""What a token costs, and what a device could do: the two numbers behind MFU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.planning.datasheet import TERAFLOPS_AND_WATTS, peak_of, watts_of
from training.planning.flops import flops_per_token


@pytest.mark.parametrize(
    ("shape", "causal", "palm"),
    [
        ({}, 685_375_488, 713_687_040),  # gpt2_small_seed
        # gpt2, its head padded to a multiple of 64, as nanoGPT has it
        ({"vocab_size": 50304, "n_positions": 1024, "tie_word_embeddings": True}, 798_031_872, 854_654_976),
    ],
)
def test_a_token_of_the_presets_costs(shape, causal, palm):
    config = GPT2ScratchConfig(**shape)
    assert flops_per_token(config) == causal
    assert flops_per_token(config, causal=False) == palm


@pytest.mark.parametrize(
    "shape",
    [
        {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16, "vocab_size": 32},
        {"n_layer": 3, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 50, "n_inner": 24},
        {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 7, "tie_word_embeddings": True},
    ],
)
def test_the_formula_counts_what_torch_counts(shape):
    """Written out, attention multiplies whole T x T matrices."""
    config = GPT2ScratchConfig(**shape)
    model = GPT2ScratchForCausalLM._from_config(config, attn_implementation="eager")
    windows = torch.zeros(3, config.n_positions, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(windows, labels=windows).loss.backward()
    assert counter.get_total_flops() == flops_per_token(config, causal=False) * windows.numel()
    attention = 12 * config.n_layer * config.n_embd * config.n_positions
    assert flops_per_token(config) == flops_per_token(config, causal=False) - attention // 2


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "no", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA A100-PCIE-40GB", "no", 156),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A4000", "bf16", 76.7),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "no", 8.1),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("AMD Instinct MI300X OAM", "bf16", 1307.4),
    ],
)
def test_devices_by_their_datasheets(name, precision, teraflops):
    assert peak_of(name, precision) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10-24Q",  # a share of one
        *("NVIDIA H20", "NVIDIA L40", "Quadro RTX 6000", "AMD Radeon Graphics", ""),
    ],
)
def test_a_device_that_is_not_in_the_table_is_no_other(name):
    assert peak_of(name, "bf16") is None


def test_the_table_can_be_reached():
    for name, (half, _, watts) in TERAFLOPS_AND_WATTS.items():
        assert peak_of(name, "bf16") == half * 1e12
        assert watts_of(name) == watts
