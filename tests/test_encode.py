"""Encoding with the fastest way for each tokenizer: the ids match `tokenizers` for any text."""
# ruff: noqa: RUF001 (letters of all scripts look like each other)

import random
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from conftest import assert_user_error, prose
from tokenizer.encoding import encode, vocabulary
from tokenizer.encoding.encode import NO_TOKEN, RustEncoder, WordEncoder, encoder, text_lengths, token_bytes
from tokenizer.encoding.words import WordSplitter

U2, U4 = np.dtype("<u2"), np.dtype("<u4")
SPACES = " \t\n\v\f\r\x85\u00a0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
NO_SPACES = "\x1c\x1d\x1e\x1f\u180e\u200b\u200d\u2060\ufeff"  # some programs treat these as spaces
FRAGMENTS = [
    *(SPACES + SPACES + NO_SPACES),
    *("  ", "\r\n", "\n\n", " \n", "\u00a0 "),
    *"'s 't 're 've 'm 'll 'd 'S 'LL ’s ' '' 'r 'l 'v 'sé re ll s d".split(),
    *"a Word é ß ǆ ж ع ไทย 雪 한 𝒳 ʰ ª".split(),
    *"1 42 ٣ १ ๕ ² ½ Ⅷ ㊿ 𝟙".split(),
    *("e\u0301", "\u0301", "\u0335", "\u093f", "\u0e31", "\ufe0f", "\u20e3"),
    *"! _ -- … 。 € \ufffd 🙂 👩\u200d👩\u200d👧 🏳️\u200d🌈 \U000e0041 \U0010ffff \ufffe".split(),
    *("\x00", "\x01", "\x1b[0m", "\x7f", "\x80", "\x9f", "\xad"),
    *("<|endoftext|>", "<|pad|>", "<|x|>"),
]
SCRIPTS = {
    "Chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张；寒来暑往，秋收冬藏。 2024年1月1日，“你好”！\n",
    "Arabic": "الحمد لله رب العالمين، وُلِدَ في ١٢ مارس ١٩٨٤. «نعم»؟ لا!\n",
    "Hindi": "सभी मनुष्य जन्म से स्वतंत्र हैं; उनकी संख्या १२३४५ है। क्या हुआ?\n",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน ๑๒๓๔๕ บาท ฯลฯ\n",
    "emoji": "👩‍👩‍👧‍👦 👍🏽👍🏽 🇺🇳🇫🇷 ❤️ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f ✨✨\n",
    "mixed": "naïve café—l'été; we're, they'll, I'd 'em 'til rock'n'roll O'Neill's\t\tΩμέγα Привет\r\n",
}


def random_text(pick: random.Random) -> str:
    """Return text of fragments that are hard to split, and of arbitrary code points."""
    text = ""
    for _ in range(pick.randrange(12)):
        code = pick.randrange(0x110000) if pick.random() < 0.5 else pick.randrange(0x3000)
        any_character = chr(code) if not 0xD800 <= code < 0xE000 else ""
        text += pick.choice(FRAGMENTS) if pick.random() < 0.7 else any_character
    return text


