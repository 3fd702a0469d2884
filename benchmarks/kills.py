"""Kill a run with `kill -9` at random moments until it is finished, and compare it with an uninterrupted run.

python -m benchmarks.kills --output benchmarks/results/kills-cpu.json
python -m benchmarks.kills --kills 10 --processes 2

Each kill hits the launcher or one rank. Compilation, precision and threads have their defaults. The model is small, every step is
saved, and `--save_total_limit` is 1, so most kills interrupt the writing or removal of a checkpoint.
"""

import datetime
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.results import REPOSITORY, device_name
from common.command_line import FlagParser, run
from common.errors import UserError
from training.checkpoints.checkpoint import complete_checkpoints, damage, step_of
from training.checkpoints.run_folder import RunFolder
from training.log.speed import SHOWN

SETTINGS = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 32,
    "tokens_per_step": 256,
    "vocab_size": 300,
    "resid_pdrop": 0.1,
    "logging_steps": 1,
    "eval_steps": 100,
    "save_steps": 1,
    "save_total_limit": 1,
    "sample_tokens": 8,
    "sample_prompts": "the",
}


@dataclass
class KillsArguments:
    kills: int = field(default=24, metadata={"help": "Number of kills."})
    steps: int = field(default=400, metadata={"help": "Steps of the run.", "minimum": 1})
    processes: int = field(default=1, metadata={"help": "Processes of the run: 1 or 2.", "minimum": 1, "maximum": 2})
    seed: int = field(default=0, metadata={"help": "Seed of the moments and processes to kill."})
    output: str | None = field(default=None, metadata={"help": "JSON file to write the result to."})


def start(folder: Path, text: Path, arguments: KillsArguments) -> subprocess.Popen:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    if arguments.processes > 1:
        launch += ["--config_file", "launch/two_cpu_processes.yaml"]
    settings = {**SETTINGS, "max_steps": arguments.steps, "data": text, "output_dir": folder}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "OMP"))}
    with (folder.parent / "output.txt").open("a") as output:
        return subprocess.Popen(
            [*launch, "train_accelerate.py", *flags],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def finish(folder: Path, text: Path, arguments: KillsArguments) -> None:
    if start(folder, text, arguments).wait() != 0:
        raise UserError(f"The run failed: {(folder.parent / 'output.txt').read_text()[-2000:]}")


def everything_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(launcher: subprocess.Popen, chance: random.Random) -> tuple[str, float]:
    """Kill the launcher or a random rank. Return its name and the seconds until all processes of the run have ended."""
    workers = everything_of(launcher)
    victim = chance.choice(["launcher", *(f"rank {rank}" for rank in range(len(workers)))])
    began = time.monotonic()
    os.kill(launcher.pid if victim == "launcher" else workers[int(victim.split()[1])].pid, signal.SIGKILL)
    launcher.wait()
    psutil.wait_procs(workers, timeout=120)
    left = [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise UserError(f"These processes are still running: {left}.")
    return victim, time.monotonic() - began


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def metrics_of(folder: Path) -> list[dict]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = {*SHOWN, "seconds_to_first_step"}
    return [{name: value for name, value in entry.items() if name not in timed} for entry in entries]


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((KillsArguments,), __doc__.splitlines()[0]).parse(arguments)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        words = "the of and a to in is was he for it with as his on be at by".split()
        text.write_text("\n".join(" ".join(chance.choice(words) for _ in range(8)) for _ in range(8000)))
        straight, killed = Path(scratch) / "straight", Path(scratch) / "killed"
        finish(straight, text, options)
        seen = []
        while len(seen) < options.kills:
            launcher = start(killed, text, options)
            before = RunFolder(killed).newest_step()
            while launcher.poll() is None and RunFolder(killed).newest_step() <= before:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.4))
            if launcher.poll() is not None:
                break  # finished before `options.kills` kills
            half_written = len(list((killed / "checkpoints").glob(".step_*")))
            victim, seconds = kill(launcher, chance)
            complete = complete_checkpoints(killed / "checkpoints")
            damaged = [str(damage(checkpoint)) for checkpoint in complete if damage(checkpoint)]
            half_written = max(half_written, len(list((killed / "checkpoints").glob(".step_*"))))
            seen.append({"killed": victim, "seconds_until_all_ended": round(seconds, 2), "complete": len(complete)})
            seen[-1] |= {"damaged": damaged, "half_written": half_written, "newest": step_of(complete[-1])}
            print(seen[-1], flush=True)
        finish(killed, text, options)
        result = {
            "machine": device_name(),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "device": next(
                line for line in (Path(scratch) / "output.txt").read_text().splitlines() if "Device:" in line
            ),
            "asked": vars(options),
            "kills": len(seen),
            "without_a_complete_checkpoint": sum(kill["complete"] == 0 for kill in seen),
            "damaged_checkpoints": sum(len(kill["damaged"]) for kill in seen),
            "with_a_half_written_one": sum(kill["half_written"] > 0 for kill in seen),
            "same_weights": weights_of(straight) == weights_of(killed),
            "same_metrics": metrics_of(straight) == metrics_of(killed),
            "each": seen,
        }
    print(json.dumps({name: value for name, value in result.items() if name not in ("each", "machine")}, indent=2))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
