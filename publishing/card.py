"""Model card: the run's report with the Hub's metadata, instructions for loading the model, and results of lm-eval."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from common.errors import NONSENSE, UserError
from common.limits import setting
from modeling_gpt2scratch.conversion_gpt2scratch import native_kind
from publishing.source import Source
from publishing.upload import WRITTEN, WRITTEN_LINE, Repository
from tokenizer.encoding import encode, vocabulary
from training.checkpoints.checkpoint import MANIFEST
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.samples import read_samples
from training.data.run_data import find_store
from training.report.report import environment, evaluation_of, facts_of, sections_of

TEMPLATES = Path(__file__).parent / "templates"
# Metadata keys that the new card keeps from the card of a model folder, unless a flag replaces them.
KEPT = ("base_model", "datasets", "language", "license")
NO_LICENSE = "No license was given: ask the author before you use the weights."
HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"
VALIDATION = {"eval_loss": "Loss", "eval_perplexity": "Perplexity", "eval_bits_per_byte": "Bits per byte"}


@dataclass
class FolderArguments:
    format: Literal["gpt2scratch", "native", "both"] = setting(
        "gpt2scratch",
        "gpt2scratch includes its own code; native is Transformers' GPT-2 or Apertus with the same logits, for vLLM, "
        "lm-eval and others; both has the native model in a subfolder.",
    )
    gguf: list[str] = setting([], "GGUF files for llama.cpp to add: 16 or 8 bits per weight.", choices=["f16", "q8_0"])
    license: str | None = setting(None, "License of the weights for the model card, such as mit.")
    language: list[str] = setting([], "Languages of the text for the model card, such as en.")
    trust_folder_code: bool = setting(
        False, "Publish the Python files in the model's folder unchanged, even if they are not from this project."
    )

    @property
    def has_code(self) -> bool:
        return self.format != "native"

    @property
    def has_twin(self) -> bool:
        return self.format == "both"


def model_card(
    source: Source, repository: Repository, options: FolderArguments, gguf: Iterable[dict[str, Any]] = ()
) -> str:
    """Return the card, built from the run's report or from the README.md of a model folder. `gguf`: facts about the GGUF files."""
    run, measured = source.run, harness_results(source)
    # The run may have evaluated other weights than the published ones.
    evaluation = evaluation_of(run or RunFolder(source.model), source.model) or {}
    in_index = [*measured, *_entries(evaluation.get("tasks", {"configs": {}}))]
    facts = facts_of(run) if run is not None else None
    brought, sections = _page(source) if facts is None else ({}, {})
    config = AutoConfig.from_pretrained(source.model, trust_remote_code=False)
    native = native_kind(config) if options.format != "gpt2scratch" else None
    tag = "gpt2scratch" if options.has_code else native
    metadata = _metadata(source, repository, options, tag, brought if run is None else {}, in_index)
    license = options.license or sections.get("License") or sections.get("Licence") or metadata.license
    shown = {
        "base": "report.md.j2" if facts is not None else "page.md.j2",
        "sections": sections,
        "written": WRITTEN,
        "source": source,
        "repository": repository,
        "options": options,
        "config": config,
        "native": {"gpt2": "GPT-2", "apertus": "Apertus"}.get(native),
        "gguf": gguf,
        "evaluation": evaluation,
        "own_evaluation": sections.get("Evaluation", "") if run is None and not evaluation else "",
        "measured": measured,
        "license": license or NO_LICENSE,
        "citation_key": re.sub(r"\W+", "", repository.id).lower(),
        "year": datetime.now(UTC).year,
        **_examples(source, config.n_positions),
    }
    body = environment(TEMPLATES).get_template("card.md.j2").render((facts or {}) | shown).strip() + "\n"
    return str(ModelCard.from_template(metadata, template_str="---\n{{ card_data }}\n---\n\n{{ body }}", body=body))


