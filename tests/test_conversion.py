"""Lossless conversion: to and from Transformers' GPT-2, and from the checkpoints of the seed author."""

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from test_model import TINY, assert_close, tiny_model, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

from conftest import MODERN, Bomb
from hub_server import File, Repository
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from modeling_gpt2scratch.conversion_gpt2scratch import from_gpt2, main, to_gpt2, to_native
from modeling_gpt2scratch.loading import ModelError

TEXTS = ["It was the best of times,\nit was the worst of times . ", " Two  spaces, a\ttab; naïve café?", "the end"]
tiny = partial(tiny_model, "gpt2")


def tiny_gpt2(**fields):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY | {"bos_token_id": 1, "eos_token_id": 1} | fields)).eval()


def assert_same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_same_logits(ours, gpt2):
    """Check that logits are bitwise equal, except with gelu_new, whose steps in Transformers round differently."""
    ids, is_rounded = tokens(2, 32), ours.config.activation_function == "gelu_new"
    # Measured: 6e-7, where the standard deviation of a logit is 0.8.
    assert_close(ours(ids).logits, gpt2(ids).logits, atol=2e-6 if is_rounded else 0)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_conversion_in_both_directions_keeps_logits_size_and_weights(tied, activation):
    fields = {"tie_word_embeddings": tied, "activation_function": activation}
    gpt2, ours = tiny_gpt2(**fields), tiny(**fields)
    for one, other in ((from_gpt2(gpt2), gpt2), (ours, to_gpt2(ours))):
        assert type(other) is GPT2LMHeadModel
        assert_same_logits(one, other)
        assert one.num_parameters() == other.num_parameters()
        assert (one.lm_head.weight is one.transformer.wte.weight) == tied
        assert (other.lm_head.weight is other.transformer.wte.weight) == tied
    assert_same_weights(to_gpt2(from_gpt2(gpt2)), gpt2)
    assert_same_weights(from_gpt2(to_gpt2(ours)), ours)


def test_conversion_keeps_the_model_and_generation_configurations():
    fields = {"n_inner": 40, "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    fields |= {"pad_token_id": 5, "bos_token_id": 3, "eos_token_id": 4, "use_cache": False}
    gpt2 = tiny_gpt2(**fields)
    gpt2.generation_config.update(do_sample=True, temperature=0.7, top_k=11, max_new_tokens=9, eos_token_id=[1, 2])
    ours = from_gpt2(gpt2)
    back = to_gpt2(ours)
    for model in (ours, back):
        assert {name: getattr(model.config, name) for name in fields} == fields
        assert model.generation_config.to_dict() == gpt2.generation_config.to_dict()
    assert back.config.n_ctx == 32  # llama.cpp's converter reads it


def test_a_converted_model_keeps_its_precision_and_is_independent_of_its_source():
    gpt2 = tiny_gpt2().to(torch.bfloat16)
    ours = from_gpt2(gpt2)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    before = ours(tokens(1, 4)).logits.clone()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.zero_()
    assert torch.equal(ours(tokens(1, 4)).logits, before)
    assert ours.generation_config is not gpt2.generation_config
    assert to_gpt2(ours).generation_config is not ours.generation_config


@torch.no_grad()
def test_the_apertus_twin_of_a_bf16_model_is_exact_because_it_is_float32():
    ours = tiny_model("modern", layer_norm_epsilon=1e-6)
    twin, ids = to_native(ours.to(torch.bfloat16)), tokens(2, 32)
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}
    assert (twin.config.rope_parameters, twin.config.rms_norm_eps) == (MODERN["rope_parameters"], 1e-6)
    expected = ours.float()(ids).logits
    assert_close(twin(ids).logits, expected, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rotary_positions_are_those_of_transformers(kind):
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    rope |= {"linear": {}, "yarn": {"original_max_position_embeddings": 8}}.get(kind, LLAMA3)
    plain, ours = (tiny_model("modern", rope_parameters=each) for each in (MODERN["rope_parameters"], rope))
    ids, expected = tokens(2, 32), to_native(ours)(tokens(2, 32)).logits
    assert_close(ours(ids).logits, expected, atol=1e-5 * expected.abs().max().item())
    assert (plain(ids).logits - expected).abs().max() > 0.01 * expected.abs().max()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, use_cache=False).logits, ours(ids).logits)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
ROTARY = "rope_parameters={'rope_theta': 100.0, 'rope_type': 'default'}"
WITH_BIASES = MODERN | {"rope_parameters": None, "use_bias": True}


