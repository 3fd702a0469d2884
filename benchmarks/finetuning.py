"""Fine-tune a run into a chat model with several settings, and measure losses, forgetting and whether answers end.

python -m benchmarks.finetuning runs/quickstart       # writes benchmarks/results/finetuning-DEVICE.json

The chats are about the functions of Python's standard library, taken from its sources. Each function has exactly one chat, so
training never covers a held-out function.
"""

import ast
import importlib.metadata
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from benchmarks.results import REPOSITORY, about, device_kind, write
from command_line import run
from errors import UserError

CHATS = 540
ASKED = 100  # questions to answer, about functions that are in none of the training chats
DEFAULT_SEEDS = (1337, 1, 2)
WAYS = {
    "the defaults": [],
    "without replay": ["--replay_fraction", "0"],
    "0.0002 without replay": ["--learning_rate", "2e-4", "--replay_fraction", "0"],
    "all weights": ["--lora_rank", "0"],
    "all weights without replay": ["--lora_rank", "0", "--replay_fraction", "0"],
    "6 epochs": ["--num_train_epochs", "6"],
}
QUESTIONS = {
    "purpose": ("What does {} do?", "What is {} for?", "Explain {}."),
    "arguments": ("Which arguments does {} take?", "What do I pass to {}?", "Arguments of {}?"),
    "module": ("Which module has {}?", "Where is {} defined?", "Where do I find {}?"),
}
KINDS = ("It takes ", "It is in the module ", "")  # how an answer starts: a purpose may start with any words
NO_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def library_chats() -> list[tuple[str, str]]:
    """Return (question, answer) pairs in a fixed random order: short answers, one pair per function."""
    chats: dict[str, tuple[str, str]] = {}
    library = Path(sysconfig.get_path("stdlib"))
    chance = random.Random(0)
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if NO_LIBRARY.intersection(inside.parts):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.name in chats:
                continue
            arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
            answers = {
                "purpose": (ast.get_docstring(node) or "").split("\n")[0],
                "arguments": f"It takes {' and '.join(arguments)}." if arguments else "",
                "module": f"It is in the module {module}.",
            }
            kind = chance.choice([kind for kind, answer in answers.items() if 0 < len(answer) <= 60])
            question = chance.choice(QUESTIONS[kind]).format(node.name)
            chats[node.name] = (question, answers[kind])
    chats = dict(sorted(chats.items()))
    return chance.sample(list(chats.values()), len(chats))


def kind_of(answer: str) -> str:
    return next(kind for kind in KINDS if answer.startswith(kind))


def write_chats(path: Path, chats: list[tuple[str, str]]) -> Path:
    records = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in chats
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@torch.no_grad()
def answers(folder: Path, questions: list[str]) -> list[tuple[str, bool]]:
    """Return the greedy answer to each question, and whether it ended before the context was full."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    said = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_length=model.config.n_positions)[0]
        ended = ids[-1].item() in model.generation_config.eos_token_id
        said.append((tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True), ended))
    return said


def measure(
    run_folder: str, data: Path, asked: list[tuple[str, str]], folder: Path, flags: list[str]
) -> dict[str, Any]:
    """Run the recipe with `flags` from the command line, and return losses and rates of its answers."""
    command = [
        sys.executable,
        "-m",
        "examples.finetune_chat",
        run_folder,
        "--data",
        str(data),
        "--output_dir",
        str(folder),
    ]
    subprocess.run([*command, *flags], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    card = (folder / "README.md").read_text(encoding="utf-8")
    losses = {
        name: [float(before), float(after)]
        for name, before, after in re.findall(r"^\| (chats|original) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    }
    said = answers(folder, [question for question, _ in asked])
    of_the_kind = sum(kind_of(text) == kind_of(right) for (text, _), (_, right) in zip(said, asked, strict=True))
    return {
        "flags": " ".join(flags),
        **{f"{name}_loss": losses[name] for name in losses},
        "answers_that_end": sum(ended for _, ended in said) / len(said),
        "answers_of_the_right_kind": of_the_kind / len(said),
        "answers": {question: text for (question, _), (text, _) in zip(asked[:4], said, strict=False)},
    }


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("Pass exactly one run folder: python -m benchmarks.finetuning runs/quickstart.")
    [run_folder] = arguments
    chats = library_chats()
    asked = chats[CHATS : CHATS + ASKED]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_chats(Path(folder) / "chats.jsonl", chats[:CHATS])
        for way, flags in WAYS.items():
            for seed in DEFAULT_SEEDS if not flags else DEFAULT_SEEDS[:1]:
                model = Path(folder) / f"model{len(results)}"
                results.append({"way": way} | measure(run_folder, data, asked, model, [*flags, "--seed", str(seed)]))
                print(json.dumps(results[-1]), flush=True)
    libraries = {name: importlib.metadata.version(name) for name in ("peft", "trl")}
    head = {**about("finetuning", [run_folder]), **libraries, "chats": CHATS, "asked": ASKED}
    write(f"finetuning-{device_kind()}", {**head, "ways": results})


if __name__ == "__main__":
    run(main)
