"""Plain technical English: words that this project's text once used in senses of its own, each with its replacement."""

import re

import pytest

from conftest import REPOSITORY

PLAIN = {
    r"told": "named, given or printed",
    r"tells": "reports, prints or describes",
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"beside(s)?": "next to, with, or compared with",
    r"who(m)?ever|whatever|wherever": "name the noun",
    r"strangers?": "name who is meant",
    r"doors?": "command or entry point",
    r"becomes? of": "status of",
    r"(?<!there )is no (?!longer|more|other)\w+": "is not a",
    r"(go|goes|going|went|gone) on": "resume or continue",
    r"by heart": "memorize",
    r"in all(?=[.,;:)]|$)": "total",
    r"on end": "in a row",
    r"leaps?|leapt": "spike",
    r"likeliest": "most likely",
    r"dear(er|est)?": "expensive",
    r"so many times as|times as fast as ours": "ratio",
    r"bits a byte|tokens a (second|step|parameter)|seconds a step|bytes a (token|parameter)": "per",
    r"lies? (in|at|on|there|here|next)": "is in",
    r"ere|hence|whence|thence|thereof|wherein|none the less|of its own accord|in its stead": "plain words",
    r"aloud": "print",
    r"everyone else|nobody else|somebody else": "name who is meant",
}
NOT_PLAIN = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in PLAIN), re.IGNORECASE)
FOLDERS = "docs tokenizer training publishing modeling_gpt2scratch presets launch examples common benchmarks".split()
TEXT = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("*.py"),
    *(
        path
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in {".md", ".py", ".yaml", ".j2", ".ipynb", ".txt"}
    ),
]


@pytest.mark.parametrize("path", sorted(TEXT), ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_text_uses_plain_words(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [(n, match[0]) for n, line in enumerate(lines, 1) for match in NOT_PLAIN.finditer(line[:2000])]
    assert found == [], "replace these; PLAIN names replacements"
