"""Choice of model size, tokens, batch and rates for a budget (--budget) or a number of layers (--depth): see docs/budget.md."""

import math
import time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any

import psutil
from accelerate import Accelerator

from common.errors import UserError, counted
from common.settings_file import read_yaml
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store.store import TokenStore
from training.budget import scaling
from training.budget.throughput import AFTER_VALIDATION, SCORING, Throughput, measure_speed
from training.checkpoints.backup import earlier_run
from training.checkpoints.metrics import read_events
from training.checkpoints.status import hours
from training.config import CHOSEN, LENGTHS, PRESETS, TrainConfig
from training.data.run_data import open_store
from training.log.speed import flops_per_token
from training.preflight import available_memory, make_plan
from training.runtime.budget import price_of
from training.runtime.console import printer
from training.runtime.device import Setup
from training.runtime.distributed import on_main
from training.runtime.hardware import FILLS_A_GPU, MFU_OF_OTHERS, RENTALS, device_name, peak_flops, reported_mfu
from training.runtime.restart import restarted
from training.step.model import ModelArguments, model_config
from training.step.optim import with_defaults
from training.step.size import size_of

PRESET_OF = {"gpt2": PRESETS / "gpt2.yaml", "modern": PRESETS / "gpt2_modern.yaml"}
# Settings that a family takes from its preset.
ARCHITECTURE = {"activation_function", "normalization", "rope_theta", "use_bias", "tie_word_embeddings"}
ARCHITECTURE |= {"layer_norm_epsilon", "optimizer"}
WIDTH = 64  # per layer, as in nanochat and in GPT-2 small
DEEPEST = 100
VALIDATIONS = 5  # of a run, each with a checkpoint; the oldest of the last four is from the end of the stable phase
SCORED_TOKENS = 32_768  # of a validation before the last
COMPILED_SPEED = 1.4  # relative to steps without compilation, measured on two cores for 2 and 3 layers
# Seconds until the first step is done, without and with compilation, and to compile the validation: measured on two cores.
FIRST_STEP, COMPILED_FIRST_STEP, VALIDATION_GRAPH = 3.0, 30.0, 12.0
PROBE_SECONDS = 1.0
TOLERANCE = 1.1  # of `scaling.deficit`: a budget may be too small for another layer and slightly too large without it
BYTES_PER_PARAMETER = 18  # at most: weights, gradients and two moments in fp32, and weights in half precision
MOST_PROBES = 3
LONGEST = 100 * 365 * 86_400  # seconds of a budget


@dataclass(frozen=True)
class Option:
    """A model with its tokens."""

    settings: dict[str, Any]  # by flag name: those that were chosen, and given ones of the same kind
    model: GPT2ScratchConfig
    parameters: int  # weights in matrix products
    tokens: float
    unique: int  # tokens of the text
    family: str
    seconds: float | None  # estimated for the whole run

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique

    @property
    def flops(self) -> float:
        return self.tokens * flops_per_token(self.model)

    @property
    def deficit(self) -> float:
        ratio = scaling.best_ratio(self.family, self.parameters)
        return scaling.deficit(self.parameters, self.tokens, self.unique, ratio)

    @property
    def outside(self) -> list[scaling.Rule]:
        """Rules outside of the range in which they were measured."""
        rules = (scaling.RATIO_RULES[self.family], scaling.BATCH_RULE, scaling.EPOCHS_RULE)
        values = {"N": self.parameters, "D": self.tokens}
        return [rule for rule in rules if not rule.lowest <= values[rule.quantity] <= rule.highest]


@dataclass(frozen=True)
class Sizing:
    """The choice for a run, with its alternatives."""

    option: Option
    rows: dict[str, Option]  # for half the budget, the budget and twice the budget, if they are possible
    verdict: str  # comparison of the budget with the need; empty without a time limit
    total: float | None  # seconds from the start of the process to the end; None: no time limit
    deadline: float | None  # the end, as a time of the monotonic clock
    tokenized: float  # seconds of tokenization, which do not count
    speed: Throughput | None  # None without a time limit


