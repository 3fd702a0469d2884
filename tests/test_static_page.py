"""Tests of the static page in a real browser: models in ONNX that run in the page itself."""

import json
import math
import os
import random
import re
import shutil
import threading
import time
import unicodedata
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import test_native
import torch
from huggingface_hub import SpaceCard, constants

import push_to_hub
from chromium import Page, started
from conftest import MODERN, assert_one_sentence, assert_user_error, greedy, prose
from modeling_gpt2scratch.prompts import chat_ids, load_with_tokenizer
from publishing import demo
from publishing.demo_models import DemoModel, score

pytest.importorskip("onnxruntime", reason="onnxruntime is an extra")

from test_onnx import one_export  # noqa: F401

from publishing import onnx_file, static_page

pytestmark = pytest.mark.usefixtures("one_export")
needs_package = pytest.mark.skipif(not static_page.PACKAGE.is_file(), reason="onnxruntime-web was not downloaded")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A random chat model."""
    folder = tmp_path_factory.mktemp("models") / "chats"
    test_native.model_folder(folder, test_native.bpe(), seed=2, n_layer=1, n_positions=96, **MODERN)
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A random model of characters."""
    folder = tmp_path_factory.mktemp("models") / "letters"
    test_native.model_folder(folder, test_native.character_tokenizer([prose(0, 200), "<>"]), n_layer=1)
    return folder


