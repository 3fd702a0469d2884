"""Tests of the demo page in a real browser, served locally and as a Space."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs gradio")

from huggingface_hub import HfApi, SpaceCard

from chromium import Page
from conftest import REPOSITORY, assert_user_error, greedy, prose
from hub_server import File
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import ModelError
from publishing import demo, demo_page
from publishing.demo import assemble_space
from publishing.upload import Repository, check_access
from tokenizer.encoding.vocabulary import character_tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """An untrained character model, deep enough to write slowly, so that a test can stop it."""
    folder = tmp_path_factory.mktemp("models") / "letters"
    torch.manual_seed(0)
    tokenizer = character_tokenizer([prose(0, 200), "<>"])
    shape = {"n_layer": 30, "n_head": 2, "n_embd": 16, "n_positions": 16, "initializer_range": 0.5}
    GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.chat_template = "{{ messages | map(attribute='content') | join }}"
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def served(command: list[str], folder: Path):
    variables = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    variables |= {"http_proxy": "http://127.0.0.1:9"}  # as behind a proxy, which does not know this server
    pipe = {"stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, *command], cwd=folder, env=os.environ | variables, **pipe)
    try:
        line = server.stdout.readline()
        address = re.match(r"Open (http://127\.0\.0\.1:\d+/) ", line)
        assert address, line
        yield address[1]
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@pytest.fixture(scope="module")
def address(run, letters):
    with served(["-m", "publishing.demo", str(run), str(letters)], REPOSITORY) as address:
        yield address


class DemoPage(Page):
    is_ready = "return document.querySelector('.tab:has(.card.empty) .settings')?.checkVisibility()"

    def fill(self, selector: str, text: str, start=False) -> None:
        from selenium.webdriver.common.keys import Keys

        field = self.browser.find_element("css selector", selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text, *([Keys.TAB] if "input" in selector else []))
        if start:
            self.click(".start")

    def set(self, **settings: str) -> None:
        self.click(".settings > button")
        self.wait_for("return document.querySelector('#seed input')?.checkVisibility()")
        self.wait_for("return document.querySelector('#seed input').value === ''")  # a random seed
        for name, value in settings.items():
            self.fill(f"#{name} input[type=number]", value)

    def click(self, selector: str) -> None:
        self.wait_for(f"return [...document.querySelectorAll('{selector}')].find(it => it.checkVisibility())").click()

    def wait_until_done(self) -> None:
        condition = "!document.querySelector('.card.writing, .card.empty')"
        self.wait_for(f"return {condition} && !document.body.textContent.includes('Waiting')")


def test_both_models_write_the_text_of_generate_and_the_page_loads_nothing_else(address, browser, run, letters, capsys):
    page = DemoPage(browser, address)
    assert page.texts("h2") == ["tiny", "letters"]
    about = r"11,648 parametersstep 3validation loss \d\.\d\d\d\.\d\d bits per byte"
    assert re.fullmatch(about, page.texts("header ul")[0])
    page.set(temperature="0", length="40")
    page.fill("#prompt textarea", "The", start=True)
    page.wait_for("return document.querySelectorAll('.card.writing .new:not(:empty)').length > 0")  # streaming
    page.wait_until_done()
    assert page.texts(".text") == [greedy(model, "The", 40, capsys) for model in (run, letters)]  # exceeds the context
    assert page.texts(".prompt") == ["The", "The"]
    assert re.fullmatch(r"40 tokens[\d,]+ tokens/s", page.texts("footer")[1])
    assert page.requests()
    assert all(name.startswith(address) for name in page.requests())


def test_stop_ends_the_generation(address, browser):
    page = DemoPage(browser, address)
    page.set(length="1000")
    page.click(".start")
    page.wait_for("return document.querySelectorAll('.card')[1].querySelector('.new')?.textContent.length > 5")
    page.click(".stop")
    page.wait_until_done()
    footer = page.texts("footer")[1]
    assert footer.endswith("stopped")
    assert 5 < int(footer.split()[0]) < 1000
    page.click(".start")  # it can start again
    page.wait_for("return document.querySelector('.card.writing') !== null")
    page.click(".stop")
    page.wait_until_done()


def test_an_example_fills_the_prompt_and_an_unknown_character_is_reported(address, browser):
    page = DemoPage(browser, address)
    page.fill("#prompt textarea", "something else")
    page.click(".chip")
    page.wait_for("return document.querySelector('#prompt textarea')?.value === 'the'")
    page.set(length="4.4", seed="-5")
    page.fill("#prompt textarea", "<b>${1+1}</b>", start=True)
    page.wait_until_done()
    assert re.fullmatch(r"4 tokens[\d,]+ tokens/sseed 5", page.texts("footer")[0])
    assert page.texts(".prompt") == ["<b>${1+1}</b>"]  # shown as typed, not as HTML
    assert "The text contains '$', '+', '/', '1', '{', '}', which is not among this model's" in page.texts(".text")[1]


def settings(**changes) -> demo_page.GenerationSettings:
    usual = {"max_new_tokens": 30, "temperature": 1.0, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5}
    return demo_page.GenerationSettings(**usual | changes)


def ended(models: list[demo_page.DemoModel], prompt="The", **changes) -> list:
    """Return the continuations of all models."""
    *_, continuations = demo_page.side_by_side(models, prompt, settings(**changes), threading.Event())
    return continuations


def model_at(folder: Path) -> demo_page.DemoModel:
    return demo_page.DemoModel(folder.name, str(folder), [])


def test_losses_and_chats_are_shown_as_plain_text(address, browser):
    page, text = DemoPage(browser, address), "The <b>é</b>{{1}}${1}"
    page.click("[role=tab]:nth-of-type(3)")
    for line in (text, "The the"):
        page.fill("#text textarea", line, start=True)
        page.wait_for(f"return document.querySelector('.losses .text')?.textContent === {line!r}")
    assert page.texts(".text")[2:] == ["The the"] * 3  # with the difference
    page.click("[role=tab]:nth-of-type(2)")
    page.wait_for("return document.querySelector('#message textarea')?.checkVisibility()")
    page.fill("#message textarea", "<b>the", start=True)
    page.wait_for("return document.querySelector('#talk')?.innerText.startsWith('<b>the')")
    page.click("#talk button[aria-label=Retry]")
    page.wait_for("return document.querySelector('.bar .note')?.textContent.includes('letters, seed ')")
    assert (talk := browser.find_element("css selector", "#talk")).text.count("<b>the") == 1
    page.click("#talk button[aria-label=Undo]")
    page.wait_for("return document.querySelector('#message textarea')?.value === '<b>the'")
    page.fill("#message textarea", " ", start=True)  # a blank message is not sent
    page.wait_for("return document.querySelector('.bar .note')?.textContent === ''")
    assert not talk.text
    page.click(".picker input")  # the first model, which is not the default here
    page.click("[role=option][aria-label=tiny]")
    page.wait_for("return document.body.textContent.includes('tiny has no chat template')")


def test_losses_are_those_of_the_model_and_a_character_of_several_tokens_is_one_piece(run, letters):
    text, (model, tokenizer) = "A é🎉 the", model_at(run / "model").load()
    ids = torch.tensor([tokenizer.encode(text)])
    result = demo_page.score(model_at(run / "model"), text)
    (first, *changes), ends = result["pieces"].values(), result["pieces"].keys()
    assert (first, sum(changes)) == (None, pytest.approx(model(ids, labels=ids).loss.item() * (ids.numel() - 1), 1e-4))
    assert {3, 4} <= set(ends) <= set(range(1, len(text) + 1))  # the ends of é and 🎉
    scores = [demo_page.score(model_at(folder), "The the of to and it with") for folder in (run / "model", letters)]
    assert (scores[1]["tokens"], len(scores[1]["losses"])) == (25, 15)  # the context is 16
    change = demo_page.demo_models.difference(*(result["pieces"] for result in scores))
    assert change.keys() == scores[0]["pieces"].keys() & scores[1]["pieces"].keys()


def test_a_model_that_fails_does_not_stop_the_others(letters, tmp_path, monkeypatch):
    broken, second = (model_at(shutil.copytree(letters, tmp_path / name)) for name in ("damaged", "second"))
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"")

    def failing(model, ids, options):
        yield ids[0]
        if model is second.load()[0]:
            raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(demo_page, "new_tokens", failing)
    continuations = ended([broken, second, model_at(letters)])
    assert [into.state for into in continuations] == ["refused", "refused", "ended"]
    assert continuations[0].problem.startswith("damaged cannot be loaded: ")  # visitors see no paths
    assert continuations[1].problem == "second stopped with an error: out of memory."


def test_a_chat_is_answered_within_the_context(letters):
    chat = [{"role": role, "content": "The the"} for role in ("user", "assistant", "user")]
    [answer] = ended([model_at(letters)], chat)
    assert (answer.state, answer.tokens, answer.left_out, answer.is_endless) == ("complete", 8, 2, True)


def test_checkpoints_and_revisions_can_be_chosen(hub, letters, run):
    HfApi().create_repo("me/a")
    HfApi().upload_folder(repo_id="me/a", folder_path=letters)
    HfApi().create_branch("me/a", branch="step1")
    assert [entry.source for entry in demo.find_models("me/a")[0]] == ["me/a", "me/a@step1"]
    assert demo.find_models("me/a@step1")[0][0].load()[0].config.n_layer == 30
    with pytest.raises(ModelError, match=r"^me/a has no revision step2 on the Hub\.$"):
        demo.find_models("me/a@step2")[0][0].load()
    models, _, [sample] = demo.find_models(str(run))
    assert [entry.name for entry in models] == ["tiny", "tiny, step 3"]
    assert len(demo_page.score(models[0], sample)["losses"]) >= 8  # `sample_tokens` of the run


def test_a_seed_reproduces_the_text_and_a_prompt_that_is_not_text_is_refused(letters):
    entry = model_at(letters)

    def written(number=1, **changes) -> list[str]:
        return [continuation.text for continuation in ended([entry] * number, **changes)]

    [text] = written()
    assert len(text) == 30
    assert written(3) == [text] * 3
    assert written(seed=6) != [text]
    assert written(top_k=1) == written(temperature=0.0, repetition_penalty=1.1)
    writing = demo_page.side_by_side([entry, entry], "The", settings(max_new_tokens=10**9), threading.Event())
    assert [continuation.state for continuation in next(writing)] == ["writing", "writing"]
    writing.close()
    [error] = ended([entry], "a\ud800")
    assert (error.state, error.problem) == ("refused", "The text is not UTF-8.")


def test_ten_visitors_at_once_are_all_answered(address):
    page = json.load(urlopen(f"{address}config"))
    parts = {part["id"]: part["props"] for part in page["components"]}
    functions = {it["id"]: [parts[i] for i in it["inputs"]] for it in page["dependencies"] if it["queue"]}
    function, inputs = next(it for it in functions.items() if "prompt" in str(it[1]))
    values = [20 if part.get("label") == "Length" else part.get("value") for part in inputs]

    def visit(number: int) -> str:
        query = {"data": values, "fn_index": function, "session_hash": f"visitor{number}"}
        kind = {"Content-Type": "application/json"}
        urlopen(Request(f"{address}gradio_api/queue/join", json.dumps(query).encode(), kind)).close()
        with urlopen(f"{address}gradio_api/queue/data?session_hash=visitor{number}") as events:
            messages = (json.loads(line[5:]) for line in events if line.startswith(b"data:"))
            return next(str(it["output"]) for it in messages if it["msg"] == "process_completed")

    with ThreadPoolExecutor(10) as pool:
        assert all("20 tokens" in answer for answer in pool.map(visit, range(10)))


def test_nothing_can_be_uploaded(address):
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n12\r\n--x--\r\n'
    with pytest.raises(HTTPError) as error:
        urlopen(Request(f"{address}gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}))
    with error.value as answer:
        assert answer.code == 413


FILES = {"README.md", "app.py", "app.css", "app.html.j2", "models.json", "requirements.txt"}
PACKAGE = {"__init__.py", "configuration_gpt2scratch.py", "modeling_gpt2scratch.py", "loading.py", "prompts.py"}


def test_the_app_of_a_space_runs_from_its_folder_alone(run, letters, browser, tmp_path, capsys):
    models = [shutil.copytree(run / "model", tmp_path / "a"), letters]
    folder = assemble_space([str(model) for model in models], tmp_path / "space", title="Two of them")
    with served(["app.py"], folder) as address:
        page = DemoPage(browser, address)
        assert page.browser.title == "Two of them"
        page.set(temperature="0", length="20")
        page.fill("#prompt textarea", "The", start=True)
        page.wait_until_done()
        assert page.texts(".text") == [greedy(model, "The", 20, capsys) for model in models]


def test_a_dry_run_writes_the_folder_of_the_space(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    demo.main(["me/small", "me/large@step1", "--space", "me/try-them", "--dry_run"])
    folder = Path("runs/spaces/try-them")
    assert capsys.readouterr().out == f"Not uploaded (--dry_run): {folder} would be uploaded to me/try-them.\n"
    assert FILES ^ {it.name for it in folder.iterdir()} == {".gpt2scratch.json", "modeling_gpt2scratch", "publishing"}
    assert {path.name for path in (folder / "modeling_gpt2scratch").iterdir()} == PACKAGE
    card = SpaceCard.load(folder / "README.md")
    assert (card.data.sdk, card.data.app_file, card.data.models) == ("gradio", "app.py", ["me/small", "me/large"])
    requirements = (folder / "requirements.txt").read_text().split()
    assert requirements == ["torch>=2.11", "transformers>=5.17,<6", "accelerate>=1.12", "safetensors>=0.8.0"]


def test_a_space_is_published_only_with_public_models(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("me/a", "me/no_weights", "me/hidden"):
        HfApi().create_repo(name, private=name == "me/hidden")
    for name in ("me/a", "me/hidden"):
        hub[name].commit("main", {"model.safetensors": File(b"weights", True)})
    demo.main(["me/a", "--space", "me/demo"])
    assert hub["spaces/me/demo"].files().keys() >= FILES
    assert capsys.readouterr().out.endswith("/spaces/me/demo\n")
    models = ["me/a", "me/hidden", "me/none", "me/no_weights"]
    sentence = "me/hidden, me/none, me/no_weights has no weights on the Hub"
    assert_user_error(sentence, demo.main, [*models, "--space", "me/other"])
    assert "spaces/me/other" not in hub.repositories
    HfApi().create_repo("me/game", repo_type="space", space_sdk="static")
    check_access(Repository("me/game", "space"))  # nothing but the example of the Hub
    hub["spaces/me/game"].commit("main", {"index.html": File(b"play")})
    sentence = "me/game is a Space of other files, which would be replaced"
    assert_user_error(sentence, demo.main, ["me/a", "--space", "me/game"])
    demo.main(["me/a", "--space", "me/demo"])  # its own Space


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ([], "Name one or more models"),
        (["a/b", "a/c", "a/d", "a/e", "a/f"], "5 models are given; the page shows at most 4"),
        (["no/such/run"], "neither a local folder nor a Hub id"),
        (["nobody/nothing"], "nobody/nothing is not a local path"),
        (["RUN", "me/b", "--space", "me/demo"], "is not a model on the Hub.*push_to_hub"),
        (["me/a", "--examples", "Once"], "--examples applies only to a static page; add --static FOLDER"),
        (["me/a", "--dry_run"], "--dry_run applies only to a Space; add --space user/name"),
        (["me/a", "--space", "me/demo", "--port", "7900"], "--port applies only to a page that this machine serves"),
        (["me/a", "--space", "demo"], "it must be user/name"),
    ],
)
def test_wrong_arguments_are_refused(run, arguments, target):
    assert_user_error(target, demo.main, [str(run) if argument == "RUN" else argument for argument in arguments])


def test_without_gradio_the_install_command_is_printed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert_user_error(r"pip install -e '\.\[demo\]'", demo.main, [str(run)])
