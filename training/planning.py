"""--plan: all that a run will take and all that is wrong with it, without running it."""

from accelerate import Accelerator

from errors import UserError
from training.advice import advice, is_gpu
from training.config import TrainConfig
from training.data import open_store, place_tokens
from training.device import Setup, decide, describe, start_accelerator
from training.forecast import Throughput, assumed_speed, describe_forecast, forecast_of, rentals
from training.plan import Plan, make_plan
from training.probe import measure
from training.rentals import RENTALS
from training.screen import voice


def show_plan(config: TrainConfig) -> None:
    """
    Raises:
        UserError: everything about the configuration that cannot be, one problem a line.
    """
    problems = []
    try:
        setup = decide(config.device, config.model.n_positions) if config.cost.plan_device is None else _rented(config)
    except UserError as error:
        problems.append(str(error))
        setup = Setup("no", False, "sdpa", ())
    accelerator = start_accelerator(setup, config.device, None, config.run.output_dir, config.stopping.ddp_timeout)
    say = voice(accelerator)
    store = open_store(config.recipe, say)
    try:
        plan = make_plan(config, store, store.load_tokenizer(), accelerator, setup)
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))

    throughput = _throughput(config, plan, setup, accelerator, store)
    forecast = forecast_of(config, plan, throughput, store)
    if config.cost.plan_device is None:
        hardware = describe(accelerator, setup, plan.model, config.batch.mask_documents)
    else:
        hardware = f"{RENTALS[config.cost.plan_device].name}, {setup.mixed_precision}, compiled: by its datasheet"
    say(
        "\n".join(
            [
                describe_forecast(forecast, config, hardware, setup.notes, store.folder),
                *(
                    f"Better:  {sentence}"
                    for sentence in advice(config, forecast, setup, is_gpu(accelerator.device, config))
                ),
                rentals(forecast),
            ]
        ).rstrip()
    )


def _rented(config: TrainConfig) -> Setup:
    """What would be chosen on the device that is planned for."""
    if config.cost.plan_device not in RENTALS:
        raise UserError("\n".join(config.cost.problems()))
    asked = config.device.mixed_precision
    best = "fp16" if RENTALS[config.cost.plan_device].datasheet in ("T4", "V100") else "bf16"
    return Setup(best if asked == "auto" else asked, config.device.torch_compile != "false", "sdpa", ())


def _throughput(config: TrainConfig, plan: Plan, setup: Setup, accelerator: Accelerator, store) -> Throughput | None:
    if config.cost.plan_device is not None:
        return assumed_speed(RENTALS[config.cost.plan_device].datasheet, plan, setup, accelerator.num_processes)
    if config.cost.plan_steps == 0:
        return None
    tokens = place_tokens(store, "train", plan.placement.where, accelerator.device, config.batch.mask_documents)
    return measure(config, plan, setup, accelerator, tokens, config.cost.plan_steps)
