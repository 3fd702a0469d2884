"""Train a model from scratch. This file shows the whole run, from top to bottom.

python train_accelerate.py                                  # quickstart: downloads nothing
python train_accelerate.py --data my.txt                    # your own text, or a token store
python train_accelerate.py --config presets/gpt2.yaml --data data/my
python train_accelerate.py --resume_from_checkpoint runs/x  # resume from the newest checkpoint

`accelerate launch --quiet --config_file launch/one_gpu.yaml train_accelerate.py` runs the same single process. Without
a file it uses that of `accelerate config`, or all GPUs; for several, see the other files of launch/.
"""

# First, so that Ctrl-C or the launcher's death also ends this process during the imports below, which take seconds.
import training.runtime.threads  # noqa: F401

# isort: split
import gc
import sys

from common.command_line import run as run_command
from training.budget.forecast import forecast_run, print_forecast, show_plan
from training.budget.pacer import Pacer
from training.budget.sizing import Sizing, resolve
from training.checkpoints.saver import Saver
from training.config import LENGTHS, TrainConfig, read_config
from training.data.batches import TrainBatches
from training.guard.run_guard import RunGuard, job
from training.guard.watchdog import Watchdog
from training.log.profile import Profiler
from training.log.run_log import RunLog
from training.plan.run import Run, begin_run, choose_best_model, finish_again, print_end
from training.preflight import check, decide_run, setup_of
from training.report.validation import Validation
from training.runtime.restart import restarting
from training.step.optim import schedule, second_target_weight
from training.step.train_step import build_train_step


def main(arguments: list[str]) -> None:
    config = read_config(arguments, check)
    if config.cost.plan:
        show_plan(config)
        return
    setup, folder, trackers = setup_of(config), config.run.folder, config.logging.trackers
    with job(setup, folder, trackers, config.stopping, config.flat()) as (accelerator, watchdog):
        # Decide: all problems are found here, before the first step.
        config, sizing = resolve(config, accelerator, setup)
        run = decide_run(config, setup, accelerator)
        chooses_best = config.evaluation.load_best_model_at_end
        if run.start.step >= run.plan.max_steps and not run.start.owes_validation:
            finish_again(run, config.optim, chooses_best, bool(LENGTHS & config.flags))
            return
        code = train(config, sizing, run, watchdog)
    if code:
        sys.exit(code)


def train(config: TrainConfig, sizing: Sizing | None, run: Run, watchdog: Watchdog) -> int:
    """Train the model. Return the exit code, which depends on why the run stopped."""
    accelerator, data, plan, start = run.accelerator, run.data, run.plan, run.start
    forecast = forecast_run(config, run, sizing)
    pacer = Pacer(run, config, forecast)

    # After any failure from here on, the guard leaves a consistent run folder.
    with RunGuard(run, config.health, config.stopping, watchdog) as guard:
        # Build: model, optimizer, and batches that are a function of the step.
        batches = TrainBatches(data.train, plan.order, plan.batches, accelerator.process_index, plan.position)
        train_step = build_train_step(
            plan.model, start.checkpoint, batches, config.optim, run.setup, accelerator, start.initializer
        )
        # Begin: only now, after everything was read, a run in the folder may be replaced.
        begin_run(run, config.run, pacer.config_yaml(), forecast.described())
        guard.has_begun = True
        validation = Validation(run, train_step, config.evaluation.max_eval_samples, forecast.compiles_validation)
        print_forecast(run, forecast)

        gc.freeze()  # excludes everything so far from garbage collection, which would pause a step for half a second

        # Train: step, log, save, validate. Saving comes first, so that a failed validation loses no step before it.
        with (
            Saver(run.folder, train_step, data, config.checkpoints_kept, run.backup) as saver,
            RunLog(run, batches, forecast.evaluation_share, config.flat()) as log,
            Profiler(config.profile, run, log) as profiler,
        ):
            if start.owes_validation:
                with log.pause():
                    validation.validate(start.step, log, guard.stopper.agreed)
            elif start.step == 0:
                validation.write_samples(0, log, prints=False)  # before training, samples are noise
            for step in guard.steps(saver):
                profiler.before(step)
                rate_factor = schedule(step, plan.max_steps, config.optim)
                second_weight = second_target_weight(step, plan.max_steps, pacer.config.optim)
                step_loss, grad_norm = train_step(step, rate_factor, second_weight)
                guard.health.add(step_loss, grad_norm)
                log.count(step_loss)
                count = step + 1
                logs = plan.is_due("steps", config.logging.logging_steps, count)
                saves = plan.is_due(config.checkpoint.save_strategy, config.checkpoint.save_steps, count)
                validates = plan.is_due(config.evaluation.eval_strategy, config.evaluation.eval_steps, count)
                profiler.after(count, saves or validates)
                if logs or saves or validates:
                    with log.waiting():  # the only place that waits for the device
                        guard.read_losses(count)
                if logs:
                    log.log(count, rate_factor * config.optim.learning_rate, guard.health.take_reading())
                with log.pause():
                    if saves:
                        guard.save(count)
                    if validates:
                        validation.validate(count, log, guard.stopper.agreed)
                if logs:
                    pacer.correct(count, log)
            guard.finish()
        if guard.reason is None and config.evaluation.load_best_model_at_end:
            choose_best_model(run)
    print_end(run, config.run, guard.step, guard.reason)
    return guard.exit_code


if __name__ == "__main__":
    run_command(restarting(main))
