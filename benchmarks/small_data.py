"""Compare --budget on a small text with a GPT-2 for the same FLOPs.

python -m benchmarks.small_data                               # writes docs/small_data.md
python -m benchmarks.small_data --data my.txt --megabytes 1   # another text: its first MB
python -m benchmarks.small_data --data benchmarks/rich.yaml --megabytes 1 --init_from .   # also from a pretrained model
python -m benchmarks.small_data --workers 0                   # only write the page from the result files

Each run is `train_accelerate.py` itself, on one thread, and its saved model is scored on all held-out documents.
Finished runs are kept: the same command resumes an interrupted plan. Their results are in
benchmarks/results/small-data-*mb.jsonl.
"""

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import results
from benchmarks.performance import DOCS, measured_on, table, with_results
from benchmarks.results import (
    PACKAGES,
    RESULTS,
    about,
    as_flags,
    key,
    read_runs,
    require_same_conditions,
    run_python,
    write_runs,
)
from common import command_line
from common.errors import UserError
from common.limits import setting
from training.checkpoints.metrics import read_metrics
from training.config import read_config
from training.data.run_data import is_store, name_of

FILES = "small-data-*mb.jsonl"
FLOPS = {1.0: 2e13, 5.0: 1.6e14, 20.0: 6e14}  # about four, six and four epochs of the text
SPARING = {"sample_tokens": 0, "save_total_limit": 2}
# nanoGPT's config/train_shakespeare_char.py, for the model that --budget chooses for GPT-2.
NANOGPT = {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "lr_scheduler_type": "cosine"}
NANOGPT |= {"adam_beta2": 0.99, "weight_decay": 0.1, "initializer_range": 0.02, "tie_word_embeddings": True}
NANOGPT |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.2)
BUDGET, GPT2 = "`--budget`", "`--budget --family gpt2`"
ARMS = {BUDGET: {}, GPT2: {"family": "gpt2"}, "GPT-2, nanoGPT's settings": NANOGPT | {"family": "gpt2"}}


@dataclass
class SmallDataArguments:
    data: str = setting("state-of-the-union", "Text.")
    megabytes: float = setting(5.0, "Size of the training and validation text, from its beginning.", above=0)
    flops: float | None = setting(None, "FLOPs of a run. Default: 2e13 for 1 MB, 1.6e14 for 5, 6e14 for 20.", above=0)
    seeds: list[int] = setting([1337, 1, 2], "Seeds of the runs.")
    init_from: str | None = setting(None, "A pretrained model, from which further runs start, of one epoch each.")
    workers: int = setting(2, "Runs at once, on one thread each; 0 only writes the page.")


def token_store(options: SmallDataArguments, tokenizer: str | None = None) -> Path:
    """Return the store of the first megabytes of the text, of which a tenth, in whole documents, is held out, with a
    tokenizer of its own or a given one."""
    name = f"{name_of(options.data)}-{options.megabytes:g}mb"
    store = results.REPOSITORY / f"data/{name}{f'-of-{Path(tokenizer).resolve().name}' if tokenizer else ''}"
    if not is_store(str(store)):
        settings = {"input": options.data, "output": store, "max_bytes": f"{options.megabytes:g}MB"}
        settings |= {"validation_fraction": 0.1} | ({"tokenizer": tokenizer} if tokenizer else {"vocab_size": 2048})
        run_python("-m", "tokenizer.pretokenize", *as_flags(settings))
    return store


def tokens_of(store: Path) -> int:
    return json.loads((store / "metadata.json").read_text(encoding="utf-8"))["train"]["tokens"]


def bits_per_byte(*arguments: Any) -> float:
    """Return the score of a run, or of a model with `--data`, on all held-out documents."""
    scores = run_python("-m", "training.evaluate", *arguments, "--json", capture_output=True).stdout
    return round(json.loads(scores)["eval_bits_per_byte"], 5)


