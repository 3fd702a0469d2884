"""Tests of both model families against Transformers' GPT-2 and Apertus, literal numbers, and alternative paths."""

import logging
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from conftest import MODERN, REPOSITORY
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM, modeling_gpt2scratch
from tokenizer.encoding.vocabulary import character_tokenizer, save
from training.runtime.compilation import prepare_compiler

# Weights have ten times the usual size, so that attention is far from uniform and leaks between tokens are visible.
TINY = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
FAMILIES = {"gpt2": {}, "modern": MODERN}
ROPE = MODERN["rope_parameters"]
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Parts of our parameter names -> those of Apertus.
APERTUS = {"transformer.wte": "model.embed_tokens", "transformer.h": "model.layers", "attn.c_proj": "self_attn.o_proj"}
APERTUS |= {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj", "attn.c_attn": "self_attn.{}_proj"}
F = torch.nn.functional
assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
FIELDS = {*GPT2ScratchConfig.__annotations__, "rope_theta"}

# Parameters, layers, heads, width, context, activation and attention scale. The vocabulary follows from the parameters.
PRESETS = {
    "nano": (1_461_760, 2, 4, 128, 128, "gelu", None),
    "shakespeare_char": (3_258_368, 4, 4, 256, 256, "gelu", None),
    "medium_char": (3_322_368, 4, 4, 256, 256, "gelu", None),
    "gpt2_small_seed": (134_601_216, 12, 12, 768, 512, "gelu", None),
    "tinystories_15m": (15_965_952, 8, 6, 384, 512, "gelu_new", None),
    "tinystories_15m_modern": (17_301_504, 8, 6, 384, 512, "relu2", 0.17),
    "gpt2": (124_439_808, 12, 12, 768, 1024, "gelu_new", None),
    "gpt2_medium": (354_823_168, 24, 16, 1024, 1024, "gelu_new", None),
    "gpt2_large": (774_030_080, 36, 20, 1280, 1024, "gelu_new", None),
    "gpt2_xl": (1_557_611_200, 48, 25, 1600, 1024, "gelu_new", None),
    "shakespeare_char_modern": (3_179_008, 4, 4, 256, 256, "relu2", 0.17),
    "gpt2_small_seed_modern": (134_086_656, 12, 6, 768, 512, "relu2", 0.12),
    "gpt2_modern": (162_129_408, 12, 6, 768, 1024, "relu2", 0.12),
    "gpt2_medium_modern": (404_916_224, 24, 8, 1024, 1024, "relu2", 0.12),
}


def tiny_model(family, attention="sdpa", **fields):
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**TINY | FAMILIES[family] | fields)).eval()
    for parameter in model.parameters():
        if not parameter.any():  # biases; in the modern family also the head and projections into the residual stream
            torch.nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation(attention)
    return model


@pytest.fixture(params=FAMILIES)
def tiny(request):
    return partial(tiny_model, request.param)


def tokens(*shape, seed=1, vocab_size=64):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def native_of(model):
    """Return the same function as Transformers' GPT-2, or as its Apertus with a normalized embedding."""
    names = ["vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "hidden_size"]
    names += ["max_position_embeddings", "num_attention_heads", "num_hidden_layers"]
    fields = {name: getattr(model.config, name) for name in names}
    if model.config.rope_parameters is None:
        fields["activation_function"] = model.config.activation_function
        native = transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields))
    else:
        fields |= {"rope_parameters": ROPE, "intermediate_size": 64, "rms_norm_eps": 1e-5}
        native = transformers.ApertusForCausalLM(transformers.ApertusConfig(**fields))
        native.model.embed_tokens.register_forward_hook(lambda _module, _ids, rows: F.rms_norm(rows, (16,), eps=1e-5))
        for layer in native.model.layers:
            layer.self_attn.scaling = model.config.attention_scale
            # xIELU without its linear part and its negative half is softplus(alpha_p) * relu(x)^2, here with factor 1.
            for name, value in {"beta": 0.0, "alpha_n": -200.0, "alpha_p": math.log(math.e - 1)}.items():
                getattr(layer.mlp.act_fn, name).data.fill_(value)
    native.set_attn_implementation(model.config._attn_implementation)
    missing, unexpected = native.load_state_dict(as_native(model.state_dict()), strict=False)
    assert (unexpected, [name for name in missing if "norm" not in name and "act_fn" not in name]) == ([], [])
    return native.eval()


