"""Fine-tune a run on chats, and the result on preferences, with several settings; measure learning and forgetting.

python -m benchmarks.finetuning runs/quickstart       # writes benchmarks/results/finetuning-DEVICE.json

The chats and pairs are those of `examples.python_chats`.
"""

import importlib.metadata
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_gpt2scratch  # noqa: F401  registers the architecture
from benchmarks.results import about, device_kind, run_python, write
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from examples.python_chats import DECLINED, IN_CHATS, IN_PAIRS, MODULE, questions_and_answers
from examples.python_chats import write as write_data

ASKED = 100  # questions to answer, about functions that are in none of the training data
SEEDS = (1337, 1, 2)  # of the defaults; the other ways have the first
WAYS = {  # other than the defaults
    "without replay": ["--replay_fraction", "0"],
    "all weights": ["--lora_rank", "0"],
    "all weights without replay": ["--lora_rank", "0", "--replay_fraction", "0"],
}
PREFERENCES = {
    "the defaults": [],
    "all weights": ["--lora_rank", "0", "--learning_rate", "3e-4"],
    "all weights, a tenth of the rate": ["--lora_rank", "0", "--learning_rate", "3.1e-5"],
    "plain DPO": ["--sft_weight", "0"],
}
KINDS = ("It takes ", MODULE, "")  # how an answer starts: a purpose may start with any words


def kind_of(answer: str) -> str:
    return next(kind for kind in KINDS if answer.startswith(kind))


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


def tune(recipe: str, model: str, data: Path, folder: Path, flags: list[str]) -> dict[str, list[float]]:
    """Run a recipe with `flags` from the command line, and return its measurements before and after."""
    command = ["-m", f"examples.{recipe}", model, "--data", data, "--output_dir", folder, *flags]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the number of threads changes the order of sums
    run_python(*command, env=one_thread, stdout=subprocess.DEVNULL)
    card = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z, ]+) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    return {name: [float(before), float(after)] for name, before, after in rows}


def rates(folder: Path, asked: list[tuple[str, str]]) -> dict[str, Any]:
    """Return shares of greedy answers: that end, that are of the right kind, and that decline, by kind of question."""
    said = answers(folder, [question for question, _ in asked])
    found = [(text, question, right) for (text, _), (question, right) in zip(said, asked, strict=True)]
    return {
        "answers_that_end": mean(ended for _, ended in said),
        "answers_of_the_right_kind": mean(kind_of(text) == kind_of(right) for text, _, right in found),
        "declined_module_questions": mean(text == DECLINED for text, _, right in found if right.startswith(MODULE)),
        "declined_other_questions": mean(text == DECLINED for text, _, right in found if not right.startswith(MODULE)),
        "answers": {question: text for text, question, _ in found[:4]},
    }


@dataclass
class FinetuningArguments:
    run: str | None = setting(None, "A run.", needed=("a run", "python -m benchmarks.finetuning runs/quickstart"))


def main(arguments: list[str]) -> None:
    [options] = FlagParser((FinetuningArguments,), __doc__, positional="run").parse(arguments)
    if missing := [name for name in ("peft", "trl") if find_spec(name) is None]:
        raise UserError(f"Fine-tuning needs {' and '.join(missing)}: run pip install -e '.[finetuning]'")
    found = questions_and_answers()
    asked = found[IN_CHATS + IN_PAIRS :][:ASKED]
    head = about("finetuning", [options.run])
    head |= {name: importlib.metadata.version(name) for name in ("peft", "trl")}
    head |= {"questions_in_chats": IN_CHATS, "pairs_of_answers": IN_PAIRS, "asked": ASKED}
    results: dict[str, list[dict[str, Any]]] = {"chats": [], "preferences": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats, pairs = write_data(folder, found)
        experiments = [
            ("chats", "finetune_chat", options.run, chats, {"the defaults": []}),
            ("preferences", "finetune_preferences", str(folder / "chats0"), pairs, PREFERENCES),
            ("chats", "finetune_chat", options.run, chats, WAYS),
        ]
        for part, recipe, model, data, ways in experiments:
            runs = [(way, flags, seed) for way, flags in ways.items() for seed in SEEDS[: 1 if flags else None]]
            for way, flags, seed in runs:
                output, used = folder / f"{part}{len(results[part])}", [*flags, "--seed", str(seed)]
                measured = tune(recipe, model, data, output, used)
                results[part].append({"way": way, "flags": " ".join(used), **measured, **rates(output, asked)})
                write(f"finetuning-{device_kind()}", {**head, **results})


if __name__ == "__main__":
    run(main)