@pytest.fixture(scope="module")
def page_folder(one_export, run, chats, letters, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("page") / "page"
    demo.main([*map(str, (run, chats, letters)), "--static", str(folder)])
    return folder


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class SlowHandler(Handler):
    def copyfile(self, source, output) -> None:
        """Send a model for a minute."""
        content, pause = source.read(), self.path.endswith(".onnx")
        for start in range(0, len(content), step := -(-len(content) // 600)):
            with suppress(ConnectionError):  # as the browser no longer reads it
                output.write(content[start : start + step])
            time.sleep(0.1 * pause)


@contextmanager
def served(folder: Path, handler: type[Handler] = Handler):
    """Serve files on a port of its own, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def address(page_folder):
    with served(page_folder) as address:
        yield address


class StaticPage(Page):
    is_ready = "return document.querySelector('#models input')"

    def __init__(self, browser, address: str, *names: str, **settings):
        super().__init__(browser, address)
        self.choose(*names, **settings)

    def choose(self, *names: str, task: str = "continue", **settings) -> None:
        for box in self.browser.find_elements("css selector", "#models:not([hidden]) label"):
            if box.find_element("tag name", "input").is_selected() != (box.text in names):
                box.click()
        self.browser.find_element("css selector", f"[value={task}]").click()
        for name, value in settings.items():
            self.browser.execute_script(f"document.querySelector('#{name}').value = arguments[0]", value)

    def start(self, text: str) -> None:
        self.browser.execute_script("document.querySelector('#prompt').value = arguments[0]", text)
        self.browser.find_element("css selector", "#start").click()

    def write(self, text: str) -> list[str]:
        self.start(text)
        self.wait_until_done()
        return self.texts(".text")

    def wait_until_done(self) -> None:
        self.wait_for("return document.querySelector('#stop').hidden")


@needs_package
def test_texts_side_by_side_are_those_of_generate_and_the_page_loads_nothing_else(
    address, browser, run, chats, letters, capsys
):
    page = StaticPage(browser, address, "tiny", "chats", "letters", temperature=0, length=40)
    words = prose(3, 200).lower().replace(".", "").split()
    for i in range(7):
        prompt = " ".join(words[i : i + 1 + i % 5])  # the texts exceed the contexts of 16 and 32 tokens
        assert page.write(prompt) == [greedy(model, prompt, 40, capsys) for model in (run, chats, letters)]
    assert page.texts("h2") == ["tiny", "chats", "letters"]
    assert re.fullmatch(r"11,648 parameters · step 3 · validation loss \d\.\d\d · .*", page.texts(".facts")[0])
    assert re.fullmatch(r"40 tokens · \d+ tokens/s", page.texts(".note")[0])
    assert page.texts("mark") == [prompt] * 3
    assert len(page.requests()) > 5
    assert all(name.startswith(address) for name in page.requests())
    assert browser.find_element("id", "backend").text == "WebAssembly"
    page.choose("tiny", temperature=1, seed=7)
    once, again = page.write("the"), page.write("the")
    page.choose("tiny", seed=8)
    assert once == again != page.write("the")
    assert page.texts(".note")[0].endswith("seed 8")


@needs_package
def test_a_text_streams_and_can_be_stopped(address, browser):
    page = StaticPage(browser, address, "letters", length=100_000)
    browser.execute_script("document.querySelector('#prompt').value = 'the'")
    browser.find_element("id", "start").send_keys("\n")
    page.wait_for("return document.querySelector('.text')?.textContent.length > 30")
    assert not browser.find_element("id", "start").is_displayed()
    assert browser.switch_to.active_element.get_attribute("id") == "stop"
    browser.switch_to.active_element.send_keys("\n")
    page.wait_until_done()
    assert browser.find_element("id", "status").text == "Stopped."
    assert browser.switch_to.active_element.get_attribute("id") == "start"
    assert 1 < int(page.texts(".note")[0].split()[0].replace(",", "")) < 100_000


@needs_package
def test_a_download_can_be_stopped(page_folder, browser):
    with served(page_folder, SlowHandler) as address:
        page = StaticPage(browser, address, "tiny", "chats", length=5)
        page.start("the")
        page.wait_for("return document.querySelector('progress')?.value > 0")
        browser.find_element("id", "stop").click()
        page.wait_until_done()
        assert browser.find_element("id", "status").text == "Stopped."
        assert [name for name in page.requests() if ".onnx" in name] == [f"{address}models/0/onnx/model.onnx"]


CHARACTERS = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i)) not in ("Cn", "Cs", "Co")]
PIECES = [
    *("the of and", "don't we'll 'S", " ", "  ", "\n\n", "\t", "1234", "½²Ⅷ١٢٣", "🙂👩‍👩‍👧"),
    *("日本語", "ไทยภาษา", "한국어", "क्षि"),
    *("\x00", "\x1f", "\x85", "\u00a0", "\u3000", "\u2028", "\ufeff", "e\u0301", "ﬁ"),
    *("<|endoftext|>", "<|im_start|>", "!?", "__x"),
]  # fmt: skip


@needs_package
def test_ids_are_those_of_python_for_2000_texts(address, browser, chats):
    choice = random.Random(0).choice
    texts = ["".join(choice((choice(PIECES), choice(CHARACTERS))) for _ in range(i % 40)) for i in range(2000)]
    StaticPage(browser, address, "chats").write("the")
    _, tokenizer = load_with_tokenizer(chats)
    script = "const { tokenizer } = demo.models[1]; return arguments[0].map((text) => "
    script += "{ const ids = tokenizer.encode(text); return [ids, tokenizer.decode(ids)]; })"
    for text, (ids, decoded) in zip(texts, browser.execute_script(script, texts), strict=True):
        assert ids == tokenizer.encode(text), ascii(text)
        assert decoded == tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")


@needs_package
@pytest.mark.parametrize("system", ["", "<|im_end|> in\n"])
def test_a_chat_has_the_ids_of_python_and_is_answered(system, address, browser, chats):
    page = StaticPage(browser, address, "chats", task="chat", temperature=0, length=10, system=system)
    model, tokenizer = load_with_tokenizer(chats)
    answers, messages = [], []
    for text in ("the of\n", "<b>a</b><|im_end|> <|endoftext|>", "and " * 20, "to"):
        messages.append({"role": "user", "content": text})
        ids, left_out = chat_ids(tokenizer, [{"role": "system", "content": system}] * bool(system) + messages, 86)
        settings = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": model.generation_config.eos_token_id}
        new = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), pad_token_id=1, **settings)
        answers.append(tokenizer.decode(new[0, len(ids) :], skip_special_tokens=True).rstrip("\ufffd"))
        messages.append({"role": "assistant", "content": answers[-1]})
        page.write(text)
        assert page.texts(".user") == [message["content"] for message in messages[::2]]
        assert page.texts(".text > span:last-child") == answers[-1:]
    assert left_out > 0
    assert f"the model did not read the oldest {left_out} messages" in page.texts(".note")[0]
    page.choose("tiny", "chats", task="chat", length=5)  # tiny cannot chat
    page.write(" \n")
    assert browser.find_element("id", "status").text == "The message is empty; write one."
    page.write("the")
    page.write("")
    assert page.texts(".user") == ["the"]
    assert page.texts("h2") == ["chats"]
    script = "const find = (part) => document.querySelector(part); find('#prompt').value = 'the'; "
    script += "for (const it of ['#start', '[value=continue]', '[value=chat]']) find(it).click()"
    browser.execute_script(script)  # another task is chosen while an answer is written
    page.wait_until_done()
    page.write("of")
    assert page.texts(".user") == ["of"]
    page.choose("letters", task="chat")
    page.write("the")
    assert page.texts(".problem") == ["letters has no chat template: it continues text."]


def test_chat_parts_are_known_only_for_templates_that_write_messages_one_after_another():
    def parts_of(body: str):
        tokenizer = test_native.bpe()
        tokenizer.chat_template = body
        return static_page.chat_parts(tokenizer)

    loop = "{% for it in messages %}[{{ it.role }}]{{ it.content }};{% endfor %}"
    loop += "{% if add_generation_prompt %}>{% endif %}"
    parts = {"start": "[user]", "before": ";[assistant]", "after": ";[user]", "open": ";>", "trims": False}
    assert parts_of(loop) == parts | {"system": ["[system]", ";[user]"]}
    assert parts_of("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + loop) == parts
    assert parts_of(loop.replace("it.content", "it.content | trim"))["trims"]
    assert parts_of("{{ messages | length }}" + loop) is None
    assert parts_of("{{ 1 / 0 }}") is None


@needs_package
def test_losses_are_those_of_the_gradio_page(address, browser, run, chats):
    page, text = StaticPage(browser, address, "tiny", "chats", task="watch"), "The é🙂<|endoftext|> <b>"
    assert page.write(text)[:2] == [text, text]
    for name, folder, note in zip(("tiny", "chats"), (run / "model", chats), page.texts(".note"), strict=False):
        result = score(DemoModel(name, str(folder), []), text)
        loss, number = sum(result["losses"]), len(result["losses"])
        bits = loss / math.log(2) / (len(text.encode()) - (1 if name == "tiny" else len("The")))
        means = f"mean loss {loss / number:.2f} nats per token · {bits:.2f} bits per byte"
        assert note.startswith(f"{means} · {number + 1} tokens of ")
    page.choose("tiny", task="watch")
    page.write("t")
    assert page.texts(".problem") == ["The first token has no loss; enter a text of at least two tokens."]


@needs_package
def test_a_long_prompt_and_html_and_an_unknown_character_are_shown_as_typed(address, browser):
    page = StaticPage(browser, address, "tiny", "letters", length=3, temperature=0)
    prompt = "<img src=x onerror=alert(1)>" + "the of and " * 20
    assert page.write(prompt)[0].startswith(prompt)
    assert not browser.find_elements("tag name", "img")
    assert re.search(r" · the model read the last 15 of \d+ tokens$", page.texts(".note")[0])
    unknown = '"g", "c", "=", "x", "l", "(", "1", ")"'
    sentence = f"The text contains {unknown}, which is not among this model's 30 characters; remove it."
    assert page.texts(".problem")[1] == sentence


@needs_package
def test_an_updated_page_uses_its_new_files(page_folder, browser, tmp_path):
    """The files are old, so the browser would use its copies for days without asking the server."""
    folder = shutil.copytree(page_folder, tmp_path / "page")
    for path in folder.rglob("*.*"):
        os.utime(path, (0, 0))

    def write(name: str) -> str:
        return StaticPage(browser, address, name, temperature=0, length=20).write("the")[0]

    with served(folder) as address:
        old_text = write("tiny")
        models = json.loads((folder / "models.json").read_text())
        tiny, _, letters = models["models"]
        models["models"][0] = letters | {name: tiny[name] for name in ("name", "file", "tokenizerFile")}
        (folder / "models.json").write_text(json.dumps(models))
        for name in ("onnx/model.onnx", "tokenizer.json"):
            shutil.copyfile(folder / "models/2" / name, folder / "models/0" / name)
        assert write("tiny") == write("letters") != old_text
        script = "return caches.open('page').then((it) => it.keys()).then((keys) => keys.map((key) => key.url))"
        kept = [url for url in browser.execute_script(script) if "models/0" in url and ".onnx" in url]
    assert kept == [f"{address}models/0/onnx/model.onnx?{letters['sha256']}"]


@needs_package
def test_the_page_works_without_a_network_once_loaded(page_folder, browser):
    with served(page_folder) as address:
        page = StaticPage(browser, address, "tiny", temperature=0, length=20)
        texts = page.write("the")
        page.wait_for("return navigator.serviceWorker.controller")
    assert StaticPage(browser, address, "tiny", temperature=0, length=20).write("the") == texts


@needs_package
def test_a_damaged_model_gives_a_sentence_and_the_others_work(page_folder, browser, tmp_path):
    folder = shutil.copytree(page_folder, tmp_path / "page")
    files = [folder / "models" / str(i) / "onnx" / "model.onnx" for i in (0, 1)]
    files[0].write_bytes(files[0].read_bytes()[:1000])
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    with served(folder) as address:
        page = StaticPage(browser, address, "tiny", "chats", "letters", length=5)
        texts = page.write("the")
        sentence = r"tiny is incomplete or was changed: 1,000 bytes of [\d,]+ arrived; reload the page\."
        assert re.fullmatch(sentence, page.texts(".problem")[0])
        assert re.fullmatch(r"chats is .*: ([\d,]+) bytes of \1 arrived; reload the page\.", page.texts(".problem")[1])
        assert texts[:2] == ["", ""]
        assert texts[2].startswith("the")
    (folder / "models" / "0" / "tokenizer.json").unlink()
    with served(folder) as address:  # at another port, and so without the files that the browser kept
        page = StaticPage(browser, address, "tiny", length=5)
        page.write("the")
        assert page.texts(".problem") == ["tiny has no tokenizer: the server answered 404."]


@needs_package
def test_a_model_on_the_hub_is_loaded_from_it_at_one_commit(hub, chats, browser, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    push_to_hub.main([str(chats), "--repo_id", "me/chats", "--format", "onnx"])
    demo.main(["me/chats", "--static", "page"])
    assert not Path("page/models").exists()
    [entry] = json.loads(Path("page/models.json").read_text())["models"]
    remote = f"{constants.ENDPOINT}/me/chats/resolve/{hub['me/chats'].branches['main']}/"
    assert entry["file"] == f"{remote}onnx/model.onnx"
    capsys.readouterr()
    with served(Path("page")) as address:
        page = StaticPage(browser, address, temperature=0, length=120)  # longer than the context
        assert page.write("the") == [greedy(chats, "the", 120, capsys)]
        from_others = {name for name in page.requests() if not name.startswith(address)}
        assert from_others == {entry["file"], f"{remote}tokenizer.json"}
        page.choose(task="chat", length=5)
        page.write("the")
        assert page.texts(".note")[0].startswith("5 tokens")
    push_to_hub.main(["me/chats", "--space", "me/page", "--static", "--cdn", "--onnx", "q8"])
    assert capsys.readouterr().out.endswith("/spaces/me/page\n")
    files = hub["spaces/me/page"].files()
    own = {"index.html", "page.js", "page.css", "models.json", "README.md"}
    assert files.keys() == own | {".gitattributes", "style.css"}  # of the Hub
    hosts = f"{constants.ENDPOINT} https://*.hf.co 'self' https://cdn.jsdelivr.net;"
    assert f"connect-src {hosts}" in files["index.html"].decode()
    assert f'"{remote}onnx/model_quantized.onnx"' in files["models.json"].decode()
    assert SpaceCard(files["README.md"].decode()).data.sdk == "static"
    hub["me/chats"].private = True
    sentence = r"me/chats has no onnx/model\.onnx on the Hub that everyone can read; push it with --format onnx,"
    assert_user_error(sentence, demo.main, ["me/chats", "--static", "page"])
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    assert_user_error(r"run pip install -e '\.\[onnx\]'\.$", demo.main, ["me/chats", "--static", "page"])


@needs_package
@pytest.mark.parametrize("flags", ["--js-flags=--jitless", "--js-flags=--no-enable-sse4-1 --no-enable-sse3"])
def test_a_browser_without_webassembly_or_simd_gives_a_sentence(flags, address, tmp_path):
    with started(tmp_path, flags) as old_browser:
        page = StaticPage(old_browser, address, "tiny")
        page.write("the")
        assert page.texts(".problem")[0].startswith("This browser lacks WebAssembly with SIMD, which the models need;")


@needs_package
def test_the_policy_forbids_code_in_texts_and_other_hosts(address, page_folder, browser):
    browser.get(address)
    code = "const it = document.createElement('script'); it.textContent = 'globalThis.ran = 1'; "
    assert browser.execute_script(f"{code}document.body.append(it); return globalThis.ran") is None
    code = "const it = document.createElement('a'); it.setAttribute('onclick', 'globalThis.ran = 1'); "
    assert browser.execute_script(f"{code}it.click(); return globalThis.ran") is None
    with served(page_folder) as other:  # it would answer
        request = f"return fetch('{other}', {{mode: 'no-cors'}}).then(() => 'sent', (error) => error.message)"
        assert browser.execute_script(request) == "Failed to fetch"
    html = Path(static_page.__file__).with_suffix(".html").read_text()
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', html)
    assert "unsafe" not in policy.replace("'wasm-unsafe-eval'", "")


def test_a_page_with_a_cdn_is_published_as_a_static_space(hub, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    push_to_hub.main([str(run), "--space", "me/page", "--static", "--cdn", "--onnx", "q8"])
    files = hub["spaces/me/page"].files()
    assert files.keys() >= {"index.html", "page.js", "page.css", "models.json", "models/0/onnx/model_quantized.onnx"}
    assert not [name for name in files if name.startswith("runtime/")]
    assert b"connect-src 'self' https://cdn.jsdelivr.net;" in files["index.html"]  # and not the Hub
    assert SpaceCard(files["README.md"].decode()).data.sdk == "static"
    assert capsys.readouterr().out.endswith("/spaces/me/page\n")


def test_a_wrong_package_or_registry_and_another_tokenizer_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(static_page, "PACKAGE", tmp_path / "gpt2scratch" / static_page.PACKAGE.name)
    monkeypatch.setenv("npm_config_registry", (tmp_path / "registry").as_uri())
    sentence = rf"registry/onnxruntime-web/-/onnxruntime-web-{static_page.VERSION}\.tgz cannot be loaded \(.*add --cdn"
    assert_one_sentence(sentence, static_page.runtime_package)
    package = tmp_path / "registry" / "onnxruntime-web" / "-" / static_page.PACKAGE.name
    package.parent.mkdir(parents=True)
    package.write_bytes(b"another")
    assert_one_sentence("is not onnxruntime-web", static_page.runtime_package)
    assert not (tmp_path / "gpt2scratch").exists()
    static_page.PACKAGE.parent.mkdir()
    static_page.PACKAGE.write_bytes(b"damaged in the cache")
    assert_one_sentence("is not onnxruntime-web", static_page.runtime_package)
    monkeypatch.setattr(static_page, "unusual_parts", lambda tokenizer: ["normalizer NFC()"])
    sentence = r"tiny cannot run in a browser: its tokenizer has normalizer NFC\(\), but the page supports"
    assert_user_error(sentence, demo.main, [str(run), "--static", str(tmp_path / "page")])
    assert not (tmp_path / "page").exists()
