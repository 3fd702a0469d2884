"""Tests of command lines: flags override a YAML file, the file overrides defaults, and errors are one sentence."""

import gc
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest
from yaml import safe_dump, safe_load

import generate
import tokenizer.pretokenize
import train_accelerate
import training.evaluate
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from common.settings_file import read_yaml
from common.terminal import printable
from conftest import REPOSITORY, assert_user_error, error_of, flags
from training.config import PARTS, read_config
from training.plan.plan import LengthArguments

LAUNCHER_HINT = "It is an option of accelerate launch: name it before the script (docs/multi_gpu.md)."


@dataclass
class Model:
    n_layer: int = setting(12, "Blocks.")
    learning_rate: float = setting(1e-3, "At the peak.")
    torch_compile: bool = setting(False, "Whether to compile.")
    lr_scheduler_type: Literal["cosine", "linear"] = setting("cosine", "The shape.")
    name: str | None = setting(None, "A name.")
    input: list[str] = setting([], "Files.")


@dataclass
class Length:
    max_steps: int | None = setting(None, "Steps.")
    num_train_epochs: float | None = setting(None, "Epochs.")
    max_train_tokens: int | None = setting(None, "Tokens.")


def parse(*arguments: str, **options) -> tuple[Model, Length]:
    return FlagParser((Model, Length), "A command.", main=("config", "input")).parse(list(arguments), **options)


def refused(*arguments: str, **options) -> str:
    return error_of(parse, *arguments, **options)


@pytest.fixture
def yaml(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "run.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_flags_override_the_values_of_a_file(yaml, tmp_path):
    path = yaml("n_layer: 6\nlearning_rate: 3e-4\ntorch_compile: true\nlr_scheduler_type: linear\ninput: [a, b c]\n")
    (tmp_path / "default.yaml").write_text("n_layer: 3\nname: quickstart\n")
    default = {"default_file": lambda flags: tmp_path / "default.yaml"}  # read only without --config
    model = Model(2, 3e-4, True, "linear", None, ["a", "b c"])
    assert parse("--config", path, "--n_layer", "2", **default) == (model, Length())
    assert parse("--name=mine", **default) == (Model(n_layer=3, name="mine"), Length())


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ([], Model()),
        *((["--n_layer", "3"], Model(3)), (["--n_layer=3"], Model(3)), (["--n-layer", "3"], Model(3))),
        *((["--n-layer=3"], Model(3)), (["--torch_compile", "false", "--n_layer", "3"], Model(3))),
        (["--input", "a b", "ü*.txt", "--torch_compile"], Model(torch_compile=True, input=["a b", "ü*.txt"])),
    ],
)
def test_all_forms_of_a_flag_are_accepted(arguments, outcome):
    assert parse(*arguments) == (outcome, Length())


@pytest.mark.parametrize("length", [{"max_steps": 5}, {"num_train_epochs": 2.0}, {"max_train_tokens": 1000}])
def test_a_flag_for_the_run_length_replaces_all_lengths_of_the_file(yaml, length):
    path = yaml("data: x\nmax_steps: 9\nnum_train_epochs: 9\nmax_train_tokens: 9\n")
    assert read_config(["--config", path, *flags(**length)]).length == LengthArguments(**length)


