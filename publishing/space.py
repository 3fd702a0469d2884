"""The folder of a Space: the demo's page, and what it needs to run without this repository."""

import json
import shutil
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData

from errors import UserError
from removal import renew

REPOSITORY = Path(__file__).parent.parent
MODEL_PACKAGE = REPOSITORY / "modeling_gpt2scratch"
PACKAGED = ("__init__.py", "configuration_gpt2scratch.py", "modeling_gpt2scratch.py", "loading.py")
PAGE = {f"app{suffix}": f"demo_page{suffix}" for suffix in (".py", ".css", ".html.j2")}
FILES = (*PAGE, "models.json", "requirements.txt", "README.md", f"{MODEL_PACKAGE.name}/*.py", "**/*.pyc")
NEEDED = ("torch", "transformers", "safetensors")  # a Space installs gradio by its sdk_version, and Jinja2 with it


def assemble_space(models: list[str], destination: Path, title: str) -> Path:
    """Write the folder of a Space that shows `models` (Hub ids) to `destination` again, and return it.

    Raises:
        UserError: gradio is not installed, whose version a Space has to name; `destination` holds other files.
    """
    try:
        gradio_version = version("gradio")
    except PackageNotFoundError as error:
        raise UserError(
            "A Space needs gradio, which is not installed: pip install -e '.[demo]' installs it."
        ) from error
    renew(destination, "space", FILES)
    for name, source in PAGE.items():
        shutil.copy(Path(__file__).with_name(source), destination / name)
    package = destination / MODEL_PACKAGE.name
    package.mkdir()
    for name in PACKAGED:  # so that no code of a repository runs there either
        shutil.copy(MODEL_PACKAGE / name, package / name)
    (destination / "models.json").write_text(json.dumps({"title": title, "models": models}, indent=2) + "\n")
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    needed = [line for line in setup["options"]["install_requires"].split() if line.startswith(NEEDED)]
    (destination / "requirements.txt").write_text("\n".join(needed) + "\n")
    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=gradio_version,
        python_version="3.11",
        app_file="app.py",
        models=models,
        short_description="Language models side by side on one prompt",
    )
    card = SpaceCard.from_template(data, template_path=str(Path(__file__).parent / "templates" / "space.md.j2"))
    card.save(destination / "README.md")
    return destination
