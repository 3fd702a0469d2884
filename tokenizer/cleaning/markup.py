"""Cleaning rules for remains of web pages: entities, tags, URLs and mail addresses."""

import html
import re
from html.entities import html5

from tokenizer.cleaning.characters import CONTROL, remove_invisible, single_blank

# A well-formed entity. An entity that is escaped more than once, as in `&amp;amp;lt;`, is matched as one entity.
ENTITY = re.compile(
    r"&(?:(?:amp|AMP|#0{0,5}38|#[xX]0{0,4}26);)*"
    r"(#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
)


def decode_entities(text: str) -> str:
    if "&" not in text:
        return text
    text = TAGS.sub(lambda tags: ENTITY.sub("", tags[0]), text)  # a decoded `&quot;` would end an attribute
    return remove_invisible(ENTITY.sub(_entity_text, text))


def _entity_text(match: re.Match) -> str:
    """Return the text of an entity. An unknown entity is not changed."""
    entity = f"{match[1]};"
    if entity[0] == "#":
        return CONTROL.sub("", html.unescape(f"&{entity}").replace("\r", "\n"))
    return html5.get(entity, f"&{entity}")


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


def _any(names: str) -> str:
    return f"(?i:{'|'.join(sorted(names.split(), reverse=True))})"


ELEMENT = _any(f"{INLINE_ELEMENTS} {CELL_ELEMENTS} {LINE_ELEMENTS} {OTHER_ELEMENTS}")
FLAG = r"(?:\s++[a-z-]++(?=[\s/>]))"  # attribute without a value; a tag may have them next to others
ATTRIBUTE = r"""(?:\s++[\w@:.-]++\s*+=\s*+(?:"[^"<]*+"|'[^'<]*+'|[^\s"'<>=`]++))"""
# Tags of HTML elements, all in lower or all in upper case. `List<Object>` and `get<i>(t)` are not tags: a tag without
# attributes directly after a word must break a line, or be inline and closed before the next tag. Repetitions are
# possessive, so that no text is scanned repeatedly.
TAG = (
    r"<(?=/?(?:[a-z0-9]++|[A-Z0-9]++)[\s/>])(?:"
    rf"/{ELEMENT}\s*+|{ELEMENT}(?:{FLAG}*+{ATTRIBUTE})++{FLAG}*+\s*+/?|(?<!\w<){ELEMENT}\s*+/?|(?i:br|wbr)\s*+/?"
    rf"|(?P<inline>{_any(INLINE_ELEMENTS)})(?=>[^<>]{{0,200}}</(?P=inline)>)"
    r")>|<!(?i:doctype)[^<>]*+>|<\?xml[^<>]*+>"
)
TAGS = re.compile(rf"(?:(?:{TAG})\s*+)++")
LINE_TAG = re.compile(rf"</?{_any(LINE_ELEMENTS)}[\s/>]")
CELL_TAG = re.compile(rf"</?{_any(CELL_ELEMENTS)}[\s/>]|>\s")
# Elements that are removed with their content, as pairs of pattern and end marker.
ENCLOSED_ELEMENTS = [(re.compile("<!--.*?--> ?", re.DOTALL), "-->")] + [
    (re.compile(rf"<{name}(?:\s[^<>]*+)?>.*?</{name}> ?", re.DOTALL), f"</{name}>")
    for name in ("script", "SCRIPT", "style", "STYLE")
]


def remove_markup(text: str) -> str:
    if "<" not in text:
        return text
    for pattern, marker in ENCLOSED_ELEMENTS:
        end = text.rfind(marker)
        if end >= 0:  # up to here, every open element also closes, so no search is quadratic
            end += len(marker) + 2  # with the space and the character after it
            text = pattern.sub(single_blank, text[:end]) + text[end:]
    return TAGS.sub(_tag_replacement, text)


def _tag_replacement(match: re.Match) -> str:
    """Return the line breaks and spaces that a browser displays in place of the tags."""
    text, start, tags = match.string, match.start(), match[0].rstrip()
    space, end = match[0][len(tags) :], start + len(tags)
    begins_line = LINE_TAG.search(tags)
    if begins_line and space == " ":
        space = ""
    if "\n" in (text[start - 1 : start] or "\n", text[end : end + 1] or "\n"):
        return space
    if begins_line or "\n" in tags:
        return ("\n\n" if "\n\n" in tags else "\n") + space
    return " " if not space and not text[start - 1].isspace() and CELL_TAG.search(tags) else space


# A URL continues through Latin, Greek and Cyrillic letters, but not through scripts that put no space after a URL.
# Marks that end a sentence or close a bracket do not belong to the URL's end.
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
    if "://" in text or "www." in text:
        text = URL.sub(single_blank, text)
    return MAIL_ADDRESS.sub(single_blank, text) if "@" in text else text