@pytest.mark.parametrize(
    ("to", "fields", "words"),
    [
        ("native", {"attention_scale": 0.2}, "gpt2 does not support attention_scale=0.2; publish it with"),
        ("gpt2", MODERN, f"not support normalization='rms_norm', {ROTARY}, attention_scale=0.5; use --to native"),
        ("native", WITH_BIASES, "apertus does not support rope_parameters=None, use_bias=True"),
    ],
)
def test_fields_of_no_native_class_are_refused_by_name_before_weights_are_read(to, fields, words, tmp_path, capfd):
    tiny(**fields).config.save_pretrained(tmp_path / "model")
    assert main([str(tmp_path / "model"), str(tmp_path / "twin"), "--to", to]) == 1
    assert_one_sentence(capfd.readouterr().err, words)


UNSUPPORTED = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}
UNSUPPORTED |= {"reorder_and_upcast_attn": True, "add_cross_attention": True}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_gpt2_option_is_refused_by_name(name):
    with pytest.raises(ModelError, match=rf"does not support {name}={UNSUPPORTED[name]};"):
        from_gpt2(tiny_gpt2(**{name: UNSUPPORTED[name]}))


@torch.no_grad()
def test_the_command_converts_a_gpt2_folder_in_both_directions(tmp_path):
    gpt2 = tiny_gpt2(vocab_size=300)
    gpt2.generation_config.update(do_sample=True, temperature=0.7)
    gpt2.save_pretrained(tmp_path / "gpt2")
    bpe_tokenizer().save(str(tmp_path / "gpt2" / "tokenizer.json"))
    assert main([str(tmp_path / "gpt2"), str(tmp_path / "ours")]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "gpt2"]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(ours) is GPT2ScratchForCausalLM
    assert_same_logits(ours, gpt2)
    assert ours.generation_config.temperature == 0.7
    assert_same_weights(GPT2LMHeadModel.from_pretrained(tmp_path / "back"), gpt2)
    for name in ("ours", "back"):
        assert AutoTokenizer.from_pretrained(tmp_path / name)(TEXTS)["input_ids"] == bpe_ids()


