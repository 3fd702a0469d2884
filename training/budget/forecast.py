"""Estimate memory, time, cost and disk use of a run before it starts (--plan), and report all problems of its
configuration.

python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan
python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan --plan_device a100-80gb
"""

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store.store import TokenStore
from training.budget import scaling
from training.budget.earlier import EarlierRun
from training.budget.sizing import Sizing, require_price, resolve, with_vocabulary
from training.budget.throughput import SCORING_COST, Throughput, assumed_speed, measure_speed, validation_tokens
from training.config import TrainConfig, dump_config
from training.data.run_data import bytes_of, find_store, open_store
from training.log.speed import flops_per_token
from training.plan.plan import Plan
from training.plan.run import Run
from training.preflight import make_plan, recorded_data, setup_of
from training.report.report import environment
from training.runtime.compilation import SHORT_VALIDATION, is_automatic, pays_off
from training.runtime.console import printer
from training.runtime.device import Setup, describe, kernel_of_sdpa, memory_of_others, uses_mps
from training.runtime.distributed import on_main, start_accelerator
from training.runtime.hardware import FILLS_A_GPU, RENTALS, device_name
from training.step.optim import MUON_RATES, usual_learning_rate
from training.step.size import size_of

VALIDATION_GRAPH = 0.4  # time to compile the validation, as a fraction of the time until the first step (quickstart)
MEASURED_SECONDS = 3.0  # at least, of the steps that --plan measures
# Thresholds of advice:
FEW_TOKENS = 8192  # tokens per micro-batch; fewer leave a GPU idle between kernels
RATE_FACTOR = 6  # largest ratio to the usual learning rate, either way
SLOW_KERNELS = ("math", "efficient")
VALIDATION_SHARE = 0.1  # fraction of the time spent on validation


@dataclass(frozen=True)
class Forecast:
    config: TrainConfig
    plan: Plan
    store: TokenStore
    speed: Throughput | None  # None if it can only be measured and was not
    sizing: Sizing | None  # None if the command chose nothing

    @property
    def tokens(self) -> int:
        return self.plan.max_steps * self.plan.tokens_per_step

    @property
    def validation_tokens(self) -> int:
        limit, split = self.config.evaluation.max_eval_samples, self.store.metadata.val.tokens
        sample = (limit or split) * self.plan.batches.context
        return validation_tokens(self.validations, sample, split)

    @property
    def validations(self) -> int:
        evaluation = self.config.evaluation
        return times_due(self.plan, evaluation.eval_strategy, evaluation.eval_steps)

    @property
    def compiles_validation(self) -> bool:
        """Whether validations are compiled, as a graph of their own."""
        tokens = self.validation_tokens / self.plan.batches.processes
        flops = tokens * SCORING_COST * flops_per_token(self.plan.model)
        return self.plan.memory.setup.torch_compile and pays_off(flops, SHORT_VALIDATION)

    @property
    def evaluation_share(self) -> float:
        """Fraction of the time spent on validation."""
        return SCORING_COST * self.validation_tokens / (SCORING_COST * self.validation_tokens + self.tokens)

    @property
    def hours(self) -> float | None:
        return None if self.speed is None else self.seconds(self.speed) / 3600

    def seconds(self, speed: Throughput, tokens: int | None = None) -> float:
        """Return the seconds of the run, or of one that trains on `tokens` with the same validations."""
        graph = VALIDATION_GRAPH * speed.startup * self.compiles_validation
        tokens = self.tokens if tokens is None else tokens
        return graph + speed.seconds(tokens, self.validations, self.validation_tokens)

    def described(self) -> dict[str, float | None]:
        """Return the estimates that events.jsonl records for comparison with the actual run."""
        return {
            "steps": self.plan.max_steps,
            "tokens_per_second": None if self.speed is None else self.speed.tokens_per_second,
            "hours": self.hours,
            "evaluation_share": self.evaluation_share,
            "memory_bytes": self.plan.memory.total(self.plan.batches.micro_batch),
        }


def forecast_run(config: TrainConfig, run: Run, sizing: Sizing | None) -> Forecast:
    device, processes = device_name(run.accelerator.device), run.accelerator.num_processes
    speed = (sizing and sizing.speed) or assumed_speed(device, run.plan.model, run.setup.mixed_precision, processes)
    return Forecast(config, run.plan, run.data.store, speed, sizing)


def print_forecast(run: Run, forecast: Forecast) -> None:
    """Print what a run starts with: device, model, data and length, and what needs attention. With --verbose,
    print all estimates."""
    hardware = describe(run.accelerator, run.setup, run.plan.model)
    printer(run.accelerator)(describe_forecast(forecast, hardware, run.start.step, run=run))


