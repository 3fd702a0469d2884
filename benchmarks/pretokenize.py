"""Compare the speed of tokenization with nanoGPT's data preparation and with `datasets.map`.

python -m benchmarks.pretokenize                        # writes benchmarks/results/pretokenize-cpu.json
python -m benchmarks.pretokenize --megabytes 120 --num_proc 1

The text is available on any machine: sources, documentation and data files of Python and /usr/share, one document per
file. Every system starts in a separate process, from the same jsonl file and the same 32,000-token BPE, and ends with a
file of uint16 ids. The ids must be equal. The fastest of several runs counts. Systems that are not installed are
skipped and listed in the result.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.results import REPOSITORY, about, write
from common.command_line import FlagParser, run
from common.errors import UserError
from common.limits import setting

SUFFIXES = tuple(".py .txt .md .rst .h .html .json .po .pm .pl .js .c .xml .css .tex".split())
VOCAB_SIZE = 32000
DOCUMENT_BYTES = 200, 2_000_000

DATASETS_MAP = """
import sys, numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer
text, tokenizer, out, processes = sys.argv[1:]
rust = Tokenizer.from_file(tokenizer + "/tokenizer.json")
rust.encode_special_tokens = True
end = rust.token_to_id("<|endoftext|>")

def encode(batch):
    return {"ids": [e.ids + [end] for e in rust.encode_batch_fast(batch["text"], add_special_tokens=False)]}

if __name__ == "__main__":
    data = load_dataset("json", data_files=text, split="train")
    data = data.map(encode, batched=True, remove_columns=["text"], num_proc=int(processes))
    with open(out, "wb") as file:
        for batch in data.with_format("arrow").iter(1000):
            batch["ids"].combine_chunks().flatten().to_numpy().astype(np.uint16).tofile(file)
"""

# The method of nanoGPT's data/openwebtext/prepare.py: tiktoken, one document at a time, in datasets.map, then a second
# pass over 1,024 shards into a memory map.
NANOGPT = """
import sys, json, numpy as np, tiktoken
from datasets import load_dataset
text, tokenizer, out, processes = sys.argv[1:]

def encoding():
    model = json.load(open(tokenizer + "/tokenizer.json"))["model"]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(rest)}
    special = {"<|endoftext|>": 0, "<|pad|>": 1}
    ranks = {bytes(byte[c] for c in t): i for t, i in model["vocab"].items() if t not in special}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s"
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

encoder = encoding()

def process(example):
    ids = encoder.encode_ordinary(example["text"])
    ids.append(0)
    return {"ids": ids, "len": len(ids)}

if __name__ == "__main__":
    data = load_dataset("json", data_files=text, split="train")
    data = data.map(process, remove_columns=["text"], num_proc=int(processes))
    total = int(np.sum(data["len"], dtype=np.uint64))
    tokens = np.memmap(out, dtype=np.uint16, mode="w+", shape=(total,))
    position = 0
    for shard in range(1024):
        ids = np.concatenate(data.shard(num_shards=1024, index=shard, contiguous=True).with_format("numpy")["ids"])
        tokens[position : position + len(ids)] = ids
        position += len(ids)
    tokens.flush()
