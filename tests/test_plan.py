"""--plan: estimates and problems of a run before it starts."""

import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
import yaml
from accelerate import Accelerator
from torch._dynamo.exc import BackendCompilerFailed

import train_accelerate
from conftest import REPOSITORY, TINY, assert_user_error, error_of, flags, metrics, prose, reset_accelerate, trained
from modeling_gpt2scratch import GPT2ScratchConfig
from training.budget.forecast import assumed_speed, times_due
from training.budget.throughput import Throughput
from training.config import read_config
from training.data.batches import BatchPlan, DataPosition, WindowOrder
from training.plan.plan import LengthArguments, Plan, steps_of
from training.preflight import check
from training.runtime import compilation
from training.runtime.device import Setup
from training.runtime.hardware import reported_mfu
from training.step.optim import usual_learning_rate


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("training.budget.forecast.MEASURED_SECONDS", 0.5)


def planned(store, tmp_path, capsys, *extra: str, **settings) -> str:
    trained(store, tmp_path / "run", "--plan", *extra, **settings)
    return capsys.readouterr().out


def test_plan_prints_all_estimates_and_writes_nothing(store, tmp_path, capsys):
    output = planned(store, tmp_path, capsys, hourly_price=2.0, plan_steps=2, learning_rate=2e-3)
    lines = {line.split(":")[0]: line for line in output.splitlines() if re.match(r"\w+: ", line)}
    assert list(lines) == ["Device", "Model", "Data", "Length", "Memory", "Time", "Cost", "Disk", "Advice"]
    assert "11,648 parameters" in lines["Model"]
    assert "\n         (weights 0.00, gradients 0.00, optimizer 0.00" in output
    assert "measured peak, including the program itself: " in lines["Memory"]
    assert re.search(r"at [\d,]+ tokens/s, \S+ s/step \(measured over [\d,]+ step.*; the first", lines["Time"])
    assert re.search(r"0\.0\d dollars at 2\.00 dollars per hour", lines["Cost"])
    assert "for 2 checkpoints and the model" in lines["Disk"]
    assert not (tmp_path / "run").exists()


def test_cuda_graphs_are_refused_with_gradient_accumulation(store, tmp_path, capsys):
    settings = {"plan_device": "h100-80gb", "torch_compile": "auto", "per_device_train_batch_size": 2}
    for mode in ("reduce-overhead", "max-autotune"):
        refusal = f"{mode} uses CUDA graphs, which overwrite the gradients accumulated over 2 micro-batches"
        assert_user_error(refusal, planned, store, tmp_path, capsys, torch_compile_mode=mode, **settings)
    for change in ({"per_device_train_batch_size": 4}, {"torch_compile_mode": "max-autotune-no-cudagraphs"}):
        output = planned(store, tmp_path, capsys, **settings | {"torch_compile_mode": mode} | change)
        assert ", compiled (from its datasheet)" in output


def test_plan_for_a_gpu_does_not_guess_for_small_models(store, tmp_path, capsys):
    assert reported_mfu("H200") == reported_mfu("H100")  # the same chip
    output = planned(store, tmp_path, capsys, plan_device="h200-141gb", mixed_precision="auto")
    assert "Time:    not known: there are no published figures for a model too small" in output
    assert "of 141.0 GB per device" in output
    sentence = r"^plan_device is 'a1000'; it must be one of a100-40gb, .*v100-16gb\.$"
    assert_user_error(sentence, planned, store, tmp_path, capsys, plan_device="a1000")


