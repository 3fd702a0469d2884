"""Command lines: flat flags, defaults from a YAML file, and user errors that end in one sentence."""

import difflib
import errno
import json
import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from common import limits
from common.errors import Problems, UserError
from common.settings_file import read_yaml

REPORT_SECONDS = 10.0  # time for which other processes of a job wait while one reports a shared problem
HELP = frozenset({"-h", "--help", "--help_all"})
SWITCHED_ON, SWITCHED_OFF = {"true", "yes", "t", "y", "1"}, {"false", "no", "f", "n", "0"}
LONGEST_ERROR = 400  # maximum characters of an argparse message, which quotes the input
# Options of `accelerate launch`, which does not read them after the name of the script.
OF_LAUNCHER = set("num_processes num_machines machine_rank main_process_ip main_process_port multi_gpu gpu_ids".split())
# Three ways to set the length of a run. A flag for one of them clears all three in the file.
EXCLUSIVE = frozenset({"max_steps", "num_train_epochs", "max_train_tokens"})


class FlagParser(ArgumentParser):
    """Parser over dataclasses with the flags of Transformers' `HfArgumentParser`, whose import takes 0.6 s. Flag names must be
    whole, and errors are one sentence."""

    def __init__(
        self, kinds: Iterable[type], description: str, positional: str | None = None, main: tuple[str, ...] = ()
    ):
        """Add a flag for each field of the dataclasses.
        `positional` names the field that a first argument without a flag sets. `main` lists the flags that `--help` explains
        when there are too many to explain all of them."""
        super().__init__(allow_abbrev=False, add_help=False, description=description)
        self.kinds = tuple(kinds)
        self.positional = positional
        self.main = main
        self.limits = {field.name: field.metadata for kind in self.kinds for field in fields(kind)}
        self.add_argument("--config", metavar="FILE.yaml", help="A YAML file of settings; flags override it.")
        for kind in self.kinds:
            hints = get_type_hints(kind)
            for field in fields(kind):
                self._add_flag(field, hints[field.name])

    def _add_flag(self, field: Field, hint: Any) -> None:
        """Add the flag of a field: `--name` and `--na-me`, and for a switch that is on by default `--no_name`."""
        default = field.default if field.default_factory is MISSING else field.default_factory()
        options = {"default": default, **{key: field.metadata[key] for key in field.metadata if key not in limits.KEYS}}
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        if hint is bool:
            options |= {"nargs": "?", "const": True, "type": _switch}
        elif get_origin(hint) is Literal:
            options["choices"] = get_args(hint)
        elif get_origin(hint) is list:
            options |= {"nargs": "+", "type": get_args(hint)[0]}
        else:
            options["type"] = hint
        self.add_argument(*_spellings(field.name), **options)
        if hint is bool and default is True:
            self.add_argument(*_spellings(f"no_{field.name}"), action="store_false", dest=field.name, default=True)

    def error(self, message: str) -> NoReturn:
        message = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]} ..."
        raise UserError(f"{message[0].upper()}{message[1:].rstrip('.')}. See --help.")

    def parse(
        self, arguments: list[str], default_config: Path | None = None, check: Callable[..., None] | None = None
    ) -> tuple:
        """Return the filled dataclasses. Afterwards, `in_file` has the names of the settings with a value in the file that was read.
        `default_config` is read if no `--config` is given. `check` receives the dataclasses and raises a `UserError` for wrong
        values. All problems are raised together, one per line, including unknown flags and keys, values of the wrong type, and a
        missing or unreadable file."""
        if self.positional and arguments and not arguments[0].startswith("-"):
            arguments = [f"--{self.positional}", *arguments]
        named = self.value_of("config", arguments)
        config_path = default_config if named is None else Path(named)
        found = Problems()
        try:
            content = read_yaml(config_path, as_text=True) if config_path else {}
        except UserError as error:
            found.add(str(error))
            content, check = {}, None  # the values in the file are unknown
        if EXCLUSIVE & self.named_flags(arguments):
            content = {name: value for name, value in content.items() if name not in EXCLUSIVE}
        from_file = self._checked(content, config_path, found)
        self.in_file = {name for name, value in from_file.items() if value is not None}
        if asked := HELP & set(arguments):
            print(self.describe("--help_all" in asked or not self.main, from_file, config_path))
            sys.exit(0)
        self.set_defaults(**from_file)
        good = self._good_flags(arguments, found)
        check = None if "config" in found.unsure else check
        found.unsure -= self.named_flags(good)
        namespace = self.parse_args(good)
        filled = [kind(**{f.name: getattr(namespace, f.name) for f in fields(kind)}) for kind in self.kinds]
        if not self._lacks_needed(filled, found):
            found.add_of(check, filled)
        found.refuse()
        return tuple(filled)

    def _lacks_needed(self, filled: list[Any], found: Problems) -> bool:
        """Return whether a required setting has no value. Add a problem for each missing setting."""
        needed = {f.name: f.metadata["needed"] for part in filled for f in fields(part) if "needed" in f.metadata}
        empty = [name for part in filled for name in vars(part).keys() & needed if not getattr(part, name)]
        if missing := [needed[name] for name in needed if name in set(empty) - found.unsure]:
            found.add(f"Name {' and '.join(noun for noun, _ in missing)}: {missing[0][1].format(program=_program())}")
        return bool(empty)

    def _good_flags(self, arguments: list[str], found: Problems) -> list[str]:
        """Return the arguments without the wrong ones. Each flag is parsed separately, since argparse stops at the first error."""
        groups: list[list[str]] = []
        for argument in arguments:
            if _is_flag(argument) or not groups:
                groups.append([])
            groups[-1].append(argument)
        good, seen = [], set()
        for group in groups:
            flag = group[0]
            name = _name(flag)
            if flag.startswith("--") and name in seen:
                found.add(f"--{name} is given twice; give it once, with all its values.", name)
                continue
            seen.add(name)
            try:
                parsed, rest = self.parse_known_args(group)
            except UserError as error:
                found.add(str(error), name)
                continue
            main = self.positional or next((main for main in self.main if main != "config"), None)
            wanted = "config" if group[-1].endswith((".yaml", ".yml")) else main
            is_value = (rest == group and not flag.startswith("-")) or (len(rest) == 1 and os.path.exists(rest[0]))
            if is_value and wanted and wanted not in self.named_flags(arguments):
                found.add(f"{rest[0]} has no flag. Did you mean --{wanted} {' '.join(rest)}?", wanted, name)
            elif rest and flag != rest[0]:
                found.add(f"{rest[0]} after {flag} is one value too many; quote a pattern or spaces.", name)
            elif rest:
                self._add_unknown("flag", rest[0], found)
            elif problem := limits.problem(name, getattr(parsed, name), self.limits.get(name, {})):
                found.add(problem, name)
            else:
                good += group
        return good

    def _checked(self, content: dict[str, Any], path: Path | None, found: Problems) -> dict[str, Any]:
        """Return the valid settings of a file. Types and choices are checked by argparse's rules for flags."""
        actions = {action.dest: action for action in self._actions}
        hints = {name: hint for part in self.kinds for name, hint in get_type_hints(part).items()}
        checked = {}
        for name, value in content.items():
            if name not in hints:
                self._add_unknown("key", str(name), found, f"{path}: ")
                continue
            action = actions[name]
            takes_list = action.nargs == "+"
            if value is None and type(None) in get_args(hints[name]):
                checked[name] = None
            elif value is None:
                found.add(f"{name} in {path} has no value; set one or remove the line.", name)
            elif isinstance(value, list) and None in value:
                found.add(f"{name} in {path} has an item without a value; set one or remove the item.", name)
            elif isinstance(value, dict):
                found.add(f"{name} in {path} is nested; keys are flat.", name)
            elif isinstance(value, list) and not takes_list:
                found.add(f"{name} in {path} is {', '.join(value)}; it takes one value, not a list.", name)
            else:
                try:
                    items = [self._get_value(action, item) for item in (value if isinstance(value, list) else [value])]
                    for item in items:
                        self._check_value(action, item)
                except ArgumentError as error:
                    found.add(f"{name} in {path}: {error.message[:LONGEST_ERROR]}.", name)
                    continue
                if problem := limits.problem(f"{name} in {path}", items, self.limits[name]):
                    found.add(problem, name)
                else:
                    checked[name] = items if takes_list else items[0]
        return checked

    def _add_unknown(self, kind: str, given: str, found: Problems, where: str = "") -> None:
        dashes, hint = "--" if kind == "flag" else "", "See --help for the list."
        other_names = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
        others = other_names.get(_name(given), [])
        known = [*self.limits, *(["config", "help_all"] if dashes else [])]
        if names := [name for name in others if name in self.limits] or [name for name in others if name == "config"]:
            hint = f"Use {', '.join(dashes + name for name in names)}."
        elif dashes and _name(given) in OF_LAUNCHER:
            hint = "It is an option of accelerate launch: name it before the script (docs/multi_gpu.md)."
        elif names := difflib.get_close_matches(_name(given), known, n=1):
            hint = f"Did you mean {dashes}{names[0]}?"
        found.add(f"{where}Unknown {kind} {given}. {hint}", *names)

    def describe(self, everything: bool, from_file: dict[str, Any], path: Path | None) -> str:
        """Return the text of `--help_all`, or of `--help`: the main flags and the names of all groups.
        Each flag is shown with its default in the code and, if that differs, its value in the file at `path`."""
        width = min(shutil.get_terminal_size().columns, 120)

        def entry(name: str) -> str:
            action = next(action for action in self._actions if action.dest == name)
            notes = ["the flag name may be omitted"] if name == self.positional else []
            notes += [] if action.default in (None, "", []) else [f"default: {_shown(action.default)}"]
            if name in from_file and from_file[name] != action.default:
                notes.append(f"{path.stem}: {_shown(from_file[name])}")
            text = f"{action.help} ({'; '.join(notes)})" if notes else action.help
            return _entry(f"--{name} {_metavar(action)}".rstrip(), text, 28, width)

        groups = {kind.__name__.removesuffix("Arguments"): [f.name for f in fields(kind)] for kind in self.kinds}
        positional = f"[{self.positional.upper()}] " if self.positional else ""
        usage = f"usage: {_program()} {positional}[--config FILE.yaml] [--FLAG VALUE ...]"
        sections = [textwrap.fill(text, width) for text in (usage, self.description)]
        if everything:
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

    @staticmethod
    def named_flags(arguments: list[str]) -> set[str]:
        return {_name(argument) for argument in arguments if _is_flag(argument)}

    @staticmethod
    def value_of(name: str, arguments: list[str]) -> str | None:
        """Return the value of a flag before all flags are checked, or None if it is missing or cannot name a file."""
        for argument, following in pairwise([*arguments, None]):
            if _is_flag(argument) and _name(argument) == name:
                value = argument.split("=", 1)[1] if "=" in argument else following
                return value if limits.problem(name, value, {}) is None else None
        return None


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a command and exit: 0 when done, 1 with the sentence of a `UserError` and no traceback, 130 after Ctrl-C."""
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
    except BrokenPipeError:
        _leave_stdout()
    except OSError as error:  # error of a file or folder that no earlier check covers
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        code = _report(UserError(": ".join(str(part) for part in (error.filename, error.strerror) if part) + "."))
        _leave_stdout()
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)


def _report(error: UserError) -> int:
    """Print the problem and return the exit code.
    Usually all processes of a job find the same problem and rank 0 reports it. A problem of one machine alone is reported by
    the first process of that machine."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or (os.environ.get("LOCAL_RANK", rank) == "0" and not error.is_reported):
        for sentence in str(error).splitlines():
            line = f"error{f' (rank {rank})' if rank != '0' else ''}: {sentence}"
            width = shutil.get_terminal_size().columns if sys.stderr.isatty() else len(line)
            line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False, expand_tabs=False)
            print(line, file=sys.stderr, flush=True)
    elif not error.is_reported:  # wait: when one process ends, the launcher ends the reporting process
        time.sleep(REPORT_SECONDS)
    return 1


