"""Cleaning rules for remains of web pages: entities, tags, URLs and mail addresses."""

import html
import re
from collections.abc import Callable, Iterable
from html.entities import html5

from tokenizer.cleaning.characters import CONTROL, INVISIBLE, remove_invisible, single_blank

# A well-formed entity. An entity that is escaped more than once, as in `&amp;amp;lt;`, is matched as one entity.
ENTITY = re.compile(
    r"&(?:(?:amp|AMP|#0{0,5}38|#[xX]0{0,4}26);)*"
    r"(#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
)
# Possible beginning of an entity, and the characters that would complete the entity if they were decoded or removed.
ENTITY_BEGUN = re.compile(r"&[#A-Za-z0-9]*\Z")
ENTITY_LENGTH = 40
MAKES_ENTITY = re.compile(rf"[#;A-Za-z0-9{INVISIBLE}]*")


def decode_entities(text: str) -> str:
    if "&" not in text:
        return text
    parts, end, tail = [], 0, ""  # `tail`: the end of the text so far
    for match in ENTITY.finditer(text):
        between, character = text[end : match.start()], _entity_text(match[1])
        tail += between[-ENTITY_LENGTH:]
        if MAKES_ENTITY.fullmatch(character) and ENTITY_BEGUN.search(tail, max(0, len(tail) - ENTITY_LENGTH)):
            character = match[0]
        parts += (between, character)
        end, tail = match.end(), tail[-ENTITY_LENGTH:] + character
    return remove_invisible("".join([*parts, text[end:]])) if parts else text


def _entity_text(entity: str) -> str:
    """Return the text of an entity. An unknown entity is not changed."""
    if entity[0] == "#":
        return CONTROL.sub("", html.unescape(f"&{entity};").replace("\r", "\n"))
    return html5.get(f"{entity};", f"&{entity};")


INLINE_ELEMENTS = (
    "a abbr acronym b bdi bdo big cite code del dfn em font i ins kbd mark nobr q rp rt ruby s samp small span strike "
    "strong sub sup tt u var wbr"
)
CELL_ELEMENTS = "td th"
LINE_ELEMENTS = (  # elements that begin a new line
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
WORD = r"[\w\u0300-\u036f\u0653-\u0655\u093c\u3099\u309a]"  # includes the marks that NFC joins to a letter
# Tags of HTML elements, all in lower or all in upper case. `List<Object>` and `get<i>(t)` are not tags: a tag without
# attributes directly after a word must break a line, or be inline and closed before the next tag. Repetitions are
# possessive, so that no text is scanned repeatedly.
TAG = (
    r"<(?=/?(?:[a-z0-9]++|[A-Z0-9]++)[\s/>])(?:"
    rf"/{ELEMENT}\s*+|{ELEMENT}(?:{ATTRIBUTE})++\s*+/?|(?<!{WORD}<){ELEMENT}\s*+/?|(?i:br|wbr)\s*+/?"
    rf"|(?P<inline>{_any(INLINE_ELEMENTS)})(?=>[^<>]{{0,200}}</(?P=inline)>)"
    r")>|<!(?i:doctype)[^<>]*+>|<\?xml[^<>]*+>"
)
TAGS = re.compile(rf"(?:(?:{TAG})\s*+)++")
LINE_TAG = re.compile(rf"</?{_any(LINE_ELEMENTS)}[\s/>]")
CELL_TAG = re.compile(rf"</?{_any(CELL_ELEMENTS)}[\s/>]|>\s")
# A tag inside an unclosed tag, as in `<a <b>href=x>`, stays: without it, the text around it would become a tag.
TAG_BEGUN = re.compile(r"<(?:[/!?]?[^\W\d_][^<>]*|[/!?][^<>\n]*)?\Z")
# Elements that are removed with their content, as pairs of pattern and end marker.
ENCLOSED = [(re.compile("<!--.*?--> ?", re.DOTALL), "-->")] + [
    (re.compile(rf"<{name}(?:\s[^<>]*+)?>.*?</{name}> ?", re.DOTALL), f"</{name}>")
    for name in ("script", "SCRIPT", "style", "STYLE")
]


def remove_markup(text: str) -> str:
    if "<" not in text:
        return text
    for enclosed, end in ENCLOSED:
        last = text.rfind(end)
        if last >= 0:  # before `last`, every open element also closes, so no search is quadratic
            text = _replace(text, enclosed.finditer(text, 0, last + len(end) + 1), single_blank)
    return _replace(text, TAGS.finditer(text), _tag_replacement)


def _replace(text: str, matches: Iterable[re.Match], replacement: Callable[[re.Match, int], str]) -> str:
    """Replace each match by `replacement(match, end of the match before)`."""
    parts, end = [], 0
    for match in matches:
        parts += (text[end : match.start()], replacement(match, end))
        end = match.end()
    return "".join([*parts, text[end:]])


def _tag_replacement(match: re.Match, end_before: int) -> str:
    """Return the line breaks and spaces that a browser displays in place of the tags."""
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


# A URL continues through Latin, Greek and Cyrillic letters, but not through scripts that put no space after a URL. Marks
# that end a sentence or close a bracket do not belong to the URL's end.
IN_URL = r"[!#-'*-;=?-\[\]_a-z~\u00c0-\u052f]"
URL = re.compile(
    r"[hfwHFW](?<![A-Za-z0-9@].)(?i:(?<=h)ttps?://|(?<=f)tp://|(?<=w)ww\.)[A-Za-z0-9\u00c0-\u052f]"
    rf"(?:{IN_URL}|\({IN_URL}*+\))*(?<![.,;:!?'*_]) ?"
)
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9](?<![A-Za-z0-9._%+@-].)(?:(?<=m)ailto:[A-Za-z0-9])?[A-Za-z0-9._%+-]{0,63}+"
    r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9_%+@-]) ?"
)


def remove_addresses(text: str) -> str:
    without = text
    if "://" in text or "www." in text:
        without = URL.sub(single_blank, without)
    if "@" in text:
        without = MAIL_ADDRESS.sub(single_blank, without)
    if without == text:
        return text
    return remove_markup(remove_invisible(without))  # again: `x.com<label>` looked like a type and its parameter
