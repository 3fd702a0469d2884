"""Choice of vocabulary, model size, tokens, batch and rates for a budget or a number of layers (docs/budget.md)."""

import math
import time
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from accelerate import Accelerator

from common.command_line import fill
from common.errors import Problems, UserError, counted
from common.settings_file import read_yaml
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.corpus.units import Corpus
from tokenizer.store.store import TokenStore
from training.budget import scaling
from training.budget.earlier import EarlierRun
from training.budget.throughput import Throughput, assumed_speed, measure_speed, validation_tokens
from training.config import CHOICES, LENGTHS, PRESETS, TrainConfig
from training.log.speed import flops_per_token
from training.plan.memory import USABLE
from training.preflight import available_memory, make_plan, open_data
from training.runtime.console import printer
from training.runtime.device import Setup
from training.runtime.distributed import on_main
from training.runtime.hardware import DEFAULT_MFU, FILLS_A_GPU, RENTALS, device_name, peak_flops, reported_mfu
from training.runtime.price import price_of
from training.step.induction import induction_problems
from training.step.model import ModelArguments, model_config
from training.step.optim import SECOND_TARGET_SHARE, OptimArguments, with_defaults
from training.step.size import size_of

PRESET_OF = {"gpt2": PRESETS / "gpt2.yaml", "modern": PRESETS / "gpt2_modern.yaml"}
# Settings that a family takes from its preset.
ARCHITECTURE = {"activation_function", "normalization", "rope_theta", "use_bias", "tie_word_embeddings"}
ARCHITECTURE |= {"layer_norm_epsilon", "optimizer"}
WIDTH = 64  # per layer, as in nanochat and in GPT-2 small
DEEPEST = 100  # layers
# Settings that `_shortened` chooses for a text.
SHORTENED = {"max_steps", "weight_average", "load_best_model_at_end", "logging_steps", "weight_decay", "warmup_steps"}
SHORTENED |= {"eval_steps", "save_steps", "save_total_limit"}
# Validations of a run whose first step takes no time, each with a checkpoint. The first is in the stable phase. If they
# were more in a run that starts slowly, it would end late.
VALIDATIONS = 5
SCORED_TOKENS = 32_768  # of a validation before the last
# To choose a vocabulary before the text is tokenized: usual bytes per token, and the bytes of a text of unknown size.
BYTES_PER_TOKEN, UNKNOWN_BYTES = 3.5, 1e15
COMPILED_SPEED = 1.4  # relative to steps without compilation, measured on two cores for 2 and 3 layers
# Seconds until the first step is done, by whether steps are compiled: on two cores.
STARTUP = {False: 3.0, True: 12.0}
# FLOP/s of a device, to choose the vocabulary and the model that is measured; others: 3e12
GUESSES = {"cpu": 3e11, "cuda": 5e13}
PROBE_SECONDS = 1.0
BYTES_PER_PARAMETER = 22  # at most: weights, their average, gradients and two moments in fp32, and weights in half
FACTORS = {"half": 0.5, "this": 1.0, "twice": 2.0}  # of the budget, for the table of alternatives