@pytest.fixture(scope="module")
def fuzz() -> list[str]:
    pick = random.Random(0)
    return [random_text(pick) for _ in range(10_000)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Folder of a BPE with tokens of every script."""
    folder = tmp_path_factory.mktemp("bpe")
    text = [*SCRIPTS.values(), prose(0, 1000), *(fragment * 3 for fragment in FRAGMENTS[:-3])]
    vocabulary.save(vocabulary.train_bpe(text * 3, 900, special_tokens=["<|x|>"]), folder)
    return folder


@pytest.fixture(scope="module")
def rust(trained) -> Tokenizer:
    return encode.load_rust(trained / "tokenizer.json")


def assert_same(encode_, rust: Tokenizer, texts: list[str], followed_by: list[int] | None = None) -> None:
    """Compare with the ids of `tokenizers` and the id that follows each text."""
    followed_by = [NO_TOKEN] * len(texts) if followed_by is None else followed_by
    ids, counts = encode_([text.encode() for text in texts], followed_by)
    pairs = zip(rust.encode_batch_fast(texts, add_special_tokens=False), followed_by, strict=True)
    expected = [[*one.ids, *[next_] * (next_ != NO_TOKEN)] for one, next_ in pairs]
    assert counts.tolist() == [len(ids) for ids in expected]
    assert ids.tolist() == [i for ids in expected for i in ids]


def words_of(texts: list[str], splitter: WordSplitter) -> list[list[str]]:
    """Return the words of each text in ByteLevel's printable form."""
    shown = {byte: character for character, byte in encode.byte_level_alphabet().items()}
    words = splitter.words([text.encode() for text in texts]).to_pylist()
    ends = [i for i, word in enumerate(words) if word == b"\xff"]
    return [["".join(map(shown.get, word)) for word in words[start + 1 : end]] for start, end in pairwise([-1, *ends])]


def test_code_point_classes_match_byte_level():
    points = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    texts = [f"a{point}1{point} {point}{point}" for point in points[::7]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = [[word for word, _ in byte_level.pre_tokenize_str(text)] for text in texts]
    assert words_of(texts, WordSplitter()) == expected
    texts = ["a", "", "b ", " c", "'", "s", "'r", "e", "\u3000", "\u3000", "d\n", ""]  # stay separate
    assert words_of(texts, WordSplitter()) == [word for text in texts for word in words_of([text], WordSplitter())]


def test_fuzzed_texts_and_source_code_match_tokenizers(rust, fuzz):
    words = WordEncoder(rust, U2)
    for texts in (fuzz[:5000], fuzz[5000:], ["".join(fuzz)]):
        assert_same(words, rust, texts)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::3]
    texts = [file.read_bytes().decode(errors="replace") for file in files]
    assert sum(map(len, texts)) > 1_000_000
    assert_same(WordEncoder(rust, U2), rust, texts)


RUNS = {text[:2]: text * 20_000 for text in ("x", " ", "\n", "é", "雪", "!", "'s", "\u3000")}


@pytest.mark.parametrize("text", [*SCRIPTS.values(), *RUNS.values()], ids=[*SCRIPTS, *map(repr, RUNS)])
def test_all_scripts_and_long_runs_match_tokenizers(rust, text):
    texts = [text, text + "a", "a" + text]
    if len(text) < 1000:
        pick = random.Random(0)
        texts += ["".join(pick.sample(text, len(text))) for _ in range(200)]
        texts += [text * 50, text.replace(" ", ""), text.replace(" ", "\u3000")]
    assert_same(WordEncoder(rust, U2), rust, texts)


@pytest.mark.parametrize(("name", "limit"), [("REMEMBERED_WORDS", 50), ("REMEMBERED_IDS", 1000)])
def test_forgetting_words_changes_no_ids(rust, fuzz, monkeypatch, name, limit):
    monkeypatch.setattr(encode, name, limit)
    words = WordEncoder(rust, U2)
    for start in range(0, 3000, 100):
        assert_same(words, rust, fuzz[start : start + 100])
        assert (len(words.known) if name == "REMEMBERED_WORDS" else words.size) < limit + 4000


@pytest.mark.parametrize("kind", [WordEncoder, RustEncoder])
def test_each_text_is_followed_by_its_own_id(rust, fuzz, kind):
    pick = random.Random(1)
    texts = [pick.choice([text, ""]) for text in fuzz[:3000]]
    for dtype in (U2, U4):
        assert_same(kind(rust, dtype), rust, texts, [pick.choice([NO_TOKEN, 0, 1, 2, 899]) for _ in texts])
        assert_same(kind(rust, dtype), rust, ["", ""], [NO_TOKEN, 0])
        ids, counts = kind(rust, dtype)([b""], [NO_TOKEN])
        assert (len(ids), counts.tolist(), ids.dtype, counts.dtype) == (0, [0], dtype, np.int64)


NO_PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|[^\p{L}\p{N}]+"), "isolated")
OTHER_WORDS = pre_tokenizers.Sequence([SPLIT, NO_PATTERN])
TOOL = AddedToken("<|tool|>", lstrip=True, rstrip=True)
TEMPLATE = processors.TemplateProcessing("<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
CHANGES = {
    "none": (WordEncoder, lambda rust: None),
    "dropout": (RustEncoder, lambda rust: setattr(rust.model, "dropout", 0.1)),
    "normalizer": (RustEncoder, lambda rust: setattr(rust, "normalizer", normalizers.NFKC())),
    "prefix space": (RustEncoder, lambda rust: setattr(rust, "pre_tokenizer", pre_tokenizers.ByteLevel())),
    "no words": (RustEncoder, lambda rust: setattr(rust, "pre_tokenizer", NO_PATTERN)),
    "other words": (RustEncoder, lambda rust: setattr(rust, "pre_tokenizer", OTHER_WORDS)),
    "added words": (RustEncoder, lambda rust: rust.add_tokens(["the", " and", "\n\n"])),
    "added control token": (WordEncoder, lambda rust: rust.add_special_tokens([TOOL])),
    "template": (WordEncoder, lambda rust: setattr(rust, "post_processor", TEMPLATE)),
    # Like the tokenizers of Llama 3 and GPT-4, which look up whole words first.
    "whole words": (RustEncoder, lambda rust: setattr(rust.model, "ignore_merges", True)),
}


@pytest.mark.parametrize(("kind", "change"), CHANGES.values(), ids=CHANGES)
def test_bpe_uses_rust_only_if_its_words_differ(trained, fuzz, kind, change):
    rust = encode.load_rust(trained / "tokenizer.json")
    change(rust)
    ours = encoder(rust, U2)
    assert type(ours) is kind
    if not rust.model.dropout:
        assert_same(ours, rust, [*SCRIPTS.values(), "", prose(3, 200), *fuzz[:2000], " <|tool|> a"])


def of_pieces() -> Tokenizer:
    """Return a tokenizer like Llama 2's: a space belongs to a word, and an unknown character becomes its bytes."""
    characters = sorted({*prose(0, 500), "▁"} - {" "})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "▁t", "he", "▁the"]
    vocab, merges = {name: i for i, name in enumerate(names)}, [("▁", "t"), ("h", "e"), ("▁t", "he")]
    rust = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)
    return rust


