"""Page of the demo: models continue a prompt side by side, chat, and show the loss of each token of a text.

`python -m publishing.demo` serves it. A Space uses it as app.py, with models.json, the style sheet, the template,
demo_models.py and the model's package; it therefore imports nothing else from this repository.
"""

import json
import os
import re
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
from publishing import demo_models
from publishing.demo_models import MAX_MODELS, DemoModel, GenerationSettings, new_tokens, on_hub, score, sentence

REFRESH = 0.08  # seconds between updates of the page
VISITORS = 4  # number of visitors served at the same time; others wait
LONGEST_PROMPT = 20_000  # in characters
STYLE, TEMPLATE = Path(__file__).with_suffix(".css"), Path(__file__).with_suffix(".html.j2")
PARTS = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True).module  # macros that return HTML
DIRECT_EVENT = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
QUEUED_EVENT = DIRECT_EVENT | {"queue": True, "concurrency_limit": VISITORS, "concurrency_id": "models"}
LOADING_EVENT = QUEUED_EVENT | {"concurrency_id": "loading"}  # does not wait for visitors whose texts are being written
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
    # Later: complete, ended (by the model), stopped or refused. In place of a text: empty, loading or scoring.
    state: str = "writing"
    problem: str = ""  # the reason why the prompt was refused, or the error that ended the text
    left_out: int = 0  # number of messages that do not fit into the context
    is_endless: bool = False  # the model has no token that ends an answer