@dataclass(frozen=True)
class Option:
    """A model with its tokens."""

    settings: dict[str, Any]  # by flag name: choices, and the values of flags of the same kind
    model: GPT2ScratchConfig
    tokens: float
    most_tokens: float  # given, or useful with this text
    unique: int  # tokens of the text
    repetition: scaling.Repetition
    family: str
    seconds: float | None  # estimated for the whole run

    @property
    def parameters(self) -> int:
        """Number of weights in matrix products."""
        return size_of(self.model).products

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique

    @property
    def worths(self) -> list[tuple[float, float]]:
        """For each known decay of the value of repeated tokens: value of all tokens in new ones, and value of the last
        epoch relative to the first."""
        pairs, amounts = [], (self.tokens, self.tokens - self.unique)
        for scale in sorted({self.repetition.scale, scaling.REPEATS}):
            worth, previous_worth = (scaling.effective(amount, self.unique, scale) for amount in amounts)
            pairs.append((worth, (worth - previous_worth) / self.unique))
        return pairs

    @property
    def is_limited_by_text(self) -> bool:
        return self.is_limited and self.most_tokens == self.repetition.epochs * self.unique

    @property
    def is_limited(self) -> bool:
        """Whether the text or a given length limits the run, not the budget."""
        return self.most_tokens < self.tokens + self.settings["tokens_per_step"]

    @property
    def published_loss(self) -> tuple[float, float] | None:
        return scaling.expected_loss(self.family, self.parameters, self.tokens)

    @property
    def loss(self) -> tuple[float, float] | None:
        """Lowest and highest expected loss: published, in nats per token, or measured here, in bits per byte. Both laws
        are for text that is hardly repeated, and for a token per parameter or more."""
        flops = self.tokens * flops_per_token(self.model)
        law = self.published_loss or scaling.measured_bits_per_byte(self.family, flops)
        return law if self.parameters <= self.tokens and self.epochs <= scaling.EPOCHS_AS_NEW else None


@dataclass(frozen=True)
class Sizing:
    """The choice for a run, with its alternatives."""

    option: Option
    rows: dict[str, Option]  # by `FACTORS`, if they are possible
    tokenization: float  # its seconds, which do not count
    # Without a time limit, all of these are None.
    total: float | None = None  # seconds from the start of the process to the end
    deadline: float | None = None  # the end, as a time of the monotonic clock
    verdict: str | None = None  # comparison of the budget with the need
    speed: Throughput | None = None


def resolve(
    config: TrainConfig, accelerator: Accelerator, setup: Setup, stores: list[TokenStore] | None = None
) -> tuple[TrainConfig, Sizing | None]:
    """Return the configuration with the settings that were not given, and how a budget or depth chose them, or None.
    Raise a `UserError` if the budget is too small, or in a unit without a known price.

    `stores`: the token store, and the one to measure speed with; by default both are the store of the configuration,
    which is created. Called by every process.
    """
    if not config.budget.chooses:
        return _shortened(config, accelerator, stores), None
    if stores is None:
        config = with_vocabulary(config, accelerator, setup)
    run = on_main(accelerator, lambda: EarlierRun.of(config))
    if repeats := run.is_repeated_by(config):
        has_new_length = bool(config.is_resolved and LENGTHS & config.flags)
        config = run.restore(config, has_length=not has_new_length)
        if "max_steps" in run.settings and not has_new_length:  # the budget has set the length, in place of a given one
            return config.with_settings(dict.fromkeys(LENGTHS - {"max_steps"})), None
    if config.is_resolved:
        return config, None
    continues = repeats or config.run.resume_from_checkpoint is not None
    if continues and not repeats:
        config = run.restore(config)
    require_price(config, accelerator)
    start = time.monotonic()
    stores = stores or 2 * [open_data(config, accelerator)]
    tokenization = time.monotonic() - start
    counted_run = run if continues or run.has_budget_of(config) else replace(run, events=[])
    usage = on_main(accelerator, lambda: counted_run.seconds_spent() - tokenization)
    store, sample = stores
    sizes = store.metadata.vocab_size, store.metadata.train.tokens, store.metadata.val.tokens
    sizing = Sizer(config, accelerator, setup, sizes).choose(usage, tokenization, sample)
    settings = sizing.option.settings
    adds_steps = sizing.deadline is not None and continues and not config.cost.plan  # a plan is of the new steps
    if adds_steps and run.step:
        most_steps = int(sizing.option.most_tokens / settings["tokens_per_step"])
        settings = settings | {"max_steps": max(run.step, min(run.step + settings["max_steps"], most_steps))}
    config = config.with_settings(settings)
    Problems(config.optim.problems()).refuse()
    return config, sizing


