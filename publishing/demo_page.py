"""The page of the demo: up to four models continue one prompt, side by side.

`python -m publishing.demo` opens it; copied as app.py next to a models.json, with its style sheet, its template and the model's
package, it is a whole Space. So it imports nothing else of this repository.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # gradio would tell its makers of every start

import gradio
import torch
from jinja2 import Template
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling_gpt2scratch.loading import arrange_weights, load_with_tokenizer

EXAMPLES = ("Once upon a time", "The most important thing", "In the beginning")
REFRESH = 0.08  # seconds between two looks at what was written
VISITORS = 4  # served at once; others wait for their turn
LONGEST_PROMPT = 20_000  # characters
LONGEST_SEED = 15  # digits
ALL_TOKENS = 10**9
LOWEST_TEMPERATURE = 1e-6  # as in training/sampling.py: logits divided by less may be infinite
STYLE, CARDS = Path(__file__).with_suffix(".css"), Path(__file__).with_suffix(".html.j2")


@dataclass(frozen=True)
class DemoModel:
    """A model on the page."""

    name: str
    facts: list[str]  # beside its size, such as "step 300"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Settings:
    """Named and meant as generate.py's flags."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Settings":
        """Return the settings of the page's controls; the seed is text, and empty for a new one."""
        seed = values["seed"]
        if seed and not (seed.isdecimal() and len(seed) <= LONGEST_SEED):
            raise InputError("It is a whole number, or empty for a new one each time.", "Seed")
        whole = {name: int(values[name]) for name in ("max_new_tokens", "top_k")}
        parts = {name: float(values[name]) for name in ("temperature", "top_p", "repetition_penalty")}
        if parts["temperature"] < LOWEST_TEMPERATURE:
            parts["temperature"] = 0.0
        return cls(**whole, **parts, seed=int(seed) if seed else secrets.randbelow(10_000))

    def processors(self) -> LogitsProcessorList:
        """Return what happens to the logits before a token is chosen, in the order of Transformers' `generate`."""
        chain = [RepetitionPenaltyLogitsProcessor(self.repetition_penalty)]
        if self.temperature > 0:
            top_k = TopKLogitsWarper(self.top_k or ALL_TOKENS)
            chain += [TemperatureLogitsWarper(self.temperature), top_k, TopPLogitsWarper(self.top_p)]
        return LogitsProcessorList(chain)


@dataclass
class Continuation:
    """What one model has written; a thread of its own fills it while the page shows it."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0  # from the first token on: what comes before is reading
    state: str = "writing"  # then one of: complete, ended (by the model), stopped, refused, failed
    problem: str = ""


class InputError(gradio.Error):
    """What a visitor gave cannot be used; the page shows why."""

    def __init__(self, message: str, title: str = "Prompt"):
        super().__init__(message, title=title, print_exception=False)


# ---- models ----------------------------------------------------------------------------------------------------------


def load(source: str, name: str, facts: list[str]) -> DemoModel:
    """Load `source`, a model folder or a Hub id; raise a `ModelError` where it cannot be."""
    model, tokenizer = load_with_tokenizer(source)
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    arrange_weights(model)
    return DemoModel(name, [f"{short(model.num_parameters())} parameters", *facts], model, tokenizer)


def short(number: int) -> str:
    """1_740_480 -> 1.7M"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return str(number)