def resolve(
    config: TrainConfig, accelerator: Accelerator, setup: Setup, stores: list[TokenStore] | None = None
) -> tuple[TrainConfig, Sizing | None]:
    """Return the configuration with the settings that were not given, and how they were chosen, or None if nothing is left to choose.
    Raise a `UserError` if the budget is too small, too large for the text, or in a unit without a known price.

    `stores`: the token store, and the one to measure speed with; by default both are the store of the configuration, which is
    created. Called by every process.
    """
    if not config.budget.chooses:
        return config, None
    (earlier, events), values = on_main(accelerator, lambda: _earlier(config)), {}
    repeats = config.budget.budget is not None and earlier.get("budget") == config.budget.budget
    if repeats:
        values = {name: earlier[name] for name in CHOSEN & earlier.keys() - (config.given - LENGTHS)}
        config = config.with_settings(values, "file")
    if "max_steps" in values:
        return config.with_settings(dict.fromkeys(LENGTHS - {"max_steps"})), None
    if config.is_resolved:
        return config, None
    began = time.monotonic()
    stores = stores or 2 * [open_store(config.recipe, printer(accelerator))]
    tokenized = time.monotonic() - began
    continues = repeats or config.run.resume_from_checkpoint is not None
    spent = on_main(accelerator, lambda: seconds_spent(events if continues else []) - tokenized)
    sizing = Sizer(config, *stores, accelerator, setup).choose(spent, tokenized)
    return config.with_settings(sizing.option.settings), sizing


