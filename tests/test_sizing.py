"""Tests of --budget and --depth: the rules, the choice, its verdict, and runs that end at their budget."""

import math
import os
import re
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import yaml

import train_accelerate
from benchmarks import results
from benchmarks import scaling as benchmark
from common.settings_file import read_yaml
from conftest import TWO_PROCESSES, assert_user_error, flags, lines, metrics, reset_accelerate
from tokenizer.store.store import TokenStore
from training.budget import scaling
from training.budget.earlier import EarlierRun
from training.budget.pacer import FINAL, Pacer
from training.budget.sizing import Sizing, resolve, with_vocabulary
from training.config import LENGTHS, TrainConfig, dump_config, read_config
from training.preflight import check
from training.runtime import restart
from training.runtime.device import Setup
from training.runtime.price import BudgetArguments, price_in_log, price_of

CPU = SimpleNamespace(num_processes=1, is_main_process=True, device=SimpleNamespace(type="cpu"))
COMPILED = Setup("bf16", True, "sdpa", ())


def test_rules_match_their_sources():
    assert [scaling.best_batch(tokens) for tokens in (1e5, 4e6, 1e7, 1.16e9, 9.6e9)] == [4096, 4096, 8192, 2**19, 2**20]
    assert scaling.effective(1e6, 1e6) == 1e6
    assert scaling.effective(4e6, 1e6) == pytest.approx(3.726e6, rel=1e-3)  # 1 + 15.4 (1 - exp(-3 / 15.4))
    assert scaling.adam_rate(192) == pytest.approx(3.6e-3)
    assert scaling.weight_decay("muon", 0.02, 2**19, 1.704e9) == pytest.approx(0.05, rel=0.01)  # modded-nanogpt, 36
    assert scaling.expected_loss("gpt2", 124e6, 2.5e9) == pytest.approx((3.3165, 3.3694), abs=1e-4)
    assert scaling.expected_loss("gpt2", 1e6, 2.5e9) is None
    assert scaling.expected_loss("modern", 86.5e6, 4e5) is None  # the fit would give more than a uniform guess
    blocks = [(393_216, 128), (3.1e6, 256), (33e6, 512), (85e6, 768), (316e6, 1024), (1.13e9, 2048), (1e5, 64)]
    assert [scaling.best_vocabulary(*each) for each in blocks] == [2048, 4096, 8192, 8192, 16_384, 32_768, 2048]
    losses = [scaling.deficit(N, 40e16 / N, 1e18, 10) for N in (1e8, 2e8, 4e8)]  # N D is constant
    assert min(losses) == losses[1]


def test_budgets_are_converted_to_time():
    price = price_of("", "a100-40gb", None, 1)
    for text, seconds in {"90m": 5400, "1.5h": 5400, "2d": 172_800, "120units": 54_000, "1.6usd": 7200}.items():
        assert price.seconds(BudgetArguments(text).amount) == pytest.approx(seconds)


