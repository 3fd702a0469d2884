"""The folder that goes to the Hub: an allow-list of files, and the model card."""

import re
import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from errors import UserError
from training.run_folder import RunFolder

# Nothing else is ever copied: no optimizer state, no logs with paths, no file that merely lies there.
ALLOWED = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("model-*-of-*.safetensors", "model.safetensors.index.json"),  # a model of many gigabytes comes in shards
    *("configuration_gpt2scratch.py", "modeling_gpt2scratch.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)
NEEDED = ("config.json", "configuration_gpt2scratch.py", "modeling_gpt2scratch.py", "tokenizer.json")


def assemble(run: RunFolder, repo_id: str, licence: str | None, destination: Path) -> Path:
    """Copies the run's model to `destination` (made anew) and writes its card.

    Raises:
        UserError: the run has no model yet, or lacks a file that the Hub folder needs.
    """
    missing = [name for name in NEEDED if not (run.model / name).is_file()]
    if missing:
        raise UserError(
            f"{run.path} cannot be published: {run.model} lacks {', '.join(missing)}; train until a checkpoint."
        )
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for pattern in ALLOWED:
        for path in run.model.glob(pattern):
            shutil.copy(path, destination / path.name)
    if run.plot.is_file():
        shutil.copy(run.plot, destination / run.plot.name)
    (destination / "README.md").write_text(model_card(run, repo_id, licence), encoding="utf-8")
    return destination


def model_card(run: RunFolder, repo_id: str, licence: str | None) -> str:
    """The run's report, its model named by `repo_id`, under the Hub's metadata."""
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", license=licence, tags=["gpt2scratch"]
    )
    report = run.report.read_text(encoding="utf-8") if run.report.is_file() else f"# {run.path.name}\n"
    report = re.sub(r"\A# .*", f"# {repo_id}", report)
    report = re.sub(r'from_pretrained\("[^"]*"', f'from_pretrained("{repo_id}"', report)  # whatever it was called here
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{report}"))
