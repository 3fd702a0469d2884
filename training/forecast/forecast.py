"""The estimate of a run before it starts: memory, time, money, disk.

python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan
python train_accelerate.py --config presets/gpt2.yaml --data data/my --plan --plan_device a100-80gb
"""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from errors import counted
from modeling_gpt2scratch import GPT2ScratchConfig
from tokenizer.store import TokenStore
from training.config import TrainConfig
from training.console import clock
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
    """Tokens per second of all processes together, and how that is known."""

    tokens_per_second: float
    known: str  # measured in 10 steps; assumed ...
    mfu: float | None = None
    peak_bytes: float | None = None  # of memory, where steps were really done
    first_step: float = 0.0  # seconds, until it is done


def assumed_speed(device: str, plan: Plan, setup: Setup, devices: int) -> Throughput | None:
    """Return what others reach on such a device; None where its peak is not known, or the model is smaller than theirs."""
    peak = peak_flops(device, setup.mixed_precision)
    if peak is None or plan.memory.parameters < FILLS_A_GPU:
        return None
    at_peak = peak * devices / flops_per_token(plan.model)
    least, usual, most = reported_mfu(device)
    known = (
        f"assumed: {usual:.0%} of its peak; others report {least:.0%} to {most:.0%}, which would be "
        f"{least * at_peak:,.0f} to {most * at_peak:,.0f} tokens/s"
    )
    return Throughput(usual * at_peak, known, usual)


@dataclass(frozen=True)
class Forecast:
    config: TrainConfig
    setup: Setup
    plan: Plan
    store: TokenStore
    speed: Throughput | None  # None where only steps would tell

    @property
    def tokens(self) -> int:
        return self.plan.max_steps * self.plan.tokens_per_step

    @property
    def eval_tokens(self) -> int:
        """Of all validations together; the last one scores the whole split."""
        evaluation, whole = self.config.evaluation, self.store.metadata.val.tokens
        sample = whole
        if evaluation.max_eval_samples is not None:
            sample = min(whole, evaluation.max_eval_samples * self.plan.batches.context)
        return (_times(self.plan, evaluation.eval_strategy, evaluation.eval_steps) - 1) * sample + whole

    @property
    def evaluation_share(self) -> float:
        """The fraction of time that validation takes."""
        evaluation = EVALUATION_COST * self.eval_tokens
        return evaluation / (evaluation + self.tokens)

    @property
    def hours(self) -> float | None:
        if self.speed is None:
            return None
        return self.hours_at(self.speed.tokens_per_second) + self.speed.first_step / 3600

    def hours_at(self, tokens_per_second: float) -> float:
        return (self.tokens + EVALUATION_COST * self.eval_tokens) / tokens_per_second / 3600

    @property
    def checkpoints(self) -> int:
        """Checkpoints that are kept, the best among them."""
        saves = _times(self.plan, self.config.checkpoint.save_strategy, self.config.checkpoint.save_steps)
        kept = self.config.checkpoints_kept
        return saves if kept is None else min(saves, kept + 1)

    @property
    def disk_bytes(self) -> int:
        """Checkpoints, one more while it is written, and the model to use."""
        N = self.plan.memory.parameters
        return (self.checkpoints + 1) * (4 * N + moment_bytes(N)) + 4 * N

    @property
    def store_bytes(self) -> int:
        return bytes_of(self.store, "train", "val")

    def described(self) -> dict[str, float | None]:
        """Return what events.jsonl keeps, to be compared with the run."""
        return {
            "steps": self.plan.max_steps,
            "tokens_per_second": None if self.speed is None else self.speed.tokens_per_second,
            "hours": self.hours,
            "evaluation_share": self.evaluation_share,
            "memory_bytes": self.plan.memory.total(self.plan.batches.micro_batch),
        }


def _times(plan: Plan, strategy: str, every: int) -> int:
    """Return how often an action with this `strategy` is due in a run; at its end it always is."""
    times = {"steps": plan.max_steps / every, "epoch": plan.epoch(plan.max_steps), "no": 1}[strategy]
    return max(1, math.ceil(times))