def as_native(tensors):
    """Return tensors with our names (weights or gradients) with the names and shapes of GPT-2 or Apertus."""
    if "transformer.wpe.weight" in tensors:
        return {name: tensor.t() if name.endswith(CONV1D) else tensor for name, tensor in tensors.items()}
    native = {}
    for name, tensor in tensors.items():
        for ours, theirs in APERTUS.items():
            name = name.replace(ours, theirs)
        parts = zip("qkv", tensor.chunk(3), strict=True) if "{}" in name else [("", tensor)]
        native |= {name.format(kind): part for kind, part in parts}
    return native


def left_padded(short, long):
    """Return a batch of both rows, the short one padded on the left, and its attention mask."""
    pad = partial(F.pad, pad=(long.shape[1] - short.shape[1], 0))
    return torch.cat([pad(short), long]), torch.cat([pad(torch.ones_like(short)), torch.ones_like(long)])


def greedy(model, prompt, new=10, **settings):
    return model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0, **settings)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_exactly_the_published_number_of_parameters(name):
    preset = yaml.safe_load((REPOSITORY / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))
    config = GPT2ScratchConfig(**{key: preset[key] for key in preset.keys() & FIELDS})
    shape = (config.n_layer, config.n_head, config.n_embd, config.n_positions)
    with torch.device("meta"):
        parameters = GPT2ScratchForCausalLM(config).num_parameters()
    assert (parameters, *shape, config.activation_function, config.attention_scale) == PRESETS[name]
    if name.endswith("_modern"):
        assert (config.normalization, config.rope_parameters) == ("rms_norm", ROPE | {"rope_theta": 1e4})


INITIAL = dict.fromkeys(("wte", "wpe", "lm_head", "attn.c_attn", "mlp.c_fc"), 0.02) | {"c_proj": 0.005, "bias": 0.0}
INITIAL_MODERN = {"wte": 1.0, "lm_head": 0.0, "attn.c_attn": 0.02, "mlp.c_fc": 0.02, "c_proj": 0.0}


@pytest.mark.parametrize(("family", "expected"), [("gpt2", INITIAL), ("modern", INITIAL_MODERN)])
def test_initial_weights(family, expected):
    """In GPT-2, weights into the residual stream have 0.02 / sqrt(2 * 8) = 0.005. The modern family starts with a
    uniform distribution."""
    torch.manual_seed(0)
    config = GPT2ScratchConfig(vocab_size=64, n_positions=64, n_embd=64, n_layer=8, n_head=4, **FAMILIES[family])
    model, ids = GPT2ScratchForCausalLM(config), tokens(2, 64)
    weights = {name: weight for name, weight in model.state_dict().items() if "ln_" not in name}
    for kind, std in reversed(expected.items()):  # biases first
        found = [weights.pop(name).flatten() for name in list(weights) if kind in name]
        assert torch.cat(found).std().item() == pytest.approx(std, rel=0.05), kind
    assert not weights
    assert (model(ids, labels=ids).loss.item() == pytest.approx(math.log(64), abs=1e-6)) == (family == "modern")


