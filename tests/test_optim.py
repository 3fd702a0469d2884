import re
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from safetensors.torch import load_file

from conftest import MODERN, MODERN_RUN, REPOSITORY, assert_user_error
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.checkpoints.loading import load_own_model
from training.config import read_config
from training.step import optim
from training.step.muon import momentum_at, orthogonalize
from training.step.optim import (
    OptimArguments,
    build_optimizer,
    load_moments,
    schedule,
    second_target_weight,
    set_rates,
    with_defaults,
)

OPTIMIZER_FILE = "training_state/optimizer.safetensors"
COSINE = OptimArguments(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (100, 0.1)])
def test_cosine_schedule_with_warmup_at_known_steps(step, rate):
    assert schedule(step, 15, COSINE) == pytest.approx(rate, abs=1e-12)


def test_linear_and_constant_schedules_and_a_minimum_above_the_peak():
    linear = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=0, lr_scheduler_type="linear")
    assert [schedule(step, 5, linear) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2, lr_scheduler_type="constant")
    assert [schedule(step, 5, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule(0, 1, OptimArguments(learning_rate=1.0, warmup_steps=0)) == 1.0  # a run of one step
    assert list(OptimArguments("adamw", 1e-3, min_learning_rate=1e-3).problems()) == []
    reference = "min_learning_rate is 0.002; it must be between 0 and learning_rate, 0.001."
    assert list(OptimArguments("adamw", 1e-3, min_learning_rate=2e-3).problems()) == [reference]


def test_warmup_stable_decay_is_constant_and_then_linear():
    stable = OptimArguments(learning_rate=1.0, min_learning_rate=0.0, lr_scheduler_type="warmup_stable_decay")
    stable.warmup_steps, stable.cooldown_fraction = 2, 0.5
    assert [schedule(step, 10, stable) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    # A longer run has the same rates up to the cooldown of the shorter one.
    assert [schedule(step, 20, stable) for step in range(10)] == [0.5] + 9 * [1]


def test_the_weight_of_second_targets_falls_to_zero_at_60_percent_of_the_steps():
    arguments = OptimArguments(second_target_weight=0.3)
    weights = [second_target_weight(step, 10, arguments) for step in range(10)]
    assert weights == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0, 0, 0, 0])
    arguments.second_target_steps = 3
    weights = [second_target_weight(step, 10, arguments) for step in range(5)]
    assert weights == pytest.approx([0.3, 0.2, 0.1, 0, 0])
    assert second_target_weight(0, 10, OptimArguments()) is None
    assert second_target_weight(0, 10, OptimArguments(second_target_weight=0.0)) is None


CPU = torch.device("cpu")
SIZE = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}


def test_groups_of_parameters_have_their_own_rate_and_decay():
    def groups(optimizer, **fields):
        model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE | fields))
        names = {parameter: name.removeprefix("transformer.") for name, parameter in model.named_parameters()}
        arguments = OptimArguments(optimizer, 0.02, 0.3, 0.004, weight_decay=0.05)
        groups_by_name = {
            names[p]: (group["rule"], group["initial_lr"], group["weight_decay"])
            for group in build_optimizer(model, arguments, CPU).param_groups
            for p in group["params"]
        }
        assert groups_by_name.keys() == set(names.values())
        return groups_by_name

    for name, groups_by_name in groups("muon").items():
        is_matrix = name.startswith("h.") and name.endswith("weight") and "ln" not in name
        reference = ("muon", 0.02, 0.05) if is_matrix else ("adam", 0.004, 0.0)
        assert groups_by_name == (("adam", 0.3, 0.0) if name == "wte.weight" else reference), name
    assert groups("muon", tie_word_embeddings=True).keys().isdisjoint({"lm_head.weight"})
    modern = groups("muon", **MODERN)
    assert [name for name, group in modern.items() if group[0] == "adam"] == ["wte.weight", "lm_head.weight"]
    adamw = groups("adamw")
    assert adamw["wte.weight"] == adamw["wpe.weight"] == ("adam", 0.3, 0.05)
    assert adamw["h.0.mlp.c_fc.weight"] == ("adam", 0.02, 0.05)
    assert adamw["h.0.mlp.c_fc.bias"] == ("adam", 0.02, 0.0)


def reference_update(gradients, step_of_momentum):
    """Nesterov momentum, then five Newton-Schulz steps, of one matrix, as in Jordan et al. 2024."""
    buffer = torch.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients):
        mu = step_of_momentum(step)
        buffer = mu * buffer + (1 - mu) * gradient
    X = (1 - mu) * gradient + mu * buffer
    X = X / X.norm()
    for _ in range(5):
        A = X @ X.T if X.shape[0] <= X.shape[1] else X.T @ X
        B = -4.7750 * A + 2.0315 * A @ A
        X = 3.4445 * X + (B @ X if X.shape[0] <= X.shape[1] else X @ B)
    return X * max(1, X.shape[0] / X.shape[1]) ** 0.5


