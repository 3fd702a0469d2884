"""Device setup of a run: device, precision, compilation and attention kernel."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch.nn.attention import SDPBackend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from common.errors import Problems, UserError, counted
from common.limits import free, setting
from modeling_gpt2scratch import GPT2ScratchConfig
from training.runtime.compilation import decide_compilation
from training.runtime.hardware import check_kernels, device_name, peak_flops
from training.runtime.launcher import is_alone_by_mistake

SHARDING = "ACCELERATE_USE_FSDP"  # variable that the launcher sets
LONGEST_EAGER = 512  # tokens of context up to which a CPU uses eager attention


@dataclass
class DeviceArguments:
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = setting(
        "auto", "Precision of matrix products; weights stay fp32. auto: best for the device.", resume="refused"
    )
    torch_compile: str = free("auto", "Compile model and loss: true, false, or auto (not for short runs on a CPU).")
    torch_compile_mode: str | None = free(None, "Mode of torch.compile, such as max-autotune-no-cudagraphs.")
    attn_implementation: str = free(
        "auto",
        "sdpa, eager, flash_attention_2 or flex_attention (see Transformers). auto: sdpa, which picks the device's "
        "fastest kernel; eager on a CPU that computes in bf16, up to a context of 512.",
    )
    bf16_residual: bool = setting(
        False, "Also keep the residual stream in bf16: less memory traffic, slightly higher loss per step."
    )
    gradient_checkpointing: bool = free(
        False, "Recompute activations in the backward pass: uses less memory, about a third slower."
    )
    full_determinism: bool = free(
        False,
        "Use only deterministic kernels, so that GPU runs are bit-identical when repeated; slower. CPU runs are "
        "bit-identical without it.",
    )

    def problems(self, precision: str | None) -> Iterator[str]:
        """Yield the problems on any device. `precision`: the resolved `mixed_precision`, or None if it is refused."""
        modes = list(torch._inductor.list_mode_options())
        if self.torch_compile_mode is not None and self.torch_compile_mode not in modes:
            yield f"torch_compile_mode is {self.torch_compile_mode!r}; it must be one of {', '.join(modes)}."
        if self.torch_compile.lower() not in ("auto", "true", "false"):
            yield f"torch_compile is {self.torch_compile!r}; it must be true, false or auto."
        if self.bf16_residual and precision not in ("bf16", None):
            yield f"bf16_residual needs mixed_precision bf16, but it is {precision}; leave out one of the two."
        choice = self.attn_implementation
        names = ["auto", "eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "paged" not in key)]
        if choice not in names:
            yield f"attn_implementation is {choice!r}; it must be one of {', '.join(names)}."
        elif choice.startswith("flash_attention") and precision == "no":
            yield f"attn_implementation is {choice}, which needs mixed_precision bf16 or fp16; use sdpa."


@dataclass(frozen=True)
class Setup:
    """Device settings: `DeviceArguments` with every `auto` resolved that does not depend on the model."""

    mixed_precision: str
    torch_compile: bool
    attn_implementation: str  # may be auto, see `attention`
    notes: tuple[str, ...] = ()  # messages for the user
    sharding: Literal["device", "cpu"] | None = None  # where shards and optimizer state are; None: nothing is sharded
    torch_compile_mode: str | None = None
    full_determinism: bool = False
    cudnn_attention: bool = True  # False: never use it, even if PyTorch would choose it
    gradient_checkpointing: bool = False
    bf16_residual: bool = False
    mask_documents: bool = False

    @property
    def compile_settings(self) -> dict[str, Any] | None:
        """Arguments of `torch.compile`, or None if not compiled. One graph with the loss; one shape of batches."""
        if not self.torch_compile:
            return None
        return {"backend": "inductor", "mode": self.torch_compile_mode, "fullgraph": True, "dynamic": False}

    @property
    def autotunes(self) -> bool:
        """True if torch.compile benchmarks kernels on the device, which needs memory that `Memory` does not count."""
        return self.torch_compile and "max-autotune" in (self.torch_compile_mode or "")

    def attention(self, context: int) -> str:
        """Return the attention implementation for a context in tokens. PyTorch's CPU kernel is slower than bf16 matrix
        products until the context x context scores outgrow the caches; see docs/log.md for the measurement."""
        is_faster = not torch.accelerator.is_available() and self.mixed_precision == "bf16" and context <= LONGEST_EAGER
        return {"auto": "eager" if is_faster else "sdpa"}.get(self.attn_implementation, self.attn_implementation)

    def shards(self, accelerator: Accelerator) -> bool:
        """Return whether the model is sharded: sharding is configured and there are several processes."""
        return self.sharding is not None and accelerator.num_processes > 1


def decide(arguments: DeviceArguments, context: int, mask_documents: bool = False) -> Setup:
    """Decide the setup for this machine and a context in tokens. Raise a `UserError` with all unsupported settings."""
    problems, notes = Problems(), []
    problems.add_of(check_kernels)
    if is_alone_by_mistake():
        problems.add(
            "accelerate launch was asked for several processes but started one, because of --cpu or because there "
            "are fewer GPUs than processes; leave out --cpu, and add --config_file launch/two_cpu_processes.yaml, or "
            "launch/one_node.yaml for GPUs."
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > 1 and 0 < torch.cuda.device_count() < processes:
        problems.add(
            f"{processes} processes were started for {torch.cuda.device_count()} GPUs; add --num_processes "
            f"{torch.cuda.device_count()} to accelerate launch."
        )
    precision = problems.add_of(_precision, arguments.mixed_precision)
    problems.sentences += arguments.problems(precision)
    problems.add_of(_check_attention, arguments.attn_implementation)
    compiles = problems.add_of(decide_compilation, arguments.torch_compile, notes)
    # cuDNN's backward pass with a mask produced NaN at these lengths, so every step would be skipped.
    cudnn_attention = not (mask_documents and context % 128 == 64)
    if torch.cuda.is_available() and not cudnn_attention:
        notes.append(
            f"Attention does not use cuDNN: with mask_documents and context {context}, its gradients can be NaN (at "
            "64, 192, 320 ...)."
        )
    if not torch.cuda.is_available() and _has_visible_gpu():
        cuda = torch.version.cuda
        cause = f"probably because its driver is older than CUDA {cuda}" if cuda else "because it is a CPU-only build"
        notes.append(
            f"torch {torch.__version__} does not use this machine's NVIDIA GPU, {cause}: install a build of torch for "
            "a CUDA version that nvidia-smi shows or an older one (pytorch.org/get-started)."
        )
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        notes.append(f"The launcher's gradient_accumulation_steps {accumulation} is ignored: tokens_per_step sets it.")
    shards = problems.add_of(sharding)
    problems.refuse()
    settings = vars(arguments) | {"mixed_precision": precision, "torch_compile": compiles, "notes": tuple(notes)}
    return Setup(sharding=shards, cudnn_attention=cudnn_attention, mask_documents=mask_documents, **settings)


def _has_visible_gpu() -> bool:
    """Return whether the driver lists an NVIDIA GPU that nobody hid from torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or shutil.which("nvidia-smi") is None:
        return False
    with suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=10)
        return listing.stdout.startswith(b"GPU ")
    return False