def require_price(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise a `UserError`, before the text is tokenized, if the budget is money and the device's price is not known."""
    if (amount := config.budget.amount) is not None and amount.unit != "flops":
        device, cost = on_main(accelerator, lambda: device_name(accelerator.device)), config.cost
        price_of(device, cost.plan_device, cost.hourly_price, accelerator.num_processes).seconds(amount)


def with_vocabulary(config: TrainConfig, accelerator: Accelerator, setup: Setup) -> TrainConfig:
    """Return the configuration with the size of a new tokenizer for the model that a budget or depth will choose, or of
    the run in the folder. Speed and tokens are assumed, because equal commands must build equal stores."""
    if not (config.budget.chooses and config.trains_bpe) or config.has_model_file or "vocab_size" in config.given:
        return config
    if (size := on_main(accelerator, lambda: EarlierRun.of(config).settings.get("vocab_size"))) is not None:
        return config.with_settings({"vocab_size": size}, "file")
    n_bytes = on_main(accelerator, lambda: _bytes_of_text(config))
    sizes = scaling.SMALLEST_VOCABULARY, max(1, int(n_bytes / BYTES_PER_TOKEN)), SCORED_TOKENS
    sizer = Sizer(config, accelerator, setup, sizes)
    return config.with_settings({"vocab_size": on_main(accelerator, sizer.vocabulary)})


def _bytes_of_text(config: TrainConfig) -> float:
    """Return the bytes of the text, estimated for compressed files, or many if a Hub dataset does not state them."""
    corpus = Corpus([config.data.data], config.corpus)
    dataset = corpus.sources[0].hub
    facts = dataset and dataset.pinned().facts
    n_bytes = corpus.text_size if dataset is None else facts and facts.num_bytes
    return min(n_bytes or UNKNOWN_BYTES, config.corpus.limit.bytes)


def _shortened(config: TrainConfig, accelerator: Accelerator, stores: list[TokenStore] | None) -> TrainConfig:
    """Return the configuration with an average of the weights if `data` is repeated, and with fewer steps if those of
    the default file, for its own text, would repeat it too often."""
    if config.sources.get("max_steps") != "quickstart" or "data" not in config.flags:
        return config
    store = stores[0] if stores else open_data(config, accelerator)
    unique, batch = store.metadata.train.tokens, config.batch.tokens_per_step
    longest, optim = config.length.max_steps, config.optim
    steps = min(longest, max(1, int(scaling.WITHOUT_CIRCUIT.epochs * unique / batch)))  # also of a small model with one
    settings = {"weight_average": scaling.average_horizon(steps, steps * batch / unique)}
    settings["load_best_model_at_end"] = steps * batch > unique
    if steps < longest:
        settings |= {"max_steps": steps, "logging_steps": max(1, steps // 30)}
        if optim.optimizer in scaling.TIMESCALES:
            decay = scaling.weight_decay(optim.optimizer, optim.learning_rate, batch, steps * batch)
            settings["weight_decay"] = float(f"{decay:.3g}")
        settings |= dict.fromkeys(("eval_steps", "save_steps"), math.ceil(steps / VALIDATIONS))
        settings["save_total_limit"] = VALIDATIONS
        settings["warmup_steps"] = min(optim.warmup_steps, round(0.05 * steps))
    return config.with_settings({name: value for name, value in settings.items() if name not in config.given})


class Sizer:
    """Search for the best option of a configuration on a device."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, setup: Setup, sizes: tuple[int, int, int]):
        """`sizes` of the text: vocabulary, tokens for training, and tokens for validation."""
        self.config, self.accelerator, self.setup = config, accelerator, setup
        self.vocab_size, self.tokens, self.val_tokens = sizes
        self.given = {name: value for name, value in config.flat().items() if name in CHOICES & config.given}
        is_gpt2 = config.has_model_file and config.optim.optimizer == "adamw" and not config.model.is_modern
        self.family = config.budget.family or ("gpt2" if is_gpt2 else "modern")
        self.is_bpe = self.vocab_size >= scaling.SMALLEST_VOCABULARY  # characters repeat too often to be found again
        content = {} if config.has_model_file else read_yaml(PRESET_OF[self.family])
        self.architecture = {name: content[name] for name in ARCHITECTURE & content.keys()}
        width, heads = self.given.get("n_embd", 0), self.given.get("n_head", 1)
        depth = config.budget.depth or self.given.get("n_layer") or math.ceil(width / WIDTH)
        fitting = [each for each in range(1, DEEPEST + 1) if WIDTH * each % heads == 0]
        self.depths = [depth] if depth else fitting or range(1, DEEPEST + 1)
        batch = self.given.get("tokens_per_step", scaling.SMALLEST_BATCH)
        is_short = (self._length(batch) or 0) <= scaling.CIRCUIT_TOKENS
        has_circuit = self.family == "modern" and self.is_bpe and is_short and not config.run.init_from
        has_circuit &= self.given.get("induction_init", True)
        has_circuit &= not any(induction_problems(self._arguments(self.depths[-1])))  # a model of one layer has none
        self.has_circuit = has_circuit
        self.repetition = scaling.repetition(self.tokens, has_circuit)
        self.memory = on_main(accelerator, lambda: available_memory(accelerator, config.cost.plan_device, 0))
        self.device = on_main(accelerator, lambda: device_name(accelerator.device))  # other machines may have others
        amount, cost = config.budget.amount, config.cost
        self.price = price_of(self.device, cost.plan_device, cost.hourly_price, accelerator.num_processes)
        # Seconds of the budget, and those that are left. None: no time limit.
        self.total = None if amount is None or amount.unit == "flops" else self.price.seconds(amount)
        self.left = self.total
        self.flops, self.mfu, self.source = 0.0, None, ""  # FLOP/s of all devices

    def vocabulary(self) -> int:
        """Return the vocabulary size for the best model at the assumed speed, with any memory."""
        if self.tokens <= scaling.SMALL_TEXT:
            return scaling.SMALLEST_VOCABULARY
        self.memory = math.inf
        if self.total is not None:
            self._assume_speed()
        option = self._best(1.0)
        model = self._model(self.depths[0]) if option is None else option.model
        return scaling.best_vocabulary(size_of(model).block_products, model.n_embd)

    def choose(self, usage: float, tokenization: float, sample: TokenStore) -> Sizing:
        """Return the choice. `usage`: seconds of the budget that have passed, without those of `tokenization`.
        `sample`: the store to measure speed with."""
        model = self._model(self.depths[0])
        if (n_bytes := self._bytes(model)) > self.memory:  # even the smallest model does not fit
            other_device = ", or another --plan_device" * (self.config.cost.plan_device is not None)
            raise UserError(
                f"A model with {counted(model.n_layer, 'layer')} of width {model.n_embd} needs up to "
                f"{n_bytes / 1e9:,.0f} GB for weights, gradients and moments, but {self.memory / 1e9:,.0f} GB are "
                f"free; use fewer layers or a smaller width{other_device}."
            )
        amount, limit = self.config.budget.amount, {}
        if self.total is not None:
            self.left = self.total if self.config.cost.plan else self.total - usage
            limit = {"total": self.total, "deadline": time.monotonic() + self.left}
            self._find_speed(sample)
        factors = FACTORS if amount else {"this": 1.0}
        rows = {name: row for name, factor in factors.items() if (row := self._best(factor)) is not None}
        if (option := rows.get("this")) is None:
            raise UserError(self._too_small())
        if limit:
            tokens = option.most_tokens if LENGTHS & self.given.keys() else option.tokens
            verdict = self.price.verdict(amount, self._seconds(option.model, tokens))
            limit |= {"verdict": verdict, "speed": self._speed(option.model)}
        return Sizing(option, rows, tokenization, **limit)

    def _bytes(self, model: GPT2ScratchConfig) -> float:
        """Return the bytes of weights, gradients and moments in each process."""
        shards = self.accelerator.num_processes if self.setup.shards(self.accelerator) else 1
        return BYTES_PER_PARAMETER * size_of(model).parameters / shards

    def _best(self, factor: float) -> Option | None:
        """Return the option of the lowest loss for `factor` times the budget, of those that have a step, fit into
        memory, and are not too large for the text, or None."""
        largest = max(self.repetition.parameters * self.tokens, size_of(self._model(self.depths[0])).products)

        def is_possible(depth: int) -> bool:
            model = self._model(depth)
            fits = depth == self.depths[0] or self._bytes(model) <= USABLE * self.memory  # activations take the rest
            return fits and size_of(model).products <= largest

        options = (self._option(depth, factor) for depth in takewhile(is_possible, self.depths))
        return min(filter(None, options), key=self._deficit, default=None)

    def _deficit(self, option: Option) -> float:
        lacks_circuit = self.has_circuit and option.model.n_layer == 1
        worth = option.tokens * (scaling.WORTH_WITHOUT_CIRCUIT if lacks_circuit else 1)
        ratio = scaling.RATIOS[self.family]
        return scaling.deficit(option.parameters, worth, self.tokens, ratio, self.repetition.scale)

    def _option(self, depth: int, factor: float) -> Option | None:
        model, amount = self._model(depth), self.config.budget.amount
        if self.left is not None:
            speed = self._speed(model).tokens_per_second
            longest = self.left * factor * speed  # without startup and validations
            tokens = 2 * longest - self._seconds(model, longest) * speed
        elif amount is not None:
            longest = tokens = factor * amount.number / flops_per_token(model)
        else:
            longest = tokens = self._length(0) or scaling.RATIOS[self.family] * size_of(model).products
        # The length of a resumed run is the user's, or already limited.
        is_decided = LENGTHS & (self.given.keys() if self.config.run.resume_from_checkpoint else self.config.flags)
        maximum = math.inf if is_decided else self.repetition.epochs * self.tokens
        batch = self._batch(model, max(1, min(tokens, self._length(0) or self.repetition.epochs * self.tokens)))
        limit = self._length(batch)
        if amount is None and limit is not None:
            longest = tokens = limit
        maximum = min(maximum, limit or math.inf)
        steps, most_steps = (int(min(number, maximum) / batch) for number in (tokens, longest))
        if steps < 1:
            return None
        settings = self._settings(depth, batch, steps, math.ceil(most_steps / VALIDATIONS)) | {"max_steps": steps}
        settings |= {"num_train_epochs": None, "max_train_tokens": None}
        seconds = None
        if self.left is not None:
            seconds = self._seconds(model, steps * batch, math.ceil(steps / settings["eval_steps"]))
            # For a resumed run, while its length is an estimate.
            settings["max_train_tokens"] = int(maximum) if limit or maximum <= tokens else None
        return Option(settings, model, steps * batch, maximum, self.tokens, self.repetition, self.family, seconds)

    def _batch(self, model: GPT2ScratchConfig, tokens: float) -> int:
        """Return the tokens per step of a run that trains on `tokens`."""
        micro = self.config.batch.per_device_train_batch_size
        unit = model.n_positions * self.accelerator.num_processes * (1 if micro == "auto" else int(micro))
        return self.given.get("tokens_per_step") or max(1, scaling.best_batch(tokens) // unit) * unit

    def _model(self, depth: int) -> GPT2ScratchConfig:
        return model_config(self._arguments(depth), self.vocab_size)

    def _arguments(self, depth: int) -> ModelArguments:
        """Return the settings of a model with `depth` layers."""
        width, is_modern = self.given.get("n_embd", WIDTH * depth), self.family == "modern"
        has_large_heads = is_modern and depth >= 12 and depth % 2 == 0  # of size 128, as in the presets
        size, numbers = WIDTH * (1 + has_large_heads), (n for n in range(1, width + 1) if width % (2 * n) == 0)
        heads = min(numbers, key=lambda number: abs(math.log(width / number / size)), default=1)
        shape = self.architecture | {
            "n_layer": depth,
            "n_head": heads,
            "n_embd": width,
            "n_positions": scaling.best_context(width),
            "initializer_range": round((0.577 if is_modern else 0.554) / math.sqrt(width), 4),
            "attention_scale": 0.12 if has_large_heads and width == 128 * self.given.get("n_head", heads) else None,
        }
        return fill([ModelArguments], shape | self.given)[0]

    def _settings(self, depth: int, batch: int, steps: int, interval: int) -> dict[str, Any]:
        """Return the settings of a run with a validation and a checkpoint every `interval` steps: also those of model,
        batch, rates and schedule."""
        model, parameters = self._arguments(depth), size_of(self._model(depth)).products
        is_small = parameters <= scaling.SMALL_MODEL or self.repetition == scaling.WITH_CIRCUIT
        is_small &= self.family == "modern" and not self.config.run.init_from
        has_circuit = is_small and self.is_bpe and steps * batch <= scaling.CIRCUIT_TOKENS
        second_weight = self.given.get("second_target_weight", scaling.SECOND_TARGET_WEIGHT if is_small else None)
        settings = self.architecture | {
            "tokens_per_step": batch,
            "eval_steps": interval,
            "save_steps": interval,
            "save_total_limit": VALIDATIONS,
            "max_eval_samples": max(1, SCORED_TOKENS // model.n_positions),
            "logging_steps": max(1, min(50, steps // 50)),
            "lr_scheduler_type": "warmup_stable_decay",
            "weight_average": scaling.average_horizon(steps, steps * batch / self.tokens),
            "second_target_weight": second_weight,
            # A number, so that the settings of a run whose length follows the measured speed give the same weights,
            # unless the run became shorter (`Pacer`).
            "second_target_steps": max(1, round(SECOND_TARGET_SHARE * steps)) if second_weight else None,
            "induction_init": has_circuit and not any(induction_problems(model)),
            "load_best_model_at_end": steps * batch > self.tokens,
        }
        if (self.architecture | self.given).get("optimizer", "adamw") == "adamw":
            rate = scaling.CONTINUATION_RATE if self.config.run.init_from else scaling.adam_rate(model.n_embd)
            settings |= {"learning_rate": rate, "min_learning_rate": 0.0, "warmup_steps": round(0.05 * steps)}
        settings |= self.given
        is_pretrained = self.config.pretrained_source is not None
        optim = with_defaults(fill([OptimArguments], settings)[0], {*settings}, batch, model, is_pretrained)
        decay = scaling.weight_decay(optim.optimizer, optim.learning_rate, batch, steps * batch)
        rates = vars(optim) | {"weight_decay": decay}
        rates = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in rates.items()}
        return vars(model) | settings | rates | self.given

    def _length(self, batch: int) -> float | None:
        """Return the given number of training tokens, or None. `batch`: tokens per step."""
        epochs, steps = self.given.get("num_train_epochs"), self.given.get("max_steps")
        return self.given.get("max_train_tokens") or (epochs and epochs * self.tokens) or (steps and steps * batch)

    def _seconds(self, model: GPT2ScratchConfig, tokens: float, validations: int = VALIDATIONS) -> float:
        """Return the estimated seconds of a run that trains on `tokens`."""
        n_tokens = validation_tokens(validations, SCORED_TOKENS, self.val_tokens)
        return self._speed(model).seconds(tokens, validations, n_tokens)

    def _speed(self, model: GPT2ScratchConfig) -> Throughput:
        speed = self.flops / flops_per_token(model)
        return Throughput(speed, self.source, self.mfu, startup=STARTUP[self.setup.torch_compile])

    def _assume_speed(self) -> str:
        """Set FLOP/s to those usual for the device, or a guess. Return its name."""
        plan_device, processes = self.config.cost.plan_device, self.accelerator.num_processes
        device = RENTALS[plan_device].datasheet if plan_device else self.device
        peak = peak_flops(device, self.setup.mixed_precision)
        _, usual, _ = reported_mfu(device) or DEFAULT_MFU
        self.flops = processes * (usual * peak if peak else GUESSES.get(self.accelerator.device.type, 3e12))
        return device

    def _find_speed(self, sample: TokenStore) -> None:
        """Find FLOP/s: from published results if the best model fills a known GPU, otherwise from a few steps of the
        best model for a first guess, without compilation."""
        plan_device, processes = self.config.cost.plan_device, self.accelerator.num_processes
        device, option = self._assume_speed(), self._best(1.0)
        if option is not None and (speed := assumed_speed(device, option.model, self.setup.mixed_precision, processes)):
            self.mfu, self.source = speed.mfu, speed.source
            return
        if plan_device:
            sizes = (size_of(self._model(depth)).products for depth in self.depths)
            size = next((size for size in sizes if size >= FILLS_A_GPU), None)
            is_for_text = size is not None and size <= self.repetition.parameters * self.tokens
            remedy = "a larger --budget" if is_for_text else "a larger model" if size is None else "more text"
            raise UserError(
                f"plan_device is {plan_device}, but the best model for the budget is smaller than "
                f"{FILLS_A_GPU / 1e6:.0f}M parameters: no speed is published for it; use {remedy}, or plan without "
                "--plan_device on the device itself."
            )
        printer(self.accelerator)("Measuring the speed of this device in a few steps ...")
        depth, tokens = (self.depths[0], 1) if option is None else (option.model.n_layer, option.tokens)
        settings = self._settings(depth, self._batch(self._model(depth), tokens), 1000, 1000) | {"weight_average": None}
        config, eager = self.config.with_settings(settings), replace(self.setup, torch_compile=False)
        plan = make_plan(config, sample, sample.load_tokenizer(), self.accelerator, eager)
        speed = measure_speed(config, plan, self.accelerator, sample, steps=2, seconds=PROBE_SECONDS)
        gain = COMPILED_SPEED if self.setup.torch_compile else 1.0
        flops = gain * speed.tokens_per_second * flops_per_token(plan.model)
        self.flops = on_main(self.accelerator, lambda: flops)
        self.source = "measured over a few steps without compilation"

    def _too_small(self) -> str:
        model = self._model(self.depths[0])
        batch = self._batch(model, 1)
        if (length := self._length(batch)) is not None and length < batch:
            lengths = " and ".join(f"{name} is {self.given[name]}" for name in LENGTHS if self.given.get(name))
            return f"{lengths}, less than one step of {batch:,} tokens; use more, or a smaller --tokens_per_step."
        epochs = self.repetition.epochs
        if length is None and epochs * self.tokens < batch:
            return (
                f"The text has {self.tokens:,} tokens, which {epochs} times are less than one step "
                f"of {batch:,} tokens; use more text, or a smaller --tokens_per_step."
            )
        if (amount := self.config.budget.amount) is None:
            return f"One step of {batch:,} tokens is more than the whole run; use a smaller --tokens_per_step."
        if self.left is None:
            return f"budget is {amount}, less than one step of the smallest model; use a larger one."
        return (
            f"budget is {amount}, of which {max(0.0, self.left):.0f} s are left after startup, but "
            f"the first step of the smallest model, {VALIDATIONS} validations and checkpoints take about "
            f"{self._seconds(model, batch):.0f} s; use a larger one."
        )
