"""Folder for the Hub: an allow-list of files, optional formats, and the model card."""

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

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
    model, tokenizer, ids = release.model, release.tokenizer, reference.text
    renew(destination, "hub", HUB_FILES)
    if options.has_code:
        earlier = (SHARDS, INDEX) if (release.folder / WEIGHTS).is_file() else ()  # of an earlier model
        copy_files(release.folder, tuple(name for name in PUBLIC_FILES if name not in earlier), destination)
        if not options.trust_folder_code:
            _, others, _ = filecmp.cmpfiles(OUR_CODE, destination, CODE, shallow=False)
            for name in others:
                print(f"{name} is this version's, not that of {release.folder}, which --trust_folder_code publishes.")
            for name in CODE:  # the current version also loads models of older ones
                shutil.copyfile(OUR_CODE / name, destination / name)
            _set(destination / CONFIG, "auto_map", configuration_gpt2scratch.AUTO_MAP)
    if options.has_native:
        twin = to_native(model)
        twin = twin.to(release.dtype) if twin.config.model_type == "gpt2" else twin
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
    gguf, name, license = [], repository.id.split("/")[1], options.license or release.metadata.get("license")
    for kind in options.gguf:
        file = destination / f"{name}-{kind.upper()}.gguf"
        write_gguf(model, tokenizer, file, kind, name, license if isinstance(license, str) else None)
        logits, loss = logit_difference(model, file, ids)
        gguf.append({"name": file.name, "kind": kind.upper(), "logits": logits, "loss": loss, "tokens": ids.numel()})
    onnx = write_onnx(model, reference, destination, options.onnx_types) if options.onnx_types else []
    write_atomic(destination / "README.md", model_card(release, repository, options, gguf, onnx))
    set_default_permissions(destination)


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
