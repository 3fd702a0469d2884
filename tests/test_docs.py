"""The Markdown of the repository: links, anchors and line lengths."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from conftest import REPOSITORY

FAKE_CUDA = REPOSITORY / "tests" / "fake_cuda" / "README.md"
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), FAKE_CUDA])
DOCS = [page for page in PAGES if page.parent == REPOSITORY / "docs" and page.name != "log.md"]
# They may link the log of experiments.
MAINTAINERS = {"CONTRIBUTING.md", "AGENTS.md", "architecture.md", "customize.md"}
LONGEST_CODE = 100  # characters that GitHub shows without a scroll bar


def prose(page) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeats = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
        found.append(f"{anchor}-{repeats}" if repeats else anchor)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):  # on the web
            continue
        path, _, anchor = unquote(target).partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}: no such heading"


def test_the_readme_is_short_and_its_code_fits_the_page():
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = re.sub(r"\A---\n.*?^---\n", "", page, flags=re.DOTALL | re.MULTILINE).splitlines()  # without the metadata
    blocks = re.findall(r"^```.*?\n(.*?)^```", "\n".join(lines), re.DOTALL | re.MULTILINE)
    assert len(lines) <= 170
    assert [line for block in blocks for line in block.splitlines() if len(line) > LONGEST_CODE] == []


def linked(page) -> set[Path]:
    """Return the files that a page links to."""
    targets = [unquote(target).partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    return {(page.parent / target).resolve() for target in targets if target and not re.match(r"[a-z]+:", target)}


def test_every_page_is_two_clicks_from_the_readme_and_the_log_is_for_maintainers():
    first = linked(REPOSITORY / "README.md")
    second = set().union(*(linked(page) for page in first if page.suffix == ".md"))
    assert {*DOCS} - first - second == set()
    assert {page.name for page in PAGES if REPOSITORY / "docs" / "log.md" in linked(page)} <= MAINTAINERS


def test_the_documentation_fits_an_afternoon():
    """Words as `wc -w` counts them."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (*DOCS, REPOSITORY / "CHANGELOG.md")}
    assert words.pop("CHANGELOG.md") <= 900
    assert sum(words.values()) <= 30_000


def test_orders_of_reading_have_at_most_five_pages():
    rows = re.findall(r"^\| (?:have|want) .*$", (REPOSITORY / "docs" / "README.md").read_text(), re.MULTILINE)
    assert [1 < row.count("](") <= 5 for row in rows] == [True, True, True]
