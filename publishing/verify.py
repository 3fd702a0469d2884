"""Verification of a published model: a fresh offline process computes results, which must match the run."""

import json
import math
import os
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from common.errors import Problems, UserError, disk_errors
from common.removal import MARK
from publishing.published_model import PublishedModel
from training.evaluation.scoring import eval_windows

ISOLATED_CHECK = Path(__file__).with_name("isolated_check.py")
PROBE_TOKENS = 64
SOME_WINDOWS, LONGEST_TEXT = 16, 2048  # of windows whose logits are compared; those of a long context need gigabytes
LOGITS_TOLERANCE = 1e-5  # relative to the largest logit: Transformers' GPT-2 computes gelu_new with other kernels
CACHE_TOLERANCE = 1e-4  # relative, too: cached keys and values change the order of sums
LOSS_TOLERANCE = 0.01  # nats per token: the run usually computed its loss in bf16
STANDARD_ERRORS = 5  # allowed difference between the loss on a sample of windows and on all windows
FORWARD_FLOPS = 1e12  # budget for the loss: about ten seconds on two cores
FEWEST_WINDOWS = 4  # from which the standard error is estimated
# The only environment variables that the process inherits: no token, no path of this repository, no proxy.
PASSED_ON = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
)


@dataclass(frozen=True)
class Expected:
    """Results of the model in this process, and the loss that its run recorded."""

    probe: torch.Tensor  # (1, T) ids
    logits: torch.Tensor  # (T, V)
    windows: dict[str, torch.Tensor] = field(default_factory=dict)  # inputs, targets, positions: (N, T) each
    is_sample: bool = False  # true if these windows are only a sample of the windows that the run scored
    run_loss: float | None = None
    no_loss_because: str = ""

    @property
    def text(self) -> torch.Tensor:
        """Token ids (B, T) of the validation text if it is available, otherwise of the probe."""
        return self.windows["inputs"][:SOME_WINDOWS, :LONGEST_TEXT] if self.windows else self.probe


@dataclass(frozen=True)
class Location:
    """Location of a published model: a folder, or a repository in a cache."""

    name: str
    has_code: bool
    revision: str | None = None
    cache: Path | None = None
    subfolder: str = ""

    def __str__(self) -> str:
        revision = f" at {self.revision[:12]}" if self.revision else ""
        return f"{self.name}{f'/{self.subfolder}' if self.subfolder else ''}{revision}"


