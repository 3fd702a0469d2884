"""What is wrong with a text and can be mended, and which texts are better left out: stages that work on one document.

A stage is a list of rules. A rule changes the text or drops the document, and everything it does is counted under its
name. Rules know scripts, not languages. They look at one document at a time and at nothing else, so that the outcome is
the same in any number of processes.
"""

# ruff: noqa: RUF001  marks of many scripts, which look alike, are what this is about

import difflib
import html
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from html.entities import html5
from itertools import filterfalse

import numpy as np

from limits import setting
from tokenizer.scripts import UNSPACED_CLASS

LEVELS = ("lenient", "balanced", "strict")
# The names of rules begin with the stage that brings them in; a level includes the levels before it.
STAGES: dict[str, tuple[str, ...]] = {
    "normalize": ("normalize",),
    **{level: LEVELS[: i + 1] for i, level in enumerate(LEVELS)},
    "quality": ("quality",),
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
class Outcome:
    """What one rule did to the documents of a run."""

    documents: int = 0
    """Documents changed or dropped; each stretch of a longer document counts as one."""
    characters: int = 0
    """Characters removed; of a dropped document all."""
    examples: list[str] = field(default_factory=list)
    """The first three: the place of the first change, before and after, or how a dropped document begins."""
    dropped: bool = False


def merged(first: dict[str, Outcome], then: dict[str, Outcome]) -> dict[str, Outcome]:
    """The outcomes of two runs as if the second had gone on where the first stopped."""
    total = {}
    for name in (*CHANGES, *FAULTS):
        if parts := [outcomes[name] for outcomes in (first, then) if name in outcomes]:
            total[name] = Outcome(
                documents=sum(part.documents for part in parts),
                characters=sum(part.characters for part in parts),
                examples=[example for part in parts for example in part.examples][:EXAMPLES],
                dropped=parts[0].dropped,
            )
    return total


def problems(arguments: CleaningArguments) -> list[str]:
    """What is wrong with the stages asked for, a sentence each."""
    names = arguments.cleaning
    found = []
    for name in dict.fromkeys(names):
        if name not in STAGES and name != "none":
            nearest = difflib.get_close_matches(name, [*STAGES, "none"], n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(STAGES)}; and none, alone."
            found.append(f"Unknown cleaning stage {name}. {hint}")
        if names.count(name) > 1:
            found.append(f"cleaning names {name} {names.count(name)} times; name it once.")
    others = [name for name in dict.fromkeys(names) if name != "none"]
    if "none" in names and others:
        found.append(f"cleaning is none and {' and '.join(others)}; give none alone, or leave it out.")
    levels = [level for level in LEVELS if level in names]
    if len(levels) > 1:
        found.append(f"cleaning names {' and '.join(levels)}, but {levels[-1]} includes the rest; name one of them.")
    if not names:
        found.append("cleaning is empty; give `none` for no cleaning.")
    return found


class Cleaner:
    """Applies stages to one document after the other and counts what they do.

    `stages` are names of `STAGES`, or `none` alone; see `problems`.
    """

    def __init__(self, stages: list[str]):
        self.steps: list[tuple[str, Callable[[str], str]] | None] = []  # None: the rules of quality
        for stage in stages:
            if stage == "quality":
                self.steps.append(None)
            elif stage != "none":
                self.steps += [(name, rule) for name, rule in CHANGES.items() if name.split(".")[0] in STAGES[stage]]
                if stage in LEVELS and "normalize" in stages:
                    # A level may have removed what stood between a letter and its mark, or decoded a mark.
                    self.steps.append(("normalize.nfc", CHANGES["normalize.nfc"]))
        self._counted: dict[str, Outcome] = {}

    def __call__(self, text: str, whole: bool = True) -> str | None:
        """The cleaned text, which may be blank; None for a document that is dropped.

        Of a document that is not `whole`, `text` is a stretch, cut between a letter and a blank or before a line break.
        Its text is cleaned as any other, but it is not judged: the rules of quality are made for web pages.
        """
        for step in self.steps:
            if step is None:
                if whole and (name := fault(text)):
                    outcome = self._counted.setdefault(name, Outcome(dropped=True))
                    outcome.documents += 1
                    outcome.characters += len(text)
                    if len(outcome.examples) < EXAMPLES:
                        outcome.examples.append(_beginning(text))
                    return None
                continue
            name, rule = step
            cleaned = rule(text)
            if cleaned != text:
                outcome = self._counted.setdefault(name, Outcome())
                outcome.documents += 1
                outcome.characters += max(0, len(text) - len(cleaned))
                if len(outcome.examples) < EXAMPLES:
                    shown = ascii if name == "normalize.nfc" else repr
                    outcome.examples.append(_difference(text, cleaned, shown))
                text = cleaned
        return text

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """One per rule that did something, in a fixed order."""
        return {name: self._counted[name] for name in (*CHANGES, *FAULTS) if name in self._counted}


def _difference(before: str, after: str, shown: Callable[[str], str]) -> str:
    """The first place where two texts differ; what cannot be seen is escaped."""
    same, differs = 0, min(len(before), len(after)) + 1  # lengths of beginnings that are equal, and that are not
    while differs - same > 1:
        middle = (same + differs) // 2
        if before[same:middle] == after[same:middle]:
            same = middle
        else:
            differs = middle
    side = (EXAMPLE_LENGTH - len(" → ")) // 2
    lead = shown(before[max(0, same - 20) : same])[1:-1][-30:]
    old, new = ((lead + shown(text[same : same + side])[1:-1])[:side] for text in (before, after))
    return f"{old} → {new}"


def _beginning(text: str) -> str:
    return repr(" ".join(text[: 4 * EXAMPLE_LENGTH].split()))[1:-1][:EXAMPLE_LENGTH]


# ---- normalize -------------------------------------------------------------------------------------------------------

# C0 but for tab, line feed and form feed; DEL; C1; the byte order mark. U+0085 is a line end and gone by then.
CONTROL_CHARACTERS = [chr(i) for i in (*range(32), *range(0x7F, 0xA0), 0xFEFF) if chr(i) not in "\t\n\f"]
CONTROL = re.compile(f"[{''.join(CONTROL_CHARACTERS)}]")


def _with_line_feeds(text: str) -> str:
    if "\r" in text or "\x85" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x85", "\n")
    return text


def _without_control_characters(text: str) -> str:
    # On clean ASCII 63 searches for one character each run at 1.5 GB/s, one search for a class of 63 at 0.3.
    if any(character in text for character in CONTROL_CHARACTERS):
        text = CONTROL.sub("", text)
    return text


def _composed(text: str) -> str:
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return text
    return unicodedata.normalize("NFC", text)


# ---- lenient ---------------------------------------------------------------------------------------------------------

# Soft hyphen, zero width space, word joiner, byte order mark, replacement character, private use, noncharacters of
# the first plane. Joiners (U+200C, U+200D), marks of direction and variation selectors are none of these: they change
# what is read.
INVISIBLE = r"\u00ad\u200b\u2060\ufeff\ufffd\ue000-\uf8ff\ufdd0-\ufdef\ufffe\uffff\U000f0000-\U0010ffff"
# Python searches fast for a pattern that begins with a class: here and below, checks of what stands before come after.
INVISIBLE_RUN = re.compile(f"[{INVISIBLE}][{INVISIBLE}]*")
UNSPACED_CHARACTER = re.compile(f"[{UNSPACED_CLASS}]")
BLANKS = " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"


def _without_invisible(text: str) -> str:
    return text if text.isascii() else INVISIBLE_RUN.sub(_what_is_meant, text)


def _what_is_meant(match: re.Match) -> str:
    """Nothing, but for two cases. Between two letters a replacement character stands for something lost, which may be a
    letter, an apostrophe or a blank: one of a run stays. Where a script has no blanks, a zero width space ends a word.
    """
    text, run = match.string, match[0]
    around = text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1]
    if match.start() and len(around) == 2:
        if "\ufffd" in run and all(unicodedata.category(character)[0] in "LMN" for character in around):
            return "\ufffd"
        if "\u200b" in run and all(UNSPACED_CHARACTER.match(character) for character in around):
            return "\u200b"
    return ""


