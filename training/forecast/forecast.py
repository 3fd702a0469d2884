"""What a run will take, said before it is begun: memory, time, money, disk; and what would be better.

python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan
python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan --plan_device a100-80gb
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from errors import counted
from tokenizer.store import TokenStore
from training.config import TrainConfig
from training.console import clock
from training.cost import CostArguments
from training.data import bytes_of
from training.device import Setup
from training.flops import flops_per_token
from training.hardware import (
    DOLLARS_PER_COLAB_UNIT,
    FILLS_A_GPU,
    PRICES_OF,
    RENTALS,
    peak_flops,
    reported_mfu,
)
from training.optim import moment_bytes
from training.plan import Plan

TOKENS_A_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Chinchilla")
EVALUATION_COST = 1 / 3  # of a token trained on: the forward pass alone


@dataclass(frozen=True)
class Throughput:
    """Tokens a second of all processes together, and how that is known."""

    tokens_per_second: float
    known: str  # measured in 10 steps; assumed ...
    mfu: float | None = None
    peak_bytes: int | None = None  # of memory, where steps were really done
    first_step: float = 0.0  # seconds, until it is done


@dataclass(frozen=True)
class Forecast:
    plan: Plan
    speed: Throughput | None  # None where only steps would tell
    eval_tokens: int  # in all validations together
    checkpoints: int  # kept
    store_bytes: int

    @property
    def tokens(self) -> int:
        return self.plan.max_steps * self.plan.tokens_per_step

    @property
    def hours(self) -> float | None:
        if self.speed is None:
            return None
        return self.hours_at(self.speed.tokens_per_second) + self.speed.first_step / 3600

    def hours_at(self, tokens_per_second: float) -> float:
        return (self.tokens + EVALUATION_COST * self.eval_tokens) / tokens_per_second / 3600

    @property
    def evaluation_share(self) -> float:
        """Of the time."""
        evaluation = EVALUATION_COST * self.eval_tokens
        return evaluation / (evaluation + self.tokens)

    def described(self) -> dict[str, float | None]:
        """For events.jsonl, to be compared with what came."""
        return {
            "steps": self.plan.max_steps,
            "tokens_per_second": None if self.speed is None else self.speed.tokens_per_second,
            "hours": self.hours,
            "evaluation_share": self.evaluation_share,
            "memory_bytes": self.plan.memory.total(self.plan.batches.micro_batch),
        }

    @property
    def disk_bytes(self) -> int:
        """Checkpoints, one more while it is written, and the model to use."""
        N = self.plan.memory.parameters
        return (self.checkpoints + 1) * (4 * N + moment_bytes(N)) + 4 * N


def assumed_here(plan: Plan, setup: Setup, accelerator: Accelerator) -> Throughput | None:
    """On the devices that are here; None where that is not known."""
    if accelerator.device.type != "cuda":
        return None
    return assumed_speed(torch.cuda.get_device_name(accelerator.device), plan, setup, accelerator.num_processes)


def assumed_speed(datasheet: str, plan: Plan, setup: Setup, devices: int) -> Throughput | None:
    """By what others reach on such a device; None where its peak is not known, or the model is smaller than theirs."""
    peak = peak_flops(datasheet, setup.mixed_precision)
    if peak is None or plan.memory.parameters < FILLS_A_GPU:
        return None
    at_peak = peak * devices / flops_per_token(plan.model)
    least, usual, most = reported_mfu(datasheet)
    known = (
        f"assumed: {usual:.0%} of its peak; others report {least:.0%} to {most:.0%}, which would be "
        f"{least * at_peak:,.0f} to {most * at_peak:,.0f} tokens/s"
    )
    return Throughput(usual * at_peak, known, usual)


def forecast_of(config: TrainConfig, plan: Plan, speed: Throughput | None, store: TokenStore) -> Forecast:
    evaluation, saving = config.evaluation, config.checkpoint
    on_the_way = whole = store.metadata.val.tokens
    if evaluation.max_eval_samples is not None:
        on_the_way = min(whole, evaluation.max_eval_samples * plan.batches.context)
    eval_tokens = (_times(plan, evaluation.eval_strategy, evaluation.eval_steps) - 1) * on_the_way + whole
    saves = _times(plan, saving.save_strategy, saving.save_steps)
    kept = saves if config.checkpoints_kept is None else min(saves, config.checkpoints_kept + 1)  # and the best
    return Forecast(plan, speed, eval_tokens, kept, bytes_of(store, "train", "val"))


def _times(plan: Plan, strategy: str, every: int) -> int:
    """How often in a run what happens by `strategy` happens; at its end it always does."""
    times = {"steps": plan.max_steps / every, "epoch": plan.epoch(plan.max_steps), "no": 1}[strategy]
    return max(1, math.ceil(times))


def describe_forecast(
    forecast: Forecast,
    config: TrainConfig,
    hardware: str,
    notes: tuple[str, ...],
    store: Path,
    estimated: str | None = None,
) -> str:
    """What the user reads before the first step. `estimated`: what is said of data that are not counted yet."""
    plan = forecast.plan
    asked = config.overridden_vocab_size(plan.model.vocab_size)
    vocabulary = (
        f"vocab_size is {plan.model.vocab_size:,}, as in the data; the {asked or 0:,} of the YAML file has no effect."
    )
    lines = [
        f"Device:  {hardware}",
        *(f"         {note}" for note in notes),
        f"Model:   {_describe_model(plan)}, {plan.memory.parameters:,} parameters",
        f"         {_describe_variant(plan)}",
        *([f"         {vocabulary}"] if asked is not None else []),
        f"Data:    {store}, {plan.placement}: {estimated or _describe_data(plan)}",
        f"Length:  {_describe_length(plan)}",
        f"         {_tokens(forecast)}",
        f"Memory:  {_memory(forecast)}",
        f"Time:    {_time(forecast, config.cost)}",
    ]
    if money := _money(forecast, config.cost.hourly_price):
        lines.append(f"Money:   {money}")
    lines.append(f"Disk:    {_disk(forecast, Path(config.run.output_dir))}")
    return "\n".join(lines)


def _describe_model(plan: Plan) -> str:
    model = plan.model
    layers, heads = counted(model.n_layer, "layer"), counted(model.n_head, "head")
    shape = f"{layers}, {heads}, width {model.n_embd}, context {model.n_positions}"
    return f"{shape}, vocabulary {model.vocab_size:,}"


def _describe_variant(plan: Plan) -> str:
    """Return what shape and size do not show: `untied head, exact GELU, dropout 0.1`."""
    model = plan.model
    head = "tied head" if model.tie_word_embeddings else "untied head"
    gelu = {"gelu": "exact GELU", "gelu_new": "tanh GELU"}.get(model.activation_function, model.activation_function)
    rates = {"embeddings": model.embd_pdrop, "attention": model.attn_pdrop, "blocks": model.resid_pdrop}
    if len(set(rates.values())) == 1:
        return f"{head}, {gelu}, dropout {model.embd_pdrop:g}"
    return f"{head}, {gelu}, dropout " + ", ".join(f"{rate:g} ({where})" for where, rate in rates.items())


def _describe_data(plan: Plan) -> str:
    return f"{plan.order.n_tokens:,} tokens, {counted(plan.order.windows, 'window')} per epoch"


def _describe_length(plan: Plan) -> str:
    batch = plan.batches
    split = f"{batch.context} tokens x {counted(batch.micro_batch, 'sequence')} x {batch.accumulation} accumulated"
    total = plan.max_steps * plan.tokens_per_step
    return (
        f"{counted(plan.max_steps, 'step')} of {plan.tokens_per_step:,} tokens "
        f"({split} x {counted(batch.processes, 'process', 'processes')}): {total / 1e6:,.1f}M tokens, {plan.epoch(plan.max_steps):.2f} epochs"
    )


def _tokens(forecast: Forecast) -> str:
    N = forecast.plan.memory.parameters
    return (
        f"{forecast.tokens / N:.2g} tokens a parameter ({TOKENS_A_PARAMETER} make the best of a budget of compute: "
        f"{TOKENS_A_PARAMETER * N / 1e6:,.0f}M tokens)"
    )


def _memory(forecast: Forecast) -> str:
    plan = forecast.plan
    micro, parts = plan.batches.micro_batch, plan.memory.parts(plan.batches.micro_batch)
    measured = forecast.speed.peak_bytes if forecast.speed is not None else None
    # On a CPU the process's own size; on a GPU what PyTorch allocated.
    includes = "the program itself included" if plan.memory.copies_to_host else "without CUDA's context and workspaces"
    peak = "" if measured is None else f"; measured, {includes}: a peak of {measured / 1e9:.2f} GB"
    told = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    told += "; max-autotune takes more while it tries kernels in the first step" if plan.memory.autotunes else ""
    return (
        f"{sum(parts.values()) / 1e9:.2f} GB of {plan.available / 1e9:.1f} a device, for {counted(micro, 'sequence')} at once; "
        f"{plan.memory.largest_micro_batch(plan.available):,} should fit{peak}\n         ({told})"
    )


def _time(forecast: Forecast, cost: CostArguments) -> str:
    if forecast.speed is None and cost.plan_device is not None:
        return "not known: nobody reports what so small a model reaches on a device that it leaves half idle."
    if forecast.speed is None and cost.plan:
        return "not measured, because --plan_steps is 0."
    if forecast.speed is None:
        return "the log lines will show it; --plan measures it first."
    mfu = f", MFU {forecast.speed.mfu:.0%}" if forecast.speed.mfu is not None else ""
    return f"{clock(forecast.hours * 3600)} at {forecast.speed.tokens_per_second:,.0f} tokens/s{mfu} ({forecast.speed.known})"


def _money(forecast: Forecast, hourly_price: float | None) -> str:
    if forecast.hours is None or hourly_price is None:
        return ""
    return f"{forecast.hours * hourly_price:,.2f} dollars at {hourly_price:.2f} an hour"


def _disk(forecast: Forecast, folder: Path) -> str:
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    short = " NOT ENOUGH: lower --save_total_limit." if forecast.disk_bytes > free else ""
    return (
        f"{forecast.disk_bytes / 1e9:.2f} GB for {counted(forecast.checkpoints, 'checkpoint')} and the "
        f"model, {forecast.store_bytes / 1e9:.2f} GB the token store; {free / 1e9:.1f} GB are free.{short}"
    )


def rentals(forecast: Forecast) -> str:
    """A table of what the run would take on devices that can be rented, one each; empty for a model that fills none."""
    if forecast.plan.memory.parameters < FILLS_A_GPU:
        return ""
    rows = ["| one device | tokens/s, assumed | time | dollars | Colab units |", "|---|--:|--:|--:|--:|"]
    for rental in RENTALS.values():
        peak = peak_flops(rental.datasheet, "bf16")
        fits = sum(forecast.plan.memory.parts(1).values()) < rental.gigabytes * 1e9
        if not fits:
            continue
        speed = reported_mfu(rental.datasheet)[1] * peak / flops_per_token(forecast.plan.model)
        hours = forecast.hours_at(speed)
        dollars = "" if rental.dollars is None else " to ".join(f"{hours * price:,.2f}" for price in rental.dollars)
        units = (
            ""
            if rental.colab_units is None
            else f"{hours * rental.colab_units:,.1f} ({hours * rental.colab_units * DOLLARS_PER_COLAB_UNIT:,.2f} $)"
        )
        rows.append(f"| {rental.name} | {speed:,.0f} | {clock(hours * 3600)} | {dollars} | {units} |")
    return "\n".join([*rows, "", f"Prices: on-demand offers of {PRICES_OF}; --hourly_price knows yours."])
