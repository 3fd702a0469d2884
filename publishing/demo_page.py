"""Page of the demo: models continue a prompt side by side, chat, and show the loss of each token of a text.

`python -m publishing.demo` serves it. A Space uses it as app.py, with models.json, the style sheet, the template, demo_models.py
and the model's package; it therefore imports nothing else from this repository.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # otherwise gradio reports every start to its developers
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in training/runtime/threads.py, for a Space

import gradio
from jinja2 import Template

from modeling_gpt2scratch import loading, prompts
from publishing.demo_models import (
    MAX_MODELS,
    DemoModel,
    GenerationSettings,
    difference,
    new_tokens,
    on_hub,
    score,
    sentence,
)

EXAMPLES = ("Once upon a time", "The most important thing", "In the beginning")
REFRESH = 0.08  # seconds between updates of the page
VISITORS = 4  # number of visitors served at the same time; others wait
LONGEST_PROMPT = 20_000  # in characters
STYLE, TEMPLATE = Path(__file__).with_suffix(".css"), Path(__file__).with_suffix(".html.j2")
PARTS = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True).module  # macros that return HTML
AT_ONCE = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
QUEUED = AT_ONCE | {"queue": True, "concurrency_limit": VISITORS, "concurrency_id": "models"}
LOADING = QUEUED | {"concurrency_id": "loading"}  # does not wait for visitors whose texts are being written
# Shown until the first answer of the server, which may have to finish the texts of other visitors.
WAIT = """() => document.querySelectorAll(".card > footer, .bar .note, #losses .note").forEach(part => {
    if (part.checkVisibility()) part.textContent = "Waiting ...";
})"""
SLIDERS = {  # by setting: label, explanation, minimum, maximum, step and default
    "temperature": ("Temperature", "0 always picks the most likely token", 0, 2, 0.05, 0.8),
    "max_new_tokens": ("Length", "new tokens", 1, 1000, 1, 200),
    "top_k": ("Top-k", "sample from this many tokens; 0 for all", 0, 200, 1, 50),
    "top_p": ("Top-p", "sample from tokens with this total probability", 0.05, 1, 0.05, 1),
    "repetition_penalty": ("Repetition penalty", "above 1: used tokens become less likely", 1, 2, 0.05, 1),
}
_stops: WeakValueDictionary[str | None, threading.Event] = WeakValueDictionary()  # by visitor


@dataclass
class Continuation:
    """Text that one model has generated so far."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0  # time since the first token, without the time to read the prompt
    state: str = "writing"  # later: complete, ended (by the model), stopped or refused
    problem: str = ""  # the reason why the prompt was refused, or the error that ended the text
    left_out: int = 0  # number of messages that do not fit into the context
    is_endless: bool = False  # the model has no token that ends an answer


