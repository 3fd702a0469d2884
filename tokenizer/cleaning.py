"""Cleaning of documents: named stages of rules that change a text or drop a document, with counts and examples.

Rules know scripts, not languages. They look at one document at a time and at nothing else, so that the result is the
same for any number of processes.
"""

import bisect
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

from limits import setting
from tokenizer import characters, lines, markup
from tokenizer.quality import FILTERS, failed_filter

LEVELS = ("lenient", "balanced", "strict")
# The names of rules begin with the stage that introduces them; a level includes the levels before it.
STAGES: dict[str, tuple[str, ...]] = {
    "normalize": ("normalize",),
    **{level: LEVELS[: i + 1] for i, level in enumerate(LEVELS)},
    "quality": ("quality",),
}
# In the order in which they are applied; a level applies its own and those of the levels before it. Later rules see the
# result of earlier ones: cleaning a clean text changes nothing.
RULES: dict[str, Callable[[str], str]] = {
    "normalize.line_ends": characters.convert_line_ends,
    "normalize.control_characters": characters.remove_control_characters,
    "normalize.nfc": characters.compose,
    "lenient.invisible": characters.remove_invisible,
    "balanced.entities": markup.decode_entities,
    "strict.emoji": characters.remove_emoji,
    "strict.typography": characters.convert_typography,
    "balanced.markup": markup.remove_markup,
    "strict.addresses": markup.remove_addresses,
    "strict.blanks": lines.join_blanks,
    "balanced.symbol_lines": lines.remove_rulers,
    "balanced.repeated_marks": lines.shorten_repeated_marks,
    "strict.wordless_lines": lines.remove_wordless_lines,
    "lenient.trailing_blanks": lines.remove_trailing_blanks,
    "lenient.blank_lines": lines.limit_blank_lines,
}
EXAMPLES, EXAMPLE_LENGTH = 3, 160


@dataclass
class CleaningArguments:
    cleaning: list[str] = setting(
        ["normalize"],
        "Stages of cleaning, in this order: `normalize` (NFC, line ends, control characters), one of `lenient` "
        "(invisible leftovers), `balanced` (markup and rulers too) and `strict` (plain prose only), `quality` (drops "
        "documents that are no running text). `none` alone: not a character is changed.",
    )


@dataclass
class RuleStats:
    """What one rule did to the documents of a run."""

    documents: int = 0  # changed or dropped; each piece of a longer document counts as one
    characters: int = 0  # removed; all of a dropped document
    # The first three: the place of the first change, before and after, or the beginning of a dropped document.
    examples: list[str] = field(default_factory=list)
    dropped: bool = False


def merged(*runs: dict[str, RuleStats]) -> dict[str, RuleStats]:
    """Return the statistics of several runs as if one had cleaned the documents of all, in the order of the rules."""
    total = {}
    for name in (*RULES, *FILTERS):
        if parts := [stats[name] for stats in runs if name in stats]:
            examples = [example for part in parts for example in part.examples][:EXAMPLES]
            documents, removed = sum(part.documents for part in parts), sum(part.characters for part in parts)
            total[name] = RuleStats(documents, removed, examples, parts[0].dropped)
    return total


def problems(arguments: CleaningArguments) -> list[str]:
    """Return what is wrong with the stages, a sentence each."""
    names, found = arguments.cleaning, []
    for name in dict.fromkeys(names):
        if name not in STAGES and name != "none":
            nearest = difflib.get_close_matches(name, [*STAGES, "none"], n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(STAGES)}; and none, alone."
            found.append(f"Unknown cleaning stage {name}. {hint}")
    kinds = ["level" if name in LEVELS else name for name in names]
    if len(set(kinds)) < len(kinds) or ("none" in names and len(names) > 1) or not names:
        found.append(
            f"cleaning is {' '.join(names) or 'empty'}; give none alone, or some of normalize, one of {', '.join(LEVELS)}, "
            f"and quality, each once."
        )
    return found


class Cleaner:
    """Applies stages to documents and counts the effect of each rule.

    `stages` are names of `STAGES`, or `none` alone; see `problems`.
    """

    def __init__(self, stages: list[str]):
        self._rules: list[tuple[str, Callable[[str], str] | None]] = []  # None: the quality filters
        for stage in stages:
            if stage == "quality":
                self._rules.append((stage, None))
            elif stage != "none":
                self._rules += [(name, rule) for name, rule in RULES.items() if name.split(".")[0] in STAGES[stage]]
                if stage in LEVELS and "normalize" in stages:
                    # A level may have removed what stood between a letter and its mark, or decoded a mark.
                    self._rules.append(("normalize.nfc", characters.compose))
        self._stats: dict[str, RuleStats] = {}

    def __call__(self, text: str, whole: bool = True) -> str | None:
        """Return the cleaned text, which may be blank; None for a document that is dropped.

        If `whole` is false, `text` is a piece of a document, cut between words or before a line break. Quality filters
        are made for web pages and do not apply to it.
        """
        for name, rule in self._rules:
            if rule is None:
                if whole and (failed := failed_filter(text)):
                    self._count(failed, text, None)
                    return None
            elif (cleaned := rule(text)) != text:
                self._count(name, text, cleaned)
                text = cleaned
        return text

    def _count(self, name: str, before: str, after: str | None) -> None:
        """Count a change, or a dropped document (None)."""
        stats = self._stats.setdefault(name, RuleStats(dropped=after is None))
        stats.documents += 1
        stats.characters += max(0, len(before) - len(after or ""))
        if len(stats.examples) < EXAMPLES:
            escape = ascii if name == "normalize.nfc" else repr  # composed letters look like their parts
            stats.examples.append(_beginning(before) if after is None else _difference(before, after, escape))

    @property
    def stats(self) -> dict[str, RuleStats]:
        """Statistics of the rules that had an effect, in a fixed order."""
        return merged(self._stats)


def _difference(before: str, after: str, escape: Callable[[str], str]) -> str:
    """Return the first place where two texts differ, with invisible characters escaped."""
    shorter = min(len(before), len(after))
    same = bisect.bisect_left(range(shorter), True, key=lambda i: before[: i + 1] != after[: i + 1])
    length = (EXAMPLE_LENGTH - len(" → ")) // 2
    lead = escape(before[max(0, same - 20) : same])[1:-1][-30:]
    old, new = ((lead + escape(text[same : same + length])[1:-1])[:length] for text in (before, after))
    return f"{old} → {new}"


def _beginning(text: str) -> str:
    return repr(" ".join(text[: 4 * EXAMPLE_LENGTH].split()))[1:-1][:EXAMPLE_LENGTH]
