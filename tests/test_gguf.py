"""Tests of GGUF files, read by llama.cpp (if installed), Transformers, and `logit_difference`."""

import shutil
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice

import pytest
import test_native
import torch
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.activations import ACT2FN

from conftest import MODERN, REPOSITORY, assert_user_error, prose
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.conversion_gpt2scratch import convert, to_native
from publishing.gguf_file import logit_difference, main, write_gguf
from tokenizer.corpus.chat import CHATML
from tokenizer.encoding.vocabulary import character_tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is an extra")

AWKWARD = ["The of\n\n\nand  to a \n", "don't we'll I'm 'S it's 's's 'LL", "1234 56 7890 ½ ² Ⅷ ١٢٣"]
AWKWARD += ["🙂 日本 äöü 👩‍👩‍👧 e\u0301 ﬁ ǅ", "क्षि नमस्ते ไทย 한국어", "trailing   ", "   leading\t tab\r\n"]
AWKWARD += ["a\u00a0b\u3000c \u2028d \u1680 \x85 x\x1fy", "\x00\x01\x7f\u200b\ufeff\U0010fffd"]
AWKWARD += ["<|endoftext|>the<|pad|> of <|im_start|>user\nand<|im_end|>\n", "!?!?... --- ##\n#\n\n\n x_y __z"]
AWKWARD += ["the" * 100]


bpe = partial(test_native.bpe, [prose(1), *AWKWARD[:-1]], 420)
ascii_characters = partial(character_tokenizer, [prose(1)])
characters = partial(character_tokenizer, [prose(1), "äöü 日本語 🙂👩‍👩‍👧 á\n"])


def padded_characters():
    tokenizer = characters()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


def model_folder(folder, tokenizer, **fields):
    """Save a random model whose most likely tokens are never tied."""
    fields = {"n_positions": 256, "activation_function": "gelu_new"} | fields
    return test_native.model_folder(folder, tokenizer, seed=2, **fields)


@pytest.fixture
def write_model(tmp_path):
    """Function that writes a model folder and its GGUF file, and returns the model and the file."""

    def write(tokenizer, kind="f16", **fields):
        model = model_folder(tmp_path / "model", tokenizer, **fields)
        write_gguf(model, tokenizer, tmp_path / "model.gguf", kind, "Tiny")
        return model, tmp_path / "model.gguf"

    return write


