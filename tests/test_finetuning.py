"""Tests of the recipes of examples/ with small real runs. Their output is a folder like that of any model."""

import io
import json
import re
import shutil
import signal
import sys
from collections import Counter
from contextlib import redirect_stdout

import pytest

pytest.importorskip("peft", reason="fine-tuning needs peft")
pytest.importorskip("trl", reason="fine-tuning on chats needs trl")

import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from test_corpus import write_records
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import push_to_hub
from conftest import MODERN_RUN, TWO_PROCESSES, assert_user_error, lines, prose, tokenized, trained, wait_until
from examples import finetune_chat, finetune_preferences, finetune_text, python_chats
from examples.tuning.records import UselessError, splits
from examples.tuning.settings import Tuning
from examples.tuning.template import PLAIN_TURNS, without_control_tokens
from hub_server import File, Repository, serving
from modeling_gpt2scratch.conversion_gpt2scratch import convert
from publishing.gguf_file import write_gguf
from tokenizer.encoding.vocabulary import character_tokenizer
from training.checkpoints.loading import load_own_model
from training.guard.lock import locked

ANSWERS = {"Who is he?": "He is not at it.", "Are they on it?": "They are.", "Was it his?": "It was not his."}
BIGGER = {"n_embd": 64, "n_positions": 48, "tokens_per_step": 192, "tie_word_embeddings": True, "max_steps": 150}
QUICK = {"eval_steps": 150, "save_steps": 150, "logging_steps": 60, "sample_tokens": 0, "warmup_steps": 5}
ORIGINAL = "original, bits per byte"
SMALL_STEPS = ["--per_device_train_batch_size", "4"]


def chat(question: str, answer: str) -> dict[str, list]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def chats_file(path, each=30):
    """Write chats with equal prompts, which are all held out, or none of them."""
    chats = [chat(f"{i % 10} {asked}", answer) for i in range(each) for asked, answer in ANSWERS.items()]
    return write_records(path, chats)


def pair(question="Who is he?", chosen="They are.", rejected="He is not at it.") -> dict[str, str]:
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def tune(recipe, model, data, output, *flags: str) -> None:
    recipe.main([str(model), "--data", str(data), "--output_dir", str(output), *flags])


def assert_refused(sentence: str, *arguments) -> None:
    assert_user_error(sentence, tune, *arguments)


def table(output: str) -> dict[str, tuple[float, float]]:
    """Return the measurements before and after fine-tuning, by name."""
    rows = re.findall(r"^\| ([a-z, ]+) \| ([\d.]+) \| ([\d.]+) \|", output, re.MULTILINE)
    return {name: (float(before), float(after)) for name, before, after in rows}


