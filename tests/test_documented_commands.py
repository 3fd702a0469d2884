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
    "accelerate launch --quiet --config_file launch/two_cpu_processes.yaml train_accelerate.py --output_dir runs/two": f"{LIBRARY} --torch_compile false",
    "python -m training.evaluate runs/quickstart --checkpoint best": "",
    "python -m tokenizer.pretokenize --input my.txt --tokenizer . --output data/mine": "",
    "python -m training.evaluate . --data data/mine --compare": "",
    f"{PUSH} . --repo_id YOUR_NAME/x --dry_run": "",
    'python generate.py --prompt "def read_file(path"': "",
    "python -m training.compare_runs runs/*": "",
    f"{TRAIN} --config presets/gpt2.yaml --data data/my --plan --plan_device a100-80gb": "",
    f"{TRAIN} --config presets/shakespeare_char.yaml --data tinyshakespeare.txt --profile": LONGER,
    f"{TRAIN} --config presets/shakespeare_char_modern.yaml --data tinyshakespeare.txt": SMALL,
    "cp presets/nano.yaml presets/mine.yaml": "",
    f"{TRAIN} --budget 5m --plan": "--plan_steps 0",
    f"{TRAIN} --config presets/mine.yaml --data my.txt --plan": f"{SMALL} --plan_steps 1",
    f"{TRAIN} --config presets/mine.yaml --data my.txt": SMALL,
    f"{TRAIN} --init_from runs/quickstart --data my.txt": f"{SHORT} --tokens_per_step 256 --torch_compile false",
}

BOOKS = "python -m tokenizer.pretokenize --input books/"
CRAWL = "python -m tokenizer.pretokenize --input /shared/crawl/ --output /shared/crawl-store"
CONVERT = "python -m modeling_gpt2scratch.conversion_gpt2scratch"
EVALUATE = "python -m training.evaluate runs/quickstart"
TO_MY_DRIVE = "--backup_dir /content/drive/MyDrive/runs --max_hours 11.5"
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
BIBLE = "bible -f 'Genesis 1:1-Revelation 22:21' | sed -E 's/^[^ ]+ //' > bible.txt"
STORIES = ("tinystories_15m", "tinystories_15m_modern")
NIGHT = "--max_bytes 12GB --max_train_tokens 2500000000"
CURL = (
    "curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"model": "runs/x-chats-hub", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}'"""
)
GPUS = "accelerate launch --quiet --config_file launch"

