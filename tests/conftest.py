"""Shared fixtures: a text, a token store built from it, and training on it in this process."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import huggingface_hub
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from huggingface_hub import constants
from safetensors.torch import load_file

import generate
import train_accelerate
from chromium import started
from common.errors import UserError
from forking import Fork, ForkServer
from hub_server import TOKEN, serving
from tokenizer.build.recipe import Recipe
from tokenizer.build.store_builder import pretokenize
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.corpus.hub import unreachable
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments
from tokenizer.store.store import TokenStore
from training.log.speed import SHOWN
from training.report import report

REPOSITORY = Path(__file__).parent.parent
sys.modules["vllm"] = None  # pytest puts tests/ on the path, where TRL would take the folder tests/vllm for vLLM
torch.set_num_threads(1)  # the same as in child processes: the number of threads changes the order of sums
WORDS = "the of and a to in is was he for it with as his on be at by had not are but from or have an they".split()

# Settings for a model of a few thousand parameters and a run of a few seconds.
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "tokens_per_step": 64, "max_steps": 6}
TINY |= {"learning_rate": 0.01, "min_learning_rate": 0.0, "warmup_steps": 2, "logging_steps": 1, "eval_steps": 3}
TINY |= {"save_steps": 3, "sample_tokens": 8, "sample_prompts": "the", "max_eval_samples": 512}
TINY |= {"torch_compile": "false", "mixed_precision": "no"}
# GPT-2 and AdamW in place of the quickstart's family and optimizer.
TINY |= {"rope_theta": 0, "normalization": "layer_norm", "use_bias": "true", "activation_function": "gelu"}
TINY |= {"tie_word_embeddings": "true", "initializer_range": 0.02, "optimizer": "adamw"}

# The modern family: settings of a run, and fields of a configuration.
MODERN_RUN = {"rope_theta": 100, "normalization": "rms_norm", "use_bias": False, "activation_function": "relu2"}
MODERN = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "normalization": "rms_norm"}
MODERN |= {"use_bias": False, "activation_function": "relu2", "attention_scale": 0.5}

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ACCELERATE = ("-m", "accelerate.commands.launch", "--quiet")
TWO_PROCESSES = (*ACCELERATE, "--config_file", "launch/two_cpu_processes.yaml")


def prose(seed: int, words: int = 4000) -> str:
    """Return text with a little structure; the same seed gives the same text."""
    choice = random.Random(seed).choice
    sentences = (" ".join(choice(WORDS) for _ in range(8)) for _ in range(words // 8))
    return "\n".join(sentence.capitalize() + "." for sentence in sentences) + "\n"


def tokenized(text: Path, output: Path, corpus=None, clean="normalize", seed=1, **vocabulary) -> TokenStore:
    corpus, cleaning = CorpusArguments(**corpus or {}), CleaningArguments([clean])
    recipe = Recipe([str(text)], corpus, VocabularyArguments(**vocabulary), cleaning, seed=seed)
    return pretokenize(recipe, output, say=lambda text: None)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for i in range(8):
        (folder / f"text{i}.txt").write_text(prose(i, 800), encoding="utf-8")
    return tokenized(folder, folder / "store", {"validation_fraction": 0.2}, vocab_size=300)


def error_of(function: Callable, *arguments, **settings) -> str:
    """Return the message of the `UserError` in which a call ends."""
    with pytest.raises(UserError) as error:
        function(*arguments, **settings)
    return str(error.value)


def assert_user_error(sentence: str, function: Callable, *arguments, **settings) -> None:
    """Check that a call ends in a `UserError` that matches the pattern `sentence`."""
    assert re.search(sentence, error_of(function, *arguments, **settings))


def assert_one_sentence(sentence: str, function: Callable, *arguments, **settings) -> None:
    """Check that a call ends in a `UserError` of one line that matches the pattern `sentence`."""
    assert re.fullmatch(f".*(?:{sentence}).*", error_of(function, *arguments, **settings))


def flags(**settings) -> list[str]:
    """Return `--name value` for every setting that is not None."""
    given = {name: value for name, value in settings.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def initial_accelerate():
    """Start each test without Accelerate's state of the last one, from which `Accelerator()` takes its precision."""
    reset_accelerate()


def trained(store, output_dir: Path, *more: str, **settings) -> Path:
    reset_accelerate()
    settings = {"data": store.folder, "output_dir": output_dir, **TINY, **settings}
    train_accelerate.main([*flags(**settings), *more])
    return output_dir


@pytest.fixture(scope="session")
def run(tmp_path_factory, store):
    """A trained run of three steps, for tests that only read it; some files define their own."""
    return trained(store, tmp_path_factory.mktemp("runs") / "tiny", max_steps=3)