def measure(run: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Train one run in a process with one thread. Return what the run chose, the bits per byte of its validations and
    of its saved model, and the seconds of the training."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, start = Path(scratch) / "run", time.perf_counter()
        flags = as_flags(settings | {"output_dir": folder, "seed": run["seed"]} | SPARING)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {"env": environment, "check": False, "capture_output": True}
        done = run_python("train_accelerate.py", *flags, **options)
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise UserError(f"train_accelerate.py {' '.join(flags)} failed: {done.stderr[-1500:]}")
        validations = [entry for entry in read_metrics(folder / "metrics.jsonl") if "eval_loss" in entry]
        config = read_config(["--resume_from_checkpoint", str(folder)]).flat()
        score = bits_per_byte(folder)
    names = ("n_layer", "max_steps", "tokens_per_step", "weight_average", "second_target_weight", "induction_init")
    return {
        "run": run,
        "settings": {name: config.get(name) for name in names},
        "epochs": round(validations[-1]["step"] * config["tokens_per_step"] / tokens_of(settings["data"]), 2),
        "curve": [round(entry["eval_bits_per_byte"], 4) for entry in validations],
        "bits_per_byte": score,
        "seconds": round(seconds),
        **{name: about("", [])[name] for name in ("device", "date")},
    }


def main(arguments: list[str]) -> None:
    (options,) = command_line.FlagParser((SmallDataArguments,), __doc__.splitlines()[0]).parse(arguments)
    if options.workers:
        train(options, arguments)
    (DOCS / "small_data.md").write_text(page(), encoding="utf-8")
    print("docs/small_data.md is written.")


def train(options: SmallDataArguments, arguments: list[str]) -> None:
    """Train the runs that are not in the result file. Runs of one seed come before those of the next."""
    flops = options.flops or FLOPS.get(options.megabytes)
    if flops is None:
        raise UserError(f"--megabytes {options.megabytes:g} has no FLOPs of its own; name them with --flops.")
    store = token_store(options)
    path, budget = RESULTS / f"small-data-{store.name}.jsonl", {"data": store, "budget": f"{flops:g}flops"}
    arms = {name: budget | settings for name, settings in ARMS.items()}
    head, runs = read_runs(path, "run")
    facts = {"data": store.name, "train_tokens": tokens_of(store), "commit": results.commit()}
    head = head or about("small_data", arguments) | facts
    # On any machine, because the FLOPs decide the steps. A text of the same name may have changed.
    require_same_conditions(path, head, PACKAGES, train_tokens=tokens_of(store))
    if model := options.init_from:
        same_text = token_store(options, model)
        arms[f"`--init_from {model}`"] = {"data": same_text, "init_from": model}
        head["pretrained"] = {"model": model, "bits_per_byte": bits_per_byte(model, "--data", same_text)}
    costs = {arm: {"flops": flops} if "budget" in settings else {} for arm, settings in arms.items()}
    plan = [{"arm": arm, "seed": seed} | cost for seed in options.seeds for arm, cost in costs.items()]

    def work(run: dict[str, Any]) -> None:
        row = measure(run, arms[run["arm"]])
        runs[key(run)] = row
        write_runs(path, head, runs)
        print(f"{key(run)}: {row['bits_per_byte']:.4f} bits per byte, {row['seconds']} s", flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(work, [run for run in plan if key(run) not in runs]))  # raises the error of a failed run


def page() -> str:
    """Return docs/small_data.md with the runs of the result files between its markers."""
    paths = sorted(RESULTS.glob(FILES))
    columns = ["text", "run", "layers", "epochs", "bits per byte"]
    runs = table(columns, [row for path in paths for row in rows_of(path)])
    files = [read_runs(path, "run") for path in paths]
    heads = [head for head, _ in files]
    origins = [*heads, *(run for _, runs in files for run in runs.values() if "device" in run)]
    about_all = {"command": "python -m benchmarks.small_data --data TEXT"}
    about_all["device"] = " or ".join(sorted({origin["device"] for origin in origins}))
    about_all["torch"] = " or ".join(sorted({head["torch"] for head in heads}))
    dates = sorted(origin["date"] for origin in origins)
    about_all["date"] = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    measured = measured_on(heads[-1] | about_all, RESULTS / FILES)
    return with_results("small_data.md", f"{runs}\n\n{measured}")


def rows_of(path: Path) -> list[list[str]]:
    """Return a row for each kind of run in a result file."""
    head, runs = read_runs(path, "run")
    rows, kinds = [], dict.fromkeys((run["run"]["arm"], run["run"].get("flops")) for run in runs.values())
    budgets = {flops for _, flops in kinds if flops}
    for arm, flops in sorted(kinds, key=lambda kind: ([*ARMS, kind[0]].index(kind[0]), kind[1] or 0)):
        of_arm = [run for run in runs.values() if (run["run"]["arm"], run["run"].get("flops")) == (arm, flops)]
        bits = [run["bits_per_byte"] for run in of_arm]
        error = f" ± {stdev(bits) / len(bits) ** 0.5:.4f}" if len(bits) > 1 else ""
        shape = [f"{of_arm[0]['settings']['n_layer']}", f"{of_arm[0]['epochs']:.1f}"]
        name = f"{arm}, {flops:g} FLOPs" if flops and len(budgets) > 1 else arm
        rows.append([head["data"], name, *shape, f"{mean(bits):.4f}{error}"])
    if model := head.get("pretrained"):
        rows.append([head["data"], f"`{model['model']}`, untrained", "", "0", f"{model['bits_per_byte']:.4f}"])
    return rows


if __name__ == "__main__":
    command_line.run(main)