def show_plan(config: TrainConfig) -> None:
    """Print the plan, or raise a `UserError` with all problems of the configuration, one per line."""
    setup = setup_of(config)
    accelerator = start_accelerator(setup, None, config.run.output_dir, config.stopping.ddp_timeout)
    say, estimate = printer(accelerator), None
    config = with_vocabulary(config, accelerator, setup)
    recorded = recorded_data(config)
    with TemporaryDirectory(prefix="gpt2scratch-plan-") as folder:  # for a sample of text that is not tokenized yet
        if config.text and find_store(config.recipe, recorded) is None:
            from tokenizer.build.estimate import estimate as estimate_store  # needs packages that a run does not need

            if config.budget.chooses and not config.is_resolved:  # as in `resolve`
                require_price(config, accelerator)
            estimate = estimate_store(config.recipe, Path(folder), say)
        sample = open_store(config.recipe, say, recorded) if estimate is None else estimate.sample
        store = sample if estimate is None else estimate.whole
        config, sizing = resolve(config, accelerator, setup, [store, sample])
        plan = make_plan(config, store, store.load_tokenizer(), accelerator, setup)
        setup, speed, device = plan.memory.setup, sizing and sizing.speed, config.cost.plan_device
        if device is None and speed is None and config.cost.plan_steps > 0:
            wait = ", which are compiled first, for up to a minute" if setup.torch_compile else ""
            say(f"Measuring a few steps{wait} ...")
            speed = measure_speed(config, plan, accelerator, sample, config.cost.plan_steps, MEASURED_SECONDS)
    if device is None:
        hardware = describe(accelerator, setup, plan.model)
    else:
        rental, processes = RENTALS[device], accelerator.num_processes
        compilation = "compiled" if setup.torch_compile else "not compiled"
        hardware = f"{rental.name}, {setup.mixed_precision}, {compilation} (from its datasheet)"
        speed = speed or assumed_speed(rental.datasheet, plan.model, setup.mixed_precision, processes)
    forecast = Forecast(config, plan, store, speed, sizing)
    # Rentable devices that can hold the model, unless it is too small for reported figures: each with its speed.
    speeds = [(rental, assumed_speed(rental.datasheet, plan.model, "bf16", 1)) for rental in RENTALS.values()]
    memory = replace(plan.memory, on_gpu=True, program=0, processes=1).total(1) / 1e9
    rentals = [(rental, speed) for rental, speed in speeds if speed is not None and memory < rental.gigabytes]
    steps_done = 0 if sizing is not None else on_main(accelerator, lambda: EarlierRun.of(config).step)
    say(describe_forecast(forecast, hardware, steps_done, estimate, rentals))


def times_due(plan: Plan, strategy: str, interval: int) -> int:
    """Return how often an action with this `strategy` is due in a run. It is always due at the end."""
    epochs = min(plan.max_steps, int(plan.epoch(plan.max_steps - 1)) + 1)  # the last step usually ends an epoch
    return {"steps": math.ceil(plan.max_steps / interval), "epoch": epochs, "no": 1}[strategy]


def describe_forecast(
    forecast: Forecast,
    hardware: str,
    steps_done: int,
    estimate: Any = None,
    rentals: Iterable[Any] = (),
    run: Run | None = None,
) -> str:
    """Return the text printed before the first step. `steps_done`: those before the checkpoint that the run resumes
    from. `estimate`: the `tokenizer.build.estimate.Estimate` of text that is not tokenized yet."""
    config, plan, n_tokens = forecast.config, forecast.plan, forecast.plan.order.n_tokens
    checkpoints = times_due(plan, config.checkpoint.save_strategy, config.checkpoint.save_steps)
    if config.checkpoints_kept is not None:
        checkpoints = min(checkpoints, config.checkpoints_kept + 1)  # including the best checkpoint
    folder = Path(config.run.output_dir)
    parent = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    facts = {
        "forecast": forecast,
        "hardware": hardware,
        "estimate": estimate,
        "about_tokens": round(n_tokens, 3 - len(str(n_tokens))),
        "store_bytes": bytes_of(forecast.store, "train", "val"),
        "family": "modern" if config.model.is_modern else "gpt2",
        "N": size_of(plan.model).products,
        "scaling": scaling,
        # With max_steps: two lengths in one file would be refused.
        "chosen": dump_config(config.with_settings({"max_train_tokens": None}), omits_defaults=True),
        "checkpoints": checkpoints,
        "free": shutil.disk_usage(parent).free,
        "held": sum(
            path.stat().st_size for name in ("checkpoints", "model") for path in (folder / name).rglob("*.safetensors")
        ),
        "advice": advice(forecast),
        "rentals": rentals,
        "run": run,
        "steps_left": max(0, plan.max_steps - steps_done),
    }
    return environment().get_template("forecast.txt.j2").render(vars(forecast), **facts).rstrip()