def test_all_problems_of_a_config_are_reported_together_also_on_loading_and_saving(tmp_path):
    wrong = {"n_embd": 30, "n_head": 4, "n_layer": 0, "n_inner": 0, "resid_pdrop": 1.5, "activation_function": "gleu"}
    with pytest.raises(StrictDataclassError) as error:
        GPT2ScratchConfig(**wrong)
    divides = "n_embd 30 is not divisible by n_head 4"
    for words in (divides, "n_layer is 0", "n_inner is 0", "resid_pdrop is 1.5", "'gleu'"):
        assert words in str(error.value)
    for wrong in (
        *({"n_layer": "12"}, {"resid_pdrop": None}, {"tie_word_embeddings": "yes"}, {"use_bias": None}),
        *({"activation_function": "xielu"}, {"normalization": "rms"}),
        *({"attention_scale": 0.0}, {"attention_scale": math.inf}),
        *({"rope_parameters": ROPE | more} for more in ({"rope_theta": 1}, {"rope_type": "dynamic"}, {"factor": 8})),
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 0.5}},
        {"rope_parameters": ROPE, "n_embd": 18, "n_head": 2},
    ):
        with pytest.raises(StrictDataclassError, match=next(iter(wrong))):
            GPT2ScratchConfig(**wrong)
    assert GPT2ScratchConfig(rope_theta=100.0).rope_parameters == ROPE
    config = GPT2ScratchConfig(**TINY)
    GPT2ScratchForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'dynamic'"):
        GPT2ScratchForCausalLM.from_pretrained(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    config.n_head = 3
    with pytest.raises(StrictDataclassError, match="not divisible"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("family", "activation"), [("gpt2", "gelu"), ("gpt2", "gelu_new"), ("modern", "relu2")])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_loss_and_gradients_match_transformers(tied, family, activation, attention):
    ours = tiny_model(family, attention, tie_word_embeddings=tied, activation_function=activation)
    theirs, ids = native_of(ours), tokens(2, 32)
    a, b = ours(ids, labels=ids), theirs(ids, labels=ids)
    assert_close(a.logits, b.logits)
    assert_close(a.loss, b.loss, atol=1e-6)
    a.loss.backward()
    b.loss.backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in as_native({name: parameter.grad for name, parameter in ours.named_parameters()}).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_hidden_states_and_attentions_match_transformers_and_are_returned_only_on_request(tiny):
    ours = tiny("eager")
    theirs = native_of(ours)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        a, b = ours(tokens(2, 9), **wanted), theirs(tokens(2, 9), **wanted)
    assert (len(a.hidden_states), len(a.attentions)) == (3, 2)  # n_layer + 1, n_layer
    assert a.attentions[0].shape == (2, 2, 9, 9)
    assert_close(a.hidden_states, b.hidden_states)
    assert_close(a.attentions, b.attentions, atol=1e-6)
    unasked = ours(tokens(1, 4))
    assert (unasked.hidden_states, unasked.attentions, unasked.loss) == (None, None, None)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
def test_flex_attention_agrees_with_sdpa(tiny):
    """Without compilation: building the kernel takes half a minute and tests PyTorch, not this call."""
    model, ids = tiny(), tokens(2, 32)
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        assert_close(model(ids).logits, expected)
    prepare_compiler()
    graph = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(graph(ids, position_ids=torch.arange(32).expand(2, 32), use_cache=False).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_kind_of_dropout_acts_only_in_training(tiny, kind, attention):
    model, ids = tiny(attention, **{kind: 0.5}), tokens(1, 8)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_does_not_change_logits_without_position_ids(tiny, attention):
    model = tiny(attention)
    short, long = tokens(1, 7), tokens(1, 12, seed=2)
    padded, mask = left_padded(short, long)
    logits = model(padded, attention_mask=mask).logits
    assert_close(logits[:1, 5:], model(short).logits)
    assert_close(logits[1:], model(long).logits)
    assert_close(model(padded[:1].roll(7, 1), attention_mask=mask[:1].flip(1)).logits[:, :7], model(short).logits)


def packed(*lengths):
    """Return a row of packed documents, its position ids, and the single documents."""
    documents = [tokens(1, length, seed=length + place) for place, length in enumerate(lengths)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return torch.cat(documents, dim=1), positions, documents


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("use_cache", "training"), [(None, True), (None, False), (False, False)])
@pytest.mark.parametrize("way", ["eager", "sdpa", "compiled"])
def test_packed_documents_do_not_see_each_other_even_beyond_the_context(tiny, use_cache, training, way):
    model = tiny("eager" if way == "eager" else "sdpa").train(training)
    forward = torch.compile(model, backend="eager", fullgraph=True) if way == "compiled" else model
    for lengths in ((20, 32, 20), (5, 9, 4))[: 1 if way == "compiled" else 2]:
        row, positions, documents = packed(*lengths)
        alone = torch.cat([model(document).logits for document in documents], dim=1)
        assert_close(forward(row, position_ids=positions, use_cache=use_cache).logits, alone)


def grow_static_cache(model, length=33):
    cache = StaticCache(config=model.config, max_cache_len=length)
    model(tokens(1, 32), past_key_values=cache)
    model(tokens(1, 1), past_key_values=cache)


BEYOND = {
    "ids": lambda model: model(tokens(1, 33)),
    "embeddings": lambda model: model(inputs_embeds=torch.zeros(1, 33, 16)),
    "dynamic_cache": lambda model: model(tokens(1, 3), past_key_values=model(tokens(1, 30)).past_key_values),
    "static_cache": grow_static_cache,
    "full_static_cache": partial(grow_static_cache, length=32),
    "packed_document": lambda model: model(packed(20, 33)[0], position_ids=packed(20, 33)[1]),
    "prompt": lambda model: greedy(model, tokens(1, 33), new=1),
    "prompt_without_cache": lambda model: greedy(model, tokens(1, 33), new=1, use_cache=False),
    "prompt_with_static_cache": lambda model: greedy(model, tokens(1, 33), new=1, cache_implementation="static"),
}


@torch.no_grad()
@pytest.mark.parametrize("way", BEYOND)
def test_input_beyond_the_context_is_refused_with_both_lengths(tiny, way):
    with pytest.raises(ValueError, match="33 tokens does not fit the context of 32 tokens"):
        BEYOND[way](tiny())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_refuses_input_beyond_the_context(tiny, fullgraph):
    """Inductor's kernels would abort the process at an index beyond the table. This error precedes them."""
    compiled = torch.compile(tiny(), backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match="33 tokens does not fit the context of 32 tokens"):
        compiled(tokens(1, 33))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [[5, *[1] * 7], [5, 7]], ids=["one_by_one", "several_at_once"])
def test_chunks_through_a_cache_give_the_logits_of_the_whole_input(tiny, lengths, kind, attention):
    model, ids = tiny(attention), tokens(2, 12)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=16)
    steps = [model(piece, past_key_values=cache).logits for piece in ids.split(lengths, dim=1)]
    assert_close(torch.cat(steps, dim=1), model(ids).logits)