def test_plan_for_a_large_text_uses_a_sample_and_deletes_it(tmp_path, capsys, monkeypatch):
    for name, n_bytes in (("LARGE", 100_000), ("SAMPLE", 50_000), ("CHUNK", 4096)):
        monkeypatch.setattr(f"tokenizer.build.estimate.{name}_BYTES", n_bytes)
    for folder in ("text", "temporary"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("training.data.run_data.CACHE", tmp_path / "cache")
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text(prose(i, 30_000), encoding="utf-8")
    text = SimpleNamespace(folder=tmp_path / "text")
    settings = {"vocab_size": 300, "sample_by": "line", "plan_steps": 2, "data_placement": "mmap"}
    output = planned(text, tmp_path, capsys, **settings)
    line = r"Data:    .*/text, memory-mapped: about (\d+,\d+) tokens, estimated from 0 of 0 MB, like"
    assert int(re.search(line, output)[1].replace(",", "")) == pytest.approx(181_612, rel=0.02)
    assert re.search(r"\n +tokenizing everything before the first step should take about \d+:\d\d\n", output)
    assert "s/step (measured over" in output
    assert list((tmp_path / "temporary").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary", "text"]
    for n_bytes in (1_000_000, 100_000):  # the text is now small enough to be tokenized; then the store exists
        monkeypatch.setattr("tokenizer.build.estimate.LARGE_BYTES", n_bytes)
        assert ": 181,612 tokens, " in planned(text, tmp_path, capsys, **settings)


def test_estimate_for_an_a100_matches_its_measured_speed_and_learning_rate():
    """145,000 tokens/s at 32 x 512 on an A100."""
    speed = assumed_speed("A100", GPT2ScratchConfig(), "bf16", 1)
    assert speed.tokens_per_second == pytest.approx(145_000, rel=0.01)
    assert "which is 132,015 to 254,926 tokens/s" in speed.source
    assert usual_learning_rate(124e6) == pytest.approx(6.4e-4, rel=0.02)
    assert usual_learning_rate(13e9) == usual_learning_rate(1.5e9) > 2e-4


def test_plan_for_a_rented_device_uses_its_datasheet(store, tmp_path, capsys):
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 512, "tokens_per_step": 32768}
    extra = {"max_steps": 1000, "plan_device": "a100-80gb", "mixed_precision": "auto", "torch_compile": "auto"}
    output = planned(store, tmp_path, capsys, **shape, **extra)
    assert "A100 80 GB, bf16, compiled (from its datasheet)" in output
    assert "of 80.0 GB per device" in output
    rows = [line.split(" | ")[0] for line in output.splitlines() if line.startswith("| ")]
    assert rows[1:4] == ["| A100 40 GB", "| A100 80 GB", "| H100 80 GB"]
    large = {"n_layer": 36, "n_head": 20, "n_embd": 1280, "n_positions": 512, "tokens_per_step": 512, "plan_steps": 0}
    output = planned(store, tmp_path, capsys, **large, plan_device="t4-16gb")
    assert "GB of 16.0 GB per device" in output
    for here in (output, planned(store, tmp_path, capsys, **large)):  # the same devices, with no part of a CPU's memory
        assert "\n| T4" in here


def test_a_compiler_that_fails_while_the_speed_is_measured_ends_in_one_sentence(store, tmp_path, capsys, monkeypatch):
    def fail(*_arguments):
        raise BackendCompilerFailed(None, error, None)

    monkeypatch.setattr("training.budget.throughput._measured", fail)
    error = OSError("failed to map segment")
    sentence = r"failed \(OSError\('failed to map segment'\)\) while the speed was measured. Delete its cache"
    assert_user_error(sentence, planned, store, tmp_path, capsys)
    error = PermissionError(13, "Permission denied", "/cache/x.py")  # a file of another user
    assert_user_error("'/cache/x.py'.* TORCHINDUCTOR_CACHE_DIR, and", planned, store, tmp_path, capsys)


def test_a_large_model_is_measured_by_a_small_one(store, tmp_path, capsys, monkeypatch):
    """With 4 layers and 4 micro-batches measured by 2 layers and one, the estimate is that of all of them."""
    shape = {"n_layer": 4, "n_embd": 64, "n_positions": 64, "tokens_per_step": 16384, "max_steps": 4}
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # for an equal speed on a busy machine
    seconds, models, free_memory = {}, [], Accelerator.free_memory
    monkeypatch.setattr(Accelerator, "free_memory", lambda one: free_memory(one) or models.append(one._models))
    for tokens, flops in ((4096, 4e9), (16384, 1e15)):
        monkeypatch.setattr("training.budget.throughput.PROBE_TOKENS", tokens)
        monkeypatch.setattr("training.budget.throughput.PROBE_FLOPS", flops)
        output = " ".join(planned(store, tmp_path, capsys, **shape).split())
        seconds[tokens] = float(re.search(r" tokens/s, (\S+) s/step", output)[1])
        assert ("4,096 tokens with 2 layers of width 64, scaled by operations" in output) is (tokens == 4096)
        assert ("measured peak" in output) is (tokens != 4096)
    assert seconds[4096] == pytest.approx(seconds[16384], rel=0.5)
    assert models == [[], []]  # the accelerator does not keep the measured model


def test_measured_peak_memory_matches_the_run(store, tmp_path, capsys):
    shape = {"n_layer": 4, "n_embd": 64, "n_positions": 16, "tokens_per_step": 1024}
    output = planned(store, tmp_path, capsys, plan_steps=10, **shape)
    memory = float(re.search(r"measured peak[^:]*: ([\d.]+) GB", output)[1])
    run = trained(store, tmp_path / "run", **shape, max_steps=12, eval_steps=6, save_steps=6)
    assert max(entry.get("peak_memory_gb", 0) for entry in metrics(run)) == pytest.approx(memory, rel=0.1)


def test_time_and_cost_of_a_resumed_run_are_those_of_the_steps_left(store, finished, tmp_path, capsys, monkeypatch):
    speed = Throughput(64.0, "one step per second", startup=0.0)
    monkeypatch.setattr("training.budget.forecast.measure_speed", lambda *arguments: speed)
    plan = partial(planned, store, tmp_path, capsys, max_steps=24, hourly_price=3600)
    whole, resumed = (plan(resume_from_checkpoint=source) for source in (None, finished))
    dollars = [float(re.search(r"Cost: +([\d.]+) dollars", output)[1]) for output in (whole, resumed)]
    assert dollars[1] == pytest.approx(0.75 * dollars[0], abs=0.01)
    assert " for the 18 steps left at 64 tokens/s" in resumed
    assert "left" not in whole.split("Disk")[0]


TIED = {"tie_word_embeddings": "true", "activation_function": "gelu_new", "resid_pdrop": 0.1}
ROTARY = {"activation_function": "relu2", "rope_theta": 100, "normalization": "rms_norm"}
ROTARY |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1)


