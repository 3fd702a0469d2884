"""Page of the demo: up to four models continue one prompt, side by side.

`python -m publishing.demo` serves it. A Space uses it as app.py, with models.json, the style sheet, the template and the model's
package; it therefore imports nothing else from this repository.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # otherwise gradio reports every start to its developers

import gradio
import torch
from jinja2 import Template
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process

from modeling_gpt2scratch import loading

EXAMPLES = ("Once upon a time", "The most important thing", "In the beginning")
REFRESH = 0.08  # seconds between updates of the page
VISITORS = 4  # number of visitors served at the same time; others wait
LONGEST_PROMPT = 20_000  # in characters
LARGEST_SEED = 10**15
ALL_TOKENS = 10**9
STYLE, CARDS = Path(__file__).with_suffix(".css"), Path(__file__).with_suffix(".html.j2")


@dataclass(frozen=True)
class DemoModel:
    """Model on the page."""

    name: str
    facts: list[str]  # such as the model's size and "step 300"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Settings:
    """Sampling settings, with the names and meanings of generate.py's flags."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int

    @property
    def is_greedy(self) -> bool:
        return self.temperature < loading.LOWEST_TEMPERATURE

    def processors(self) -> LogitsProcessorList:
        """Return the processors of logits, in the order of Transformers' `generate`."""
        chain = LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))])
        if not self.is_greedy:
            chain.append(logits_process.TemperatureLogitsWarper(float(self.temperature)))
            chain.append(logits_process.TopKLogitsWarper(int(self.top_k) or ALL_TOKENS))
            chain.append(logits_process.TopPLogitsWarper(float(self.top_p)))
        return chain


@dataclass
class Continuation:
    """Text that one model has generated so far."""

    text: str = ""  # or the reason why the prompt was refused
    tokens: int = 0
    seconds: float = 0.0  # time since the first token, without the time to read the prompt
    state: str = "writing"  # later: complete, ended (by the model), stopped or refused


def load(source: str, name: str, facts: list[str]) -> DemoModel:
    """Load `source`, a model folder or a Hub id. Raise a `ModelError` if it cannot be loaded."""
    model, tokenizer = loading.load_with_tokenizer(source)
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    loading.arrange_weights(model)
    return DemoModel(name, [f"{model.num_parameters():,} parameters", *facts], model, tokenizer)