@torch.no_grad()
def test_the_cache_is_also_accepted_by_its_name_since_transformers_5_24(tiny, monkeypatch):
    """`generate` passes it as `cache`. Without it, each token would be written after the last one alone."""
    monkeypatch.setattr(modeling_gpt2scratch, "CACHE", "cache")
    model, ids, cache = tiny().transformer, tokens(2, 12), DynamicCache()
    first, second = ids.split([5, 7], dim=1)
    steps = [model(first, cache=cache)[0], model(second, past_key_values=cache, cache=None)[0]]
    assert_close(torch.cat(steps, dim=1), model(ids)[0])
    with pytest.raises(ValueError, match="given as memory; give it as cache, or use newer code of the model"):
        model(ids, memory=cache)


@torch.no_grad()
def test_a_mask_as_long_as_a_static_cache_gives_the_logits_of_the_whole_input(tiny):
    model, ids = tiny(), tokens(2, 12)
    cache, mask = StaticCache(config=model.config, max_cache_len=16), torch.ones(2, 16, dtype=torch.long)
    mask[0, :3] = 0  # padding to the left
    steps = [model(piece, past_key_values=cache, attention_mask=mask).logits for piece in ids.split([5, 6, 1], dim=1)]
    assert_close(torch.cat(steps, dim=1)[:, 3:], model(ids, attention_mask=mask[:, :12]).logits[:, 3:])


def test_a_changed_field_is_checked_when_the_model_is_built():
    config = GPT2ScratchConfig(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **MODERN)
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(Exception, match="original_max_position_embeddings"):
        GPT2ScratchForCausalLM(config)


WAYS_TO_GENERATE = {
    "dynamic_cache": {},
    "static_cache": {"cache_implementation": "static"},
    "no_cache": {"use_cache": False},
    "prompt_lookup": {"prompt_lookup_num_tokens": 8},
    "assistant": {"assistant_model": tiny_model("gpt2", n_layer=1)},
    "beams": {"num_beams": 2},
    "drafts": {"assistant_early_exit": 1},
}


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Function that returns the warnings about the context; Transformers has one of its own, once per process."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # a command that ran in this process may have changed it
    return lambda: [text for text in caplog.messages if text.startswith("The prompt")]


STOPS = "The prompt has 10 tokens and the context 32 (n_positions), so generation stops after 22 new tokens."


@pytest.mark.parametrize("way", WAYS_TO_GENERATE)
def test_generation_matches_transformers_and_stops_at_the_context_length_with_one_warning(tiny, way, warnings):
    model = tiny()
    prompt = tokens(1, 5).repeat(1, 2)  # a repetition for prompt lookup to find
    expected = greedy(model, prompt, new=22, **WAYS_TO_GENERATE[way])
    if way != "beams":
        assert torch.equal(expected, greedy(native_of(model), prompt, new=22, use_cache=False))
    assert warnings() == []
    assert torch.equal(greedy(model, prompt, new=256, **WAYS_TO_GENERATE[way]), expected)
    assert expected.shape == (1, 32)
    assert warnings() == [STOPS]


def test_embeddings_and_max_length_stop_at_the_context_length(tiny, warnings):
    model, ids = tiny(), tokens(1, 10).clamp(min=1)  # 0 is the padding token
    expected = greedy(model, ids, new=22)
    embedded = greedy(model, None, new=256, inputs_embeds=model.transformer.wte(ids))
    assert torch.equal(embedded, expected[:, 10:])
    assert torch.equal(model.generate(ids, max_length=100, do_sample=False, pad_token_id=0), expected)
    assert warnings() == [STOPS] * 2


