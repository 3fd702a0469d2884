"""Tokens -> checkpoints: the whole run, told from top to bottom.

python train_accelerate.py                                  # the quickstart: nothing to download
python train_accelerate.py --data my.txt                    # your own text, or a token store
python train_accelerate.py --config presets/gpt2.yaml --data data/my
python train_accelerate.py --resume_from_checkpoint runs/x  # go on where it stopped

`accelerate launch --quiet train_accelerate.py` is the same run of one process; several need it, with a file of launch/.
"""

# First: at Ctrl-C, or if the launcher dies, during the imports below, which take seconds, this process ends too.
import interrupt  # noqa: F401
import training.early
import training.threads  # noqa: F401

# isort: split
import gc
import sys

import torch
from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from command_line import run
from training import checkpoint
from training.backup import Backup
from training.batches import TrainBatches
from training.config import TrainConfig, read_config
from training.data import open_store, place_tokens
from training.device import (
    Setup,
    check_same_command,
    decide,
    describe,
    on_main,
    start_accelerator,
    stop_accelerator,
    wait_for_main,
)
from training.forecast.advice import is_gpu, outlook
from training.forecast.cost import watts_of_all
from training.forecast.forecast import assumed_here, forecast_of
from training.forecast.show import show_plan
from training.guard import restart
from training.guard.guard import Keeper
from training.guard.lock import RunLock
from training.guard.stopping import EXIT_CODES
from training.guard.watchdog import Watchdog
from training.log import Journal
from training.loss import NextTokenLoss
from training.model import build_model
from training.optim import build_optimizer, learning_rate_at
from training.plan import check, make_plan
from training.profile import Profiler
from training.reporting.report import About
from training.run import begin_run, describe_end, describe_run, find_start, finish_again
from training.run_folder import RunFolder
from training.sampling import prompts_of
from training.screen import voice
from training.speed import Speed
from training.step import Trainer, prepare_loss
from training.validation import Validation
from training.verification import StoreVerification


def main(arguments: list[str]) -> None:
    config = read_config(arguments, check)
    if config.cost.plan:
        show_plan(config)
        return
    setup = decide(config.device, config.model.n_positions, config.batch.mask_documents)
    trackers, ddp_timeout = config.journal.trackers(), config.stopping.ddp_timeout
    accelerator = start_accelerator(setup, trackers, config.run.output_dir, ddp_timeout)
    folder = RunFolder(config.run.output_dir)
    lock = RunLock(folder.path)
    with Watchdog(accelerator.process_index, accelerator.num_processes, ddp_timeout) as watchdog:
        try:
            check_same_command(accelerator, config.flat())
            on_main(accelerator, lock.acquire)
            reason = train(config, setup, accelerator, folder, watchdog)
        finally:
            lock.release()
        wait_for_main(accelerator)  # which may still be copying to the backup
        accelerator.wait_for_everyone()
    stop_accelerator(accelerator)
    if reason is not None and EXIT_CODES[reason] != 0:
        sys.exit(EXIT_CODES[reason])