def advice(forecast: Forecast) -> Iterator[str]:
    """Yield suggested improvements that are known before the first step."""
    config, plan, setup = forecast.config, forecast.plan, forecast.plan.memory.setup
    batches, model, N, on_gpu = plan.batches, plan.model, size_of(plan.model).products, plan.memory.on_gpu
    is_here = config.cost.plan_device is None
    if not (setup.torch_compile or is_automatic(config.device.torch_compile)) and (on_gpu or shutil.which("g++")):
        yield "torch_compile is off; compiled steps are faster, by far on a GPU."  # with auto, a note has the reason
    if on_gpu and setup.mixed_precision == "no":
        yield "mixed_precision is no; auto computes in half precision, which is faster on tensor cores."
    if is_here and on_gpu and (processes := memory_of_others()):
        yield f"{processes}."
    if is_here and setup.attention(model.n_positions) == "sdpa" and not uses_mps():
        yield from _attention_advice(torch.device("cuda" if on_gpu else "cpu"), setup, model)
    rate, usual = config.optim.learning_rate, usual_learning_rate(N)
    source = f"for models of {N / 1e6:,.1f}M parameters (Kaplan et al. 2020)"
    if config.optim.optimizer == "muon":
        usual, source = MUON_RATES["learning_rate"], "for Muon (Jordan et al. 2024)"
    if config.run.init_from is not None:  # as in presets/continued.yaml
        usual, source = usual / 6, f"to continue training, a sixth of that {source}"
    if not usual / RATE_FACTOR <= rate <= usual * RATE_FACTOR:
        yield f"learning_rate is {rate:.1e}; about {usual:.1e} is usual {source}."
    warmup = config.optim.warmup_steps
    if warmup > plan.max_steps / 4:
        yield f"warmup_steps is {warmup:,} of {plan.max_steps:,} steps; a tenth or less is usual."
    tokens, largest = batches.micro_batch * batches.context, plan.memory.largest_micro_batch(plan.available)
    if on_gpu and tokens < FEW_TOKENS and largest > batches.micro_batch:
        text = f"A micro-batch has {tokens:,} tokens, too few to fill a GPU; {largest:,} sequences would fit"
        name = "per_device_train_batch_size" if batches.accumulation > 1 else "tokens_per_step of a new run"
        yield f"{text}: raise {name}."
    is_small = forecast.store.metadata.train.tokens <= scaling.SMALL_TEXT  # as the texts that were measured
    most = scaling.WITHOUT_CIRCUIT.epochs
    if is_small and round(epochs := plan.epoch(plan.max_steps)) > most:  # windows leave out tokens
        text = f"beyond about {most}, the loss on new text rises: use fewer, or more text."
        yield f"The run trains for {epochs:.1f} epochs; {text}"
    is_new = config.run.init_from is None  # scaling laws are for new models, and exclude smaller ones
    has_text_left = round(plan.epoch(plan.max_steps)) < most  # otherwise, a smaller model has no more tokens
    if is_new and has_text_left and N >= FILLS_A_GPU and forecast.tokens < N * scaling.RATIOS["modern"] / 10:
        text = "tokens per parameter are few: a smaller model would reach a lower loss in the same time."
        yield f"{forecast.tokens / N:.2g} {text}"
    # The last validation scores the whole split in any case.
    share = forecast.evaluation_share * (1 - forecast.store.metadata.val.tokens / forecast.validation_tokens)
    if share > VALIDATION_SHARE:
        text = "validate less often (eval_strategy, eval_steps) or set max_eval_samples."
        yield f"Validations before the last take {share:.0%} of the time; {text}"


def _attention_advice(device: torch.device, setup: Setup, model: GPT2ScratchConfig) -> Iterator[str]:
    """Yield the setting of the model that keeps attention from a faster kernel of PyTorch."""
    kernel_of = partial(kernel_of_sdpa, device, setup, model.n_positions)
    width, dropout = model.n_embd // model.n_head, model.attn_pdrop
    kernel = kernel_of(width, dropout)
    if kernel not in SLOW_KERNELS:
        return
    text = f"attention uses PyTorch's {kernel} kernel{', which stores all scores' * (kernel == 'math')}, instead of"
    if (faster := kernel_of(width, 0.0)) != kernel:
        yield f"attn_pdrop is {dropout:g}, so {text} {faster}; 0 is faster."
    elif (faster := kernel_of(64, dropout)) != kernel:
        yield f"The head width is {width}, so {text} {faster}; choose n_head or n_embd for a multiple of 8 up to 256."
