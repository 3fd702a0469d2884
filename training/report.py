"""report.md: the run on one page, with its loss curve. What publishing makes the model card from."""

import json
import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.report import left_out
from tokenizer.store import Metadata
from training.cost import describe_cost
from training.flops import flops_per_token
from training.metrics import read_metrics
from training.run_folder import RunFolder
from training.sampling import fenced, read_samples
from training.screen import clock
from training.status import hours

MOST_ROWS = 16  # of the table of results; metrics.jsonl has them all
MOMENTS = 5  # at which the report shows what the model wrote
SAID = 60  # characters of it in a row of the table
LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate")


@dataclass(frozen=True)
class About:
    """What the report tells of a run besides what the run has logged."""

    model: GPT2ScratchConfig
    parameters: int
    data: Metadata
    settings: dict[str, Any]
    hardware: str
    watts: float | None  # of all devices together at most; None where that is not known


def write_report(folder: RunFolder, about: About) -> None:
    """Writes report.md and, where matplotlib is installed, loss.png from what the run has logged so far."""
    entries, samples = read_metrics(folder.metrics), read_samples(folder.samples)
    hours_in_all = hours(read_metrics(folder.events), datetime.now(UTC))
    sections = [
        f"# {folder.path.name}",
        _what_it_is(about.model, about.parameters, about.data),
        _how_to_use(folder.model, about),
        _results(entries, samples),
        f"![Loss curve]({folder.plot.name})" if plot_loss(entries, folder.plot) else "",
        _samples(samples),
        _data(about.data),
        _training(about.settings, about.hardware, about.data),
        _speed(entries, about.model),
        describe_cost(hours_in_all, about.settings.get("hourly_price"), about.watts),
        _limitations(about),
    ]
    folder.report.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _what_it_is(model: GPT2ScratchConfig, parameters: int, data: Metadata) -> str:
    head = "tied to the token embedding" if model.tie_word_embeddings else "with weights of its own"
    layers, heads = f"layer{'s' * (model.n_layer > 1)}", f"head{'s' * (model.n_head > 1)}"
    gelu = {"gelu": "exact GELU", "gelu_new": "GELU by its tanh approximation"}
    return (
        f"A GPT-2-class language model trained from scratch: {parameters:,} parameters, {model.n_layer} {layers}, "
        f"{model.n_head} {heads}, width {model.n_embd}, a context of {model.n_positions} tokens, a vocabulary of "
        f"{model.vocab_size:,} ({_kind(data)}), {gelu.get(model.activation_function, model.activation_function)}, and a "
        f"head {head}."
    )


def _kind(data: Metadata) -> str:
    return "byte-level BPE" if data.tokenizer_type == "bpe" else data.tokenizer_type


