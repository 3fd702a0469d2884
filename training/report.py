"""report.md: the run on one page, with its loss curve. What publishing makes the model card from."""

import json
from pathlib import Path
from typing import Any

from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import Metadata
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
    ]
    folder.report.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _what_it_is(model: GPT2ScratchConfig, parameters: int, data: Metadata) -> str:
    head = "tied to the token embedding" if model.tie_word_embeddings else "with weights of its own"
    kind = "BPE" if data.tokenizer_type == "bpe" else data.tokenizer_type
    return (
        f"A GPT-2-class language model trained from scratch: {parameters:,} parameters, {model.n_layer} layers, "
        f"{model.n_head} heads, width {model.n_embd}, a context of {model.n_positions} tokens, a vocabulary of "
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
    private = ("output_dir", "data", "tokenizer", "resume_from_checkpoint", "overwrite_output_dir")  # may hold paths
    lines = "\n".join(
        f"{name}: {value}" for name, value in settings.items() if value is not None and name not in private
    )
    return f"## Training\n\n{hardware}\n\n```yaml\n{lines}\n```"


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
