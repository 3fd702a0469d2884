"""Cleaning: effects of each stage on texts of many scripts, unchanged text, dropped documents, and counts."""

# ruff: noqa: RUF001  characters of many scripts, which look alike, are the subject of this file

import random
import time

import pytest

from tokenizer.cleaning.cleaning import Cleaner, CleaningArguments, RuleStats, merged, problems
from tokenizer.cleaning.quality import FILTERS, failed_filter

CODE = "def f(x):\n    if x < 3:\n\treturn x  # don't\n\n\n@property\nclass A:\n    ...\n\n    }\n"
SCRIPTS = [
    "春天来了。他说：“你好”……真的——是吗？",
    "「今日は、いい天気ですね。」東京タワー、〇〇さん。",
    "ฤดูใบไม้ผลิมาถึงแล้ว เด็กๆ วิ่งเล่น",
    "می‌خواهم کتاب‌ها را بخوانم؛ آیا ممکن است؟ ه‍",  # with ZWNJ and ZWJ
    "क्‍ष और क्‌ष, हिन्दी में। श्री",  # with ZWJ and ZWNJ
    "각자 나라의 말씀, 한글은 “참 좋다”",
    "Tiếng Việt có dấu, q̃ và ẹ̃",  # combining marks that do not compose
    "සිංහල භාෂාව, ශ්‍රී ලංකාව; ខ្មែរ\u200bភាសា",  # ZWJ; a zero width space between Khmer words
]


ANY = [CODE, *SCRIPTS, "👩‍👩‍👧 ❤️ 1️⃣", "don’t — “so” …", ""]


@pytest.mark.parametrize("stage", ["none", "normalize", "lenient", "balanced", "strict"])
def test_cleaning_keeps_clean_text_of_any_script_and_code(stage):
    cleaner = Cleaner([stage])
    for text in SCRIPTS if stage == "strict" else ANY:
        assert cleaner(text) == text
    assert cleaner.stats == {}


