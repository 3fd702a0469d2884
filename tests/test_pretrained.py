"""Runs that start from a pretrained model (--init_from)."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

import train_accelerate
from common.settings_file import read_yaml
from conftest import TINY, assert_equal, assert_user_error, flags, metrics, prose, reset_accelerate, tokenized, weights
from examples.tuning.template import PLAIN_TURNS
from modeling_gpt2scratch import GPT2ScratchConfig
from publishing.published_model import PublishedModel
from training import evaluate
from training.checkpoints.loading import is_hub_id
from training.config import read_config
from training.step.model import ModelArguments

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
SETTINGS = {name: value for name, value in TINY.items() if name not in vars(ModelArguments())}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, store):
    """A GPT-2 with random weights and the tokenizer of the store."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("models") / "gpt2", store.load_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(**SHAPE, vocab_size=len(tokenizer), **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def continued(source, data, output_dir, **settings):
    reset_accelerate()
    options = {"init_from": source, "data": data, "output_dir": output_dir, **SETTINGS, **settings}
    train_accelerate.main(flags(**options))
    return output_dir


@torch.no_grad()
def loss_of(gpt2, store, context: int) -> float:
    """Return Transformers' mean loss on the validation split, in windows of `context` tokens."""
    model, ids = GPT2LMHeadModel.from_pretrained(gpt2).eval(), torch.from_numpy(store.in_memory("val").astype("int64"))
    losses = []
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context + 1]
        losses.append(cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none"))
    return torch.cat(losses).mean().item()


def test_a_head_of_its_own_needs_an_untied_model(gpt2, store, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    model.save_pretrained(tmp_path / "untied")  # config.json says tied
    store.load_tokenizer().save_pretrained(tmp_path / "untied")
    sentence = "untied has a head of its own; set tie_word_embeddings to false"
    assert_user_error(sentence, continued, tmp_path / "untied", store.folder, tmp_path / "run")


@pytest.mark.parametrize("context", [32, 16])
def test_the_loss_before_the_first_step_is_that_of_transformers(gpt2, store, tmp_path, context):
    run = continued(gpt2, store.folder, tmp_path / "run", n_positions=context)
    first = metrics(run)[0]
    assert first["step"] == 0
    assert first["eval_loss"] == pytest.approx(loss_of(gpt2, store, context), abs=2e-6)
    config = read_yaml(run / "config.yaml")
    values = SHAPE | {"n_positions": context, "activation_function": "gelu_new", "embd_pdrop": 0}
    assert config.items() >= (values | {"tie_word_embeddings": True}).items()
    again = read_config(["--config", str(run / "config.yaml"), "--output_dir", str(tmp_path / "again")])
    assert again.model.n_positions == context
    assert min(entry["eval_loss"] for entry in metrics(run) if "eval_loss" in entry) < first["eval_loss"]


def test_a_resumed_run_needs_no_pretrained_model(gpt2, store, tmp_path):
    source = shutil.copytree(gpt2, tmp_path / "source")
    (source / "chat_template.jinja").write_text(PLAIN_TURNS)
    run = continued(source, store.folder, tmp_path / "run", max_steps=3)
    continued(source, store.folder, run, max_steps=3)  # the same command again
    shutil.rmtree(source)
    reset_accelerate()
    train_accelerate.main(["--resume_from_checkpoint", str(run), "--max_steps", "6"])
    assert [entry["step"] for entry in metrics(run) if "eval_loss" in entry] == [0, 3, 6]
    assert (run / "model" / "chat_template.jinja").read_text() == PLAIN_TURNS  # which the store does not have
    evaluate.main([str(run)])
    release = PublishedModel.read(run / "checkpoints" / "step_00000006")
    assert release.training.config.run.init_from == str(source)


def test_only_a_pair_of_names_that_is_no_folder_is_a_hub_id(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "folder").mkdir(parents=True)
    others = ("gpt2", "user/folder", "runs/base", "./base", "/models/base", "~/base", "a/b/c", str(run))
    assert [name for name in ("user/name", *others) if is_hub_id(name)] == ["user/name"]


def test_a_run_starts_from_another_run_with_text_and_the_settings_for_it(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "more.txt").write_text(prose(99), encoding="utf-8")
    options = {"tokens_per_step": 64, "torch_compile": "false", "mixed_precision": "no", "max_steps": 1}
    monkeypatch.chdir(run)
    command = flags(init_from=".", data=tmp_path / "more.txt", output_dir=tmp_path / "second", **options)
    train_accelerate.main([*command, "--plan", "--plan_steps", "0"])
    assert "Advice:  learning_rate" not in capsys.readouterr().out
    reset_accelerate()
    train_accelerate.main([*command, "--learning_rate", "1e-30", "--min_learning_rate", "0"])
    assert_equal(weights(tmp_path / "second"), weights(run))
    assert "model trained from the weights of tiny: " in (tmp_path / "second" / "report.md").read_text()
    config = read_yaml(tmp_path / "second" / "config.yaml")
    assert [config[name] for name in ("optimizer", "weight_decay", "lr_scheduler_type")] == ["adamw", 0.1, "cosine"]
    (tmp_path / "own.yaml").write_text("tokenizer: openai-community/gpt2\nvocab_size: 50257\n")
    text = read_config([*command, "--config", str(tmp_path / "own.yaml")]).vocabulary
    assert (text.tokenizer, text.vocab_size) == ("model", None)
    reset_accelerate()
    optim = read_config([*command, "--optimizer", "muon"]).optim  # a sixth of the rates of a new model
    assert optim.learning_rate == pytest.approx(0.02 / 6)
    assert optim.head_learning_rate == pytest.approx(0.004 * (768 / 16) ** 0.5 / 6)
    assert (optim.weight_decay, optim.lr_scheduler_type) == (0.05, "warmup_stable_decay")
    optim = read_config([*command, "--optimizer", "muon", "--learning_rate", "1e-4"]).optim
    assert optim.head_learning_rate == pytest.approx(0.004 * (768 / 16) ** 0.5 / 200)


def test_contradictions_are_refused(gpt2, run, store, tmp_path):
    def refuse(sentence: str, source=gpt2, data=store.folder, **settings) -> None:
        assert_user_error(sentence, continued, source, data, tmp_path / "run", **settings)

    refuse(
        r"n_layer is 3, but \S+ has 2; leave n_layer out\.\nn_positions is 64, but \S+ has learned only 32",
        n_layer=3,
        n_positions=64,
    )
    (tmp_path / "text.txt").write_text(prose(7), encoding="utf-8")
    foreign_store = tokenized(tmp_path / "text.txt", tmp_path / "other", {"validation_fraction": 0.2}, vocab_size=280)
    refuse("^vocab_size would be ignored, because text is tok", data=tmp_path / "text.txt", vocab_size=300, max_steps=1)
    refuse(
        "have different tokenizers; use a store that was made with the model's own tokenizer", data=foreign_store.folder
    )
    text = {"data": tmp_path / "text.txt", "max_steps": 1}
    refuse("^tokenizer_type would be ignored, because the tokenizer is ", tokenizer_type="character", **text)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 2}) + "\n")
    chats = {"data": tmp_path / "chat.jsonl", "chat_template": "chatml", "max_steps": 1}
    refuse(r"lacks <\|im_start\|> and <\|im_end\|>, which end the turns of chatml; train .*finetune_chat", **chats)
    refuse(
        "no chat template is known; give .*chatml or a file, or train .*finetune_chat",
        **chats | {"chat_template": None},
    )
    chats["chat_template"] = tmp_path / "own.jinja"
    chats["chat_template"].write_text("{% for it in messages %}<|{{ it.role }}|>{{ it.content }}<|end|>{% endfor %}")
    refuse(r"lacks <\|end\|>, which end the turns of .*own\.jinja; train .*finetune_chat", **chats)
    refuse("gpt2 is neither a local folder nor a Hub id .* Did you mean openai-community/gpt2", source="gpt2")
    refuse("init_from would be ignored, because resume_from_checkpoint has other weights", resume_from_checkpoint=run)
    branch = flags(resume_from_checkpoint=run, output_dir=tmp_path / "run")
    assert_user_error("step_00000003 is at step 3 of 3, so nothing is left to train", train_accelerate.main, branch)
    LlamaConfig().save_pretrained(tmp_path / "llama")
    refuse("it is a llama model; only GPT2Scratch and GPT-2 models can be trained", source=tmp_path / "llama")
    scaled = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    GPT2ScratchConfig(rope_parameters=scaled).save_pretrained(tmp_path / "scaled")
    refuse("has rotary positions of type linear; train it with Transformers' Trainer", source=tmp_path / "scaled")
    assert not (tmp_path / "run").exists()
