"""The native twin: the same weights as Transformers' own GPT-2, for programs that run no remote code."""

import json
from pathlib import Path

from errors import UserError
from modeling_gpt2scratch.conversion_gpt2scratch import convert
from modeling_gpt2scratch.loading import ModelError


def write_native(model: Path, destination: Path) -> None:
    """Writes the model folder `model` to the folder `destination`, new or empty, as a `GPT2LMHeadModel` with its tokenizer.

    Raises:
        UserError: `model` is no GPT2Scratch model or is not whole, or `destination` holds files already.
    """
    try:
        convert(str(model), destination, to="gpt2")
    except ModelError as error:
        raise UserError(str(error)) from error
    described = destination / "tokenizer_config.json"
    described.write_text(json.dumps(_for_transformers_4(json.loads(described.read_text(encoding="utf-8"))), indent=2))


def _for_transformers_4(config: dict) -> dict:
    """A tokenizer's description that 4.57 and 5 read alike: 5 names a class and a field that 4.57 does not know."""
    told = {name: value for name, value in config.items() if name not in ("backend", "is_local", "local_files_only")}
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(told.get("extra_special_tokens"), list):
        told["additional_special_tokens"] = told.pop("extra_special_tokens")
    return told