def train(
    config: TrainConfig, setup: Setup, accelerator: Accelerator, folder: RunFolder, watchdog: Watchdog
) -> str | None:
    """Returns why it stopped before its end, or None."""
    # Decide: whatever can be wrong is found here, before the first step.
    say = voice(accelerator)
    store = open_store(config.recipe, say)
    verification = StoreVerification(store, accelerator)  # in a thread; no checkpoint is completed before it agrees
    tokenizer = store.load_tokenizer()
    plan = make_plan(config, store, tokenizer, accelerator, setup)
    tokens, eval_tokens = (
        place_tokens(store, split, plan.placement.where, accelerator.device, config.batch.mask_documents)
        for split in ("train", "val")
    )
    prompts = prompts_of(config.sampling, store, tokenizer)
    backup_dir = config.backup.backup_dir
    forecast = forecast_of(config, plan, assumed_here(plan, setup, accelerator), store)
    backup = Backup(backup_dir, folder, config.checkpoints_kept, say) if backup_dir is not None else None
    start = find_start(config, plan, folder, backup, accelerator)
    plan = start.plan  # which knows where to start
    if start.is_finished:
        say(on_main(accelerator, lambda: finish_again(start, folder, backup)))
        return None
    accelerator.wait_for_everyone()  # all have read the run folder before it changes
    hardware = describe(accelerator, setup, plan.model, config.batch.mask_documents)
    on_main(accelerator, lambda: begin_run(start, config, folder, backup, forecast.described(), hardware))

    # Whatever goes wrong from here on, the keeper leaves the run in order.
    with Keeper(config, start, folder, backup, accelerator, watchdog) as keeper:
        # Build: model, optimizer, and batches that are a function of the step.
        torch.manual_seed(config.seed)
        model = build_model(plan.model, start.checkpoint, config.device, setup.attn_implementation)
        accelerator.gradient_accumulation_steps = plan.batches.accumulation
        loss = prepare_loss(NextTokenLoss(model).train(), accelerator, setup)
        optimizer = accelerator.prepare(build_optimizer(model, config.optim, accelerator.device))
        if start.checkpoint is not None:
            checkpoint.load_optimizer(start.checkpoint, model, optimizer)
        if start.state.grad_scaler and accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(start.state.grad_scaler)
        batches = TrainBatches(tokens, plan.order, plan.batches, accelerator.process_index, plan.position)
        trainer = Trainer(accelerator, loss, optimizer, batches, config.optim.max_grad_norm, config.seed)
        keeper.saver.keep(model, optimizer, tokenizer, verification)
        watts = watts_of_all(accelerator)
        about = About(plan.model, model.num_parameters(), store.metadata, watts)
        validation = Validation(
            config, plan, folder, store.metadata.val, eval_tokens, tokenizer, prompts, model, loss, accelerator, about
        )
        on_gpu = is_gpu(accelerator.device, config)
        say(describe_run(start, folder, outlook(forecast, config, hardware, setup, on_gpu, store.folder)))

        gc.freeze()  # all that was imported and built: looking through it for garbage would stop a step for half a second

        # Train: learn, look, log, save, validate. Saved first: a validation that fails must not cost the steps before it.
        speed, compiled = Speed(batches, plan.model, accelerator), setup.torch_compile
        with (
            Journal(folder, forecast, accelerator, start.step, compiled, speed, config.cost.hourly_price) as journal,
            Profiler(config.profile, folder.profile, journal, accelerator, start.step) as profiler,
        ):
            journal.start_trackers(config.journal.project, config.flat())
            if start.step == 0:
                validation.write_some_text(0, journal, aloud=False)
            if start.owes_validation:
                validation.run(start.step, journal, keeper.stopper.agreed)
            for step in keeper.steps():
                profiler.before(step)
                learning_rate = learning_rate_at(step, plan.max_steps, config.optim)
                step_loss, grad_norm = trainer.step(step, learning_rate)
                keeper.health.add(step_loss, grad_norm)
                journal.count(step_loss, plan.tokens_per_step)
                done = step + 1
                logs = plan.is_due("steps", config.journal.logging_steps, done)
                saves = plan.is_due(config.checkpoint.save_strategy, config.checkpoint.save_steps, done)
                validates = plan.is_due(config.evaluation.eval_strategy, config.evaluation.eval_steps, done)
                profiler.after(done, saves or validates)
                if logs or saves or validates:
                    with speed.waiting():  # nothing else waits for the device
                        keeper.read(done)
                if logs:
                    reading = keeper.health.take_reading()
                    journal.log(done, plan.epoch(done), learning_rate, reading, plan.after(done).tokens)
                with journal.pause():
                    if saves:
                        keeper.save(done)
                    if validates:
                        validation.run(done, journal, keeper.stopper.agreed)
    say(describe_end(folder, plan, keeper.step, keeper.reason, prompts[0]))
    return keeper.reason


def main_or_restart(arguments: list[str]) -> None:
    """A run that has to go on in a fresh process replaces this one, which has closed everything by then."""
    transformers_logging.disable_progress_bar()
    try:
        main(arguments)
    except restart.Restart as fresh:
        print(fresh.reason, flush=True)
        restart.execute(fresh)


if __name__ == "__main__":
    run(main_or_restart)
