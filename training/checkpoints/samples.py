"""samples.md of a run: the prompts and their continuations at each validation."""

import re
from pathlib import Path

from common.atomic import write_atomic

# Parts of samples.md: the heading of a step, or a sample with its fence.
SECTION_OR_SAMPLE = re.compile(r"^## step (\d+)$|^(`{3,})text\n(.*?)\n\2$", re.MULTILINE | re.DOTALL)


def write_samples(path: Path, step: int, samples: list[tuple[str, str]]) -> None:
    """Append a section to samples.md."""
    texts = "".join(f"{fenced(prompt + text)}\n\n" for prompt, text in samples)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"## step {step}\n\n{texts}")


def read_samples(path: Path) -> dict[int, list[str]]:
    """Return prompts with their continuations by step, without samples cut off by a crash."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    samples: dict[int, list[str]] = {}
    section: list[str] = []
    for step, _, sample in SECTION_OR_SAMPLE.findall(text):  # a sample is one match, even if it contains headings
        if step:
            section = samples[int(step)] = []
        else:
            section.append(sample)
    return samples


def forget_samples_after(path: Path, step: int) -> None:
    """Remove the sections of later steps. Other text in the file stays."""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        positions = (match.start() for match in SECTION_OR_SAMPLE.finditer(text) if match[1] and int(match[1]) > step)
        write_atomic(path, text[: next(positions, len(text))])


def fenced(text: str) -> str:
    """Return a code block whose fence is longer than any in `text`."""
    fence = max(["``", *re.findall("`{3,}", text)], key=len) + "`"
    return f"{fence}text\n{text}\n{fence}"
