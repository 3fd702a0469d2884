"""Measure the cost of checkpoints: how long training waits, how long writing takes, and how much it slows steps.

Uses the preset gpt2_small_seed: 134.6M parameters, 1.6 GB per checkpoint.

python -m benchmarks.saving                              # writes benchmarks/results/saving-DEVICE.json
python -m benchmarks.saving --tokens_per_step 32768 --steps 200 --save_steps 50      # on a GPU
"""

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contestants import LAUNCH
from benchmarks.results import about, as_flags, device_kind, run_python, write
from common.command_line import FlagParser, run
from common.limits import setting
from training.checkpoints.metrics import read_events, read_metrics


@dataclass
class SavingArguments:
    data: str = setting("python-standard-library", "Text, or a token store with a vocabulary of 32,000 tokens.")
    tokens_per_step: int = setting(1024, "Tokens per step.", minimum=1)
    steps: int = setting(24, "Steps of the run.", minimum=3)
    save_steps: int = setting(8, "Steps between checkpoints.", minimum=2)
    torch_compile: str = setting("false", "As in train_accelerate.py.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((SavingArguments,), __doc__).parse(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        settings = {
            "config": "presets/gpt2_small_seed.yaml",
            "data": options.data,
            "vocab_size": 32000,
            "output_dir": folder,
            "tokens_per_step": options.tokens_per_step,
            "max_steps": options.steps,
            "save_steps": options.save_steps,
            "save_total_limit": 1,
            "logging_steps": 1,
            "eval_strategy": "no",
            "max_eval_samples": 1,
            "sample_tokens": 0,
            "torch_compile": options.torch_compile,
        }
        run_python(*LAUNCH, *as_flags(settings))
        events, metrics = read_events(folder / "events.jsonl"), read_metrics(folder / "metrics.jsonl")
        size = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    begun = [event for event in events if event["event"] == "saving"]
    seconds = {
        entry["step"]: options.tokens_per_step / entry["tokens_per_second"]
        for entry in metrics
        if "tokens_per_second" in entry
    }
    after_a_save = [seconds[event["step"] + 1] for event in begun if event["step"] + 1 in seconds]
    others = [value for step, value in seconds.items() if (step - 1) % options.save_steps]
    copying = [event["seconds_copying"] for event in begun]
    result = {
        **about("saving", arguments),
        "checkpoint_bytes": size,
        "seconds_copying_first": copying[0],
        "seconds_copying": copying[1:],
        "seconds_waiting_for_the_save_before": [event["seconds_waiting"] for event in begun],
        "seconds_writing": [event["seconds"] for event in events if event["event"] == "saved"],
        "seconds_a_step": round(statistics.median(others), 3),
        "seconds_of_the_step_after_a_save": [round(value, 3) for value in after_a_save],
    }
    print(json.dumps(result, indent=2))
    write(f"saving-{device_kind()}", result)


if __name__ == "__main__":
    run(main)
