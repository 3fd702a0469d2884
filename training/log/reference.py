"""Reference curves: validation losses of complete runs, to compare runs of the same settings and text with.

presets/reference/NAME.jsonl: the first line has the settings, the hashes of the tokens, hardware and versions; each
other line is a validation. `python -m benchmarks.reference runs/x NAME` writes one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from common import schema
from common.settings_file import read_yaml
from tokenizer.store.store import SPLITS
from training.checkpoints.metrics import comparable_loss, read_metrics
from training.checkpoints.run_folder import RunFolder
from training.step.model import ModelArguments
from training.step.optim import OptimArguments

FOLDER = Path(__file__).parents[2] / "presets" / "reference"
DEFAULTS = {part.name: str(part.default) for kind in (ModelArguments, OptimArguments) for part in fields(kind)}
COMPARED_SETTINGS = {*DEFAULTS, "tokens_per_step", "max_steps", "max_eval_samples", "mask_documents", "init_from"}


@dataclass(frozen=True)
class Reference:
    name: str
    steps: list[int]
    losses: list[float]
    tokens_per_step: int

    def compared(self, entry: Mapping[str, Any]) -> str:
        """Return how far the loss of a validation is from the curve, such as `0.02 above the reference x at 40M
        tokens`, or an empty text beyond its ends."""
        step = entry["step"]
        if not self.steps[0] <= step <= self.steps[-1]:
            return ""
        difference = comparable_loss(entry) - float(np.interp(step, self.steps, self.losses))
        place = f"the reference {self.name} at {step * self.tokens_per_step / 1e6:.3g}M tokens"
        if round(difference, 2) == 0:
            return f"within 0.01 of {place}"
        return f"{abs(difference):.2f} {'above' if difference > 0 else 'below'} {place}"


def compared_settings(folder: RunFolder) -> dict[str, str]:
    """Return what must be equal: the settings of a run that affect the loss, and the hashes of its tokens."""
    settings, data = read_yaml(folder.config), schema.read(folder.facts)["data"]
    hashes = {split: data[split]["sha256"] for split in SPLITS}
    return {name: str(settings.get(name, DEFAULTS.get(name))) for name in sorted(COMPARED_SETTINGS)} | hashes


def find_reference(folder: RunFolder) -> Reference | None:
    """Return the reference with the settings and the text of a run, or None."""
    settings = compared_settings(folder)
    for path in sorted(FOLDER.glob("*.jsonl")):
        head, *entries = read_metrics(path)
        newer = {name: DEFAULTS.get(name, "None") for name in settings.keys() - head["compared"].keys()}
        if newer | head["compared"] == settings:
            steps, losses = [entry["step"] for entry in entries], list(map(comparable_loss, entries))
            return Reference(path.stem, steps, losses, int(settings["tokens_per_step"]))
    return None
