"""Tokenizers: training on text, saving, loading with AutoTokenizer, and lossless encoding."""

import json
import logging
import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_corpus import write, write_records
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.long_words import TEXTS
from conftest import CHATML_TOKENS, REPOSITORY, assert_one_sentence, assert_user_error, contents, prose, tokenized
from modeling_gpt2scratch.prompts import encode_prompt
from tokenizer.build.recipe import Recipe
from tokenizer.encoding import encode, vocabulary
from tokenizer.encoding.vocabulary import SavedTokenizer, VocabularyArguments, build, problems, train_bpe
from tokenizer.store.store import TokenStore
from training.checkpoints.loading import rules

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
WITHOUT_BLANKS = TEXTS | {"one_letter": lambda pick, n_bytes: "a" * n_bytes}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """BPE that was trained, saved, and loaded with AutoTokenizer."""
    folder = tmp_path_factory.mktemp("bpe")
    vocabulary.save(train_bpe([PROSE], 400), folder)
    return AutoTokenizer.from_pretrained(folder)


def encoded(tokenizer, *texts: str) -> list[np.ndarray]:
    """Return the ids of each text as they are written to a store."""
    rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()
    encoder = encode.encoder(rust, np.dtype("<u4"))
    ids, counts = encoder([text.encode() for text in texts], [encode.NO_TOKEN] * len(texts))
    return np.split(ids, np.cumsum(counts)[:-1])


def as_bytes(tokenizer, ids) -> bytes:
    pieces = encode.token_bytes(tokenizer.backend_tokenizer)
    return b"".join(pieces[i] for i in ids)


def made(*texts: str, **arguments):
    return build(VocabularyArguments(**arguments), None, lambda: texts)


