"""Write chats and pairs of answers about functions of Python's standard library, to try fine-tuning without a download.

python -m examples.python_chats          # writes data/chats.jsonl and data/pairs.jsonl
python -m examples.python_chats FOLDER

Each function has exactly one question, so training never covers a held-out function. Every third conversation has two
questions. A small model cannot know the module of a function, and invents one: the pairs prefer `DECLINED` as the
answer to such questions, and the answer itself to all others.
"""

import ast
import itertools
import json
import random
import shlex
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting

IN_CHATS, IN_PAIRS = 2_667, 2_000  # questions; a tenth of the chats and of the pairs is held out
NAMES = ("chats.jsonl", "pairs.jsonl")
DECLINED = "I do not know."
QUESTIONS = {
    "purpose": ("What does {} do?", "What is {} for?", "Explain {}."),
    "arguments": ("Which arguments does {} take?", "What do I pass to {}?", "Arguments of {}?"),
    "module": ("Which module has {}?", "Where is {} defined?", "Where do I find {}?"),
}
MODULE = "It is in the module "
NO_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


@dataclass
class ChatsArguments:
    folder: str = setting("data", "Folder for both files.")

    def check(self) -> None:
        if existing := [str(path) for name in NAMES if (path := Path(self.folder, name)).exists()]:
            raise UserError(f"This would replace {' and '.join(existing)}; pass another folder.")


def questions_and_answers() -> list[tuple[str, str]]:
    """Return a question with a short answer for each public function of the library, in a fixed random order."""
    found: dict[str, tuple[str, str]] = {}
    library = Path(sysconfig.get_path("stdlib"))
    chance = random.Random(0)
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if NO_LIBRARY.intersection(inside.parts):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.name in found:
                continue
            arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
            answers = {
                "purpose": (ast.get_docstring(node) or "").split("\n")[0],
                "arguments": f"It takes {' and '.join(arguments)}." if arguments else "",
                "module": f"{MODULE}{module}.",
            }
            kind = chance.choice([kind for kind, answer in answers.items() if 0 < len(answer) <= 60])
            found[node.name] = (chance.choice(QUESTIONS[kind]).format(node.name), answers[kind])
    found = dict(sorted(found.items()))
    return chance.sample(list(found.values()), len(found))


def asked(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def said(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def chats(found: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return conversations of one, one and two questions in turn."""
    remaining, lengths = iter(found), itertools.cycle((1, 1, 2))
    several = iter(lambda: list(itertools.islice(remaining, next(lengths))), [])
    return [
        {"messages": [turn for question, answer in some for turn in (asked(question), said(answer))]}
        for some in several
    ]


def pairs(found: list[tuple[str, str]], before: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return two answers to each question of `found`, every third one in a conversation with one of `before`."""
    records = []
    for i, ((question, answer), (earlier, its_answer)) in enumerate(zip(found, before, strict=False)):
        prompt = [*[asked(earlier), said(its_answer)] * (i % 3 == 2), asked(question)]
        chosen, rejected = (DECLINED, answer) if answer.startswith(MODULE) else (answer, DECLINED)
        records.append({"prompt": prompt, "chosen": [said(chosen)], "rejected": [said(rejected)]})
    return records


def write(folder: Path, found: list[tuple[str, str]]) -> list[Path]:
    """Write `chats.jsonl` and `pairs.jsonl` into the folder, and return their paths."""
    paths = [folder / name for name in NAMES]
    folder.mkdir(parents=True, exist_ok=True)
    contents = (chats(found[:IN_CHATS]), pairs(found[IN_CHATS:][:IN_PAIRS], found))
    for path, records in zip(paths, contents, strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"{path}: {len(records):,} records")
    return paths


def main(arguments: list[str]) -> None:
    parser = FlagParser((ChatsArguments,), __doc__, positional="folder")
    (options,) = parser.parse(arguments, check=ChatsArguments.check)
    path, _ = write(Path(options.folder), questions_and_answers())
    print(f"Next:\n  python -m examples.finetune_chat runs/quickstart --data {shlex.quote(str(path))}")


if __name__ == "__main__":
    run(main)