def _page(source: Source) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata and the sections of a model page that was written by hand."""
    path = source.model / "README.md" if source.run is None else source.run.report
    page = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    block = re.match(r"---\n(.*?)\n---\n", page, flags=re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The metadata of {path} is not YAML: {' '.join(str(error).split())}; correct it.") from error
    sections = sections_of(WRITTEN_LINE.sub("", page[block.end() if block else 0 :]).strip())
    sections[""] = re.sub(r"\A# .*\n*", "", sections[""]).strip()
    return metadata if isinstance(metadata, dict) else {}, sections


def _examples(source: Source, context: int) -> dict[str, Any]:
    """Return a prompt that leaves room for its continuation, and a text that fits the context. The tokenizer can encode both."""
    written, prompts = ["The quick brown fox jumps over the lazy dog."], []
    if source.run is not None:
        written += [text for texts in read_samples(source.run.samples).values() for text in texts if text]
        prompts = [prompt for prompt in source.config.sampling.sample_prompts if prompt]
    text = written[-1]
    tokenizer = vocabulary.load(source.model)
    if is_chat := tokenizer.chat_template is not None:
        prompts.append("Hello")
    if encode.is_character(tokenizer.backend_tokenizer):
        known = tokenizer.get_vocab()
        text = "".join(character for character in text if character in known) or "".join(sorted(known)[:context])
    text, new_tokens = _cut(text, min(80, context)), min(30, context // 2)
    prompt = _cut((prompts or [text[: max(1, len(text) // 2)]])[0], context - new_tokens)
    return {"prompt": prompt, "text": text, "is_chat": is_chat, "new_tokens": new_tokens}


def _cut(text: str, tokens: int) -> str:
    """Return the start of `text` with at most `tokens` tokens. Each token has at least one byte."""
    return text.encode()[:tokens].decode(errors="ignore") or text[:1]


def _metadata(
    source: Source,
    repository: Repository,
    options: FolderArguments,
    tag: str,
    brought: dict[str, Any],
    measured: list[EvalResult],
) -> ModelCardData:
    pretrained = source.config.run.init_from if source.run is not None else None
    own = [tag, *["from-scratch"] * (source.run is not None and pretrained is None)]
    tags = brought["tags"] if isinstance(brought.get("tags"), list) else []
    store = find_store(source.config.recipe) if source.run is not None else None
    given = {"license": options.license, "language": options.language}
    given["datasets"] = sorted(set(store.metadata.hub_datasets)) if store is not None else []
    if pretrained is not None and not Path(pretrained).exists():
        given["base_model"] = pretrained
    results = validation_results(source) + measured
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=own + [tag for tag in tags if tag not in ("gpt2scratch", "gpt2", "apertus")],
        **{name: given.get(name) or brought[name] for name in KEPT if given.get(name) or name in brought},
        **({"model_name": repository.id.split("/")[1], "eval_results": results} if results else {}),
    )


def validation_results(source: Source) -> list[EvalResult]:
    """Return the run's validation of the checkpoint for the Hub's `model-index`."""
    record = source.validation or {}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Language modeling",
            dataset_type="text",
            dataset_name="held-out text of the training sources",
            dataset_split="validation",
            metric_type=name.removeprefix("eval_"),
            metric_name=title,
            metric_value=round(record[name], 4),
            verified=False,
        )
        for name, title in VALIDATION.items()
        if name in record
    ]


def harness_results(source: Source) -> list[EvalResult]:
    """Return the results of lm-eval for these weights, oldest first."""
    run, found = source.run or RunFolder(source.model), []
    paths = filter(Path.is_file, run.evaluations.glob("**/results_*.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            measured = json.loads(path.read_text(encoding="utf-8"))
            model, results = Path(measured["model_name"]).resolve(), list(_entries(measured))
            {result.unique_identifier for result in results}  # a card groups results by this identifier
        except NONSENSE as error:
            raise UserError(f"{path} is incomplete or damaged; delete it, or run lm_eval again.") from error
        is_own = model == source.model.resolve()
        if (
            not is_own and model == run.model.resolve() and source.step == run.newest_step()
        ):  # it has the newest weights
            is_own = path.stat().st_mtime >= (source.model / MANIFEST).stat().st_mtime  # and had them when measured
        found += results if is_own else []
    return found


def _entries(measured: dict[str, Any]) -> Iterator[EvalResult]:
    for name, task in measured["configs"].items():
        # Local tasks have no dataset id on the Hub, and a local path must not be published.
        local = task["dataset_path"] in (None, "json") or Path(task["dataset_path"]).is_absolute()
        for key, value in measured["results"][name].items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, float):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=name if local else task["dataset_path"],
                    dataset_name=name,
                    dataset_config=task.get("dataset_name"),
                    dataset_split=task.get("test_split") or task.get("validation_split"),
                    metric_type=metric,
                    metric_value=value,
                    source_name=f"lm-eval {measured['lm_eval_version']}, {measured['n-shot'][name]}-shot",
                    source_url=HARNESS,
                )
