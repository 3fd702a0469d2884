"""Audit: decides from the counts of what was replaced and left out whether the input is clean text."""

from dataclasses import dataclass

from common.errors import UserError, counted
from tokenizer.corpus import files
from tokenizer.corpus.documents import Counts, place_words
from tokenizer.corpus.files import TOLERATED_SHARE

SKIPPED_SHARE = 0.5  # share of the bytes up to which files that were found are skipped because they cannot be read
LEFT_OUT = {
    "blank": ("blank document", None),
    "binary_files": ("binary file", None),
    "tables": ("table without a text column", "tables without a text column"),
    "unreadable_files": ("file that cannot be read in full", "files that cannot be read in full"),
    "bad_bytes": ("byte that is not UTF-8", "bytes that are not UTF-8"),
    "empty_records": ("record without text", "records without text"),
    "cut_words": ("text run cut without a word boundary", "text runs cut without a word boundary"),
    "links": ("link that was not followed", "links that were not followed"),
}


@dataclass(frozen=True)
class Audit:
    inputs: list[str]
    strict: bool  # refuse all text that is not clean
    size: int  # bytes of all local files
    most_bytes: float  # upper bound of the bytes of text
    links: int  # links in folders, which were not followed
    may_exclude: bool  # whether --exclude can skip a file

    def check(self, counts: Counts, is_all: bool = True) -> None:
        """Raise a `UserError` if too much text is unclean. If `is_all` is false, more text follows, which counts."""
        inputs, left_out = ", ".join(self.inputs), self.left_out_words(counts)
        or_exclude = " or skip it with --exclude" * self.may_exclude
        unclean = [name for name in LEFT_OUT if name in counts.first]  # no place is recorded for blank documents
        if self.strict and (unclean or self.links):
            raise UserError(f"{inputs} is not clean ({left_out}), which --strict refuses{_worst(counts, *unclean)}.")
        if counts.unreadable_bytes > SKIPPED_SHARE * self.size:
            raise UserError(
                f"{inputs}: {counted(counts.unreadable_files, 'file')} of {counts.unreadable_bytes:,} bytes cannot be "
                f"read in full, more than half of {self.size:,} bytes{_worst(counts, 'unreadable_files')}; correct "
                f"that, or skip the file with --exclude."
            )
        if counts.documents == 0 and is_all:
            raise UserError(f"{inputs} contains no text: {left_out or 'nothing was found'}{_worst(counts, *unclean)}.")
        size = max(counts.bytes - 2 * counts.bad_bytes, 0 if is_all else self.most_bytes)  # U+FFFD takes three bytes
        if counts.bad_bytes > TOLERATED_SHARE * size:
            raise UserError(
                f"{inputs} is not UTF-8 text: {counts.bad_bytes:,} of {size:,} bytes are invalid"
                f"{_worst(counts, 'bad_bytes')}; convert it to UTF-8{or_exclude}."
            )
        if is_all and counts.empty_records > TOLERATED_SHARE * (counts.documents + counts.empty_records):
            is_broken = counts.worst()["empty_records"][1].get("why") == "broken"
            remedy = "correct that" if is_broken else "name the right column with --text_column"
            raise UserError(
                f"{inputs}: {counts.empty_records:,} records have no text and {counts.documents:,} have text"
                f"{_worst(counts, 'empty_records')}; {remedy}{or_exclude}."
            )

    def left_out_words(self, counts: Counts) -> str:
        numbers = vars(counts) | {"links": self.links}
        return ", ".join(counted(numbers[name], *words) for name, words in LEFT_OUT.items() if numbers[name])


def _worst(counts: Counts, *names: str) -> str:
    """Return the file with the most of the first of `names`, and its first place, as the end of a sentence."""
    if not names or names[0] not in (worst := counts.worst()):
        return ""
    path, place = worst[names[0]]
    if names[0] == "bad_bytes" and "byte" not in place:
        place = place | {"line": files.first_bad_line(path)}
    words = place_words(place, path)
    if len(place["files"]) == 1 or place["number"] == 1:
        return f"; the first in {path}{words}"
    return f"; {place['number']:,} of them in {path}{words.replace(', ', ', the first in ', 1)}"