def test_the_verdict_has_the_numbers_of_budget_and_need(monkeypatch):
    """120 Colab units at 8 per hour, and a run of 12 hours: 96 units."""
    price, amount = price_of("", "a100-40gb", None, 1), BudgetArguments("120units").amount
    costs = "12.00 hours cost 9.60 dollars or 96.00 Colab units (prices of May 2026)"
    assert price.verdict(amount, 12 * 3600) == f"120 units available, 96 needed: sufficient, 20% margin; {costs}"
    assert " 4,800 needed: NOT sufficient" in price.verdict(amount, 600 * 3600)
    assert "144 needed: NOT sufficient, 20% too little" in price.verdict(amount, 18 * 3600)
    assert price_of("NVIDIA A100-SXM4-80GB", None, None, 2).units == 16
    monkeypatch.setattr("training.runtime.price.IN_COLAB", True)
    assert price_in_log("NVIDIA A100-SXM4-40GB", 1.5, 1).so_far(1800, 5400) == "$0.75 of $3.00  4.00 of 16.00 units"
    assert price_in_log("", None, 1).so_far(1800, None) == ""
    assert price_of("NVIDIA A100-SXM4-80GB", None, 3.5, 2).dollars == 3.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"budget": "5euro"}, "budget is '5euro'; it must be a number above 0 with a unit, such as 90m, 3h, 5usd"),
        ({"budget": "0h"}, "budget is '0h'"),
        ({"family": "gpt2"}, "family is gpt2, which only applies with --budget or --depth"),
        ({"budget": "5usd"}, "the hourly price of this CPU in this unit is not known; add --hour"),
        ({"budget": "5units"}, "give a time such as 3h, or use --plan with a device of known price"),
        ({"budget": "1s", "plan": True}, r"budget is 1 s, .* checkpoints take about \d+ s; use a larger one"),
        ({"budget": "1e9d"}, "budget is 1e[+]09 d, more than 100 years; use a smaller one"),
        ({"budget": "5usd", "hourly_price": 0}, "budget is 5 dollars, at 0 dollars per hour, more than 100 years"),
        ({"budget": "1m", "n_layer": 90}, r"90 layers of width 5760 needs up to [\d,]+ GB .* but \d+ GB are free"),
        ({"depth": 3, "max_train_tokens": 1}, "max_train_tokens is 1, less than one step of 4,096 tokens"),
        ({"depth": 3, "n_layer": 4, "plan_steps": 1}, "depth .* n_layer is 4; .*\nplan_steps .* it needs --plan"),
        ({"config": "presets/gpt2.yaml", "family": "modern"}, "family .* ignored, because the model is of the family"),
        ({"budget": "100flops"}, "budget is 100 FLOPs, less than one step of the smallest model"),
        ({"depth": 2, "tokens_per_step": 2**20}, r"has [\d,]+ tokens, which 8 times are less than one step"),
        ({"budget": "1units", "plan": True, "plan_device": "a100-40gb"}, "is smaller than 30M .*; use more text"),
    ],
)
def test_impossible_budgets_are_refused_in_one_sentence(store, tmp_path, settings, sentence):
    settings = {"data": store.folder, "output_dir": tmp_path / "run", "torch_compile": "false"} | settings
    assert_user_error(sentence, train_accelerate.main, [part for part in flags(**settings) if part != "True"])
    assert not (tmp_path / "run").exists()


def resolved(store, arguments: list[str], tokens: float, **metadata: int) -> tuple[TrainConfig, Sizing | None]:
    """Return the configuration and the choice for a text of `tokens` tokens."""
    copy = TokenStore(store.folder)
    copy.metadata = replace(copy.metadata, train=replace(copy.metadata.train, tokens=int(tokens)), **metadata)
    return resolve(read_config(arguments), CPU, COMPILED, [copy, copy])


def choice(store, arguments: str, tokens: float, **metadata: int) -> SimpleNamespace:
    config, sizing = resolved(store, ["--data", str(store.folder), *arguments.split()], tokens, **metadata)
    return SimpleNamespace(config=config, sizing=sizing, option=sizing.option)