@torch.no_grad()
def expect(release: PublishedModel) -> Expected:
    """Compute the expected results."""
    model, config, training = release.model, release.model.config, release.training
    ids = torch.arange(min(PROBE_TOKENS, config.n_positions)) * 7919 % config.vocab_size
    reference = Expected(ids[None], model(ids[None]).logits[0])
    if training is None:
        return replace(reference, no_loss_because=f"{release.folder} has no run to compare its loss with")
    if (record := training.validation) is None:
        return replace(reference, no_loss_because=f"the run has no validation at step {training.step:,}")
    if training.store is None:
        reason = f"no intact token store has the tokens of the run ({training.config.data.data})"
        return replace(reference, no_loss_because=reason)
    number = -(-int(record["eval_tokens"]) // config.n_positions)
    limit = max(FEWEST_WINDOWS, int(FORWARD_FLOPS / (2 * model.num_parameters() * config.n_positions)))
    mask_documents = training.config.batch.mask_documents
    windows = eval_windows(training.store, config.n_positions, min(number, limit), mask_documents)
    return replace(reference, windows=windows, is_sample=limit < number, run_loss=record["eval_loss"])


def verify(location: Location, reference: Expected) -> None:
    """Load and run the published model in a fresh process and print the result.
    Raise a `UserError` if it does not load, has missing or unexpected weights, or computes different results."""
    print(f"Verifying {location} in a fresh process ...", flush=True)
    answer, logits = _run_isolated(location, reference)
    difference = (logits[:-1] - reference.logits).abs().max().item()
    cache_difference = (logits[-1] - reference.logits[-1]).abs().max().item()
    problems, largest = Problems(), max(1.0, reference.logits.abs().max().item())
    vocab_size = reference.logits.shape[-1]
    if answer["wrong_keys"]:
        problems.add(f"{location} has missing or unexpected weights: {', '.join(answer['wrong_keys'][:5])}.")
    if not difference <= LOGITS_TOLERANCE * largest:
        problems.add(f"{location} computes logits that differ by {difference:.1e} in a fresh process.")
    elif not cache_difference <= CACHE_TOLERANCE * largest:
        problems.add(f"{location} computes logits that differ by {cache_difference:.1e} with cached keys and values.")
    if answer["vocabulary"] > vocab_size:
        problems.add(f"{location} has a tokenizer of {answer['vocabulary']} tokens but {vocab_size} embeddings.")
    comparison = f"validation loss not compared: {reference.no_loss_because}"
    if counts := answer["targets"]:
        loss, tolerance = sum(answer["nats"]) / sum(counts), LOSS_TOLERANCE
        if reference.is_sample:  # allow for the standard error of the mean over windows
            means = [nats / count for nats, count in zip(answer["nats"], counts, strict=True) if count]
            error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
            tolerance += STANDARD_ERRORS * error
        if not abs(loss - reference.run_loss) <= tolerance:
            problems.add(
                f"{location} has a validation loss of {loss:.4f} in a fresh process, but the run recorded "
                f"{reference.run_loss:.4f}; was the token store replaced?"
            )
        comparison = f"validation loss {loss:.4f} (run: {reference.run_loss:.4f})"
    problems.refuse()
    if location.subfolder:
        print(f"The native twin, without remote code: logits differ by {difference:.1e}.")
        return
    origin = "the Hub" if location.cache is not None else "the folder"
    print(
        f"Verified in a fresh process (from {origin}): no missing or unexpected weights, logits differ by "
        f"{difference:.1e}, {comparison}. Sample:\n  {answer['prompt']!r} -> {answer['text']!r}"
    )


def _run_isolated(location: Location, reference: Expected) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the answer of isolated_check.py and its logits (T + 1, V): of the probe, and of its last token with a
    cache."""
    place, remedy = tempfile.gettempdir(), "make room there, or name another folder with TMPDIR"
    with disk_errors(place, remedy), tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        model, home = location.name, str(elsewhere / "home")
        if location.cache is None:  # a copy: the check sees only published files and cannot change them
            others = shutil.ignore_patterns(MARK, "*.gguf", "*.onnx")
            model = str(shutil.copytree(location.name, elsewhere / "model", ignore=others))
        request = {name: str(elsewhere / name) for name in ("files", "logits", "answer")} | {
            "model": model,
            "revision": location.revision or "main",
            "subfolder": location.subfolder,
            "trust_remote_code": location.has_code,
            "secrets": [constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH],
        }
        save_file({"probe": reference.probe, **reference.windows}, request["files"])
        (elsewhere / "request").write_text(json.dumps(request), encoding="utf-8")
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        paths = [Path(name).resolve() for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
        repository = Path(__file__).resolve().parent.parent
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path != repository)
        environment |= {"HOME": home, "HF_HOME": home, "PYTHONUSERBASE": site.getuserbase(), "HF_HUB_OFFLINE": "1"}
        if location.cache is not None:
            environment["HF_HUB_CACHE"] = str(location.cache)
        command = [sys.executable, "-P", str(ISOLATED_CHECK), "request"]  # -P: do not import from the script's folder
        result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, check=False)
        if result.returncode != 0:
            *_, message = ["no message", *result.stderr.decode(errors="replace").strip().splitlines()]
            outcome = "so it was not published"
            if location.cache is not None:
                outcome = "but it is now on the Hub; does an older file in the repository conflict?"
            raise UserError(f"{location} does not load in a fresh process, {outcome}: {message}")
        return json.loads(Path(request["answer"]).read_text(encoding="utf-8")), load_file(request["logits"])["logits"]
