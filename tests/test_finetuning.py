"""The recipes of examples/ on real, small runs: what they leave is a model like any other."""

import json
import re
import shlex
import shutil
import sys

import pytest

pytest.importorskip("peft", reason="fine-tuning needs peft")
pytest.importorskip("trl", reason="fine-tuning on chats needs trl")

import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import push_to_hub
from conftest import prose, tokenized, trained
from errors import UserError
from examples import finetune_chat, finetune_text
from examples.tuning import default_rate
from tokenizer.vocabulary import character_tokenizer

ANSWERS = {"Who is he?": "He is not at it.", "Are they on it?": "They are.", "Was it his?": "It was not his."}
BIGGER = {"n_embd": 64, "n_positions": 48, "tokens_per_step": 192, "tie_word_embeddings": True, "max_steps": 150}
QUICK = {"eval_steps": 150, "save_steps": 150, "logging_steps": 60, "sample_tokens": 0, "warmup_steps": 5}
SMALL_STEPS = ["--per_device_train_batch_size", "4"]


# What a stranger would write, in an empty folder. Prints JSON as its last line.
STRANGER = """
import json, sys
from transformers import AutoModelForCausalLM, pipeline

_, loading = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, output_loading_info=True)
chat = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
answers, ends = {}, []
for question in json.loads(sys.argv[2]):
    asked = [{"role": "user", "content": question}]
    answers[question] = chat(asked, do_sample=False)[0]["generated_text"][-1]["content"]
    ends.append(chat(asked, do_sample=False, return_tensors=True)[0]["generated_token_ids"][-1])
print(json.dumps({"wrong": [*loading["missing_keys"], *loading["unexpected_keys"]], "answers": answers, "ends": ends}))
"""


