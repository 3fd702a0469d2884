"""Measurements on held-out examples, before and after."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812  the usual name
from transformers import PreTrainedModel

MEASURED = 200  # held-out prompts whose answers are scored

# Explanations of the rows of the results.
MEANINGS = {
    "loss": "nats per token of {scored} held-out {unit}",
    "exact match": "share of {scored} held-out {unit} whose {answer} answer greedy generation gives exactly, "
    "to its end",
    "preference accuracy": "share of {scored} held-out pairs whose chosen answer has the higher log-likelihood",
    "original, bits per byte": "on up to 200 windows of the held-out text of the pre-training",
}


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[dict[str, list[int]]]) -> tuple[float, int]:
    """Return nats per token and the number of tokens, of rows with `input_ids` and `labels` (-100: not counted)."""
    model.eval()
    nats, tokens = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        nats += F.cross_entropy(logits, labels[1:], reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    return nats / tokens, tokens


@torch.no_grad()
def score(model: PreTrainedModel, answers: Iterable[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each answer after its prompt in nats, and whether it is the greedy answer, from
    pairs of ids. As in lm-eval, an answer is greedy if each token is the most likely one after the tokens before it:
    greedy generation repeats exactly this answer. An answer that does not fit the context is cut, and is not greedy."""
    model.eval()
    context, scores = model.config.max_position_embeddings, []
    for prompt, answer in answers:
        ids, start = torch.tensor([*prompt, *answer][:context], device=model.device), max(1, len(prompt))
        targets = ids[start:]
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, start - 1 :].float()
        is_greedy = len(targets) == len(answer) and bool((logits.argmax(-1) == targets).all())
        scores.append((-F.cross_entropy(logits, targets, reduction="sum").item(), is_greedy))
    return scores


def until(end: int, ids: list[int]) -> list[int]:
    """Return the ids to the last one that equals `end`: after the token that ends a turn, a template may write a line
    break. All of them if there is none, because the answer was cut."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


@dataclass(frozen=True)
class Learned:
    """New examples, without the replayed ones, and what is measured on the held-out ones."""

    method: str  # fine-tuned
    trained: int
    held_out: int
    unit: str  # chats, windows of 64 tokens
    use: str  # flags of generate.py
    measure: Callable[[PreTrainedModel], dict[str, float]]


def table(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the measurements as a table in Markdown."""
    rows = (f"| {name} | {old:.4f} | {after[name]:.4f} | {after[name] - old:+.4f} |" for name, old in before.items())
    return "\n".join(["| held out | before | after | change |", "|---|--:|--:|--:|", *rows])


def explanation(names: Iterable[str], learned: Learned) -> str:
    """Return what each row of the table means."""
    shown = {"unit": learned.unit, "answer": "chosen" if learned.unit == "pairs" else "first"}
    shown["scored"] = min(MEASURED, learned.held_out)
    meanings = "\n".join(f"- {name}: {MEANINGS[name].format(**shown)}" for name in names)
    return f"{learned.held_out:,} {learned.unit} were held out.\n\n{meanings}"