def _without_trailing_blanks(text: str) -> str:
    return "\n".join([line.rstrip(BLANKS) for line in text.split("\n")])


def _without_more_than_two_blank_lines(text: str) -> str:
    return re.sub(r"\n{4,}", "\n\n\n", text) if "\n\n\n\n" in text else text


# ---- balanced --------------------------------------------------------------------------------------------------------

# A well-formed entity; escaped more than once, as in `&amp;amp;lt;`, it is one entity.
ENTITY = re.compile(
    r"&(?:(?:amp|AMP|#0{0,5}38|#[xX]0{0,4}26);)*"
    r"(#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
)
# Where an entity may have begun, and characters that, when decoded or removed there, would make one that was none.
ENTITY_BEGUN = re.compile(r"&[#A-Za-z0-9]*\Z")
ENTITY_LENGTH = 40
MAKES_ENTITY = re.compile(rf"[#;A-Za-z0-9{INVISIBLE}]*")


def _decoded(text: str) -> str:
    if "&" not in text:
        return text
    parts, end, tail = [], 0, ""
    for match in ENTITY.finditer(text):
        between, character = text[end : match.start()], _character(match[1])
        tail += between[-ENTITY_LENGTH:]
        if MAKES_ENTITY.fullmatch(character) and ENTITY_BEGUN.search(tail, max(0, len(tail) - ENTITY_LENGTH)):
            character = match[0]
        parts += (between, character)
        end, tail = match.end(), tail[-ENTITY_LENGTH:] + character
    return _without_invisible("".join([*parts, text[end:]])) if parts else text