def _how_to_use(model: Path, about: About) -> str:
    prompt = (about.settings.get("sample_prompts") or ["Once"])[0]
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model.as_posix()}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{model.as_posix()}", trust_remote_code=True)
inputs = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={min(30, about.model.n_positions // 2)})[0]))
```"""


def _results(entries: list[dict[str, Any]], samples: dict[int, list[str]]) -> str:
    """A row for each validation: how good the model was by then, how long that took, and what it said."""
    scored = [entry for entry in entries if "eval_loss" in entry]
    if not scored:
        return ""
    logged = {entry["step"]: entry for entry in entries if "loss" in entry}
    seconds = _seconds_until(entries)
    rows = [
        "| step | epoch | training loss | validation loss | perplexity | bits per byte | tokens/s | time | what it wrote |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for entry in evenly(scored, MOST_ROWS):
        step, before = entry["step"], logged.get(entry["step"], {})
        train = f"{before['loss']:.3f}" if before else ""
        speed = f"{before['tokens_per_second']:,.0f}" if "tokens_per_second" in before else ""
        said = _cell(samples[step][0]) if samples.get(step) else ""
        rows.append(
            f"| {step:,} | {entry['epoch']:.2f} | {train} | {entry['eval_loss']:.4f} | {entry['eval_perplexity']:.2f} "
            f"| {entry['eval_bits_per_byte']:.3f} | {speed} | {clock(seconds.get(step, 0))} | {said} |"
        )
    skipped = len(scored) - len(rows) + 2
    note = f" {skipped} of {len(scored)} validations are left out here." if skipped else ""
    return (
        "## Results\n\n" + "\n".join(rows) + "\n\nLoss in nats a token; bits per byte compare models of any tokenizer. "
        f"Time is that of the steps alone.{note}"
    )


def _seconds_until(entries: list[dict[str, Any]]) -> dict[int, float]:
    """How long the steps took until each logged step, by the tokens and the speed of each log line."""
    seconds, tokens, until = 0.0, 0, {}
    for entry in entries:
        if "tokens_per_second" in entry:
            seconds += (entry["tokens"] - tokens) / entry["tokens_per_second"]
        tokens = entry.get("tokens", tokens)
        until[entry["step"]] = seconds
    return until


def evenly(items: list[Any], most: int) -> list[Any]:
    """At most `most` of them, evenly spread, the first and the last among them."""
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in chosen]


def _cell(text: str) -> str:
    """The beginning of a text in a row of a table, as code: whatever a model writes, it stays text."""
    line = re.sub(r"\s+", " ", text.replace("`", "'")).strip()
    line = line if len(line) <= SAID else line[: SAID - 1] + "…"
    return f"`{line}`".replace("|", r"\|")


def _samples(samples: dict[int, list[str]]) -> str:
    """The first prompt as training went on, then what the model makes of all of them at the end."""
    told = {step: texts for step, texts in samples.items() if texts}
    if not told:
        return ""
    moments = evenly(sorted(told), MOMENTS)
    before = [f"After {step:,} steps:\n\n{fenced(told[step][0])}" for step in moments[:-1]]
    last = [f"After {moments[-1]:,} steps:", *map(fenced, told[moments[-1]])]
    return "\n\n".join(["## What it writes", *before, *last])


def _data(data: Metadata) -> str:
    bytes_a_token = (data.train.bytes + data.val.bytes) / (data.train.tokens + data.val.tokens)
    lines = [
        f"- sources: {', '.join(public_name(source, data) for source in data.sources)}",
        f"- tokenizer: {_kind(data)} of {data.vocab_size:,} tokens, {bytes_a_token:.2f} bytes a token, "
        f"SHA-256 `{data.tokenizer_sha256[:16]}`",
        f"- training tokens: SHA-256 `{data.train.sha256[:16]}`; validation tokens: `{data.val.sha256[:16]}`",
        f"- cleaning: {', '.join(data.settings['cleaning']) or 'none'}; deduplication: {data.settings['dedup']}",
        *(f"- {line}" for line in left_out(data)),
    ]
    return f"""## Data

| split | documents | tokens | bytes |
|---|--:|--:|--:|
| train | {data.train.documents:,} | {data.train.tokens:,} | {data.train.bytes:,} |
| validation | {data.val.documents:,} | {data.val.tokens:,} | {data.val.bytes:,} |

{chr(10).join(lines)}"""


def public_name(source: str, data: Metadata) -> str:
    """A Hub dataset under its id; of a path, the last part."""
    return source if source.startswith(tuple(data.hub_datasets)) else Path(source).name


def _training(settings: dict[str, Any], hardware: str, data: Metadata) -> str:
    told = {name: value for name, value in settings.items() if value is not None and not _is_private(name, value)}
    lines = yaml.safe_dump(told, sort_keys=False, allow_unicode=True)
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    text = public_name(str(settings.get("data", "my.txt")), data)
    return f"""## Training

{hardware}; {versions}.

```bash
accelerate launch --quiet train_accelerate.py --config config.yaml --data {shlex.quote(text)}
```

<details>
<summary>config.yaml: every setting</summary>

```yaml
{lines}```

</details>"""


def _is_private(name: str, value: Any) -> bool:
    """Places of the machine that the run was made on."""
    places = {"output_dir", "data", "tokenizer", "resume_from_checkpoint", "overwrite_output_dir", "backup_dir"}
    return name in places or (isinstance(value, str) and PurePath(value).is_absolute())


def _speed(entries: list[dict[str, Any]], model: GPT2ScratchConfig) -> str:
    timed = [entry for entry in entries if "data_share" in entry]
    if not timed:
        return ""
    rows = ["| | median | 10th to 90th percentile |", "|---|--:|--:|"]
    for name, title, form in (
        ("tokens_per_second", "tokens a second", ",.0f"),
        ("mfu", "model FLOPs utilisation (MFU)", ".1%"),
        ("data_share", "share of the time in which batches were made", ".2%"),
    ):
        if values := [entry[name] for entry in timed if name in entry]:
            low, median, high = np.percentile(values, [10, 50, 90])
            rows.append(f"| {title} | {median:{form}} | {low:{form}} to {high:{form}} |")
    first = next(entry["seconds_to_first_step"] for entry in entries if "seconds_to_first_step" in entry)
    paragraphs = [
        "\n".join(rows),
        f"Over {len(timed):,} log lines. Peak memory {max(entry['peak_memory_gb'] for entry in timed):.1f} GB; "
        f"{first:.1f} s to the first step.",
    ]
    if mfu := [entry["mfu"] for entry in timed if "mfu" in entry]:
        causal, palm = flops_per_token(model), flops_per_token(model, causal=False)
        paragraphs.append(
            f"MFU counts {causal / 1e6:,.1f} MFLOP a token (6 N + 6 L C T, with N weights in matrix products; causal "
            f"attention) against the peak that the device's datasheet gives, named above. As PaLM and nanoGPT count "
            f"(12 L C T), it would be {np.median(mfu) * palm / causal:.1%}."
        )
    return "## Speed\n\n" + "\n\n".join(paragraphs)


def _limitations(about: About) -> str:
    """What anyone who uses the model should know, as far as the run itself can tell."""
    seen = about.data.train.tokens
    return f"""## Limitations

A base model: it continues text, and was not taught to answer, to be right or to be harmless. All that it knows is in the
{seen:,} tokens named above; it repeats their errors, their bias and, at times, their words. It reads and writes at most
{about.model.n_positions:,} tokens at once. Nothing but the loss on held-out text of the same sources was measured, unless
said above."""


def plot_loss(entries: list[dict[str, Any]], path: Path) -> bool:
    """Training and validation loss by tokens. False where there is nothing to plot or nothing to plot with."""
    train = [(entry["tokens"], entry["loss"]) for entry in entries if "loss" in entry]
    if not train:
        return False
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        return False
    tokens_at = {entry["step"]: entry["tokens"] for entry in entries if "loss" in entry}
    scored = [(tokens_at[e["step"]], e["eval_loss"]) for e in entries if "eval_loss" in e and e["step"] in tokens_at]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#7f9fbf", linewidth=1, label="train")
    if scored:
        axes.plot(*zip(*scored, strict=True), color="#d1495b", marker="o", label="validation")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.5M
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return True
