"""Train all combinations of some settings, one run after the other. All other flags are those of train_accelerate.py.

python -m training.sweep --data my.txt --vary learning_rate=1e-2,2e-2,4e-2 weight_decay=0,0.1
"""

import common.interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

from common.command_line import HELP, FlagParser, flag_name, run, split_flags
from common.errors import Problems, UserError
from common.limits import setting
from common.removal import refuse_replacing
from common.settings_file import read_yaml
from training import compare_runs
from training.budget.sizing import SHORTENED
from training.checkpoints.status import read_status
from training.config import CHOICES, TrainConfig, read_config
from training.preflight import check

PR_SET_PDEATHSIG = 1  # constant of Linux's prctl
SCRIPT = Path(__file__).parent.parent / "train_accelerate.py"


@dataclass
class SweepArguments:
    vary: list[str] = setting([], "NAME=VALUE,VALUE ...", needed=("settings", "--vary learning_rate=3e-4,6e-4"))
    output_dir: str | None = setting(None, "Folder of the run folders. Default: runs/NAME-sweep.")


def main(arguments: list[str]) -> None:
    sweep_words, flags = [*HELP & set(arguments)], []
    for group in split_flags(arguments):
        (sweep_words if flag_name(group[0]) in SweepArguments.__dataclass_fields__ else flags).extend(group)
    (options,) = FlagParser((SweepArguments,), __doc__).parse(sweep_words)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"A sweep trains each run in one process, but {processes} were started; use python -m training.sweep."
        )
    axes = [(item.split("=")[0], item.partition("=")[2].split(",")) for item in options.vary]
    commands, configs, problems = {}, [], Problems()
    for pairs in product(*([(name, value) for value in values] for name, values in axes)):
        command = [*flags, *(part for name, value in pairs for part in (f"--{name}", value))]
        name = ",".join(map("=".join, pairs)).replace("/", "_")
        if commands.setdefault(name, command) != command:
            problems.add(f"Two combinations of --vary have the same folder, {name}; sweep them separately.")
    first_config = problems.add_of(read_config, next(iter(commands.values())))
    base = Path(options.output_dir or f"{first_config and first_config.run.output_dir}-sweep")
    drive = first_config and first_config.backup.backup_dir
    for name, command in commands.items():
        command += ["--output_dir", str(base / name)]
        # A folder of the sweep's own, because the runs of other sweeps have the same names; not for older backups.
        if drive and not Path(drive, name).exists():
            groups = [group for group in split_flags(command) if flag_name(group[0]) != "backup_dir"]
            command[:] = [*chain(*groups), "--backup_dir", str(Path(drive, base.name))]
        configs.append(problems.add_of(read_config, command, check))
    problems.add_of(refuse_replacing, plot := base / "comparison.png")
    problems.refuse()
    failures, start = [], None
    for command, config in zip(commands.values(), configs, strict=True):
        folder = config.run.folder
        is_finished = read_status(folder.status).get("state") == "finished" and not config.run.overwrite_output_dir
        is_finished &= not config.cost.plan
        # A run with checkpoints reports this itself, after it compared its text too.
        if is_finished and folder.newest_step() == 0 and not differences(config):
            print(f"{folder.path} is finished. It has no checkpoints, so its text was not compared.")
            continue
        if drive and Path(drive).is_dir() and not config.cost.plan:
            with suppress(OSError):  # each run reports it
                Path(drive, base.name).mkdir(exist_ok=True)
        remedy = "the same command" + " without --overwrite_output_dir" * config.run.overwrite_output_dir
        seconds, limit = None, config.stopping.max_hours  # which the first run observes itself
        if start is not None and limit is not None:
            seconds = limit * 3600 - (time.monotonic() - start)
        start = start or time.monotonic()
        if seconds is not None and seconds <= 0:
            print(f"The sweep ends before {folder.path} (max_hours); {remedy} continues it.")
            break
        if train(command, seconds):
            failures.append(str(folder.path))
        elif not config.cost.plan and read_status(folder.status).get("state") != "finished":  # max_hours
            print(f"{folder.path} was stopped, so the sweep ends here; {remedy} continues it.")
            break
    if folders := [str(base / name) for name in commands if (base / name).exists()]:  # none with --plan
        compare_runs.main(["--runs", *folders, "--output", str(plot)])
    if failures:
        raise UserError(f"{len(failures)} of {len(commands)} runs failed: {', '.join(failures)}.")


def differences(config: TrainConfig) -> list[str]:
    """Return the differences from the run in the folder, without settings that a budget or the text chose."""
    is_shortened = "data" in config.flags and config.sources.get("max_steps") == "quickstart"
    choices = CHOICES if config.budget.chooses else SHORTENED if is_shortened else set()
    settings = replace(config.settings, allowed=config.settings.allowed | (choices - config.given))
    return settings.differences(read_yaml(config.run.folder.config))


def train(arguments: list[str], seconds: float | None) -> int:
    """Run train_accelerate.py and return its exit code, or 0 if it is stopped, and saves, after `seconds`.
    SIGINT and SIGTERM end this process, after the run is saved."""
    signals, tie, is_late = [], None, False
    if sys.platform == "linux":  # if this process is killed, the run is saved and ends
        tie = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    with subprocess.Popen([sys.executable, str(SCRIPT), *arguments], preexec_fn=tie) as process:  # noqa: PLW1509
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signals.append(number) or process.send_signal(number))
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            process.terminate()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signals:
        sys.exit(128 + signals[0])
    return 0 if is_late and process.returncode in (143, -signal.SIGTERM) else process.returncode


if __name__ == "__main__":
    run(main)
