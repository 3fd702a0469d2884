"""The model card: the run's report under the Hub's metadata, with the model named as others will load it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig

from errors import UserError, counted
from limits import setting
from publishing.evaluations import harness_results, validation_results
from publishing.source import Source
from tokenizer import encode, vocabulary
from training.data import find_store
from training.report.evaluation import evaluation_of
from training.report.report import environment, facts_of, sections_of
from training.sampling import read_samples

TEMPLATES = Path(__file__).parent / "templates"
# Metadata of a model folder's own card that its new one keeps, unless the command says otherwise.
KEPT = ("base_model", "datasets", "language", "license")
# In the card; the one on the Hub is kept as it is once this line is taken out of it.
WRITTEN = "<!-- Written by push_to_hub.py, which writes it anew each time. Take out this line to keep your changes. -->"
NO_LICENCE = "None was given: ask the author before you use the weights for more than looking."


@dataclass
class FolderArguments:
    format: Literal["gpt2scratch", "native", "both"] = setting(
        "gpt2scratch",
        "gpt2scratch brings its own code; native is Transformers' GPT-2 with the same weights, which vLLM, lm-eval and "
        "others know; both has the native one in a subfolder.",
    )
    gguf: list[str] = setting(
        [], "GGUF files for llama.cpp to go with it: 16 or 8 bits a weight.", choices=["f16", "q8_0"]
    )
    license: str | None = setting(None, "Licence of the weights for the model card, such as mit.")
    language: list[str] = setting([], "Languages of the text for the model card, such as en.")
    trust_folder_code: bool = setting(
        False, "Publish the model's Python files as they are in its folder, also where they are none of ours."
    )

    @property
    def has_code(self) -> bool:
        return self.format != "native"

    @property
    def has_twin(self) -> bool:
        return self.format == "both"


@dataclass(frozen=True)
class Edition:
    """What a repository, or a branch of it, holds of a model."""

    repo_id: str
    branch: str | None = None  # where it is not the main one
    options: FolderArguments = field(default_factory=FolderArguments)


def model_card(source: Source, edition: Edition, gguf: Iterable[dict[str, Any]] = ()) -> str:
    """Return the card: of a run, its report; of a folder that has a README.md, that. `gguf`: the files that go with it."""
    metadata, run = _metadata(source, edition), source.run
    facts = facts_of(run) if run is not None else None
    shown = {
        "written": WRITTEN,
        "source": source,
        "edition": edition,
        "gguf": gguf,
        "own_evaluation": "",
        # The report may be about other weights than those that are published.
        "evaluation": evaluation_of(run, source.model) if run is not None else None,
        "measured": harness_results(source),
        "citation_key": re.sub(r"\W+", "", edition.repo_id).lower(),
        "year": datetime.now(UTC).year,
        **_examples(source),
    }
    licence = edition.options.license or metadata.license
    if facts is not None:
        shown = facts | shown | {"base": "report.md.j2"}
    else:  # what someone wrote is the source
        sections = _sections(source)
        licence = edition.options.license or sections.get("Licence") or metadata.license
        shown |= {"base": "page.md.j2", "sections": sections}
        if run is None:
            shown["own_evaluation"] = sections.get("Evaluation", "")
    template = environment(TEMPLATES).get_template("card.md.j2")
    body = template.render(shown, licence=licence or NO_LICENCE).strip() + "\n"
    return str(ModelCard.from_template(metadata, template_str="---\n{{ card_data }}\n---\n\n{{ body }}", body=body))


def is_kept(card: str) -> bool:
    """Whether someone made a card on the Hub their own."""
    return WRITTEN not in card


def _sections(source: Source) -> dict[str, str]:
    """Return the sections of the page about the model that is already there."""
    path = source.model / "README.md" if source.run is None else source.run.report
    page = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _shape(source.model)
    page = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)  # metadata that it brings is made again
    sections = sections_of(page.replace(WRITTEN, "").strip())
    return sections | {"": re.sub(r"\A# .*\n*", "", sections[""]).strip()}


def _shape(model: Path) -> str:
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return (
        f"A GPT-2-class language model: {counted(config.n_layer, 'layer')}, {counted(config.n_head, 'head')}, width "
        f"{config.n_embd}, a context of {config.n_positions} tokens, a vocabulary of {config.vocab_size:,}."
    )


def _examples(source: Source) -> dict[str, Any]:
    """Return a prompt that leaves room for its answer, and a text that fits the context; the tokenizer can read both."""
    text = "The quick brown fox jumps over the lazy dog."
    prompts: list[str] = []
    if source.run is not None:
        samples = read_samples(source.run.samples)
        text = next((text for texts in reversed(samples.values()) for text in texts if text), text)
        prompts = [prompt for prompt in source.config.sampling.sample_prompts if prompt]
    tokenizer = vocabulary.load(source.model)
    context = AutoConfig.from_pretrained(source.model, trust_remote_code=False).n_positions
    new_tokens = min(30, context // 2)
    is_chat = tokenizer.chat_template is not None
    if is_chat:
        prompts = [*prompts, "Hello"]
    if encode.is_character(tokenizer.backend_tokenizer):
        known = tokenizer.get_vocab()
        text = "".join(character for character in text if character in known) or "".join(sorted(known)[:context])
    text = _cut(text, min(80, context))
    prompt = _cut((prompts or [text[: max(1, len(text) // 2)]])[0], context - new_tokens)
    return {"prompt": prompt, "text": text, "is_chat": is_chat, "new_tokens": new_tokens}


def _cut(text: str, tokens: int) -> str:
    """Return at most that many tokens of it: each holds a byte at least."""
    return text.encode()[:tokens].decode(errors="ignore") or text[:1]


def _metadata(source: Source, edition: Edition) -> ModelCardData:
    own = ["gpt2scratch" if edition.options.has_code else "gpt2"] + ["from-scratch"] * (source.run is not None)
    brought = {} if source.run is not None else _brought(source.model / "README.md")
    further = [tag for tag in brought.get("tags") or [] if tag not in ("gpt2scratch", "gpt2")]
    kept = {name: brought[name] for name in KEPT if name in brought}
    store = find_store(source.config.recipe) if source.run is not None else None
    datasets = sorted(set(store.metadata.hub_datasets)) if store is not None else []
    given = {"license": edition.options.license, "language": edition.options.language, "datasets": datasets}
    results = validation_results(source) + harness_results(source)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=own + further,
        **kept | {name: value for name, value in given.items() if value},
        **({"model_name": edition.repo_id.split("/")[1], "eval_results": results} if results else {}),
    )


def _brought(readme: Path) -> dict[str, Any]:
    """Return the metadata of a card that a folder has."""
    if not readme.is_file():
        return {}
    try:
        text = readme.read_text(encoding="utf-8", errors="replace")
        return ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The metadata of {readme} is not YAML: {' '.join(str(error).split())}; correct it.") from error
