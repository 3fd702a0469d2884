"""Tokenizers: made from text, saved, loaded with AutoTokenizer, and exact to the last byte."""

import random
import unicodedata

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from command_line import UserError
from tokenizer import vocabulary
from tokenizer.corpus import Corpus, CorpusArguments
from tokenizer.vocabulary import VocabularyArguments, character_tokenizer, encoder, token_bytes, train_bpe

PROSE = "The quick brown fox jumps over the lazy dog; it wouldn't stop.\n\n    Indented, 12345 times.\n" * 30
UNICODE = {
    "every plane": "".join(chr(code) for code in range(0, 0x110000, 41) if not 0xD800 <= code < 0xE000),
    "emoji joined by ZWJ": "👩‍👩‍👧‍👦🏳️‍🌈👨🏽‍🚀 🇺🇳",
    "combining marks": unicodedata.normalize("NFD", "Å é ỗ Việt") + "z\u0335\u0321\u0336",
    "NUL and control characters": "\x00a\x01\x7f\x00\x1b[0m",
    "line breaks": "a\r\nb\rc\n\n\r\n\x0b\x0c\x85\u2028\u2029",
    "runs of white space": "  a   b\t\t c \u00a0\u2003\u3000  ",
    "byte order mark inside": "a\ufeffb\ufffe\uffff",
    "a literal special token": "the <|endoftext|> and <|pad|> of<|endoftext|>",
    "nothing": "",
}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Trained, saved and loaded as anyone would load it."""
    folder = tmp_path_factory.mktemp("bpe")
    vocabulary.save(train_bpe([PROSE], 400), folder)
    return AutoTokenizer.from_pretrained(folder)


def as_bytes(tokenizer, ids) -> bytes:
    pieces = token_bytes(tokenizer)
    return b"".join(pieces[i] for i in ids)


def corpus_of(tmp_path, text: str) -> Corpus:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return Corpus([str(path)], CorpusArguments())


# ---- byte-level BPE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", UNICODE.values(), ids=UNICODE)
def test_a_bpe_gives_any_text_back(bpe, text):
    [ids] = encoder(bpe)([text])
    assert bpe.decode(ids) == text
    assert as_bytes(bpe, ids) == text.encode()


def test_a_bpe_encodes_as_the_tokenizers_library_does(bpe, tmp_path):
    vocabulary.save(bpe, tmp_path)
    rust = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rust.encode_special_tokens = True
    pick = random.Random(0)
    texts = ["".join(pick.choices([*UNICODE.values(), *PROSE.split(" "), " ", "\n"], k=40)) for _ in range(50)]
    for text, ids in zip(texts, encoder(bpe)(texts), strict=True):
        assert ids.tolist() == rust.encode(text).ids


def test_ids_survive_saving_and_autotokenizer(tmp_path):
    tokenizer = train_bpe([PROSE], 400)
    vocabulary.save(tokenizer, tmp_path, context=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(PROSE).input_ids == tokenizer(PROSE).input_ids == encoder(loaded)([PROSE])[0].tolist()
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.model_max_length == 64
    assert loaded.decode(loaded("a , b . don 't").input_ids) == "a , b . don 't"  # nothing is cleaned up


def test_special_tokens_have_the_first_two_ids(bpe):
    assert bpe.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert (bpe.eos_token_id, bpe.bos_token_id, bpe.pad_token_id) == (0, 0, 1)
    assert token_bytes(bpe)[:2] == [b"", b""]


def test_a_literal_special_token_in_text_stays_text(bpe):
    text = UNICODE["a literal special token"]
    assert 0 in bpe(text).input_ids  # what Transformers does on its own
    [ids] = encoder(bpe)([text])
    assert not {0, 1} & set(ids.tolist())


def test_training_gives_the_same_json_twice():
    one, other = (train_bpe([PROSE, "more text"], 400).backend_tokenizer.to_str() for _ in range(2))
    assert one == other


def test_a_vocabulary_is_as_large_as_asked_for_or_as_the_text_allows():
    assert len(train_bpe([PROSE], 300)) == 300
    assert len(train_bpe(["ab ab"], 300)) == 260  # 258, "ab" and " ab"
    assert len(train_bpe(["anything"], 258)) == 258


@pytest.mark.parametrize("size", [257, 1, 0, -5])
def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path, size):
    with pytest.raises(UserError, match=rf"vocab_size {size} is too small .* needs 258"):
        vocabulary.build(VocabularyArguments(vocab_size=size), corpus_of(tmp_path, PROSE))


# ---- characters -----------------------------------------------------------------------------------------------------

CHARACTERS = "To be,\tor not\r\nto be 雪🙂e\u0301 ."


def test_a_character_tokenizer_holds_exactly_the_characters():
    tokenizer = character_tokenizer([CHARACTERS[:9], CHARACTERS[9:]])
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == sorted(set(CHARACTERS))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, None, None)
    assert tokenizer.all_special_tokens == []


def test_a_character_tokenizer_survives_saving_and_autotokenizer(tmp_path):
    vocabulary.save(character_tokenizer([CHARACTERS]), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(CHARACTERS).input_ids
    assert ids == [sorted(set(CHARACTERS)).index(character) for character in CHARACTERS]
    assert encoder(loaded)([CHARACTERS, ""])[0].tolist() == ids
    assert loaded.decode(ids) == CHARACTERS
    assert as_bytes(loaded, ids) == CHARACTERS.encode()


def test_an_unseen_character_is_named():
    with pytest.raises(UserError, match=r"The character 'ß' \(U\+00DF\) is not among the 4 that this") as error:
        encoder(character_tokenizer(["abc "]))(["a b", "c ß"])
    assert "\n" not in str(error.value)


# ---- existing tokenizers --------------------------------------------------------------------------------------------


def test_an_existing_tokenizer_is_taken_as_it_is(tmp_path):
    theirs = train_bpe(["quite another text " * 20], 280)
    vocabulary.save(theirs, tmp_path / "theirs")
    ours = vocabulary.build(VocabularyArguments(tokenizer=str(tmp_path / "theirs")), corpus_of(tmp_path, PROSE))
    assert ours(PROSE).input_ids == theirs(PROSE).input_ids


@pytest.mark.parametrize("kind", ["tokenizer", "tokenizer_type"])
def test_a_vocab_size_that_is_not_the_tokenizers_is_answered_with_both(tmp_path, kind):
    vocabulary.save(train_bpe([PROSE], 280), tmp_path / "theirs")
    arguments = {
        "tokenizer": {"tokenizer": str(tmp_path / "theirs")},
        "tokenizer_type": {"tokenizer_type": "character"},
    }
    size = {"tokenizer": 280, "tokenizer_type": len(set(PROSE))}[kind]
    with pytest.raises(UserError, match=rf"vocab_size is 999 but .* {size} tokens; set --vocab_size {size}"):
        vocabulary.build(VocabularyArguments(vocab_size=999, **arguments[kind]), corpus_of(tmp_path, PROSE))


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        vocabulary.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"version": "1.0"}', '{"model": {}, "added_tokens": []}'])
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="No tokenizer can be loaded from") as error:
        vocabulary.load(tmp_path)
    assert "\n" not in str(error.value)


def test_an_existing_tokenizer_of_whole_words_encodes_as_the_tokenizers_library_does():
    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert encoder(tokenizer)(["hello new world"])[0].tolist() == [0, 2, 1]


def test_added_tokens_stand_for_their_own_text():
    theirs = train_bpe([PROSE], 300).backend_tokenizer
    theirs.add_tokens(["    ", "é "])  # as in the tokenizers of GPT-NeoX and Phi
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=theirs, eos_token="<|endoftext|>")
    text = "if:\n    caf\u00e9 au"
    [ids] = encoder(tokenizer)([text])
    assert {300, 301} <= set(ids.tolist())
    assert as_bytes(tokenizer, ids) == text.encode()


def test_truncation_and_padding_of_an_existing_tokenizer_are_left_out():
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "hello": 2, "##s": 3}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(" "), behavior="removed")
    pieces.post_processor = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", cls_token="[CLS]")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert encoder(tokenizer)(["hello hellos hello"])[0].tolist() == [2, 2, 3, 2]


def test_ids_come_as_one_array_a_text(bpe):
    encoded = encoder(bpe)(["one", "", "two words"])
    assert [ids.dtype for ids in encoded] == [np.uint32] * 3
    assert [bpe.decode(ids) for ids in encoded] == ["one", "", "two words"]