@pytest.mark.parametrize(
    ("settings", "variant"),
    [
        ({}, "untied head, exact GELU, dropout 0"),
        (TIED, "tied head, tanh GELU, dropout 0 (embeddings), 0 (attention), 0.1 (blocks)"),
        (ROTARY, "untied head, squared ReLU, rotary positions, RMSNorm, dropout 0.1"),
    ],
)
def test_plan_prints_the_model_variant(store, tmp_path, capsys, settings, variant):
    (tmp_path / "own.yaml").write_text("n_layer: 2\n")  # and none of the quickstart's settings
    settings = {"n_layer": None, "tie_word_embeddings": None, "config": tmp_path / "own.yaml", **settings}
    size = " parameters" if variant.startswith("tied") else " of them in matrix products"
    assert f"{size}\n         {variant}\n" in planned(store, tmp_path, capsys, plan_steps=0, **settings)


@pytest.mark.parametrize("preset", sorted((REPOSITORY / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_store_overrides_the_vocab_size_of_a_preset(store, tmp_path, capsys, preset):
    arguments = flags(config=preset, data=store.folder, output_dir=tmp_path / "run", plan_steps=0)
    train_accelerate.main([*arguments, "--plan"])
    output = capsys.readouterr().out
    assert ", vocabulary 300, " in output
    size = yaml.safe_load(preset.read_text()).get("vocab_size")
    line = f"\n         vocab_size is 300, from the data; the value {size or 0:,} in the YAML file has no effect.\n"
    assert (line in output) is (size is not None)


def test_problems_of_every_kind_are_reported_together(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "own.yaml").write_text("n_embd: 100\nn_head: 3\nlearning_rat: 1\nsave_steps: 0\n")
    settings = {"config": tmp_path / "own.yaml", "output_dir": tmp_path / "run", "n_positions": 8192}
    wrong = {"tokens_per_step": 100, "vocab_size": 301, "mixed_precision": "fp16", "warmup_steps": "x"}
    error = error_of(train_accelerate.main, flags(data=store.folder, **settings, **wrong))
    problems = [
        "--warmup_steps: invalid int value: 'x'",
        f"{tmp_path}/own.yaml: Unknown key learning_rat. Did you mean learning_rate",
        f"save_steps in {tmp_path}/own.yaml is 0",
        "mixed_precision is fp16, which needs a GPU",
        f"vocab_size is 301, but the vocabulary of {store.folder} has 300",
        f"{store.metadata.train.tokens:,} tokens, fewer than one context of 8192",
        "n_embd 100 is not divisible by n_head 3",
        "tokens_per_step 100 is not a multiple of 8192 (context 8192 x 1 process); the nearest are 8192",
    ]
    for problem, line in zip(problems, error.splitlines(), strict=True):
        assert problem in line
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_problems_are_reported_before_a_text_is_tokenized(tmp_path, capsys):
    (tmp_path / "my.txt").write_text(prose(1))
    settings = TINY | {"data": tmp_path / "my.txt", "output_dir": tmp_path / "run"}
    settings |= {"learning_rate": -1, "vocab_size": 10}
    for planned in ({}, {"plan": "true"}, {"plan": "true", "plan_device": "t4-16gb", "mixed_precision": "bf16"}):
        reset_accelerate()
        problems = error_of(train_accelerate.main, flags(**settings | planned)).splitlines()
        assert [line.split()[0] for line in problems][:2] == ["learning_rate", "vocab_size"]
        assert "learning_rate is -1.0; it must be above 0 and at most 100." in problems
    assert "mixed_precision is bf16, which a T4 does not support; use fp16 or auto." in problems
    assert capsys.readouterr().out == ""


def test_plan_gives_advice(store, tmp_path, capsys):
    settings = {"learning_rate": 0.5, "plan_steps": 0, "max_steps": 3, "attn_pdrop": 0.1}
    assert "Validations" not in planned(store, tmp_path, capsys, **settings)  # the last one is always complete
    output = planned(store, tmp_path, capsys, **settings, eval_steps=1)
    assert "attn_pdrop is 0.1, so attention uses PyTorch's math kernel, which stores all scores, instead" in output
    about = [line.split()[1] for line in output.splitlines() if line.startswith("Advice:")]
    assert about == ["torch_compile", "attn_pdrop", "learning_rate", "warmup_steps", "Validations"]
    assert "Time:    not measured, because --plan_steps is 0." in output


def test_advice_is_possible_on_the_device(store, tmp_path, capsys, monkeypatch):
    for choice in ("false", "auto"):
        monkeypatch.setattr("training.budget.forecast.setup_of", lambda config: Setup("no", False, "sdpa"))
        output = planned(store, tmp_path, capsys, plan_device="t4-16gb", torch_compile=choice)
        assert ("torch_compile is off; " in output) is (choice == "false")
        assert "mixed_precision is no; auto computes in half precision" in output
    monkeypatch.undo()
    monkeypatch.setattr("training.budget.forecast.uses_mps", lambda: True)  # whose kernels PyTorch does not report
    assert "attn_pdrop is 0.1" not in planned(store, tmp_path, capsys, plan_steps=0, attn_pdrop=0.1)


@pytest.mark.skipif(bool(compilation._missing_to_compile()), reason="needs a C++ compiler")
def test_a_short_run_on_a_cpu_is_not_compiled_by_default(store, tmp_path, capsys):
    note = "torch.compile is off: for so few steps, compiling would take longer than it saves."
    long = 10**8
    for steps, flag, compiles in ((6, "auto", False), (long, "auto", True), (6, "true", True), (long, "false", False)):
        output = planned(store, tmp_path, capsys, max_steps=steps, torch_compile=flag, plan_steps=0)
        assert (", compiled, " in output) is compiles
        assert (note in output) is (flag == "auto" and not compiles)
        assert ("torch_compile is off; " in output) is (flag == "false")


def test_times_due_matches_the_run():
    """10 steps of 2 sequences over 8 windows are two and a half epochs, and of 5 six and a quarter, of which the last
    step ends the sixth."""
    order = WindowOrder(16 * 9 + 1, 16, seed=0)
    assert order.windows == 8
    cases = [("steps", 3, 2, 4), ("steps", 5, 2, 2), ("steps", 100, 2, 1)]
    for strategy, every, sequences, times in [*cases, ("epoch", 1, 2, 3), ("epoch", 1, 5, 6), ("no", 1, 2, 1)]:
        plan = Plan(None, BatchPlan(16, sequences, 1, 1), order, 10, None, None, 0, DataPosition())
        assert sum(plan.is_due(strategy, every, step) for step in range(1, 11)) == times
        assert times_due(plan, strategy, every) == times


def test_a_changed_batch_trains_the_tokens_that_are_left():
    """Of 8 windows of 16 tokens, 4 steps of 1 window are done."""
    batches, epoch = BatchPlan(16, 2, 1, 1), LengthArguments(num_train_epochs=1.0)
    for length, steps in ((epoch, 6), (LengthArguments(max_train_tokens=256), 10), (LengthArguments(max_steps=5), 5)):
        assert steps_of(length, batches, 8, DataPosition(step=4, tokens=64, sample=4)) == steps
    assert steps_of(epoch, batches, 8, DataPosition(step=2, tokens=64, sample=4)) == 4
    # Two steps on another text, then two more on this one, of which a rollback skipped the samples 1 and 2.
    assert steps_of(epoch, batches, 8, DataPosition(step=2, tokens=64)) == 6
    assert steps_of(epoch, batches, 8, DataPosition(step=3, tokens=96, sample=4, passed_over=((1, 3),))) == 6


def test_the_model_of_a_depth_is_not_checked_with_the_quickstarts_width(tmp_path):
    (text := tmp_path / "text.txt").write_text("words")
    read_config(flags(data=text, depth=12, n_head=12), check)
    (budget := tmp_path / "budget.yaml").write_text("budget: 10m\nmax_steps: 50\nadam_epsilon: 1.0e-9\n")
    assert not read_config(flags(data=text, config=budget)).is_resolved
