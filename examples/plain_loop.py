"""The training of train_accelerate.py in one page: one process, without resume, logs, checks and several GPUs.

python -m tokenizer.pretokenize --input python-standard-library --vocab_size 2048 --output data/plain
python -m examples.plain_loop data/plain runs/plain
python generate.py runs/plain --prompt "def "

With the same store and settings, the weights are those of train_accelerate.py, bit for bit on a CPU. To compare, use
`python train_accelerate.py --config presets/quickstart.yaml --data data/plain --torch_compile true`.
"""

import training.runtime.threads  # noqa: F401  (before torch: all cores)

# isort: split
import sys

import torch
from torch import nn

from common.machine import keep_freed_memory
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from tokenizer.store.store import TokenStore
from training.data.batches import BatchPlan, TrainBatches, WindowOrder
from training.data.run_data import place_tokens
from training.runtime.device import DeviceArguments, Setup, decide
from training.step.induction import add_induction
from training.step.loss import NextTokenLoss
from training.step.model import TOKEN_IDS, build_model
from training.step.optim import (
    OptimArguments,
    build_optimizer,
    schedule,
    second_target_weight,
    set_rates,
    with_defaults,
)

STEPS, ROWS, SEED = 1200, 16, 1337
ARCHITECTURE = {"normalization": "rms_norm", "activation_function": "relu2", "use_bias": False}
ARCHITECTURE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 128, "n_positions": 256, "initializer_range": 0.051}
OPTIMIZER = {"optimizer": "muon", "weight_decay": 0.13, "second_target_weight": 0.5, "induction_init": True}


def main(source: str, output: str) -> None:
    keep_freed_memory()
    store = TokenStore(source)
    tokenizer = store.load_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
    config = GPT2ScratchConfig(vocab_size=store.metadata.vocab_size, **ARCHITECTURE, **SHAPE, **ids)
    arguments = with_defaults(OptimArguments(**OPTIMIZER), {*OPTIMIZER}, ROWS * config.n_positions, config)
    setup = decide(DeviceArguments(), config.n_positions)  # bf16 and compilation, where they are faster
    model = train(store, config, arguments, setup, STEPS, ROWS)
    model.save_pretrained(output)
    tokenizer.model_max_length = config.n_positions
    tokenizer.save_pretrained(output)


def train(
    store: TokenStore, config: GPT2ScratchConfig, arguments: OptimArguments, setup: Setup, steps: int, rows: int
) -> GPT2ScratchForCausalLM:
    """Train on `rows` sequences of `config.n_positions` tokens, (B, T), in each step. Return the model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, setup, SEED)
    if arguments.induction_init:
        add_induction(model)
    loss_of = NextTokenLoss(model.to(device).train())
    if setup.torch_compile:
        loss_of.compile(fullgraph=True, dynamic=False)
    bf16 = setup.mixed_precision == "bf16"
    optimizer = build_optimizer(model, arguments, device, torch.bfloat16 if bf16 else torch.float32)

    tokens = place_tokens(store, "train", "ram" if device.type == "cpu" else "device", device, mask_documents=False)
    order = WindowOrder(len(tokens), config.n_positions, SEED)
    batches = TrainBatches(tokens, order, BatchPlan(config.n_positions, rows, processes=1, accumulation=1), rank=0)

    for step in range(steps):
        inputs, targets, _ = batches(step, 0)  # (B, T) each
        set_rates(optimizer, step, schedule(step, steps, arguments))
        weight = second_target_weight(step, steps, arguments)
        second = () if weight is None else (torch.full((), weight, device=device),)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(inputs, targets, targets.numel(), None, *second)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 40 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    return model


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Usage: python -m examples.plain_loop STORE OUTPUT_FOLDER")
    main(*sys.argv[1:])