def test_a_prompt_that_fills_the_context_gets_one_token(tiny, warnings):
    model, prompt = tiny(), tokens(1, 32)
    for new in (1, 5):
        assert greedy(model, prompt, new=new).tolist()[0][32:] == [model(prompt).logits[0, -1].argmax().item()]
    assert len(warnings()) == 1  # for the five tokens


@pytest.mark.parametrize("many", [False, True], ids=["one", "batch"])
def test_a_pipeline_with_default_settings_stays_within_the_context(tiny, many, tmp_path):
    tokenizer = character_tokenizer(["abc "])
    save(tokenizer, tmp_path, 32)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=tiny(vocab_size=len(tokenizer)), tokenizer=loaded)
    prompts = ["abc ab", "c"] if many else ["abc ab"]
    for answer, prompt in zip(pipe(prompts) if many else [pipe(*prompts)], prompts, strict=True):
        assert answer[0]["generated_text"].startswith(prompt)
        assert len(tokenizer(answer[0]["generated_text"]).input_ids) == 32


def test_sampling_and_beam_search_match_transformers(tiny):
    model, prompt = tiny(), tokens(2, 6)
    drawn = []
    for one in (model, native_of(model)):
        torch.manual_seed(7)
        drawn.append(one.generate(prompt, max_new_tokens=12, do_sample=True, temperature=0.8, top_k=20, pad_token_id=0))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], greedy(model, prompt, new=12))
    assert torch.equal(greedy(model, prompt, num_beams=2), greedy(native_of(model), prompt, num_beams=2))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_left_padded_batch_generates_the_text_of_each_row_and_stops_at_the_context_length(tiny, cache, warnings):
    model = tiny()
    short, long = tokens(1, 5), tokens(1, 10, seed=2)
    batch, mask = left_padded(short, long)
    together = greedy(model, batch, attention_mask=mask, cache_implementation=cache)[:, 10:]
    assert torch.equal(together, torch.cat([greedy(model, short)[:, 5:], greedy(model, long)[:, 10:]]))
    stopped = greedy(model, batch, new=256, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(stopped, greedy(model, batch, new=22, attention_mask=mask))
    assert warnings() == [STOPS]


@torch.no_grad()
def test_embeddings_give_the_logits_of_ids_and_passing_both_or_neither_is_refused(tiny):
    model, ids = tiny(), tokens(2, 8)
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)
    for wrong in ({"input_ids": ids, "inputs_embeds": embeddings}, {}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@torch.no_grad()
def test_logits_to_keep_selects_positions(tiny):
    model, ids = tiny(), tokens(2, 8)
    for keep, positions in ((0, range(8)), (1, [7]), (3, [5, 6, 7]), (torch.tensor([0, 5]), [0, 5])):
        assert_close(model(ids, logits_to_keep=keep).logits, model(ids).logits[:, list(positions)], atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_of_the_labeled_next_tokens(tiny):
    model, ids = tiny(), tokens(2, 8)
    targets, logits = ids[:, 1:].flatten(), model(ids).logits[:, :-1].flatten(0, 1)
    nats = -logits.log_softmax(-1)[range(14), targets]
    torch.testing.assert_close(model(ids, labels=ids).loss, nats.mean())
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=100).loss, nats.sum() / 100)
    labels = ids.clone()
    labels[0, :5] = -100
    counted = (labels[:, 1:] != -100).flatten()
    assert counted.sum() == 10
    torch.testing.assert_close(model(ids, labels=labels).loss, nats[counted].mean())
    shifted = {"labels": ids[:, :-1], "shift_labels": ids[:, 1:].contiguous()}  # used without another shift
    torch.testing.assert_close(model(ids[:, :-1], **shifted).loss, nats.mean())
    expected, short = model(ids, labels=ids), model(ids.int(), labels=ids.int())
    assert torch.equal(short.logits, expected.logits)
    assert torch.equal(short.loss, expected.loss)


def block_runs_of_one_step(model, ids):
    """Return the gradients of a training step, and how often the first block ran."""
    runs = []
    hook = model.transformer.h[0].ln_1.register_forward_hook(lambda *_: runs.append(1))
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    hook.remove()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, len(runs)


