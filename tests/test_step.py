import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from accelerate import Accelerator

from conftest import metrics, reset_accelerate
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.data.batches import BatchPlan, TrainBatches, WindowOrder
from training.data.tokens import Batch, Tokens
from training.runtime.device import Setup
from training.step.loss import NextTokenLoss
from training.step.optim import OptimArguments
from training.step.train_step import TrainStep, build_train_step

CONFIG = GPT2ScratchConfig(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
TOKENS = np.random.default_rng(0).integers(0, 50, 3000).astype(np.uint16)


def tokens(device: torch.device, place: str = "ram", segments: np.ndarray | None = None) -> Tokens:
    values = torch.from_numpy(TOKENS.view(np.int16))
    return Tokens(values.to(device) if place == "device" else values, device, segments)


def train_step(micro_batch: int, accumulation: int, optimizer: str = "adamw") -> TrainStep:
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.step = 1  # as after a measurement of speed
    plan = BatchPlan(16, micro_batch, accumulation, 1)
    batches = TrainBatches(tokens(accelerator.device), WindowOrder(len(TOKENS), 16, seed=1), plan, 0)
    setup = Setup("no", False, "eager", ())
    return build_train_step(deepcopy(CONFIG), None, batches, OptimArguments(optimizer, 0.01), setup, accelerator)


def fresh() -> GPT2ScratchForCausalLM:
    torch.manual_seed(0)
    return GPT2ScratchForCausalLM(CONFIG)


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 2), (1, 8)])
def test_accumulation_equals_the_large_batch(micro_batch, accumulation):
    single = train_step(8, 1)
    one = single(3, 1.0, 0.3)
    parts = train_step(micro_batch, accumulation)  # has its own accelerator: all accelerators share their state
    other = parts(3, 1.0, 0.3)
    assert one[0].shape == one[1].shape == ()  # and no logits
    assert not one[0].requires_grad
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-6)  # loss
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-6)  # gradient norm
    for (name, a), b in zip(single.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(("poison", "optimizer"), [(math.nan, "adamw"), (math.inf, "adamw"), (math.inf, "muon")])
def test_a_step_with_nonfinite_gradients_changes_nothing(poison, optimizer):
    """One token has a nonfinite embedding, so batches with this token have a nonfinite loss or gradient."""
    faulty = train_step(4, 2, optimizer=optimizer)
    model = faulty.model
    batches = [faulty.batches(step, micro_step).inputs for step in range(60) for micro_step in range(2)]
    rare = min(range(50), key=lambda token: sum(bool((batch == token).any()) for batch in batches))
    with_it = [bool((batches[2 * step] == rare).any() or (batches[2 * step + 1] == rare).any()) for step in range(60)]
    assert True in with_it
    assert False in with_it
    with torch.no_grad():
        model.transformer.wte.weight[rare] = poison
    state = faulty.optimizer.state
    changes, counts = [], []
    for step in range(60):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        moments = [moment.clone() for values in state.values() for moment in values.values()]
        loss, grad_norm = faulty(step, 0.1)
        pairs = zip(weights, model.parameters(), strict=True)
        equal = [torch.equal(a.nan_to_num(), b.detach().nan_to_num()) for a, b in pairs]
        changes.append(not all(equal))
        assert bool(loss.isfinite() and grad_norm.isfinite()) is changes[-1]
        if not changes[-1] and moments:
            moments_after_step = [moment for values in state.values() for moment in values.values()]
            assert all(torch.equal(a, b) for a, b in zip(moments, moments_after_step, strict=True))
        counts.append(int(next(iter(state.values()))["step"]) if state else 0)
    assert changes == [not poisoned_batch for poisoned_batch in with_it]
    assert counts[-1] == sum(changes)


def test_model_and_loss_compile_once_into_one_graph_without_attention_mask():
    """A (T, T) tensor in the graph would mean that attention left its fast path."""
    torch._dynamo.reset()
    graphs = []
    keep = {"backend": lambda graph, _: graphs.append(graph) or graph, "fullgraph": True, "dynamic": False}
    loss = torch.compile(NextTokenLoss(fresh()), **keep)
    for seed in range(3):
        windows = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(seed))
        loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), 22).backward()
    [graph] = graphs
    tensors = [node.meta.get("example_value") for node in graph.graph.nodes]
    shapes = [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert shapes
    assert not [shape for shape in shapes if shape[-2:] == (11, 11)]


EOS = 0
PIECES = ([7, 3, 9, EOS], [EOS, 5, EOS], [EOS, 2, 8, 4, 6, 2, EOS], [EOS, 30, 31])  # windows start within documents


def packed_batch() -> Batch:
    """Two rows of four documents, the last one cut off. End-of-text is the last target of a document and the first
    input of the next."""
    ids = np.array([7, 3, 9, EOS, 5, EOS, 2, 8, 4, 6, 2, EOS, 30, 31, 32], dtype=np.int16)
    segments = np.array([0, 4, 6, 12, 15]) - 1
    return Tokens(torch.from_numpy(ids), torch.device("cpu"), segments).batch(np.array([0, 1]), 13)


def loss_of_documents_alone(model: GPT2ScratchForCausalLM) -> torch.Tensor:
    """Mean loss over all targets of `packed_batch`, computed per document, with no code of ours except the model."""
    nats = torch.zeros(())
    for pieces in (PIECES, ([3, 9, EOS], *PIECES[1:3], [EOS, 30, 31, 32])):
        for piece in pieces:
            ids = torch.tensor([piece])
            nats += torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
    return nats / 26


@pytest.mark.parametrize(("attention", "tied"), [("eager", False), ("sdpa", False), ("sdpa", True)])
def test_masked_documents_train_as_if_separate(attention, tied):
    config = GPT2ScratchConfig(**CONFIG.to_diff_dict() | {"tie_word_embeddings": tied})
    packed_model, document_model = (
        GPT2ScratchForCausalLM._from_config(config, attn_implementation=attention) for _ in range(2)
    )
    document_model.load_state_dict(packed_model.state_dict())
    inputs, targets, positions = packed_batch()
    batch_loss = NextTokenLoss(packed_model)(inputs, targets, 26, positions)
    document_loss = loss_of_documents_alone(document_model)
    torch.testing.assert_close(batch_loss, document_loss, rtol=0, atol=1e-5)
    batch_loss.backward()
    document_loss.backward()
    for (name, a), b in zip(packed_model.named_parameters(), document_model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5, msg=name)
    crossing = NextTokenLoss(document_model)(inputs, targets, 26)
    assert (crossing - document_loss).abs() > 1e-4  # only the mask makes them equal


def test_masked_documents_compile_once_into_one_graph():
    """Also for a batch in which no document ends, and for other weights of the second targets."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = fresh()
    loss = torch.compile(NextTokenLoss(model), backend=counter, fullgraph=True, dynamic=False)
    values = torch.from_numpy(TOKENS.view(np.int16))
    for length in (5, 11, 1000):
        segments = np.arange(0, 3001, length) - 1
        batch = Tokens(values, torch.device("cpu"), segments).batch(np.array([40, 200]), 16)
        results = []
        for function in (loss, NextTokenLoss(model)):
            value = function(batch.inputs, batch.targets, 32, batch.positions, torch.tensor(1 / length))
            results.append((value, *torch.autograd.grad(value, list(model.parameters()))))
        torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("place", ["ram", "device"])
def test_a_step_never_waits_for_the_device(place):
    accelerator = Accelerator(mixed_precision="bf16")
    device_tokens = tokens(accelerator.device, place)
    batches = TrainBatches(device_tokens, WindowOrder(len(TOKENS), 16, 1), BatchPlan(16, 4, 1, 1), 0)
    setup = Setup("bf16", False, "sdpa", ())
    ready = build_train_step(deepcopy(CONFIG), None, batches, OptimArguments(), setup, accelerator)
    ready(0, 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ready(1, 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_training_learns_and_a_short_validation_is_not_compiled(train, tmp_path):
    torch._dynamo.utils.counters.clear()
    run = train(tmp_path / "run", torch_compile="true", max_steps=30, n_layer=1, eval_strategy="no")
    losses = [entry["loss"] for entry in metrics(run) if "loss" in entry]
    assert losses[-1] < losses[0] - 1  # nats
    assert "eval_loss" in metrics(run)[-1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
