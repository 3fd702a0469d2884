"""Command lines: flat flags, defaults from a YAML file, and user errors that end in one sentence."""

import difflib
import gc
import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from common import interrupt, limits
from common.errors import FULL_DISK, Problems, UserError
from common.removal import is_marked
from common.settings_file import read_yaml
from common.terminal import discard_stdout, printable

REPORT_SECONDS = 10.0  # time for which other processes of a job wait while one reports a shared problem
HELP = frozenset({"-h", "--help", "--help_all"})
SWITCH = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)
LONGEST_ERROR = 400  # maximum characters of a reason, which quotes the input


class FlagParser:
    """Parser over dataclasses with the flags of Transformers' `HfArgumentParser`, whose import takes 0.6 s. Flag names
    must be whole. argparse stops at the first error, so it gets each flag alone, and each setting of a file as a
    flag."""

    def __init__(
        self, kinds: Iterable[type], doc: str | None, positional: str | None = None, main: tuple[str, ...] = ()
    ):
        """Add a flag for each field of the dataclasses. `doc`: a module's docstring, None with -OO.
        `positional` names the field that a first argument without a flag sets. `main` lists the flags that `--help`
        explains when there are too many to explain all of them."""
        self.kinds, self.doc, self.positional, self.main = tuple(kinds), doc or "", positional, main
        self.limits = {field.name: field.metadata for kind in self.kinds for field in fields(kind)}
        self.hints = {name: hint for kind in self.kinds for name, hint in get_type_hints(kind).items()}
        self.parser = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
        text = "A YAML file of settings; flags override it."
        self.actions = {"config": self.parser.add_argument("--config", metavar="FILE.yaml", help=text)}
        for kind in self.kinds:
            self.actions |= {field.name: self._add_flag(field, self.hints[field.name]) for field in fields(kind)}

    def _add_flag(self, field: Field, hint: Any) -> Action:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
        options = {"default": default, "help": field.metadata.get("help")}
        if kind is bool:
            return self.parser.add_argument(f"--{field.name}", nargs="?", const=True, type=_switch, **options)
        is_list, is_choice = get_origin(kind) is list, get_origin(kind) is Literal
        options |= {"action": "extend", "nargs": "+"} if is_list else {}
        choices = get_args(kind) if is_choice else field.metadata.get("choices")
        kind = get_args(kind)[0] if is_list else str if is_choice else kind
        word = f"{{{','.join(choices)}}}" if choices else {int: "N", float: "X"}.get(kind, "TEXT")
        options |= {"type": kind, "choices": choices, "metavar": f"{word} ..." if is_list else word}
        options |= {name: field.metadata[name] for name in ("nargs", "const", "type") if name in field.metadata}
        return self.parser.add_argument(f"--{field.name}", **options)

    def parse(
        self,
        arguments: list[str],
        check: Callable[..., None] = lambda *parts: None,
        default_file: Callable[[dict[str, Any]], Path | None] = lambda flags: None,
        build: Callable[[dict[str, Any], dict[str, Any], Path | None], Any] | None = None,
    ) -> Any:
        """Return the filled dataclasses, or what `build` makes of the values of flags and file, and the file's path.
        `default_file` returns, for the flags, the file that is read if no `--config` is given. `check` receives the
        dataclasses. Both, and `build`, raise a `UserError` for wrong values. All problems are raised together, one per
        line, including unknown flags and keys, values of the wrong type, and a missing or unreadable file."""
        problems, path, file = Problems(), None, {}
        flags = self._read_arguments(arguments, problems)
        try:
            path = Path(os.path.expanduser(flags["config"])) if "config" in flags else default_file(flags)
            file = self._read_file(path, problems) if path is not None else {}
        except UserError as error:
            problems.add(str(error), "config")
        if request := HELP & set(arguments):
            if reports_for_all():
                print(self.describe("--help_all" in request or not self.main, file, path))
            sys.exit(0)
        has_file = "config" not in problems.unsure  # otherwise its values are unknown
        problems.unsure -= flags.keys()
        result = None
        if not self._lacks_needed(file | flags, problems) and has_file:
            if build is not None:
                result = problems.add_of(build, flags, file, path)
            else:
                result = fill(self.kinds, file | flags)
                problems.add_of(check, *result)
        problems.refuse()
        return result

    def _lacks_needed(self, values: dict[str, Any], problems: Problems) -> bool:
        """Return whether a required setting has no value. Add a problem that names all of them."""
        requirements = {name: metadata["needed"] for name, metadata in self.limits.items() if "needed" in metadata}
        names = [name for name in requirements if not values.get(name)]
        if nouns := [requirements[name] for name in names if name not in problems.unsure]:
            example = nouns[0][1].format(program=_program())
            problems.add(f"Name {' and '.join(noun for noun, _ in nouns)}: {example}")
        return bool(names)

    def _read_arguments(self, arguments: list[str], problems: Problems) -> dict[str, Any]:
        """Return the values of the flags that are right."""
        has_positional = bool(self.positional and arguments and not arguments[0].startswith("-"))
        if has_positional:
            arguments = [f"--{self.positional}", *arguments]
        groups = [self._named(*group) for group in split_flags(arguments)]
        names, values = [name for _, name, _ in groups], {}
        main = self.positional or next((name for name in self.main if name != "config"), None)
        for number, (spelling, name, words) in enumerate(groups):
            takes_one = name in self.actions and self.actions[name].nargs != "+"
            surplus = words if not name else words[1:] if takes_one else []
            target = "config" if words and words[-1].endswith((".yaml", ".yml")) else main
            is_value = not spelling.startswith("-") or (len(surplus) == 1 and os.path.exists(surplus[0]))
            if name in names[:number]:
                problems.add(f"--{name} is given twice; give it once, with all its values.", name)
            elif surplus and is_value and target and target not in names:
                problems.add(f"{surplus[0]} has no flag. Did you mean --{target} {shlex.join(surplus)}?", target, name)
            elif name not in self.actions:
                self._add_unknown("flag", spelling, problems)
            elif surplus and has_positional and number == 0:
                text = f"{shlex.join(surplus)} has no flag; only the first value may be given without one, see --help."
                problems.add(text, name)
            elif surplus:
                problems.add(f"{surplus[0]} after {spelling} is one value too many; quote a pattern or spaces.", name)
            else:
                values |= self._read(name, words, problems)
        return values

    def _named(self, spelling: str, *words: str) -> tuple[str, str, list[str]]:
        """Return a flag as it is written, its name, which is empty for words without a flag, and its words."""
        if not is_flag(spelling):
            return spelling, "", [spelling, *words]
        name, words = flag_name(spelling), [*spelling.split("=", 1)[1:], *words]
        switch = self.actions.get(name.removeprefix("no_"))
        if name not in self.actions and switch is not None and switch.default is True:
            return spelling, switch.dest, ["false", *words]
        return spelling, name, words

    def _read(self, name: str, words: list[str], problems: Problems, location: str = "") -> dict[str, Any]:
        """Return the value that `words` write, by its name, or add a problem with `location` after the name."""
        flags = [f"--{name}={word}" for word in words] or [f"--{name}"]
        try:
            value = getattr(self.parser.parse_args(flags, Namespace(**{name: None})), name)
        except ArgumentError as error:
            reason = error.message[:LONGEST_ERROR]
            problem = f"{name}{location}: {reason}." if location else f"Argument --{name}: {reason}. See --help."
        else:
            problem = limits.problem(f"{name}{location}", value, self.limits.get(name, {}))
        if problem is None:
            return {name: value}
        problems.add(problem, name)
        return {}

    def _read_file(self, path: Path, problems: Problems) -> dict[str, Any]:
        """Return the values in a file that are right."""
        values, settings = {}, read_yaml(path, as_text=True)
        if {"architectures", "model_type"} <= settings.keys():
            raise UserError(f"{path} describes a model, not a run; name a settings file, such as presets/gpt2.yaml.")
        for name, content in settings.items():
            location, words = f" in {path}", content if isinstance(content, list) else [content]
            if name not in self.limits:
                self._add_unknown("key", name, problems, f"{path}: ", is_marked(path.parent, "run"))
            elif content is None and type(None) in get_args(self.hints[name]):
                values[name] = None
            elif content is None:
                problems.add(f"{name}{location} has no value; set one or remove the line.", name)
            elif None in words:
                problems.add(f"{name}{location} has an item without a value; set one or remove the item.", name)
            elif not all(isinstance(word, str) for word in words):
                problems.add(f"{name}{location} is nested; keys are flat.", name)
            elif words is content and self.actions[name].nargs != "+":
                problems.add(f"{name}{location} is {', '.join(words)}; it takes one value, not a list.", name)
            else:
                values |= self._read(name, words, problems, location) if words else {name: []}
        return values

    def _add_unknown(
        self, kind: str, word: str, problems: Problems, location: str = "", is_of_run: bool = False
    ) -> None:
        dashes, hint, name = "--" if kind == "flag" else "", "See --help for the list.", flag_name(word)
        content = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
        answer = content.get(name, [])
        settings = [*self.actions, "help_all"] if dashes else self.limits
        names = [name for name in answer if name in settings]
        if isinstance(answer, str):
            hint = answer
        elif names:
            hint = f"Use {', '.join(dashes + name for name in names if name != 'config' or names == ['config'])}."
        elif names := difflib.get_close_matches(name, settings, n=1):
            hint = f"Did you mean {dashes}{names[0]}?"
        update = " If a newer version of GPT2Scratch wrote it, update with `git pull`." if is_of_run else ""
        problems.add(f"{location}Unknown {kind} {word}. {hint}{update}", *names)

    def describe(self, is_complete: bool, file: dict[str, Any], path: Path | None) -> str:
        """Return the text of `--help_all`, or of `--help`: the main flags and the names of all groups.
        Each flag is shown with its default in the code and, if that differs, its value in the file at `path`."""
        width = min(shutil.get_terminal_size().columns, 120)

        def entry(name: str) -> str:
            action = self.actions[name]
            notes = ["the flag name may be omitted"] if name == self.positional else []
            notes += [] if action.default in (None, "", []) else [f"default: {_shown(action.default)}"]
            if name in file and file[name] != action.default:
                notes.append(f"{path.stem}: {_shown(file[name])}")
            text = f"{action.help} ({'; '.join(notes)})" if notes else action.help
            return _entry(f"--{name} {action.metavar or ''}".rstrip(), text, 28, width)

        groups = {kind.__name__.removesuffix("Arguments"): [f.name for f in fields(kind)] for kind in self.kinds}
        positional = f"[{self.positional.upper()}] " if self.positional else ""
        usage = f"usage: {_program()} {positional}[--config FILE.yaml] [--FLAG VALUE ...]"
        sections = [textwrap.fill(text, width) for text in (usage, self.doc.partition("\n")[0])]
        if is_complete:
            sections.append(entry("config"))
            sections += ["\n".join([f"{title}:", *map(entry, names)]) for title, names in groups.items()]
            return "\n\n".join(sections)
        sections.append("\n".join(["Main flags:", *map(entry, self.main)]))
        lines = [
            _entry(title, textwrap.shorten(", ".join(names), width - 18, placeholder=" ..."), 16, width)
            for title, names in groups.items()
        ]
        sections.append("\n".join([f"All {len(self.limits)} flags by group (--help_all explains each):", *lines]))
        return "\n\n".join(sections)