NO_TAGS = ["a < b > c", "vector<int> v", "List<Object> a", "get<i>(t)", "<name@host>", "<Item>"]
NO_TAGS += ["x <b and c> d", "<!-- open", "a <- b", "<T> & <K>"]
CASES = {
    "normalize": [
        ("a\r\nb\rc\x85d\n\r\ne", "a\nb\nc\nd\n\ne"),
        ("\ufeffa\x00b\x1bc\x7f\x9f\td\fe\n", "abc\td\fe\n"),
        ("cafe\u0301 \u1100\u1161\u11a8 \u0915\u093c", "café 각 \u0915\u093c"),  # a nukta never composes
        ("e\x00\u0301", "é"),
    ],
    "lenient": [
        ("co\u00adop\u200berate\u2060d \ue000\ufdd0x\U000f1234", "cooperated x"),
        ("a \ufffd\ufffd b, don\ufffd\ufffdt, \ufffdc", "a  b, don\ufffdt, c"),  # one stays for a possible letter
        ("ខ្មែរ\u200b\u200bភាសា a\u200bb", "ខ្មែរ\u200bភាសា ab"),
        ("a \t\nb\u00a0\u3000\n  \n    c  ", "a\nb\n\n    c"),
        ("a\n\n\n\n\nb\n \n\t\n\n\nc\n\n\nd", "a\n\n\nb\n\n\nc\n\n\nd"),
        ("<b>&amp;</b>\n----", "<b>&amp;</b>\n----"),
    ],
    "balanced": [
        ("<p>One <b>bold</b> word.</p><p>Two</p>\n<ul>\n  <li>a</li>\n  <li>b</li></ul>", "One bold word.\nTwo\na\nb"),
        ("<P CLASS=x>un<i>believ</i>able<br/>H<sub>2</sub>O</P>", "unbelievable\nH2O"),
        ("<tr><td>1</td><td>2</td></tr>", "1 2"),
        ("a<!-- b\n> -->c<script>if (a < b) {}</script> d<STYLE>p</STYLE>", "a c d"),
        ("<!DOCTYPE html>\n<?xml version='1.0'?>\n<a href='x > y' hidden>b</a>", "b"),
        *((text, text) for text in NO_TAGS),
        ("AT&amp;T &lt;3 &amp;amp;eacute; &#39;&#x4e2d;&#39; C&#35;", "AT&T <3 é '中' C#"),
        ("a&shy;b&#8203;c &#13;d&#0;", "abc\nd"),
        ('<p data-x="{&quot;a&quot;:1}">b &lt;i&gt;c&lt;/i&gt;</p><p>&nbsp;</p><p>d</p>', "b c\nd"),
        ("&foo; &copy ?a=1&b=2;", "&foo; &copy ?a=1&b=2;"),
        ("a\n----\n  ****\n|\n= = =\n...\n}\n#!\nb", "a\n...\n}\n#!\nb"),
        ("No!!!!!! Well..... 好。。。。。。 -----", "No!!! Well... 好。。。 ---"),
        ("http://x.org/a?b=1&c=(2) #### '''' ((((", "http://x.org/a?b=1&c=(2) #### '''' (((("),
    ],
    "strict": [
        ("Hi 👨‍👩‍👧‍👦 all, 🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 good❤️day 👍🏽\n🙂‍↔️ no", "Hi all, good day\nno"),
        ("1️⃣2️⃣ ☎ 你好😀世界 〇㊗♯", "1 2 你好 世界 〇㊗♯"),
        ("see http://x.org/a_(b)?c=1, or www.x.org. (ftp://a.b)", "see , or . ( )"),
        ("请访问http://a.cn谢谢 me@x.org,mailto:a.b+c@x.co.uk.", "请访问 谢谢 , ."),
        ("@me a@b 3@x.5", "@me a@b 3@x.5"),
        ("“It’s” „so“ — 1–2… «x»\u00a0y", '"It\'s" "so" -- 1-2... "x" y'),
        ("a \t b\n    c   d\n\te", "a b\n    c d\n\te"),
        ("a\n...\n}\n♥\n7\n\nb", "a\n\n7\n\nb"),
    ],
    "normalize balanced": [("e\u00ad\u0301 e&#769;", "é é")],  # a level can produce text that must be composed again
}


@pytest.mark.parametrize(("stages", "text", "expected"), [(s, *case) for s, cases in CASES.items() for case in cases])
def test_stage_converts_text_and_keeps_converted_text(stages, text, expected):
    cleaner = Cleaner(stages.split())
    assert cleaner(text) == cleaner(expected) == expected