def _character(entity: str) -> str:
    """What an entity stands for; one that nobody knows stands for itself."""
    if entity[0] == "#":
        return CONTROL.sub("", html.unescape(f"&{entity};").replace("\r", "\n"))
    return html5.get(f"{entity};", f"&{entity};")


INLINE_ELEMENTS = (
    "a abbr acronym b bdi bdo big cite code del dfn em font i ins kbd mark nobr q rp rt ruby s samp small span strike "
    "strong sub sup tt u var wbr"
)
CELL_ELEMENTS = "td th"
LINE_ELEMENTS = (  # a new line begins there
    "address article aside blockquote body br caption center col colgroup dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li link main "
    "menu meta nav ol optgroup option p pre search section select summary table tbody tfoot thead title tr ul"
)
OTHER_ELEMENTS = (
    "applet area audio base basefont button canvas data datalist embed iframe img input label map meter noframes "
    "noscript object output param picture progress script slot source style svg template textarea time track video"
)
FLAGS = (  # attributes that need no value
    "allowfullscreen async autofocus autoplay checked compact controls default defer disabled hidden ismap itemscope "
    "loop multiple muted nomodule noresize noshade novalidate nowrap open playsinline readonly required reversed "
    "selected"
)


def _any(names: str) -> str:
    return f"(?i:{'|'.join(sorted(names.split(), reverse=True))})"


