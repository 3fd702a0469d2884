"""Write chats and pairs of answers about the functions of Python's standard library, to try the recipes without a download.

python -m examples.python_chats          # writes data/chats.jsonl and data/pairs.jsonl
python -m examples.python_chats FOLDER

Each function has exactly one question, so training never covers a held-out function. A small model cannot know the module of a
function, and invents one: the pairs prefer `DECLINED` as the answer to such questions, and the answer itself to all others.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from command_line import run
from errors import UserError

CHATS = 2_000  # and as many pairs, about other functions; a tenth is held out
DECLINED = "I do not know."
QUESTIONS = {
    "purpose": ("What does {} do?", "What is {} for?", "Explain {}."),
    "arguments": ("Which arguments does {} take?", "What do I pass to {}?", "Arguments of {}?"),
    "module": ("Which module has {}?", "Where is {} defined?", "Where do I find {}?"),
}
MODULE = "It is in the module "
NO_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


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


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair(question: str, answer: str) -> dict[str, Any]:
    chosen, rejected = (DECLINED, answer) if answer.startswith(MODULE) else (answer, DECLINED)
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def write(folder: Path, found: Iterable[tuple[str, str]]) -> tuple[Path, Path]:
    """Write `chats.jsonl` and `pairs.jsonl` into the folder, and return their paths. Raise a `UserError` if one exists."""
    paths = folder / "chats.jsonl", folder / "pairs.jsonl"
    if existing := [str(path) for path in paths if path.exists()]:
        raise UserError(f"{' and '.join(existing)} already exist; move them, or pass another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    found = list(found)
    for path, make, part in zip(paths, (chat, pair), (found[:CHATS], found[CHATS : 2 * CHATS]), strict=True):
        path.write_text("".join(json.dumps(make(*said)) + "\n" for said in part), encoding="utf-8")
    return paths


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise UserError("Pass at most one folder: python -m examples.python_chats data.")
    chats, pairs = write(Path(*arguments or ["data"]), questions_and_answers())
    print(
        f"{chats} and {pairs}: {CHATS:,} records each. Next:\n  python -m examples.finetune_chat runs/quickstart --data {chats}"
    )


if __name__ == "__main__":
    run(main)