def check_prompt(prompt: str) -> None:
    """Refuse, by a `InputError`, what the page itself prevents and other programs do not."""
    if len(prompt) > LONGEST_PROMPT:
        raise InputError(f"It has {len(prompt):,} characters; at most {LONGEST_PROMPT:,} are read.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("It is not UTF-8 text.") from error


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the ids; raise a `InputError` at a character that the tokenizer does not know, and at nothing to continue."""
    try:
        ids = tokenizer.encode(prompt, add_special_tokens=False, verbose=False)
    except Exception as error:  # the Rust library raises nothing narrower
        unknown = " ".join(sorted(set(prompt) - set(tokenizer.get_vocab())))
        raise InputError(
            f"This model reads {len(tokenizer)} characters, and these are not among them: {unknown}"
        ) from error
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise InputError("This model needs a beginning: write a few words.")
    return ids


@torch.no_grad()
def new_tokens(model: PreTrainedModel, ids: list[int], settings: Settings) -> Iterator[int]:
    """Continues `ids` token by token until the model ends its text, also beyond its context: when that is full, its second
    half becomes the new prompt.

    At temperature 0 these are the tokens of generate.py. `generate` draws from the one generator that all share; here each
    text has its own, so that a seed gives the same text whoever else is writing.
    """
    context, ends = model.config.max_position_embeddings, model.generation_config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    ends = set(ends if isinstance(ends, list) else [ends])
    generator = torch.Generator(model.device).manual_seed(settings.seed)
    process = settings.processors()
    window = ids[-context + 1 :]
    unread, cache = window, None
    for _ in range(settings.max_new_tokens):
        if len(window) == context:
            window = window[-max(1, context // 2) :]
            unread, cache = window, None
        output = model(torch.tensor([unread], device=model.device), past_key_values=cache, use_cache=True)
        logits = process(torch.tensor([window], device=model.device), output.logits[:, -1].float())  # (1, V)
        if settings.temperature > 0:
            chosen = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen in ends:
            return
        yield chosen
        window = [*window, chosen]
        unread, cache = [chosen], output.past_key_values


def write(shown: DemoModel, prompt: str, settings: Settings, into: Continuation, stop: threading.Event) -> None:
    """Fills `into` until the text is complete or `stop` is set."""
    try:
        ids = encode(shown.tokenizer, prompt)
    except InputError as problem:
        into.problem, into.state = problem.message, "refused"
        return
    written: list[int] = []
    started = time.perf_counter()
    for token in new_tokens(shown.model, ids, settings):
        written.append(token)
        text = shown.tokenizer.decode(written, skip_special_tokens=True)
        if len(written) == 1:
            started = time.perf_counter()
        into.seconds = time.perf_counter() - started  # before the tokens: the page may look at any moment
        into.text, into.tokens = text.rstrip("\ufffd"), len(written)  # perhaps the first bytes of a character
        if stop.is_set():
            into.state = "stopped"
            return
    into.state = "complete" if len(written) == settings.max_new_tokens else "ended"


def side_by_side(
    models: list[DemoModel], prompt: str, settings: Settings, stop: threading.Event
) -> Iterator[list[Continuation]]:
    """What all have written so far, again and again, until all are done. Nothing writes on when this is closed."""
    continuations = [Continuation() for _ in models]
    with ThreadPoolExecutor(len(models)) as threads:
        try:
            tasks = [
                threads.submit(write, shown, prompt, settings, into, stop)
                for shown, into in zip(models, continuations, strict=True)
            ]
            while wait(tasks, timeout=REFRESH).not_done:
                yield continuations
        finally:
            stop.set()
    for task, into in zip(tasks, continuations, strict=True):
        if task.exception():
            into.state = "failed"
    yield continuations
    for task in tasks:
        task.result()  # raises what its thread has raised


# ---- the page --------------------------------------------------------------------------------------------------------


def cards(models: list[DemoModel], prompt: str, continuations: list[Continuation], seed: int | None) -> str:
    """Return a card for each model as HTML; all text is escaped. `seed` is None where nothing was drawn."""
    pairs = list(zip(models, continuations, strict=True))
    return Template(CARDS.read_text(encoding="utf-8"), autoescape=True).render(cards=pairs, prompt=prompt, seed=seed)


def build(models: list[DemoModel], title: str, examples: list[str]) -> gradio.Blocks:
    """Return the page, to be opened by `serve`."""
    stops: dict[str, threading.Event] = {}  # of the visitors who are being served

    def answer(values: dict[gradio.components.Component, Any], request: gradio.Request) -> Iterator[str]:
        text = values[prompt] or ""
        check_prompt(text)
        settings = Settings.of({name: values[control] for name, control in controls.items()})
        stop = stops[request.session_hash] = threading.Event()
        try:
            for continuations in side_by_side(models, text, settings, stop):
                yield cards(models, text, continuations, settings.seed if settings.temperature > 0 else None)
        finally:
            stops.pop(request.session_hash, None)

    def stop_writing(request: gradio.Request) -> None:
        if request.session_hash in stops:
            stops[request.session_hash].set()

    of_each = "the model continues it" if len(models) == 1 else f"each of the {len(models)} models continues it"
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(f'<div class="head"><h1>{escape(title)}</h1><p>Write a beginning; {of_each}.</p></div>')
        with gradio.Column(elem_classes="desk"):
            prompt = gradio.Textbox(
                examples[0], lines=3, max_lines=12, show_label=False, container=False, elem_id="prompt", label="Prompt",
                placeholder="The beginning of a text", max_length=LONGEST_PROMPT,
            )  # fmt: skip
            with gradio.Row(elem_classes="bar"):
                with gradio.Row(elem_classes="examples"):
                    for example in examples:
                        chip = gradio.Button(example.replace("\n", " ⏎").strip(), size="sm", elem_classes="chip")
                        chip.click(None, None, prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
                start = gradio.Button("Continue", variant="primary", elem_id="start")
                stop = gradio.Button("Stop", elem_id="stop")
            with gradio.Accordion("Settings", open=False, elem_classes="settings"), gradio.Row(elem_classes="sliders"):
                controls = {
                    "temperature": slider("Temperature", (0, 2, 0.05), 0.8, "0 always takes the most likely token"),
                    "max_new_tokens": slider("Length", (1, 1000, 1), 200, "new tokens"),
                    "top_k": slider("Top-k", (0, 200, 1), 50, "choose among so many; 0 for all"),
                    "top_p": slider("Top-p", (0.05, 1, 0.05), 1, "choose among this share"),
                    "repetition_penalty": slider(
                        "Repetition penalty", (1, 2, 0.05), 1, "above 1, what was used gets less likely"
                    ),
                    "seed": gradio.Textbox(
                        label="Seed", info="the same one writes the same text", placeholder="new each time",
                        max_length=LONGEST_SEED, elem_id="seed",
                    ),
                }  # fmt: skip
        nothing = [Continuation(state="empty") for _ in models]
        shown = gradio.HTML(cards(models, "", nothing, None), elem_id="answers")
        gradio.on(
            [start.click, prompt.submit], answer, {prompt, *controls.values()}, shown,
            show_progress="hidden", concurrency_limit=VISITORS, api_visibility="private",
        )  # fmt: skip
        stop.click(stop_writing, queue=False, show_progress="hidden", api_visibility="private")
    return page


def slider(label: str, numbers: tuple[float, float, float], value: float, info: str) -> gradio.Slider:
    """`numbers`: the least, the largest, and a step."""
    low, high, step = numbers
    name = label.lower().replace(" ", "_").replace("-", "_")
    return gradio.Slider(low, high, value, step=step, label=label, info=info, buttons=[], elem_id=name)


def serve(
    models: list[DemoModel], title: str, examples: list[str], port: int | None = None, share: bool = False
) -> None:
    """Opens the page, says where, and returns once it is interrupted.

    Raises:
        OSError: the port is taken.
    """
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # nothing is fetched
    page = build(models, title, examples)
    _, local, shared = page.launch(
        server_port=port, share=share, theme=gradio.themes.Base(**fonts), css_paths=STYLE, footer_links=[],
        run_history=False, quiet=True, prevent_thread_lock=True, max_file_size=0,  # nothing is uploaded
    )  # fmt: skip
    print(f"Open {shared or local} (Ctrl-C ends it).", flush=True)
    page.block_thread()


if __name__ == "__main__":  # on a Space
    space = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    serve([load(source, source, []) for source in space["models"]], space["title"], EXAMPLES)
