"""Model card: the run's report with the Hub's metadata, instructions for loading the model, and results of lm-eval."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from common.errors import NONSENSE
from common.limits import setting
from modeling_gpt2scratch.conversion_gpt2scratch import native_kind
from publishing.model_index import harness_entries, validation_results
from publishing.onnx_file import onnx_config
from publishing.published_model import PublishedModel
from publishing.upload import PUBLISHED_KINDS, SIGNATURE, Repository
from tokenizer.encoding import encode
from training.checkpoints.loading import is_hub_id
from training.report.report import environment

TEMPLATES = Path(__file__).parent / "templates"
# Metadata that is not kept from the card of a model folder or of the repository: results, which the new card computes,
# and names that `ModelCardData` uses itself.
DROPPED = {"model-index", "model_name", "eval_results", "self", "ignore_metadata_errors", *dir(ModelCardData)}


@dataclass
class FolderArguments:
    format: list[str] = setting(
        ["gpt2scratch"],
        "gpt2scratch includes its own code; native is Transformers' GPT-2 or Apertus with the same logits, for vLLM, "
        "lm-eval and others; both has the native model in a subfolder; onnx is for browsers, alone or in addition.",
        choices=["gpt2scratch", "native", "both", "onnx"],
    )
    onnx: list[str] = setting(
        [], "Types of the ONNX files: 32 or 8 bits per weight; default: both.", choices=["fp32", "q8"]
    )
    gguf: list[str] = setting([], "GGUF files for llama.cpp to add: 16 or 8 bits per weight.", choices=["f16", "q8_0"])
    license: str | None = setting(None, "License of the weights for the model card, such as mit.")
    language: list[str] = setting([], "Languages of the text for the model card, such as en.")
    trust_folder_code: bool = setting(
        False, "Publish the Python files in the model's folder unchanged, even if they are not from this project."
    )

    @property
    def has_code(self) -> bool:
        return not {"gpt2scratch", "both"}.isdisjoint(self.format)

    @property
    def has_native(self) -> bool:
        return not {"native", "both"}.isdisjoint(self.format)

    @property
    def has_weights(self) -> bool:
        """Whether Transformers loads the repository: it is not only for browsers."""
        return self.has_code or self.has_native

    @property
    def onnx_types(self) -> list[str]:
        return self.onnx or (["fp32", "q8"] if "onnx" in self.format else [])

    @property
    def has_twin(self) -> bool:
        return self.has_code and self.has_native


def model_card(
    release: PublishedModel,
    repository: Repository,
    options: FolderArguments,
    gguf: Sequence[dict[str, Any]] = (),
    onnx: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the card, built from the run's report or from the README.md of a model folder.
    `gguf`, `onnx`: facts about these files."""
    config = release.model.config
    native = native_kind(config) if options.has_native else None
    metadata = _metadata(release, repository, options, "gpt2scratch" if options.has_code else native or "gpt2")
    variables = {
        "base": "page.md.j2" if release.facts is None else "report.md.j2",
        "release": release,
        "written": SIGNATURE,
        "repository": repository,
        "options": options,
        "native": native,
        "gguf": gguf,
        "onnx": onnx,
        "onnx_config": onnx_config(config),
        "license": ", ".join(metadata.license) if isinstance(metadata.license, list) else metadata.license,
        "citation_key": re.sub(r"\W+", "", repository.id).lower(),
        "year": datetime.now(UTC).year,
        **_examples(release),
    }
    body = environment(TEMPLATES).get_template("card.md.j2").render((release.facts or {}) | variables).strip() + "\n"
    return str(ModelCard.from_template(metadata, template_str="---\n{{ card_data }}\n---\n\n{{ body }}", body=body))