ELEMENT = _any(f"{INLINE_ELEMENTS} {CELL_ELEMENTS} {LINE_ELEMENTS} {OTHER_ELEMENTS}")
ATTRIBUTE = (
    r"""\s++(?:[\w@:][\w@:.-]*+\s*+=\s*+(?:"[^"<]*+"|'[^'<]*+'|[^\s"'<>=`]++)"""
    rf"""|(?:{_any(FLAGS)}|data-[\w-]++)(?=[\s/>]))"""
)
WORD = r"[\w\u0300-\u036f\u0653-\u0655\u093c\u3099\u309a]"  # and the marks that NFC joins to a letter
# Tags of elements that HTML has, in one case throughout. `List<Object>` and `get<i>(t)` are none: a tag without
# attributes that follows a word directly breaks a line, or is inline and closed before the next tag. Repetitions are
# possessive, so that no text is read again and again.
TAG = (
    r"<(?=/?(?:[a-z0-9]++|[A-Z0-9]++)[\s/>])(?:"
    rf"/{ELEMENT}\s*+|{ELEMENT}(?:{ATTRIBUTE})++\s*+/?|(?<!{WORD}<){ELEMENT}\s*+/?|(?i:br|wbr)\s*+/?"
    rf"|(?P<inline>{_any(INLINE_ELEMENTS)})(?=>[^<>]{{0,200}}</(?P=inline)>)"
    r")>|<!(?i:doctype)[^<>]*+>|<\?xml[^<>]*+>"
)
TAGS = re.compile(rf"(?:(?:{TAG})\s*+)++")
LINE_TAG = re.compile(rf"</?{_any(LINE_ELEMENTS)}[\s/>]")
CELL_TAG = re.compile(rf"</?{_any(CELL_ELEMENTS)}[\s/>]|>\s")
# A tag inside what is not closed yet, as in `<a <b>href=x>`, stays: its removal would make a tag of what is around it.
TAG_BEGUN = re.compile(r"<(?:[/!?]?[^\W\d_][^<>]*|[/!?][^<>\n]*)?\Z")
# What is removed with its content: how it begins, and how it ends.
ENCLOSED = [(re.compile("<!--.*?--> ?", re.DOTALL), "-->")] + [
    (re.compile(rf"<{name}(?:\s[^<>]*+)?>.*?</{name}> ?", re.DOTALL), f"</{name}>")
    for name in ("script", "SCRIPT", "style", "STYLE")
]


def _without_markup(text: str) -> str:
    if "<" not in text:
        return text
    for enclosed, end in ENCLOSED:
        last = text.rfind(end)
        if last >= 0:  # whatever begins before the last end has an end: no search goes in vain
            text = _replaced(text, enclosed.finditer(text, 0, last + len(end) + 1), _gap)
    return _replaced(text, TAGS.finditer(text), _instead_of_tags)


def _replaced(text: str, matches: Iterable[re.Match], instead: Callable[[re.Match, int], str]) -> str:
    """`text` with something instead of each match. `instead` is also told where the match before ends."""
    parts, end = [], 0
    for match in matches:
        parts += (text[end : match.start()], instead(match, end))
        end = match.end()
    return "".join([*parts, text[end:]])


def _instead_of_tags(match: re.Match, end_before: int) -> str:
    """Line breaks and blanks where a reader of the page sees them."""
    text, start = match.string, match.start()
    tags = match[0].rstrip()
    space = match[0][len(tags) :]
    bracket = max(text.rfind("<", end_before, start), text.rfind(">", end_before, start), end_before)
    if TAG_BEGUN.search(text, bracket, start):
        return match[0]
    left = text[start - 1] if start else "\n"
    right = text[start + len(tags)] if start + len(tags) < len(text) else "\n"
    begins_line = LINE_TAG.search(tags)
    if begins_line and space == " ":
        space = ""
    if "\n" in (left, right):
        return space
    if begins_line or "\n" in tags:
        return ("\n\n" if "\n\n" in tags else "\n") + space
    glues = (left == "-" and right in "->") or ENTITY_BEGUN.search(text, max(0, start - ENTITY_LENGTH), start)
    if not left.isspace() and not space and (CELL_TAG.search(tags) or glues):
        return " "
    return space


def _gap(match: re.Match, end_before: int = 0) -> str:
    """What stays where something was removed together with the blank after it: a blank, unless there is one."""
    text = match.string
    left = text[match.start() - 1] if match.start() else "\n"
    right = text[match.end()] if match.end() < len(text) else "\n"
    return "" if left.isspace() or right.isspace() else " "


RULER = "-=*_~#+|.·•─━│┃═║—–" + BLANKS


def _without_symbol_lines(text: str) -> str:
    return _without_lines(text, _is_ruler)


