"""Cleaning of documents: named stages of rules that change a text or drop a document, with counts and examples.

Rules depend on scripts, not on languages. Each rule sees only one document at a time, so the result is the same
for any number of processes.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from common.limits import setting
from tokenizer.cleaning import characters, lines, markup
from tokenizer.cleaning.quality import FILTERS, failed_filter

LEVELS = ("lenient", "balanced", "strict")
# Rule names begin with the stage that introduces the rule; a level includes the levels before it.
STAGES: dict[str, tuple[str, ...]] = {
    "normalize": ("normalize",),
    **{level: LEVELS[: i + 1] for i, level in enumerate(LEVELS)},
    "quality": (),  # all filters, after the rules of the other stages
    "none": (),
}
# In order of application. Later rules see the result of earlier ones. Cleaning a clean text changes nothing.
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
        "Cleaning stages, in this order: `normalize` (NFC, line endings, control characters); then one of `lenient` "
        "(invisible characters), `balanced` (also markup, ruler lines) or `strict` (only prose); then `quality` "
        "(only documents of running text). `none`, alone, changes nothing.",
        choices=list(STAGES),
    )


@dataclass
class RuleStats:
    """Effect of one rule on the documents of a run."""

    documents: int = 0  # number of changed or dropped documents; each piece of a long document or chat counts
    characters: int = 0  # number of removed characters, including dropped documents
    # The first three: text before and after the first change, or the beginning of a dropped document.
    examples: list[str] = field(default_factory=list)
    dropped: bool = False


def merged(*runs: dict[str, RuleStats]) -> dict[str, RuleStats]:
    """Return the combined statistics of several runs, in the order of the rules."""
    total = {}
    for name in (*RULES, *FILTERS):
        if parts := [stats[name] for stats in runs if name in stats]:
            examples = [example for part in parts for example in part.examples][:EXAMPLES]
            documents, size = sum(part.documents for part in parts), sum(part.characters for part in parts)
            total[name] = RuleStats(documents, size, examples, parts[0].dropped)
    return total


def problems(arguments: CleaningArguments) -> list[str]:
    """Return a sentence if the chosen stages do not go together."""
    names = arguments.cleaning
    kinds = ["level" if name in LEVELS else name for name in names]
    if names and len(set(kinds)) == len(kinds) and ("none" not in names or len(names) == 1):
        return []
    return [
        f"cleaning is {' '.join(names) or 'empty'}; give none alone, or normalize, one of {', '.join(LEVELS)}, and "
        f"quality, each at most once."
    ]


class Cleaner:
    """Cleaner that applies stages of rules to documents and counts the effect of each rule.
    `stages` are keys of `STAGES`; see `problems`."""

    def __init__(self, stages: list[str]):
        self._rules: list[tuple[str, Callable[[str], str]]] = []
        for stage in sorted(stages, key=list(STAGES).index):
            self._rules += [(name, rule) for name, rule in RULES.items() if name.split(".")[0] in STAGES[stage]]
            if stage in LEVELS and "normalize" in stages:
                # A level may have removed a character between a letter and its mark, or decoded a mark.
                self._rules.append(("normalize.nfc", characters.compose))
        self._has_filters = "quality" in stages
        self.stats: dict[str, RuleStats] = {}  # of the rules that had an effect; see `merged` for their order

    def __call__(self, text: str, whole: bool = True) -> str | None:
        """Return the cleaned text, which may be blank, or None for a dropped document.
        If `whole` is false, `text` is a piece of a document, cut between words or before a line break. Quality filters
        are designed for whole web pages and do not apply to it."""
        for name, rule in self._rules:
            if (result := rule(text)) != text:
                self._count(name, text, result)
                text = result
        if self._has_filters and whole and (name := failed_filter(text)):
            self._count(name, text, None)
            return None
        return text

    def _count(self, name: str, old: str, new: str | None) -> None:
        """Count a change, or a dropped document if `new` is None."""
        stats = self.stats.setdefault(name, RuleStats(dropped=new is None))
        stats.documents += 1
        stats.characters += max(0, len(old) - len(new or ""))
        if len(stats.examples) < EXAMPLES:
            escape = ascii if name == "normalize.nfc" else repr  # repr shows composed and decomposed letters alike
            beginning = repr(" ".join(old[: 4 * EXAMPLE_LENGTH].split()))[1:-1][:EXAMPLE_LENGTH]
            stats.examples.append(beginning if new is None else _difference(old, new, escape))


def _difference(old: str, new: str, escape: Callable[[str], str]) -> str:
    """Return the first place at which two texts differ, with invisible characters escaped."""
    shorter = min(len(old), len(new))
    start = bisect.bisect_left(range(shorter), True, key=lambda i: old[: i + 1] != new[: i + 1])
    length = (EXAMPLE_LENGTH - len(" → ")) // 2
    lead = escape(old[max(0, start - 20) : start])[1:-1][-30:]
    changes = ((lead + escape(text[start : start + length])[1:-1])[:length] for text in (old, new))
    return " → ".join(changes)