def of_likely_pieces() -> Tokenizer:
    """Return a tokenizer like T5's."""
    rust = Tokenizer(models.Unigram())
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    rust.train_from_iterator([prose(0, 2000)], trainer)
    return rust


def of_word_pieces() -> Tokenizer:
    """Return a tokenizer like BERT's."""
    rust = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False)
    rust.train_from_iterator([prose(0, 2000)], trainer)
    return rust


@pytest.mark.parametrize("make", [of_pieces, of_likely_pieces, of_word_pieces])
def test_other_tokenizers_are_encoded_by_rust(make, fuzz):
    rust = make()
    ours = encoder(rust, U2)
    assert type(ours) is RustEncoder
    texts = [prose(1, 200), *SCRIPTS.values(), "", *fuzz[:500]]
    assert_same(ours, rust, texts, [0, 1, NO_TOKEN, 2, 3, 4, 5, 6] + [NO_TOKEN] * 500)


def test_text_without_a_token_is_refused():
    rust = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)]))
    sentence = r"tokenizer cannot encode this text \(.*unknown token.*\); use another token"
    assert_user_error(sentence, encoder(rust, U2), [b"ab", b"c"], [NO_TOKEN, NO_TOKEN])


def characters_of(text: str) -> Tokenizer:
    return vocabulary.character_tokenizer([text]).backend_tokenizer


def test_character_ids_match_tokenizers(fuzz):
    rust = characters_of("".join(fuzz))
    ours = encoder(rust, U2)
    assert type(ours) is encode.CharacterEncoder
    pick = random.Random(2)
    assert_same(ours, rust, fuzz[:5000], [pick.choice([NO_TOKEN, 0, 7]) for _ in range(5000)])
    assert_same(ours, rust, ["", ""])
    few = characters_of("ab雪")
    assert token_bytes(few) == [b"a", b"b", "雪".encode()]
    assert text_lengths(few) is None  # no text can be lost


def test_single_letter_vocabulary_is_not_always_a_character_tokenizer():
    def of_letters(*letters: str, unknown: str = "<unk>") -> Tokenizer:
        rust = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=unknown))
        rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return rust

    rust = of_letters("a", "b", "?", unknown="?")  # has an id for unknown characters
    assert not encode.is_character(rust)
    assert encoder(rust, U2)([b"abc"], [NO_TOKEN])[0].tolist() == [0, 1, 2]
    rust = of_letters("a", "b", "?")
    assert encode.is_character(rust)
    rust.add_special_tokens(["<pad>"])
    rust.encode_special_tokens = True
    assert_same(encode.CharacterEncoder(rust, U2), rust, ["ab?", "a"])
    assert encode.is_character(rust)
    rust.add_tokens(["bb"])
    assert not encode.is_character(rust)
    for words in (None, pre_tokenizers.Whitespace()):
        rust = of_letters("a", "b", "?")
        rust.pre_tokenizer = words
        assert not encode.is_character(rust)
    rust = of_letters("a", "b", "<unk>")
    rust.add_special_tokens(["<unk>"])
    assert not encode.is_character(rust)
    rust = of_letters("a", "b", "?")
    rust.normalizer = normalizers.Lowercase()
    assert not encode.is_character(rust)