class SeedAttention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("causal_mask", torch.ones(context, context).tril().bool())

    def forward(self, x):
        T = x.shape[1]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, self.causal_mask[:T, :T])
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class SeedBlock(nn.Module):
    def __init__(self, width, heads, inner, context):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SeedAttention(width, heads, context)
        fc1, fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.feed_forward = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class SeedModel(nn.Module):
    """The seed author's model, reconstructed from the names and shapes in its checkpoints."""

    def __init__(self, vocab_size, embed_dim, num_heads, num_layers, ff_dim, max_seq_len):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        self.positional_embedding = nn.Embedding(max_seq_len, embed_dim)
        self.blocks = nn.ModuleList(SeedBlock(embed_dim, num_heads, ff_dim, max_seq_len) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.register_buffer("causal_mask", torch.ones(max_seq_len, max_seq_len).tril())

    def forward(self, ids):
        x = self.token_embedding(ids) + self.positional_embedding.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


CHARACTERS = sorted({*"".join(TEXTS), "€", "\r", "😀"})


def character_map():
    indices = {character: index for index, character in enumerate(CHARACTERS)}
    letters = {str(index): character for index, character in enumerate(CHARACTERS)}
    return {"type": "character", "vocab_size": len(CHARACTERS), "char_to_idx": indices, "idx_to_char": letters}


def bpe_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"vocab_size": 300, "special_tokens": ["<|endoftext|>", "<|pad|>", "<|unk|>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**settings, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["It was the age of wisdom, it was the age of foolishness, " * 9, *TEXTS], trainer)
    return tokenizer


def bpe_ids():
    return [encoding.ids for encoding in bpe_tokenizer().encode_batch(TEXTS)]


def write_seed(folder, kind="bpe", prefix="", **changes):
    """Write a checkpoint folder in the format of the seed author's trainer. Return the folder and its model."""
    folder.mkdir()
    tokenizer = json.dumps(character_map()) if kind == "character" else bpe_tokenizer().to_str()
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    vocab_size = len(CHARACTERS) if kind == "character" else bpe_tokenizer().get_vocab_size()
    shape = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "ff_dim": 48, "max_seq_len": 32}
    torch.manual_seed(0)
    model = SeedModel(vocab_size, **shape).eval()
    torch.save({prefix + name: weight for name, weight in model.state_dict().items()}, folder / BIN)
    config = shape | {"vocab_size": vocab_size, "dropout": 0.1, "tokenizer_type": kind, "model_name": "tiny"} | changes
    config["total_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, model


@pytest.fixture(scope="module", params=["bpe", "character"])
def converted(request, tmp_path_factory):
    """(kind, the seed's model, the converted folder) for both kinds of seed checkpoints."""
    folder, kind = tmp_path_factory.mktemp("seeds"), request.param
    source, model = write_seed(folder / kind, kind, "_orig_mod." if kind == "bpe" else "")
    assert main([str(source), str(folder / "converted")]) == 0
    return kind, model, folder / "converted"


@torch.no_grad()
def test_a_seed_checkpoint_keeps_its_configuration_logits_and_loss(converted):
    kind, seed, folder = converted
    ours = AutoModelForCausalLM.from_pretrained(folder)
    config = ours.config
    assert (config.n_inner, config.n_positions, config.activation_function) == (48, 32, "gelu")
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.1, 0.1, 0.1)
    assert (config.vocab_size, config.tie_word_embeddings) == (seed.head.out_features, False)
    assert (config.eos_token_id, config.pad_token_id) == ((0, 1) if kind == "bpe" else (None, None))
    assert ours.num_parameters() == sum(parameter.numel() for parameter in seed.parameters())
    ids = tokens(2, 32, vocab_size=config.vocab_size)
    output, logits = ours(ids, labels=ids), seed(ids)
    assert_close(output.logits, logits)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(output.loss, loss, atol=1e-6)


def test_a_seed_tokenizer_keeps_its_ids_and_special_tokens(converted):
    kind, _, folder = converted
    indices = character_map()["char_to_idx"]
    expected = bpe_ids() if kind == "bpe" else [[indices[character] for character in text] for text in TEXTS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXTS)["input_ids"] == expected
    assert tokenizer.batch_decode(expected) == TEXTS
    assert tokenizer.model_max_length == 32
    if kind == "bpe":
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        assert special == (0, 0, 1, 2)
        assert tokenizer("a<|endoftext|>b")["input_ids"][1] == 0
    else:
        assert tokenizer("".join(CHARACTERS))["input_ids"] == list(range(len(CHARACTERS)))
        assert tokenizer.decode(range(len(CHARACTERS))) == "".join(CHARACTERS)
        assert (len(tokenizer), tokenizer.eos_token_id) == (len(CHARACTERS), None)


def test_a_seed_checkpoint_on_the_hub_converts_by_its_id_and_with_any_model_type(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder, seed = write_seed(tmp_path / "seed", "character", model_type="TransformerLanguageModel")
    hub.repositories["models/someone/seed"] = Repository(private=False)
    hub["someone/seed"].commit("main", {path.name: File(path.read_bytes()) for path in folder.iterdir()})
    assert main(["someone/seed", str(tmp_path / "ours")]) == 0
    assert capfd.readouterr().out == f"Wrote {tmp_path / 'ours'} (gpt2scratch).\n"
    ids = tokens(1, 32, vocab_size=seed.head.out_features)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(ids).logits, seed(ids))
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("it").input_ids == [CHARACTERS.index(x) for x in "it"]


@torch.no_grad()
def test_a_seed_checkpoint_without_a_tokenizer_converts_to_both_formats(tmp_path):
    folder, seed = write_seed(tmp_path / "seed")
    (folder / "tokenizer.json").unlink()
    for to in ("gpt2", "gpt2scratch"):
        assert main([str(folder), str(tmp_path / to), "--to", to]) == 0
        assert not list((tmp_path / to).glob("tokenizer*"))
    native, ids = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2"), tokens(1, 32)
    assert_close(native(ids).logits, seed(ids))


def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path, capfd):
    folder, target = write_seed(tmp_path / "seed")[0], tmp_path / "executed"
    torch.save({"token_embedding.weight": Bomb(target)}, folder / BIN)
    assert main([str(folder), str(tmp_path / "ours")]) == 1
    assert not target.exists()
    assert_one_sentence(capfd.readouterr().err, "pytorch_model.bin is damaged or not a plain state dict of tensors")
    torch.load(folder / BIN, weights_only=False)
    assert target.exists()  # unpickling would have executed it


def assert_one_sentence(stderr, words):
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert words in stderr


def with_state(change):
    def build(folder):
        write_seed(folder)
        torch.save(change(torch.load(folder / BIN)), folder / BIN)
        return folder

    return build