def write(
    entry: DemoModel, prompt: str | list[dict], settings: GenerationSettings, continuation: Continuation
) -> Iterator[None]:
    """Append generated text to `continuation`, one token per step. `prompt`: a text to continue, or a chat to
    answer."""
    try:
        (model, tokenizer), tokens = entry.load(), []
        if isinstance(prompt, str):
            ids = prompts.encode_prompt(tokenizer, prompt, model)
        else:  # at least half of the context is for the chat
            context, continuation.is_endless = model.config.max_position_embeddings, not prompts.end_tokens(model)
            settings = replace(settings, max_new_tokens=max(1, min(settings.max_new_tokens, context // 2)))
            ids, continuation.left_out = prompts.chat_ids(tokenizer, prompt, context - settings.max_new_tokens)
        start = time.perf_counter()
        for token in new_tokens(model, ids, settings):
            tokens.append(token)
            if len(tokens) > 1:
                continuation.seconds += time.perf_counter() - start
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            # U+FFFD may be an unfinished character, and Llama's decoder takes the characters before it back.
            continuation.text = max(continuation.text, text.rstrip("\ufffd"), key=len)
            continuation.tokens = len(tokens)
            yield  # let the other models continue
            start = time.perf_counter()
        continuation.state = "complete" if len(tokens) == settings.max_new_tokens else "ended"
    except Exception as error:  # the other models continue
        continuation.problem, continuation.state = sentence(error, entry), "refused"


def side_by_side(
    models: list[DemoModel], prompt: str | list[dict], settings: GenerationSettings, stop: threading.Event
) -> Iterator[list[Continuation]]:
    """Yield all continuations repeatedly until all are done or `stop` is set.
    The models take turns, one token each, because threads were not faster."""
    continuations = [Continuation() for _ in models]
    writers = [write(entry, prompt, settings, result) for entry, result in zip(models, continuations, strict=True)]
    yield continuations  # before models are loaded
    time_of_update, end = time.monotonic(), object()
    while writers and not stop.is_set():
        writers = [writer for writer in writers if next(writer, end) is not end]
        if time.monotonic() - time_of_update > REFRESH:
            yield continuations
            time_of_update = time.monotonic()
    for continuation in continuations:
        if continuation.state == "writing":
            continuation.state = "stopped"
    yield continuations


def stop_of(request: gradio.Request) -> threading.Event:
    """Return the event that stops all texts that are being written for a visitor. It exists only while they are
    written."""
    return _stops.setdefault(request.session_hash, threading.Event())


def stop_writing(request: gradio.Request) -> None:
    if (stop := _stops.pop(request.session_hash, None)) is not None:  # a new text has its own event
        stop.set()


def continue_tab(models: dict[str, DemoModel], selection: list[str], examples: list[str]) -> None:
    def answer(values: dict, request: gradio.Request) -> Iterator[str]:
        text, settings = entered(values[prompt]), settings_of(controls, values)
        entries = [models[key] for key in values[picker][:MAX_MODELS]]
        for continuations in side_by_side(entries, text, settings, stop_of(request)):
            yield str(PARTS.cards([*zip(entries, continuations, strict=True)], text, settings))

    def no_text(keys: list[str]) -> str:
        return str(PARTS.cards([(models[key], Continuation(state="empty")) for key in keys], "", None))

    with gradio.Tab("Continue", elem_classes="tab"):
        with gradio.Column(elem_classes="desk"):
            picker = model_picker(models, selection, "Models", multiselect=True, max_choices=MAX_MODELS)
            prompt = text_box("Prompt", examples[0])
            with gradio.Row(elem_classes="bar"):
                with gradio.Row(elem_classes="examples"):
                    for example in examples:
                        chip = gradio.Button(example.replace("\n", " ⏎").strip(), size="sm", elem_classes="chip")
                        chip.click(None, None, prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
                start = start_button("Continue")
            controls = sampling()
        answers = gradio.HTML(no_text(selection), elem_id="answers")
    gradio.on([start.click, prompt.submit], js=WAIT, **DIRECT_EVENT)
    gradio.on([start.click, prompt.submit], answer, {prompt, picker, *controls.values()}, answers, **QUEUED_EVENT)
    picker.change(no_text, picker, answers, **DIRECT_EVENT)


def chat_tab(models: dict[str, DemoModel], selection: list[str]) -> None:
    def refusal_of(key: str) -> str:
        """Return why a model cannot chat, or an empty text if it can."""
        try:
            can_chat = models[key].load()[1].chat_template is not None
        except loading.ModelError as error:
            return sentence(error, models[key])
        return "" if can_chat else f"{models[key].name} has no chat template: it continues text. Use Continue."

    def first_chat_model(key: str) -> str:
        """Return the picked model, or if it cannot chat, the first one that can."""
        return next((candidate for candidate in (key, *selection) if not refusal_of(candidate)), key)

    def refusal_note(key: str) -> str:
        return str(PARTS.note(Continuation(state="refused", problem=refusal_of(key))))

    def bubbles(turns: list[dict[str, str]]) -> list[dict]:
        """Return the messages for the page. Gradio shows HTML in a message even if Markdown is off."""
        return [turn | {"content": [{"type": "text", "text": escape(turn["content"] or "…")}]} for turn in turns]

    def reply(values: dict, request: gradio.Request) -> Iterator[dict]:
        """Yield updates of the page while a model answers the message after the earlier turns."""
        if not (text := entered(values[message])).strip():
            yield {note: ""}  # gradio shows only a value that changes
            yield {note: no_note}
            return
        entry, settings, instructions = models[values[picker]], settings_of(controls, values), entered(values[system])
        opening = [{"role": "system", "content": instructions}] * bool(instructions.strip())
        turns, chat = values[history], [*values[history], {"role": "user", "content": text}]
        for i, [answer] in enumerate(side_by_side([entry], opening + chat, settings, stop_of(request))):
            is_refused = answer.state == "refused" and not answer.tokens
            result = turns if is_refused else [*chat, {"role": "assistant", "content": answer.text}]
            # Later updates leave out the text box, because the next message may be typed during an answer.
            box = {message: text if is_refused else ""} if is_refused or i == 0 else {}
            yield {history: result, talk: bubbles(result), note: str(PARTS.note(answer, entry, settings))} | box

    def undo(turns: list[dict[str, str]]) -> tuple:
        *turns, question, _ = turns
        return turns, bubbles(turns), question["content"], no_note

    no_note = str(PARTS.note(Continuation(state="empty")))
    with gradio.Tab("Chat", elem_classes="tab") as tab, gradio.Column(elem_classes="desk"):
        picker = model_picker(models, selection[0], "Model")
        history = gradio.State([])
        talk = gradio.Chatbot(  # not an input, because gradio creates components that a message in it names
            show_label=False, buttons=[], feedback_options=None, elem_id="talk", allow_tags=False,
            render_markdown=False, latex_delimiters=[],
        )  # fmt: skip
        message = text_box("Message", "", lines=1)  # Enter sends
        with gradio.Row(elem_classes="bar"):
            note = gradio.HTML(str(PARTS.note(Continuation(state="loading"))), elem_classes="examples")
            start = start_button("Send")
        controls = sampling("chat_")
        system = text_box("System message", "", lines=1)
    picker.change(refusal_note, picker, note, **LOADING_EVENT)
    picker.input(stop_writing, **DIRECT_EVENT)
    tab.select(first_chat_model, picker, picker, **LOADING_EVENT).then(refusal_note, picker, note, **LOADING_EVENT)
    inputs, outputs = {history, message, picker, system, *controls.values()}, [history, talk, message, note]
    gradio.on([start.click, message.submit, talk.retry], js=WAIT, **DIRECT_EVENT)
    gradio.on([start.click, message.submit], reply, inputs, outputs, **QUEUED_EVENT)
    talk.retry(undo, history, outputs, **DIRECT_EVENT).then(reply, inputs, outputs, **QUEUED_EVENT)
    talk.undo(undo, history, outputs, **DIRECT_EVENT)
    talk.clear(lambda: ([], no_note), None, [history, note], **DIRECT_EVENT)


def loss_tab(models: dict[str, DemoModel], selection: list[str], example: str) -> None:
    def watch(text: str, *keys: str) -> Iterator[str]:
        yield str(PARTS.note(Continuation(state="scoring")))
        text, pair = entered(text), [models[key] for key in dict.fromkeys(keys)]
        scores = [score(entry, text) for entry in pair]
        changes = demo_models.difference(scores[0]["pieces"], scores[-1]["pieces"])
        yield str(PARTS.losses([*zip(pair, scores, strict=True)], changes, text))

    first, second = selection[:2] if len(selection) > 1 else [[*models][:2][-1], selection[0]]  # oldest and newest
    with gradio.Tab("Watch it learn", elem_classes="tab"):
        with gradio.Column(elem_classes="desk"):
            with gradio.Row(elem_classes="pickers"):
                pickers = [model_picker(models, first, "First"), model_picker(models, second, "Second")]
            text = text_box("Text", example)
            with gradio.Row(elem_classes="bar"):
                gradio.HTML(str(PARTS.legend()), elem_classes="examples")
                start = start_button("Score")
        losses = gradio.HTML(str(PARTS.note(Continuation(state="empty"))), elem_id="losses")
    gradio.on([start.click, text.submit], js=WAIT, **DIRECT_EVENT)
    gradio.on([start.click, text.submit], watch, [text, *pickers], losses, **QUEUED_EVENT)


def build(groups: list[list[DemoModel]], title: str, examples: list[str], text: str) -> gradio.Blocks:
    """Return the page for `serve`. The first model of each group is chosen at first. `text`: the first one to score."""
    sources = {entry.source: entry for group in groups for entry in group}
    models = {str(number): entry for number, entry in enumerate(sources.values())}  # visitors see no paths
    selection = [key for key, entry in models.items() if entry.source in {group[0].source for group in groups}]
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(str(PARTS.head(title)))
        with gradio.Tabs():
            continue_tab(models, selection, examples)
            chat_tab(models, selection)
            loss_tab(models, selection, text)
    return page


def model_picker(models: dict[str, DemoModel], value: str | list[str], label: str, **options: Any) -> gradio.Dropdown:
    choices = [(entry.name, key) for key, entry in models.items()]
    return gradio.Dropdown(choices, value=value, label=label, visible=len(models) > 1, elem_classes="picker", **options)


def entered(text: str | None) -> str:
    """Return the text of a box up to the limit, which the page enforces too, and with ? for surrogates, which JSON
    cannot hold."""
    return (text or "")[-LONGEST_PROMPT:].encode("utf-8", "replace").decode()


def text_box(label: str, text: str, lines: int = 3) -> gradio.Textbox:
    return gradio.Textbox(
        text, lines=lines, max_lines=12, show_label=False, container=False, label=label, placeholder=label,
        max_length=LONGEST_PROMPT, elem_id=label.lower().replace(" ", "_"), elem_classes="text-box",
    )  # fmt: skip


def start_button(label: str) -> gradio.Button:
    """Return a button. While the model writes, the page shows a second one in its place, which stops it."""
    start = gradio.Button(label, variant="primary", elem_classes="start")
    gradio.Button("Stop", elem_classes="stop").click(stop_writing, **DIRECT_EVENT)
    return start


def sampling(prefix: str = "") -> dict[str, gradio.components.Component]:
    """Show the sampling settings and return their controls by name."""
    with gradio.Accordion("Settings", open=False, elem_classes="settings"), gradio.Row(elem_classes="sliders"):
        controls = {}
        for name, (label, info, low, high, step, value) in SLIDERS.items():
            names = {"label": label, "info": info, "elem_id": prefix + re.sub("[ -]", "_", label.lower())}
            controls[name] = gradio.Slider(low, high, value, step=step, buttons=[], **names)
        controls["seed"] = gradio.Number(
            lambda: None,  # gradio shows a plain None as 0
            label="Seed", info="the same seed gives the same text", placeholder="random",
            precision=0, elem_id=f"{prefix}seed", elem_classes="seed",
        )  # fmt: skip
    return controls


def settings_of(controls: dict[str, gradio.components.Component], values: dict) -> GenerationSettings:
    settings = {name: values[control] for name, control in controls.items()}
    seed = secrets.randbelow(10_000) if settings["seed"] is None else abs(settings["seed"]) % 2**63
    length = round(settings["max_new_tokens"])  # a slider's number can be typed
    return GenerationSettings(**settings | {"seed": seed, "max_new_tokens": length})


def serve(groups: list[list[DemoModel]], title: str, examples: list[str], text: str, **options: Any) -> None:
    """Serve the page, print its address, and return when interrupted. Raise an OSError if the port is in use.
    `options`: of `launch`."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # no downloads
    page = build(groups, title, examples, text)
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))  # for gradio, which asks its own server first
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, [direct, "localhost,127.0.0.1"]))
    _, address, public_address = page.launch(
        **options, theme=gradio.themes.Base(**fonts), css_paths=STYLE, footer_links=[],
        run_history=False, quiet=True, prevent_thread_lock=True, max_file_size=0,  # no uploads
    )  # fmt: skip
    print(f"Open {public_address or address} (Ctrl-C stops the server).", flush=True)
    page.block_thread()


if __name__ == "__main__":  # a Space runs this file as app.py
    space = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    serve([on_hub(source) for source in space["models"]], space["title"], demo_models.EXAMPLES, demo_models.EXAMPLES[0])
