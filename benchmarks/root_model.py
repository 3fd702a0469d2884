"""Train the model in the root of this repository, measure it, and write its files and recorded figures.

python -m benchmarks.root_model            # train (an unfinished run resumes), measure, write: two hours on two cores
python -m benchmarks.root_model --check    # train the first 20 steps again and compare their losses: minutes
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.results import REPOSITORY, RESULTS, about, commit, cpu_name, run_python, write
from common import schema
from common.atomic import file_sha256
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from modeling_gpt2scratch.configuration_gpt2scratch import AUTO_MAP
from modeling_gpt2scratch.loading import CONFIG, GENERATION, TOKENIZER, WEIGHTS
from tokenizer.corpus.named_data import licenses
from training.checkpoints.loading import load_any_model
from training.checkpoints.metrics import read_events, read_metrics
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.status import hours
from training.config import read_config
from training.data.run_data import open_store
from training.evaluation.sampling import continue_texts, generation_config

NAME, PRESET = "root-model", "presets/python_packages.yaml"
RUN, QUICKSTART = "runs/python_packages", "runs/quickstart"
FILES = (CONFIG, GENERATION, WEIGHTS, *TOKENIZER[:2])
FIRST_STEPS = 20
TOLERANCE = 0.02  # nats between types of CPU, and versions of PyTorch
FUNCTIONS, BATCH, NEW_TOKENS, SAMPLES = 200, 40, 240, 5
SAMPLING = {"prompt": "\n\n\ndef", "temperature": 0.8, "top_k": 50, "max_new_tokens": NEW_TOKENS, "seed": 0}
FIXED_TEXT = '''\
def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file without line breaks."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]
'''


@dataclass
class RootModelArguments:
    check: bool = setting(False, "Train the first 20 steps again, and compare their losses with the recorded ones.")


def train(config: str, folder: str) -> RunFolder:
    """Train a preset, or resume its run."""
    if run_python("train_accelerate.py", "--config", config, "--output_dir", folder, check=False).returncode:
        raise UserError(f"The run in {folder} did not end; run this command again to resume it.")
    return RunFolder(REPOSITORY / folder)


def write_files(run_folder: RunFolder) -> dict[str, str]:
    """Write the run's model to the root, with its weights in bfloat16. Return the SHA-256 of each file by name."""
    model, tokenizer = load_any_model(run_folder.model)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
        config["auto_map"] = {name: f"modeling_gpt2scratch/{place}" for name, place in AUTO_MAP.items()}
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in FILES:
            shutil.copyfile(Path(folder) / name, REPOSITORY / name)
    return {name: file_sha256(REPOSITORY / name) for name in FILES}


