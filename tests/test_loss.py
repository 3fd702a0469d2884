import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F  # noqa: N812

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.data.tokens import IGNORE_INDEX
from training.step.embedding import make_embeddings_deterministic
from training.step.loss import NextTokenLoss, _nats_of_one_kernel, linear_cross_entropy

# (rows, width, vocabulary): one chunk, then three; 1100 columns are computed as 1152, 50 as they are.
SHAPES = [(30, 8, 50), (30, 8, 1100), (2500, 8, 1100)]


def problem(rows: int, width: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[::7] = IGNORE_INDEX
    return states, weight, targets


def reference(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((states @ weight.T).float(), targets, reduction="sum", ignore_index=IGNORE_INDEX)


def gradients(loss, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
    value = loss(states, weight, targets) / 100
    return value, *torch.autograd.grad(value * 3, (states, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_match_cross_entropy(shape):
    inputs = problem(*shape)
    for result, reference_loss in zip(
        gradients(linear_cross_entropy, *inputs), gradients(reference, *inputs), strict=True
    ):
        torch.testing.assert_close(result, reference_loss, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*inputs), reference(*inputs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_as_accurate_as_autograd(precision):
    inputs = problem(*SHAPES[-1])
    exact = gradients(reference, *inputs)
    with torch.autocast("cpu", precision):
        result, autograds = gradients(linear_cross_entropy, *inputs), gradients(reference, *inputs)
    for one, autograd, truth in zip(result, autograds, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - truth).norm() <= 1.2 * (autograd - truth).norm() + 1e-6 * truth.norm()


def test_gpu_sum_matches_nll_loss():
    log_probabilities = torch.randn(30, 50).log_softmax(dim=-1)
    log_probabilities[3, 4] = -torch.inf  # not the target token
    targets = torch.arange(30) + 10
    targets[::7] = IGNORE_INDEX
    reference_loss = F.nll_loss(log_probabilities, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(_nats_of_one_kernel(log_probabilities, targets), reference_loss)


@pytest.mark.parametrize("compiled", [False, True])
def test_full_logits_are_not_kept_for_the_backward_pass(compiled):
    """2,500 rows of 1,100 logits: no kept tensor has as many values."""
    torch._dynamo.reset()
    sizes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    states, weight, targets = problem(*SHAPES[-1])
    loss = linear_cross_entropy
    loss = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(states, weight, targets)
    assert sorted(sizes)[-2:] == [1100 * 8, 2500 * 8]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_equal_eager_gradients(backend):
    """Of the loss alone and with the model, whose embeddings have gradients of their own. With a result that is changed
    in place, torch 2.11 loses them without an error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    make_embeddings_deterministic(model.transformer)
    loss, ids = NextTokenLoss(model), torch.randint(0, 64, (2, 16))
    for function, arguments, tensors in (
        (linear_cross_entropy, problem(*SHAPES[-1]), None),
        (loss, (ids, ids, 32), list(model.parameters())),
    ):
        tensors = tensors or arguments[:2]
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        reference_loss, result = (torch.autograd.grad(one(*arguments), tensors) for one in (function, compiled))
        for one, plain in zip(result, reference_loss, strict=True):
            assert plain.any()
            torch.testing.assert_close(one, plain)
