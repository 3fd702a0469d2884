"""What a process needs to keep in memory while it trains, part by part."""

from bisect import bisect_right
from dataclasses import dataclass

from modeling_gpt2scratch import GPT2ScratchConfig
from training.loss import rows_of_chunk
from training.optim import moment_bytes

USABLE = 0.8  # of what is free: the rest is for workspaces, fragments and what compilation keeps besides
LARGEST_MICRO_BATCH = 1 << 30  # sequences: the most that --per_device_train_batch_size takes
BYTES_KEPT_WHOLE = 4  # of each parameter's gradient, on every process of a sharded model, while micro-batches add up
# Bytes that a block keeps for its backward pass, for each token and unit of width (test_memory.py counts them).
KEPT_IN_FP32, KEPT_IN_HALF = 64.4, 36.4
# The same for each token, head and position that it looks at, where attention is written out.
SCORES_IN_FP32, SCORES_IN_HALF = 4, 6
# What a GPU holds for a while beside that, as its allocator counted it for 1, 3, 4 and 12 layers (tests/fake_cuda), each as
# (not compiled, compiled): bytes of the loss for each logit of a chunk, and of a block's backward pass for each token and unit of width.
LOSS_IN_FP32, LOSS_IN_HALF = (21, 8), (19, 4)
BACKWARD = (36, 24)


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes. `parts(micro_batch)` adds up to what it needs."""

    model: GPT2ScratchConfig
    in_half: bool  # whether matrices are multiplied in bf16 or fp16
    written_out: bool  # attention
    checkpointing: bool  # gradient_checkpointing
    sharded_by: int = 1  # processes that the model is divided among
    # On a CPU, the copy that is saved and the program itself lie in the memory that is trained in.
    copies_to_host: bool = False
    on_gpu: bool = False
    compiled: bool = False
    program: int = 0  # bytes
    autotunes: bool = False  # torch.compile tries kernels on the device, which takes memory that is not counted here

    @property
    def parameters(self) -> int:
        model, width = self.model, self.model.n_embd
        inner = model.n_inner or 4 * width
        block = 4 * width**2 + 2 * width * inner + 9 * width + inner  # with biases and LayerNorms
        heads = 1 if model.tie_word_embeddings else 2
        return model.n_layer * block + (heads * model.vocab_size + model.n_positions + 2) * width

    def fixed(self) -> dict[str, int]:
        """Whatever the micro-batch."""
        N, P = self.parameters, self.sharded_by
        parts = {"weights": 4 * N // P, "gradients": 4 * N // P, "optimizer": moment_bytes(N) // P}
        if P > 1:
            parts["gradients"] += BYTES_KEPT_WHOLE * N
        if self.in_half:
            parts["weights in half precision"] = 2 * N // P
        if self.copies_to_host:
            parts["copy that is saved"] = 4 * N + moment_bytes(N)
        return parts

    def parts(self, micro_batch: int) -> dict[str, int]:
        passing = "loss or backward pass" if self.on_gpu else "logits"
        parts = self.fixed() | {"activations": self._activations(micro_batch), passing: self._passing(micro_batch)}
        return parts | ({"Python and PyTorch": self.program} if self.program else {})

    def total(self, micro_batch: int) -> int:
        return sum(self.parts(micro_batch).values())

    def largest_micro_batch(self, free: int) -> int:
        """Sequences that should fit `free` bytes; 1 at least, which is tried then."""
        left = USABLE * (free - sum(self.fixed().values()))
        sizes = range(1, LARGEST_MICRO_BATCH + 1)
        return max(1, bisect_right(sizes, left, key=lambda size: self._activations(size) + self._passing(size)))

    def _activations(self, micro_batch: int) -> int:
        layers, block = self.model.n_layer, self._block(micro_batch)
        stream = 4 * micro_batch * self.model.n_positions * self.model.n_embd  # between blocks
        blocks = layers * block
        if self.checkpointing:  # and on a CPU the one that is recomputed
            blocks = layers * stream + (0 if self.on_gpu else block)
        return int(blocks + 2 * stream)  # and around the last LayerNorm

    def _block(self, micro_batch: int) -> float:
        """What one block keeps for its backward pass."""
        model, tokens = self.model, micro_batch * self.model.n_positions
        block = tokens * model.n_embd * (KEPT_IN_HALF if self.in_half else KEPT_IN_FP32)
        if self.written_out:
            scores = tokens * model.n_head * model.n_positions
            block += scores * (SCORES_IN_HALF if self.in_half else SCORES_IN_FP32)
        return block

    def _passing(self, micro_batch: int) -> int:
        """What comes on top for a while: the logits; on a GPU, if that is more, the backward pass of the last block."""
        if not self.on_gpu:
            return self._logits(micro_batch)
        N, V, C = micro_batch * self.model.n_positions, self.model.vocab_size, self.model.n_embd
        rows = rows_of_chunk(N, self.compiled)
        loss = rows * V * (LOSS_IN_HALF if self.in_half else LOSS_IN_FP32)[self.compiled]
        if self.compiled:  # the head's gradient of each chunk, in half precision; else two in fp32
            loss += V * C * (2 * -(-N // rows) if self.in_half else 8)
        else:
            loss += 4 * V * C
        backward = BACKWARD[self.compiled] * N * C
        if self.checkpointing:
            block = int(self._block(micro_batch))
            backward = max(backward, block) if self.compiled else backward + block
        return max(loss, backward)

    def _logits(self, micro_batch: int) -> int:
        """Of one chunk: as computed, and twice in fp32; their gradient in the head's; the sum of it."""
        rows = rows_of_chunk(micro_batch * self.model.n_positions, compiled_for_gpu=False)
        V, C = self.model.vocab_size, self.model.n_embd
        return rows * V * ((2 if self.in_half else 4) + 8) + 4 * V * C
