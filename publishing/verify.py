"""Whether a folder works for someone who has only the folder: loaded by a fresh process, offline, with remote code."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import UserError
from modeling_gpt2scratch import GPT2ScratchForCausalLM

PROBE_TOKENS = 32
TOLERANCE = 1e-5

# What a stranger would write. Runs in an empty folder, without this repository on its path.
STRANGER = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, length, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
trusted = dict(trust_remote_code=True, output_loading_info=True)
_, base = AutoModel.from_pretrained(folder, **trusted)
model, full = AutoModelForCausalLM.from_pretrained(folder, **trusted)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = torch.arange(min(length, model.config.n_positions))[None] % model.config.vocab_size
with torch.no_grad():
    logits = model(ids).logits[0, -1].double()
    continuation = model.generate(ids[:, :1], max_new_tokens=min(20, model.config.n_positions - 1), do_sample=False)
keys = [str(key) for info in (base, full) for name in ("missing_keys", "unexpected_keys") for key in info[name]]
seen = {"wrong_keys": keys, "logits": logits.tolist(), "vocabulary": len(tokenizer)}
with open(answer, "w") as file:  # not stdout: libraries print there
    json.dump(seen | {"sample": tokenizer.decode(continuation[0])}, file)
"""


@dataclass(frozen=True)
class Verified:
    largest_difference: float  # of the logits
    sample: str


def verify(folder: Path) -> Verified:
    """
    Raises:
        UserError: it does not load, weights are missing or left over, or it computes something else than the model here.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        answer = Path(elsewhere) / "answer.json"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(elsewhere) / "modules")}
        result = subprocess.run(
            [sys.executable, "-c", STRANGER, str(folder.resolve()), str(PROBE_TOKENS), str(answer)],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{folder} does not load in a fresh process, so it is not published: {last}")
        seen = json.loads(answer.read_text(encoding="utf-8"))
    model = GPT2ScratchForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    ids = torch.arange(min(PROBE_TOKENS, model.config.n_positions))[None] % model.config.vocab_size
    with torch.no_grad():
        ours = model(ids).logits[0, -1].double()
    difference = (ours - torch.tensor(seen["logits"], dtype=torch.float64)).abs().max().item()
    problems = []
    if seen["wrong_keys"]:
        problems.append(f"{folder} has missing or unexpected weights: {', '.join(seen['wrong_keys'][:5])}.")
    if not difference <= TOLERANCE:
        problems.append(f"{folder} computes logits that differ by {difference:.1e} in a fresh process.")
    if seen["vocabulary"] != model.config.vocab_size:
        problems.append(
            f"{folder} has a tokenizer of {seen['vocabulary']} tokens for {model.config.vocab_size} embeddings."
        )
    if problems:
        raise UserError("\n".join(problems))
    return Verified(difference, seen["sample"])