def sampled_functions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return functions at the top level of a file, as a model writes them."""
    torch.manual_seed(SAMPLING["seed"])
    prompt, config = SAMPLING["prompt"], generation_config(SAMPLING["temperature"], SAMPLING["top_k"])
    texts = []
    for _ in range(FUNCTIONS // BATCH):
        texts += continue_texts(model, tokenizer, prompt, BATCH, NEW_TOKENS, config)
    return [(prompt + text).strip() for text in texts]


def is_accepted(text: str) -> bool:
    """Return whether the function at the start of a text ends, before the first line with less indentation than its
    body, and is accepted by `ast.parse`."""
    body = re.search(r":[ \t]*(?:#.*)?\n\s*?\n*([ \t]+)(?=\S)", text)
    if body is None:
        return False
    lines = re.compile(r"\n([ \t]*)(?=[^\s)\]}])").finditer(text, body.end())
    end = next((line.start() for line in lines if len(line[1]) < len(body[1])), None)
    try:
        return end is not None and bool(ast.parse(text[:end].strip()))
    except (SyntaxError, ValueError):  # ValueError: a null character
        return False


def fixed_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the loss of FIXED_TEXT in nats per token, computed in float32."""
    ids = tokenizer(FIXED_TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        return model.float()(ids, labels=ids).loss.item()


def measure(run_folder: RunFolder) -> dict[str, Any]:
    """Return what docs/root_model.md states about the files in the root."""
    store = open_store(read_config(["--config", str(run_folder.config)]).recipe, print)
    flags = ("--data", store.folder, "--json", "--compare_with", QUICKSTART)
    done = run_python("-m", "training.evaluate", ".", *flags, stdout=subprocess.PIPE)
    warnings.simplefilter("ignore", SyntaxWarning)  # of code that the models write
    scores, functions = json.loads(done.stdout.splitlines()[-1]), {}
    for name in (".", QUICKSTART):
        model, tokenizer = load_any_model(REPOSITORY / name / ("" if name == "." else "model"))
        texts = sampled_functions(model, tokenizer)
        functions[name] = {"accepted": sum(map(is_accepted, texts)), "of": len(texts), "first": texts[:SAMPLES]}
        if name == ".":
            loss = fixed_loss(model, tokenizer)
    return {"scores": scores, "sampling": SAMPLING, "functions": functions, "fixed_loss": loss}


def losses(run_folder: RunFolder) -> list[list[float]]:
    return [[entry["step"], entry["loss"]] for entry in read_metrics(run_folder.metrics) if "loss" in entry]


def release() -> None:
    """Train, write the files of the root, and record what was measured."""
    quickstart, run_folder = train("presets/quickstart.yaml", QUICKSTART), train(PRESET, RUN)
    data, curve = schema.read(run_folder.facts)["data"], losses(run_folder)
    head = about("root_model", []) | {"cpu": cpu_name(), "commit": commit(), "preset": PRESET}
    head |= {"quickstart_sha256": file_sha256(quickstart.model / WEIGHTS)}
    head |= {f"{split}_sha256": data[split]["sha256"] for split in ("train", "val")}
    head |= {"hours": round(hours(read_events(run_folder.events)), 3), "losses": curve}
    result = head | {"files": write_files(run_folder)} | measure(run_folder)
    write(NAME, result | {"first_steps": first_steps()})


def first_steps() -> dict[str, Any]:
    """Train the first steps in a folder of their own. Return their losses and what these depend on: machine, text, and
    the installed packages that are the text."""
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder(Path(folder) / "run")
        command = [sys.executable, "train_accelerate.py", "--config", PRESET, "--output_dir", str(run_folder.path)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("step") and losses(run_folder)[-1][0] >= FIRST_STEPS:
                    process.terminate()
        data, curve = schema.read(run_folder.facts)["data"], losses(run_folder)
    return {
        "cpu": cpu_name(),
        "torch": about("root_model", [])["torch"],
        "packages": sorted(licenses(["python-packages"])),
        **{f"{split}_sha256": data[split]["sha256"] for split in ("train", "val")},
        "losses": [[step, loss] for step, loss in curve if step <= FIRST_STEPS],
    }


def comparison(record: dict[str, Any], again: dict[str, Any]) -> str:
    """Return how the losses of the first steps agree. Raise a `UserError` if they do not."""
    if any(record[f"{split}_sha256"] != again[f"{split}_sha256"] for split in ("train", "val")):
        versions = [
            sorted({*one["packages"]} - {*other["packages"]}) for one, other in ((record, again), (again, record))
        ]
        texts = (", ".join(names) or "the same packages" for names in versions)
        raise UserError(
            "The text differs: the record has {}, this machine {}; run make install with PyTorch's CPU build "
            "(docs/installation.md).".format(*texts)
        )
    pairs = zip(record["losses"], again["losses"], strict=True)
    distance = max(abs(old - new) for (_, old), (_, new) in pairs)
    is_same_machine = all(record[name] == again[name] for name in ("cpu", "torch"))
    if distance > (0 if is_same_machine else TOLERANCE):
        raise UserError(f"The losses of the first {FIRST_STEPS} steps differ from the record by up to {distance:.6f}.")
    return f"The losses of the first {FIRST_STEPS} steps are those of the record, within {distance:.6f} nats."


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((RootModelArguments,), __doc__).parse(arguments)
    if options.check:
        print(comparison(schema.read(RESULTS / f"{NAME}.json")["first_steps"], first_steps()))
    else:
        release()


if __name__ == "__main__":
    run(main)
