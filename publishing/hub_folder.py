"""Folder for the Hub: an allow-list of files, optional formats, and the model card."""

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.atomic import set_default_permissions, write_atomic
from common.removal import renew
from modeling_gpt2scratch import GPT2ScratchConfig, configuration_gpt2scratch, loading
from modeling_gpt2scratch.conversion_gpt2scratch import native_kind, save, to_native
from modeling_gpt2scratch.loading import CONFIG, INDEX, SHARDS, TEMPLATES, TOKENIZER, WEIGHTS
from publishing.card import FolderArguments, model_card
from publishing.gguf_file import logit_difference, write_gguf
from publishing.onnx_file import onnx_config, write_onnx
from publishing.published_model import PublishedModel, copy_files
from publishing.upload import Repository
from publishing.verify import Expected
from training.checkpoints.loading import model_errors
from training.checkpoints.run_folder import HUB_FILES

CODE = ("configuration_gpt2scratch.py", "modeling_gpt2scratch.py")
# Only these files are copied: no optimizer state, no logs with paths, no unrelated files.
PUBLIC_FILES = (WEIGHTS, SHARDS, INDEX, CONFIG, *TOKENIZER, TEMPLATES, *CODE)
OUR_CODE = Path(configuration_gpt2scratch.__file__).parent
TWIN = "native"  # name of the subfolder with the native twin


def assemble(
    release: PublishedModel, repository: Repository, options: FolderArguments, destination: Path, reference: Expected
) -> None:
    """Write the model, its card and the formats in `options` to `destination`. The card compares GGUF, ONNX and model
    on the text of `reference`. Raise a `UserError` if the model cannot have a format, or `destination` was not written
    by this command."""
    model, tokenizer = release.model, release.tokenizer
    renew(destination, "hub", HUB_FILES)
    if options.has_code:
        _copy_with_code(release.folder, destination, options.trust_folder_code)
    if options.has_native:
        twin = to_native(model)
        if twin.config.model_type == "gpt2":  # in the type of the saved weights, which are loaded in float32
            twin = twin.to(AutoConfig.from_pretrained(release.folder, trust_remote_code=False).dtype or torch.float32)
        save(twin, tokenizer, destination / TWIN if options.has_twin else destination)
    if options.onnx_types and not options.has_weights:
        copy_files(release.folder, (*TOKENIZER, TEMPLATES), destination)
        write_atomic(destination / CONFIG, json.dumps(onnx_config(model.config), indent=2) + "\n")
    if (destination / CONFIG).is_file():
        model.generation_config.save_pretrained(destination)  # with the tokens that end a text
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    for path in destination.rglob("tokenizer_config.json"):
        _set(path, "auto_map", None)  # code of the tokenizer's author
        if options.onnx_types and template is not None:  # transformers.js does not read chat_template.jinja
            _set(path, "chat_template", template)
    for plot in release.plots:
        shutil.copyfile(plot, destination / plot.name)
    name, license = repository.id.split("/")[1], options.license or release.metadata.get("license")
    license = license if isinstance(license, str) else None  # a page may list several
    gguf = []
    for kind in options.gguf:
        file = destination / f"{name}-{kind.upper()}.gguf"
        write_gguf(model, tokenizer, file, kind, name, license)
        logits, loss = logit_difference(model, file, reference.text)
        tokens = reference.text.numel()
        gguf.append({"name": file.name, "kind": kind.upper(), "logits": logits, "loss": loss, "tokens": tokens})
    onnx = write_onnx(model, reference, destination, options.onnx_types) if options.onnx_types else []
    write_atomic(destination / "README.md", model_card(release, repository, options, gguf, onnx))
    set_default_permissions(destination)


def _copy_with_code(folder: Path, destination: Path, trust_folder_code: bool) -> None:
    """Copy the model of a folder. Its code is this version's, which also loads models of older ones, or with
    `trust_folder_code` the folder's own."""
    earlier = (SHARDS, INDEX) if (folder / WEIGHTS).is_file() else ()  # of an earlier model
    copy_files(folder, tuple(name for name in PUBLIC_FILES if name not in earlier), destination)
    if trust_folder_code:
        return
    _, others, _ = filecmp.cmpfiles(OUR_CODE, destination, CODE, shallow=False)
    for name in others:
        print(f"{name} is this version's, not that of {folder}, which --trust_folder_code publishes.")
    for name in CODE:
        shutil.copyfile(OUR_CODE / name, destination / name)
    _set(destination / CONFIG, "auto_map", configuration_gpt2scratch.AUTO_MAP)


def check_native(folder: Path) -> None:
    """Raise a `UserError` that names the fields of the model that no native class supports, and so neither does
    GGUF."""
    with model_errors(), loading.one_sentence(folder, "has neither a native format nor GGUF"):
        native_kind(GPT2ScratchConfig.from_dict(loading.read_model_config(folder)))


def _set(path: Path, name: str, value: Any) -> None:
    """Write a setting into a JSON file, or remove it if `value` is None, unless the file already agrees."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.pop(name, None) != value:
        settings |= {name: value} if value is not None else {}
        write_atomic(path, json.dumps(settings, indent=2) + "\n")