def _examples(release: PublishedModel) -> dict[str, Any]:
    """Return a prompt that leaves room for its continuation, and a text that fits the context, both for the
    tokenizer."""
    training, tokenizer, context = release.training, release.tokenizer, release.model.config.n_positions
    text = ["The quick brown fox jumps over the lazy dog.", *_samples(release)][-1]
    if encode.is_character(tokenizer.backend_tokenizer):
        characters = tokenizer.get_vocab()
        text = "".join(filter(characters.__contains__, text)) or "".join(sorted(characters)[:context])
    text, new_tokens = _cut(text, min(80, context)), min(30, context // 2)
    is_chat = tokenizer.chat_template is not None
    of_run = training.config.sampling.sample_prompts if training is not None else []
    prompts = ["Hello" * is_chat, _widget(release), *of_run, text[: max(1, len(text) // 2)]]
    prompt = _cut(next(filter(None, prompts), ""), context - new_tokens)
    return {"prompt": prompt, "text": text, "is_chat": is_chat, "new_tokens": new_tokens}


def _samples(release: PublishedModel) -> list[str]:
    """Return the samples of the run. A page that a person wrote may leave some out, as they can show private text."""
    samples = release.training.samples if release.training is not None else []
    page = "\n".join(release.sections.values())
    return [text for text in samples if release.facts is not None or text.strip()[:20] in page]


def _widget(release: PublishedModel) -> str:
    """Return the prompt that the page shows, or an empty text if the tokenizer lacks its characters."""
    with suppress(*NONSENSE):  # of a page
        text = release.metadata["widget"][0]["text"]
        is_character = encode.is_character(release.tokenizer.backend_tokenizer)
        if isinstance(text, str) and (not is_character or set(text) <= release.tokenizer.get_vocab().keys()):
            return text
    return ""


def _cut(text: str, tokens: int) -> str:
    """Return the start of `text` with at most `tokens` tokens. Each token has at least one byte."""
    return text.encode()[:tokens].decode(errors="ignore") or text[:1]


def _metadata(release: PublishedModel, repository: Repository, options: FolderArguments, kind: str) -> ModelCardData:
    training, metadata = release.training, release.metadata
    if options.license:
        metadata = {name: value for name, value in metadata.items() if name not in ("license_name", "license_link")}
    values = {"license": options.license and options.license.lower(), "language": options.language}
    tags = [kind, *(tag for tag in metadata.get("tags", []) if tag not in PUBLISHED_KINDS)]
    if training is not None:
        if (name := training.config.run.init_from) is None:
            tags.insert(1, "from-scratch")
        elif is_hub_id(name) and (release.facts or {}).get("pretrained", name) == name:
            values["base_model"] = name
        if training.store is not None:
            values["datasets"] = sorted(set(training.store.metadata.hub_datasets))
        elif release.facts is not None:  # the store is gone, but the report names the Hub datasets
            values["datasets"] = sorted(release.facts["data"].get("commits", {}))
    library = "transformers" if options.has_weights else "transformers.js"
    values |= {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    if results := _results(release):
        values |= {"model_name": repository.id.split("/")[1], "eval_results": results}
    kept = {str(name): value for name, value in metadata.items() if name not in DROPPED}
    return ModelCardData(**kept | {name: value for name, value in values.items() if value})


def _results(release: PublishedModel) -> list[EvalResult]:
    """Return the results for the Hub's `model-index`. Those of evaluate.py replace those of lm-eval for the same task,
    and both replace those on the page of a model without a run."""
    of_tasks = list(harness_entries(release.evaluation.get("tasks", {"configs": {}})))
    names = {(result.unique_identifier, result.dataset_name) for result in of_tasks}
    others = [result for result in release.harness if (result.unique_identifier, result.dataset_name) not in names]
    validation = release.training and release.training.validation
    results = [*validation_results(validation or {}), *others, *of_tasks]
    with suppress(*NONSENSE):  # of the page
        earlier = model_index_to_eval_results(release.metadata["model-index"])[1] if release.training is None else []
        new = {(result.unique_identifier, result.metric_type) for result in results}
        results = [*(old for old in earlier if (old.unique_identifier, old.metric_type) not in new), *results]
    return results