class Sizer:
    """Search for the best option of a configuration on a device."""

    def __init__(
        self, config: TrainConfig, store: TokenStore, sample: TokenStore, accelerator: Accelerator, setup: Setup
    ):
        self.config, self.store, self.sample, self.accelerator, self.setup = config, store, sample, accelerator, setup
        self.given = {name: value for name, value in config.flat().items() if name in CHOSEN & config.given}
        is_whole = "n_layer" in config.given - config.flags  # the file has a model
        default = "gpt2" if is_whole and config.optim.optimizer == "adamw" else "modern"
        self.family = config.budget.family or default
        content = {} if is_whole else read_yaml(PRESET_OF[self.family])
        self.architecture = {name: content[name] for name in ARCHITECTURE & content.keys()}
        depth = config.budget.depth or self.given.get("n_layer") or self.given.get("n_embd", 0) // WIDTH
        self.depths = [depth] if depth else range(1, DEEPEST + 1)
        self.memory = on_main(accelerator, lambda: available_memory(accelerator, config.cost.plan_device, 0))
        self.unique, self.paces, self.known = store.metadata.train.tokens, {}, ""
        self.left: float | None = None  # seconds of the budget that are left; None: no time limit
        cost, name = config.cost, device_name(accelerator.device)
        self.price = price_of(name, cost.plan_device, cost.hourly_price, accelerator.num_processes)

    def choose(self, spent: float, tokenized: float) -> Sizing:
        """Return the choice. `spent`: seconds of the budget that have passed, which do not include those of tokenization."""
        amount, total, deadline = self.config.budget.amount, None, None
        model = self._model(self.depths[0])
        if (needed := self._needed(model)) > self.memory:
            raise UserError(
                f"A model with {counted(model.n_layer, 'layer')} of width {model.n_embd} needs up to {needed / 1e9:,.0f} GB for weights, gradients and "
                f"moments, but {self.memory / 1e9:,.0f} GB are free; use fewer layers, a smaller width, or another --plan_device."
            )
        if amount is not None and amount.unit != "flops":
            total = self.price.seconds(amount)
            if total > LONGEST:
                given = f" and hourly_price is {self.config.cost.hourly_price:g}" if amount.unit == "usd" else ""
                raise UserError(
                    f"budget is {amount}{given}, more than 100 years; use a smaller one, or a time such as 3h."
                )
            self.left = total if self.config.cost.plan else total - spent
            deadline = time.monotonic() + self.left
            self._find_pace()
        option = self._best(1.0)
        if option is None:
            raise UserError(self._too_small())
        self._check_text(option)
        rows = {"this": option}
        if amount is not None:
            rows = {"half": self._best(0.5), **rows, "twice": self._best(2.0)}
        rows = {name: row for name, row in rows.items() if row is not None}
        verdict, speed = "", None
        if total is not None:
            needed = self._length(option.settings["tokens_per_step"]) or option.tokens
            verdict = self.price.verdict(amount, self._seconds(option.model, needed))
            speed = Throughput(self._pace(option.model), self.known)
        return Sizing(option, rows, verdict, total, deadline, tokenized, speed)

    def _needed(self, model: GPT2ScratchConfig) -> float:
        """Return the bytes of weights, gradients and moments in each process."""
        shards = self.accelerator.num_processes if self.setup.shards(self.accelerator) else 1
        return BYTES_PER_PARAMETER * size_of(model).parameters / shards

    def _options(self, factor: float) -> list[Option]:
        """Return the options for `factor` times the budget that have a step and fit into memory."""
        depths = takewhile(lambda depth: self._needed(self._model(depth)) <= self.memory, self.depths)
        return [option for depth in depths if (option := self._option(depth, factor)) is not None]

    def _best(self, factor: float) -> Option | None:
        """Return the option with the lowest loss for `factor` times the budget, if possible with few epochs, or None."""
        options = self._options(factor)
        few = [option for option in options if option.epochs <= scaling.MOST_EPOCHS]
        return min(few or options, key=lambda option: option.deficit, default=None)

    def _option(self, depth: int, factor: float) -> Option | None:
        model, amount = self._model(depth), self.config.budget.amount
        N = size_of(model).products
        if self.left is not None:
            tokens = self._pace(model) * (self.left * factor - self._seconds(model, 0))
        elif amount is not None:
            tokens = factor * amount.number / flops_per_token(model)
        else:
            tokens = self._length(0) or scaling.best_ratio(self.family, N) * N
        tokens = max(1, min(tokens, self._length(0) or tokens))
        batch = self._batch(model, tokens)
        limit = self._length(batch)
        tokens = min(tokens, limit or tokens)
        if tokens < batch:
            return None
        steps = int(tokens / batch)
        settings = self._shape(depth) | self._recipe(model, batch, steps) | self.given | {"max_steps": steps}
        settings |= {"num_train_epochs": None, "max_train_tokens": None}
        seconds = None
        if self.left is not None:
            seconds = self._seconds(model, steps * batch)
            settings["max_train_tokens"] = limit and int(limit)  # for a resumed run, while its length is an estimate
        return Option(settings, model, N, steps * batch, self.unique, self.family, seconds)

    def _batch(self, model: GPT2ScratchConfig, tokens: float) -> int:
        """Return the tokens per step of a run that trains on `tokens`."""
        unit = model.n_positions * self.accelerator.num_processes
        return self.given.get("tokens_per_step") or max(1, scaling.best_batch(tokens) // unit) * unit

    def _model(self, depth: int) -> GPT2ScratchConfig:
        return model_config(ModelArguments(**self._shape(depth)), self.store.metadata.vocab_size)

    def _shape(self, depth: int) -> dict[str, Any]:
        """Return the settings of a model with `depth` layers."""
        width, is_modern = self.given.get("n_embd", WIDTH * depth), self.family == "modern"
        has_large_heads = is_modern and depth >= 12 and depth % 2 == 0  # of size 128, as in the presets
        shape = self.architecture | {
            "n_layer": depth,
            "n_head": depth // 2 if has_large_heads else depth,
            "n_embd": width,
            "n_positions": scaling.best_context(width),
            "initializer_range": round((0.577 if is_modern else 0.554) / math.sqrt(width), 4),
        }
        shape |= {"attention_scale": 0.12} if has_large_heads else {}
        return vars(self._part("model", shape | self.given))

    def _recipe(self, model: GPT2ScratchConfig, batch: int, steps: int) -> dict[str, Any]:
        """Return batch, rates, schedule, and the steps between validations and checkpoints."""
        every = max(1, steps // VALIDATIONS)
        recipe = {"tokens_per_step": batch, "eval_steps": every, "save_steps": every}
        recipe |= {"save_total_limit": VALIDATIONS - 1, "max_eval_samples": max(1, SCORED_TOKENS // model.n_positions)}
        recipe |= {"logging_steps": max(1, min(50, steps // 50)), "lr_scheduler_type": "warmup_stable_decay"}
        rates: dict[str, Any] = {}
        if self._part("optim", self.architecture | self.given).optimizer == "adamw":
            rates = {"learning_rate": scaling.adam_rate(model.n_embd), "min_learning_rate": 0.0}
            rates["warmup_steps"] = round(0.05 * steps)
        given = recipe | rates | self.architecture | self.given
        optim = with_defaults(self._part("optim", given), set(given), batch, model)
        rates = vars(optim) | {
            "weight_decay": scaling.weight_decay(optim.optimizer, optim.learning_rate, batch, steps * batch)
        }
        return recipe | {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in rates.items()}

    def _part(self, name: str, settings: dict[str, Any]) -> Any:
        """Return a part of the configuration with its defaults, except for `settings`."""
        kind = type(getattr(self.config, name))
        return kind(**{key: value for key, value in settings.items() if key in kind.__dataclass_fields__})

    def _length(self, batch: int) -> float | None:
        """Return the given number of training tokens, or None. `batch`: tokens per step."""
        epochs, steps = self.given.get("num_train_epochs"), self.given.get("max_steps")
        return self.given.get("max_train_tokens") or (epochs and epochs * self.unique) or (steps and steps * batch)

    def _seconds(self, model: GPT2ScratchConfig, tokens: float) -> float:
        """Return the estimated seconds of a run that trains on `tokens`."""
        compilation = COMPILED_FIRST_STEP + VALIDATION_GRAPH if self.setup.torch_compile else FIRST_STEP
        whole = self.store.metadata.val.tokens
        scored = whole + (VALIDATIONS - 1) * min(SCORED_TOKENS, whole)
        return compilation + VALIDATIONS * AFTER_VALIDATION + (tokens + SCORING * scored) / self._pace(model)

    def _pace(self, model: GPT2ScratchConfig) -> float:
        """Return tokens per second of all devices, by the FLOP/s measured for the nearest number of layers."""
        nearest = min(self.paces, key=lambda depth: abs(depth - model.n_layer))
        return self.paces[nearest] / flops_per_token(model)

    def _find_pace(self) -> None:
        """Find FLOP/s: from published results for a model that fills a known GPU, otherwise from a few steps without compilation."""
        plan_device, processes = self.config.cost.plan_device, self.accelerator.num_processes
        device = RENTALS[plan_device].datasheet if plan_device else device_name(self.accelerator.device)
        if (peak := peak_flops(device, self.setup.mixed_precision)) is not None:
            _, usual, _ = reported_mfu(device) or MFU_OF_OTHERS
            self.paces = {0: usual * peak * processes}
            self.known = f"{usual:.0%} of the peak of {device}, as others report"
            option = self._best(1.0)
            if option is not None and option.parameters >= FILLS_A_GPU:
                return
            if plan_device:
                raise UserError(
                    f"plan_device is {plan_device}, but the best model for the budget is smaller than {FILLS_A_GPU / 1e6:.0f}M parameters: "
                    f"no speed is published for it; use a larger --budget, or plan without --plan_device on the device itself."
                )
        printer(self.accelerator)("Measuring the speed of this device in a few steps ...")
        self.paces, depth, tokens = {}, min(2, self.depths[-1]) if len(self.depths) > 1 else self.depths[0], 1
        while depth not in self.paces and len(self.paces) < MOST_PROBES:
            pace = self._probe(depth, tokens)
            self.paces[depth] = on_main(self.accelerator, partial(float, pace))
            option = self._best(1.0)
            depth, tokens = (option.model.n_layer, option.tokens) if option is not None else (depth, tokens)
        self.known = "measured over a few steps without compilation"

    def _probe(self, depth: int, tokens: float) -> float:
        """Measure FLOP/s of all devices for a model with `depth` layers and the batch for `tokens`."""
        model = self._model(depth)
        settings = self._shape(depth) | self._recipe(model, self._batch(model, tokens), steps=1000)
        config, eager = self.config.with_settings(settings), replace(self.setup, torch_compile=False)
        plan = make_plan(config, self.sample, self.sample.load_tokenizer(), self.accelerator, eager)
        speed = measure_speed(config, plan, eager, self.accelerator, self.sample, steps=2, seconds=PROBE_SECONDS)
        gain = COMPILED_SPEED if self.setup.torch_compile else 1.0
        return gain * speed.tokens_per_second * flops_per_token(model)

    def _too_small(self) -> str:
        model = self._model(self.depths[0])
        batch = self._batch(model, 1)
        if (length := self._length(batch)) is not None and length < batch:
            given = " and ".join(f"{name} is {self.given[name]}" for name in LENGTHS if self.given.get(name))
            return f"{given}, less than one step of {batch:,} tokens; use more, or a smaller --tokens_per_step."
        if self.left is None:
            return f"budget is {self.config.budget.amount}, less than one step of the smallest model; use a larger one."
        return (
            f"budget is {self.config.budget.amount}, of which {max(0.0, self.left):.0f} s are left after startup, but the first step of the smallest model, "
            f"{VALIDATIONS} validations and checkpoints take about {self._seconds(model, batch):.0f} s; use a larger one."
        )

    def _check_text(self, option: Option) -> None:
        """Raise a `UserError` if a smaller budget, with at most `MOST_EPOCHS` epochs, would give a lower loss than the whole budget."""
        if self.given.keys() & LENGTHS:
            return
        limited = [replace(one, tokens=min(one.tokens, one.unique * scaling.MOST_EPOCHS)) for one in self._options(1.0)]
        best = min(limited, key=lambda one: one.deficit)
        if option.epochs <= scaling.MOST_EPOCHS and option.deficit < TOLERANCE * best.deficit:
            return
        amount, most = self.config.budget.amount, "a smaller depth"
        if amount is not None:
            needed = best.tokens * flops_per_token(best.model)
            if self.left is not None:
                needed = amount.number * self._seconds(best.model, best.tokens) / self.left
            most = f"a budget of at most {needed:.2g}{amount.unit}"
        raise UserError(
            f"The text has {self.unique:,} tokens, too few for the {'depth' if amount is None else 'budget'}: more than "
            f"{scaling.MOST_EPOCHS} epochs help little, and a model with {best.parameters / 1e6:,.1f}M parameters in matrix products needs no "
            f"more than {best.tokens:,.0f} tokens; add text, or use {most}."
        )


def _earlier(config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings and events of the run that this command continues, from its folder or its backup."""
    if config.run.overwrite_output_dir and not restarted().get("has_begun"):
        return {}, []
    folder = earlier_run(config.run.folder, config.backup.backup_dir)
    return ({}, []) if folder is None else (read_yaml(folder.config), read_events(folder.events))


def seconds_spent(events: list[dict[str, Any]]) -> float:
    """Return the seconds since the start of this process, and of the earlier processes with these events."""
    created = psutil.Process().create_time()
    earlier = [event for event in events if datetime.fromisoformat(event["time"]).timestamp() < created]
    return time.time() - created + 3600 * hours(earlier)
