"""The training loop in one page computes what train_accelerate.py computes."""

import torch
from transformers import AutoModelForCausalLM

from conftest import MODERN_RUN, trained
from examples import plain_loop
from modeling_gpt2scratch import GPT2ScratchConfig
from training.config import read_config
from training.runtime.device import DeviceArguments, decide


def test_the_weights_are_those_of_train_accelerate(store, tmp_path):
    """Eager, in the device's best precision."""
    names = ("learning_rate", "min_learning_rate", "warmup_steps", "initializer_range")
    settings = MODERN_RUN | dict.fromkeys(names) | {"optimizer": "muon", "mixed_precision": "auto", "n_embd": 32}
    settings |= {"induction_init": "true", "second_target_weight": 0.5, "tie_word_embeddings": False}
    run = trained(store, tmp_path / "run", **settings)
    arguments = read_config(["--resume_from_checkpoint", str(run)]).optim
    config = GPT2ScratchConfig.from_pretrained(run / "model")
    setup = decide(DeviceArguments(torch_compile="false"), config.n_positions)
    model = plain_loop.train(store, config, arguments, setup, steps=6, rows=4)
    expected = AutoModelForCausalLM.from_pretrained(run / "model", trust_remote_code=True).state_dict()
    assert arguments.induction_init
    assert len(expected) == 10
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