# Commands that are not run: the reason, by the command or the file of tests that is run in their place.
INSTEAD = {
    "tests/test_house.py": {
        "make test": "runs all tests",
        "bash benchmarks/first_hour_on_gpu.sh": "needs a GPU; test_benchmarks.py runs it with tiny models",
    },
    "python -c pass": {
        "source .venv/bin/activate": "the environment of these tests is another",
        "python3 -m venv .venv && source .venv/bin/activate": "the environment of these tests is another",
        "cd gpt2scratch && source .venv/bin/activate": "the environment of these tests is another",
    },
    "tests/test_demo.py": {
        "python -m publishing.demo runs/a runs/b": "runs until Ctrl-C",
        "python -m publishing.demo YOUR_NAME/a YOUR_NAME/b --space YOUR_NAME/demo": "needs the Hub",
    },
    "tests/test_publishing.py": {
        f"{PUSH} runs/x --repo_id YOUR_NAME/x --dry_run": "ran for runs/my",
        f"{PUSH} runs/x --repo_id YOUR_NAME/x --license mit --language en": "needs the Hub",
        f"{PUSH} runs/x-chats --repo_id YOUR_NAME/x-chat --format native --gguf f16 --dry_run": "needs a chat model",
        f"{PUSH} runs/x-chats-pairs --repo_id YOUR_NAME/x-chat --format both --gguf f16": "needs the Hub",
        "hf auth login": "needs the Hub",
    },
    "tests/test_onnx.py": {
        f"{PUSH} . --repo_id YOUR_NAME/x --format onnx --dry_run": "needs the extra onnx",
        f"{PUSH} runs/x --repo_id YOUR_NAME/x --format gpt2scratch onnx": "needs the Hub",
    },
    "tests/test_static_page.py": {
        'python -m publishing.demo . --static docs/demo --examples "def read_file(path"': "needs the extra onnx",
        "python -m http.server -d docs/demo": "runs until Ctrl-C",
        f"{PUSH} runs/a runs/b --space YOUR_NAME/page --static": "needs the Hub",
    },
    "tests/test_sizing.py": {
        f"{TRAIN} --budget 5m": "takes five minutes",
        f"{TRAIN} --data my.txt --budget 2h --output_dir runs/my-2h": "takes a minute",
        f"{TRAIN} --data data/my --budget 120units --plan --plan_device a100-40gb": "no speed is known for a model of this text",
        f"{TRAIN} --data data/my --depth 12 --plan": "measures a large model",
    },
    "tests/test_finetuning.py": {
        "python -m examples.finetune_chat runs/x --data chats.jsonl": "needs TRL",
        "python -m examples.finetune_text runs/x --data recipes.txt": "needs PEFT",
        "python -m examples.finetune_preferences runs/x-chats --data pairs.jsonl": "needs TRL",
        "python -m examples.finetune_chat runs/x --data smoltalk": "needs the Hub",
        f"{GPUS}/one_node.yaml --num_processes 2 -m examples.finetune_chat runs/x --data chats.jsonl": "needs GPUs",
        "python -m examples.finetune_chat . --data data/chats.jsonl": "needs TRL",
        "python -m examples.finetune_preferences runs/gpt2scratch-chats --data data/pairs.jsonl": "needs TRL",
        "python -m examples.finetune_preferences runs/x-chats --data trl-lib/ultrafeedback_binarized": "needs the Hub",
    },
    "tests/test_several_processes.py": {
        f"{GPUS}/one_node.yaml --num_processes 4 train_accelerate.py --config presets/gpt2.yaml --data data/my": "needs GPUs",
        f"{GPUS}/fsdp2.yaml --num_processes 4 train_accelerate.py --config presets/gpt2_xl.yaml --data data/my": "needs GPUs",
    },
    f"{BOOKS} notes.jsonl.zst --output data/my --vocab_size 300": {
        f"{BOOKS} notes.jsonl.zst --output data/books": "the store is there, made by other settings"
    },
    "tests/test_evaluate.py": {
        f"{EVALUATE} --compare": "takes long, and ran with --memorization",
        f"{EVALUATE} --compare_with runs/quickstart/checkpoints/step_00000960": "the run here is shorter",
        "python -m training.evaluate runs/x --compare_with openai-community/gpt2 --compare_documents 200": "needs the Hub",
        f"{EVALUATE} --memorization": "takes long, and ran with --compare",
    },
    "tests/test_generate.py": {
        f"python generate.py runs/{name}": "needs a chat model"
        for name in ("x-chats --chat", "gpt2scratch-chats-pairs --chat --temperature 0")
    },
    "tests/test_lm_eval.py": {
        "python -m training.evaluate runs/x --tasks hellaswag,arc_easy,lambada_openai": "needs the Hub"
    },
    "tests/test_gguf.py": {
        "python -m publishing.gguf_file . x-f16.gguf": "needs the extra gguf",
        "python -m publishing.gguf_file runs/x x-q8_0.gguf --type q8_0": "needs the extra gguf",
        'llama-completion -m x-f16.gguf -p "Once upon a time" -n 100 -no-cnv': "needs llama.cpp",
        "llama-server -m runs/x-chats-hub/x-chat-F16.gguf": "needs llama.cpp",
        'ollama create x -f Modelfile && ollama run x "Once upon a time"': "needs ollama",
    },
    f"{BOOKS} --output data/crawl --vocab_size 300 --shard 0/1": {
        f"{CRAWL} --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT": "needs Slurm"
    },
    f"{BOOKS} --output data/crawl --vocab_size 300 --merge": {f"{CRAWL} --merge": "needs Slurm"},
    f"{TRAIN} --config presets/gpt2.yaml --data data/my --plan {SMALL} --plan_steps 1": {
        f"{TRAIN} --config presets/gpt2.yaml --data data/my --plan": "too large"
    },
    f"{TRAIN} --data my.txt --report_to tensorboard --output_dir runs/tracked {SMALL}": {
        "accelerate launch --quiet train_accelerate.py --data my.txt --report_to tensorboard wandb": "needs wandb"
    },
    "tests/test_hub.py": {
        f"{TRAIN} --data tinystories --max_bytes 200MB --budget 1h": "needs the Hub",
        f"{TRAIN} --config presets/gpt2_small_seed_modern.yaml --data fineweb-edu {NIGHT}": "needs the Hub",
        f"{TRAIN} --config presets/gpt2_small_seed.yaml --data fineweb-edu {NIGHT} --eval_strategy steps --eval_steps 4000": "needs the Hub",
    }
    | {f"{TRAIN} --config presets/{name}.yaml --data tinystories": "needs the Hub" for name in STORIES},
    "tests/test_plan.py": {
        f"curl -o tinyshakespeare.txt {TINY_SHAKESPEARE}": "needs the network",
        BIBLE: "needs the text of a Debian package",
        f"{TRAIN} --config presets/tinystories_15m_modern.yaml --data bible.txt --tokens_per_step 4096 --max_steps 800 --eval_steps 200 --save_steps 200 --output_dir runs/bible": "takes long",
    },
    "tests/test_root_model.py": {
        f"python -m benchmarks.root_model{flags}": "takes minutes or hours" for flags in ("", " --check")
    },
    "tests/test_imported.py": {
        "python -m tokenizer.pretokenize --import_tokens train.bin --val val.bin --dtype uint16 "
        "--tokenizer openai-community/gpt2 --output data/gpt2": "needs the Hub"
    },
    "tests/test_pretrained.py": {f"{TRAIN} --init_from openai-community/gpt2 --data my.txt": "needs the Hub"},
    "tests/test_training.py": {
        f"{TRAIN} --config presets/shakespeare_char.yaml --data tinyshakespeare.txt": "ran with --profile",
        "tensorboard --logdir runs": "runs until Ctrl-C",
        f"{TRAIN} --config presets/gpt2.yaml --data data/my": "too large",
    },
    "python -m tokenizer.inspect data/my": {
        "python -m tokenizer.inspect data/books": "the store may have other settings"
    },
    "tests/test_benchmarks.py": {
        f"python -m benchmarks.{name}": "writes a page of docs/"
        for name in ("performance", "scaling", "tokens_to_loss")
    }
    | {"python -m benchmarks.train_step --nanogpt path/to/nanoGPT": "takes long, and needs nanoGPT"}
    | {
        f"python -m benchmarks.speedrun {flags}": "takes minutes"
        for flags in (
            "--output mine.json",
            "--output mine.json --settings mine.yaml",
            "--verify benchmarks/results/speedrun-cpu.json",
        )
    },
    f"python -m training.sweep --vary learning_rate=1e-3 --validation_fraction 0.01 {SMALL}": {
        "python -m training.sweep --max_steps 70 --vary learning_rate=1e-2,2e-2,4e-2": "takes long"
    },
    "tests/vllm/run.sh": {
        "vllm serve runs/x-chats-hub --host 127.0.0.1": "needs vLLM",
        "vllm serve runs/x-chats --trust-remote-code --host 127.0.0.1": "needs vLLM",
    },
    "tests/test_conversion.py": {
        f"{CONVERT} openai-community/gpt2 models/gpt2": "needs the Hub",
        "transformers serve runs/x-chats-hub": "runs until Ctrl-C",
        CURL: "needs a server",
    },
    "mkdir -p drive": {"mkdir -p /content/drive/MyDrive/runs": "the path is Colab's"},
    f"{TRAIN} --config presets/gpt2.yaml --data data/my --backup_dir drive --max_hours 11.5 {SMALL}": {
        f"{TRAIN} --config presets/gpt2.yaml --data data/my {TO_MY_DRIVE}": "the path is Colab's"
    },
    f"{TRAIN} --resume_from_checkpoint runs/shakespeare_char_modern/checkpoints/step_00000002 --max_steps 8 --output_dir runs/shakespeare_longer": {
        f"{TRAIN} --resume_from_checkpoint runs/shakespeare_char_modern/checkpoints/step_00000400 --max_steps 2000 --output_dir runs/shakespeare_longer": "takes long"
    },
    "mkdir -p drive/runs": {"mkdir -p /mnt/bucket/runs": "the path is a mounted bucket"},
    f"{TRAIN} --config presets/gpt2.yaml --data data/my --backup_dir drive/runs --output_dir runs/rented {SMALL}": {
        f"{TRAIN} --config presets/gpt2.yaml --data data/my --backup_dir /mnt/bucket/runs --max_hours 11.5": "the path is a mounted bucket"
    },
    "tests/test_stopping.py": {"sbatch launch/slurm.sh --config presets/gpt2.yaml --data data/my": "needs Slurm"},
    f"{TRAIN} --resume_from_checkpoint runs/gpt2 --max_steps 6": {
        f"{TRAIN} --resume_from_checkpoint runs/gpt2": "too large"
    },
}
INSTEAD = {command: replacement for replacement, reasons in INSTEAD.items() for command in reasons}
LM_EVAL = "python -m lm_eval "
INSTALL = ("make install", "pip install")


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
    """Return the command line or test file that is run for a command, or None for an unknown command."""
    if command in RUN:
        return f"{command} {RUN[command]}".strip()
    if command.startswith(LM_EVAL):
        return "tests/test_lm_eval.py"
    if command.startswith(INSTALL) and "&&" not in command:
        return "tests/test_house.py"
    return INSTEAD.get(command)


def test_every_command_is_known_and_no_other():
    documented = commands()
    assert [command for command in documented if substitute(command) is None] == []
    assert {*RUN, *INSTEAD} <= {*documented}
    files = {text for text in map(substitute, documented) if text.startswith("tests/")}
    assert [name for name in files if not (REPOSITORY / name).is_file()] == []


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
    (folder / "tinyshakespeare.txt").write_text(f"ROMEO:\n{prose(51, 8000)}", encoding="utf-8")
    return folder


def program_of(command: str) -> str:
    """Return `python x.py` or `python -m x` of such a command, and the whole command otherwise."""
    match = re.match(r"python (-m )?[\w.]+", command)
    return match[0] if match else command


TESTED = [command for command in commands() if not (substitute(command) or "tests/").startswith("tests/")]
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
