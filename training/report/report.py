"""report.md: the run on one page, with its loss curve. What publishing makes the model card from."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from atomic import write_atomic
from errors import counted
from modeling_gpt2scratch import GPT2ScratchConfig
from settings_file import read_yaml
from tokenizer.report import documents, left_out
from tokenizer.store import Metadata
from training.console import clock, perplexity
from training.cost import describe_cost
from training.flops import flops_per_token
from training.launcher import launch_command
from training.metrics import (
    best_evaluation,
    comparable_loss,
    read_events,
    read_metrics,
    scores_more,
    seconds_until,
)
from training.report.plots import plot_course, plot_loss
from training.run_folder import RunFolder
from training.sampling import fenced, read_samples
from training.status import hours, starts_in_force

MOST_ROWS = 16  # of the table of results; metrics.jsonl has them all
MOMENTS = 5  # at which the report shows what the model wrote
SAID = 60  # characters of it in a row of the table
OPENING = 10  # characters of a sample, as a prompt where none is given
LEAST_SECONDS = 3.0  # of steps, from which a speed is told


@dataclass(frozen=True)
class About:
    """What the report says about a run that is not in its folder."""

    model: GPT2ScratchConfig
    parameters: int
    data: Metadata
    watts: float | None  # of all devices together at most; None where that is not known


def write_report(folder: RunFolder, about: About) -> None:
    """Writes report.md and, where matplotlib is installed, its plots from what the run has logged so far."""
    entries, events, samples = read_metrics(folder.metrics), read_events(folder.events), read_samples(folder.samples)
    settings = read_yaml(folder.config)
    hours_in_all, hourly_price = hours(events, datetime.now(UTC)), settings.get("hourly_price")
    sections = [
        f"# {folder.path.name}",
        _what_it_is(about.model, about.parameters, about.data),
        _how_to_use(folder.model, settings, samples, about.model.n_positions),
        _results(entries, samples),
        _picture("Loss of training and validation, by tokens and by time", plot_loss, entries, folder.plots["loss"]),
        _samples(samples),
        _data(about.data),
        _training(settings, starts_in_force(events), about.data),
        _speed(entries, about.model),
        _picture("Throughput, learning rate and gradient norm", plot_course, entries, folder.plots["course"]),
        _estimate_and_actual(entries, events, hours_in_all, hourly_price),
        _noticed(events),
        describe_cost(hours_in_all, hourly_price, about.watts),
        _limitations(about),
    ]
    write_atomic(folder.report, "\n\n".join(section for section in sections if section) + "\n")


def gather(report: Path, heading: str, content: str) -> None:
    """Puts a section into a report.md, after its results and in place of the one that it had; an empty one only goes."""
    if not report.is_file():
        return
    parts = split_at_headings(report.read_text(encoding="utf-8"))
    parts = [part.strip() for part in parts if not part.startswith(f"## {heading}\n")]
    place = next((i + 1 for i, part in enumerate(parts) if part.startswith("## Results\n")), len(parts))
    parts[place:place] = [f"## {heading}\n\n{content}"] if content else []
    write_atomic(report, "\n\n".join(parts) + "\n")


def split_at_headings(text: str) -> list[str]:
    """At each `## ` that is not inside a code block: what a model wrote may hold anything."""
    parts, fence = [[]], None
    for line in text.split("\n"):
        mark = re.match(r"`{3,}", line)
        if fence is None and line.startswith("## "):
            parts.append([])
        elif mark and fence is None:
            fence = mark[0]
        elif fence is not None and line.strip() == fence:
            fence = None
        parts[-1].append(line)
    return ["\n".join(lines) for lines in parts]


def _what_it_is(model: GPT2ScratchConfig, parameters: int, data: Metadata) -> str:
    head = "tied to the token embedding" if model.tie_word_embeddings else "with weights of its own"
    layers, heads = counted(model.n_layer, "layer"), counted(model.n_head, "head")
    gelu = {"gelu": "exact GELU", "gelu_new": "GELU by its tanh approximation"}
    return (
        f"A GPT-2-class language model trained from scratch: {parameters:,} parameters, {layers}, "
        f"{heads}, width {model.n_embd}, a context of {model.n_positions} tokens, a vocabulary of "
        f"{model.vocab_size:,} ({_kind(data)}), {gelu.get(model.activation_function, model.activation_function)}, and a "
        f"head {head}."
    )


def _kind(data: Metadata) -> str:
    return "byte-level BPE" if data.tokenizer_type == "bpe" else data.tokenizer_type


def _how_to_use(model: Path, settings: dict[str, Any], samples: dict[int, list[str]], context: int) -> str:
    openings = [texts[0][:OPENING] for texts in samples.values() if texts]  # in characters that the tokenizer knows
    prompt = [*settings.get("sample_prompts", []), *openings, "Once"][0]
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model.as_posix()}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{model.as_posix()}", trust_remote_code=True)
inputs = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={min(30, context // 2)})[0]))
```"""


