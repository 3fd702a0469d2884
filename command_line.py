"""What every door shares: flat flags with a YAML file behind them, and user errors that end in one sentence."""

import difflib
import json
import os
import re
import shutil
import signal
import sys
import textwrap
from argparse import Action, ArgumentError
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser

from errors import UserError

# Ways to say the same thing, how long a run is: one given as a flag clears all of them in the file.
HELP = frozenset({"-h", "--help", "--help_all"})
EXCLUSIVE = frozenset({"max_steps", "num_train_epochs", "max_train_tokens"})


class FlagParser(HfArgumentParser):
    """Transformers' parser over dataclasses, with whole flag names only and errors that are one sentence."""

    def __init__(
        self,
        dataclass_types: Iterable[type],
        description: str,
        positional: str | None = None,
        main: tuple[str, ...] = (),
    ):
        """`positional` names the field that a first argument without a flag fills; `main`, the flags that `--help` explains,
        where there are too many to explain them all."""
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False, description=description)
        self.positional = positional
        self.main = main
        self.add_argument("--config", metavar="FILE.yaml", help="A YAML file of settings; flags override it.")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:].rstrip('.')}. See --help.")

    @property
    def names(self) -> list[str]:
        return [field.name for dataclass_type in self.dataclass_types for field in fields(dataclass_type)]

    def parse(self, arguments: list[str], default_config: Path | None = None) -> tuple[tuple, set[str]]:
        """The filled dataclasses, and the names of the fields the user set: by flag, or in a config file of their own.

        `default_config` is read where no `--config` is given, and does not count as the user's word.

        Raises:
            UserError: an unknown flag or key (the nearest known one is named), a value of the wrong type, a missing
                or unreadable file.
        """
        if self.positional and arguments and not arguments[0].startswith("-"):
            arguments = [f"--{self.positional}", *arguments]
        named = self.named_flags(arguments)
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise UserError("\n".join(f"--{name} is given twice; give it once, with all its values." for name in twice))
        given = set(named)
        config_path = self.named_config(arguments) or default_config
        from_file = read_yaml(config_path, self.names) if config_path else {}
        if given & EXCLUSIVE:
            from_file = {name: value for name, value in from_file.items() if name not in EXCLUSIVE}
        checked = self._checked(from_file, config_path)
        if asked := HELP & set(arguments):
            print(self.describe("--help_all" in asked or not self.main, checked, config_path))
            sys.exit(0)
        self.set_defaults(**checked)
        namespace, rest = self.parse_known_args(arguments)
        if rest:
            raise UserError(_unknown("flag", rest[0], [f"--{name}" for name in [*self.names, "config", "help_all"]]))
        filled = []
        for dataclass_type in self.dataclass_types:
            filled.append(dataclass_type(**{f.name: getattr(namespace, f.name) for f in fields(dataclass_type)}))
        if config_path is not None and config_path != default_config:
            given |= from_file.keys()
        return tuple(filled), given

    def _checked(self, content: dict[str, Any], path: Path | None) -> dict[str, Any]:
        """What a file says, its types and choices checked as argparse checks a flag's (and never a default's)."""
        actions = {action.dest: action for action in self._actions}
        hints = {name: hint for part in self.dataclass_types for name, hint in get_type_hints(part).items()}
        checked, problems = {}, []
        for name, value in content.items():
            action = actions[name]
            takes_list = action.nargs == "+"
            if value is None and type(None) in get_args(hints[name]):
                checked[name] = None
            elif value is None:
                problems.append(f"{name} in {path} has no value; give it one or leave the line out.")
            elif isinstance(value, list) and not takes_list:
                problems.append(f"{name} in {path} is {value}; it takes one value, not a list.")
            else:
                try:
                    items = [
                        self._get_value(action, str(item)) for item in (value if isinstance(value, list) else [value])
                    ]
                    for item in items:
                        self._check_value(action, item)
                    checked[name] = items if takes_list else items[0]
                except ArgumentError as error:
                    problems.append(f"{name} in {path}: {error.message}.")
        if problems:
            raise UserError("\n".join(problems))
        return checked

    def describe(self, everything: bool, from_file: dict[str, Any], path: Path | None) -> str:
        """Return the text of `--help_all`, or of `--help`: the main flags, and the groups of all.

        Each flag has its default in the code, and the value `from_file` at `path` where that differs.
        """
        width = min(shutil.get_terminal_size().columns, 120)

        def entry(name: str) -> str:
            action = next(action for action in self._actions if action.dest == name)
            notes = [] if action.default in (None, "", []) else [f"default: {_shown(action.default)}"]
            if name in from_file and from_file[name] != action.default:
                notes.append(f"{path.stem}: {_shown(from_file[name])}")
            text = f"{action.help} ({'; '.join(notes)})" if notes else action.help
            return _entry(f"--{name} {_metavar(action)}".rstrip(), text, 28, width)

        groups = {
            re.sub("Arguments$|Door$", "", kind.__name__): [field.name for field in fields(kind)]
            for kind in self.dataclass_types
        }
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
        sections.append("\n".join([f"All {len(self.names)} flags by group (--help_all explains each):", *lines]))
        return "\n\n".join(sections)

    @staticmethod
    def named_flags(arguments: list[str]) -> list[str]:
        return [argument[2:].split("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]

    def named_config(self, arguments: list[str]) -> Path | None:
        for position, argument in enumerate(arguments):
            if argument == "--config" and position + 1 < len(arguments):
                return Path(arguments[position + 1])
            if argument.startswith("--config="):
                return Path(argument.removeprefix("--config="))
        return None


def read_yaml(path: Path, known: list[str] | None = None) -> dict[str, Any]:
    """The keys and values of a flat YAML file; any keys where no known ones are given.

    Raises:
        UserError: no such file, not YAML, not a flat mapping, or keys that are not in `known`.
    """
    if not path.is_file():
        siblings = sorted(str(path.parent / other.name) for other in path.parent.glob("*.yaml"))
        nearest = difflib.get_close_matches(str(path), siblings, n=1, cutoff=0.0)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise UserError(f"There is no config file {path}.{hint}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a list of `name: value` lines, but holds a {type(content).__name__}.")
    unknown = [_unknown("key", str(key), known) for key in content if known is not None and key not in known]
    nested = [f"{key} in {path} is nested; keys are flat." for key, value in content.items() if isinstance(value, dict)]
    if unknown or nested:
        raise UserError("\n".join([f"{path}: {sentence}" for sentence in unknown] + nested))
    return content


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a door and exits: 0 when done, 1 with the sentence of a `UserError` and no traceback, 130 after Ctrl-C."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout is not None:  # as it is where it was closed
        sys.stdout.reconfigure(errors="replace")  # whatever a model writes, a terminal without UTF-8 ends no run
    try:
        main(sys.argv[1:])
    except UserError as error:
        # Every process of a job finds the same problem, and one says it; but it may be that of one machine alone.
        rank = os.environ.get("RANK", "0")
        if rank == "0" or (os.environ.get("LOCAL_RANK", rank) == "0" and not error.is_said):
            for sentence in str(error).splitlines():
                print(f"error{f' (rank {rank})' if rank != '0' else ''}: {sentence}", file=sys.stderr, flush=True)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(0)


def _program() -> str:
    """The command of this process, as a user types it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {module.name}" if module is not None else f"python {Path(sys.argv[0]).name}"


def _metavar(action: Action) -> str:
    if action.metavar is not None or action.nargs == "?":  # a switch
        return action.metavar or ""
    one = f"{{{','.join(action.choices)}}}" if action.choices else {int: "N", float: "X"}.get(action.type, "TEXT")
    return f"{one} ..." if action.nargs == "+" else one


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _entry(name: str, text: str, column: int, width: int) -> str:
    """A name and its text, which begins at `column`, on the next line where the name is too long."""
    lines = textwrap.wrap(
        text, width, initial_indent=" " * column, subsequent_indent=" " * column, break_on_hyphens=False
    )
    name = f"  {name}"
    return "\n".join([name, *lines] if len(name) > column - 2 else [name + lines[0][len(name) :], *lines[1:]])


def _unknown(kind: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.split("=")[0], known, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else " See --help for all of them."
    return f"Unknown {kind} {name}.{hint}"
