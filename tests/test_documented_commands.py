"""Run every command line of README.md and docs/ in order, or its substitute, which has a reason."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from conftest import REPOSITORY, clean_environment, prose

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHORT = "--max_steps 4 --eval_steps 2 --save_steps 2 --max_eval_samples 8 --sample_tokens 8"
SMALL = f"{SHORT} --tokens_per_step 256 --n_layer 1 --n_head 2 --n_embd 32 --n_positions 64 --torch_compile false"
LONGER = SMALL.replace("--max_steps 4", "--max_steps 8")
LIBRARY = f"{SHORT} --validation_fraction 0.01"  # on the quickstart's own text, whose validation takes long
TRAIN = "python train_accelerate.py"
PUSH = "python push_to_hub.py"

# Commands that are run, and the flags that make them short or keep them from needing the Hub.
RUN = {
    TRAIN: LIBRARY,
    'python generate.py runs/quickstart --prompt "def "': "",
    "python -m examples.python_chats": "",
    f"{TRAIN} --data my.txt": SMALL,
    f"{TRAIN} --resume_from_checkpoint runs/my": "--max_steps 6",
    "python -m training.evaluate runs/my --compare --memorization": "",
    f"{PUSH} runs/my --repo_id YOUR_NAME/my-model": "--dry_run",
    "python -m modeling_gpt2scratch.conversion_gpt2scratch runs/my/model models/native --to native": "",
    "accelerate launch --quiet --config_file launch/two_cpu_processes.yaml train_accelerate.py --output_dir runs/two": (
        f"--data my.txt {SMALL}"
    ),
    "python -m training.evaluate runs/quickstart --checkpoint best": "",
    "python -m tokenizer.pretokenize --input my.txt --tokenizer . --validation_fraction 0.9 --output data/mine": "",
    "python -m training.evaluate . --data data/mine --compare": "",
    f"{PUSH} . --repo_id YOUR_NAME/x --dry_run": "",
    'python generate.py --prompt "def read_file(path"': "",
    "python -m training.compare_runs runs/*": "",
    f"{TRAIN} --config presets/gpt2.yaml --data data/my --plan --plan_device a100-80gb": "",
    f"{TRAIN} --config presets/shakespeare_char.yaml --data tinyshakespeare.txt --profile": LONGER,
    f"{TRAIN} --config presets/shakespeare_char_modern.yaml --data tinyshakespeare.txt": SMALL,
    "cp presets/quickstart.yaml presets/mine.yaml": "",
    f"{TRAIN} --budget 5m --plan": "--plan_steps 0 --validation_fraction 0.01",  # tokens of the quickstart above
    f"{TRAIN} --config presets/mine.yaml --data my.txt --plan": f"{SMALL} --plan_steps 0",
    f"{TRAIN} --config presets/mine.yaml --data my.txt": SMALL,
    f"{TRAIN} --init_from runs/quickstart --data my.txt": f"{SHORT} --tokens_per_step 256 --torch_compile false",
}

BOOKS = "python -m tokenizer.pretokenize --input books/"
CRAWL = "python -m tokenizer.pretokenize --input /shared/crawl/ --output /shared/crawl-store"
GPT2 = f"{TRAIN} --config presets/gpt2.yaml --data data/my"
MODERN = f"{TRAIN} --resume_from_checkpoint runs/shakespeare_char_modern/checkpoints/step_00000"

# Commands in whose place others are run: with other paths, or shorter.
REPLACED = {
    f"{BOOKS} notes.jsonl.zst --output data/books": f"{BOOKS} notes.jsonl.zst --output data/my --vocab_size 300",
    "python -m tokenizer.inspect data/books": "python -m tokenizer.inspect data/my",
    f"{CRAWL} --shard $SLURM_ARRAY_TASK_ID/64": f"{BOOKS} --output data/crawl --vocab_size 300 --shard 0/1",
    f"{CRAWL} --merge": f"{BOOKS} --output data/crawl --vocab_size 300 --merge",
    f"{GPT2} --plan": f"{GPT2} --plan {SMALL} --plan_steps 0",
    f"{TRAIN} --data my.txt --report_to tensorboard": (
        f"{TRAIN} --data my.txt --report_to tensorboard --output_dir runs/tracked {SMALL}"
    ),
    "python -m training.sweep --max_steps 70 --vary learning_rate=1e-2,2e-2,4e-2": (
        f"python -m training.sweep --data my.txt --vary learning_rate=1e-3 {SMALL}"
    ),
    f"{MODERN}400 --max_steps 2000 --output_dir runs/shakespeare_longer": (
        f"{MODERN}002 --max_steps 8 --output_dir runs/shakespeare_longer"
    ),
    "mkdir -p /content/drive/MyDrive/runs": "mkdir -p drive",
    f"{GPT2} --backup_dir /content/drive/MyDrive/runs --max_hours 11.5": (
        f"{GPT2} --backup_dir drive --max_hours 11.5 {SMALL}"
    ),
    "mkdir -p /mnt/bucket/runs": "mkdir -p drive/runs",
    f"{GPT2} --backup_dir /mnt/bucket/runs --max_hours 11.5": (
        f"{GPT2} --backup_dir drive/runs --output_dir runs/rented {SMALL}"
    ),
    f"{TRAIN} --resume_from_checkpoint runs/gpt2": f"{TRAIN} --resume_from_checkpoint runs/gpt2 --max_steps 6",
}

# Patterns of commands that are not run, by the reason; tests of their own cover most of them.
NOT_RUN = {
    "installs packages": r"^(make|pip) install|venv",
    "needs the Hub": r"YOUR_NAME/|openai-community/|trl-lib/|hf auth|--data (smoltalk|tinystories|fineweb-edu)|--tasks",
    "needs GPUs": r"/(one_node|fsdp2)\.yaml|first_hour_on_gpu",
    "needs an extra or a fine-tuned model": r"examples\.finetune|gguf_file|demo \. --static|runs/\S+-chats",
    "needs another program or the network": r"^(sbatch|curl|bible|llama-|ollama|vllm) ?",
    "runs until Ctrl-C": r"publishing\.demo runs|http\.server|tensorboard --logdir|transformers serve",
    "takes long": r"^make test$|-m benchmarks\.|--budget (5m|2h)|--depth 12|--data bible\.txt|--data data/my$",
    "ran with other flags or another run": r"runs/quickstart --(compare|memorization)|shakespeare_char\.yaml|120units",
}


def commands() -> list[str]:
    """Return the unique lines of all ```bash blocks in order, without comments."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            lines = (
                " ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in block.replace("\\\n", " ").splitlines()
            )
            found += filter(None, lines)
    return list(dict.fromkeys(found))


def substitute(command: str) -> str | None:
    """Return the command line that is run for a command, if any."""
    return f"{command} {RUN[command]}".strip() if command in RUN else REPLACED.get(command)


TESTED = [command for command in commands() if substitute(command)]


def test_every_command_is_known_and_no_other():
    others = [command for command in commands() if command not in TESTED]
    assert [command for command in others if not any(re.search(words, command) for words in NOT_RUN.values())] == []
    assert {*RUN, *REPLACED} == {*TESTED}
    assert all(any(re.search(words, command) for command in others) for words in NOT_RUN.values())


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a folder that a clone lacks, or that commands do not need."""
    at_root = {"runs", "data", "wandb", "build", "tests"} if Path(folder) == REPOSITORY else set()
    return {name for name in names if name.startswith(".") or name in at_root | {"__pycache__"}}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Copy of the repository with the input files that the documents name."""
    folder = tmp_path_factory.mktemp("clone") / "GPT2Scratch"
    shutil.copytree(REPOSITORY, folder, ignore=left_out)
    (folder / "books").mkdir()
    for i in range(8):
        (folder / "books" / f"{i}.txt").write_text(prose(i, 2000), encoding="utf-8")
    notes = "".join(json.dumps({"text": prose(i, 200)}) + "\n" for i in range(20, 40))
    (folder / "notes.jsonl.zst").write_bytes(zstandard.compress(notes.encode()))
    (folder / "my.txt").write_text(prose(50, 8000), encoding="utf-8")
    (folder / "tinyshakespeare.txt").write_text(prose(51, 8000), encoding="utf-8")
    return folder


def program_of(command: str) -> str:
    """Return `python x.py` or `python -m x` of such a command, and the whole command otherwise."""
    match = re.match(r"python (-m )?[\w.]+", command)
    return match[0] if match else command


FIRST = {program_of(substitute(command)): command for command in reversed(TESTED)}


@pytest.mark.parametrize("command", TESTED)
def test_a_documented_command_works(command, clone, launch):
    """The first command of each program runs as in a terminal, with the default number of threads."""
    text = substitute(command)
    if "runs/x" in command and not (clone / "runs" / "x").exists():
        shutil.copytree(clone / "runs" / "quickstart", clone / "runs" / "x")
    if command in FIRST.values():
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        options = {"cwd": clone, "env": {**clean_environment(), "PATH": path}, "timeout": 1200}
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, **options)
    else:
        done = launch(*shlex.split(text)[1:], folder=clone)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