def words(count: int, start: int = 0) -> list[str]:
    return [f"wor{chr(97 + i // 676)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(start, start + count)]


def line(parts: list[str]) -> str:
    """Return one line that ends with a full stop in place of a letter."""
    return " ".join(parts)[:-1] + "."


def lines(count: int, start: int = 0, ended: int = 1000) -> list[str]:
    """Return lines of ten words; the first `ended` lines end with a full stop."""
    made = [words(10, start + 10 * i) for i in range(count)]
    return [line(parts) if i < ended else " ".join(parts) for i, parts in enumerate(made)]


def often(n: int, times: int) -> str:
    """Return 100 words in which one sequence of n words occurs `times` times."""
    parts = [word for i in range(times) for word in [*words(n), words(1, 500 + i)[0]]]
    return line(parts + words(100 - len(parts), 600))


def twice(n: int, count: int) -> str:
    """Return 1000 words in which many sequences of n words occur twice."""
    once = [[word for i in range(count) for word in [*words(n, 20 * i), words(1, at + i)[0]]] for at in (2000, 3000)]
    return line(once[0] + once[1] + words(1000 - 2 * len(once[0]), 4000))


TWO_LETTERS = [a + b for a in "abcdefgh" for b in "ijklmnop"]
MOST = {5: 30, 6: 23, 7: 18, 8: 15, 9: 12, 10: 10}  # repeated sequences that pass, by their words
HAN = "".join(map(chr, range(0x4E00, 0x4E40)))
PAIRS = ["\n".join(lines(2, 20 * i)) for i in range(6)]  # paragraphs of two lines
MARKED = {mark: [word + mark * (i < 10) for i, word in enumerate(words(100))] for mark in ("#", "...", "…")}
# Each filter with a document that just passes and one that just fails.
QUALITY = [
    ("short", line(words(50)), line(words(49))),
    ("short", HAN[:50] + "。", HAN[:49] + "。"),
    ("word_length", line(TWO_LETTERS), line(["a", *TWO_LETTERS])),
    ("word_length", line([word + "x" * 9 for word in words(60)]), line(["x" * 16, *(w + "x" * 9 for w in words(60))])),
    ("hash_signs", line(MARKED["#"]), line(["#", *MARKED["#"]])),
    ("ellipses", line(MARKED["..."]), line(["...a", *MARKED["..."]])),
    ("ellipses", line(MARKED["…"]), line(["…a", *MARKED["…"]])),
    ("bullets", "\n• ".join(lines(10)), "• " + "\n  - ".join(lines(10))),
    ("ellipsis_lines", "..\n".join(lines(4)) + "\n" + "\n".join(lines(6, 200)), "..\n".join(lines(10))),
    ("unended_lines", "\n".join(lines(25, ended=3)), "\n".join(lines(25, ended=2))),
    ("unended_lines", "\n".join(lines(25, ended=3)).replace(".", ".\u200f"), "\n".join(lines(25, ended=2))),
    ("unended_lines", "\n".join(lines(25, ended=3)).replace(".", ". \u061c"), "\n".join(lines(25, ended=2))),
    ("letters", line([*map(str, range(100, 120)), *words(80)]), line([*map(str, range(100, 121)), *words(80)])),
    ("repeated_paragraphs", "\n\n".join(PAIRS + 4 * ["Yes."]), "\n\n".join(PAIRS + 5 * ["Yes."])),
    ("repeated_lines", "\n".join(lines(6) + 4 * ["Yes."]), "\n".join(lines(6) + 5 * ["Yes."])),
    ("in_repeated_lines", "\n".join(lines(9) + lines(1)), "\n".join(lines(8) + lines(1))),
    ("top_2_words", often(2, 10), often(2, 11)),
    ("top_3_words", often(3, 6), often(3, 7)),
    ("top_4_words", often(4, 4), often(4, 5)),
    *((f"repeated_{n}_words", twice(n, most), twice(n, most + 1)) for n, most in MOST.items()),
]


@pytest.mark.parametrize(("rule", "good", "bad"), QUALITY)
def test_quality_filter_drops_documents_just_beyond_its_threshold(rule, good, bad):
    assert failed_filter(good) is None
    assert failed_filter(bad) == f"quality.{rule}"
    cleaner = Cleaner(["quality"])
    assert [cleaner(good), cleaner(bad), cleaner(bad, whole=False)] == [good, None, bad]
    assert cleaner.stats == {f"quality.{rule}": RuleStats(1, len(bad), [" ".join(bad.split())[:160]], dropped=True)}


def test_stages_are_applied_in_their_order_not_in_that_of_the_command():
    page = "\n".join(f"<p>{line}</p>" for line in lines(12))
    assert Cleaner(["quality", "balanced"])(page) == Cleaner(["balanced", "quality"])(page) is not None


def test_every_quality_filter_is_tested():
    # 0.2 of the characters in paragraphs may repeat
    assert failed_filter("\n\n".join(lines(8) + lines(2))) == "quality.in_repeated_lines"
    assert failed_filter("\n\n".join(lines(7) + lines(3))) == "quality.in_repeated_paragraphs"
    assert {f"quality.{rule}" for rule, _, _ in QUALITY} | {"quality.in_repeated_paragraphs"} == set(FILTERS)


@pytest.mark.parametrize(
    "text",
    [
        "春天来了，公园里的花都开了。孩子们在草地上奔跑，老人们坐在长椅上晒太阳。小河边的柳树长出了新叶，几只鸭子在水里游来游去。",
        "ฤดูใบไม้ผลิมาถึงแล้ว ดอกไม้ในสวนบานสะพรั่ง เด็กๆ วิ่งเล่นบนสนามหญ้า คนชรานั่งอาบแดดบนม้านั่งยาว ทุกคนรู้สึกว่าวันนี้งดงามมาก",
        "".join(map(chr, range(0xA984, 0xA9B3))) + "ꦲꦤꦕꦫꦏ꧉",
        " ".join(["Kansainvälistymissuunnitelmassa", "on", "tietojenkäsittelytiede", "mukana", "ja", *words(50)]) + ".",
    ],
)
def test_good_short_text_passes_in_any_script(text):
    assert failed_filter(text) is None
    assert failed_filter("\n".join([text] * 3)) == "quality.repeated_lines"


BAD = '<~&~ ~\n ~a.~.~<a ~&amp;~&#~<b>~<b>x~-<b>-~<!--~<script>~<a x="~a@~a~http://a(~www..~😀x~x\u00ad'.split("~")
BAD += "ខ\u200b~你“~\u0301~x  ~\t\n~a ~、「~...\n~&shy;a~<a\n--\n~a\ufffd".split("~")


@pytest.mark.parametrize("stage", ["strict", "quality"])
def test_cleaning_time_is_not_quadratic(stage):
    for part in BAD:
        for text in (part * (100_000 // len(part)), "<a http://a&" + part * (100_000 // len(part)) + "-->1</script>"):
            start = time.process_time()
            Cleaner([stage])(text)
            assert time.process_time() - start < 3, part  # a quadratic search would take minutes


def test_statistics_of_parts_add_up():
    stages = ["normalize", "strict", "quality"]
    documents = [good for _, good, _ in QUALITY] + [bad for _, _, bad in QUALITY] + SCRIPTS + [CODE]
    documents += ["<p>a\r\nb</p> 😀", "http://a.b &amp; c\n\n\n\n\nd  e", "x!!!!\n---\n}\n“e\u0301” \x00\u00ad"] * 2
    random.Random(0).shuffle(documents)

    def stats(part: list[str]) -> dict[str, RuleStats]:
        cleaner = Cleaner(stages)
        for text in part:
            cleaner(text)
        return cleaner.stats

    whole = merged(stats(documents))
    assert len(whole) > 30
    assert max(len(outcome.examples) for outcome in whole.values()) == 3
    for i in range(0, len(documents) + 1, 3):
        assert [*merged(stats(documents[:i]), stats(documents[i:])).items()] == [*whole.items()]


def test_statistics_have_counts_and_examples():
    cleaner = Cleaner(["normalize", "lenient"])
    texts = ["x" * 99 + "cafe\u0301\r\n", "a \r\r\nb", "\r" + "y" * 500, "\r", "fine"]
    assert [cleaner(text) for text in texts] == ["x" * 99 + "café\n", "a\n\nb", "\n" + "y" * 500, "\n", "fine"]
    stats = cleaner.stats
    assert list(stats) == ["normalize.line_ends", "normalize.nfc", "lenient.trailing_blanks"]
    assert stats["normalize.nfc"] == RuleStats(1, 1, [f"{'x' * 17}cafe\\u0301\\n → {'x' * 17}caf\\xe9\\n"])
    assert stats["lenient.trailing_blanks"] == RuleStats(1, 1, ["a \\n\\nb → a\\n\\nb"])
    ends = stats["normalize.line_ends"]
    assert (ends.documents, ends.characters, ends.dropped) == (4, 2, False)
    assert ends.examples[1:] == ["a \\r\\r\\nb → a \\n\\nb", f"\\r{'y' * 76} → \\n{'y' * 76}"]
    assert all(len(example) <= 160 for example in ends.examples)


def test_invalid_stages_are_reported_in_sentences():
    for stages in ("normalize normalize", "none quality", "lenient strict", ""):
        [sentence] = problems(CleaningArguments(stages.split()))
        assert sentence.startswith(f"cleaning is {stages or 'empty'}; give none alone, or normalize, one of ")
    assert CleaningArguments().cleaning == ["normalize"]
    assert not any(problems(CleaningArguments(stages)) for stages in (["normalize", "balanced", "quality"], ["none"]))
