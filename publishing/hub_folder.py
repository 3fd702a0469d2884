"""The folder that goes to the Hub: an allow-list of files, further formats where they are asked for, and the model card."""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from atomic import write_atomic
from errors import UserError
from modeling_gpt2scratch import configuration_gpt2scratch
from modeling_gpt2scratch.loading import ModelError, read_json
from publishing.card import Edition, model_card
from publishing.gguf_file import difference, write_gguf
from publishing.native import write_native
from publishing.source import Source
from removal import renew
from training.run_folder import HUB_FILES, PLOTS

# Nothing else is ever copied: no optimizer state, no logs with paths, no file that merely lies there.
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
CODE = ("configuration_gpt2scratch.py", "modeling_gpt2scratch.py")
ALLOWED = (*WEIGHTS, "config.json", "generation_config.json", *TOKENIZER, *CODE)
NEEDED = ("config.json", "tokenizer.json")
OUR_CODE = Path(configuration_gpt2scratch.__file__).parent
RELEASED_CODE = Path(__file__).with_name("released_code.txt")  # SHA-256 and name of each version of CODE
TWIN = "native"  # the subfolder of the native twin
# What we may have put into a repository; what of it is no longer in the folder is taken out of the repository.
OURS = (*ALLOWED, f"{TWIN}/*", "*-F16.gguf", "*-Q8_0.gguf", *(f"{name}.png" for name in PLOTS))


@dataclass
class FolderArguments:
    format: Literal["gpt2scratch", "native", "both"] = field(
        default="gpt2scratch",
        metadata={
            "help": "gpt2scratch brings its own code; native is Transformers' GPT-2 with the same weights, which vLLM, "
            "lm-eval and others know; both has the native one in a subfolder."
        },
    )
    gguf: list[str] = field(
        default_factory=list,
        metadata={
            "help": "GGUF files for llama.cpp to go with it: 16 or 8 bits a weight.",
            "choices": ["f16", "q8_0"],
        },
    )
    license: str | None = field(
        default=None, metadata={"help": "Licence of the weights for the model card, such as mit."}
    )
    language: list[str] = field(
        default_factory=list, metadata={"help": "Languages of the text for the model card, such as en."}
    )
    trust_folder_code: bool = field(
        default=False,
        metadata={
            "help": "Publish the model's Python files as they are in its folder, also where they are none of ours."
        },
    )

    @property
    def has_code(self) -> bool:
        return self.format != "native"

    @property
    def has_twin(self) -> bool:
        return self.format == "both"


def assemble(
    source: Source,
    repo_id: str,
    arguments: FolderArguments,
    destination: Path,
    ids: torch.Tensor,
    branch: str | None = None,
) -> Path:
    """Makes `destination` anew: the model, its card, and what else is asked for. `ids`, (B, T): text on which the card says
    how far GGUF is from the model; `branch`: of the repository, where it is not the main one.

    Raises:
        UserError: the model lacks a file that the folder needs, or cannot have the format that is asked for; `destination` holds
            files that were not assembled here.
    """
    missing = [name for name in NEEDED if not (source.model / name).is_file()]
    if missing:
        raise UserError(f"{source.model} cannot be published: it lacks {', '.join(missing)}.")
    source.check_card()
    renew(destination, "hub", HUB_FILES)
    if arguments.has_code:
        for path in source.files(ALLOWED):
            shutil.copy(path, destination / path.name)
        if not arguments.trust_folder_code:
            _write_code(destination)
        if arguments.has_twin:
            write_native(source.model, destination / TWIN)
    else:
        write_native(source.model, destination)
    for plot in source.run.plots.values() if source.run is not None else ():
        if plot.is_file():
            shutil.copy(plot, destination / plot.name)
    files = [_write_gguf(source, repo_id, arguments, kind, destination, ids) for kind in arguments.gguf]
    edition = Edition(repo_id, branch, arguments.format, arguments.license, arguments.language, files)
    write_atomic(destination / "README.md", model_card(source, edition))
    return destination


def check_code(source: Source) -> None:
    """Refuse code that came with a model: it would run wherever the published model is loaded.

    Raises:
        UserError: a Python file of the model is of no version of this project, or its tokenizer names code.
    """
    known = set(RELEASED_CODE.read_text(encoding="utf-8").split())
    for path in source.files(CODE):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() not in known and content != (OUR_CODE / path.name).read_bytes():
            raise UserError(
                f"{path} is of no version of this project; read it, then add --trust_folder_code to publish it, or delete it "
                f"to publish the current version."
            )
    for path in source.files(("tokenizer_config.json",)):
        try:
            if "auto_map" in read_json(source.model, path.name):
                raise UserError(f"{path} names code of its own (auto_map), which is not published; take auto_map out.")
        except ModelError as error:
            raise UserError(f"{source.model} cannot be published: {error}.") from error


def _write_code(destination: Path) -> None:
    """The current code, and a config.json that names it; older versions of the code load with it."""
    for name in CODE:
        shutil.copy(OUR_CODE / name, destination / name)
    path = destination / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("auto_map") != configuration_gpt2scratch.AUTO_MAP:
        config["auto_map"] = configuration_gpt2scratch.AUTO_MAP
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_gguf(
    source: Source, repo_id: str, arguments: FolderArguments, kind: str, destination: Path, ids: torch.Tensor
) -> dict[str, Any]:
    """Return what the card shows of it."""
    name = repo_id.split("/")[1]
    file = destination / f"{name}-{kind.upper()}.gguf"
    write_gguf(source.model, file, kind, name, arguments.license)
    gap = difference(source.model, file, ids)
    return {"name": file.name, "kind": kind.upper(), "logits": gap.logits, "loss": gap.loss, "tokens": ids.numel()}