def without(state, missing):
    return {name: tensor for name, tensor in state.items() if name != missing}


def with_config(**changes):
    return lambda folder: write_seed(folder, **changes)[0]


def with_file(name, change, write=write_seed):
    """Return a builder of a source with one file changed or removed."""

    def build(folder):
        write(folder)
        content = change((folder / name).read_bytes())
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        return folder

    return build


def saved(model):
    return lambda folder: model().save_pretrained(folder) or folder


BIN, SAFE = "pytorch_model.bin", "model.safetensors"
SWIN = b'{"model_type": "swin", "embed_dim": 96}'

WRONG_SOURCES = {
    "no such source": (lambda folder: folder / "nowhere", "nowhere is neither a local folder nor a model on the Hub"),
    "no config.json": (lambda folder: folder.mkdir() or folder, "config.json is missing"),
    "a file": (lambda folder: write_seed(folder)[0] / BIN, "config.json is missing"),
    "broken config.json": (with_file("config.json", lambda content: b'{"embed_dim": 16,'), "config.json"),
    "of another family": (saved(LlamaConfig), "'llama'; expected gpt2, gpt2scratch, or a seed checkpoint"),
    "gpt2scratch already": (saved(tiny), "already is a gpt2scratch model"),
    "missing bin": (with_file(BIN, lambda content: None), "pytorch_model.bin is missing"),
    "truncated bin": (with_file(BIN, lambda old: old[:-2000]), f"{BIN} is damaged or not a plain state dict"),
    "a whole trainer state": (with_state(lambda state: {"model": state, "step": 3}), "pytorch_model.bin"),
    "a missing tensor": (with_state(lambda state: without(state, "ln_f.bias")), "transformer.ln_f.bias is missing"),
    "fewer layers in config.json": (with_config(num_layers=1), "transformer.h.1.attn.c_attn.bias is unknown"),
    "config.json lacks a key": (with_file("config.json", lambda old: old.replace(b"ff_dim", b"x")), "lacks ff_dim"),
    "another family with a field of seeds": (with_file("config.json", lambda old: SWIN), "'swin'; expected gpt2, gpt"),
    "heads that do not divide": (with_config(num_heads=3), "n_embd 16 is not divisible by n_head 3"),
    "a word for a number": (with_config(embed_dim="sixteen"), "n_embd"),
    "broken tokenizer.json": (with_file("tokenizer.json", lambda content: b'{"model":'), "tokenizer.json"),
    "an odd tokenizer.json": (with_file("tokenizer.json", lambda content: b'{"model": 5}'), "tokenizer.json"),
    "a foreign tokenizer.json": (with_file("tokenizer.json", lambda content: b"{}"), "tokenizer.json is neither"),
    "a GPT-2 without weights": (with_file(SAFE, lambda content: None, saved(tiny_gpt2)), "model.safetensors"),
}


@pytest.mark.parametrize("mistake", WRONG_SOURCES)
def test_a_wrong_source_is_refused_in_one_sentence_and_writes_nothing(mistake, tmp_path, capfd):
    build, words = WRONG_SOURCES[mistake]
    source = build(tmp_path / "source")
    capfd.readouterr()
    assert main([str(source), str(tmp_path / "ours")]) == 1
    captured = capfd.readouterr()
    assert_one_sentence(captured.err, words)
    assert captured.out == ""
    assert not (tmp_path / "ours").exists()


def test_a_conversion_that_was_interrupted_can_run_again(tmp_path, monkeypatch):
    tiny().save_pretrained(tmp_path / "ours")
    command = [str(tmp_path / "ours"), str(tmp_path / "gpt2"), "--to", "gpt2"]

    def interrupt(model, folder):
        (Path(folder) / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "save_pretrained", interrupt)
        assert main(command) == 130
    (tmp_path / "gpt2" / ".left_by_a_killed_conversion").mkdir()
    assert main(command) == 0
    names = {path.name for path in (tmp_path / "gpt2").glob("[!.]*")}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("occupied", ["folder", "file"])
def test_an_occupied_destination_is_refused_in_one_sentence_and_stays_unchanged(occupied, tmp_path, capfd):
    source, _ = write_seed(tmp_path / "seed")
    kept = tmp_path / "there" / "precious.txt" if occupied == "folder" else tmp_path / "there"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    assert main([str(source), str(tmp_path / "there")]) == 1
    assert_one_sentence(capfd.readouterr().err, "is not empty" if occupied == "folder" else "there")
    assert kept.read_text() == "precious"
