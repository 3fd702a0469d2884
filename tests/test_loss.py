import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F  # noqa: N812

from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.data.tokens import IGNORE_INDEX
from training.step.loss import NextTokenLoss, _nats_of_one_kernel, linear_cross_entropy, second_targets

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


def gradients(loss, states: torch.Tensor, weight: torch.Tensor, *targets: torch.Tensor):
    value = loss(states, weight, *targets) / 100
    return value, *torch.autograd.grad(value * 3, (states, weight))


WEIGHT = torch.tensor(0.25)


def with_second_targets(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some rows have only one of the two targets, some neither, some twice the same."""
    return targets, targets.roll(1).where(torch.arange(len(targets)) % 5 > 0, targets), WEIGHT


def reference_of_both(states, weight, targets, second, second_weight):
    return reference(states, weight, targets) + second_weight * reference(states, weight, second)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_match_cross_entropy(shape):
    inputs = problem(*shape)
    for result, reference_loss in zip(
        gradients(linear_cross_entropy, *inputs), gradients(reference, *inputs), strict=True
    ):
        torch.testing.assert_close(result, reference_loss, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*inputs), reference(*inputs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_second_targets_change_the_gradients_and_not_the_loss(shape):
    states, weight, targets = problem(*shape)
    inputs = states, weight, *with_second_targets(targets)
    value, *result = gradients(linear_cross_entropy, *inputs)
    for one, expectation in zip(result, gradients(reference_of_both, *inputs)[1:], strict=True):
        torch.testing.assert_close(one, expectation, rtol=1e-5, atol=1e-5)
    plain, *plain_gradients = gradients(linear_cross_entropy, states, weight, targets)
    assert value == plain
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*inputs) / 100, plain, rtol=1e-6, atol=0)
    without_weight = gradients(linear_cross_entropy, *inputs[:4], torch.tensor(0.0))
    assert all(map(torch.equal, without_weight, (plain, *plain_gradients)))


def test_second_targets_end_with_the_row_and_with_the_document():
    targets = torch.tensor([[3, 9, 0, 5, 0, 7], [1, 2, 0, 8, 4, 6]])
    assert second_targets(targets, None).tolist() == [[9, 0, 5, 0, 7, -100], [2, 0, 8, 4, 6, -100]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 0, 1, 2]])  # a 0 as the last target of a document
    assert second_targets(targets, positions).tolist() == [[9, 0, -100, 0, -100, -100], [2, 0, -100, 4, 6, -100]]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_second", [False, True])
def test_mixed_precision_is_as_accurate_as_autograd(precision, has_second):
    states, weight, targets = problem(*SHAPES[-1])
    inputs = states, weight, *(with_second_targets(targets) if has_second else (targets,))
    reference_loss = reference_of_both if has_second else reference
    exact = gradients(reference_loss, *inputs)
    with torch.autocast("cpu", precision):
        result, autograds = gradients(linear_cross_entropy, *inputs), gradients(reference_loss, *inputs)
    if has_second:  # the value is that of the first targets
        result, autograds, exact = result[1:], autograds[1:], exact[1:]
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
    loss, ids = NextTokenLoss(model), torch.randint(0, 64, (2, 16))
    states, weight, targets = problem(*SHAPES[-1])
    for function, arguments, tensors in (
        (linear_cross_entropy, (states, weight, targets), None),
        (linear_cross_entropy, (states, weight, *with_second_targets(targets)), None),
        (loss, (ids, ids, 32), list(model.parameters())),
        (loss, (ids, ids, 32, None, WEIGHT), list(model.parameters())),
    ):
        tensors = tensors or arguments[:2]
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        reference_loss, result = (torch.autograd.grad(one(*arguments), tensors) for one in (function, compiled))
        for one, plain in zip(result, reference_loss, strict=True):
            assert plain.any()
            torch.testing.assert_close(one, plain)