"""

PEERS = {
    "nanogpt_prepare": (NANOGPT, ("datasets", "tiktoken")),
    "datasets_map": (DATASETS_MAP, ("datasets",)),
}


@dataclass
class PretokenizeArguments:
    megabytes: int = setting(240, "Megabytes of text.", minimum=1)
    num_proc: list[int] = setting(
        sorted({1, os.cpu_count()}), "Numbers of processes to measure each system with.", minimum=1
    )
    repeats: int = setting(2, "Runs of each system; the fastest counts.", minimum=1)
    result: str = setting("pretokenize-cpu.json", "Name of the file in benchmarks/results.")


def texts(n_bytes: int) -> Iterator[str]:
    """Yield text files of this machine until `n_bytes` are reached, and repeat them if the machine has less.

    Every seventh file comes first, so that all kinds of files are included. No system profits from the repetition,
    because none keeps words cached from one batch to the next long enough.
    """
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share", "/usr/include", "/usr/lib"]
    found = (path for root in roots for path in Path(root).rglob("*") if path.suffix in SUFFIXES)
    paths, size = sorted(set(map(os.path.realpath, found))), 0
    for path in map(Path, itertools.cycle(path for first in range(7) for path in paths[first::7])):
        if not path.is_file() or not DOCUMENT_BYTES[0] < path.stat().st_size < DOCUMENT_BYTES[1]:
            continue
        with suppress(UnicodeDecodeError):
            text = path.read_bytes().replace(b"\r\n", b"\n").decode()
            if "\0" not in text and text.strip():
                yield text
                size += size_of([text])
        if size > n_bytes:
            return


def size_of(documents: list[str]) -> int:
    return sum(len(document.encode()) for document in documents)


@dataclass
class Timing:
    """Runs of programs, all in one scratch folder; of each, the fastest of several counts."""

    folder: Path
    num_proc: int
    repeats: int

    def ours(self, name: str, text: Path, n_bytes: int, *flags: str) -> dict[str, float]:
        """Measure this project, which writes a store called `name`."""
        command = ["-m", "tokenizer.pretokenize", "--num_proc", str(self.num_proc), "--cleaning", "none"]
        command += ["--validation_fraction", "0.05"]  # no document is longer than this share, so none is divided
        command += ["--input", str(text), "--output", str(self.folder / name), *flags]
        return self.measured(command, n_bytes, self.folder / name)

    def measured(self, command: list[str], n_bytes: int, output: Path) -> dict[str, float]:
        """Return the seconds of the fastest run, and the peak private memory of the process and its children."""
        cache = self.folder / "hf"
        environment = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1"}
        seconds, peak = [], 0
        for _ in range(self.repeats):
            shutil.rmtree(cache, ignore_errors=True)  # so that the peers find no cached results
            shutil.rmtree(output, ignore_errors=True)
            os.sync()  # so that pending writes of the previous system delay no other
            start = time.perf_counter()
            with tempfile.TemporaryFile() as errors:
                options = {"cwd": REPOSITORY, "env": environment, "stdout": subprocess.DEVNULL, "stderr": errors}
                process = psutil.Popen([sys.executable, *command], **options)
                while process.poll() is None:
                    peak = max(peak, private_memory(process))
                    with suppress(psutil.TimeoutExpired):
                        process.wait(timeout=0.5)
                seconds.append(time.perf_counter() - start)
                if process.returncode:
                    errors.seek(0)
                    raise UserError(f"{' '.join(command)[:200]} failed: {errors.read().decode()[-2000:]}")
        best = round(min(seconds), 2)
        return {"seconds": best, "mb_per_second": round(n_bytes / 1e6 / best, 2), "peak_memory_mb": round(peak / 1e6)}


def private_memory(root: psutil.Process) -> int:
    """Return the private bytes of a process and its children. `uss` would read all pages and slow them down."""
    with suppress(psutil.Error):
        memory = [process.memory_info() for process in (root, *root.children(recursive=True))]
        return sum(part.rss - part.shared for part in memory)
    return 0


def measure(timing: Timing, megabytes: int) -> dict[str, Any]:
    folder, documents = timing.folder, list(texts(megabytes * 1_000_000))
    text, size = written(documents, folder / "text.jsonl"), size_of(documents)
    otherwise = {"making_the_tokenizer": timing.ours("made", text, size, "--vocab_size", str(VOCAB_SIZE))}
    tokenizer = folder / "made" / "tokenizer"
    systems = {"gpt2scratch": timing.ours("ours", text, size, "--tokenizer", str(tokenizer))}
    reference, left_out = None, []
    for name, (script, packages) in PEERS.items():
        if absent := [package for package in packages if find_spec(package) is None]:
            left_out.append(f"{name}: {', '.join(absent)} not installed")
            continue
        path, out = folder / f"{name}.py", folder / f"{name}.bin"
        path.write_text(script)
        systems[name] = timing.measured([*map(str, (path, text, tokenizer, out, timing.num_proc))], size, out)
        reference = reference or out
        if out.read_bytes() != reference.read_bytes():
            raise UserError(f"The ids of {name} differ from those of {reference.stem}.")
    if reference is not None:
        check_identical(folder / "ours", reference)
    # Whether the time per megabyte, or the memory, grows with the size of the text or of a document
    for name, parts in {"a_quarter_of_the_text": documents[::4], "four_times_the_text": documents * 4}.items():
        other = written(parts, folder / "other.jsonl")
        otherwise[name] = timing.ours(name, other, size_of(parts), "--tokenizer", str(tokenizer))
    (folder / "one.txt").write_text("\n".join(documents), encoding="utf-8")
    one = timing.ours("one", folder / "one.txt", size, "--tokenizer", str(tokenizer))
    otherwise["all_in_one_document"] = one
    seconds = systems["gpt2scratch"]["seconds"]
    return {
        "num_proc": timing.num_proc,
        "bytes": size,
        "documents": len(documents),
        "systems": systems,
        "times_as_fast": {name: round(systems[name]["seconds"] / seconds, 1) for name in PEERS if name in systems},
        "gpt2scratch_otherwise": otherwise,
        "left_out": left_out,
    }


def written(documents: list[str], path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    return path


def check_identical(store: Path, reference: Path) -> None:
    """Check that the documents of both splits of the store equal those of the peer's single file."""

    def of_split(name: str) -> list[bytes]:
        tokens = np.fromfile(store / f"{name}.bin", dtype="<u2")
        ends = np.fromfile(store / f"{name}.bin.index", dtype="<u8")
        return [part.tobytes() for part in np.split(tokens, ends[:-1].astype(int))]

    theirs = np.fromfile(reference, dtype="<u2")
    ends = np.flatnonzero(theirs == 0) + 1
    expected = [part.tobytes() for part in np.split(theirs, ends[:-1])]
    if sorted(of_split("train") + of_split("val")) != sorted(expected):
        raise UserError("The ids of the store differ from those of its peers.")


def main(arguments: list[str]) -> None:
    (options,) = FlagParser((PretokenizeArguments,), __doc__).parse(arguments)
    runs = []
    for num_proc in sorted(set(options.num_proc)):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(Timing(Path(folder), num_proc, options.repeats), options.megabytes))
        print(json.dumps(runs[-1], indent=2), flush=True)
    packages = ("tokenizers", "pyarrow", "numpy", "datasets", "tiktoken", "transformers")
    versions = {name: version(name) for name in packages if find_spec(name)}
    write(options.result.removesuffix(".json"), about("pretokenize", arguments) | {"versions": versions, "runs": runs})


if __name__ == "__main__":
    run(main)
