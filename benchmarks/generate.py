"""Compare the speed of `generate` with Transformers' `GPT2LMHeadModel` on the same weights, in tokens per second.

python -m benchmarks.generate                            # writes benchmarks/results/generate-DEVICE.json
python -m benchmarks.generate --dtype bfloat16           # writes benchmarks/results/generate-DEVICE-bfloat16.json

Decoding is greedy, after a prompt of 32 tokens. The time is measured from the first new token to the last. It excludes
the prompt, loading, compilation and warm-up. Each contestant runs in a fresh process, one after the other, in several
rounds. Ratios are computed within a round.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.results import about, device_kind, run_python, spread, write
from common.command_line import FlagParser, run
from common.limits import setting
from modeling_gpt2scratch.conversion_gpt2scratch import from_gpt2
from modeling_gpt2scratch.loading import arrange_weights
from training.evaluation.sampling import compiled, generation_config

SHAPES = {
    "small": {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 65, "n_positions": 256},
    "gpt2": {},  # the defaults of GPT2Config: OpenAI's 124M model
}
# arranged: with the weight layout of generate.py on a CPU. compiled: a static cache, a compiled step, and for
# gpt2scratch also that layout.
CONTESTANTS = ("gpt2", "gpt2_compiled", "gpt2scratch", "gpt2scratch_arranged", "gpt2scratch_compiled")
RATIOS = (
    ("gpt2scratch", "gpt2"),
    ("gpt2scratch_arranged", "gpt2"),
    ("gpt2scratch_compiled", "gpt2"),
    ("gpt2scratch_compiled", "gpt2_compiled"),
)
ON_GPU = torch.cuda.is_available()
NEW_TOKENS = {"small": 64, "gpt2": 12} if not ON_GPU else {"small": 200, "gpt2": 200}
PROMPT_TOKENS, WARM_UPS = 32, 1 if not ON_GPU else 3


@dataclass
class GenerateArguments:
    models: list[str] = setting(list(SHAPES), "Models to measure.", choices=list(SHAPES))
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Data type of the weights of all contestants.")
    batch_sizes: list[int] = setting([1, 32], "Texts that are generated at once.", minimum=1)
    repeats: int = setting(5 if ON_GPU else 2, "Timings per process.", minimum=1)
    rounds: int = setting(5 if ON_GPU else 3, "Processes per contestant.", minimum=1)


class Clock(BaseStreamer):
    """Arrival times of the new tokens. `generate` has synchronized with the device by then."""

    def __init__(self):
        self.arrivals: list[float] = []  # the first arrival is the prompt

    def put(self, value: torch.Tensor) -> None:
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        pass


def contest(contestant: str, folder: str, dtype: str, batch_sizes: list[int], new_tokens: int, repeats: int) -> dict:
    """Measure one contestant: for each batch size, the tokens/s of each repeat and the generated ids."""
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(Path(folder) / contestant.split("_")[0], dtype=dtype)
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu").eval()
    if contestant in ("gpt2scratch_arranged", "gpt2scratch_compiled"):
        arrange_weights(model)
    found = {}
    for batch_size in batch_sizes:
        prompt = torch.arange(batch_size * PROMPT_TOKENS, device=model.device).view(batch_size, -1)
        prompt = prompt % model.config.vocab_size
        config = generation_config(0, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0)
        config = compiled(config) if contestant.endswith("_compiled") else config
        speeds = []
        for _ in range(WARM_UPS + repeats):
            clock = Clock()
            mask = torch.ones_like(prompt)
            ids = model.generate(prompt, attention_mask=mask, generation_config=config, streamer=clock)
            _, first, *_, last = clock.arrivals
            speeds.append(batch_size * (new_tokens - 1) / (last - first))
        found[str(batch_size)] = {"tokens_per_second": speeds[WARM_UPS:], "ids": ids.tolist()}
    return found


def in_a_process(*arguments) -> dict:
    """Call `contest` with these arguments in a fresh process."""
    script = f"import json; from benchmarks.generate import contest; print(json.dumps(contest(*{arguments!r})))"
    return json.loads(run_python("-c", script, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def compare(folder: str, new_tokens: int, options: GenerateArguments) -> Iterator[dict]:
    """Run all contestants on one model, and yield a summary per batch size: tokens/s per contestant, whether its text
    equals GPT-2's, and ratios within each round."""
    settings = (folder, options.dtype, options.batch_sizes, new_tokens, options.repeats)
    arranges = options.dtype == "float32" and not ON_GPU
    names = [name for name in CONTESTANTS if arranges or name != "gpt2scratch_arranged"]
    rounds = [{name: in_a_process(name, *settings) for name in names} for _ in range(options.rounds)]
    for size in options.batch_sizes:
        found = {name: [one[name][str(size)] for one in rounds] for name in names}
        speeds = {name: np.array([one["tokens_per_second"] for one in found[name]]) for name in names}
        medians = {name: np.median(speeds[name], axis=1) for name in names}  # of (rounds, repeats)
        ratios = {f"{a} / {b}": spread(medians[a] / medians[b], 3) for a, b in RATIOS if a in names}
        ids = {name: [one["ids"] for one in found[name]] for name in names}
        yield {
            "batch_size": size,
            "tokens_per_second": {name: spread(speeds[name]) for name in names},
            "times_as_fast": ratios,
            "same_text": {name: ids[name] == ids["gpt2"] for name in names},
        }


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((GenerateArguments,), __doc__).parse(arguments)
    transformers.logging.disable_progress_bar()
    started, runs = time.perf_counter(), []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)  # weights of ten times the usual size: smaller weights repeat one token
            gpt2 = GPT2LMHeadModel(GPT2Config(**SHAPES[name], initializer_range=0.2, bos_token_id=0, eos_token_id=0))
            gpt2.save_pretrained(f"{folder}/gpt2")
            from_gpt2(gpt2).save_pretrained(f"{folder}/gpt2scratch")
            for found in compare(folder, NEW_TOKENS[name], options):
                runs.append({"model": name, **found})
                print(json.dumps(runs[-1], indent=2), flush=True)
    result = {
        **about("generate", arguments),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "rounds": options.rounds,
        "repeats_a_round": options.repeats,
        "time_of_the_prompt_included": False,
        "seconds": round(time.perf_counter() - started),
        "runs": runs,
    }
    write(f"generate-{device_kind()}" + ("" if options.dtype == "float32" else f"-{options.dtype}"), result)


if __name__ == "__main__":
    run(main)