def _is_ruler(line: str) -> bool:
    """Symbols alone; but three dots are a statement in Python and a pause in prose."""
    return not line.strip(RULER) and (bare := line.strip(BLANKS)) != "" and bare != "..."


def _without_lines(text: str, are_worthless: Callable[[str], bool]) -> str:
    lines = text.split("\n")
    if not any(map(are_worthless, lines)):
        return text
    kept, in_tag = [], False  # without the lines inside, what only looks like a tag may be one
    for line in lines:
        if in_tag or not are_worthless(line):
            kept.append(line)
            bracket = max(line.rfind("<"), line.rfind(">"))
            if bracket >= 0:
                in_tag = TAG_BEGUN.match(line, bracket) is not None
    return "\n".join(kept)


# Marks of prose and of rulers. Brackets, quotes, slashes and number signs are not among them: code and Markdown count
# them. Three stay, because three are an ellipsis, a dash or all the emphasis there is; more says nothing more.
MARKS = ".!?,;:-_=*~…·•–—‥。！？、，；：・～؟،؛۔।॥"
REPEATED_MARK = re.compile(rf"([{re.escape(MARKS)}])\1{{3,}}")


def _without_repeated_marks(text: str) -> str:
    return REPEATED_MARK.sub(r"\1\1\1", text)


# ---- strict ----------------------------------------------------------------------------------------------------------

# Pictographs of the first plane and beyond; not digits in circles, signs of music, trigrams, or squared ideographs.
DINGBAT = (
    r"\u231a\u231b\u23e9-\u23fa\u2600-\u262f\u2638-\u266c\u2670-\u2775\u2794-\u27bf\u2b05-\u2b07\u2b1b\u2b1c"
    r"\u2b50\u2b55"
)
PICTOGRAPH = (
    rf"{DINGBAT}\U0001f000-\U0001f0ff\U0001f10d-\U0001f1ff\U0001f300-\U0001f64f\U0001f680-\U0001f6ff"
    r"\U0001f7e0-\U0001f7ff\U0001f900-\U0001faff"
)
# With joiners, variation selectors, skin tones (pictographs themselves) and the tags of flags; and what makes emoji of
# digits and arrows.
EMOJI = re.compile(
    rf"[{PICTOGRAPH}\ufe0e\ufe0f](?:(?<=[\ufe0e\ufe0f])\u20e3?|"
    rf"(?:[{PICTOGRAPH}\ufe0e\ufe0f\u200d\u20e3\U000e0020-\U000e007f]|(?<=\u200d)[\u2190-\u21ff])*+) ?"
)
MAYBE_EMOJI = re.compile(rf"[{DINGBAT}\ufe0e\ufe0f\U0001f000-\U0001faff]")  # one range is found faster than seven


def _without_emoji(text: str) -> str:
    if text.isascii() or not MAYBE_EMOJI.search(text):
        return text
    return _without_invisible(EMOJI.sub(_gap, text))


TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("“”„‟«»", '"'),
        **dict.fromkeys("‘’‚‛‹›", "'"),
        **dict.fromkeys("‐‑‒–−", "-"),
        **dict.fromkeys("—―", "--"),
        "…": "...",
    }
)
TYPOGRAPHIC = "“”„‟«»‘’‚‛‹›‐‑‒–−—―…"
# Chinese, Japanese and Korean write some of these marks too, and there they stay.
EAST_ASIAN = (
    r"\u1100-\u11ff\u2e80-\u2fff\u3001-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef"
    r"\U00020000-\U0003ffff"
)
TYPOGRAPHIC_RUN = re.compile(f"[{TYPOGRAPHIC}][{TYPOGRAPHIC}]*")
EAST_ASIAN_CHARACTER = re.compile(f"[{EAST_ASIAN}]")
TYPOGRAPHIC_BLANK = re.compile(r"[\u00a0\u1680\u2000-\u200a\u202f\u205f]")


def _in_ascii_typography(text: str) -> str:
    if text.isascii():
        return text
    return TYPOGRAPHIC_RUN.sub(_in_ascii, TYPOGRAPHIC_BLANK.sub(" ", text))