def test_a_budget_chooses_a_model_near_the_compute_optimal_ratio(store):
    choices = choice(store, "--budget 2e18flops", 1e10)
    model, optim, rows = choices.option.model, choices.config.optim, choices.sizing.rows
    assert 8 < choices.option.tokens / choices.option.parameters < 14
    assert (model.n_embd, model.n_positions) == (64 * model.n_layer, 1024)
    assert (model.normalization, optim.optimizer) == ("rms_norm", "muon")
    assert model.attention_scale == (0.12 if model.n_embd // model.n_head == 128 else None)
    assert optim.second_target_weight is None  # measured for smaller models
    assert choices.config.batch.tokens_per_step in (2**19, 2**20)
    assert [*rows] == ["half", "this", "twice"]
    assert rows["half"].parameters <= choices.option.parameters <= rows["twice"].parameters
    choices = choice(store, "--budget 2e18flops --family gpt2", 1e10)
    assert 15 < choices.option.tokens / choices.option.parameters < 28
    model, optim = choices.config.model, choices.config.optim
    # No field of the quickstart's family is left.
    assert (model.normalization, model.rope_theta, model.activation_function) == ("layer_norm", None, "gelu_new")
    assert (optim.optimizer, optim.lr_scheduler_type) == ("adamw", "warmup_stable_decay")
    assert optim.learning_rate == pytest.approx(1.8e-3 * math.sqrt(768 / model.n_embd), rel=5e-3)
    assert optim.warmup_steps == round(0.05 * choices.config.length.max_steps)


def test_small_new_models_of_the_modern_family_have_second_targets_and_a_circuit(store, finished, monkeypatch):
    """With four layers, 4 x 12 x 256^2 + 256 V = 3.2M parameters and more; with five, 6.1M."""
    weights = {"4": 0.5, "5": None, "4 --family gpt2": None, "4 --second_target_weight 0.2": 0.2}
    choices = {depth: choice(store, f"--depth {depth}", 1e8).config.optim.second_target_weight for depth in weights}
    assert choices == weights
    assert not choice(store, "--depth 4", 1e8).config.optim.induction_init  # a vocabulary as small as of characters
    monkeypatch.setattr(scaling, "SMALLEST_VOCABULARY", 200)
    assert not choice(store, "--depth 4", 1e8).config.optim.induction_init  # 34M tokens
    monkeypatch.setattr(scaling, "CIRCUIT_TOKENS", 40e6)
    circuits = {depth: choice(store, f"--depth {depth}", 1e8).config.optim.induction_init for depth in weights}
    assert circuits == {"4": True, "5": False, "4 --family gpt2": False, "4 --second_target_weight 0.2": True}
    assert not choice(store, "--depth 1", 1e8).config.optim.induction_init  # it needs two layers
    config = choice(store, "--depth 4", 1e8).config
    assert config.optim.second_target_steps == round(0.6 * config.length.max_steps)
    large = choice(store, "--depth 5 --second_target_weight 0.2", 1e8).config
    assert large.optim.second_target_steps == round(0.6 * large.length.max_steps)
    continued = f"--init_from {finished} --budget 1e11flops --optimizer muon"
    assert choice(store, continued, 1e8).config.optim.second_target_weight is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_budget_for_a_pretrained_model_has_the_same_rate_from_flags_and_files(store, finished, tmp_path, optimizer):
    settings = {"init_from": str(finished), "budget": "1e11flops", "optimizer": optimizer}
    (tmp_path / "a.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    of_flags = choice(store, " ".join(flags(**settings)), 1e8).config.optim
    rate = {"adamw": 1e-4, "muon": 0.00333}[optimizer]  # a sixth of a new model's
    assert (of_flags.learning_rate, of_flags.min_learning_rate) == (rate, 0.0)
    assert choice(store, f"--config {tmp_path / 'a.yaml'}", 1e8).config.optim == of_flags
    lower = choice(store, " ".join(flags(**settings, learning_rate=5e-5)), 1e8).config.optim
    assert (lower.learning_rate, lower.min_learning_rate) == (5e-5, 0.0)
    sentence = f"min_learning_rate is 0.01; it must be between 0 and learning_rate, {rate}"
    assert_user_error(sentence, choice, store, " ".join(flags(**settings, min_learning_rate=0.01)), 1e8)


def chosen_size(arguments: list[str]) -> int | None:
    return with_vocabulary(read_config(arguments), CPU, COMPILED).vocabulary.vocab_size


def test_a_new_tokenizer_has_the_size_for_the_model(tmp_path):
    """The text has 200 MB, and is not read. A file with a model, but without a size, leaves the usual one."""
    (mine := tmp_path / "mine.yaml").write_text("n_layer: 12\n")
    (text := tmp_path / "text.txt").touch()
    os.truncate(text, 200_000_000)
    h100 = "--budget 10h --plan --plan_device h100-80gb"
    sizes = {"--max_steps 5": 2048, "--budget 2m": 2048, "--budget 1h": 4096, h100: 16_384, f"{h100} --n_layer 4": 4096}
    sizes |= {"--depth 12": 8192, "--depth 12 --vocab_size 500": 500, "--depth 12 --tokenizer_type character": None}
    sizes |= {"--budget 10h --config presets/nano.yaml": 4096, f"--budget 10h --config {mine}": None}
    for arguments, size in sizes.items():
        assert chosen_size([*flags(data=text, output_dir=tmp_path / "run"), *arguments.split()]) == size, arguments


def test_the_vocabulary_of_a_budget_stays_that_of_its_run(store, finished_copy):
    """Also if another version, or a given size, chose it. A command that the folder refuses builds no other store."""
    arguments = flags(data=store.folder.parent / "text0.txt", output_dir=finished_copy, budget="5m")
    (finished_copy / "config.yaml").write_text(dump_config(read_config([*arguments, "--vocab_size", "300"])))
    for more, size in {"": 300, "--budget 6m": 300, "--overwrite_output_dir": 2048}.items():
        assert chosen_size([*(arguments[:-2] if "budget" in more else arguments), *more.split()]) == size


def test_a_run_keeps_its_choice_from_its_first_checkpoint_on(store, finished_copy, tmp_path, monkeypatch):
    """Without one, the machine may be another one. Of folder and backup, the newer one has the choice, except after a
    restart: the backup may have a run that was replaced."""
    folder, drive = finished_copy, tmp_path / "drive"
    arguments = flags(data=store.folder, output_dir=folder, budget="1e15flops", backup_dir=drive)
    (folder / "config.yaml").write_text(dump_config(read_config(arguments)).replace("n_layer: 2", "n_layer: 7"))
    shutil.copytree(folder, drive / folder.name)
    (folder / "config.yaml").write_text(dump_config(read_config(arguments)).replace("n_layer: 2", "n_layer: 9"))

    def layers() -> int:
        return resolved(store, arguments, 1e8)[0].model.n_layer

    assert layers() == 9
    shutil.rmtree(folder / "checkpoints")
    assert layers() == 7
    with monkeypatch.context() as restarting:
        restarting.setenv(restart.FACTS, '{"has_begun": true}')
        assert layers() == 9
    shutil.rmtree(drive)
    assert layers() == choice(store, "--budget 1e15flops", 1e8).option.model.n_layer < 7


def test_text_that_is_repeated_three_times_keeps_the_model_and_the_best_checkpoint(store):
    plenty, little = (choice(store, "--budget 2e18flops", tokens).option for tokens in (1e11, 6e8))
    assert little.parameters == plenty.parameters
    assert 3 < little.epochs <= 4
    assert [option.settings["load_best_model_at_end"] for option in (plenty, little)] == [False, True]
    assert little.tokens > little.unique


@pytest.mark.parametrize("arguments", ["--budget 1e18flops", "--depth 12"])
@pytest.mark.parametrize(
    ("vocab_size", "epochs", "parameters", "last"), [(300, 8, 10, (0.4, 0.7)), (2048, 4, 20, (0.23, 0.84))]
)
def test_a_small_text_limits_epochs_and_size(store, arguments, vocab_size, epochs, parameters, last):
    """100,000 tokens: neither more epochs than are useful, nor a model far too large for them, unless its size is
    given. The loss is then not known. The larger vocabulary allows an induction circuit."""
    option = choice(store, arguments, 100_000, vocab_size=vocab_size).option
    assert epochs - 1 < option.epochs <= epochs
    (least, lowest), (most, highest) = option.worths
    assert 200_000 < least < most < option.tokens
    assert (lowest, highest) == pytest.approx(last, abs=0.05)
    assert option.most_tokens == epochs * 100_000
    assert option.parameters <= parameters * 100_000 or "depth" in arguments
    assert option.settings["induction_init"] is (vocab_size == 2048)
    assert option.loss is None or epochs == scaling.EPOCHS_AS_NEW
    assert option.is_limited_by_text
    longer = choice(store, f"{arguments} --num_train_epochs 40", 100_000, vocab_size=vocab_size).option
    assert longer.epochs > 39
    assert not longer.is_limited_by_text
    given = choice(store, f"{arguments} --max_steps 1000", 100_000, vocab_size=vocab_size).option
    assert given.settings["tokens_per_step"] == option.settings["tokens_per_step"]  # not that of the whole budget


def test_the_text_limits_a_resumed_run_of_one_layer_as_before(store, monkeypatch):
    """With more layers, the model would have a circuit, and the text be repeated half as often."""
    monkeypatch.setattr("training.budget.sizing.GUESSES", {"cpu": 3e9})
    monkeypatch.setattr("training.budget.sizing.Sizer._find_speed", lambda self, sample: self._assume_speed())
    arguments = ["--data", str(store.folder), "--budget", "2h"]
    config, sizing = resolved(store, arguments, 20_000, vocab_size=2048)
    assert (config.model.n_layer, config.length.max_steps) == (1, 4 * 20_000 // 4096)
    assert ": sufficient, " in sizing.verdict
    longest = resolved(store, [*arguments, "--plan"], 2e6)[1].verdict  # the text does not limit it
    assert ": sufficient, 0% margin" in longest
    with monkeypatch.context() as slow:  # where the text does not limit the run
        slow.setattr("training.budget.sizing.GUESSES", {"cpu": 3e6})
        started = resolved(store, arguments, 20_000, vocab_size=2048)[0]
    assert (started.length.max_train_tokens, config.length.max_train_tokens) == (None, 80_000)
    same_model = config.with_settings({name: started.values[name] for name in started.values if name not in LENGTHS})
    assert same_model.settings.differences(yaml.safe_load(dump_config(started))) == []
    chosen = config.flat()
    names = ("n_layer", "n_embd", "n_head", "induction_init", "max_train_tokens", "tokens_per_step")
    resumed = [*arguments, *flags(**{name: chosen[name] for name in names if chosen[name] is not None})]
    assert resolved(store, resumed, 20_000, vocab_size=2048)[0].length.max_steps == config.length.max_steps


def test_a_larger_text_or_one_without_a_circuit_is_repeated_more(store):
    preset = choice(store, "--config presets/gpt2.yaml --budget 1e20flops", 1e7).option  # its length is a limit, too
    assert preset.epochs <= 8
    without = [(f"--{option}", 1e6, 8) for option in ("family gpt2", "induction_init false")]
    for more, tokens, epochs in (("", 1e6, 4), ("", 1.1e6, 8), *without):
        option = choice(store, f"--budget 1e18flops {more}", tokens, vocab_size=2048).option
        assert option.most_tokens == epochs * tokens


def test_the_default_length_is_for_the_default_text(store):
    """1,200 steps of 4,096 tokens would repeat 100,000 tokens 49 times."""
    data, steps = ["--data", str(store.folder)], 800_000 // 4096
    for arguments, tokens, expectation, average in (
        (data, 100_000, steps, steps // 10),
        (data, 1_000_000, 1200, 120),
        ([*data, "--max_steps", "700"], 100_000, 700, None),
        ([*data, "--config", "presets/quickstart.yaml"], 100_000, 1200, None),
        ([], 100_000, 1200, None),
    ):
        config, sizing = resolved(store, arguments, tokens)
        assert (config.length.max_steps, config.optim.weight_average, sizing) == (expectation, average, None)
        assert config.evaluation.eval_steps == config.checkpoint.save_steps <= max(240, expectation)
        assert (config.optim.weight_decay == scaling.LARGEST_DECAY) is (expectation == steps)


def test_only_a_given_batch_is_divided_among_processes_before_the_choice(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    arguments = ["--data", str(store.folder), "--budget", "3h"]
    wrong = [*arguments, "--per_device_train_batch_size", "x"]
    assert_user_error("per_device_train_batch_size is 'x'; it must be", read_config, wrong, check)
    assert read_config(arguments, check).budget.chooses
    assert_user_error("not a multiple of 768", read_config, [*arguments, "--tokens_per_step", "4096"], check)


def test_given_settings_are_kept(store, tmp_path):
    option = choice(store, "--depth 12", 1e10).option
    assert (option.model.n_layer, option.model.n_head) == (12, 6)
    assert option.tokens == pytest.approx(10.5 * option.parameters, rel=0.01)
    sentence = "One step of 4,194,304 tokens is more than the whole run"
    assert_user_error(sentence, choice, store, "--depth 1 --tokens_per_step 4194304", 1e9)
    gpt2, flops = "--config presets/gpt2.yaml --budget 2e18flops", "--budget 1e15flops"
    three = {"n_layer": 3, "learning_rate": 0.01, "max_steps": 50}
    six = {"n_layer": 6, "normalization": "layer_norm", "optimizer": "adamw"}
    for arguments, tokens, expected in (
        (f"{flops} --n_layer 3 --learning_rate 0.01 --max_steps 50", 1e8, three),
        (f"{flops} --depth 8 --n_embd 384 --n_head 6", 1e8, {"n_embd": 384, "initializer_range": 0.0294}),
        (f"{flops} --n_embd 48", 1e8, {"n_layer": 1}),
        (f"{flops} --n_layer 6 --n_embd 256", 1e8, {"n_head": 4, "n_embd": 256}),
        ("--depth 12 --n_embd 250", 1e10, {"n_head": 1, "attention_scale": None}),  # heads of an even size,
        ("--depth 12 --n_embd 384", 1e10, {"n_head": 3, "attention_scale": 0.12}),  # near to 64 or 128
        ("--depth 12 --n_head 12", 1e10, {"attention_scale": None}),
        (gpt2, 1e10, {"tokens_per_step": 524_288, "n_embd": 768, "normalization": "layer_norm"}),
        *((f"{gpt2} {size}", 1e10, six) for size in ("--n_layer 6", "--n_layer 6 --n_head 6 --n_embd 384")),
    ):
        choices = choice(store, arguments, tokens)
        assert {name: value for name, value in choices.config.flat().items() if name in expected} == expected
        assert choices.option.family == ("gpt2" if gpt2 in arguments else "modern")


def test_the_plan_for_the_a100_of_the_training_report(store):
    """12 layers, width 768, 109.5M parameters in products, 3 epochs of 2.8 billion tokens: 6 x 109.5M + 28.3M = 685M
    FLOPs per token; 32% of 312 TFLOP/s are 145,665 tokens/s, so 8.4 billion tokens take 16.0 hours, or 128 units at 8
    units per hour."""
    length = "--plan --plan_device a100-40gb --budget 120units --num_train_epochs 3"
    sizing = choice(store, f"--config presets/gpt2_small_seed.yaml {length}", 2.8e9, vocab_size=32_000).sizing
    assert sizing.verdict.startswith("120 units available, 128 needed: NOT sufficient, 7% too little")
    assert sizing.option.tokens == pytest.approx(8.4e9 * 120 / 128.3, rel=0.01)  # shortened to the budget


def test_a_plan_has_one_answer_in_bounded_steps(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.budget.throughput.PROBE_FLOPS", 1.0)
    given = {"budget": "9d", "depth": 12, "max_steps": 20, "tokens_per_step": 2**16, "torch_compile": "false"}
    train_accelerate.main([*flags(data=store.folder, output_dir=tmp_path / "run", **given), "--plan"])
    output = capsys.readouterr().out
    assert output.startswith("Measuring the speed")
    [(row, time_estimate)] = re.findall(r"\| this .* (\S+) \| [^|]+ \|\n[^$]*\nTime:    (\S+) at .* tokens/s", output)
    assert row == time_estimate != "0:00"


def test_the_plan_prints_a_choice_that_can_be_planned_and_runs(store, tmp_path, capsys):
    arguments = "--budget 6e9flops --plan_steps 0 --torch_compile false --plan".split()
    train_accelerate.main([*flags(data=store.folder, output_dir=tmp_path / "run"), *arguments])
    output = capsys.readouterr().out
    assert "Choice:  modern family, 1 layer of width 64" in output
    assert re.search(r"\| twice \| 1 \| 64 \|", output)
    (path := tmp_path / "chosen.yaml").write_text(output.split("--config:\n")[1], encoding="utf-8")
    assert yaml.safe_load(path.read_text())["optimizer"] == "muon"
    train_accelerate.main(["--config", str(path), "--plan", "--plan_steps", "0"])
    assert "The choice as YAML" in capsys.readouterr().out
    reset_accelerate()
    train_accelerate.main(["--config", str(path), "--output_dir", str(tmp_path / "run")])
    assert metrics(tmp_path / "run")[-1]["step"] == read_yaml(path)["max_steps"]


BUDGET = {"n_layer": 2, "tokens_per_step": 256, "n_positions": 64, "torch_compile": "false"}
BUDGET |= {"mixed_precision": "no", "sample_tokens": 0, "max_train_tokens": 100_000}


@pytest.mark.parametrize(("launcher", "budget"), [((), "20s"), (TWO_PROCESSES, "40s")])
def test_a_run_with_a_budget_fixes_its_length_once(launch, store, tmp_path, capsys, launcher, budget):
    run = tmp_path / "run"
    arguments = flags(data=store.folder, output_dir=run, **BUDGET, budget=budget)
    result = launch(*launcher, "train_accelerate.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("This number is now final.") == 1
    [correction] = [event for event in lines(run / "events.jsonl") if event["event"] == "paced"]
    steps, content = metrics(run)[-1]["step"], (run / "config.yaml").read_bytes()
    assert read_yaml(run / "config.yaml")["max_steps"] == correction["max_steps"] == steps > correction["step"]
    resume = ["--resume_from_checkpoint", str(run)]
    for more in ([], ["--max_steps", "9999"], ["--max_nonfinite_steps", "50"]):
        assert read_config([*resume, *more]).is_resolved
    assert not read_config([*resume, "--budget", "2h"]).is_resolved
    for length in (["--max_steps", "9999"], ["--num_train_epochs", "99"]):
        config = resolve(read_config([*resume, *length]), CPU, Setup("no", False, "sdpa", ()))[0]
        assert (config.length.max_steps, config.length.num_train_epochs) in ((9999, None), (None, 99))
    train_accelerate.main(arguments)
    assert f"{run} is finished" in capsys.readouterr().out
    assert (run / "config.yaml").read_bytes() == content
    reset_accelerate()
    longer = [part.replace(budget, "9h") for part in arguments]
    assert_user_error(f"budget {budget} -> 9h", train_accelerate.main, longer)
    train_accelerate.main([*arguments, "--plan", "--plan_steps", "0"])  # a plan chooses again
    assert "| twice | 2 |" in capsys.readouterr().out


def test_a_restart_counts_from_the_first_step_not_from_the_text(monkeypatch):
    """The process of a restart is the one before, which tokenized the text."""
    now, ages = datetime.now(UTC), {"begun": 50, "restarted": 20, "resumed": 15}
    events = [{"event": name, "time": (now - timedelta(seconds=age)).isoformat()} for name, age in ages.items()]
    monkeypatch.setenv("GPT2SCRATCH_RESTART", '{"has_begun": true}')
    assert EarlierRun({}, events, 0).seconds_spent() == pytest.approx(45, abs=1)


def pacer(time_estimate: int, time_to_end: float) -> Pacer:
    run = SimpleNamespace(plan=SimpleNamespace(max_steps=time_estimate, tokens_per_step=1000))
    sizing = SimpleNamespace(deadline=time.monotonic() + time_to_end, option=SimpleNamespace(most_tokens=5_000_000))
    store = SimpleNamespace(metadata=SimpleNamespace(val=SimpleNamespace(tokens=240_000)))  # 40 s at 3 x 2,000 tok/s
    forecast = SimpleNamespace(sizing=sizing, seconds=lambda speed, tokens: 50.0, store=store)
    return Pacer(run, None, forecast)


def test_the_length_follows_from_the_measured_speed():
    """20 steps in 10 s, 1,000 s left of which 1% is spare, 40 s for the last validation, and 10 s in 100 steps for the
    others: 0.6 s per step."""
    log = SimpleNamespace(paces=[(10, 5.0), (10, 5.0)])
    assert pacer(100, 1000.0)._corrected(20, log) == pytest.approx(20 + 950 / 0.6, abs=1)
    paused = SimpleNamespace(paces=[*log.paces, *log.paces, (1, 1e5)])  # the pause does not repeat itself
    assert pacer(100, 1000.0)._corrected(20, paused) == pacer(100, 1000.0)._corrected(20, log)
    slower = SimpleNamespace(paces=[(10, 5.0)] * 6 + [(10, 50.0)] * 2)  # 130 s for the last validation
    assert pacer(100, 1000.0)._corrected(80, slower) == pytest.approx(80 + 860 / (1.625 - 0.8), abs=1)
    assert pacer(100, -5.0)._corrected(20, log) == 21
    assert pacer(100, 1e6)._corrected(20, log) == 5000  # of 1,000 tokens: more are not useful with the text
    assert pacer(100, 1000.0)._corrected(1, SimpleNamespace(paces=[])) == 100


def test_the_length_is_final_before_the_rates_fall(store, monkeypatch):
    """The measured lengths count until the first log line after 35% of the steps, and not after it. If the first line
    comes while the rates fall, the run may only become shorter."""
    monkeypatch.setattr("training.budget.pacer.on_main", lambda accelerator, task: task())
    config = read_config(["--data", str(store.folder)], check)
    assert 1 - config.optim.cooldown_fraction > FINAL
    for planned, measured, end in (
        (1000, {100: 1000, 200: 800, 300: 900, 350: 1000, 400: 500}, 1000),
        (72, {50: 114}, 72),
        (72, {50: 60}, 60),
        (40, {40: 64}, 40),
    ):
        budgeted, lengths, sentences = pacer(planned, 1.0), list(measured.values()), []
        optim = replace(config.optim, second_target_weight=0.5, second_target_steps=500)
        budgeted.config, budgeted._write = replace(config, optim=optim), sentences.append
        state = SimpleNamespace(settings={})
        budgeted.run.accelerator, budgeted.run.start = None, SimpleNamespace(state=state)
        monkeypatch.setattr(budgeted, "_corrected", lambda step, log, lengths=lengths: lengths.pop(0))
        budgeted.correct(planned - 1, SimpleNamespace(paces=[]))  # nothing is measured yet
        for step in measured:
            budgeted.correct(step, SimpleNamespace(say=sentences.append, paces=[(1, 1.0)]))
        final = [*measured][:4][-1]
        assert (budgeted.run.plan.max_steps, budgeted.config.length.max_steps) == (end, end)
        words = f"Budget:  the run has {end:,} steps, by the measured speed. This number is now final."
        assert sentences == [words, final]
        second = min(500, round(0.6 * end))
        assert budgeted.config.optim.second_target_steps == state.settings.get("second_target_steps", 500) == second
        assert len(lengths) == max(0, len(measured) - 4)


def test_the_law_of_small_models_is_the_fit_of_the_result_file():
    _, choices = results.read_runs(benchmark.PATH, "run")
    for family, law in scaling.POWER_LAWS.items():
        fit = benchmark.law(family, choices)
        assert law == pytest.approx((fit["k"], fit["g"]), rel=1e-3)
        assert tuple(fit["budgets"][:: len(fit["budgets"]) - 1]) == scaling.MEASURED_FLOPS
        for flops, (_, _, bits) in zip(fit["budgets"], fit["optima"], strict=True):
            lowest, highest = scaling.measured_bits_per_byte(family, flops)
            assert lowest < bits < highest
    assert scaling.measured_bits_per_byte("modern", 1e14) is None


@pytest.mark.parametrize("family", benchmark.LADDER)
def test_the_choice_is_the_best_measured_size_of_each_budget(store, family):
    _, runs = results.read_runs(benchmark.PATH, "run")
    for flops, depths in benchmark.LADDER[family].items():
        keys = {depth: results.key({"family": family, "depth": depth, "flops": flops}) for depth in depths}
        best = min(depths, key=lambda depth: runs[keys[depth]]["eval_bits_per_byte"])
        flags = f"--family {family} --budget {flops:g}flops"
        assert choice(store, flags, 2_593_258, vocab_size=2048).option.model.n_layer == best, flops


def test_one_layer_which_has_no_circuit_is_chosen_where_it_is_the_best_measured_size(store):
    measured = lines(results.RESULTS / "sizes-with-circuit-cpu.jsonl")
    runs = [run for run in measured if (run["text"], run["flops"]) == ("python-standard-library", 2e12)]
    best = min(runs, key=lambda run: run["eval_bits_per_byte"])
    option = choice(store, "--budget 2e12flops", 2_593_258, vocab_size=2048).option
    assert option.model.n_layer == best["n_layer"] == 1
