"""Compare --budget on a small text with four epochs, and with the choice of an earlier commit, at equal FLOPs.

python -m benchmarks.small_data                               # writes docs/small_data.md
python -m benchmarks.small_data --data my.txt --megabytes 2   # another text: its first 2 MB
python -m benchmarks.small_data --workers 0                   # only write the page from the result files

Each run is `train_accelerate.py` itself, on one thread, and its saved model is scored on all held-out documents.
Finished runs are kept: the same command resumes an interrupted plan. Their results are in
benchmarks/results/small-data-*mb.jsonl.
"""

import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import results
from benchmarks.performance import DOCS, measured_on, table, with_results
from benchmarks.results import RESULTS, about, as_flags, key, read_runs, require_same_machine, run_python, write_runs
from common import command_line
from common.errors import UserError
from common.limits import setting
from training.checkpoints.metrics import read_metrics
from training.config import read_config
from training.data.run_data import is_store, name_of

FILES = "small-data-*mb.jsonl"
FLOPS = {1.0: 2e13, 5.0: 1.6e14}  # about seven epochs of the text
EARLIER = "1f42d8d"  # the last commit whose rule for a budget was: at most four epochs
ARMS = {"`--budget`": {}, "the earlier rule": {}, "`--num_train_epochs 4`": {"num_train_epochs": 4}}
SPARING = {"sample_tokens": 0, "save_total_limit": 2}


@dataclass
class SmallDataArguments:
    data: str = setting("state-of-the-union", "Text.")
    megabytes: float = setting(5.0, "Size of the training and validation text, from its beginning.", above=0)
    flops: float | None = setting(None, "FLOPs of a run. Default: 2e13 for 1 MB, 1.6e14 for 5 MB.", above=0)
    seeds: list[int] = setting([1337, 1, 2], "Seeds of the runs.")
    workers: int = setting(2, "Runs at once, on one thread each; 0 only writes the page.")


def token_store(options: SmallDataArguments) -> Path:
    """Return the store of the first megabytes of the text, of which a tenth, in whole documents, is held out."""
    store = results.REPOSITORY / f"data/{name_of(options.data)}-{options.megabytes:g}mb"
    if not is_store(str(store)):
        settings = {"max_bytes": f"{options.megabytes:g}MB", "validation_fraction": 0.1, "vocab_size": 2048}
        run_python("-m", "tokenizer.pretokenize", *as_flags({"input": options.data, "output": store} | settings))
        metadata = json.loads((store / "metadata.json").read_text(encoding="utf-8"))
        metadata.pop("licenses", None)  # of packages; the earlier commit does not know the key
        (store / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    return store


def measure(run: dict[str, Any], store: Path, code: Path) -> dict[str, Any]:
    """Train one run with the code of a folder, in a process with one thread. Return what the run chose, the bits per
    byte of its validations and of its saved model, and the seconds of the training."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, start = Path(scratch) / "run", time.perf_counter()
        given = {"data": store, "output_dir": folder, "seed": run["seed"], "budget": f"{run['flops']:g}flops"}
        flags = as_flags(given | ARMS[run["arm"]] | SPARING)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {"cwd": code, "env": environment, "check": False, "capture_output": True}
        done = run_python("train_accelerate.py", *flags, **options)
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise UserError(f"train_accelerate.py {' '.join(flags)} failed: {done.stderr[-1500:]}")
        validations = [entry for entry in read_metrics(folder / "metrics.jsonl") if "eval_loss" in entry]
        config = read_config(["--resume_from_checkpoint", str(folder)]).flat()
        scores = json.loads(run_python("-m", "training.evaluate", folder, "--json", capture_output=True).stdout)
    names = ("n_layer", "max_steps", "tokens_per_step", "weight_average", "second_target_weight")
    return {
        "run": run,
        "settings": {name: config.get(name) for name in names},
        "curve": [round(entry["eval_bits_per_byte"], 4) for entry in validations],
        "bits_per_byte": round(scores["eval_bits_per_byte"], 5),
        "seconds": round(seconds),
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
    path = RESULTS / f"small-data-{store.name}.jsonl"
    head, runs = read_runs(path, "run")
    tokens = json.loads((store / "metadata.json").read_text(encoding="utf-8"))["train"]["tokens"]
    facts = {"data": store.name, "train_tokens": tokens, "commit": results.commit()}
    head = head or about("small_data", arguments) | facts
    require_same_machine(path, head)
    plan = [{"arm": arm, "flops": flops, "seed": seed} for seed in options.seeds for arm in ARMS]

    with tempfile.TemporaryDirectory() as scratch:
        earlier = Path(scratch) / "earlier"
        subprocess.run(["git", "worktree", "add", "--detach", earlier, EARLIER], cwd=results.REPOSITORY, check=True)

        def work(run: dict[str, Any]) -> None:
            row = measure(run, store, earlier if run["arm"] == "the earlier rule" else results.REPOSITORY)
            runs[key(run)] = row
            write_runs(path, head, runs)
            print(f"{key(run)}: {row['bits_per_byte']:.4f} bits per byte, {row['seconds']} s", flush=True)

        try:
            with ThreadPoolExecutor(options.workers) as pool:
                list(pool.map(work, [run for run in plan if key(run) not in runs]))  # raises the error of a failed run
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=results.REPOSITORY, check=True)


def page() -> str:
    """Return docs/small_data.md with the tables of the result files between its markers."""
    return with_results("small_data.md", "\n\n".join(map(section, sorted(RESULTS.glob(FILES)))))


def section(path: Path) -> str:
    head, runs = read_runs(path, "run")
    rows = []
    for arm in ARMS:
        of_arm = [run for run in runs.values() if run["run"]["arm"] == arm]
        if not of_arm:
            continue
        settings = of_arm[0]["settings"]
        epochs = settings["max_steps"] * settings["tokens_per_step"] / head["train_tokens"]
        bits = [run["bits_per_byte"] for run in of_arm]
        error = f" ± {stdev(bits) / len(bits) ** 0.5:.4f}" if len(bits) > 1 else ""
        row = [arm, f"{settings['n_layer']}", f"{epochs:.1f}", f"{mean(bits):.4f}{error}", f"{len(bits)}"]
        rows.append([*row, f"{mean(run['seconds'] for run in of_arm):,.0f}"])
    columns = [head["data"], "layers", "epochs", "bits per byte", "seeds", "seconds"]
    return "\n\n".join([table(columns, rows), measured_on(head, path)])


if __name__ == "__main__":
    command_line.run(main)