@torch.no_grad()
def new_tokens(model: PreTrainedModel, ids: list[int], settings: Settings) -> Iterator[int]:
    """Yield new tokens after `ids` until the model ends its text. When the context is full, its second half becomes the prompt.
    At temperature 0 these are the tokens of generate.py. Transformers' `generate` uses one random generator for all threads;
    here each text has its own, so that a seed gives the same text while others are generated."""
    context, ends = model.config.max_position_embeddings, loading.end_tokens(model)
    generator = torch.Generator(model.device).manual_seed(settings.seed)
    process = settings.processors()
    window = ids[-context + 1 :]
    unread, cache = window, None
    for _ in range(int(settings.max_new_tokens)):
        if len(window) == context:
            window = window[-max(1, context // 2) :]
            unread, cache = window, None
        output = model(torch.tensor([unread], device=model.device), past_key_values=cache, use_cache=True)
        logits = process(torch.tensor([window], device=model.device), output.logits[:, -1].float())  # (1, V)
        if settings.is_greedy:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        if chosen in ends:
            return
        yield chosen
        window = [*window, chosen]
        unread, cache = [chosen], output.past_key_values


def write(shown: DemoModel, prompt: str, settings: Settings, into: Continuation) -> Iterator[None]:
    """Append generated text to `into`, one token per step."""
    try:
        ids = loading.encode_prompt(shown.tokenizer, prompt)
    except loading.ModelError as problem:
        into.text, into.state = str(problem), "refused"
        return
    tokens, written, begun = new_tokens(shown.model, ids, settings), [], time.perf_counter()
    for token in tokens:
        written.append(token)
        if len(written) > 1:
            into.seconds += time.perf_counter() - begun
        text = shown.tokenizer.decode(written, skip_special_tokens=True)
        into.text, into.tokens = text.rstrip("\ufffd"), len(written)  # U+FFFD may be an unfinished character
        yield  # let the other models continue
        begun = time.perf_counter()
    into.state = "complete" if len(written) == settings.max_new_tokens else "ended"


def side_by_side(
    models: list[DemoModel], prompt: str, settings: Settings, stop: threading.Event
) -> Iterator[list[Continuation]]:
    """Yield all continuations repeatedly until all are done or `stop` is set.
    The models take turns, one token each, because threads were not faster."""
    continuations = [Continuation() for _ in models]
    writing = [write(shown, prompt, settings, into) for shown, into in zip(models, continuations, strict=True)]
    seen, done = time.monotonic(), object()
    while writing and not stop.is_set():
        writing = [writer for writer in writing if next(writer, done) is not done]
        if time.monotonic() - seen > REFRESH:
            yield continuations
            seen = time.monotonic()
    for into in continuations:
        if into.state == "writing":
            into.state = "stopped"
    yield continuations


def cards(models: list[DemoModel], prompt: str, continuations: list[Continuation], seed: int | None) -> str:
    """Return a card for each model as HTML, with escaped text. `seed` is None if no token was sampled."""
    pairs = list(zip(models, continuations, strict=True))
    return Template(CARDS.read_text(encoding="utf-8"), autoescape=True).render(cards=pairs, prompt=prompt, seed=seed)


def build(models: list[DemoModel], title: str, examples: list[str]) -> gradio.Blocks:
    """Return the page for `serve`."""
    stops: dict[str, threading.Event] = {}  # one event per visitor

    def answer(values: dict[gradio.components.Component, Any], request: gradio.Request) -> Iterator[str]:
        text = (values[prompt] or "")[-LONGEST_PROMPT:]  # the page enforces the same limit
        given = {name: values[control] for name, control in controls.items()}
        if given["seed"] is None:
            given["seed"] = secrets.randbelow(10_000)
        settings = Settings(**given)
        stop = stops[request.session_hash] = threading.Event()
        try:
            for continuations in side_by_side(models, text, settings, stop):
                yield cards(models, text, continuations, None if settings.is_greedy else settings.seed)
        finally:
            stops.pop(request.session_hash, None)

    def stop_writing(request: gradio.Request) -> None:
        if request.session_hash in stops:
            stops[request.session_hash].set()

    subject = "the model continues" if len(models) == 1 else f"the {len(models)} models continue"
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(f'<div class="head"><h1>{escape(title)}</h1><p>Enter a prompt; {subject} it.</p></div>')
        with gradio.Column(elem_classes="desk"):
            prompt = gradio.Textbox(
                examples[0], lines=3, max_lines=12, show_label=False, container=False, elem_id="prompt", label="Prompt",
                placeholder="Start of a text", max_length=LONGEST_PROMPT,
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
                    "temperature": slider("Temperature", (0, 2, 0.05), 0.8, "0 always picks the most likely token"),
                    "max_new_tokens": slider("Length", (1, 1000, 1), 200, "new tokens"),
                    "top_k": slider("Top-k", (0, 200, 1), 50, "sample from this many tokens; 0 for all"),
                    "top_p": slider("Top-p", (0.05, 1, 0.05), 1, "sample from tokens with this total probability"),
                    "repetition_penalty": slider(
                        "Repetition penalty", (1, 2, 0.05), 1, "above 1: used tokens become less likely"
                    ),
                    "seed": gradio.Number(
                        None, label="Seed", info="the same seed gives the same text", placeholder="random",
                        precision=0, minimum=0, maximum=LARGEST_SEED, elem_id="seed",
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
    """Return a slider. `numbers`: minimum, maximum and step."""
    low, high, step = numbers
    name = label.lower().replace(" ", "_").replace("-", "_")
    return gradio.Slider(low, high, value, step=step, label=label, info=info, buttons=[], elem_id=name)


def serve(
    models: list[DemoModel], title: str, examples: list[str], port: int | None = None, share: bool = False
) -> None:
    """Serve the page, print its address, and return when interrupted. Raise an OSError if the port is in use."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # no downloads
    page = build(models, title, examples)
    _, local, shared = page.launch(
        server_port=port, share=share, theme=gradio.themes.Base(**fonts), css_paths=STYLE, footer_links=[],
        run_history=False, quiet=True, prevent_thread_lock=True, max_file_size=0,  # no uploads
    )  # fmt: skip
    print(f"Open {shared or local} (Ctrl-C stops the server).", flush=True)
    page.block_thread()


if __name__ == "__main__":  # a Space runs this file as app.py
    space = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    serve([load(source, source, []) for source in space["models"]], space["title"], EXAMPLES)