def test_gradient_checkpointing_recomputes_blocks_and_keeps_the_gradients(tiny):
    model, ids = tiny(), tokens(2, 16)
    expected, runs = block_runs_of_one_step(model, ids)
    assert runs == 1
    model.gradient_checkpointing_enable()
    gradients, runs = block_runs_of_one_step(model, ids)
    assert runs == 2
    assert_close(gradients, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_vocabulary_can_grow(tiny, tied):
    model, ids = tiny(tie_word_embeddings=tied), tokens(2, 8)
    before = model(ids).logits
    model.resize_token_embeddings(71)
    after = model(ids).logits
    assert (model.config.vocab_size, after.shape) == (71, (2, 8, 71))
    assert_close(after[..., :64], before, atol=1e-6)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied


@pytest.mark.parametrize("more", [{}, {"use_cache": False}, {"attention_mask": torch.ones(2, 8).long()}], ids=list)
def test_causal_attention_without_padding_uses_no_mask(tiny, more):
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        tiny()(tokens(2, 8), **more)
    assert [(call.kwargs["attn_mask"], call.kwargs["is_causal"]) for call in attention.mock_calls] == [(None, True)] * 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_training_step_with_gradient_checkpointing_gives_the_same_gradients(tiny):
    model, ids = tiny().train(), tokens(2, 8)
    expected, _ = block_runs_of_one_step(model, ids)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


@torch.no_grad()
def test_an_exported_model_accepts_any_batch_size(tiny):
    model, ids = tiny(), tokens(5, 8, seed=2)
    inputs = {"input_ids": tokens(2, 8), "use_cache": False}
    shapes = {"input_ids": {0: torch.export.Dim("batch")}, "use_cache": None}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    assert_close(exported(input_ids=ids, use_cache=False).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_model_loaded_in_half_precision_computes_in_half_precision(tiny, dtype, tmp_path):
    model, ids = tiny(), tokens(2, 16)
    model.save_pretrained(tmp_path)
    half = GPT2ScratchForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    assert not [*half.buffers()]  # angles of rotary positions, rounded to half precision
    logits = half(ids).logits
    assert logits.dtype == dtype
    assert_close(logits.float(), model(ids).logits, atol=0.1)


@torch.no_grad()
def test_a_device_map_may_place_a_block_on_disk(tiny, tmp_path):
    model, ids = tiny(), tokens(2, 8)
    model.save_pretrained(tmp_path / "model")
    parts = [name for name, _ in model.transformer.named_children() if name != "h"]
    device_map = {f"transformer.{name}": "cpu" for name in [*parts, "h.0"]}
    settings = {"device_map": device_map | {"transformer.h.1": "disk", "lm_head": "cpu"}}
    placed = GPT2ScratchForCausalLM.from_pretrained(tmp_path / "model", **settings, offload_folder=tmp_path / "disk")
    assert {parameter.device.type for parameter in placed.transformer.h[1].parameters()} == {"meta"}
    assert torch.equal(placed(ids).logits, model(ids).logits)
    assert torch.equal(greedy(placed, ids), greedy(model, ids))


@torch.no_grad()
def test_a_registered_attention_function_receives_the_layer_and_every_keyword(tiny):
    calls = []

    def watched(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.layer_idx, module.is_causal, tuple(query.shape), kwargs))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register("watched", watched)
    model, ids = tiny(), tokens(2, 8)
    expected = model(ids).logits
    model.set_attn_implementation("watched")
    assert torch.equal(model(ids, extra_of_a_server="here").logits, expected)
    shape = (2, 2, 8, 8)  # (B, nh, T, hs)
    assert [call[:3] for call in calls] == [(0, True, shape), (1, True, shape)]
    scale = pytest.approx(model.config.attention_scale or 1 / math.sqrt(8))
    for *_, kwargs in calls:
        assert (kwargs["extra_of_a_server"], kwargs["scaling"], kwargs["dropout"]) == ("here", scale, 0.0)
        assert kwargs["position_ids"] is None  # FlashAttention would search given ones for packed documents
    positions = torch.arange(8).expand(2, 8)
    model(ids, position_ids=positions)
    assert calls[-1][-1]["position_ids"] is positions


@torch.no_grad()
def test_eager_attention_computes_the_softmax_in_float32(tiny):
    model = tiny("eager").to(torch.bfloat16)
    with patch.object(F, "softmax", wraps=F.softmax) as softmax:
        output = model(tokens(1, 8), output_attentions=True)
    assert [call.kwargs["dtype"] for call in softmax.mock_calls] == [torch.float32] * 2
    assert output.attentions[0].dtype == output.logits.dtype == torch.bfloat16
