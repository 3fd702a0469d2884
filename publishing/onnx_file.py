"""Write a model as ONNX files for browsers, and compare them with the model. See docs/publishing.md."""

import logging
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig

from common.errors import UserError
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import read_model_config
from publishing.verify import CACHE_TOLERANCE, Expected
from training.checkpoints.loading import model_errors

FILES = {"fp32": "onnx/model.onnx", "q8": "onnx/model_quantized.onnx"}  # by transformers.js' name of the type
BYTES = {"fp32": 4, "q8": 1}  # per parameter
LARGEST = 200_000_000  # bytes of a file
TEXTS, PROMPT, CONTINUATION = 20, 16, 24  # compared texts, and their lengths in tokens (prompts without text: 1)
LOSS_TOLERANCE = 0.02  # nats per token by which rounding to 8 bits may raise the loss


class CachedModel(nn.Module):
    """Model with its cache as tensors (B, nh, S, hs): key and value of each layer."""

    def __init__(self, model: GPT2ScratchForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache([*zip(past[::2], past[1::2], strict=True)])
        logits = self.model(ids, mask, past_key_values=cache, use_cache=True).logits
        return (logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


def check_packages() -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))):
        raise UserError("Writing ONNX needs the package onnxruntime and others: run pip install -e '.[onnx]'.")


def check_onnx(folder: Path, kinds: list[str]) -> None:
    """Raise a `UserError` if a package is missing, or a file would be too large for a browser."""
    check_packages()
    with model_errors(), torch.device("meta"):
        model = GPT2ScratchForCausalLM(GPT2ScratchConfig.from_dict(read_model_config(folder)))
    kind = max(kinds, key=BYTES.get)
    if (size := model.num_parameters() * BYTES[kind]) > LARGEST:
        raise UserError(
            f"{folder} has {model.num_parameters():,} parameters: {size / 1e6:,.0f} MB as {kind}, but a file for "
            f"browsers may have {LARGEST / 1e6:.0f} MB; leave ONNX out{', or add --onnx q8' * (kind == 'fp32')}."
        )


def onnx_config(config: GPT2ScratchConfig) -> dict[str, Any]:
    """Return the settings from which transformers.js takes the shape of the cache, as of a model that it knows."""
    names = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
    return {"model_type": "gpt2"} | {name: getattr(config, name) for name in names}


@torch.no_grad()
def write_onnx(
    model: GPT2ScratchForCausalLM, reference: Expected, destination: Path, kinds: list[str]
) -> list[dict[str, Any]]:
    """Write a float32 model in types `kinds` to a folder, and return facts about each file for the card.
    A file whose loss rises too much by rounding to 8 bits is left out, with a message. Raise a `UserError` if
    onnxruntime computes other logits or texts than the model in float32."""
    ids, context = reference.text, model.config.n_positions
    P, N = min(PROMPT if reference.windows else 1, context // 2), min(CONTINUATION, context - context // 2)
    prompts = ids.flatten().unfold(0, P, 1)[torch.linspace(0, ids.numel() - P, TEXTS).long()]
    own_settings = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=N)
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts))  # (TEXTS, P + N)
    model.generation_config = own_settings
    sample = ids if reference.windows else texts
    model_loss = float(np.mean([model(row[None], labels=row[None]).loss.item() for row in sample]))
    common = {"texts": TEXTS, "tokens": sample[:, 1:].numel(), "model_loss": model_loss}
    common["is_validation"] = bool(reference.windows)
    (destination / "onnx").mkdir()
    facts = []
    with tempfile.TemporaryDirectory(dir=destination) as folder:
        paths = {kind: Path(folder) / f"{kind}.onnx" for kind in ("fp32", *kinds)}  # float32 is compared in any case
        _export(model, paths)
        for kind, path in paths.items():
            fact = common | {"name": FILES[kind], "kind": kind} | _compare(model, path, texts, P, sample)
            summary = f"{fact['equal']} of {TEXTS} greedy texts are equal, logits differ by {fact['logits']:.1e}"
            change = fact["loss"] - model_loss
            if kind == "fp32" and (fact["equal"] < TEXTS or not fact["logits"] <= fact["tolerance"]):
                problem = f"{model.name_or_path} computes other results in onnxruntime: {summary}"
                raise UserError(f"{problem}; publish it without ONNX.")
            if kind in kinds and change <= LOSS_TOLERANCE:
                print(f"{FILES[kind]}: {summary}, the loss by {change:+.4f}.")
                path.rename(destination / FILES[kind])
                facts.append(fact)
            elif kind in kinds:
                print(f"{FILES[kind]} is left out: it raises the loss by {change:.3f}, more than {LOSS_TOLERANCE}.")
    if not facts:
        raise UserError(f"{model.name_or_path} has no ONNX file of that type; choose --onnx fp32.")
    return facts