def _results(entries: list[dict[str, Any]], samples: dict[int, list[str]]) -> str:
    """A row for each validation: how good the model was by then, how long that took, and what it said."""
    scored = [entry for entry in entries if "eval_loss" in entry]
    if not scored:
        return ""
    logged = {entry["step"]: entry for entry in entries if "loss" in entry}
    seconds = seconds_until(entries)
    sampled = any(map(scores_more, scored))  # then losses compare on the sample alone
    header = ["step", "epoch", "training loss", "validation loss", *["on the sample"] * sampled, "perplexity"]
    header += ["bits per byte", "tokens/s", "time", "what it wrote"]
    rows = [header, ["--:"] * (len(header) - 1) + ["---"]]
    for entry in evenly(scored, MOST_ROWS):
        step, before = entry["step"], logged.get(entry["step"], {})
        rows.append(
            [
                f"{step:,}",
                f"{entry['epoch']:.2f}",
                f"{before['loss']:.3f}" if before else "",
                f"{entry['eval_loss']:.4f}",
                *[f"{comparable_loss(entry):.4f}"] * sampled,
                perplexity(entry["eval_perplexity"]),
                f"{entry['eval_bits_per_byte']:.3f}",
                f"{before['tokens_per_second']:,.0f}" if "tokens_per_second" in before else "",
                clock(seconds.get(step, 0)),
                _cell(samples[step][0]) if samples.get(step) else "",
            ]
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    best = best_evaluation(scored)
    note = f"The lowest validation loss is {comparable_loss(best):.4f}, at step {best['step']:,}."
    if sampled:
        note = (
            "The validation at the end of a run scores all of the held-out text, the others a sample of it. Losses compare on the "
            f"sample: the lowest is {comparable_loss(best):.4f}, at step {best['step']:,}."
        )
    if skipped := len(scored) - len(rows) + 2:
        note += f" {skipped} of {len(scored)} validations are left out here."
    return (
        f"## Results\n\n{table}\n\nLoss in nats per token; bits per byte compare models of any tokenizer. Time is that of the "
        f"steps alone. {note}"
    )


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
    """What the model made of each prompt as training went on."""
    written = {step: texts for step, texts in samples.items() if texts}
    if not written:
        return ""
    sections, moments = ["## What it writes"], evenly(sorted(written), MOMENTS)
    number = max(map(len, written.values()))
    for nth in range(number):
        sections += [f"### Prompt {nth + 1}"] * (number > 1)
        told = [(step, written[step][nth]) for step in moments if nth < len(written[step])]
        sections += [f"After {counted(step, 'step')}:\n\n{fenced(text)}" for step, text in told]
    return "\n\n".join(sections)


def _data(data: Metadata) -> str:
    bytes_a_token = (data.train.bytes + data.val.bytes) / (data.train.tokens + data.val.tokens)
    lines = [
        f"- sources: {', '.join(public_name(source, data) for source in data.sources)}",
        f"- tokenizer: {_kind(data)} of {data.vocab_size:,} tokens, {bytes_a_token:.2f} bytes a token, "
        f"SHA-256 `{data.tokenizer_sha256[:16]}`",
        f"- training tokens: SHA-256 `{data.train.sha256[:16]}`; validation tokens: `{data.val.sha256[:16]}`",
        f"- cleaning: {', '.join(data.settings['cleaning']) or 'none'}; deduplication: {data.settings['dedup']}",
        f"- {documents(data)}" + "".join(f"; {line}" for line in left_out(data)),
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


def _training(settings: dict[str, Any], starts: list[dict[str, Any]], data: Metadata) -> str:
    shown = {name: value for name, value in settings.items() if not _is_private(name, value)}
    lines = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    changes = [f"- after step {start['step']:,}: {change}" for start in starts for change in start.get("changes", [])]
    lead = "The settings below, saved as `config.yaml`, train it again:"
    if changes:
        lead = (
            "The settings below are the last ones. Saved as `config.yaml`, they train another run from its first step:"
        )
    history = "\n\n".join(filter(None, [_environments(starts), _changes(changes)]))
    return f"""## Training

{history}

{lead}

```bash
{launch_command()} --config config.yaml --data {shlex.quote(_as_typed(settings["data"]))}
```

<details>
<summary>config.yaml: every setting{", as it was last" if changes else ""}</summary>

```yaml
{lines}```

</details>"""


def _environments(starts: list[dict[str, Any]]) -> str:
    """The hardware and libraries, and the step after which others took over."""
    known = [(start["step"], start["environment"]) for start in starts if "environment" in start]
    different = [pair for before, pair in pairwise([(0, None), *known]) if pair[1] != before[1]]
    if len(different) == 1 and different[0][0] == starts[0]["step"]:
        return f"{different[0][1]}."
    return "\n".join(f"- after step {step:,}: {environment}" for step, environment in different)


def _changes(changes: list[str]) -> str:
    if not changes:
        return ""
    return "Settings that changed when the run was resumed:\n\n" + "\n".join(changes)


def _as_typed(data: str) -> str:
    """The value of `--data`; of an absolute path outside of the current folder, which names places of this machine, the end."""
    path = PurePath(data)
    if not path.is_absolute():
        return data
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else PurePath("path/to", path.name))


def _is_private(name: str, value: Any) -> bool:
    """Whether it names a place of the machine that the run was made on."""
    return name in ("data", "backup_dir") or (isinstance(value, str) and PurePath(value).is_absolute())


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
    first = _seconds_to_first_step(entries)
    paragraphs = [
        "\n".join(rows),
        f"Over {counted(len(timed), 'log line')}. Peak memory {max(entry.get('peak_memory_gb', 0.0) for entry in timed):.1f} GB; "
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


def _picture(
    title: str, plot: Callable[[list[dict[str, Any]], Path], bool], entries: list[dict[str, Any]], path: Path
) -> str:
    return f"![{title}]({path.name})" if plot(entries, path) else ""


def _estimate_and_actual(
    entries: list[dict[str, Any]], events: list[dict[str, Any]], hours_in_all: float, hourly_price: float | None
) -> str:
    """What the run was estimated to take when it last started, and what it has taken."""
    planned = next((event["planned"] for event in reversed(events) if "planned" in event), None)
    timed = [entry for entry in entries if "tokens_per_second" in entry]
    if planned is None or not timed:
        return ""
    last, note = timed[-1], ""
    speed, time = planned["tokens_per_second"], planned["hours"]
    if speed is None:
        speed = _first_speed(timed)
        tokens = planned["steps"] * last["tokens"] / last["step"]
        time = (_seconds_to_first_step(entries) + tokens / speed / (1 - planned["evaluation_share"])) / 3600
        note = (
            "\n\nSpeed and time are estimated from the first seconds of the run: no figures were known for this device."
        )
    time *= (
        1 - events[0]["step"] / planned["steps"]
    )  # the steps of the run whose checkpoint it goes on from took theirs there
    reached = float(np.median([entry["tokens_per_second"] for entry in timed]))
    memory = max(entry.get("peak_memory_gb", 0.0) for entry in timed)  # older versions did not log it
    rows = [
        "| | estimated | actual |\n|---|--:|--:|",
        f"| steps | {planned['steps']:,} | {last['step']:,} |",
        f"| tokens a second | {speed:,.0f} | {reached:,.0f} |",
        f"| time | {clock(time * 3600)} | {clock(hours_in_all * 3600)} |",
        f"| memory at most | {planned['memory_bytes'] / 1e9:.2f} GB | {memory:.2f} GB |",
    ]
    if hourly_price is not None:
        rows.append(f"| dollars | {time * hourly_price:,.2f} | {hours_in_all * hourly_price:,.2f} |")
    return "## Estimate vs. actual\n\n" + "\n".join(rows) + note


def _first_speed(timed: list[dict[str, Any]]) -> float:
    """Tokens a second of the first few seconds, without the first log line, in which a device finds its pace."""
    seconds = tokens = 0.0
    for before, entry in pairwise(timed):
        tokens += entry["tokens"] - before["tokens"]
        seconds += (entry["tokens"] - before["tokens"]) / entry["tokens_per_second"]
        if seconds >= LEAST_SECONDS:
            break
    return tokens / seconds if seconds else timed[0]["tokens_per_second"]


def _noticed(events: list[dict[str, Any]]) -> str:
    """What a reader of the curves should know of."""
    told = {
        "resumed": lambda event: f"resumed from {event.get('checkpoint', 'its beginning')}",
        "stopped": lambda event: f"stopped ({event.get('because')})",
        "spike": lambda event: (
            f"the loss leapt to {event['loss']:.3f}, {event['z_score']:.1f} standard deviations above its mean"
        ),
        "advice": lambda event: event["text"],
    }
    lines = [f"- step {event['step']:,}: {told[event['event']](event)}" for event in events if event["event"] in told]
    return "## Noticed\n\n" + "\n".join(lines) if lines else ""


def _seconds_to_first_step(entries: list[dict[str, Any]]) -> float:
    return next((entry["seconds_to_first_step"] for entry in entries if "seconds_to_first_step" in entry), 0.0)


def _limitations(about: About) -> str:
    """What anyone who uses the model should know, as far as the run itself can tell."""
    seen = about.data.train.tokens
    return f"""## Limitations

A base model: it continues text, and was not taught to answer, to be right or to be harmless. All that it knows is in the
{seen:,} tokens named above; it repeats their errors, their bias and, at times, their words. It reads and writes at most
{about.model.n_positions:,} tokens at once. Nothing but the loss on held-out text of the same sources was measured, unless
said above."""