def write(
    shown: DemoModel, prompt: str | list[dict], settings: GenerationSettings, into: Continuation
) -> Iterator[None]:
    """Append generated text to `into`, one token per step. `prompt`: a text to continue, or a chat to answer."""
    try:
        (model, tokenizer), written = shown.load(), []
        if isinstance(prompt, str):
            ids = prompts.encode_prompt(tokenizer, prompt)
        else:  # at least half of the context is for the chat
            context, into.is_endless = model.config.max_position_embeddings, not prompts.end_tokens(model)
            settings = replace(settings, max_new_tokens=max(1, min(settings.max_new_tokens, context // 2)))
            ids, into.left_out = prompts.chat_ids(tokenizer, prompt, context - settings.max_new_tokens)
        begun = time.perf_counter()
        for token in new_tokens(model, ids, settings):
            written.append(token)
            if len(written) > 1:
                into.seconds += time.perf_counter() - begun
            text = tokenizer.decode(written, skip_special_tokens=True)
            into.text, into.tokens = text.rstrip("\ufffd"), len(written)  # U+FFFD may be an unfinished character
            yield  # let the other models continue
            begun = time.perf_counter()
        into.state = "complete" if len(written) == settings.max_new_tokens else "ended"
    except Exception as error:  # the other models continue
        into.problem, into.state = sentence(error, shown), "refused"


def side_by_side(
    models: list[DemoModel], prompt: str | list[dict], settings: GenerationSettings, stop: threading.Event
) -> Iterator[list[Continuation]]:
    """Yield all continuations repeatedly until all are done or `stop` is set.
    The models take turns, one token each, because threads were not faster."""
    continuations = [Continuation() for _ in models]
    writing = [write(shown, prompt, settings, into) for shown, into in zip(models, continuations, strict=True)]
    yield continuations  # before models are loaded
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


def stop_of(request: gradio.Request) -> threading.Event:
    """Return the event that stops all texts that are being written for a visitor. It exists only while they are written."""
    return _stops.setdefault(request.session_hash, threading.Event())


def stop_writing(request: gradio.Request) -> None:
    if (stop := _stops.pop(request.session_hash, None)) is not None:  # a new text has its own event
        stop.set()


def continue_tab(models: dict[str, DemoModel], chosen: list[str], examples: list[str]) -> None:
    def answer(values: dict, request: gradio.Request) -> Iterator[str]:
        text = entered(values[prompt])
        some, settings = [models[source] for source in values[picked][:MAX_MODELS]], settings_of(controls, values)
        for continuations in side_by_side(some, text, settings, stop_of(request)):
            yield str(PARTS.cards([*zip(some, continuations, strict=True)], text, settings))

    def no_text(sources: list[str]) -> str:
        return str(PARTS.cards([(models[source], Continuation(state="empty")) for source in sources], "", None))

    with gradio.Tab("Continue", elem_classes="tab"):
        with gradio.Column(elem_classes="desk"):
            picked = picker(models, chosen, "Models", multiselect=True, max_choices=MAX_MODELS)
            prompt = text_box("Prompt", examples[0])
            with gradio.Row(elem_classes="bar"):
                with gradio.Row(elem_classes="examples"):
                    for example in examples:
                        chip = gradio.Button(example.replace("\n", " ⏎").strip(), size="sm", elem_classes="chip")
                        chip.click(None, None, prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
                start = start_button("Continue")
            controls = sampling()
        shown = gradio.HTML(no_text(chosen), elem_id="answers")
    gradio.on([start.click, prompt.submit], js=WAIT, **AT_ONCE)
    gradio.on([start.click, prompt.submit], answer, {prompt, picked, *controls.values()}, shown, **QUEUED)
    picked.change(no_text, picked, shown, **AT_ONCE)


def chat_tab(models: dict[str, DemoModel], chosen: list[str]) -> None:
    def refusal_of(source: str) -> str:
        """Return why a model cannot chat, or an empty text if it can."""
        try:
            can_chat = models[source].load()[1].chat_template is not None
        except loading.ModelError as error:
            return sentence(error, models[source])
        return "" if can_chat else f"{models[source].name} has no chat template: it continues text. Use Continue."

    def first_chat_model(source: str) -> str:
        """Return the picked model, or if it cannot chat, the first one that can."""
        return next((other for other in (source, *chosen) if not refusal_of(other)), source)

    def offer(source: str) -> tuple[str, gradio.Column]:
        """Show the chat, or the reason why the model cannot chat."""
        problem = refusal_of(source)
        return str(PARTS.note(Continuation(state="refused", problem=problem))), gradio.Column(visible=not problem)

    def bubbles(turns: list[dict[str, str]]) -> list[dict]:
        """Return the messages for the page. Gradio shows HTML in a message even if Markdown is off."""
        return [said | {"content": [{"type": "text", "text": escape(said["content"] or "…")}]} for said in turns]

    def answers(values: dict, before: list[dict[str, str]], text: str, request: gradio.Request) -> Iterator[dict]:
        shown, settings = models[values[picked]], settings_of(controls, values)
        first = [{"role": "system", "content": entered(values[system])}] if (values[system] or "").strip() else []
        asked = [*before, {"role": "user", "content": text}]
        for i, [answer] in enumerate(side_by_side([shown], first + asked, settings, stop_of(request))):
            is_refused = answer.state == "refused" and not answer.tokens
            now = before if is_refused else [*asked, {"role": "assistant", "content": answer.text}]
            # Later updates leave out the text box, because the next message may be typed during an answer.
            box = {message: text if is_refused else ""} if is_refused or i == 0 else {}
            yield {history: now, talk: bubbles(now), note: str(PARTS.note(answer, shown, settings))} | box

    def reply(values: dict, request: gradio.Request) -> Iterator[dict]:
        if (text := entered(values[message])).strip():
            yield from answers(values, values[history], text, request)
        else:
            yield {note: ""}  # gradio shows only a value that changes
            yield {note: no_note}

    def reply_again(values: dict, request: gradio.Request) -> Iterator[dict]:
        """Replace the last answer. A message that is being typed stays."""
        *before, asked, _ = values[history]
        for update in answers(values, before, asked["content"], request):
            yield {part: value for part, value in update.items() if part is not message}

    def undo(turns: list[dict[str, str]]) -> tuple:
        *before, asked, _ = turns
        return before, bubbles(before), asked["content"], no_note

    no_note = str(PARTS.note(Continuation(state="empty")))
    with gradio.Tab("Chat", elem_classes="tab") as tab, gradio.Column(elem_classes="desk"):
        picked = picker(models, chosen[0], "Model")
        refusal = gradio.HTML(str(PARTS.note(Continuation(state="loading"))))
        with gradio.Column(visible=False) as room:
            history = gradio.State([])
            talk = gradio.Chatbot(  # not an input, because gradio creates components that a message in it names
                show_label=False, buttons=[], feedback_options=None, elem_id="talk", allow_tags=False,
                render_markdown=False, latex_delimiters=[],
            )  # fmt: skip
            message = text_box("Message", "", lines=1)  # Enter sends
            with gradio.Row(elem_classes="bar"):
                note = gradio.HTML(no_note, elem_classes="examples")
                start = start_button("Send")
            controls = sampling("chat_")
            system = text_box("System message", "", lines=1)
    picked.change(offer, picked, [refusal, room], **LOADING)
    picked.input(stop_writing, **AT_ONCE)
    tab.select(first_chat_model, picked, picked, **LOADING).then(offer, picked, [refusal, room], **LOADING)
    several, shown = {history, message, picked, system, *controls.values()}, [history, talk, message, note]
    gradio.on([start.click, message.submit, talk.retry], js=WAIT, **AT_ONCE)
    gradio.on([start.click, message.submit], reply, several, shown, **QUEUED)
    talk.retry(reply_again, several, shown, **QUEUED)
    talk.undo(undo, history, shown, **AT_ONCE)
    talk.clear(lambda: ([], no_note), None, [history, note], **AT_ONCE)


def loss_tab(models: dict[str, DemoModel], chosen: list[str], example: str) -> None:
    def watch(text: str, *sources: str) -> Iterator[str]:
        yield str(PARTS.note(Continuation(state="scoring")))
        text, pair = entered(text), [models[source] for source in dict.fromkeys(sources)]
        scores = [score(shown, text) for shown in pair]
        change = difference(scores[0]["pieces"], scores[-1]["pieces"])
        yield str(PARTS.losses([*zip(pair, scores, strict=True)], change, text))

    first, second = chosen[:2] if len(chosen) > 1 else [[*models][:2][-1], chosen[0]]  # oldest and newest
    with gradio.Tab("Watch it learn", elem_classes="tab"):
        with gradio.Column(elem_classes="desk"):
            with gradio.Row(elem_classes="pickers"):
                picked = [picker(models, first, "First"), picker(models, second, "Second")]
            text = text_box("Text", example)
            with gradio.Row(elem_classes="bar"):
                gradio.HTML(str(PARTS.legend()), elem_classes="examples")
                start = start_button("Score")
        shown = gradio.HTML(str(PARTS.note(Continuation(state="empty"))), elem_id="losses")
    gradio.on([start.click, text.submit], js=WAIT, **AT_ONCE)
    gradio.on([start.click, text.submit], watch, [text, *picked], shown, **QUEUED)


def build(groups: list[list[DemoModel]], title: str, examples: list[str], text: str) -> gradio.Blocks:
    """Return the page for `serve`. The first model of each group is chosen at first. `text`: the first one to score."""
    sources = {shown.source: shown for group in groups for shown in group}
    models = dict(zip(map(str, range(len(sources))), sources.values(), strict=True))  # visitors see no paths
    chosen = [key for key, shown in models.items() if shown.source in {group[0].source for group in groups}]
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(str(PARTS.head(title)))
        with gradio.Tabs():
            continue_tab(models, chosen, examples)
            chat_tab(models, chosen)
            loss_tab(models, chosen, text)
    return page


def picker(models: dict[str, DemoModel], value: str | list[str], label: str, **options: Any) -> gradio.Dropdown:
    choices = [(shown.name, source) for source, shown in models.items()]
    return gradio.Dropdown(choices, value=value, label=label, visible=len(models) > 1, elem_classes="picker", **options)


def entered(text: str | None) -> str:
    """Return the text of a box up to the limit, which the page enforces too, and with ? for surrogates, which JSON cannot hold."""
    return (text or "")[-LONGEST_PROMPT:].encode("utf-8", "replace").decode()


def text_box(label: str, text: str, lines: int = 3) -> gradio.Textbox:
    return gradio.Textbox(
        text, lines=lines, max_lines=12, show_label=False, container=False, label=label, placeholder=label,
        max_length=LONGEST_PROMPT, elem_id=label.lower().replace(" ", "_"), elem_classes="text-box",
    )  # fmt: skip


def start_button(label: str) -> gradio.Button:
    """Return a button. While the model writes, the page shows a second one in its place, which stops it."""
    start = gradio.Button(label, variant="primary", elem_classes="start")
    gradio.Button("Stop", elem_classes="stop").click(stop_writing, **AT_ONCE)
    return start


def sampling(prefix: str = "") -> dict[str, gradio.components.Component]:
    """Show the sampling settings and return their controls by name."""
    with gradio.Accordion("Settings", open=False, elem_classes="settings"), gradio.Row(elem_classes="sliders"):
        controls = {}
        for name, (label, info, low, high, step, value) in SLIDERS.items():
            own = {"label": label, "info": info, "elem_id": prefix + label.lower().replace(" ", "_").replace("-", "_")}
            controls[name] = gradio.Slider(low, high, value, step=step, buttons=[], **own)
        controls["seed"] = gradio.Number(
            lambda: None,  # gradio shows a plain None as 0
            label="Seed", info="the same seed gives the same text", placeholder="random",
            precision=0, minimum=0, maximum=10**15, elem_id=f"{prefix}seed", elem_classes="seed",
        )  # fmt: skip
    return controls


def settings_of(controls: dict[str, gradio.components.Component], values: dict) -> GenerationSettings:
    given = {name: values[control] for name, control in controls.items()}
    return GenerationSettings(**given | {"seed": secrets.randbelow(10_000) if given["seed"] is None else given["seed"]})


def serve(groups: list[list[DemoModel]], title: str, examples: list[str], text: str, **options: Any) -> None:
    """Serve the page, print its address, and return when interrupted. Raise an OSError if the port is in use. `options`: of `launch`."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # no downloads
    page = build(groups, title, examples, text)
    _, local, shared = page.launch(
        **options, theme=gradio.themes.Base(**fonts), css_paths=STYLE, footer_links=[],
        run_history=False, quiet=True, prevent_thread_lock=True, max_file_size=0,  # no uploads
    )  # fmt: skip
    print(f"Open {shared or local} (Ctrl-C stops the server).", flush=True)
    page.block_thread()


if __name__ == "__main__":  # a Space runs this file as app.py
    space = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    serve([on_hub(source) for source in space["models"]], space["title"], EXAMPLES, EXAMPLES[0])