def test_the_home_folder_is_found_in_flags_and_files(yaml, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = yaml("data: ~/my.txt\noutput_dir: ~/runs/my\n")
    config = read_config([f"--config=~/{Path(file).relative_to(tmp_path)}", "--backup_dir=~/drive"])
    assert (config.run.output_dir, config.backup.backup_dir) == (f"{tmp_path}/runs/my", f"{tmp_path}/drive")


def test_the_path_of_the_data_keeps_its_folders(tmp_path, monkeypatch):
    """After a link, `..` is the folder around the linked one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    paths = {"link/../my.txt": "link/../my.txt", "a/../my.txt": "my.txt", "~/../my.txt": "~/../my.txt"}
    paths |= {"./books//": "books", "/x/*.txt": "/x/*.txt"}
    assert {path: read_config(["--data", path]).data.data for path in paths} == paths


def test_a_resumed_run_has_only_its_own_file(yaml, finished):
    sentence = f"{finished} has its own config.yaml; leave out --config and override settings with flags"
    assert_user_error(sentence, read_config, ["--config", yaml("data: x"), *flags(resume_from_checkpoint=finished)])
    assert_user_error(sentence, read_config, ["--config", yaml(f"resume_from_checkpoint: {finished}")])


def test_the_source_of_each_value_is_recorded(yaml):
    config = read_config(["--data", "x", "--no_use_bias", "--n_layer", "3"])
    assert (config.model.use_bias, config.flags) == (False, {"data", "use_bias", "n_layer"})
    sources = [config.sources.get(name) for name in ("n_layer", "n_embd", "learning_rate", "seed")]
    assert sources == ["flag", "quickstart", "chosen", None]
    config = read_config(["--config", yaml("data: x\nn_layer: 3\nhead_learning_rate: null\n"), "--n_embd", "96"])
    assert (config.given, config.flags) == ({"data", "n_layer", "n_embd"}, {"n_embd"})
    assert config.with_settings({"n_layer": 4, "n_head": 6}).given == config.given


def test_leading_arguments_without_a_flag_fill_the_positional_field():
    one, many = (FlagParser((Model,), "A command.", positional=name) for name in ("name", "input"))
    assert one.parse(["runs/x", "--n_layer=2"]) == (Model(n_layer=2, name="runs/x"),)
    assert many.parse(["runs/x", "y", "--n_layer=2"]) == (Model(n_layer=2, input=["runs/x", "y"]),)
    sentence = "^'a b' has no flag; only the first value may be given without one"
    assert_user_error(sentence, one.parse, ["runs/x", "a b"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--n_layers", "3"], "Unknown flag --n_layers. Did you mean --n_layer?"),
        (["--learningrate=3"], "Unknown flag --learningrate=3. Did you mean --learning_rate?"),
        (["--num_processes", "2"], f"Unknown flag --num_processes. {LAUNCHER_HINT}"),
        (["--n_lay", "3"], "Unknown flag --n_lay. Did you mean --n_layer?"),
        (["my.txt", "--n_layer", "3"], "my.txt has no flag. Did you mean --input my.txt?"),
        (["--n_layer", "3", "README.md"], "README.md has no flag. Did you mean --input README.md?"),
        (["presets/nano.yaml"], "presets/nano.yaml has no flag. Did you mean --config presets/nano.yaml?"),
        (["--n_layer", "3", "4"], "4 after --n_layer is one value too many; quote a pattern or spaces."),
        (["--n_layer", "3.5"], "Argument --n_layer: invalid int value: '3.5'. See --help."),
        (["--n_layer"], "Argument --n_layer: expected one argument. See --help."),
        (["--input", "--n_layer", "2"], "Argument --input: expected at least one argument. See --help."),
        (["--config"], "Argument --config: expected one argument. See --help."),
        (
            ["--lr_scheduler_type", "cubic"],
            "Argument --lr_scheduler_type: invalid choice: 'cubic' (choose from 'cosine', 'linear'). See --help.",
        ),
        (["--n_layer=2", "--n-layer", "3"], "--n_layer is given twice; give it once, with all its values."),
    ],
)
def test_a_wrong_flag_is_reported_in_one_sentence(arguments, sentence):
    assert refused(*arguments) == sentence


def helped(capsys, *arguments: str, main: tuple[str, ...] = (), **options) -> str:
    with pytest.raises(SystemExit) as leaving:
        FlagParser((Model, Length), "A command.", main=main).parse(list(arguments), **options)
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_lists_all_flags_or_only_the_main_flags_and_the_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "-h", "--help_all"):
        text = helped(capsys, flag, "--unknown")
        for words in ("A command.", "Blocks.", "The shape.", "--max_steps N ", "flags override it", "{cosine,linear}"):
            assert words in text
    text = helped(capsys, "--help", main=("config", "n_layer"))
    assert "  --n_layer N               Blocks. (default: 12)\n" in text
    assert text.endswith(
        "All 9 flags by group (--help_all explains each):\n"
        "  Model         n_layer, learning_rate, torch_compile, lr_scheduler_type, ...\n"
        "  Length        max_steps, num_train_epochs, max_train_tokens\n"
    )
    assert "The shape." not in text
    assert "The shape." in helped(capsys, "--help_all", main=("config", "n_layer"))
    monkeypatch.setenv("RANK", "1")
    assert helped(capsys, "--help", main=("config", "n_layer")) == text
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert helped(capsys, "--help") == ""


def test_help_shows_defaults_of_the_code_and_of_the_default_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "quickstart.yaml").write_text("n_layer: 3\ntorch_compile: true\nlearning_rate: 1.0e-3\nmax_steps: 9\n")
    text = helped(capsys, "--help", default_file=lambda flags: tmp_path / "quickstart.yaml")
    for words in (
        *("Blocks. (default: 12; quickstart: 3)\n", "compile. (default: false; quickstart: true)\n"),
        *("At the peak. (default: 0.001)\n", "Steps. (quickstart: 9)\n", "A name.\n"),
    ):
        assert words in text


@pytest.mark.parametrize("command", [train_accelerate, tokenizer.pretokenize, training.evaluate, generate])
def test_the_help_of_a_command_fits_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            command.main([flag])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert text.count("\n") <= 48 or flag == "--help_all"
        assert "default: None" not in text
        assert ("Main flags:" in text) is (flag == "--help" and command in (train_accelerate, tokenizer.pretokenize))


def test_help_names_the_command(launch):
    result = launch("-m", "tokenizer.pretokenize", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: python -m tokenizer.pretokenize [--config FILE.yaml] [--FLAG VALUE ...]\n")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("lr", "Use --learning_rate."),
        ("block-size", "Use --n_positions."),
        ("dropout", "Use --embd_pdrop, --attn_pdrop, --resid_pdrop."),
        ("use_amp", "Use --mixed_precision."),
        ("bin_file", "Use --data."),
        ("model_size", "Use --n_layer, --n_embd."),
        ("device", "A GPU is used where PyTorch finds one; leave it out."),
        ("use_gpu", "A GPU is used where PyTorch finds one; leave it out."),
        ("xy", "See --help for the list."),
    ],
)
def test_flags_of_other_scripts_are_answered_with_the_flags_of_this_project(yaml, given, hint):
    assert error_of(read_config, [f"--{given}=3"]) == f"Unknown flag --{given}=3. {hint}"
    path, hint = yaml(f"{given}: 3\n"), hint.replace("--", "").replace("See help", "See --help")
    assert error_of(read_config, ["--config", path, "--data", "x"]) == f"{path}: Unknown key {given}. {hint}"


def test_every_suggested_flag_exists():
    names = {field.name for part in PARTS for field in fields(part)} | {"config"}
    names |= {field.name for field in fields(generate.GenerateArguments)}
    other_names = safe_load((REPOSITORY / "common" / "other_names.yaml").read_text())
    assert {name for targets in other_names.values() if isinstance(targets, list) for name in targets} <= names


def test_wrong_flags_keys_and_values_are_reported_together(yaml):
    def check(model: Model, length: Length) -> None:
        sentences = f"learning_rate is {model.learning_rate}.\nmax_steps is {length.max_steps}."
        raise UserError(f"n_layer is {model.n_layer}; too many.\n{sentences}")

    path = yaml("n_layers: 3\nn-heads: 1\nzzz: 1\ninput: {a: b}\nlearning_rate: high\nmax_steps: 1\n")
    arguments = ["--zzz", "1", "--torch_compile", "maybe", "--name", "a", "--name", "b", "extra"]
    assert refused("--config", path, *arguments, check=check).splitlines() == [
        "Unknown flag --zzz. See --help for the list.",
        "Argument --torch_compile: 'maybe' is neither true nor false; a file needs a flag of its own. See --help.",
        "--name is given twice; give it once, with all its values.",
        f"{path}: Unknown key n_layers. Did you mean n_layer?",
        f"{path}: Unknown key n-heads. See --help for the list.",
        f"{path}: Unknown key zzz. See --help for the list.",
        f"input in {path} is nested; keys are flat.",
        f"learning_rate in {path}: invalid float value: 'high'.",
        "max_steps is 1.",  # the sentences on n_layer and learning_rate are dropped, because their values are unknown
    ]
    assert "n_layer is 7; too many." in refused("--config", path, "--n_layer", "7", check=check)
    assert "max_steps is" not in refused("--config", f"{path}.yaml", "--zzz", check=check)  # no file, no values


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((f"n_layer: {value}", ("n_layer", f"'{value}'")) for value in "many 3.5 true 1:30 1e3 .inf".split()),
        ("n_layer: [1, 2]", ("n_layer", "1, 2")),
        ("n_layer:", ("n_layer",)),
        ("torch_compile: maybe", ("torch_compile", "maybe")),
        ("lr_scheduler_type: cubic", ("lr_scheduler_type", "'cubic'", "cosine", "linear")),
        ("- n_layer\n", ("must contain lines of the form `name: value`, but it contains a list",)),
        ("just words", ("must contain lines of the form `name: value`, but it contains text",)),
        *((text, ("is not valid YAML",)) for text in ("n_layer: [3\nname: x", "n_layer:\t3\n\tname: x", b"caf\xe9")),
        ("n_layer: 1\nname: x\nn_layer: 2\n", ("contains n_layer 2 times; keep one.",)),
        ("learning_rate: nan", ("learning_rate in", "is nan; it must be at least 0.")),
        ('name: ""', ("name in", "is empty")),
        ('name: "\\ud800"', ("name in", "not UTF-8")),
        ("input: [a, ~]", ("input in", "an item without a value")),
        ("name: [[a]]", ("name in", "is nested")),
        ("input: &a [x, x]\nname: [*a, *a]\n", ("name in", "is nested")),
        ("<<: *a", ("found undefined alias 'a'",)),
        ("name: !!python/object:os.system {}", ("name in", "is nested")),
        ("n_layer: 1\n---\nn_layer: 2\n", ("expected a single document in the stream",)),
        ("? [a]\n: b\n", ("line 1: a name must be a word.",)),
        ("1: 2", ("Unknown key 1.",)),
        *((text + "[" * 5000, ("is not valid YAML: maximum recursion depth",)) for text in ("", "name: ")),
        ('name: "\\UFFFFFFFF"', ("is not valid YAML",)),
        ('{"model_type": "gpt2", "architectures": ["A"]}', ("describes a model, not a run; name a settings file",)),
        ("#" * 2_000_000, ("a settings file may have at most 1,048,576.",)),
    ],
)
def test_a_wrong_value_or_a_file_that_is_not_flat_yaml_is_reported_in_one_sentence(yaml, content, words):
    sentence = refused("--config", yaml(content))
    assert "\n" not in sentence
    assert all(word in sentence for word in words)


@pytest.mark.parametrize(
    ("content", "model", "length"),
    [
        ("# n_layer: 3\n", Model(), Length()),
        ("input: my text.txt\n", Model(input=["my text.txt"]), Length()),
        ("input: []\nname: --odd\n", Model(name="--odd"), Length()),
        ("input: [--odd, 3]\n", Model(input=["--odd", "3"]), Length()),
        ("name: null\nmax_steps: ~\n", Model(), Length()),
        ("max_train_tokens: 1_000\nmax_steps:\n", Model(), Length(None, None, 1000)),
        ("n_layer: 010\nname: 010\n", Model(n_layer=10, name="010"), Length()),
        ("input: [no, 1:30, 2020-01-01, 1.50, true]\n", Model(input="no 1:30 2020-01-01 1.50 true".split()), Length()),
        ("torch_compile: yes\nname: 'null'\n", Model(torch_compile=True, name="null"), Length()),
        ("---\nname: café\n".encode("utf-16"), Model(name="café"), Length()),
        ("\ufeffname: x\n", Model(name="x"), Length()),
    ],
)
def test_values_of_a_file_are_read_as_the_types_of_the_fields(yaml, content, model, length):
    assert parse("--config", yaml(content)) == (model, length)


def test_written_settings_are_read_back_with_their_types(tmp_path):
    values = ["no", "010", "1:30", "1e3", "~", "", "a\nb", "2020-01-01", "1_0", "é", 3, -1.0, 1e-05, 1e22, True, None]
    settings = {"input": values, **{f"value_{nth}": value for nth, value in enumerate(values)}}
    (tmp_path / "config.yaml").write_text(safe_dump(settings, allow_unicode=True), encoding="utf-8")
    assert read_yaml(tmp_path / "config.yaml") == settings


def test_a_missing_config_file_is_answered_with_the_closest_name(yaml, tmp_path):
    (tmp_path / "other.yaml").write_text("")
    path, typo = yaml(""), tmp_path / "runn.yaml"
    hint = f"Did you mean {path}?"
    assert refused("--config", str(typo)) == f"Config file {typo} does not exist. {hint}"
    assert refused(f"--config={tmp_path}") == f"Config file {tmp_path} is a folder; name a YAML file. {hint}"
    assert refused("--config=/nowhere/a.yaml") == "Config file /nowhere/a.yaml does not exist."


class Accepted(Exception):  # noqa: N818
    """Raised to end a command after its settings were checked."""


COMMANDS: dict[str, dict[str, str]] = {
    "train_accelerate": {"data": "STORE", "n_positions": "16", "tokens_per_step": "256", "torch_compile": "false"},
    "generate": {"model": "x"},
    "push_to_hub": {"run": "STORE", "repo_id": "me/x"},
    "tokenizer.pretokenize": {"input": "STORE/../text0.txt", "output": "new"},
    "tokenizer.inspect": {"store": "STORE"},
    "training.evaluate": {"model": "x"},
    "publishing.demo": {"models": "x"},
    "publishing.gguf_file": {"paths": "x"},
    **{f"examples.finetune_{name}": {"model": "x", "data": __file__} for name in ("chat", "preferences")},
    **{f"benchmarks.{name}": {} for name in ("generate", "kills", "ladder", "pretokenize", "saving", "train_step")},
}
WRONG = ("nan", "inf", "-1", str(10**30), "9" * 5000)
NUMBERS = (*WRONG, "0", str(10**12), "1e-300")
NAMES = ("", " ", "caf\udce9")


def test_control_characters_are_not_sent_to_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "a tensor \x1b]0;x\x07\x9b2J\tis\nunknown"
    assert printable(text, io.StringIO()) == text
    assert printable(text, Terminal()) == "a tensor \ufffd]0;x\ufffd\ufffd2J\tis\nunknown"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_of_every_setting_is_accepted_or_refused_in_one_sentence(command, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # must stay empty
    module, usual, parsers = importlib.import_module(command), COMMANDS[command], []

    def parse(parser: FlagParser, *arguments, **options):
        parsers.append(parser)
        raise Accepted(PARSE(parser, *arguments, **options))

    PARSE = FlagParser.parse
    monkeypatch.setattr(FlagParser, "parse", parse)

    def problems(**settings: str) -> set[str]:
        given = {name: value.replace("STORE", str(store.folder)) for name, value in usual.items()} | settings
        with pytest.raises((Accepted, UserError)) as outcome:
            module.main([f"--{name}={value}" for name, value in given.items()])
        return set(str(outcome.value).splitlines()) if outcome.type is UserError else set()

    baseline = problems()
    for kind in parsers[0].kinds:
        for name, hint in get_type_hints(kind).items():
            is_number = {int, float} & {hint, *get_args(hint)}
            is_name = str in {hint, *get_args(hint)} and "free_text" not in parsers[0].limits[name]
            for value in NUMBERS if is_number else NAMES if is_name else ():
                sentences = problems(**{name: value}) - baseline
                label = f"{command} --{name}={value[:20]}: {sentences}"
                assert len(sentences) <= 1, label
                assert all(len(sentence) < 700 for sentence in sentences), label
                is_signed = parsers[0].limits[name].get("minimum", 0) < 0  # a seed may be negative or large
                if is_name or (value in WRONG and not (is_signed and value in ("-1", str(10**30)))):
                    assert name in " ".join(sentences), label
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "rank", "code", "output", "seconds"),
    [
        (UserError("This is wrong.\nSo is that."), None, 1, "error: This is wrong.\nerror: So is that.\n", []),
        (KeyboardInterrupt(), None, 130, "interrupted\n", []),
        (KeyboardInterrupt(), "1", 130, "", []),
        (FileNotFoundError(2, "Not found", "a.txt"), None, 1, "error: a.txt: Not found.\n", []),
        (UserError("This is wrong."), "1", 1, "", [10.0]),  # otherwise the launcher might end the process that prints
    ],
)
def test_one_process_prints_the_error_and_all_share_its_code(capsys, monkeypatch, error, rank, code, output, seconds):
    def main(arguments: list[str]) -> None:
        raise error

    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit) as leaving:
        run(main)
    assert (leaving.value.code, capsys.readouterr().err, pauses) == (code, output, seconds)


def test_a_closed_full_or_unread_output_ends_a_command_without_a_traceback(store):
    command = [sys.executable, "-m", "tokenizer.inspect", str(store.folder)]
    reader, pipe = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(pipe, "w") as unread:
        for output, shell, outcome in (
            (unread, [], (141, "")),  # as of a command that SIGPIPE ended
            (full, [], (1, "error: No space left on device.\n")),
            (None, ["sh", "-c", 'exec "$0" "$@" >&-'], (0, "")),
        ):
            pipes = {"stdout": output, "stderr": subprocess.PIPE, "text": True}
            result = subprocess.run([*shell, *command], cwd=REPOSITORY, check=False, **pipes)
            assert (result.returncode, result.stderr) == outcome


def test_a_command_collects_garbage_after_its_imports():
    default = gc.get_threshold()
    gc.set_threshold(100_000)
    with pytest.raises(SystemExit) as leaving:
        run(lambda _arguments: sys.exit(gc.get_threshold() == default))
    assert leaving.value.code is True


@pytest.mark.parametrize(("script", "handles"), [("generate.py", True), ("my_own.py", False)])
def test_only_commands_of_this_project_handle_ctrl_c_during_imports(tmp_path, script, handles):
    shutil.copytree(REPOSITORY / "common", tmp_path / "common")
    code = "import signal, sys, common.interrupt\nsys.exit(signal.getsignal(2) is not signal.default_int_handler)\n"
    (tmp_path / script).write_text(code)
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test in the background ignores it
    assert subprocess.run([sys.executable, tmp_path / script], check=False, preexec_fn=default).returncode == handles


def test_a_command_does_not_need_docstrings(launch):
    assert launch("-B", "-OO", "-m", "tokenizer.inspect", "--help").stdout.startswith("usage: ")


@pytest.mark.parametrize("script", ["generate.py", "train_accelerate.py"])
def test_ctrl_c_during_the_imports_of_a_command_prints_one_word(spawn, script):
    process = spawn(script, "x", fresh=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130