def _in_ascii(match: re.Match) -> str:
    text, start, end = match.string, match.start(), match.end()
    around = text[max(0, start - 1) : start] + text[end : end + 1]
    return match[0] if EAST_ASIAN_CHARACTER.search(around) else match[0].translate(TYPOGRAPHY)


# A URL goes on through letters of Latin, Greek and Cyrillic, but not through scripts that put no blank after it. Marks
# that end a sentence or close a bracket do not belong to its end.
IN_URL = r"[!#-'*-;=?-\[\]_a-z~\u00c0-\u052f]"
URL = re.compile(
    r"[hfwHFW](?<![A-Za-z0-9@].)(?i:(?<=h)ttps?://|(?<=f)tp://|(?<=w)ww\.)[A-Za-z0-9\u00c0-\u052f]"
    rf"(?:{IN_URL}|\({IN_URL}*+\))*(?<![.,;:!?'*_]) ?"
)
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9](?<![A-Za-z0-9._%+@-].)(?:(?<=m)ailto:[A-Za-z0-9])?[A-Za-z0-9._%+-]{0,63}+"
    r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9_%+@-]) ?"
)


def _without_addresses(text: str) -> str:
    without = text
    if "://" in text or "www." in text:
        without = URL.sub(_gap, without)
    if "@" in text:
        without = MAIL_ADDRESS.sub(_gap, without)
    if without == text:
        return text
    return _without_markup(_without_invisible(without))  # `x.com<label>` looked like a type and its parameter


def _with_single_blanks(text: str) -> str:
    if "  " not in text and "\t" not in text:
        return text
    return re.sub(r"[ \t](?<=\S.)[ \t]+(?=\S)", " ", text)


WORDLIKE = re.compile(r"[^\W_]")  # a letter or a number


def _without_wordless_lines(text: str) -> str:
    return _without_lines(text, lambda line: not WORDLIKE.search(line) and line.strip() != "")


# In the order in which they are applied; a level applies its own and those of the levels before it. What a rule leaves,
# the later ones see: cleaning a clean text changes nothing.
CHANGES: dict[str, Callable[[str], str]] = {
    "normalize.line_ends": _with_line_feeds,
    "normalize.control_characters": _without_control_characters,
    "normalize.nfc": _composed,
    "lenient.invisible": _without_invisible,
    "balanced.entities": _decoded,
    "strict.emoji": _without_emoji,
    "strict.typography": _in_ascii_typography,
    "balanced.markup": _without_markup,
    "strict.addresses": _without_addresses,
    "strict.blanks": _with_single_blanks,
    "balanced.symbol_lines": _without_symbol_lines,
    "balanced.repeated_marks": _without_repeated_marks,
    "strict.wordless_lines": _without_wordless_lines,
    "lenient.trailing_blanks": _without_trailing_blanks,
    "lenient.blank_lines": _without_more_than_two_blank_lines,
}


# ---- quality ---------------------------------------------------------------------------------------------------------

# Gopher, Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1.
FEWEST_WORDS = 50
MOST_HASH_SIGNS = MOST_ELLIPSES = 0.1  # a word
MOST_BULLETS = 0.9  # of lines
MOST_ELLIPSIS_LINES = 0.3
FEWEST_LETTERED = 0.8  # of words
# Gopher's 3 to 10 are made for English. Pages of translated program messages, 20 messages each, have means of 5.6 to
# 9.8 in German, 6.1 to 11.2 in Finnish, 7.9 to 10.3 in Malayalam and 2.7 to 6.6 in Korean. Beyond lie lists of URLs
# and hashes, and tables of digits.
MEAN_WORD_LENGTH = (2, 15)
# Gopher, table A1: shares of what repeats something earlier in the document. Of n words the most frequent sequence, and
# all those that repeat.
MOST_REPEATED_PARAGRAPHS = MOST_REPEATED_LINES = 0.3
MOST_IN_REPEATED_PARAGRAPHS = 0.2
MOST_IN_TOP_SEQUENCE = {2: 0.20, 3: 0.18, 4: 0.16}
MOST_IN_REPEATED_SEQUENCES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
# FineWeb, Penedo et al. 2024 (arXiv:2406.17557), section 3.6. Its 0.1 takes the place of Gopher's 0.2.
MOST_IN_REPEATED_LINES = 0.1
FEWEST_ENDED_LINES = 0.12
# Where characters count as words, a sequence of n words is one of 3 n characters: a word has roughly two in Chinese
# and four, with their marks, in Thai.
CHARACTERS_A_WORD = 3