def describe_forecast(forecast: Forecast, hardware: str, data: str | None = None) -> str:
    """Return what is printed before the first step. `data`: what is known of text that is not tokenized yet."""
    plan, model, batch = forecast.plan, forecast.plan.model, forecast.plan.batches
    N, order, hourly_price = plan.memory.parameters, plan.order, forecast.config.cost.hourly_price
    shape = f"{counted(model.n_layer, 'layer')}, {counted(model.n_head, 'head')}, width {model.n_embd}"
    split = f"{batch.context} tokens x {counted(batch.micro_batch, 'sequence')} x {batch.accumulation} accumulated"
    processes, length = counted(batch.processes, "process", "processes"), counted(plan.max_steps, "step")
    if data is None:
        tokens = f"{order.n_tokens:,} tokens, {counted(order.windows, 'window')} per epoch"
        data = f"{forecast.store.folder}, {plan.placement}: {tokens}"
    lines = [
        f"Device:  {hardware}",
        *(f"         {note}" for note in forecast.setup.notes),
        f"Model:   {shape}, context {model.n_positions}, vocabulary {model.vocab_size:,}, {N:,} parameters",
        f"         {_variant(model)}",
    ]
    asked = forecast.config.overridden_vocab_size(model.vocab_size)
    if asked is not None:
        lines.append(
            f"         vocab_size is {model.vocab_size:,}, as in the data; the {asked:,} of the YAML file has no effect."
        )
    lines += [
        f"Data:    {data}",
        f"Length:  {length} of {plan.tokens_per_step:,} tokens ({split} x {processes}): {forecast.tokens / 1e6:,.1f}M tokens, "
        f"{plan.epoch(plan.max_steps):.2f} epochs",
        f"         {forecast.tokens / N:.2g} tokens a parameter ({TOKENS_A_PARAMETER} make the best of a budget of compute: "
        f"{TOKENS_A_PARAMETER * N / 1e6:,.0f}M tokens)",
        f"Memory:  {_memory(forecast)}",
        f"Time:    {_time(forecast)}",
    ]
    if forecast.hours is not None and hourly_price is not None:
        lines.append(f"Money:   {forecast.hours * hourly_price:,.2f} dollars at {hourly_price:.2f} an hour")
    return "\n".join([*lines, f"Disk:    {_disk(forecast)}"])


def _variant(model: GPT2ScratchConfig) -> str:
    """Return what shape and size do not show: `untied head, exact GELU, dropout 0.1`."""
    head = "tied head" if model.tie_word_embeddings else "untied head"
    gelu = {"gelu": "exact GELU", "gelu_new": "tanh GELU"}.get(model.activation_function, model.activation_function)
    rates = {"embeddings": model.embd_pdrop, "attention": model.attn_pdrop, "blocks": model.resid_pdrop}
    if len(set(rates.values())) == 1:
        return f"{head}, {gelu}, dropout {model.embd_pdrop:g}"
    return f"{head}, {gelu}, dropout " + ", ".join(f"{rate:g} ({where})" for where, rate in rates.items())


def _memory(forecast: Forecast) -> str:
    plan, memory = forecast.plan, forecast.plan.memory
    micro, parts, peak = plan.batches.micro_batch, memory.parts(plan.batches.micro_batch), ""
    if forecast.speed is not None and forecast.speed.peak_bytes is not None:
        # On a CPU the process's own size; on a GPU what PyTorch allocated.
        includes = "the program itself included" if memory.copies_to_host else "without CUDA's context and workspaces"
        peak = f"; measured, {includes}: a peak of {forecast.speed.peak_bytes / 1e9:.2f} GB"
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    listed += "; max-autotune takes more while it tries kernels in the first step" if memory.autotunes else ""
    return (
        f"{sum(parts.values()) / 1e9:.2f} GB of {plan.available / 1e9:.1f} a device, for {counted(micro, 'sequence')} at once; "
        f"{memory.largest_micro_batch(plan.available):,} should fit{peak}\n         ({listed})"
    )


def _time(forecast: Forecast) -> str:
    speed, cost = forecast.speed, forecast.config.cost
    if speed is None and cost.plan_device is not None:
        return "not known: nobody reports what so small a model reaches on a device that it leaves half idle."
    if speed is None and cost.plan:
        return "not measured, because --plan_steps is 0."
    if speed is None:
        return "the log lines will show it; --plan measures it first."
    mfu = f", MFU {speed.mfu:.0%}" if speed.mfu is not None else ""
    return f"{clock(forecast.hours * 3600)} at {speed.tokens_per_second:,.0f} tokens/s{mfu} ({speed.known})"


def _disk(forecast: Forecast) -> str:
    folder = Path(forecast.config.run.output_dir)
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    short = " NOT ENOUGH: lower --save_total_limit." if forecast.disk_bytes > free else ""
    return (
        f"{forecast.disk_bytes / 1e9:.2f} GB for {counted(forecast.checkpoints, 'checkpoint')} and the "
        f"model, {forecast.store_bytes / 1e9:.2f} GB the token store; {free / 1e9:.1f} GB are free.{short}"
    )


def rentals(forecast: Forecast) -> str:
    """Return a table of what the run would take on devices that can be rented, one each; empty for a model that fills none."""
    plan, half = forecast.plan, replace(forecast.setup, mixed_precision="bf16")
    rows = ["| one device | tokens/s, assumed | time | dollars | Colab units |", "|---|--:|--:|--:|--:|"]
    for rental in RENTALS.values():
        throughput = assumed_speed(rental.datasheet, plan, half, 1)
        if throughput is None:
            return ""
        if sum(plan.memory.parts(1).values()) >= rental.gigabytes * 1e9:
            continue
        speed, dollars, units = throughput.tokens_per_second, "", ""
        hours = forecast.hours_at(speed)
        if rental.dollars is not None:
            dollars = " to ".join(f"{hours * price:,.2f}" for price in rental.dollars)
        if rental.colab_units is not None:
            spent = hours * rental.colab_units
            units = f"{spent:,.1f} ({spent * DOLLARS_PER_COLAB_UNIT:,.2f} $)"
        rows.append(f"| {rental.name} | {speed:,.0f} | {clock(hours * 3600)} | {dollars} | {units} |")
    return "\n".join([*rows, "", f"Prices: on-demand offers of {PRICES_OF}; --hourly_price knows yours."])