def test_muon_updates_each_matrix_as_if_alone_and_the_fused_projection_as_three():
    torch.manual_seed(0)
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**SIZE, **MODERN))
    optimizer = build_optimizer(model, OptimArguments("muon", 0.02, weight_decay=0.5), CPU)
    start, gradients = {name: p.detach().clone() for name, p in model.named_parameters()}, {}
    for step in range(2):
        set_rates(optimizer, step, 0.0 if step == 0 else 0.5)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            gradients.setdefault(name, []).append(parameter.grad)
        optimizer.step()
    for name, parameter in model.named_parameters():
        if ".h." not in name:
            continue
        parts = zip(*(gradient.chunk(3 if "c_attn" in name else 1) for gradient in gradients[name]), strict=True)
        update = torch.cat([reference_update(part, momentum_at) for part in parts])
        reference = start[name] * (1 - 0.01 * 0.5) - 0.01 * update
        torch.testing.assert_close(parameter, reference, rtol=1e-4, atol=1e-6, msg=name)


def test_orthogonalized_matrices_have_singular_values_near_one():
    for precision, shape in ((torch.float32, (2, 8, 32)), (torch.bfloat16, (3, 16, 48))):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalize(matrices, precision).float())
        assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonalize(torch.zeros(1, 4, 4), torch.float32).any()
    assert [momentum_at(step) for step in (0, 150, 300, 9999)] == pytest.approx([0.85, 0.9, 0.95, 0.95])


def test_defaults_follow_the_optimizer_unless_a_flag_or_a_named_file_sets_them(tmp_path):
    def read(*flags):
        return read_config(["--data", str(tmp_path), *flags]).optim

    mine = "learning_rate: 0.005\nembedding_learning_rate: null\nn_embd: 192\ntokens_per_step: 2097152\n"
    (tmp_path / "mine.yaml").write_text(mine)
    adamw, muon = read("--optimizer", "adamw"), read()  # of the quickstart, width 128
    assert (adamw.learning_rate, adamw.lr_scheduler_type, adamw.warmup_steps) == (6e-4, "cosine", 100)
    rates = (muon.learning_rate, muon.embedding_learning_rate, muon.head_learning_rate)
    assert rates == pytest.approx((0.02, 0.7348, 0.0098), rel=1e-3)
    assert (muon.lr_scheduler_type, muon.weight_decay, muon.warmup_steps) == ("warmup_stable_decay", 0.13, 0)
    widths = [read_config(["--data", str(tmp_path), "--n_embd", width]).model for width in ("128", "512")]
    assert [model.initializer_range for model in widths] == [0.051, 0.0255]  # 0.577 / sqrt(n_embd)
    settings = read_config(["--data", str(tmp_path), "--n_embd", "512"]).settings
    assert settings.differences({**settings.values, "initializer_range": 0.051}) == []  # a run of an older version
    mine = read("--optimizer", "muon", "--config", str(tmp_path / "mine.yaml"), "--weight_decay", "0.1")
    assert (mine.learning_rate, mine.weight_decay, mine.embedding_learning_rate) == (0.005, 0.1, 0.016)
    large = with_defaults(OptimArguments("muon"), set(), 2**21, GPT2ScratchConfig(**MODERN))
    rates = (large.learning_rate, large.embedding_learning_rate, large.head_learning_rate)
    assert rates == pytest.approx((0.04, 0.6, 0.008))


def test_muon_saves_its_momentum_and_adamw_does_not_resume_from_it(train, tmp_path):
    muon = MODERN_RUN | {"optimizer": "muon", "tie_word_embeddings": False}
    checkpoint = train(tmp_path / "run", max_steps=3, **muon) / "checkpoints" / "step_00000003"
    moments = {(".h." in name, name.split("/")[1]) for name in load_file(checkpoint / OPTIMIZER_FILE)}
    assert moments == {(True, "momentum_buffer"), (False, "step"), (False, "exp_avg"), (False, "exp_avg_sq")}
    sentence = "optimizer changed from muon to adamw, so its moments do not fit; start a new run"
    settings = muon | {"optimizer": "adamw", "resume_from_checkpoint": checkpoint}
    assert_user_error(sentence, train, tmp_path / "other", **settings)


def test_loaded_moments_are_no_map_of_the_file(run):
    model, path = load_own_model(run / "model"), run / "checkpoints" / "step_00000003" / OPTIMIZER_FILE
    optimizer = build_optimizer(model, OptimArguments(), torch.device("cpu"))
    del optimizer.defaults["fused"]  # as of RMSprop and others
    load_moments(path, model, optimizer)
    assert optimizer.state[model.lm_head.weight]["exp_avg"].any()
    assert str(path) not in [mapped.path for mapped in psutil.Process().memory_maps()]


def test_the_documented_change_adds_an_optimizer(monkeypatch):
    """The diff of docs/customize.md fits the code, and its optimizer trains and keeps its state."""
    page = (REPOSITORY / "docs" / "customize.md").read_text(encoding="utf-8")
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = Path(optim.__file__).read_text(encoding="utf-8")
    for hunk in diff.split("     ...\n"):
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in marks) for marks in (" -", " +")
        )
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    changed = ModuleType("changed")
    monkeypatch.setitem(sys.modules, "changed", changed)  # where dataclasses look for types
    exec(compile(code, "changed", "exec"), vars(changed))
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16))
    optimizer = changed.build_optimizer(model, changed.OptimArguments("sgd", 0.1), torch.device("cpu"))
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    moments = dict(changed.named_moments(model, optimizer))
    assert moments.keys() == changed.moment_shapes(model, optimizer).keys()
    assert all(name.endswith("/momentum_buffer") for name in moments)
