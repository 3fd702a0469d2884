"""The model card: the run's report under the Hub's metadata, with the model named as others will load it."""

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig

from errors import UserError, counted
from publishing.evaluations import evaluations, table
from publishing.source import Source
from tokenizer import vocabulary
from training.config import TrainConfig
from training.data import find_store
from training.report.evaluation import found_of
from training.report.report import split_at_headings
from training.sampling import read_samples

# Metadata of a model folder's own card that its new one keeps, unless the command says otherwise.
KEPT = ("base_model", "datasets", "language", "license")
# In the card; the one on the Hub is kept as it is once this line is taken out of it.
WRITTEN = "<!-- Written by push_to_hub.py, which writes it anew each time. Take out this line to keep your changes. -->"


@dataclass(frozen=True)
class Edition:
    """What a repository, or a branch of it, holds of a model: what its card has to tell."""

    repo_id: str
    branch: str | None = None  # where it is not the main one
    has_code: bool = True  # the weights come with ours
    has_twin: bool = False  # a native GPT-2 lies in a subfolder
    licence: str | None = None
    language: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # a paragraph for each further file


def model_card(source: Source, edition: Edition) -> str:
    """Of a run: its report. Of a folder that has a README.md: that."""
    sections = _sections(source)
    use = "\n\n".join([*_ways_to_use(source, edition), *edition.files])
    title = sections.pop("")
    body = {"": _which_checkpoint(source, title), "Use": use, "Results": sections.pop("Results", "")}
    # The report may tell of other weights than those that are published.
    found = found_of(source.run, source.model) if source.run is not None else sections.pop("Evaluation", "")
    body["Evaluation"] = "\n\n".join(filter(None, [found, table(source)]))
    body |= {k: v for k, v in sections.items() if k not in ("Use", "Evaluation")}
    metadata = _metadata(source, edition)
    no_licence = "None was given: ask the author before you use the weights for more than looking."
    body["Licence"] = edition.licence or sections.get("Licence") or metadata.license or no_licence
    body["Citation"] = _citation(edition.repo_id)
    text = "\n\n".join(
        f"## {heading}\n\n{content}" if heading else content for heading, content in body.items() if content
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{WRITTEN}\n\n# {edition.repo_id}\n\n{text}\n"))


def is_kept(card: str) -> bool:
    """Whether someone made a card on the Hub their own."""
    return WRITTEN not in card


def _sections(source: Source) -> dict[str, str]:
    """The report by its headings, "" for what stands above the first."""
    path = source.model / "README.md" if source.run is None else source.run.report
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _about_the_shape(source.model)
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # metadata that it brings is made anew
    text = text.replace(WRITTEN, "").strip()
    head, *parts = split_at_headings(text)
    sections = {"": re.sub(r"\A# .*\n*", "", head).strip()}
    for part in parts:
        heading, _, content = part.partition("\n")
        heading = heading.removeprefix("## ").strip()
        before = f"{sections[heading]}\n\n" if heading in sections else ""
        sections[heading] = before + content.strip()
    return sections


def _about_the_shape(model: Path) -> str:
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return (
        f"A GPT-2-class language model: {counted(config.n_layer, 'layer')}, {counted(config.n_head, 'head')}, width {config.n_embd}, a context of "
        f"{config.n_positions} tokens, a vocabulary of {config.vocab_size:,}."
    )


def _which_checkpoint(source: Source, title: str) -> str:
    if source.step is None:
        return title
    record = source.validation
    scored = ""
    if record is not None:
        scored = f" Their validation loss is {record['eval_loss']:.4f}, on {record['eval_tokens']:,} tokens."
    return f"{title}\n\nThese are the weights after step {source.step:,} ({source.tokens:,} tokens).{scored}"


def _some_text(source: Source, context: int, new_tokens: int) -> tuple[str, str]:
    """A prompt that leaves room for `new_tokens`, and a text that fits the context; the tokenizer can read both."""
    text = "The quick brown fox jumps over the lazy dog."
    prompts: list[str] = []
    if source.run is not None:
        samples = read_samples(source.run.samples)
        text = next((text for texts in reversed(samples.values()) for text in texts if text), text)
        prompts = [prompt for prompt in source.config.sampling.sample_prompts if prompt]
    tokenizer = vocabulary.load(source.model)
    if tokenizer.chat_template is not None:
        prompts = [*prompts, "Hello"]
    if vocabulary.is_character(tokenizer):
        known = tokenizer.get_vocab()
        text = "".join(character for character in text if character in known) or "".join(sorted(known)[:context])
    text = _cut(text, min(80, context))
    return _cut((prompts or [text[: max(1, len(text) // 2)]])[0], context - new_tokens), text


def _cut(text: str, tokens: int) -> str:
    """To that many at most: each holds a byte at least."""
    return text.encode()[:tokens].decode(errors="ignore") or text[:1]


def _ways_to_use(source: Source, edition: Edition) -> list[str]:
    """Three, each of which works when it is pasted, and what to know of them."""
    repo_id = edition.repo_id
    more = [f'revision="{edition.branch}"'] if edition.branch else []
    more += ["trust_remote_code=True"] if edition.has_code else []
    arguments = ", ".join([f'"{repo_id}"', *more])
    context = AutoConfig.from_pretrained(source.model, trust_remote_code=False).n_positions
    new_tokens = min(30, context // 2)
    quoted, text = (json.dumps(words, ensure_ascii=False) for words in _some_text(source, context, new_tokens))
    asked = _asked(source, quoted, new_tokens)
    paragraphs = [
        f"""In one line:

```python
from transformers import pipeline

pipe = pipeline("text-generation", {", ".join([f'model="{repo_id}"', *more])})
{asked[0]}
```""",
        f"""By hand:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({arguments})
model = AutoModelForCausalLM.from_pretrained({arguments})
{asked[1]}
```""",
        f"""How likely is a text? In bits per byte:

```python
import math
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({arguments})
model = AutoModelForCausalLM.from_pretrained({arguments})
text = {text}
ids = tokenizer(text, return_tensors="pt").input_ids
nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
print(nats / math.log(2) / len(text.encode()))
```""",
    ]
    if edition.has_code:
        paragraphs.append(
            "The model's code comes with the weights and is short; `trust_remote_code=True` lets it run. Name a commit with "
            "`revision=` to run only what you have read."
        )
    if edition.has_twin:
        paragraphs.append(
            "The same weights as Transformers' own GPT-2, for tools that run no remote code (vLLM, llama.cpp, the harness "
            f'for evaluations ...): `AutoModelForCausalLM.from_pretrained("{repo_id}", subfolder="native")`.'
        )
    return paragraphs


def _asked(source: Source, prompt: str, new_tokens: int) -> tuple[str, str]:
    """Return how a pipeline, and the model itself, are asked: with a chat if the tokenizer has a chat template."""
    if vocabulary.load(source.model).chat_template is None:
        return (
            f'print(pipe({prompt}, max_new_tokens={new_tokens}, do_sample=True)[0]["generated_text"])',
            f"""inputs = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={new_tokens})[0]))""",
        )
    chat = f'[{{"role": "user", "content": {prompt}}}]'
    return (
        f'print(pipe({chat}, max_new_tokens={new_tokens})[0]["generated_text"][-1]["content"])',
        f"""chat = {chat}
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={new_tokens})[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(output, skip_special_tokens=True))""",
    )


def _citation(repo_id: str) -> str:
    author, name = repo_id.split("/")
    key = re.sub(r"\W+", "", f"{author}{name}").lower()
    return f"""```bibtex
@misc{{{key},
  author = {{{author}}},
  title = {{{name}}},
  year = {{{datetime.now(UTC).year}}},
  howpublished = {{\\url{{https://huggingface.co/{repo_id}}}}}
}}
```

The architecture is that of Radford et al., Language Models are Unsupervised Multitask Learners (2019)."""


def _metadata(source: Source, edition: Edition) -> ModelCardData:
    own = ["gpt2scratch" if edition.has_code else "gpt2"] + ["from-scratch"] * (source.run is not None)
    brought = {} if source.run is not None else _brought(source.model / "README.md")
    further = [tag for tag in brought.get("tags") or [] if tag not in ("gpt2scratch", "gpt2")]
    kept = {name: brought[name] for name in KEPT if name in brought}
    given = {"license": edition.licence, "language": edition.language}
    given["datasets"] = _datasets(source.config) if source.run is not None else []
    results = evaluations(source) if source.run is not None else []
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=own + further,
        **kept | {name: value for name, value in given.items() if value},
        **({"model_name": edition.repo_id.split("/")[1], "eval_results": results} if results else {}),
    )


def _brought(readme: Path) -> dict[str, Any]:
    """The metadata of a card.

    Raises:
        UserError: it cannot be read.
    """
    if not readme.is_file():
        return {}
    try:
        return ModelCard(
            readme.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True
        ).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The metadata of {readme} is not YAML: {' '.join(str(error).split())}; correct it.") from error


def _datasets(config: TrainConfig) -> list[str]:
    store = find_store(config.recipe)
    return sorted(set(store.metadata.hub_datasets)) if store is not None else []