def fill(kinds: Iterable[type], values: Mapping[str, Any]) -> tuple:
    """Return the dataclasses with `values` by the names of their fields. A field without a value has its default."""
    return tuple(kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values}) for kind in kinds)


def split_flags(arguments: list[str]) -> list[list[str]]:
    """Return each flag with the words that follow it. The first group may have words without a flag."""
    groups: list[list[str]] = []
    for argument in arguments:
        if is_flag(argument) or not groups:
            groups.append([])
        groups[-1].append(argument)
    return groups


def is_flag(argument: str) -> bool:
    """Return whether an argument is a flag. A value that starts with `--` contains a space."""
    return argument.startswith("--") and " " not in argument.split("=")[0]


def flag_name(flag: str) -> str:
    """Return the name of the field that a flag sets."""
    return flag.removeprefix("--").split("=")[0].replace("-", "_")


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a command and exit: 0 when done, 1 with the sentence of a `UserError` and no traceback, 130 after Ctrl-C."""
    gc.set_threshold(*interrupt.collection)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (None if stdout was closed)
    # A log file shows each line at once, and a character that the terminal cannot show does not end the run.
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    code: Any = 0
    try:
        try:
            main(sys.argv[1:])
        except SystemExit as leaving:
            code = leaving.code
        sys.stdout.flush()
    except UserError as error:
        code = _report(error)
    except BrokenPipeError:  # the reader of a pipe ended
        code = 128 + signal.SIGPIPE
        discard_stdout()
    except OSError as error:  # error of a file or folder that no earlier check covers
        if error.filename is None and error.errno not in FULL_DISK:
            raise
        code = _report(UserError(": ".join(str(part) for part in (error.filename, error.strerror) if part) + "."))
        discard_stdout()
    except KeyboardInterrupt as error:
        if reports_for_all():
            print(str(error) or "interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)


def reports_for_all() -> bool:
    """Return whether this process prints what all processes of its launcher would print."""
    return os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ  # a cluster may set RANK


def _report(error: UserError) -> int:
    """Print the problem and return the exit code.
    Usually all processes of a job find the same problem and rank 0 reports it. A problem of one machine alone is
    reported by the first process of that machine."""
    rank = os.environ.get("RANK", "0")
    if reports_for_all() or (os.environ.get("LOCAL_RANK", rank) == "0" and not error.is_reported):
        for sentence in printable(str(error), sys.stderr).splitlines():
            line = f"error{f' (rank {rank})' if rank != '0' else ''}: {sentence}"
            width = shutil.get_terminal_size().columns if sys.stderr.isatty() else len(line)
            line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False, expand_tabs=False)
            print(line, file=sys.stderr, flush=True)
    elif not error.is_reported:  # wait: when one process ends, the launcher ends the reporting process
        time.sleep(REPORT_SECONDS)
    return 1


def _switch(word: str) -> bool:
    """Return the truth value of a word. Raise an `ArgumentTypeError` for another word."""
    if word.lower() not in SWITCH:
        raise ArgumentTypeError(f"{word!r} is neither true nor false; a file needs a flag of its own")
    return SWITCH[word.lower()]


def _program() -> str:
    """Return the command of this process in the form that a user types."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {module.name}" if module is not None else f"python {Path(sys.argv[0]).name}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _entry(name: str, text: str, column: int, width: int) -> str:
    """Return a help entry: the name, and its text from `column` on, on the next line if the name is too long."""
    indent = " " * column
    lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    name = f"  {name}"
    return "\n".join([name, *lines] if len(name) > column - 2 else [name + lines[0][len(name) :], *lines[1:]])