def _leave_stdout() -> None:
    """Discard buffered output when stdout has no reader or its disk is full."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _switch(value: str) -> bool:
    """Return the truth value of a word. Raise an `ArgumentTypeError` for another word."""
    is_on = value.lower() in SWITCHED_ON
    if not is_on and value.lower() not in SWITCHED_OFF:
        raise ArgumentTypeError(f"{value!r} is neither true nor false; a file needs a flag of its own")
    return is_on


def _is_flag(argument: str) -> bool:
    """Return whether argparse reads the argument as a flag: a value that starts with `--` contains a space."""
    return argument.startswith("--") and " " not in argument.split("=")[0]


def _name(flag: str) -> str:
    """Return the name of the field that a flag sets."""
    return flag.removeprefix("--").split("=")[0].replace("-", "_")


def _program() -> str:
    """Return the command of this process in the form that a user types."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {module.name}" if module is not None else f"python {Path(sys.argv[0]).name}"


def _metavar(action: Action) -> str:
    if action.metavar is not None or action.nargs == "?":  # the flag can be a switch
        return action.metavar or ""
    one = f"{{{','.join(action.choices)}}}" if action.choices else {int: "N", float: "X"}.get(action.type, "TEXT")
    return f"{one} ..." if action.nargs == "+" else one


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _entry(name: str, text: str, column: int, width: int) -> str:
    """Return a help entry: the name, and its text from `column` on, on the next line if the name is too long."""
    indent = " " * column
    lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    name = f"  {name}"
    return "\n".join([name, *lines] if len(name) > column - 2 else [name + lines[0][len(name) :], *lines[1:]])