@torch.no_grad()
def rounded(model):
    """Round the model like an f16 file: matrices to half precision, not vectors and position embeddings."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "wpe" not in name:
            parameter.copy_(parameter.half().float())
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids])).logits[0]


def some_ids(model, length=48):
    return torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).tolist()


def fields_of(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def kinds_of(file):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


@pytest.fixture
def llama():
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    settings = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "logits_all": True, "verbose": False}
    with ExitStack() as stack:
        yield lambda file: stack.enter_context(closing(llama_cpp.Llama(str(file), **settings)))


def llama_logits(model, ids):
    model.reset()
    model.eval(ids)
    return torch.from_numpy(model.scores[: len(ids)].copy())


SHAPES = {
    "narrow and tied BPE": (bpe, {"n_inner": 48, "layer_norm_epsilon": 1e-3, "n_head": 4, "tie_word_embeddings": True}),
    "untied BPE": (bpe, {}),
    "tied characters": (characters, {"tie_word_embeddings": True}),
    "ASCII characters": (ascii_characters, {}),
    "characters with padding": (padded_characters, {}),
    "without biases": (bpe, {"use_bias": False, "n_inner": 96}),
    "narrow and tied modern": (bpe, MODERN | {"n_inner": 48, "n_head": 4, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize(("make", "fields"), SHAPES.values(), ids=SHAPES)
def test_llama_cpp_generates_the_same_text(make, fields, write_model, llama):
    tokenizer = make()
    model, file = write_model(tokenizer, **fields)
    model, engine = rounded(to_native(model)), llama(file)
    prompt = tokenizer.encode("The of and ")
    target = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)[0].tolist()
    written = engine.generate(prompt, temp=0.0, repeat_penalty=1.0)
    assert [*prompt, *islice(written, len(target) - len(prompt))] == target
    first, second = logits_of(model, target)[len(prompt) - 1 : -1].topk(2).values.T
    assert (first - second).min() > 0.01  # otherwise rounding could decide


def test_twin_and_llama_cpp_continue_20_texts_like_the_model_of_this_repository(tmp_path, llama):
    model, tokenizer = GPT2ScratchForCausalLM.from_pretrained(REPOSITORY), AutoTokenizer.from_pretrained(REPOSITORY)
    ids = tokenizer.encode((REPOSITORY / "train_accelerate.py").read_text(encoding="utf-8"))
    prompts = torch.tensor(ids[:320]).view(20, 16)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(prompts)}
    texts = model.float().generate(prompts, **options)
    assert torch.equal(to_native(model).generate(prompts, **options), texts)
    write_gguf(model, tokenizer, tmp_path / "root.gguf", "f16", "Root")
    engine = llama(tmp_path / "root.gguf")
    written = [engine.generate(prompt, temp=0.0, repeat_penalty=1.0) for prompt in prompts.tolist()]
    assert [list(islice(tokens, 24)) for tokens in written] == texts[:, 16:].tolist()


@pytest.mark.parametrize("make", [bpe, characters, ascii_characters, padded_characters])
def test_llama_cpp_tokenizes_like_our_tokenizer(make, write_model, llama):
    tokenizer = make()
    engine = llama(write_model(tokenizer)[1])
    for text in AWKWARD:
        if make is not bpe:  # our tokenizer refuses other characters, and llama.cpp drops them
            text = "".join(character for character in text if character in tokenizer.get_vocab())
        ids = engine.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == tokenizer.encode(text)
        assert engine.detokenize(ids, special=True).decode() == text


def test_a_special_token_of_a_character_tokenizer_is_not_made_of_bytes(write_model):
    tokenizer = padded_characters()
    fields, pad = fields_of(write_model(tokenizer)[1]), tokenizer.pad_token_id
    assert fields["tokenizer.ggml.tokens"][pad] == "<pad>"
    assert fields["tokenizer.ggml.token_type"][pad] == gguf.TokenType.CONTROL
    assert not [pair for pair in fields["tokenizer.ggml.merges"] if pair.isascii()]


def test_files_of_a_character_tokenizer_are_equal(write_model):
    model, file = write_model(characters())
    content = file.read_bytes()
    write_gguf(model, characters(), file, "f16", "Tiny")
    assert file.read_bytes() == content


def test_llama_cpp_reads_the_special_tokens_and_the_chat_template(write_model, llama):
    tokenizer = bpe()
    tokenizer.add_tokens(["two words"])
    engine = llama(write_model(tokenizer, vocab_size=430)[1])
    end = str(tokenizer.vocab["<|im_end|>"])
    assert (engine.token_bos(), engine.token_eos()) == (0, 0)
    facts = {"tokenizer.ggml.padding_token_id": "1", "tokenizer.ggml.eot_token_id": end, "general.name": "Tiny"}
    assert engine.metadata.items() >= (facts | {"tokenizer.chat_template": CHATML}).items()
    assert engine.n_vocab() == 430  # embeddings without a token are kept
    for text, special in (("a two words b", False), ("<|im_end|>", True)):
        assert engine.tokenize(text.encode(), add_bos=False, special=special) == tokenizer.encode(text)
    assert len(engine.tokenize(b"<|im_end|>", add_bos=False, special=False)) > 1
    assert engine.tokenize(b"the") == tokenizer.encode("the")  # no token is added before a text


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_an_end_token_generates_without_stopping_in_llama_cpp(tied, write_model, llama):
    tokenizer = characters()
    model, file = write_model(tokenizer, tie_word_embeddings=tied)
    engine, end = llama(file), len(tokenizer)
    assert (engine.token_eos(), engine.n_vocab()) == (end, end + 1)
    assert (llama_logits(engine, some_ids(model, 256))[:, end] + 1000).abs().max() < 1
    result = engine("the", max_tokens=200, temperature=1.0, seed=1)
    assert (result["choices"][0]["finish_reason"], result["usage"]["completion_tokens"]) == ("length", 200)


@pytest.mark.parametrize("fields", [{"activation_function": "gelu"}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize(("kind", "room"), [("f16", 0.02), ("q8_0", 0.5)])
def test_the_logits_of_llama_cpp_differ_as_reported(kind, fields, room, write_model, llama):
    """`room` allows for rounding by llama.cpp: activations to f16, or to 8 bits before a Q8_0 matrix."""
    model, file = write_model(bpe(), kind, **fields)
    ids = some_ids(model)
    engine, (logits, loss_gap) = llama_logits(llama(file), ids), logit_difference(model, file, torch.tensor([ids]))
    assert (engine - logits_of(model, ids)).abs().max() == pytest.approx(logits, abs=room)
    loss = partial(torch.nn.functional.cross_entropy, target=torch.tensor(ids[1:]))
    assert (loss(engine[:-1]) - loss(logits_of(model, ids)[:-1])).item() == pytest.approx(loss_gap, abs=room / 4)


def test_only_matrices_are_quantized(write_model):
    kinds = kinds_of(write_model(bpe(), "q8_0", n_inner=48)[1])
    matrices = {f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_qkv", "attn_output", "ffn_up")}
    assert {name for name in kinds if kinds[name] == "Q8_0"} == {"token_embd.weight", "output.weight", *matrices}
    assert [name for name in kinds if kinds[name] == "F16"] == [f"blk.{layer}.ffn_down.weight" for layer in range(2)]
    vectors = [name for name in kinds if kinds[name] == "F32"]  # ffn_down has rows of 48 values, Q8_0 blocks of 32
    assert len(vectors) == 3 + 2 * 8
    assert all("norm" in name or name.endswith("bias") or name == "position_embd.weight" for name in vectors)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_an_f16_file_differs_by_rounding_and_by_the_exact_gelu(write_model, activation):
    model, file = write_model(bpe(), tie_word_embeddings=True, activation_function=activation)
    assert "output.weight" not in kinds_of(file)
    ids = torch.tensor([some_ids(model), some_ids(model)[::-1]])
    logits, loss = logit_difference(model, file, ids)
    with torch.no_grad():
        original_logits, original_loss = model(ids).logits, model(ids, labels=ids).loss
        for block in rounded(model).transformer.h:
            block.mlp.act = ACT2FN["gelu_new"]
        rounded_logits, rounded_loss = model(ids).logits, model(ids, labels=ids).loss
    assert logits == pytest.approx((rounded_logits - original_logits).abs().max().item(), abs=1e-5)
    assert loss == pytest.approx((rounded_loss - original_loss).item(), abs=1e-5)
    assert logits > 1e-3


def test_the_command_writes_a_file_of_a_run(run, tmp_path, launch):
    file = tmp_path / "out" / "tiny.gguf"
    result = launch("-m", "publishing.gguf_file", run / "model", file, "--type", "q8_0", "--license", "mit")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Wrote {file} (")
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    fields = fields_of(file)
    general = {"architecture": "gpt2", "name": "tiny", "license": "mit", "file_type": 7, "quantization_version": 2}
    shape = {"context_length": 16, "embedding_length": 16, "block_count": 2, "feed_forward_length": 64}
    shape |= {"attention.head_count": 2, "attention.layer_norm_epsilon": pytest.approx(1e-5)}
    for kind, target in (("general.", general), ("gpt2.", shape)):
        values = {name.removeprefix(kind): value for name, value in fields.items() if name.startswith(kind)}
        assert values == target
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|pad|>"]
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]


@pytest.mark.parametrize(("tied", "activation"), [(True, "gelu_new"), (False, "gelu")])
def test_transformers_reads_a_gguf_file_given_the_context_length(tied, activation, write_model):
    sizes, tokenizer = {"n_positions": 64, "n_inner": 48, "activation_function": activation}, bpe()
    model, file = write_model(tokenizer, **sizes, tie_word_embeddings=tied)
    convert(file.parent / "model", file.parent / "native", to="native")
    shutil.move(file, file.parent / "native")
    gguf_model = AutoModelForCausalLM.from_pretrained(file.parent / "native", gguf_file=file.name, **sizes)
    ids = some_ids(model)
    assert (logits_of(gguf_model, ids) - logits_of(rounded(model), ids)).abs().max() < 1e-4
    words = AutoTokenizer.from_pretrained(file.parent / "native", gguf_file=file.name)
    assert [words.encode(text) for text in AWKWARD] == [tokenizer.encode(text) for text in AWKWARD]
    config = AutoConfig.from_pretrained(file.parent / "native", gguf_file=file.name)
    assert (config.n_positions, config.n_ctx, config.n_inner) == (1024, 64, None)


def with_rust(**parts):
    tokenizer = bpe()
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def with_token(**properties):
    tokenizer = bpe()
    tokenizer.add_tokens([AddedToken("<mask>", **properties)])
    return tokenizer


LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}
NO_PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), NO_PATTERN])


@pytest.mark.parametrize(
    ("make", "fields", "sentence"),
    [
        (bpe, {"activation_function": "relu"}, r"activation_function relu differs by up to 0\.17 from the tanh GELU"),
        (bpe, {"activation_function": "quick_gelu"}, r"quick_gelu differs by up to 0\.02"),
        (bpe, {"attention_scale": 0.2}, r"gpt2 does not support attention_scale=0\.2; publish it with"),
        (bpe, MODERN | LINEAR, "its rotary positions have the type linear, and GGUF files are written for default"),
        (characters, MODERN, "can be added only to a model with use_bias=True"),
        (bpe, {"vocab_size": 300}, "it has 300 embeddings but 420 tokens"),
        (partial(with_rust, normalizer=normalizers.NFC()), {}, r"the tokenizer has normalizer NFC\(\)"),
        (partial(with_rust, pre_tokenizer=SPLIT), {}, r"pre_tokenizer Sequence\(pretokenizers=\[Split\("),
        (partial(with_rust, pre_tokenizer=NO_PATTERN), {}, "pre_tokenizer ByteLevel.*use_regex=False"),
        (partial(with_rust, pre_tokenizer=pre_tokenizers.ByteLevel()), {}, "ByteLevel.*add_prefix_space=True"),
        (partial(with_token, lstrip=True), {}, "a token '<mask>' that includes neighboring blanks or matches whole"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_or_tokenize_differently_is_refused(make, fields, sentence, tmp_path):
    model = model_folder(tmp_path / "model", tokenizer := make(), **fields)
    assert_user_error(sentence, write_gguf, model, tokenizer, tmp_path / "model.gguf", "f16", "Tiny")
    assert not (tmp_path / "model.gguf").exists()


def test_an_unusable_model_or_file_is_refused(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    tokenizer = characters()
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2))
    for file, sentence in (
        ("model.gguf", "one can be added only after training; train the model first"),
        ("folder.gguf", r"folder\.gguf exists and was not written by this command"),
    ):
        assert_user_error(sentence, write_gguf, model, tokenizer, tmp_path / file, "f16", "Tiny")
    assert_user_error("Name a model and a file", main, [str(tmp_path)])
    assert [*tmp_path.iterdir()] == [tmp_path / "folder.gguf"]