def _compare(
    model: GPT2ScratchForCausalLM, path: Path, texts: torch.Tensor, P: int, sample: torch.Tensor
) -> dict[str, float | int]:
    """Return the loss of an ONNX file on `sample` (B, T), the largest difference of a logit there and
    on greedy texts (TEXTS, P + N), and the number of texts that it writes, too. Texts that first differ where two
    tokens are equally likely count as equal."""
    from onnxruntime import InferenceSession

    session, target = InferenceSession(path, providers=["CPUExecutionProvider"]), model(texts).logits
    logits = torch.stack([_logits(session, text, P) for text in texts])  # (TEXTS, P + N, V)
    tolerance = CACHE_TOLERANCE * max(1.0, target.abs().max().item())
    gaps = -target[:, P - 1 : -1].topk(2).values.diff()[..., 0]  # from the most likely token to the second one
    differs = logits[:, P - 1 : -1].argmax(-1) != texts[:, P:]
    is_tie = gaps.gather(1, differs.float().argmax(1, keepdim=True))[:, 0] < tolerance
    losses, differences = [], [(logits - target).abs().max().item()]
    for row in sample:
        logits = _logits(session, row, len(row))  # (T, V)
        losses.append(cross_entropy(logits[:-1], row[1:]).item())
        differences.append((logits - model(row[None]).logits[0]).abs().max().item())
    return {
        "loss": float(np.mean(losses)),
        "logits": max(differences),
        "tolerance": tolerance,
        "equal": int((~differs.any(1) | is_tie).sum()),
    }


def _logits(session: Any, ids: torch.Tensor, P: int) -> torch.Tensor:
    """Return the logits (T, V) of ids (T,): of the first P at once, then one at a time with cached keys and values."""
    names, shapes = zip(*((entry.name, entry.shape) for entry in session.get_inputs()), strict=True)
    past = [np.zeros((1, heads, 0, width), np.float32) for _, heads, _, width in shapes[2:]]
    logits = []
    for part in (ids[:P], *ids[P:, None]):
        mask = np.ones((1, past[0].shape[2] + len(part)), np.int64)
        rows, *past = session.run(None, dict(zip(names, [part[None].numpy(), mask, *past], strict=True)))
        logits.append(torch.from_numpy(rows[0]))
    return torch.cat(logits)


def _export(model: GPT2ScratchForCausalLM, paths: dict[str, Path]) -> None:
    """Write the files of `paths`. transformers.js fills in these names of inputs, outputs and dimensions. It takes each
    dimension that is not called batch_size for the length of an empty cache."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxruntime.quantization import QuantType, quantize_dynamic

    config, batch = model.config, {0: "batch_size"}
    names = [f"{layer}.{part}" for layer in range(config.n_layer) for part in ("key", "value")]
    past = [torch.zeros(2, config.n_head, 5, config.n_embd // config.n_head) for _ in names]
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    logging.disable(logging.WARNING)  # advice of both libraries
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            CachedModel(model).eval(), (ids, mask, past), dynamo=True, verbose=False, opset_version=20,
            input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_shapes=(
                batch | {1: "sequence_length"}, batch | {1: "total_sequence_length"},
                [batch | {2: "past_sequence_length"}] * len(past),
            ),
        )  # fmt: skip
        ClearMetadataAndDocStringPass()(program.model)  # it has paths of this machine
        program.save(paths["fp32"], external_data=False)
        # Unsigned weights: x86 processors without VNNI saturate products with signed ones.
        if "q8" in paths:
            quantize_dynamic(paths["fp32"], paths["q8"], weight_type=QuantType.QUInt8, per_channel=True)
    logging.disable(logging.NOTSET)
