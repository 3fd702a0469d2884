"""Estimated memory of a training process, by component."""

from bisect import bisect_right
from dataclasses import dataclass

from modeling_gpt2scratch import GPT2ScratchConfig
from training.runtime.device import Setup, uses_mps
from training.step.loss import rows_of_chunk
from training.step.optim import moment_bytes, step_bytes
from training.step.size import size_of

USABLE = 0.8  # fraction of free memory; the rest is for workspaces, fragmentation and memory kept by compilation
LARGEST_MICRO_BATCH = 1 << 30  # sequences: more than any --per_device_train_batch_size
BYTES_KEPT_WHOLE = 4  # per parameter, with several processes: accumulated gradients, in addition to buckets or shards
# Bytes that a block keeps for its backward pass, each as (fp32, half): per token and unit of its width, and per unit of
# its MLP's width, before and after the activation (counted by test_memory.py).
KEPT, KEPT_BY_MLP = (32.4, 20.4), (8, 4)
# More of the same bytes. Rotation and QK-norm make further queries and keys. Without compilation, autocast normalizes
# queries and keys in fp32.
KEPT_BY_QUERIES, KEPT_BY_EAGER_QK_NORM = (8, 4), (0, 8)
# Per unit of the MLP's width. Without compilation, autocast squares in fp32 on a GPU; the backward pass of the square
# holds a further MLP tensor.
KEPT_BY_EAGER_SQUARE, SQUARE_BACKWARD = (0, 4), 4
# Bytes that eager attention keeps, per token, head and attended position.
SCORES_IN_FP32, SCORES_IN_HALF = 4, 6
# The same with dropout on a CPU, where no kernel of SDPA has it: without and with compilation, each as (fp32, half).
SCORES_WITH_DROPOUT = (12, 8), (9, 6)
# Additional temporary bytes, each as (fp32, half). On a GPU as counted by its allocator for 1, 3, 4 and 12 layers
# (tests/fake_cuda). On a CPU, a logit is computed once and held twice in fp32 if steps are compiled; otherwise, the
# resident memory grew by this (docs/log.md).
LOSS_ON_GPU, LOSS_IN_GRAPH = (21, 19), (8, 4)  # bytes per logit of a chunk
LOSS_ON_CPU, LOSS_ON_CPU_IN_GRAPH = (36, 27), (12, 10)
BACKWARD = (36, 24)  # of a block, eager and compiled: bytes per token and unit of width


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one process, in bytes. The values of `parts(micro_batch)` add up to the total."""

    model: GPT2ScratchConfig
    setup: Setup
    on_gpu: bool  # on a CPU, the copy for saving and the program itself use the same memory as training
    processes: int = 1  # of the job; with sharding, they share the model
    program: int = 0  # bytes of Python and PyTorch
    optimizer: str = "adamw"
    has_average: bool = False  # of the weights

    @property
    def in_half(self) -> bool:
        """True if matrix products use bf16 or fp16."""
        return self.setup.mixed_precision != "no"

    @property
    def parameters(self) -> int:
        return size_of(self.model).parameters

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's moments."""
        return moment_bytes(self.optimizer, size_of(self.model))

    def fixed(self) -> dict[str, int]:
        """Return the components that do not depend on the micro-batch."""
        N, P = self.parameters, self.processes if self.setup.sharding is not None else 1
        parts = {"weights": 4 * N // P, "gradients": 4 * N // P, "optimizer": self.moments // P}
        if self.processes > 1:
            parts["gradients"] += BYTES_KEPT_WHOLE * N
        if self.has_average:
            parts["weights"] *= 2
        if self.in_half:
            parts["weights in half precision"] = 2 * N // P
        if not self.on_gpu:
            parts["checkpoint copy"] = 4 * N * (1 + self.has_average) + self.moments
        return parts

    def parts(self, micro_batch: int) -> dict[str, int]:
        label = "loss or backward pass" if self.on_gpu else "logits"
        parts = self.fixed() | {"activations": self._activations(micro_batch), label: self._passing(micro_batch)}
        # The optimizer's step follows when all of these are free, and needs more only with small micro-batches.
        reusable = parts["activations"] + parts[label] + parts.get("weights in half precision", 0)
        step = step_bytes(self.optimizer, size_of(self.model), self.setup.mixed_precision == "bf16")
        if step > reusable:
            parts["Muon's step"] = step - reusable
        return parts | ({"Python and PyTorch": self.program} if self.program else {})

    def total(self, micro_batch: int) -> int:
        return sum(self.parts(micro_batch).values())

    def largest_micro_batch(self, free: int) -> int:
        """Return the number of sequences that should fit into `free` bytes. It is at least 1, which is then tried."""
        room = USABLE * (free - sum(self.fixed().values()))
        sizes = range(1, LARGEST_MICRO_BATCH + 1)
        return max(1, bisect_right(sizes, room, key=lambda size: self._activations(size) + self._passing(size)))

    def _activations(self, micro_batch: int) -> int:
        layers, block = self.model.n_layer, self._block(micro_batch)
        stream = 4 * micro_batch * self.model.n_positions * self.model.n_embd  # bytes of the residual stream
        blocks = layers * block
        if self.setup.gradient_checkpointing:  # on a CPU, plus the block that is being recomputed
            blocks = layers * stream + (0 if self.on_gpu else block)
        has_kernel = self.on_gpu or not (self.model.attn_pdrop or uses_mps())  # SDPA's other operations keep no mask
        if self.setup.mask_documents and self.setup.attention(self.model.n_positions) == "sdpa" and has_kernel:
            # SDPA converts the mask, (B, T, T), in each layer. A compiled graph does so once.
            copies = 1 if self.setup.torch_compile or self.setup.gradient_checkpointing else layers
            blocks += copies * micro_batch * self.model.n_positions**2 * (2 if self.in_half else 4)
        norms = 2 + (self.model.is_modern and not self.setup.torch_compile)  # after the embedding
        return int(blocks + norms * stream)  # plus the stream before and after the last normalization

    def _block(self, micro_batch: int) -> float:
        """Return the bytes that one block keeps for its backward pass."""
        model, tokens = self.model, micro_batch * self.model.n_positions
        per_unit, per_inner_unit = KEPT[self.in_half], KEPT_BY_MLP[self.in_half]
        # Eager attention keeps contiguous copies of queries and keys in any case.
        is_eager = self.setup.attention(model.n_positions) == "eager"
        if model.is_modern or (model.rope_parameters is not None and not is_eager):
            per_unit += KEPT_BY_QUERIES[self.in_half]
        if model.is_modern and not self.setup.torch_compile:
            per_unit += KEPT_BY_EAGER_QK_NORM[self.in_half]
        if self.on_gpu and self._squares_in_eager_mode:
            per_inner_unit += KEPT_BY_EAGER_SQUARE[self.in_half]
        block = tokens * (model.n_embd * per_unit + self._inner * per_inner_unit)
        if model.attn_pdrop and not self.on_gpu:
            is_half = self.in_half and (is_eager or self.setup.torch_compile)  # SDPA's own operations are in fp32
            per_score = SCORES_WITH_DROPOUT[self.setup.torch_compile][is_half]
            block += tokens * model.n_head * model.n_positions * per_score
        elif is_eager or (not self.on_gpu and uses_mps()):  # SDPA has no backward pass of its own for Apple GPUs
            block += tokens * model.n_head * model.n_positions * (SCORES_IN_HALF if self.in_half else SCORES_IN_FP32)
        return block

    @property
    def _inner(self) -> int:
        """Width of the MLPs."""
        return self.model.n_inner or 4 * self.model.n_embd

    @property
    def _squares_in_eager_mode(self) -> bool:
        return self.model.activation_function == "relu2" and not self.setup.torch_compile

    def _passing(self, micro_batch: int) -> int:
        """Return the temporary bytes of the loss or, on a GPU, of the last block's backward pass if that needs more."""
        loss = self._loss(micro_batch)
        if not self.on_gpu:
            return loss
        backward = BACKWARD[self.setup.torch_compile] * self.model.n_embd
        backward += SQUARE_BACKWARD * self._squares_in_eager_mode * self._inner
        backward *= micro_batch * self.model.n_positions
        if self.setup.gradient_checkpointing:
            block = int(self._block(micro_batch))
            backward = max(backward, block) if self.setup.torch_compile else backward + block
        return max(loss, backward)

    def _loss(self, micro_batch: int) -> int:
        """Return the bytes of one chunk's logits, of their gradients, and of the head's gradient."""
        tokens, V, C = micro_batch * self.model.n_positions, self.model.vocab_size, self.model.n_embd
        is_compiled = self.on_gpu and self.setup.torch_compile
        on_cpu = LOSS_ON_CPU_IN_GRAPH if self.setup.torch_compile else LOSS_ON_CPU
        rows, per_logit, head = rows_of_chunk(tokens, is_compiled), LOSS_ON_GPU if self.on_gpu else on_cpu, 4
        if is_compiled:  # one head gradient per chunk in half precision, or two in fp32
            per_logit, head = LOSS_IN_GRAPH, 2 * -(-tokens // rows) if self.in_half else 8
        return rows * V * per_logit[self.in_half] + head * V * C