def _precision(choice: str) -> str:
    has_gpu, name, remedy = torch.cuda.is_available(), "mixed_precision", "auto"
    if choice == "auto":  # the launcher also exports `no` if the user set nothing
        choice = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "auto")
        name = "mixed_precision of accelerate launch (a flag, or the file that accelerate config wrote)"
        remedy = "accelerate launch --config_file launch/one_gpu.yaml"
    if choice not in ("auto", "no", "bf16", "fp16"):
        raise UserError(f"{name} is {choice}; set it to no, bf16 or fp16.")
    if choice == "fp16" and not has_gpu:
        raise UserError(f"{name} is fp16, which needs a GPU, and none was found; use bf16, no or {remedy}.")
    if choice == "bf16" and has_gpu and not computes_bf16():
        gpu = torch.cuda.get_device_name()
        raise UserError(f"{name} is bf16, which {gpu} does not support; use fp16 or {remedy}.")
    if choice != "auto":
        return choice
    if computes_bf16() and not torch.backends.mps.is_available():
        return "bf16"
    return "fp16" if has_gpu else "no"


def uses_mps() -> bool:
    """Return whether a run on this machine uses an Apple GPU."""
    return torch.backends.mps.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def computes_bf16() -> bool:
    """Return whether the device has instructions for bf16. Emulated bf16 is slower than fp32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _check_attention(choice: str) -> None:
    if choice not in ALL_ATTENTION_FUNCTIONS.valid_keys():  # auto, eager, or refused by `DeviceArguments.problems`
        return
    if choice.startswith(("flash_attention", "flex_attention")) and not torch.cuda.is_available():
        raise UserError(f"attn_implementation is {choice}, which needs an NVIDIA GPU; use sdpa.")
    if choice == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError(
            "attn_implementation is flash_attention_2, which is not installed: pip install flash-attn, or use sdpa."
        )


def sharding() -> str | None:
    """Return where the launcher's `fsdp_*` options, which it passes in the environment, keep shards, or None. Refuse
    FSDP1."""
    if not parse_flag_from_env(SHARDING):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"The launcher's fsdp_version is {version}; set it to 2, as in launch/fsdp2.yaml.")
    return "cpu" if parse_flag_from_env("FSDP_OFFLOAD_PARAMS") else "device"


def keep_accelerate_from_sharding() -> None:
    """Clear the launcher's variable after it was read: Transformers would load weights in only one process."""
    os.environ[SHARDING] = "false"