def test_byte_level_bpe_keeps_all_bytes(rust, fuzz):
    pieces = token_bytes(rust)
    assert len(pieces) == 900
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)
    ids, counts = encoder(rust, U2)([text.encode() for text in fuzz], [0] * len(fuzz))
    for text, of_text in zip(fuzz, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        assert b"".join(map(pieces.__getitem__, of_text.tolist())) == text.encode()
    assert text_lengths(rust) is None  # no text can be lost


def test_sentencepiece_tokens_include_their_spaces_and_bytes():
    rust = of_pieces()
    pieces = dict(zip(map(rust.id_to_token, range(rust.get_vocab_size())), token_bytes(rust), strict=True))
    expected = {"<unk>": b"", "<0x0A>": b"\n", "<0xE9>": b"\xe9", "▁": b" ", "▁t": b" t", "he": b"he", "▁the": b" the"}
    assert pieces | expected == pieces
    text = prose(1, 400) + "雪\n"
    ids = rust.encode(text).ids
    assert b"".join(map(token_bytes(rust).__getitem__, ids)) == b" " + text.encode()
    assert text_lengths(rust)[ids].sum() == len(text.encode()) + 1


def test_text_lengths_of_other_tokenizers_exclude_unknown_text():
    for rust in (of_likely_pieces(), of_word_pieces()):
        ids = rust.encode(prose(1, 400)).ids
        assert abs(len(rust.decode(ids)) - text_lengths(rust)[ids].sum()) <= 1
        assert text_lengths(rust)[rust.encode("雪").ids[-1]] == 0


def byte_level(merges: list[tuple[str, str]], first_id: int = 0, **settings) -> Tokenizer:
    tokens = list(dict.fromkeys([*encode.byte_level_alphabet(), *map("".join, merges)]))
    rust = Tokenizer(models.BPE({token: first_id + i for i, token in enumerate(tokens)}, merges, **settings))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return rust


def random_merges(pick: random.Random, letters: str) -> tuple[list[str], list[tuple[str, str]]]:
    tokens, merges = list(letters), []
    for _ in range(60):
        pair = (pick.choice(tokens), pick.choice(tokens))
        if (token := "".join(pair)) not in tokens and len(token) < 30:
            merges.append(pair)
            tokens.append(token)
    return tokens, merges


@pytest.mark.parametrize("seed", range(20))
def test_words_of_any_length_match_those_of_tokenizers(seed):
    pick = random.Random(seed)
    tokens, merges = random_merges(pick, "abcd"[: pick.choice([1, 2, 4])])
    lengths = [pick.randint(1, longest) for longest in (2000, 40) for _ in range(10 if longest == 2000 else 1000)]
    words = ["".join(pick.choices("abcd"[: pick.choice([2, 4])], k=length)) for length in lengths]
    words += ["a" * 999, "abb" * 500, "".join(pick.choices(tokens, k=500))]
    rust = byte_level(merges, pick.choice([0, 70_000]))
    assert_same(WordEncoder(rust, U4), rust, words)


def test_models_with_other_encoding_rules_are_rejected():
    assert encode.is_plain(byte_level([]))
    others = {"dropout": 0.1, "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "ignore_merges": True}
    for name, value in others.items():
        assert not encode.is_plain(byte_level([], **{name: value})), name
    assert not encode.is_plain(Tokenizer(models.BPE({"a": 0}, [])))
    unordered = [("a", "b"), ("b", "c"), ("abc", "ab"), ("ab", "c"), ("a", "bc")]
    for merges in ([("ÿ", "a")], [("bc", "a"), ("b", "c")], unordered):
        assert not encode.has_separate_words(byte_level(merges))
        assert isinstance(encoder(byte_level(merges), U4), RustEncoder)