def chats_file(path, each=30):
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in list(ANSWERS.items()) * each
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def table(output: str) -> dict[str, tuple[float, float]]:
    """Losses before and after, by what was held out."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", output, re.MULTILINE)
    return {name: (float(before), float(after)) for name, before, after in rows}


def asked_by_a_stranger(launch, model, folder) -> dict:
    own = {"PYTHONPATH": "", "HF_MODULES_CACHE": str(folder / "modules")}
    result = launch("-c", STRANGER, model, json.dumps(list(ANSWERS)), folder=folder, **own)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory, store):
    return trained(store, tmp_path_factory.mktemp("runs") / "tiny", **BIGGER, **QUICK)


@pytest.fixture(scope="module")
def tuned(run, launch, tmp_path_factory):
    """A folder, and what was printed while it came to be."""
    folder = tmp_path_factory.mktemp("tuned")
    data = chats_file(folder / "chats.jsonl", each=150)
    result = launch("-m", "examples.finetune_chat", run, "--data", data, "--output_dir", folder / "model")
    assert result.returncode == 0, result.stderr
    return folder / "model", result.stdout


def test_chats_are_learned_and_what_is_forgotten_and_what_was_left_out_are_said(tuned):
    losses = table(tuned[1])
    assert list(losses) == ["chats", "original"]
    assert losses["chats"][1] < losses["chats"][0] - 1.5
    assert losses["original"][1] < losses["original"][0] + 0.2
    assert table((tuned[0] / "README.md").read_text()) == losses
    said = "Peak learning rate 0.0074 (width 64); 50% of the examples are replayed original text."
    assert said in tuned[1]
    card = (tuned[0] / "README.md").read_text()
    assert "| learning rate, epochs, seed | 0.0074, 3, 1337 |" in card
    assert "fine-tuned on 405 chats of chats.jsonl: 122,368\nparameters" in card
    assert "| replayed original text | 405 windows of 48 tokens, 50% of all examples |" in card
    assert "Loss in nats per token on 45 held-out chats of the same file, and on held-out text" in card
    commands = tuned[1].split("Next:\n")[1]
    assert f"  python push_to_hub.py {tuned[0]} --repo_id YOUR_NAME/model\n" in commands
    [_, prompt] = shlex.split(commands.split("\n  python push")[0])[-2:]
    assert re.fullmatch(r"User:\n(Who is he|Are they on it|Was it his)\?\n\nAssistant:\n", prompt)


def test_the_published_card_is_of_the_published_model(tuned, tmp_path, launch):
    metadata = "---\nbase_model: me/base\nlicense: mit\ntags:\n- gpt2scratch\n- fine-tuned\n---\n"
    model = shutil.copytree(tuned[0], tmp_path / "model", ignore=shutil.ignore_patterns("adapter"))
    _, _, text = (model / "README.md").read_text().split("---\n", 2)
    (model / "README.md").write_text(metadata + text)
    push_to_hub.main([str(model), "--repo_id", "me/talks", "--dry_run"])
    card = ModelCard.load(tmp_path / "model-hub" / "README.md")
    kept = {"base_model": "me/base", "license": "mit", "tags": ["gpt2scratch", "fine-tuned"]}
    assert card.data.to_dict() == kept | {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "## Licence\n\nmit\n" in card.text
    blocks = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    named = [name for block in blocks for name in re.findall(r'(?:pretrained\(|model=)"(.*?)"', block)]
    assert named == ["me/talks"] * 5
    for block in blocks[:2]:
        assert '[{"role": "user", "content": "Hello"}]' in block
        script = block.replace('"me/talks"', repr(str(tmp_path / "model-hub")))
        done = launch("-c", script, folder=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))
        assert 0 < len(done.stdout.strip()) < 40
        assert "User" not in done.stdout
    (model / "README.md").write_text("---\ntags: [\n---\n")
    with pytest.raises(UserError, match=r"The metadata of .*README\.md is not YAML: "):
        push_to_hub.main([str(model), "--repo_id", "me/talks", "--dry_run"])


@pytest.mark.parametrize(("width", "with_lora", "all_weights"), [(192, 3.1e-3, 3.1e-4), (768, 1.1e-3, 1.1e-4)])
def test_the_rate_goes_by_the_width(width, with_lora, all_weights):
    assert (default_rate(width, lora=True), default_rate(width, lora=False)) == (with_lora, all_weights)


def test_it_answers_a_stranger_and_stops_at_the_end_of_the_turn(tuned, tmp_path, launch):
    seen = asked_by_a_stranger(launch, tuned[0], tmp_path)
    assert seen["wrong"] == []
    assert seen["ends"] == [0, 0, 0]  # <|endoftext|>, long before the context is full
    assert all(0 < len(answer) < 40 and "<|" not in answer for answer in seen["answers"].values())


def test_the_folder_is_that_of_a_model(run, tuned):
    names = {path.name for path in tuned[0].iterdir()}
    assert names - {path.name for path in (run / "model").iterdir()} == {"README.md", "adapter", "chat_template.jinja"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (run / "model", tuned[0])]
    assert configs[0] == configs[1]
    keys = [set(safe_open(folder / "model.safetensors", "pt").keys()) for folder in (run / "model", tuned[0])]
    assert keys[0] == keys[1]
    assert str(run) not in (tuned[0] / "README.md").read_text()
    settings = json.loads((tuned[0] / "generation_config.json").read_text())
    assert "max_length" not in settings  # else max_new_tokens warns


def test_the_adapter_alone_on_its_base_is_the_merged_model(run, tuned):
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", tuned[0]))
    ids = torch.arange(40)[None]
    unadapted = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tuned[0] / "adapter").eval()
    assert (adapted(ids).logits - merged.eval()(ids).logits).abs().max() < 1e-5
    assert (adapted(ids).logits - unadapted).abs().max() > 1
    targets = {name.split(".", 3)[-1] for name in adapted.peft_config["default"].target_modules}
    assert targets == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


def test_a_model_with_chat_tokens_keeps_its_template_and_stops_at_its_own_token(tmp_path, capsys, launch):
    for number in range(4):
        messages = [{"role": "user", "content": prose(number, 200)}, {"role": "assistant", "content": prose(9, 200)}]
        with (tmp_path / "old.jsonl").open("a") as file:
            file.write(json.dumps({"messages": messages}) + "\n")
    corpus = {"validation_fraction": 0.2, "chat_template": "chatml"}
    store = tokenized(tmp_path / "old.jsonl", tmp_path / "store", corpus, seed=1337, vocab_size=300)
    run = trained(store, tmp_path / "run", **BIGGER, **QUICK)
    data, model = chats_file(tmp_path / "new.jsonl"), tmp_path / "model"
    learned_by_heart = ["--learning_rate", "0.005", "--num_train_epochs", "8", "--replay_fraction", "0", *SMALL_STEPS]
    flags = ["--output_dir", str(model), "--lora_rank", "0", *learned_by_heart]
    finetune_chat.main([str(run), "--data", str(data), *flags])
    assert table(capsys.readouterr().out)["chats"][1] < 0.1
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    assert asked_by_a_stranger(launch, model, tmp_path) == {"wrong": [], "answers": ANSWERS, "ends": [end] * 3}
    assert not (model / "adapter").exists()


@pytest.mark.parametrize("rank", [16, 0])
def test_text_is_learned(run, tmp_path, capsys, rank):
    data, model = tmp_path / "new.jsonl", tmp_path / "model"
    data.write_text((json.dumps({"text": "They are not at it."}) + "\n") * 400)
    flags = ["--output_dir", str(model), "--lora_rank", str(rank), *SMALL_STEPS]
    finetune_text.main([str(run), "--data", str(data), *flags])
    losses = table(capsys.readouterr().out)
    assert list(losses) == ["text", "original"]
    assert losses["text"][1] < losses["text"][0] - 1
    assert losses["original"][1] < losses["original"][0] + 0.5
    _, loading = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert (model / "adapter").exists() == (rank > 0)


def test_a_model_without_its_run_replays_nothing_and_says_so(run, tmp_path, capsys):
    lone = shutil.copytree(run / "model", tmp_path / "lone")
    data = tmp_path / "new.txt"
    data.write_text("They are not at it.\n" * 100)
    finetune_text.main([str(lone), "--data", str(data), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "Forgetting is not measured, because there is no --original_data" in said
    assert "no example is replayed original text" in said
    assert list(table(said)) == ["text"]


def test_chats_beyond_the_context_are_cut_and_counted_and_those_asked_beyond_it_refused(run, tmp_path, capsys):
    def chat(asked: str, answered: str) -> str:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return json.dumps({"messages": messages}) + "\n"

    data = chats_file(tmp_path / "chats.jsonl", each=2)
    data.write_text(data.read_text() + 6 * chat("Who?", prose(1, 100)))
    finetune_chat.main([str(run), "--data", str(data), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "5 of 11 chats are shorter than the context of 48 tokens; the others are cut." in said
    data.write_text(4 * chat(prose(1, 100), "They are."))
    with pytest.raises(UserError, match="assistant's turns start after the context of 48 tokens"):
        finetune_chat.main([str(run), "--data", str(data), "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "Hi"}', "line 2 is not a chat with an assistant"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "line 2 is not a chat with an assistant"),
        ('{"messages": ', "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
    ],
)
def test_what_is_no_chat_is_named_by_its_line(run, tmp_path, line, expected):
    data = chats_file(tmp_path / "chats.jsonl")
    first, *_ = data.read_text().splitlines()
    data.write_text(f"{first}\n{line}\n")
    with pytest.raises(UserError, match=expected):
        finetune_chat.main([str(run), "--data", str(data), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_is_said_at_once(run, tmp_path):
    data = str(chats_file(tmp_path / "chats.jsonl"))
    mine, new = [str(run), "--data", data], ["--output_dir", str(tmp_path / "out")]
    for arguments, expected in (
        ([], "Name a model and a file"),
        ([*mine, *new, "--lora_rank", "-1", "--replay_fraction", "1"], "lora_rank is -1.*\n.*is 1.0"),
        ([str(run), "--data", "nothing.jsonl", *new], "nothing.jsonl is not a file"),
        ([*mine, "--output_dir", str(run)], "exists already"),
        ([str(tmp_path), "--data", data, *new], "holds no model"),
    ):
        with pytest.raises(UserError, match=expected):
            finetune_chat.main(arguments)
    with pytest.raises(UserError, match="line 1 has no text"):
        finetune_text.main([*mine, *new])
    with pytest.raises(UserError, match="The tokenizer of 3 tokens has no end-of-text token"):
        finetune_chat.give_template(character_tokenizer(["abc"]))


@pytest.mark.parametrize(("missing", "recipe"), [("trl", finetune_chat), ("peft", finetune_text)])
def test_a_missing_package_is_one_sentence(run, tmp_path, monkeypatch, missing, recipe):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    arguments = [str(run), "--data", str(chats_file(tmp_path / "chats.jsonl")), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(UserError, match=rf"needs {missing}: run pip install -e '\.\[finetuning\]'"):
        recipe.main(arguments)