# A character of those scripts with the marks around it; or what stands between blanks.
UNSPACED_WORD = re.compile(rf"[^\w\s]*+[{UNSPACED_CLASS}][^\w\s]*+|[^\s{UNSPACED_CLASS}]+")
BULLETS = {*"•‣⁃∙▪▫◦●○■□◆◇►▶➢➤·・*+-"}
LETTER = re.compile(r"[^\W\d_]")
ELLIPSES = ("...", "…")
# Unicode's sentence terminals (property STerm), those of Sinhala and Tibetan, ellipses, quotes that close; and any
# letter of Thai and Lao, which end a sentence with a blank.
ENDS = {
    *"!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿․‼‽⁇⁈⁉⳹⳺⳻⸮⸼⹓⹔。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫︒︕︖﹒﹖﹗！．？｡",
    *"෴།༎…‥\"'”’»›」』〉》",
    *map(chr, range(0x0E01, 0x0EE0)),
}
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class _Page:
    """A document as the rules of quality see it, each view made when a rule first asks."""

    def __init__(self, text: str):
        self.text = text
        self.lines = [line for line in map(str.strip, text.split("\n")) if line]

    @cached_property
    def has_unspaced(self) -> bool:
        return not self.text.isascii() and UNSPACED_CHARACTER.search(self.text) is not None

    @cached_property
    def words(self) -> list[str]:
        return UNSPACED_WORD.findall(self.text) if self.has_unspaced else self.text.split()

    @cached_property
    def spaced_words(self) -> list[str]:
        """Those that stand between blanks."""
        return list(filterfalse(UNSPACED_CHARACTER.search, self.words)) if self.has_unspaced else self.words

    @cached_property
    def is_spaced(self) -> bool:
        """Most of them do."""
        return 2 * len(self.spaced_words) > len(self.words)

    @cached_property
    def paragraphs(self) -> list[str]:
        return [paragraph for paragraph in map(str.strip, self.text.split("\n\n")) if paragraph]

    @cached_property
    def ends(self) -> np.ndarray:
        """Characters up to the end of each word, without blanks: (words + 1,)."""
        return np.concatenate([[0], np.cumsum(np.fromiter(map(len, self.words), np.int64, len(self.words)))])

    @cached_property
    def numbers(self) -> np.ndarray:
        """Each word as a number, the same for the same word: (words,)."""
        number = {word: i for i, word in enumerate(dict.fromkeys(self.words), start=1)}
        return np.fromiter(map(number.__getitem__, self.words), np.uint64, len(self.words))

    def sequences(self, n: int) -> tuple[np.ndarray, int]:
        """The sequences of n words as numbers, equal for equal ones, in order; and the words in each."""
        length = n if self.is_spaced else n * CHARACTERS_A_WORD
        count = max(0, len(self.words) - length + 1)
        keys = np.zeros(count, np.uint64)
        for i in range(length if count else 0):
            keys = keys * MULTIPLIER + self.numbers[i : i + count]  # modulo 2^64
        return keys, length

    def share_of_top_sequence(self, n: int) -> float:
        """Of all characters, those in the most frequent sequence of n words; of equally frequent ones the longest."""
        keys, length = self.sequences(n)
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        if counts.max(initial=1) == 1:
            return 0.0  # nothing repeats; in a short text a single sequence may be a large share
        top = first[counts == counts.max()]
        return float(counts.max() * (self.ends[top + length] - self.ends[top]).max() / self.ends[-1])

    def share_of_repeated_sequences(self, n: int) -> float:
        """Of all characters, those in sequences of n words that occur earlier, each character once."""
        keys, length = self.sequences(n)
        order = np.argsort(keys, kind="stable")
        repeats = order[1:][keys[order[1:]] == keys[order[:-1]]]
        depth = np.zeros(len(self.words) + 1, np.int64)
        depth[repeats] += 1
        depth[repeats + length] -= 1
        inside = np.cumsum(depth)[:-1] > 0
        return float(np.diff(self.ends)[inside].sum() / self.ends[-1])

    @cached_property
    def has_repeated_sequences(self) -> bool:
        """What lies in repeated sequences of many words lies in those of few: mostly one look is enough."""
        fewest = min(MOST_IN_REPEATED_SEQUENCES)
        return self.share_of_repeated_sequences(fewest) > min(MOST_IN_REPEATED_SEQUENCES.values())