@pytest.fixture
def a_copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / run.name)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, store):
    """A run of six steps with checkpoints after steps 3 and 6, for tests that only read it."""
    return trained(store, tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def finished_copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def greedy(model: Path, prompt: str, number: int, capsys) -> str:
    generate.main([str(model), "--prompt", prompt, "--max_new_tokens", str(number), "--temperature", "0"])
    return capsys.readouterr().out.removesuffix("\n")


def metrics(run: Path) -> list[dict]:
    return lines(run / "metrics.jsonl")


def logged(run: Path, name: str = "loss") -> list[dict]:
    """Return the entries of metrics.jsonl that have a value of this name."""
    return [entry for entry in metrics(run) if name in entry]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08}"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def untimed(run: Path) -> list[dict]:
    """Return metrics.jsonl without the values that differ between runs."""
    timed = {*SHOWN, "seconds_to_first_step"}
    return [{name: value for name, value in entry.items() if name not in timed} for entry in metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return copies of the weights, because a loaded file is memory-mapped and would change with the file."""
    return {name: tensor.clone() for name, tensor in load_file(run / "model" / "model.safetensors").items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_same_run(one: Path, other: Path) -> None:
    assert_equal(weights(one), weights(other))
    assert untimed(one) == untimed(other)


def wait_until(condition: Callable[[], Any], seconds: float = 600) -> Any:
    """Return the first true value of `condition()`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return value


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a zombie has ended
    except psutil.NoSuchProcess:
        return False


def flip(path: Path) -> None:
    """Flip one bit. Token ids stay below the vocabulary size, and indices stay ascending."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 // 8 * 8] ^= 1
    path.write_bytes(content)


@contextmanager
def without_root():
    """Become a user without permissions if the tests run as root, which may read everything."""
    user = os.getuid()
    os.setresuid(user or 65534, user or 65534, user)
    try:
        yield
    finally:
        os.setresuid(user, user, user)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leave_out_plots(setattr: Callable = setattr) -> None:
    """Write empty files as plots, which take two thirds of so short a run; the runs of the fixtures above have them."""
    for name in ("plot_loss", "plot_course"):
        setattr(report, name, lambda *facts: facts[-1].touch() or True)


@pytest.fixture
def train(store, monkeypatch):
    leave_out_plots(monkeypatch.setattr)
    return partial(trained, store)


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables of an outer launcher and of pytest."""
    unset = ("ACCELERATE", "OMP", "GOMP", "PYTEST")
    return {name: value for name, value in os.environ.items() if not name.startswith(unset)}


@pytest.fixture(scope="session")
def popen():
    """Function that starts a command like a user, in a process with a session of its own: in a fork of a process that
    has imported the libraries, where that makes no difference and the test does not ask for a `fresh` interpreter."""
    usual = clean_environment() | {"OMP_NUM_THREADS": "1"}  # libraries add variables during the tests
    server = ForkServer(usual)

    def begin(*command: str, folder: Path = REPOSITORY, fresh=False, **environment: str | None) -> subprocess.Popen:
        command, environment = [*map(str, command)], usual | environment
        environment = {name: value for name, value in environment.items() if value is not None}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = {"cwd": folder, "env": environment, **pipes}
        if not fresh and server.can_run(command, environment):
            return Fork(server, command, **options)
        # If the tests run in the background, they may ignore Ctrl-C, and their processes would inherit that.
        options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen([sys.executable, *command], start_new_session=True, **options)

    yield begin
    server.close()


@pytest.fixture(scope="session")
def launch(popen):
    """Function that runs a command like a user, in a separate process, and returns its output and exit code."""

    def run(*command: str, **options) -> subprocess.CompletedProcess:
        process = popen(*command, **options)
        try:
            output, errors = process.communicate(timeout=1200)  # for a hang; a busy machine may take minutes
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    return run


@pytest.fixture
def spawn(popen):
    """Function that starts a command like `popen`, whose processes end with the test."""
    started = []

    def begin(*command: str, **options) -> subprocess.Popen:
        started.append(popen(*command, **options))
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


# Files of more than 40 s of CPU time, longest first: so that all workers are busy until the end (`make test`).
LONG = "reliability documented_commands several_processes notebook finetuning stopping publishing sizing benchmarks "
LONG += "static_page watchdog sweep worker compilation hub demo onnx"


def pytest_collection_modifyitems(items):
    files = [f"test_{name}" for name in LONG.split()]
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))


def pytest_sessionfinish(session):
    """Fail for skipped tests whose reason does not match EXPECTED_SKIPS, set by CI where all extras are installed."""
    expected, reporter = os.environ.get("EXPECTED_SKIPS"), session.config.pluginmanager.get_plugin("terminalreporter")
    if expected is None or reporter is None:  # no reporter in a worker of xdist
        return
    reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if not re.search(expected, reason)):
        reporter.write_line(f"\nUnexpected skip: {reason}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def online(address: str, home: Path) -> dict[str, str]:
    """Return the environment in which a process uses the local Hub as its logged-in user."""
    settings = {"ENDPOINT": address, "HOME": home, "TOKEN": TOKEN, "HUB_OFFLINE": 0, "HUB_DISABLE_XET": 1}
    return {f"HF_{name}": str(value) for name, value in settings.items()}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Empty Hub with a logged-in user."""
    with serving() as (server, address):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        settings = {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        settings |= {"HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "no-token")}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.close_session()
        unreachable.cache_clear()
        yield server
    huggingface_hub.close_session()
    unreachable.cache_clear()