def test_ids_are_equal_after_saving_and_loading(tmp_path):
    tokenizer = train_bpe([PROSE], 400)
    vocabulary.save(tokenizer, tmp_path, context=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(PROSE).input_ids == tokenizer(PROSE).input_ids == encoded(loaded, PROSE)[0].tolist()
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.model_max_length == 64
    assert loaded.decode(loaded("a , b . don 't").input_ids) == "a , b . don 't"  # spaces are not cleaned up
    ours = vocabulary.load(tmp_path)
    assert ours.special_tokens_map == loaded.special_tokens_map
    assert ours(PROSE).input_ids == loaded(PROSE).input_ids


def test_bpe_training_does_not_depend_on_text_division(monkeypatch):
    whole = train_bpe([PROSE], 400).backend_tokenizer.to_str()
    for parts in ([PROSE], re.split("(?=[;.])", PROSE), ["", PROSE, ""]):
        assert train_bpe(parts, 400).backend_tokenizer.to_str() == whole
    texts = [prose(i, 400) for i in range(10)]
    at_once = vocabulary.count_words(texts)
    assert (at_once[b" the"], at_once[b"."], at_once[b"\xff"]) == (142, 500, 0)
    monkeypatch.setattr(vocabulary, "COUNTED_BYTES", 1000)
    assert vocabulary.count_words(texts) == at_once


@pytest.mark.parametrize("name", WITHOUT_BLANKS)
def test_long_words_are_trained_in_pieces_and_encoded_whole(name):
    text = WITHOUT_BLANKS[name](random.Random(0), 1 << 18)
    counts = vocabulary.count_words([text, "a few short words"])
    assert max(map(len, counts)) <= vocabulary.LONGEST_COUNTED_WORD  # the trainer's time is quadratic in the length
    assert sum(len(word) * number for word, number in counts.items()) == len(text.encode()) + 17
    tokenizer = train_bpe([text], 600)
    assert encoded(tokenizer, text)[0].tolist() == tokenizer.backend_tokenizer.encode(text).ids


def test_too_many_pieces_are_sampled(monkeypatch):
    monkeypatch.setattr(vocabulary, "COUNTED_PIECE_BYTES", 10_000)
    text = TEXTS["dna"](random.Random(0), 1 << 18)
    counts = vocabulary.count_words([text, text])
    assert sum(map(len, counts)) <= 10_000
    assert counts.total() == 2 * (1 << 18) // 1024


def test_words_are_trained_in_proportion_to_their_frequency(monkeypatch):
    text = "abab " * 400 + "cdcd " * 80 + "efef " * 8 + "ghgh"
    monkeypatch.setattr(vocabulary, "TRAINED_WORDS", 10)
    tokens = encode.token_bytes(train_bpe([text], 264).backend_tokenizer)
    # One of 48 occurrences is kept. All words of a text except the first begin with a space.
    assert {b" abab", b" cdcd"} <= set(tokens)
    assert not {b"abab", b"cdcd", b" efef"} & set(tokens)
    larger = encode.token_bytes(train_bpe([text], 270).backend_tokenizer)  # has each word at least once
    assert {b" abab", b" cdcd", b" efef"} <= set(larger)


def test_vocabulary_has_the_requested_size_or_fewer_tokens():
    many = (32_000, "many words, many words", 267)
    for size, text, tokens in ((300, PROSE, 300), (258, "", 258), (300, "ab ab", 260), many):  # 260: "ab" and " ab"
        assert len(made(text, vocab_size=size)) == tokens


def test_vocab_size_below_bytes_and_control_tokens_is_refused():
    for size in (257, 1):
        [sentence] = problems(VocabularyArguments(vocab_size=size))
        assert re.match(rf"vocab_size {size} is too small .* needs 258 \(256 bytes and 2 special tokens\)", sentence)
    arguments = VocabularyArguments(vocab_size=259, special_tokens=["<|a|>"])
    assert problems(arguments) == []
    sentence = r"vocab_size 259 is too small .* needs 261 \(256 bytes and 5 special tokens\)"
    assert_user_error(sentence, build, arguments, None, lambda: [PROSE], CHATML_TOKENS)


def test_special_tokens_have_the_first_ids_and_stay_text_in_text(bpe):
    assert bpe.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert (bpe.eos_token_id, bpe.bos_token_id, bpe.pad_token_id) == (0, 0, 1)
    assert encode.token_bytes(bpe.backend_tokenizer)[:2] == [b"", b""]
    text = UNICODE["a literal special token"]
    assert 0 in bpe(text).input_ids  # the default of Transformers
    assert not {0, 1} & set(encoded(bpe, text)[0].tolist())


@pytest.mark.parametrize(
    ("pad_token", "found", "pad_token_id"),
    [("none", None, None), ("<pad>", "<pad>", 1), ("<|endoftext|>", "<|endoftext|>", 0)],
)
def test_padding_token_can_be_named_or_omitted(tmp_path, pad_token, found, pad_token_id):
    vocabulary.save(made(PROSE, vocab_size=300, pad_token=pad_token), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token, loaded.pad_token_id, len(loaded)) == (found, pad_token_id, 300)
    assert "<|pad|>" not in loaded.get_vocab()
    assert loaded.decode(encoded(loaded, PROSE)[0]) == PROSE


def test_control_tokens_load_with_autotokenizer_without_warnings(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    special_tokens = ["<|user|>", "<|bot|>", "<|user|>", "<|endoftext|>"]
    arguments = VocabularyArguments(vocab_size=300, special_tokens=special_tokens)
    with caplog.at_level(logging.WARNING):
        tokenizer = build(arguments, None, lambda: [PROSE], ["<|endoftext|>", "<|bot|>", "<|im_start|>"])
        vocabulary.save(tokenizer, tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert caplog.messages == []
    names = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|bot|>", "<|im_start|>"]
    assert loaded.convert_ids_to_tokens(range(5)) == loaded.all_special_tokens == names  # each once
    assert (len(loaded), loaded.eos_token_id) == (300, 0)
    assert loaded("a<|user|>b<|bot|>").input_ids.count(2) == 1
    assert loaded.decode([2, *loaded("text").input_ids, 3], skip_special_tokens=True) == "text"
    assert encode.token_bytes(loaded.backend_tokenizer)[:5] == [b""] * 5
    assert loaded.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("token", ["user", "a", "###", "Ġthe", "é", "12", ""])
def test_special_tokens_that_could_be_text_are_refused(token):
    sentence = re.escape(f"{token!r} cannot be a special token")
    for setting in ({"special_tokens": [token]}, {"pad_token": token}):
        assert re.match(sentence, " ".join(problems(VocabularyArguments(**setting))))


@pytest.mark.parametrize("token", ["<|user|>", "[INST]", "<unused 1>", "雪", " "])  # names of tokens contain no spaces
def test_other_special_tokens_are_accepted(token):
    assert problems(VocabularyArguments(special_tokens=[token], pad_token="none")) == []
    tokenizer = train_bpe([f"{token}\n" * 99], 400, "none", [token])
    assert tokenizer.convert_tokens_to_ids(token) == 1
    [ids] = encoded(tokenizer, token)
    assert 1 not in ids
    assert as_bytes(tokenizer, ids) == token.encode()


def test_ignored_and_impossible_settings_are_reported():
    assert problems(VocabularyArguments()) == []
    sentence = "special_tokens apply only to a BPE trained on the text; leave out special_tokens, or tokenizer and "
    for setting in ({"tokenizer": "x"}, {"tokenizer_type": "character"}):
        assert problems(VocabularyArguments(special_tokens=["<|a|>"], **setting)) == [f"{sentence}tokenizer_type."]
    assert problems(VocabularyArguments(tokenizer_type="character", vocab_size=65)) == []


def store_of(folder: Path, **arguments) -> TokenStore:
    output = folder.with_name(f"store{len(list(folder.parent.iterdir()))}")
    return tokenized(folder, output, {"validation_fraction": 0.1}, "none", **{"vocab_size": 350} | arguments)


def test_tokenizer_from_a_sample_is_deterministic(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizer.corpus.units.UNIT_BYTES", 10_000)
    folder = tmp_path / "texts"
    for i, word in enumerate(("first", "second", "third", "fourth")):
        write(folder / f"{i}.txt", f"{word} {prose(i, 2000)}" + f" {word}{word}" * 500)
    sampled, again, everything = (store_of(folder, sample_bytes=size) for size in (20_000, 20_000, 10**6))
    sha256 = [store.metadata.tokenizer_sha256 for store in (sampled, again, everything)]
    assert sha256[0] == sha256[1] != sha256[2]
    for store in (sampled, everything):
        tokenizer = store.load_tokenizer()
        assert len(tokenizer) == 350
        text = "".join(tokenizer.decode(store.in_memory(split)) for split in ("train", "val"))
        assert "fourthfourth" in text
        assert len(text.replace("<|endoftext|>", "")) == sum(file.stat().st_size for file in folder.iterdir())


def test_a_limit_above_the_sample_does_not_make_it_the_whole_text(tmp_path):
    records = [{"text": None}] * 3 + [{"text": prose(i, 16)} for i in range(400)]
    texts, limit = write_records(tmp_path / "texts.jsonl", records), {"max_bytes": "1GB", "validation_fraction": 0.1}
    store = tokenized(texts, tmp_path / "store", limit, "none", vocab_size=300, sample_bytes=3000)
    assert store.metadata.counts["empty_records"] == 3


CHARACTERS = "To be,\tor not\r\nto be 雪🙂e\u0301 ."


def test_character_tokenizer_has_exactly_the_characters_of_the_text(tmp_path):
    tokenizer = made(CHARACTERS[:9], CHARACTERS[9:], tokenizer_type="character")
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == sorted(set(CHARACTERS))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, None, None)
    assert tokenizer.all_special_tokens == []
    assert encode.is_character(tokenizer.backend_tokenizer)
    vocabulary.save(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(CHARACTERS).input_ids
    assert ids == [sorted(set(CHARACTERS)).index(character) for character in CHARACTERS]
    assert encoded(loaded, CHARACTERS, "")[0].tolist() == ids
    assert loaded.decode(ids) == CHARACTERS
    assert as_bytes(loaded, ids) == CHARACTERS.encode()
    sentence = r"The character 'ß' \(U\+00DF\) is not among the 4 that this"
    assert_one_sentence(sentence, encoded, made("abc ", tokenizer_type="character"), "a b", "c ß")


def test_gpt2_tokenizer_files_are_loaded_from_a_folder(tmp_path):
    theirs, folder = train_bpe([PROSE], 400, "none"), tmp_path / "gpt2"
    content = json.loads(theirs.backend_tokenizer.to_str())
    processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    write(folder / "tokenizer.json", json.dumps(content | {"post_processor": processor}))
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "add_prefix_space": False}
    write(folder / "tokenizer_config.json", json.dumps(config))
    write(folder / "config.json", '{"model_type": "gpt2"}')
    loaded = vocabulary.load(folder)
    assert (type(loaded).__name__, len(loaded), loaded.eos_token_id) == ("GPT2Tokenizer", 324, 0)
    vocabulary.save(loaded, tmp_path / "saved")
    rust = encode.load_rust(tmp_path / "saved" / "tokenizer.json")
    assert isinstance(encode.encoder(rust, np.dtype("<u2")), encode.WordEncoder)
    for text in (PROSE, *UNICODE.values()):
        [ids], [expected] = encoded(loaded, text), encoded(theirs, text)
        assert ids.tolist() == expected.tolist()
        assert loaded.decode(ids) == text


def test_a_saved_tokenizer_is_used_without_transformers(tmp_path):
    theirs = train_bpe([PROSE], 280)
    theirs.chat_template = "{{ messages }}"
    vocabulary.save(theirs, tmp_path / "theirs")
    text = write(tmp_path / "my.txt", PROSE)
    command = ["--input", str(text), "--tokenizer", str(tmp_path / "theirs"), "--output", str(tmp_path / "out")]
    code = f"import sys; from tokenizer import pretokenize; pretokenize.main({command})"
    code += "; assert sys.modules.keys() & {'tokenizers', 'transformers', 'torch'} == {'tokenizers'}"
    environment = os.environ | {"USE_TORCH": "0"}  # as the command sets it
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, env=environment)
    assert contents(tmp_path / "out" / "tokenizer") == contents(tmp_path / "theirs")


def test_existing_tokenizer_is_used_unchanged_and_another_vocab_size_refused(tmp_path):
    vocabulary.save(train_bpe([PROSE], 280), tmp_path / "theirs")
    theirs = {"tokenizer": str(tmp_path / "theirs")}

    def built(text=PROSE, **settings):
        recipe = Recipe(["any"], vocabulary=VocabularyArguments(**settings))
        return build(recipe.vocabulary, recipe.existing_tokenizer, lambda: [text])

    vocabulary.save(built("another", **theirs), tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    for settings, size in ((theirs, 280), ({"tokenizer_type": "character"}, len(set(PROSE)))):
        sentence = rf"vocab_size is 999 but .* {size} tokens; set --vocab_size {size}"
        assert_user_error(sentence, built, vocab_size=999, **settings)
    content = json.loads((path := tmp_path / "theirs" / "tokenizer.json").read_text())
    for id in (300, 2**31):
        content["model"]["vocab"]["zz"] = id
        path.write_text(json.dumps(content))
        assert_user_error(f"theirs has 281 tokens, but the id {id:,}; use another tokenizer", built, **theirs)


@pytest.mark.parametrize("made_here", [False, True])
def test_a_tokenizer_adds_no_tokens_that_the_training_text_lacks(tmp_path, made_here):
    theirs, plain = train_bpe([PROSE], 280), train_bpe([PROSE], 280)("the of").input_ids
    template = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    theirs.backend_tokenizer.post_processor = template
    theirs.chat_template = "{{ messages }}"
    models = [SimpleNamespace(config=SimpleNamespace(model_type=kind)) for kind in ("llama", "gpt2scratch")]
    assert [encode_prompt(theirs, "the of", model) for model in models] == [theirs("the of").input_ids, plain]
    assert theirs("the of").input_ids == [0, *plain]
    theirs.bos_token = "<|pad|>"
    assert [encode_prompt(theirs, "", model) for model in models] == [[1], [0]]
    theirs.bos_token = "<|endoftext|>"
    vocabulary.save(theirs, tmp_path)
    existing = SavedTokenizer.read(tmp_path) if made_here else vocabulary.load(tmp_path)
    ours = build(VocabularyArguments(tokenizer=str(tmp_path)), existing, list)
    assert ours("the of").input_ids == plain
    assert (ours.eos_token_id, ours.pad_token_id, ours.chat_template) == (0, 1, "{{ messages }}")
    assert rules(ours) == rules(theirs)


def test_a_link_out_of_a_tokenizer_folder_is_refused(bpe, tmp_path):
    vocabulary.save(bpe, tmp_path / "folder")
    (tmp_path / "secret").write_text("a token")
    (tmp_path / "folder" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert SavedTokenizer.read(tmp_path / "folder") is None
    assert_one_sentence(r"chat_template\.jinja is a link out of the folder", vocabulary.load, tmp_path / "folder")
    snapshot, blobs = (tmp_path / "models--me--x" / name for name in ("snapshots/0/tokenizer", "blobs"))
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to((tmp_path / "folder" / name).rename(blobs / name))
    (snapshot / "input.txt").symlink_to(tmp_path / "secret")  # no part of the tokenizer
    assert SavedTokenizer.read(snapshot) is not None


@pytest.mark.parametrize("content", ["", "{}", '{"model": {}, "added_tokens": []}'])
@pytest.mark.parametrize("made_here", [False, True])
def test_damaged_tokenizer_files_are_refused(bpe, tmp_path, content, made_here):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert_user_error(r"has neither tokenizer\.json nor vocab\.json", vocabulary.load, tmp_path)
    (tmp_path / "config.json").unlink()
    if made_here:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "tokenizer.json").write_text(content)
    assert_one_sentence("No tokenizer can be loaded from", vocabulary.load, tmp_path)
    vocabulary.save(bpe, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    assert_user_error("No tokenizer can be loaded from", vocabulary.load, tmp_path)


def test_gpt2_tokenizers_of_older_versions_are_read(bpe, tmp_path):
    """From vocab.json and merges.txt."""
    bpe.backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert vocabulary.load(tmp_path).encode(PROSE) == bpe.encode(PROSE)


def test_added_tokens_encode_their_text_and_control_tokens_do_not():
    theirs = train_bpe([PROSE], 300).backend_tokenizer
    theirs.add_tokens(["    ", "é ", AddedToken("<|tool|>", special=True)])  # as in the tokenizers of GPT-NeoX and Phi
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=theirs, eos_token="<|endoftext|>")
    text = "if:\n    caf\u00e9 au <|tool|> call"
    [ids] = encoded(tokenizer, text)
    assert {300, 301} <= set(ids.tolist())
    assert 302 not in ids
    assert as_bytes(tokenizer, ids) == text.encode()
    assert encode.token_bytes(tokenizer.backend_tokenizer)[302] == b""


def test_truncation_and_padding_of_an_existing_tokenizer_are_ignored(tmp_path):
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "hello": 2, "##s": 3}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(" "), behavior="removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", cls_token="[CLS]")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    rust = encode.load_rust(tmp_path / "tokenizer.json")
    ids, counts = encode.encoder(rust, np.dtype("<u2"))([b"hello hellos hello"], [encode.NO_TOKEN])
    assert (ids.tolist(), counts.tolist()) == ([2, 2, 3, 2], [4])