def _share(items: list[str], holds: Callable[[str], object]) -> float:
    return sum(1 for item in items if holds(item)) / len(items)


def _repeated(items: list[str]) -> float:
    """The share of items that occur earlier."""
    return (len(items) - len(set(items))) / len(items)


def _in_repeated(items: list[str]) -> float:
    """The share of characters in them."""
    characters = sum(map(len, items))
    return (characters - sum(map(len, set(items)))) / characters


def _has_odd_words(page: _Page) -> bool:
    shortest, longest = MEAN_WORD_LENGTH
    words = page.spaced_words
    return page.is_spaced and not shortest <= sum(map(len, words)) / len(words) <= longest


def _top_sequence(n: int, most: float) -> Callable[[_Page], bool]:
    return lambda page: page.share_of_top_sequence(n) > most


def _repeated_sequences(n: int, most: float) -> Callable[[_Page], bool]:
    return lambda page: page.has_repeated_sequences and page.share_of_repeated_sequences(n) > most


# In the order in which they are asked; the first that finds fault drops the document. The costly ones come last.
FAULTS: dict[str, Callable[[_Page], bool]] = {
    "quality.short": lambda page: len(page.words) < FEWEST_WORDS,
    "quality.word_length": _has_odd_words,
    "quality.hash_signs": lambda page: page.text.count("#") / len(page.words) > MOST_HASH_SIGNS,
    "quality.ellipses": lambda page: sum(map(page.text.count, ELLIPSES)) / len(page.words) > MOST_ELLIPSES,
    "quality.bullets": lambda page: _share(page.lines, lambda line: line[0] in BULLETS) > MOST_BULLETS,
    "quality.ellipsis_lines": lambda page: (
        _share(page.lines, lambda line: line.endswith(ELLIPSES)) > MOST_ELLIPSIS_LINES
    ),
    "quality.unended_lines": lambda page: _share(page.lines, lambda line: line[-1] in ENDS) < FEWEST_ENDED_LINES,
    "quality.letters": lambda page: _share(page.words, LETTER.search) < FEWEST_LETTERED,
    "quality.repeated_paragraphs": lambda page: _repeated(page.paragraphs) > MOST_REPEATED_PARAGRAPHS,
    "quality.in_repeated_paragraphs": lambda page: _in_repeated(page.paragraphs) > MOST_IN_REPEATED_PARAGRAPHS,
    "quality.repeated_lines": lambda page: _repeated(page.lines) > MOST_REPEATED_LINES,
    "quality.in_repeated_lines": lambda page: _in_repeated(page.lines) > MOST_IN_REPEATED_LINES,
    **{f"quality.top_{n}_words": _top_sequence(n, most) for n, most in MOST_IN_TOP_SEQUENCE.items()},
    **{f"quality.repeated_{n}_words": _repeated_sequences(n, m) for n, m in MOST_IN_REPEATED_SEQUENCES.items()},
}


def fault(text: str) -> str | None:
    """The name of the first rule of quality that finds fault with a document; None for a good one."""
    page = _Page(text)
    return next((name for name, finds_fault in FAULTS.items() if finds_fault(page)), None)
