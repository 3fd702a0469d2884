"""Gradients of embeddings: equal to PyTorch's, and without atomic additions when compiled."""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from conftest import MODERN
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.step.embedding import make_embeddings_deterministic
from training.step.loss import NextTokenLoss

BATCH = torch.randint(0, 7, (4, 16), generator=torch.Generator().manual_seed(0))  # each id several times
DOCUMENTS = (torch.arange(16) % 5).expand(4, 16).contiguous()  # positions that restart

TINY = {"vocab_size": 30, "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}


def loss_of(deterministic: bool, **fields) -> NextTokenLoss:
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**TINY, **fields))
    torch.nn.init.normal_(model.lm_head.weight)  # zero in the modern family
    if deterministic:
        make_embeddings_deterministic(model.transformer)
    return NextTokenLoss(model)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, MODERN], ids=["untied", "tied", "modern"])
@pytest.mark.parametrize("positions", [None, DOCUMENTS], ids=["plain", "packed"])
def test_loss_and_gradients_match_plain_embeddings(fields, positions):
    plain, result = loss_of(False, **fields), loss_of(True, **fields)
    assert result.state_dict().keys() == plain.state_dict().keys()
    values = [loss(BATCH, BATCH, 64, positions) for loss in (plain, result)]
    assert torch.equal(*values)
    for value in values:
        value.backward()
    for (name, one), reference in zip(plain.named_parameters(), result.parameters(), strict=True):
        assert torch.equal(one.grad, reference.grad), name
    assert plain.model.transformer.wte.weight.grad.any()


def backward_operations(deterministic: bool) -> Counter:
    """Count the operations of the backward graph that Inductor would receive."""
    torch._dynamo.reset()
    operations = Counter()

    def look(graph: torch.fx.GraphModule, _inputs):
        operations.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    compilers = {"fw_compiler": lambda graph, _inputs: make_boxed_func(graph), "bw_compiler": look}
    backend = aot_autograd(**compilers, decompositions=select_decomp_table())
    loss = loss_of(deterministic)
    loss.compile(backend=backend, fullgraph=True, dynamic=False)
    loss(BATCH, BATCH, 64, DOCUMENTS).backward()
    return operations


def test_compiled_gradients_use_no_atomic_additions():
    names = ("index_put", "_unsafe_masked_index_put_accumulate", "_unsafe_index_put")
    atomic = [f"aten.{name}.default" for name in names]
    plain, result = backward_operations(False), backward_operations(True)
    assert sum(plain[name] for name in atomic) == 2  # tokens and positions: plain embeddings do use them
    assert sum(result[name] for name in atomic) == 0
    assert result["gpt2scratch.embedding_gradient.default"] == 2
