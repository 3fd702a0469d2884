"""Cleaning rules for lines: white space, ruler lines, repeated punctuation marks."""

# ruff: noqa: RUF001  this file contains look-alike characters on purpose

import re

from tokenizer.cleaning.characters import BLANKS

RULER = "-=*_~#+|.·•─━│┃═║—–" + BLANKS
# Marks of prose and of ruler lines. Brackets, quotes, slashes and number signs are not included: in code and Markdown
# their number has a meaning. Three marks stay, because three are an ellipsis or a dash.
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
    return "\n".join([line for line in text.split("\n") if not _is_ruler(line)])


def _is_ruler(line: str) -> bool:
    """Return whether a line has only symbols, except `...`, which is a statement in Python and a pause in prose."""
    return not line.strip(RULER) and line.strip(BLANKS) not in ("", "...")


def remove_wordless_lines(text: str) -> str:
    return "\n".join([line for line in text.split("\n") if WORDLIKE.search(line) or line.strip() == ""])
