"""--plan: all that a run will take and all that is wrong with it, without running it."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from accelerate import Accelerator

from training.batches import WindowOrder
from training.config import TrainConfig
from training.console import clock, printer
from training.data import estimate_store, open_store, place_tokens
from training.device import Setup, describe
from training.distributed import start_accelerator
from training.forecast.advice import outlook
from training.forecast.forecast import Forecast, Throughput, assumed_here, assumed_speed, forecast_of, rentals
from training.forecast.probe import measure
from training.hardware import RENTALS
from training.plan import Plan
from training.preflight import make_plan, setup_of
from training.run import Run, describe_run

if TYPE_CHECKING:
    from tokenizer.estimate import Estimate


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

    throughput = _throughput(config, plan, setup, accelerator, sample)
    forecast = forecast_of(config, plan, throughput, store)
    if config.cost.plan_device is None:
        hardware = describe(accelerator, setup, plan.model)
    else:
        hardware = f"{RENTALS[config.cost.plan_device].name}, {setup.mixed_precision}, compiled: by its datasheet"
    where, estimated = store.folder, None
    if estimate is not None:
        where, estimated = config.data.data, _estimated(plan, estimate)
    told = outlook(forecast, config, hardware, setup, accelerator.device, where, estimated)
    say(f"{told}\n{rentals(forecast)}".rstrip())


def forecast_run(config: TrainConfig, run: Run) -> Forecast:
    return forecast_of(config, run.plan, assumed_here(run.plan, run.setup, run.accelerator), run.data.store)


def print_outlook(config: TrainConfig, run: Run, forecast: Forecast) -> None:
    """Print what the run is expected to take, and where it starts."""
    hardware = describe(run.accelerator, run.setup, run.plan.model)
    text = outlook(forecast, config, hardware, run.setup, run.accelerator.device, run.data.store.folder)
    printer(run.accelerator)(describe_run(run, text))


def _estimated(plan: Plan, estimate: "Estimate") -> str:
    tokens = plan.order.n_tokens
    return (
        f"about {round(tokens, 3 - len(str(tokens))):,} tokens, estimated from {estimate.read}, and so is all that follows "
        f"from them;\n         tokenizing it all, which comes before the first step, should take about "
        f"{clock(estimate.seconds)}"
    )


def _throughput(config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, store) -> Throughput | None:
    if config.cost.plan_device is not None:
        return assumed_speed(RENTALS[config.cost.plan_device].datasheet, plan, setup, accelerator.num_processes)
    if config.cost.plan_steps == 0:
        return None
    tokens = place_tokens(store, "train", plan.placement.where, accelerator.device, config.batch.mask_documents)
    order = WindowOrder(store.metadata.train.tokens, plan.batches.context, config.seed)
    return measure(config, replace(plan, order=order), setup, accelerator, tokens, config.cost.plan_steps)
