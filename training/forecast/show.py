"""--plan: the estimate of a run, and everything that is wrong with its configuration, without running it."""

import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import Accelerator

from tokenizer.store import TokenStore
from training.batches import TrainBatches, WindowOrder
from training.config import TrainConfig
from training.console import clock, printer
from training.data import estimate_store, open_store, place_tokens
from training.device import Setup, describe
from training.distributed import start_accelerator
from training.forecast.advice import outlook
from training.forecast.forecast import Forecast, Throughput, assumed_speed, rentals
from training.hardware import RENTALS, name_of
from training.plan import Plan
from training.preflight import make_plan, setup_of
from training.run import Run, describe_run
from training.speed import Speed
from training.step import TrainStep, build_train_step

WARM = 3  # steps that are not counted, besides the first, which compiles: they find their memory
LEAST_SECONDS = 3.0
REPORTING = 50_000_000  # bytes of code that a run loads to sample and to draw


def show_plan(config: TrainConfig) -> None:
    """Print the plan, or raise a `UserError` with all that cannot be in the configuration, one problem a line."""
    # So that nothing stays in the temporary folder.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with TemporaryDirectory(prefix="gpt2scratch-plan-") as folder:
            _show_plan(config, Path(folder))
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_plan(config: TrainConfig, folder: Path) -> None:
    """`folder` is for a sample, where the text is large and not tokenized yet."""
    setup = setup_of(config)
    accelerator = start_accelerator(setup, None, config.run.output_dir, config.stopping.ddp_timeout)
    say = printer(accelerator)
    estimate = estimate_store(config.recipe, folder, say)
    sample = open_store(config.recipe, say) if estimate is None else estimate.sample
    store = sample if estimate is None else estimate.whole
    plan = make_plan(config, store, store.load_tokenizer(), accelerator, setup)

    forecast = Forecast(config, setup, plan, store, _throughput(config, plan, setup, accelerator, sample))
    if config.cost.plan_device is None:
        hardware = describe(accelerator, setup, plan.model)
    else:
        hardware = f"{RENTALS[config.cost.plan_device].name}, {setup.mixed_precision}, compiled: by its datasheet"
    data = None
    if estimate is not None:
        tokens = plan.order.n_tokens
        data = (
            f"{config.data.data}, {plan.placement}: about {round(tokens, 3 - len(str(tokens))):,} tokens, estimated from "
            f"{estimate.read}, and so is all that follows from them;\n         tokenizing it all, which comes before the first step, "
            f"should take about {clock(estimate.seconds)}"
        )
    say(f"{outlook(forecast, hardware, data)}\n{rentals(forecast)}".rstrip())


def forecast_run(config: TrainConfig, run: Run) -> Forecast:
    speed = assumed_speed(name_of(run.accelerator.device), run.plan, run.setup, run.accelerator.num_processes)
    return Forecast(config, run.setup, run.plan, run.data.store, speed)


def print_outlook(run: Run, forecast: Forecast) -> None:
    """Print what the run is expected to take, and where it starts."""
    hardware = describe(run.accelerator, run.setup, run.plan.model)
    printer(run.accelerator)(describe_run(run, outlook(forecast, hardware)))


def _throughput(
    config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, store: TokenStore
) -> Throughput | None:
    if config.cost.plan_device is not None:
        return assumed_speed(RENTALS[config.cost.plan_device].datasheet, plan, setup, accelerator.num_processes)
    if config.cost.plan_steps == 0:
        return None
    tokens = place_tokens(store, "train", plan.placement.where, accelerator.device, config.batch.mask_documents)
    order = WindowOrder(store.metadata.train.tokens, plan.batches.context, config.seed)
    began = time.perf_counter()
    batches = TrainBatches(tokens, order, plan.batches, accelerator.process_index)
    train_step = build_train_step(plan.model, None, batches, config.optim, setup, accelerator)
    return _measure(train_step, plan, config.cost.plan_steps, began)


def _measure(train_step: TrainStep, plan: Plan, steps: int, began: float) -> Throughput:
    """Do a few real steps. Called by every process. The learning rate is 0, and nothing of them is kept."""
    speed = Speed(train_step.batches, plan.model, train_step.accelerator)

    def do(first: int, number: int) -> None:
        for step in range(first, first + number):
            step_loss, _ = train_step(step, rate_factor=0.0)
            speed.count(plan.tokens_per_step)
        float(step_loss)  # waits for the device

    do(0, 1)
    first_step = time.perf_counter() - began
    do(1, WARM)
    speed.restart()
    while speed.seconds < LEAST_SECONDS:
        do(1 + WARM + speed.steps, steps)
    measured = speed.measured()
    known = f"measured in {speed.steps} steps; the first came after {first_step:.1f} s"
    peak = 1e9 * measured["peak_memory_gb"]
    if plan.memory.copies_to_host:  # these steps neither save, nor sample and draw
        peak += plan.memory.fixed()["copy that is saved"] + REPORTING
    return Throughput(measured["tokens_per_second"], known, measured.get("mfu"), peak, first_step)
