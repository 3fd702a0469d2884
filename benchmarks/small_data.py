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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.performance import measured_on, table, with_results, write_page
from benchmarks.results import PACKAGES, RESULTS, about, commit, read_runs, require_same_conditions, run_python
from benchmarks.runs import measure_missing, token_store, train
from common import command_line
from common.errors import UserError
from common.limits import setting
from tokenizer.store.store import read_metadata
from training.config import read_config
from training.data.run_data import name_of

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


def tokens_of(store: Path) -> int:
    return read_metadata(store).train.tokens


def bits_per_byte(*arguments: Any) -> float:
    """Return the score of a run, or of a model with `--data`, on all held-out documents."""
    scores = run_python("-m", "training.evaluate", *arguments, "--json", capture_output=True).stdout
    return round(json.loads(scores)["eval_bits_per_byte"], 5)


def measure(arms: dict[str, dict[str, Any]], run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one run. Return what it chose, the bits per byte of its validations and of its saved model, and the seconds
    of the training."""
    settings = arms[run["arm"]]
    trained = train(folder, settings | {"seed": run["seed"]} | SPARING)
    validations, config = trained.validations, read_config(["--resume_from_checkpoint", str(folder)]).flat()
    names = ("n_layer", "max_steps", "tokens_per_step", "weight_average", "second_target_weight", "induction_init")
    return {
        "run": run,
        "settings": {name: config.get(name) for name in names},
        "epochs": round(validations[-1]["step"] * config["tokens_per_step"] / tokens_of(settings["data"]), 2),
        "curve": [round(entry["eval_bits_per_byte"], 4) for entry in validations],
        "bits_per_byte": bits_per_byte(folder),
        "seconds": round(trained.seconds),
        **{name: about("", [])[name] for name in ("device", "date")},
    }


def main(arguments: list[str]) -> None:
    (options,) = command_line.FlagParser((SmallDataArguments,), __doc__).parse(arguments)
    if options.workers:
        train_missing(options, arguments)
    write_page("small_data.md", page())


def train_missing(options: SmallDataArguments, arguments: list[str]) -> None:
    """Train the runs that are not in the result file. Runs of one seed come before those of the next. A tenth of the
    text, in whole documents, is held out."""
    flops = options.flops or FLOPS.get(options.megabytes)
    if flops is None:
        raise UserError(f"--megabytes {options.megabytes:g} has no FLOPs of its own; name them with --flops.")
    name = f"{name_of(options.data)}-{options.megabytes:g}mb"
    text = {"text": options.data, "max_bytes": f"{options.megabytes:g}MB", "validation_fraction": 0.1}
    store = token_store(name, **text, vocab_size=2048)
    path, budget = RESULTS / f"small-data-{store.name}.jsonl", {"data": store, "budget": f"{flops:g}flops"}
    arms = {name: budget | settings for name, settings in ARMS.items()}
    head, runs = read_runs(path, "run")
    facts = {"data": store.name, "train_tokens": tokens_of(store), "commit": commit()}
    head = head or about("small_data", arguments) | facts
    # On any machine, because the FLOPs decide the steps. A text of the same name may have changed.
    require_same_conditions(path, head, PACKAGES, train_tokens=tokens_of(store))
    if model := options.init_from:
        same_text = token_store(f"{name}-of-{Path(model).resolve().name}", **text, tokenizer=model)
        arms[f"`--init_from {model}`"] = {"data": same_text, "init_from": model}
        head["pretrained"] = {"model": model, "bits_per_byte": bits_per_byte(model, "--data", same_text)}
    costs = {arm: {"flops": flops} if "budget" in settings else {} for arm, settings in arms.items()}
    plan = [{"arm": arm, "seed": seed} | cost for seed in options.seeds for arm, cost in costs.items()]
    measure_missing(path, head, runs, plan, partial(measure, arms), options.workers)


def page() -> str:
    """Return docs/small_data.md with the runs of the result files between its markers."""
    paths = sorted(RESULTS.glob(FILES))
    columns = ["text", "run", "layers", "epochs", "bits per byte"]
    rows = table(columns, [row for path in paths for row in rows_of(path)])
    lines = [line for path in paths for head, runs in [read_runs(path, "run")] for line in (head, *runs.values())]
    devices, versions, dates = (
        sorted({line[name] for line in lines if name in line}) for name in ("device", "torch", "date")
    )
    origin = {"command": "python -m benchmarks.small_data --data TEXT", "device": " or ".join(devices)}
    origin |= {"torch": " or ".join(versions), "date": " to ".join(dict.fromkeys([dates[0], dates[-1]]))}
    return with_results("small_data.md", f"{rows}\n\n{measured_on(origin, RESULTS / FILES)}")


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
