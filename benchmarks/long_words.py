"""Tokenize texts without spaces: check that time grows linearly with size and that the ids equal those of `tokenizers`.

python -m benchmarks.long_words          # writes benchmarks/results/long-words-cpu.json

GPT-2's pattern reads DNA as a single word, and Chinese without punctuation as long words. Base64 and minified code have
short words and no spaces. Every text is generated from a seed. Each run is `tokenizer.pretokenize` in a separate
process, which trains the BPE and encodes. Its startup takes about two seconds.
"""

import base64
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from common.command_line import FlagParser, run
from tokenizer.encoding.encode import load_rust

MEGABYTES = (1, 2, 4)
STATEMENTS = (
    "function {}({},{}){{return {}.{}({})}}",
    "var {}={},{}={};",
    "if({}){{{}={}}}else{{{}()}}",
    '{}["{}"]={};',
)


def minified(pick: random.Random, n_bytes: int) -> str:
    names = ["".join(pick.choices("abcdefghijklmnopqrstuvwxyz$_", k=pick.randint(1, 4))) for _ in range(2000)]
    code = ""
    while len(code) < n_bytes:
        statement = pick.choice(STATEMENTS)
        code += statement.format(*pick.choices(names, k=6))
    return code[:n_bytes]


def chinese(pick: random.Random, n_bytes: int) -> str:
    """Return random frequent and rare characters, three bytes each."""
    return "".join(chr(0x4E00 + min(int(pick.expovariate(1 / 600)), 5000)) for _ in range(n_bytes // 3))


TEXTS = {
    "dna": lambda pick, n_bytes: "".join(pick.choices("ACGT", k=n_bytes)),
    "base64": lambda pick, n_bytes: base64.b64encode(pick.randbytes(n_bytes * 3 // 4)).decode(),
    "minified_code": minified,
    "chinese": chinese,
}


def made(kind: str, megabytes: int, folder: Path) -> dict[str, Any]:
    """Tokenize one text, verify its ids, and return the wall and CPU seconds."""
    text = TEXTS[kind](random.Random(0), megabytes * 1_000_000)
    source, store = folder / f"{kind}-{megabytes}.txt", folder / f"{kind}-{megabytes}"
    source.write_text(text, encoding="utf-8")
    before = os.times()
    results.run_python("-m", "tokenizer.pretokenize", "--quiet", "--input", source, "--output", store)
    _, _, user, system, seconds = np.subtract(os.times(), before).tolist()
    verify(text, store)
    return {"seconds": round(seconds, 1), "cpu_seconds": round(user + system, 1)}


def verify(text: str, store: Path) -> None:
    """Check all ids. The end of a single document, with its end-of-text token, is the validation split."""
    expected = load_rust(store / "tokenizer" / "tokenizer.json").encode(text, add_special_tokens=False).ids
    train, val = (np.fromfile(store / f"{split}.bin", dtype="<u2").tolist() for split in ("train", "val"))
    if train + val[:-1] != expected:
        raise SystemExit(f"The ids of {store.name} differ from those of tokenizers.")


def main(arguments: list[str]) -> None:
    FlagParser((), __doc__).parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: {f"{mb} MB": made(kind, mb, Path(folder)) for mb in MEGABYTES} for kind in TEXTS}
    print(json.dumps(runs, indent=2))
    results.write(
        "long-words-cpu", results.about("long_words", sys.argv[1:]) | {"ids_are_those_of_tokenizers": True} | runs
    )


if __name__ == "__main__":
    run(main)
