"""Kill a run with `kill -9` at random moments until it is finished, and compare it with an uninterrupted run.

python -m benchmarks.kills --output benchmarks/results/kills-cpu.json
python -m benchmarks.kills --kills 10 --processes 2

Each kill hits the launcher or one rank. Compilation, precision and threads have their defaults. The model is small,
every step is saved, and `--save_total_limit` is 1, so most kills interrupt the writing or removal of a checkpoint.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.results import REPOSITORY, about, as_flags
from common.atomic import file_sha256
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting
from modeling_gpt2scratch.loading import WEIGHTS
from training.checkpoints.checkpoint import complete_checkpoints, damage
from training.checkpoints.metrics import read_metrics
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
    kills: int = setting(24, "Number of kills.")
    steps: int = setting(400, "Steps of the run.", minimum=1)
    processes: int = setting(1, "Processes of the run: 1 or 2.", minimum=1, maximum=2)
    seed: int = setting(0, "Seed of the moments and processes to kill.")
    output: str | None = setting(None, "JSON file to write the result to.")


def start(folder: Path, text: Path, arguments: KillsArguments) -> subprocess.Popen:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    if arguments.processes > 1:
        launch += ["--config_file", "launch/two_cpu_processes.yaml"]
    settings = {**SETTINGS, "max_steps": arguments.steps, "data": text, "output_dir": folder}
    command = [*launch, "train_accelerate.py", *as_flags(settings)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "OMP"))}
    with (folder.parent / "output.txt").open("a") as output:
        options = {"stdout": output, "stderr": output, "start_new_session": True}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, **options)


def finish(folder: Path, text: Path, arguments: KillsArguments) -> None:
    if start(folder, text, arguments).wait() != 0:
        raise UserError(f"The run failed: {(folder.parent / 'output.txt').read_text()[-2000:]}")


def kill(launcher: subprocess.Popen, chance: random.Random) -> tuple[str, float]:
    """Kill the launcher or a random rank. Return its name and the seconds until all processes of the run have ended."""
    workers = []
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(launcher.pid).children(recursive=True)
    victim = chance.choice(["launcher", *(f"rank {rank}" for rank in range(len(workers)))])
    began = time.monotonic()
    os.kill(launcher.pid if victim == "launcher" else workers[int(victim.split()[1])].pid, signal.SIGKILL)
    launcher.wait()
    _, left = psutil.wait_procs(workers, timeout=120)
    if left := [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE]:
        raise UserError(f"These processes are still running: {left}.")
    return victim, time.monotonic() - began


def metrics_of(folder: Path) -> list[dict]:
    timed, entries = {*SHOWN, "seconds_to_first_step"}, read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in entry.items() if name not in timed} for entry in entries]


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((KillsArguments,), __doc__).parse(arguments)
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
            found = {
                "killed": victim,
                "seconds_until_all_ended": round(seconds, 2),
                "complete": len(complete),
                "damaged": [reason for reason in map(damage, complete) if reason],
                "half_written": max(half_written, len(list((killed / "checkpoints").glob(".step_*")))),
                "newest": RunFolder(killed).newest_step(),
            }
            print(found, flush=True)
            seen.append(found)
        finish(killed, text, options)
        output = (Path(scratch) / "output.txt").read_text()
        result = {
            **about("kills", arguments),
            "device_line": next(line for line in output.splitlines() if "Device:" in line),
            "asked": vars(options),
            "kills": len(seen),
            "without_a_complete_checkpoint": sum(kill["complete"] == 0 for kill in seen),
            "damaged_checkpoints": sum(len(kill["damaged"]) for kill in seen),
            "with_a_half_written_one": sum(kill["half_written"] > 0 for kill in seen),
            "same_weights": len({file_sha256(run / "model" / WEIGHTS) for run in (straight, killed)}) == 1,
            "same_metrics": metrics_of(straight) == metrics_of(killed),
            "each": seen,
        }
    print(json.dumps({name: value for name, value in result.items() if name != "each"}, indent=2))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
