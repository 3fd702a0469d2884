"""Gradients of embeddings without atomic additions when compiled."""

from collections import Counter

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import training.runtime.compilation  # noqa: F401  (it changes Inductor's table)
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.step.loss import NextTokenLoss

BATCH = torch.randint(0, 7, (4, 16), generator=torch.Generator().manual_seed(0))  # each id several times
DOCUMENTS = (torch.arange(16) % 5).expand(4, 16).contiguous()  # positions that restart


def test_compiled_gradients_use_pytorchs_kernel_and_no_atomic_additions():
    """Looks at the backward graph that Inductor would receive."""
    torch._dynamo.reset()
    operations = Counter()

    def look(graph: torch.fx.GraphModule, _inputs):
        operations.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    compilers = {"fw_compiler": lambda graph, _inputs: make_boxed_func(graph), "bw_compiler": look}
    backend = aot_autograd(**compilers, decompositions=select_decomp_table())
    config = GPT2ScratchConfig(vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16)
    loss = NextTokenLoss(GPT2ScratchForCausalLM(config))
    loss.compile(backend=backend, fullgraph=True, dynamic=False)
    loss(BATCH, BATCH, 64, DOCUMENTS).backward()
    assert operations["aten.embedding_dense_backward.default"] == 2  # tokens and positions
    for name in ("index_put", "_unsafe_masked_index_put_accumulate", "_unsafe_index_put"):
        assert operations[f"aten.{name}.default"] == 0
