"""Tests of generate.py with a small real run, and of texts beyond the context with a model of eight letters."""

import io
import json
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_encode import of_pieces
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import generate
from conftest import assert_equal, assert_user_error, checkpoint_of
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from modeling_gpt2scratch.loading import ModelError, arrange_weights
from modeling_gpt2scratch.prompts import chat_ids, end_tokens, turn_end
from tokenizer.corpus.chat import ChatTemplate
from tokenizer.encoding.vocabulary import character_tokenizer
from training.checkpoints.loading import check_store, find_model, load_any_model
from training.evaluation.sampling import (
    SamplingArguments,
    TextStream,
    continue_texts,
    continue_tokens,
    generation_config,
    sample,
    with_prompts,
)


def written(capsys, model, *options: str, prompt: str = "The", number: int = 24) -> str:
    generate.main([str(model), "--prompt", prompt, "--max_new_tokens", str(number), *options])
    return capsys.readouterr().out


GREEDY = ("--temperature", "0")


def test_a_model_in_the_home_folder_is_found(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    assert find_model(f"~/{run.name}") == str(run / "model")


def test_greedy_text_matches_transformers_also_for_several_continuations(run, capsys):
    stream_text = written(capsys, run, *GREEDY, number=8)
    model, tokenizer = (kind.from_pretrained(run / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    target = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert stream_text == tokenizer.decode(target[0], skip_special_tokens=True) + "\n"
    batch_text = written(capsys, run, *GREEDY, "--num_return_sequences", "33")  # a batch of 32 and a batch of 1
    assert batch_text == written(capsys, run, *GREEDY) * 33


def test_text_and_prompts_may_exceed_the_context(run, capsys):
    assert len(AutoTokenizer.from_pretrained(run / "model").encode(written(capsys, run, *GREEDY, number=60))) > 40
    prompt = "the and of " * 20
    assert written(capsys, run, prompt=prompt, number=4).startswith(prompt)


def test_a_terminal_gets_no_control_characters(monkeypatch, capsys):
    for is_terminal, text in ((False, "a\x1b[2J\n"), (True, "a\ufffd[2J\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        generate.write("a\x1b[2J\n")
        assert capsys.readouterr().out == text


def test_bfloat16_is_used_on_request(run, capsys, monkeypatch):
    dtypes = []
    monkeypatch.setattr(generate, "arrange_weights", lambda model: dtypes.append(model.dtype))
    for options in ([], ["--dtype", "bfloat16"]):
        assert written(capsys, run, *options, number=4).startswith("The")
    assert dtypes == [torch.float32, torch.bfloat16]


def test_generation_settings_of_a_model_neither_warn_nor_apply(run, a_copy, launch, capsys):
    """Models fine-tuned by earlier versions have such settings. Transformers warned of max_length once per window."""
    GenerationConfig(max_length=16, repetition_penalty=9.0, do_sample=True).save_pretrained(a_copy / "model")
    job = launch("generate.py", a_copy / "model", "--prompt", "The", "--max_new_tokens", "40", *GREEDY)
    assert (job.stdout, job.stderr) == (written(capsys, run, *GREEDY, number=40), "")


def test_models_of_transformers_generate_text(run, tmp_path, capsys):
    """The config of GPT-2 has no padding token, and Bloom has no limit of positions."""
    AutoTokenizer.from_pretrained(run / "model").save_pretrained(tmp_path)
    config = GPT2Config(vocab_size=300, n_positions=16, n_embd=16, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for number in (1, 3):
        assert written(capsys, tmp_path, "--num_return_sequences", str(number), number=40).count("The") >= number
    BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    assert written(capsys, tmp_path, number=40).startswith("The")


def test_a_seed_reproduces_the_text_after_other_random_draws(run, capsys):
    first, second = (written(capsys, checkpoint_of(run, 3), "--seed", "5") for _ in range(2))
    assert first == second
    model, tokenizer = load_any_model(run / "model")
    arguments, texts = SamplingArguments(["the"], sample_tokens=12), []
    for _ in range(2):
        torch.rand(3)
        texts.append(sample(model, tokenizer, arguments, seed=1))
    assert texts[0] == texts[1]


def test_wrong_arguments_are_refused(run):
    for arguments, sentence in (
        (["no/such/run"], "neither a local folder nor a Hub id"),
        ([str(run), "--temperature", "-1", "--top_p", "2"], "temperature is -1.0.*\n.*top_p is 2.0"),
        ([str(run), "--chat"], "has no chat template; fine-tune it"),
        ([str(run), "--chat", "--torch_compile"], "torch_compile do not apply to a chat"),
    ):
        assert_user_error(sentence, generate.main, arguments)


def test_a_run_without_a_checkpoint_is_refused(a_copy):
    shutil.rmtree(a_copy / "model")
    generate.main([str(a_copy), "--prompt", "The", "--max_new_tokens", "1"])  # from the newest checkpoint
    shutil.rmtree(a_copy / "checkpoints")
    assert_user_error("holds no model yet", generate.main, [str(a_copy)])


CONTEXT, END = 8, 7


@pytest.fixture
def letters():
    """A model of eight letters, whose last letter ends a text, and its tokenizer."""
    torch.manual_seed(0)
    fields = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=8, eos_token_id=END, pad_token_id=0, **fields)).eval()
    return model, character_tokenizer(["abcdefgh"])


def test_a_compiled_step_gives_the_same_text_beyond_the_context(letters, tmp_path, capsys):
    for part in letters:
        part.save_pretrained(tmp_path)
    torch._dynamo.reset()
    counters.clear()
    options = {"prompt": "a", "number": 12}
    text = written(capsys, tmp_path, *GREEDY, **options)
    assert text == written(capsys, tmp_path, *GREEDY, "--torch_compile", **options)
    assert counters["stats"]["unique_graphs"] == 1  # Transformers would skip compilation silently


@torch.no_grad()
def test_texts_in_a_batch_continue_and_end_independently(letters):
    """Every letter is among the four most likely ones after the letters of its own text that the model saw."""
    model, tokenizer = letters
    torch.manual_seed(1)
    texts = continue_texts(model, tokenizer, "a", 64, 30, generation_config(1.0, top_k=4))
    assert len({len(text) for text in texts}) > 5  # some end early, in one window or another
    assert max(map(len, texts)) == 30
    for text in texts:
        history = [0]
        for id in [*tokenizer.encode(text), END][:30]:
            history = history[-CONTEXT // 2 :] if len(history) == CONTEXT else history
            assert id in model(torch.tensor([history])).logits[0, -1].topk(4).indices
            history.append(id)
        assert END not in tokenizer.encode(text)


@torch.no_grad()
def test_any_of_several_end_tokens_ends_a_text_and_arranging_weights_keeps_them(letters):
    model, tokenizer = letters
    model.generation_config.eos_token_id = [END, 3]  # like a chat model, whose config names only one
    torch.manual_seed(1)
    texts = continue_texts(model, tokenizer, "a", 64, 30, generation_config(1.0, top_k=4))
    assert not {END, 3} & {id for text in texts for id in tokenizer.encode(text)}
    assert max(map(len, texts)) > CONTEXT
    target = {name: weight.clone() for name, weight in model.state_dict().items()}
    arrange_weights(model)
    assert model.lm_head.weight.stride() == (1, 8)
    assert_equal(model.state_dict(), target)


TURNS = "{% for m in messages %}{{ m.role[0] + m.content }}<|pad|>{% endfor %}{{ 'a' if add_generation_prompt }}"


def test_chats_are_encoded_as_for_training_and_old_turns_are_left_out(run):
    tokenizer, system = AutoTokenizer.from_pretrained(run / "model"), {"role": "system", "content": "be"}
    tokenizer.chat_template = TURNS
    for text in ("the of", "a <|pad|><<|endoftext|>>"):
        chat, target = [{"role": role, "content": text} for role in ("user", "assistant", "user")], []
        for part, control in ChatTemplate(TURNS, ("<|pad|>", "<|endoftext|>")).segments(chat):
            target += tokenizer.encode(part, split_special_tokens=True) + [1] * (control is not None)
        target += tokenizer.encode("a")
        assert chat_ids(tokenizer, chat, len(target)) == (target, 0)
        assert not tokenizer._tokenizer.encode_special_tokens  # another thread may use the tokenizer
        final_ids, _ = chat_ids(tokenizer, [system, chat[2]], 99)
        assert chat_ids(tokenizer, [system, *chat], len(target)) == (final_ids, 2)
    reasons = {"{{ x.y }}": "'x' is undefined", "": "it renders an empty text"}
    for tokenizer.chat_template, reason in reasons.items():
        with pytest.raises(ModelError, match=f"does not render this chat: {reason}"):
            chat_ids(tokenizer, chat, 99)
    tokenizer.chat_template = "{% for message in messages %}<|endoftext|>{{ message.content }}{% endfor %}"
    assert turn_end(tokenizer) is None  # it begins the turn


def test_a_token_that_ends_a_turn_is_neither_shown_nor_read_from_a_message(a_copy, store):
    tokenizer = AutoTokenizer.from_pretrained(a_copy / "model", chat_template=TURNS, pad_token=None)
    tokenizer.save_pretrained(a_copy / "model")
    content = json.loads((path := a_copy / "model" / "tokenizer.json").read_text())
    content["added_tokens"][1]["special"] = False
    path.write_text(json.dumps(content))
    model, tokenizer = load_any_model(a_copy / "model")
    assert end_tokens(model) == [0, 1]
    assert tokenizer.decode([1], skip_special_tokens=True) == ""
    check_store(a_copy, tokenizer, store)  # it is still the store's tokenizer
    assert chat_ids(tokenizer, [{"role": "user", "content": "<|pad|>"}], 16)[0].count(1) == 1


def test_a_chat_keeps_its_history_and_survives_a_full_context_and_ctrl_c(a_copy, monkeypatch, capsys):
    tokenizer, history = AutoTokenizer.from_pretrained(a_copy / "model"), []
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(a_copy / "model")

    def answer(*parts):
        if history[-1][-1]["content"] == "d":
            parts[-1].ids = [50]
            raise KeyboardInterrupt
        return continue_tokens(*parts)

    lines = "b\n/system e\nc\n\n" + "x" * 40 + "\n/reset\nd\nf\n/exit\ng"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    monkeypatch.setattr(generate, "chat_ids", lambda *parts: history.append(parts[1]) or chat_ids(*parts))
    monkeypatch.setattr(generate, "continue_tokens", answer)
    generate.main([str(a_copy), "--chat", "--prompt", "a", *GREEDY])
    model, _ = load_any_model(a_copy / "model")
    ids = torch.tensor([chat_ids(tokenizer, [{"role": "user", "content": "a"}], 12)[0]])
    first = tokenizer.decode(model.generate(ids, do_sample=False, max_length=16)[0, ids.shape[1] :])
    assert end_tokens(model) == [0, 1]
    chats = [[message["content"] for message in chat] for chat in history[1:]]
    assert chats[:3] == [["a"], ["a", first, "b"], ["e", "c"]]
    assert chats[4:] == [["e", "d"], ["e", "d", tokenizer.decode([50]), "f"]]
    out, err = capsys.readouterr()
    assert out.startswith(f"{first}\n")
    ends = {"context of 16 tokens is full.": 4, "oldest 2 messages are left out.": 2}
    ends |= {"but at most 12 fit; write a shorter text.": 1}
    assert {end: err.count(end) for end in ends} == ends


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_ends_the_chat(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Mock(side_effect=[KeyboardInterrupt, "a", *[KeyboardInterrupt] * 2]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, reconfigure=lambda **_: None))
    lines = generate.lines("first")
    assert [next(lines), next(lines)] == ["first", "a"]
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().out.count("Ctrl-C again or Ctrl-D ends the chat.") == 2


def test_a_stream_writes_all_complete_characters_at_once():
    """A token may complete a character and begin the next one."""
    texts, written = {1: "a", 2: "a\u0434\ufffd", 3: "a\u0434\u0435"}, []
    stream = TextStream(SimpleNamespace(decode=lambda ids, **_: texts[len(ids)]), written.append)
    for ids in ([0], [7], [8], [9]):
        stream.put(torch.tensor(ids))
    assert written == ["a", "\u0434", "\u0435"]


def test_characters_of_several_tokens_are_written_once_and_end_a_prompt_whole():
    """The decoder of Llama 2 takes complete characters back while the next one is incomplete."""
    tokenizer, written = PreTrainedTokenizerFast(tokenizer_object=of_pieces()), []
    ids = tokenizer("the 日本語🙂日本語")["input_ids"]
    stream = TextStream(tokenizer, written.append)
    for id in (0, *ids):
        stream.put(torch.tensor([id]))
    assert "".join(written) == tokenizer.decode(ids) == "the 日本語🙂日本語"
    store = SimpleNamespace(memory_map=lambda split: np.array([*ids, 0]), offsets=lambda split: [0, len(ids) + 1])
    assert with_prompts(SamplingArguments(), store, tokenizer).sample_prompts == ["the 日本語🙂"]