def memory_of_others() -> str:
    """Return a message if other processes use a tenth of the GPU's memory and 1 GB, otherwise an empty string."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    n_bytes = total - free - torch.cuda.memory_reserved()
    if n_bytes < max(total / 10, 1e9):  # includes about 0.5 GB of CUDA itself
        return ""
    return (
        f"{n_bytes / 1e9:.0f} of {total / 1e9:.0f} GB of the GPU are in use by other processes (nvidia-smi lists "
        "them): stop them, or choose another GPU with CUDA_VISIBLE_DEVICES"
    )


def describe(accelerator: Accelerator, setup: Setup, model: GPT2ScratchConfig) -> str:
    """Describe the setup: `CPU (2 threads), fp32, compiled, 1 process, attention: sdpa (flash)`. A GPU adds its
    peak."""
    if accelerator.device.type == "cuda":
        peak = peak_flops(device_name(accelerator.device), setup.mixed_precision)
        best = "MFU unknown" if peak is None else f"{peak / 1e12:g} TFLOP/s"
        device = f"{device_name(accelerator.device)} ({best})"
    else:
        device = f"{accelerator.device.type.upper()} ({counted(torch.get_num_threads(), 'thread')})"
    precision = {"no": "fp32"}.get(setup.mixed_precision, setup.mixed_precision)
    compilation = "compiled" if setup.torch_compile else "not compiled"
    processes = counted(accelerator.num_processes, "process", "processes")
    sharding = ", model and optimizer sharded" if setup.shards(accelerator) else ""
    attention = setup.attention(model.n_positions)
    if attention == "sdpa" and accelerator.device.type in ("cpu", "cuda"):
        sizes = (model.n_positions, model.n_embd // model.n_head)
        attention += f" ({kernel_of_sdpa(accelerator.device, setup, *sizes, model.attn_pdrop)})"
    return f"{device}, {precision}, {compilation}, {processes}{sharding}, attention: {attention}"


def kernel_of_sdpa(device: torch.device, setup: Setup, context: int, head_width: int, dropout: float) -> str:
    """Return the kernel that PyTorch reports for tensors like those of a step.
    It is cudnn, flash, efficient, or math, which is slow and stores the matrix of scores."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.mixed_precision, torch.float32)
    query = torch.empty((1, 1, context, head_width), device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, context, context, device=device, dtype=torch.bool) if setup.mask_documents else None
    choice = torch._fused_sdp_choice(query, query, query, mask, dropout, mask is None)
    return SDPBackend(choice).name.split("_")[0].lower()
