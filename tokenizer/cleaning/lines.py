"""Cleaning rules for lines: white space, ruler lines, repeated punctuation marks."""

# ruff: noqa: RUF001  this file contains look-alike characters on purpose

import re
from collections.abc import Callable

from tokenizer.cleaning.characters import BLANKS
from tokenizer.cleaning.markup import TAG_BEGUN

RULER = "-=*_~#+|.·•─━│┃═║—–" + BLANKS
# Marks of prose and of ruler lines. Brackets, quotes, slashes and number signs are not included: in code and Markdown their
# number has a meaning. Three marks stay, because three are an ellipsis or a dash.
MARKS = ".!?,;:-_=*~…·•–—‥。！？、，；：・～؟،؛۔।॥"
REPEATED_MARK = re.compile(rf"([{re.escape(MARKS)}])\1{{3,}}")
WORDLIKE = re.compile(r"[^\W_]")  # a letter or a number


def remove_trailing_blanks(text: str) -> str:
    return "\n".join([line.rstrip(BLANKS) for line in text.split("\n")])


def limit_blank_lines(text: str) -> str:
    return re.sub(r"\n{4,}", "\n\n\n", text) if "\n\n\n\n" in text else text


def join_blanks(text: str) -> str:
    if "  " not in text and "\t" not in text:
        return text
    return re.sub(r"[ \t](?<=\S.)[ \t]+(?=\S)", " ", text)


def shorten_repeated_marks(text: str) -> str:
    return REPEATED_MARK.sub(r"\1\1\1", text)


def remove_rulers(text: str) -> str:
    return _remove_lines(text, _is_ruler)


def _is_ruler(line: str) -> bool:
    """Return whether a line has only symbols, except `...`, which is a statement in Python and a pause in prose."""
    return not line.strip(RULER) and (bare := line.strip(BLANKS)) != "" and bare != "..."


def _remove_lines(text: str, is_removed: Callable[[str], bool]) -> str:
    lines = text.split("\n")
    if not any(map(is_removed, lines)):
        return text
    kept, in_tag = [], False  # removing a line inside an open angle bracket could complete a tag
    for line in lines:
        if in_tag or not is_removed(line):
            kept.append(line)
            bracket = max(line.rfind("<"), line.rfind(">"))
            if bracket >= 0:
                in_tag = TAG_BEGUN.match(line, bracket) is not None
    return "\n".join(kept)


def remove_wordless_lines(text: str) -> str:
    return _remove_lines(text, lambda line: not WORDLIKE.search(line) and line.strip() != "")
