"""Train the best model of a fixed text in a fixed time, as an entry that anyone can verify. Rules: docs/speedrun.md

python -m benchmarks.speedrun --output mine.json                          # an entry with the settings of --budget 2m
python -m benchmarks.speedrun --output mine.json --settings mine.yaml     # with your own settings
python -m benchmarks.speedrun --verify benchmarks/results/speedrun-cpu.json
"""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from benchmarks.results import about, commit, cpu_name, run_python
from common import schema
from common.command_line import FlagParser, run
from common.errors import NONSENSE, UserError
from common.limits import setting
from common.settings_file import read_yaml
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.units import Corpus, CorpusArguments
from training.checkpoints.metrics import read_events, read_metrics
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.status import hours

TEXT, SECONDS = "python-standard-library", 120.0
SLACK = 1.05  # a run of --budget ends within 5% of its time
TOLERANCE = 0.02  # bits per byte between types of CPU, and versions of PyTorch
# Settings of files that the run would read or write in addition to its text and its folder
FORBIDDEN = {"budget", "output_dir", "backup_dir", "init_from", "resume_from_checkpoint", "report_to", "tokenizer"}
RESULTS = ("text_sha256", "losses", "weights_sha256", "bits_per_byte")  # what a repetition must give again


@dataclass
class SpeedrunArguments:
    output: str | None = setting(None, "JSON file of the entry to write.")
    settings: str | None = setting(None, "YAML file of your settings; without it, those of --budget 2m.")
    verify: str | None = setting(None, "JSON file of an entry to train again and compare.")


def train(folder: Path, config: Path | None) -> dict[str, Any]:
    """Train in `folder` and return the settings, the curve and the results. Raise a `UserError` if the run fails."""
    how = ["--budget", "2m"] if config is None else ["--config", config]
    flags = ["--data", TEXT, "--validation_fraction", "0.05", "--output_dir", folder, *how]
    if run_python("train_accelerate.py", *flags, check=False).returncode:
        raise UserError("The run did not end; correct what its messages name.")
    entries, run_folder = read_metrics(RunFolder(folder).metrics), RunFolder(folder)
    last = [entry for entry in entries if "eval_bits_per_byte" in entry][-1]
    tensors = load_file(run_folder.model / "model.safetensors")
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
    settings = yaml.safe_load(run_folder.config.read_text(encoding="utf-8"))
    return {
        "settings": {name: value for name, value in settings.items() if name not in FORBIDDEN},
        "seconds": round(3600 * hours(read_events(run_folder.events)), 1),  # from the start, with compilation
        "losses": [[entry["step"], entry["loss"]] for entry in entries if "loss" in entry],
        "bits_per_byte": last["eval_bits_per_byte"],
        "weights_sha256": digest.hexdigest(),
    }


def compare(entry: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """Return what differs between an entry and its repetition, beyond what another type of CPU explains."""
    if entry["text_sha256"] != again["text_sha256"]:
        return [f"the text differs (the entry used Python {entry['python']}, this is Python {again['python']})"]
    if (entry["cpu"], entry["torch"]) == (again["cpu"], again["torch"]):
        return [f"{name} differ" for name in RESULTS if entry[name] != again[name]]
    distance = abs(entry["bits_per_byte"] - again["bits_per_byte"])
    return [f"bits per byte differ by {distance:.4f}, more than {TOLERANCE}"] if distance > TOLERANCE else []


def read_entry(path: Path) -> dict[str, Any]:
    try:
        entry = schema.read(path, dict[str, Any])
        if missing := {*RESULTS, "settings", "cpu", "torch", "python"} - entry.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, *NONSENSE) as error:
        raise UserError(f"{path} is not an entry of this speedrun ({error}); name its JSON file.") from error
    return entry


def settings_file(settings: Any, source: str, path: Path) -> Path:
    """Write the settings of an entry to `path`. Raise a `UserError` for those that change the text, and for those that
    read or write anything else."""
    text = CorpusArguments(validation_fraction=0.05), CleaningArguments(), DedupArguments()
    fixed = {name: str(value) for part in text for name, value in vars(part).items()}
    pairs = settings.items() if isinstance(settings, dict) else [("no settings", None)]
    names = {"no settings", *FORBIDDEN} & {name for name, _ in pairs}
    names |= {name for name, value in pairs if fixed.get(name, str(value)) != str(value)}
    if names:
        raise UserError(f"{source} has {', '.join(sorted(names))}, which the rules do not allow; leave that out.")
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((SpeedrunArguments,), __doc__).parse(arguments)
    if (options.output is None) == (options.verify is None) or (options.verify and options.settings):
        raise UserError("Name --output for a new entry, with --settings if you like, or --verify for an entry.")
    entry = read_entry(Path(options.verify)) if options.verify else None
    with tempfile.TemporaryDirectory() as folder:
        settings, config = entry and entry["settings"], None
        if options.settings:
            settings = read_yaml(Path(options.settings), as_text=True)
        if settings is not None:
            config = settings_file(settings, options.verify or options.settings, Path(folder) / "settings.yaml")
        text = Corpus([TEXT], CorpusArguments())
        head = about("speedrun", arguments) | {"cpu": cpu_name(), "commit": commit(), "text_sha256": text.fingerprint()}
        result = head | train(Path(folder) / "run", config)
    print(f"{result['bits_per_byte']:.4f} bits per byte after {result['seconds']:.1f} s")
    if entry is None:
        if result["seconds"] > SECONDS * SLACK:
            raise UserError(f"The run took {result['seconds']} s, more than {SECONDS:.0f}; choose a shorter one.")
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"Wrote {options.output}.")
    elif problems := compare(entry, result):
        raise UserError(f"{options.verify} is not repeated: {'; '.join(problems)}.")
    else:
        same = "to the bit" if entry["weights_sha256"] == result["weights_sha256"] else f"within {TOLERANCE}"
        print(f"{options.verify} is repeated, {same}.")


if __name__ == "__main__":
    run(main)
