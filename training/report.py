"""report.md: the run on one page, with its loss curve. What publishing makes the model card from."""

import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import Metadata
from training.flops import flops_per_token
from training.journal import read_metrics
from training.run_folder import RunFolder
from training.sampling import fenced


def write_report(
    folder: RunFolder,
    model: GPT2ScratchConfig,
    parameters: int,
    data: Metadata,
    settings: dict[str, Any],
    hardware: str,
    samples: list[tuple[str, str]],
) -> None:
    """Writes report.md and, where matplotlib is installed, loss.png from what the run has logged so far."""
    entries = read_metrics(folder.metrics)
    sections = [
        f"# {folder.path.name}",
        _what_it_is(model, parameters, data),
        _how_to_use(folder.model, samples[0][0] if samples else "Once"),
        _results(entries),
        f"![Loss curve]({folder.plot.name})" if plot_loss(entries, folder.plot) else "",
        "## Samples\n\n" + "\n\n".join(fenced(prompt + text) for prompt, text in samples) if samples else "",
        _data(data),
        _training(settings, hardware),
        _speed(entries, hours(read_metrics(folder.events), datetime.now(UTC)), model),
    ]
    folder.report.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _what_it_is(model: GPT2ScratchConfig, parameters: int, data: Metadata) -> str:
    head = "tied to the token embedding" if model.tie_word_embeddings else "with weights of its own"
    layers, heads = f"layer{'s' * (model.n_layer > 1)}", f"head{'s' * (model.n_head > 1)}"
    kind = "BPE" if data.tokenizer_type == "bpe" else data.tokenizer_type
    return (
        f"A GPT-2-class language model trained from scratch: {parameters:,} parameters, {model.n_layer} {layers}, "
        f"{model.n_head} {heads}, width {model.n_embd}, a context of {model.n_positions} tokens, a vocabulary of "
        f"{model.vocab_size:,} ({kind}), and a head {head}."
    )


def _how_to_use(model: Path, prompt: str) -> str:
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model.as_posix()}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{model.as_posix()}", trust_remote_code=True)
inputs = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=30)[0]))
```"""


def _results(entries: list[dict[str, Any]]) -> str:
    scored = [entry for entry in entries if "eval_loss" in entry]
    if not scored:
        return ""
    logged = {entry["step"]: entry for entry in entries if "loss" in entry}
    rows = ["| step | epoch | train loss | validation loss | perplexity | bits per byte |", "|--:|--:|--:|--:|--:|--:|"]
    for entry in scored:
        train = f"{logged[entry['step']]['loss']:.3f}" if entry["step"] in logged else ""
        rows.append(
            f"| {entry['step']:,} | {entry['epoch']:.2f} | {train} | {entry['eval_loss']:.4f} "
            f"| {entry['eval_perplexity']:.2f} | {entry['eval_bits_per_byte']:.3f} |"
        )
    return "## Results\n\n" + "\n".join(rows)


def _data(data: Metadata) -> str:
    return f"""## Data

| split | documents | tokens | bytes |
|---|--:|--:|--:|
| train | {data.train.documents:,} | {data.train.tokens:,} | {data.train.bytes:,} |
| validation | {data.val.documents:,} | {data.val.tokens:,} | {data.val.bytes:,} |

Made from {", ".join(Path(source).name for source in data.sources)}; tokenizer `{data.tokenizer_sha256[:12]}`."""


def _training(settings: dict[str, Any], hardware: str) -> str:
    # These may hold paths of this machine.
    private = ("output_dir", "data", "tokenizer", "resume_from_checkpoint", "overwrite_output_dir", "backup_dir")
    told = {name: value for name, value in settings.items() if value is not None and name not in private}
    lines = yaml.safe_dump(told, sort_keys=False, allow_unicode=True)
    return f"## Training\n\n{hardware}\n\n```yaml\n{lines}```"


def _speed(entries: list[dict[str, Any]], hours_in_all: float, model: GPT2ScratchConfig) -> str:
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
        f"{first:.1f} s to the first step; {hours_in_all:.2f} hours in all.",
    ]
    if mfu := [entry["mfu"] for entry in timed if "mfu" in entry]:
        causal, palm = flops_per_token(model), flops_per_token(model, causal=False)
        paragraphs.append(
            f"MFU counts {causal / 1e6:,.1f} MFLOP a token (6 N + 6 L C T, with N weights in matrix products; causal "
            f"attention) against the peak that the device's datasheet gives, named above. As PaLM and nanoGPT count "
            f"(12 L C T), it would be {np.median(mfu) * palm / causal:.1%}."
        )
    return "## Speed\n\n" + "\n\n".join(paragraphs)


def hours(events: list[dict[str, Any]], now: datetime) -> float:
    """That the run has taken until now, by its events.jsonl. The time between the last event before a stop or a kill and
    the next start does not count."""
    moments = [(event["event"] in ("begun", "resumed"), datetime.fromisoformat(event["time"])) for event in events]
    spans = [later - before for (_, before), (starts, later) in pairwise([*moments, (False, now)]) if not starts]
    return sum(span.total_seconds() for span in spans) / 3600


def plot_loss(entries: list[dict[str, Any]], path: Path) -> bool:
    """Training and validation loss by tokens. False where there is nothing to plot or nothing to plot with."""
    train = [(entry["tokens"], entry["loss"]) for entry in entries if "loss" in entry]
    if not train:
        return False
    try:
        from matplotlib.figure import Figure
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
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return True