def answers_to_a_user(folder) -> tuple[dict[str, str], list[int]]:
    """Return the answers of a pipeline of Transformers, and the last token of each."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not {*loading["missing_keys"], *loading["unexpected_keys"]}
    write, answers, ends = pipeline("text-generation", model, tokenizer=str(folder)), {}, []
    for question in ANSWERS:
        asked = [{"role": "user", "content": f"7 {question}"}]
        answers[question] = write(asked, do_sample=False)[0]["generated_text"][-1]["content"]
        ends.append(write(asked, do_sample=False, return_tensors=True)[0]["generated_token_ids"][-1])
    return answers, ends


@pytest.fixture(scope="module")
def run(tmp_path_factory, store):
    return trained(store, tmp_path_factory.mktemp("runs") / "tiny", **BIGGER, **QUICK)


@pytest.fixture(scope="module")
def tuned(run, tmp_path_factory):
    """The folder of a fine-tuned model, and the output of its fine-tuning."""
    folder = tmp_path_factory.mktemp("tuned")
    data = chats_file(folder / "chats.jsonl", each=150)
    with redirect_stdout(io.StringIO()) as output:
        tune(finetune_chat, run, data, folder / "model", "--num_train_epochs", "6")
    return folder / "model", output.getvalue()


def test_chats_are_learned_and_forgetting_and_settings_are_reported(tuned):
    folder, output = tuned
    measured, card = table(output), (folder / "README.md").read_text()
    assert list(measured) == ["loss", "exact match", ORIGINAL]
    assert measured["loss"][1] < measured["loss"][0] - 1.5
    assert measured[ORIGINAL][1] < measured[ORIGINAL][0] + 0.2
    assert table(card) == measured
    assert "Peak learning rate 0.0074 (width 64); 50% of the examples are replayed original text." in output
    for words in (
        "| learning rate, epochs, seed | 0.0074, 6, 1337 |",
        "fine-tuned on 405 chats of chats.jsonl: 122,368\nparameters",
        "| replayed original text | 405 windows of 48 tokens, 50% of examples |",
        "\n45 chats were held out.\n\n- loss: nats per token of 45 held-out chats\n- exact match: share of",
    ):
        assert words in card
    commands = (f"generate.py {folder} --chat", f"push_to_hub.py {folder} --repo_id YOUR_NAME/model")
    assert output.split("Next:\n")[1].splitlines() == [f"  python {command}" for command in commands]


def test_the_chats_about_python_name_each_function_once_and_replace_no_file(tmp_path):
    python_chats.main([str(tmp_path)])
    chats, pairs = (lines(tmp_path / f"{name}.jsonl") for name in ("chats", "pairs"))
    assert len(chats) == 2_001
    assert 1_500 < len(pairs) <= 2_000  # by the version of Python
    turns = [turn for chat in chats for turn in chat["messages"]] + [pair["prompt"][-1] for pair in pairs]
    questions = [turn["content"] for turn in turns if turn["role"] == "user"]
    ends = [template.split("{}") for several in python_chats.QUESTIONS.values() for template in several]
    found = [[q[len(a) : len(q) - len(b)] for a, b in ends if q.startswith(a) and q.endswith(b)] for q in questions]
    assert len({name for [name] in found}) == len(questions) == 2_667 + len(pairs)
    for pair in pairs:
        asks_module = pair["prompt"][-1]["content"].startswith(("Which module", "Where"))
        assert (pair["chosen"][0]["content"] == "I do not know.") == asks_module
    assert_user_error("This would replace", python_chats.main, [str(tmp_path)])


def test_the_published_card_describes_the_published_model(tuned, tmp_path, launch, monkeypatch):
    monkeypatch.setattr(push_to_hub, "verify", lambda published, expected: None)  # starts a process
    metadata = "---\nbase_model: me/base\nlicense: mit\ntags:\n- gpt2scratch\n- fine-tuned\n---\n"
    model = shutil.copytree(tuned[0], tmp_path / "model", ignore=shutil.ignore_patterns("adapter"))
    _, _, text = (model / "README.md").read_text().split("---\n", 2)
    (model / "README.md").write_text(metadata + text)
    push_to_hub.main([str(model), "--repo_id", "me/talks", "--dry_run"])
    card = ModelCard.load(tmp_path / "model-hub" / "README.md")
    kept = {"base_model": "me/base", "license": "mit", "tags": ["gpt2scratch", "fine-tuned"]}
    assert card.data.to_dict() == kept | {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "## License\n\nmit\n" in card.text
    blocks = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    named = [name for block in blocks for name in re.findall(r'(?:pretrained\(|model=)"(.*?)"', block)]
    assert named == ["me/talks"] * 5
    assert all('[{"role": "user", "content": "Hello"}]' in block for block in blocks[:2])
    script = "import torch\ntorch.manual_seed(0)\n" + "\n".join(blocks[:2])
    script = script.replace('"me/talks"', repr(str(tmp_path / "model-hub")))
    done = launch("-c", script, folder=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert 0 < len(done.stdout.strip()) < 80
    assert "User" not in done.stdout
    (model / "README.md").write_text("---\ntags: [\n---\n")
    sentence = r"The metadata of .*README\.md is not YAML: "
    assert_user_error(sentence, push_to_hub.main, [str(model), "--repo_id", "me/talks", "--dry_run"])


def test_a_tuned_model_answers_and_stops_at_the_end_of_the_turn(tuned):
    answers, ends = answers_to_a_user(tuned[0])
    assert ends == [0, 0, 0]  # <|endoftext|>, before the context is full
    assert all(0 < len(answer) < 40 and "<|" not in answer for answer in answers.values())


def test_gguf_file_and_native_twin_have_the_template(tuned, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is an extra")
    model, tokenizer = load_own_model(tuned[0]), AutoTokenizer.from_pretrained(tuned[0])
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "f16", "Tiny")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    convert(tuned[0], tmp_path / "native", to="native")
    template = AutoTokenizer.from_pretrained(tmp_path / "native").chat_template
    assert fields["tokenizer.chat_template"].contents() == template == PLAIN_TURNS
    assert json.loads((tmp_path / "native" / "generation_config.json").read_text())["eos_token_id"] == [0]


@pytest.mark.parametrize("rank", [16, 0], ids=["lora", "all"])
def test_preferences_are_learned_from_a_chat_model(tuned, tmp_path, capsys, rank):
    pairs = [pair(f"{i} Are they on it?", "He is not at it.", "They are.") for i in range(80)]
    data = write_records(tmp_path / "pairs.jsonl", [*pairs, pair(rejected="They are.")])
    flags = ("--lora_rank", str(rank), "--num_train_epochs", "6", "--learning_rate", "0.003")
    tune(finetune_preferences, tuned[0], data, tmp_path / "model", *flags)
    output, card = capsys.readouterr().out, (tmp_path / "model" / "README.md").read_text()
    assert f"Left out 1 record of {data}: each has equal answers, chosen and rejected." in output
    measured = table(output)
    assert list(measured) == ["preference accuracy", "exact match", ORIGINAL]  # the chat model's record names its text
    before, after = measured["preference accuracy"]
    assert before < 0.6 < 0.8 < after
    assert table(card) == measured
    assert "tiny, fine-tuned on 405 chats of chats.jsonl, trained with DPO (beta 0.1, sft_weight 1) on 72 pairs" in card
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tuned[0] / name).read_text() == (tmp_path / "model" / name).read_text()


def test_a_pair_is_text_or_messages_and_its_prompt_may_be_implicit():
    user, good, bad = ({"role": role, "content": role[0]} for role in ("user", "assistant", "tool"))
    shared = {"chosen": [{"from": "human", "value": "u"}, good], "rejected": [user, bad]}
    for record in (pair("u", "a", [bad]), pair([user], "a", [bad]), {"prompt": "u"} | shared, shared):
        assert finetune_preferences.pair_of(record) == pair([user], [good], [bad])
    with pytest.raises(ValueError, match="neither text nor a list"):
        finetune_preferences.pair_of({"prompt": "u", "chosen": ""})
    for empty in ("", " ", [good | {"content": ""}]):
        with pytest.raises(UselessError, match="an empty answer, chosen"):
            finetune_preferences.pair_of(pair("u", empty, [bad]))
    with pytest.raises(ValueError, match="no common beginning"):
        finetune_preferences.pair_of(pair("u", "a", [user, bad]))  # only one of them repeats the prompt
    text = {"chosen": "u: a", "rejected": "u: b"}
    assert finetune_preferences.pair_of(text) == pair("u:", " a", " b")
    with pytest.raises(ValueError, match="has a system prompt, but its answers are text without messages"):
        finetune_preferences.pair_of(text | {"system": "s"})
    messages = {name: [{"role": "assistant", "content": f" {name}"}] for name in ("chosen", "rejected")}
    system = {"role": "system", "content": "s"}
    asked = {"role": "user", "content": "u v"}
    repeated = {"system": "s"} | pair("u v", "u v chosen", "u v rejected")
    assert finetune_preferences.pair_of(repeated) == {"prompt": [system, asked], **messages}
    assert finetune_preferences.pair_of({"system": "s"} | shared) == pair([system, user], [good], [bad])
    earlier = [user, {"role": "assistant", "content": "b"}]
    for prompt in ([system], earlier):  # the answers continue it
        assert finetune_preferences.pair_of({"prompt": prompt} | shared) == pair([*prompt, user], [good], [bad])
    [begun] = finetune_preferences.pair_of(pair("I", "I am", "I'm"))["chosen"]
    assert begun["content"] == "I am"  # the answer begins like the prompt, and does not repeat it


def test_chats_of_other_formats_are_read():
    asked, answer = {"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}
    alpaca = {"instruction": "a", "input": "b", "output": "c"}
    shared = {"messages": None, "conversations": [{"from": "human", "value": "a\n\nb"}, {"from": "gpt", "value": "c"}]}
    texts, turns = {"prompt": "a\n\nb", "completion": "c"}, {"prompt": [asked], "completion": [answer]}
    for record in (alpaca, texts, turns, shared):
        assert finetune_chat.chat_of(record) == {"messages": [asked, answer]}
        system = {"role": "system", "content": "s"}
        assert finetune_chat.chat_of(record | {"system": "s"}) == {"messages": [system, asked, answer]}
    repeated = [{"from": "system", "value": "s"}, *shared["conversations"]]
    assert finetune_chat.chat_of({"system": "s", "conversations": repeated}) == {"messages": [system, asked, answer]}
    with pytest.raises(ValueError, match="an empty answer"):  # of a call whose text is empty
        finetune_chat.chat_of({"messages": [asked, answer | {"content": ""}, {"role": "tool", "content": "1"}, answer]})
    for more, sentence in ({"output": " "}, "an empty answer"), ({"history": [["q", "a"]]}, "turns in history"):
        with pytest.raises(ValueError, match=sentence):
            finetune_chat.chat_of(alpaca | more)


def test_all_examples_of_a_prompt_are_held_out_or_none():
    examples = [{"prompt": i % 20, "number": i} for i in range(60)]
    tuning = Tuning(data="x.jsonl", seed=1)
    trained, held_out = splits(examples, [example["prompt"] for example in examples], tuning, "chats")
    assert Tuning("runs/x", "data/**/a*.jsonl").folder.as_posix() == "runs/x-data"
    assert sorted([*trained["number"], *held_out["number"]]) == [*range(60)]
    assert sorted(Counter(held_out["prompt"]).values()) == [3, 3]
    assert not {*held_out["prompt"]} & {*trained["prompt"]}


def test_a_named_data_set_is_read_up_to_max_documents(run, tmp_path, launch):
    config = b"---\nconfigs:\n- {config_name: all, data_files: [{split: train, path: all.jsonl}]}\n---\n"
    chats = b'{"messages": []}\n' + chats_file(tmp_path / "chats.jsonl").read_bytes()
    files = {"README.md": File(config, False), "all.jsonl": File(chats, False)}
    with serving() as (hub, address):
        hub.repositories["datasets/HuggingFaceTB/smoltalk"] = Repository(False, {"1" * 40: files}, {"main": "1" * 40})
        online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        flags = ("--data", "smoltalk", "--max_documents", "41", "--output_dir", tmp_path / "out")
        done = launch("-m", "examples.finetune_chat", run, *flags, **online)
    assert "Left out 1 record of smoltalk: each has a message without a role or" in done.stdout, done.stderr
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert f"tiny, fine-tuned on 35 chats of HuggingFaceTB/smoltalk:all@{'1' * 40}: " in card.text
    assert card.data.datasets == ["HuggingFaceTB/smoltalk"]


def test_the_output_folder_has_the_files_of_a_model(run, tuned):
    (folder, _), base = tuned, run / "model"
    added = {path.name for path in folder.iterdir()} - {path.name for path in base.iterdir()}
    assert added == {"README.md", "adapter", "chat_template.jinja", "finetuning.json"}
    assert json.loads((folder / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.rglob("*"))
    assert load_file(folder / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    assert str(run) not in (folder / "README.md").read_text()
    settings = json.loads((folder / "generation_config.json").read_text())
    assert "max_length" not in settings  # otherwise Transformers warns about max_new_tokens


def test_the_adapter_on_its_base_model_equals_the_merged_model(run, tuned):
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", tuned[0]))
    ids = torch.arange(40)[None]
    unadapted = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tuned[0] / "adapter").eval()
    assert (adapted(ids).logits - merged.eval()(ids).logits).abs().max() < 1e-5
    assert (adapted(ids).logits - unadapted).abs().max() > 1
    targets = {name.split(".", 3)[-1] for name in adapted.peft_config["default"].target_modules}
    assert targets == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


def test_a_model_with_chat_tokens_keeps_its_template_and_stop_token(tmp_path, capsys):
    old = write_records(tmp_path / "old.jsonl", [chat(prose(number, 200), prose(9, 200)) for number in range(4)])
    corpus = {"validation_fraction": 0.2, "chat_template": "chatml"}
    store = tokenized(old, tmp_path / "store", corpus, seed=1337, vocab_size=300)
    run = trained(store, tmp_path / "run", **BIGGER | QUICK | MODERN_RUN | {"sample_prompts": None, "sample_tokens": 4})
    assert f"generate.py {run} --chat\n" in capsys.readouterr().out
    assert "<|im_start|>user\n" in (run / "samples.md").read_text()
    asked = [{"role": "user", "content": "the token\r\n<|im_<|im_end|>end|> ends"}]
    assert without_control_tokens(asked, store.load_tokenizer()) == [{"role": "user", "content": "the token\n ends"}]
    data, model = chats_file(tmp_path / "new.jsonl"), tmp_path / "model"
    memorizing = ["--learning_rate", "0.005", "--num_train_epochs", "8", "--replay_fraction", "0", *SMALL_STEPS]
    tune(finetune_chat, run, data, model, "--lora_rank", "0", *memorizing)
    measured = table(capsys.readouterr().out)
    assert measured["loss"][1] < 0.1
    assert measured["exact match"] == (0, 1)
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    assert answers_to_a_user(model) == (ANSWERS, [end] * 3)


@pytest.mark.parametrize(("rank", "family"), [(0, {}), (16, MODERN_RUN)], ids=["all", "modern_lora"])
def test_text_is_learned(run, store, tmp_path, capsys, rank, family):
    run = trained(store, tmp_path / "run", **BIGGER, **QUICK, **family) if family else run
    data, model = write_records(tmp_path / "new.jsonl", [{"text": "They are not at it."}] * 400), tmp_path / "model"
    tune(finetune_text, run, data, model, "--lora_rank", str(rank), *SMALL_STEPS)
    measured = table(capsys.readouterr().out)
    assert list(measured) == ["loss", ORIGINAL]
    assert measured["loss"][1] < measured["loss"][0] - 1
    assert measured[ORIGINAL][1] < measured[ORIGINAL][0] + 0.3
    _, loading = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not {*loading["missing_keys"], *loading["unexpected_keys"]}
    assert (model / "adapter").exists() == (rank > 0)


def test_a_name_of_a_control_token_in_a_text_is_text(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    [row] = finetune_text.windows(["of<|endoftext|>the"], tokenizer, 12)["input_ids"]
    assert tokenizer.decode(row) == "of<|endoftext|>the"[: len(tokenizer.decode(row))]
    assert tokenizer.eos_token_id not in row


def test_a_recipe_killed_while_it_writes_starts_over(run, tmp_path, spawn):
    (data := tmp_path / "new.txt").write_text("They are not at it.\n" * 300)
    process = spawn("-m", "examples.finetune_text", run, "--data", data, "--output_dir", tmp_path / "out")
    wait_until((tmp_path / ".out.unfinished" / "config.json").exists)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out" / "config.json").exists()
    tune(finetune_text, run, data, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / ".out.unfinished").exists()


def test_two_processes_train_like_one_with_twice_the_batch_here_without_replay(run, tmp_path, launch, capsys):
    model = shutil.copytree(run / "model", tmp_path / "model")  # without its run
    (tmp_path / "new.txt").write_text("They are not at it.\n" * 300)
    flags = ("--data", tmp_path / "*.txt", "--output_dir", tmp_path / "two", "--per_device_train_batch_size", "2")
    pair = launch(*TWO_PROCESSES, "-m", "examples.finetune_text", model, *flags, "--lora_rank", "0")
    assert pair.stdout.count("no example is replayed original text") == 1, pair.stderr
    assert pair.stdout.count("For another model, name a token store with --original_data.") == 1
    tune(finetune_text, model, tmp_path / "*.txt", tmp_path / "one", "--lora_rank", "0", *SMALL_STEPS)
    assert table(pair.stdout) == {"loss": pytest.approx(table(capsys.readouterr().out)["loss"], abs=2e-4)}


def test_chats_longer_than_the_context_are_cut_or_refused(run, tmp_path, capsys):
    (folder := tmp_path / "folder").mkdir()
    chats_file(folder / "a.jsonl", each=2)
    data = write_records(folder / "b.jsonl", [chat("Who?", prose(1, 100))] * 6)
    (folder / "README.md").write_text("not a chat")
    tune(finetune_chat, run, folder, tmp_path / "out")
    output = capsys.readouterr().out
    assert "5 of 11 chats are shorter than the context of 48 tokens; 6 are cut to it, and 0, whose answers" in output
    write_records(data, [chat(prose(i, 100), "They are.") for i in range(4)])
    sentence = "assistant's turns of all chats start after the context of 48"
    assert_refused(sentence, finetune_chat, run, data, tmp_path / "other")


@pytest.mark.parametrize(
    ("recipe", "line", "expected"),
    [
        (finetune_chat, '{"text": "Hi"}', "has no chat, but only text; each record must be"),
        (finetune_chat, '{"chosen": "a", "rejected": "b"}', "has no chat, .*; examples.finetune_preferences reads"),
        (finetune_chat, '{"messages": [{"role": "user", "content": "Hi"}]}', "has no answer .*, but only user"),
        (finetune_chat, '{"messages": ', "is not a JSON object"),
        (finetune_chat, r'{"messages": "\ud800"}', "is not UTF-8 text"),
        (finetune_preferences, '{"prompt": "a", "chosen": "b", "rejected": ""}', "has no rejected; each record needs"),
        (finetune_preferences, '{"prompt": "a"}', "has no chosen and no rejected"),
        (finetune_preferences, '{"prompt": "a", "chosen": 3, "rejected": "b"}', "has a part that is neither text nor"),
        (finetune_preferences, '{"chosen": "a", "rejected": "b"}', "has no prompt, and its answers have no common"),
    ],
)
def test_a_wrong_line_is_named(run, tmp_path, recipe, line, expected):
    data = tmp_path / "lines.jsonl"
    data.write_text(f"{json.dumps(chat('0 Who is he?', 'He is not at it.') | pair())}\n{line}\n")
    assert_refused(f"lines.jsonl, line 2 {expected}", recipe, run, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_options_and_input_are_refused(run, tmp_path):
    data, new = chats_file(tmp_path / "chats.jsonl"), tmp_path / "out"
    wrong = ("--lora_rank", "-1", "--replay_fraction", "1")
    assert_refused("lora_rank is -1.*\n.*is 1.0", finetune_chat, run, data, new, *wrong)
    assert_refused("nothing.jsonl matches no local file", finetune_chat, run, "nothing.jsonl", new)
    assert_refused("test_finetuning.py has no records", finetune_chat, run, __file__, new)
    assert_refused("already exists; choose", finetune_chat, run, data, run)
    assert_refused("cannot be replaced by the finished model; name a new folder", finetune_chat, run, data, ".")
    broken = shutil.copytree(run / "model", tmp_path / "broken")
    new.mkdir()  # a refused or stopped command leaves an empty folder
    (broken / "chat_template.jinja").write_text("{{ raise_exception('No system role') }}")
    assert_refused(r"does not render a chat \(No system role\); correct", finetune_chat, broken, data, new)
    assert_refused("holds no model", finetune_chat, tmp_path, data, new)
    assert_refused("line 1 has no text", finetune_text, run, data, new)
    with locked(new):
        assert_refused("out is in use by process", finetune_chat, run, data, new)
    (short := tmp_path / "short.txt").write_text("They are.")
    assert_refused("At least 2 windows of 48 tokens are needed.*provides 0", finetune_text, run, short, new)
    rate = ("--learning_rate", "100")
    assert_refused("not finite after training at a peak rate of 100", finetune_chat, run, data, new, *rate)
    assert_user_error("Name a model and a file", finetune_chat.main, [])
    letters = character_tokenizer(["abc"])
    assert_user_error("The tokenizer of 3 tokens has no end-of-text", finetune_chat.give_template, letters)
    assert_user_error("contains 'é', which is not among this model's 3", finetune_text.windows, ["abcé"], letters, 2)


def test_a_missing_package_is_reported_with_the_install_command(run, tmp_path, monkeypatch):
    data = chats_file(tmp_path / "chats.jsonl")
    for missing, recipe in (("trl", finetune_chat), ("trl", finetune_preferences), ("peft", finetune_text)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)  # as if it were not installed
            sentence = rf"needs {missing}: run pip install -e '\.\[finetuning\]'"
            assert_refused(sentence, recipe, run, data, tmp_path / "out")
