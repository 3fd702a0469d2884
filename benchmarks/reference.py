"""Write the reference curve of a finished run: its validations, settings, text, hardware and versions.

python -m benchmarks.reference runs/quickstart quickstart

training/log/reference.py reads it.
"""

import json
from pathlib import Path

from benchmarks.results import about
from common.command_line import run
from common.errors import UserError
from training.checkpoints.metrics import read_metrics
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.status import read_status
from training.log.reference import FOLDER, compared_settings

KEPT = ("step", "eval_loss", "eval_sampled_loss", "eval_bits_per_byte")


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError("Name a run and the reference: python -m benchmarks.reference RUN NAME")
    folder = RunFolder(Path(arguments[0]))
    if read_status(folder.status).get("state") != "finished":
        raise UserError(f"{folder.path} is not a finished run.")
    head = about("reference", arguments) | {"compared": compared_settings(folder)}
    scored = [entry for entry in read_metrics(folder.metrics) if "eval_loss" in entry]
    lines = [head, *({name: entry[name] for name in KEPT if name in entry} for entry in scored)]
    path = FOLDER / f"{arguments[1]}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{path} has {len(scored)} validations.")


if __name__ == "__main__":
    run(main)
