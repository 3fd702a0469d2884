"""Tokens -> checkpoints: the whole run, told from top to bottom.

accelerate launch --quiet train_accelerate.py                                  # the quickstart: nothing to download
accelerate launch --quiet train_accelerate.py --data my.txt                    # your own text, or a token store
accelerate launch --quiet train_accelerate.py --config presets/gpt2.yaml --data data/my
accelerate launch --quiet train_accelerate.py --resume_from_checkpoint runs/x  # go on where it stopped
"""

import torch
from transformers.utils import logging as transformers_logging

from command_line import run
from training import checkpoint
from training.batches import TrainBatches
from training.checkpoint import TrainState
from training.config import read_config, write_config
from training.data import open_store, place_tokens
from training.device import decide, describe, start_accelerator, stop_accelerator
from training.evaluate import evaluate
from training.journal import Journal, best_step
from training.model import build_model
from training.optim import build_optimizer, learning_rate_at
from training.plan import make_plan
from training.report import write_report
from training.run_folder import RunFolder, begin, check_same_run, open_run
from training.sampling import prompts_of, sample, write_samples
from training.sharding import generating, shard
from training.step import NextTokenLoss, Trainer


def main(arguments: list[str]) -> None:
    # Decide: whatever can be wrong is found here, before the first step.
    config = read_config(arguments)
    setup = decide(config.device)
    accelerator = start_accelerator(setup, config.device, config.journal.trackers(), config.run.output_dir)
    main_process, say = accelerator.is_main_process, accelerator.print
    store = open_store(config.recipe, say)
    tokenizer = store.load_tokenizer()
    plan = make_plan(config, store, tokenizer, accelerator, setup.shards(accelerator))
    tokens, eval_tokens = (
        place_tokens(store, split, plan.placement.where, accelerator.device, config.batch.mask_documents)
        for split in ("train", "val")
    )
    prompts = prompts_of(config.sampling, store, tokenizer)
    folder = RunFolder(config.run.output_dir)
    resume_from = open_run(config.run, config.flat(), say)
    state = TrainState.at_start(config.seed, plan.tokens_per_step, store.metadata)
    if resume_from is not None:
        state = check_same_run(resume_from, plan.model, state)
        if state.step >= plan.max_steps:
            if main_process and not folder.model.exists():  # killed between the last save and this copy
                checkpoint.copy_model(resume_from, folder.model)
            say(folder.finished_message(state.step))
            return
    accelerator.wait_for_everyone()  # all have read the run folder before it changes
    if main_process:
        begin(folder, state.step, resume_from)
        write_config(config, folder.config)

    # Build: model, optimizer, and batches that are a function of the step.
    torch.manual_seed(config.seed)
    model = build_model(plan.model, resume_from, config.device)
    accelerator.gradient_accumulation_steps = plan.batches.accumulation
    loss = NextTokenLoss(model).train()
    loss = shard(loss, accelerator, setup.sharding) if setup.shards(accelerator) else accelerator.prepare(loss)
    optimizer = accelerator.prepare(build_optimizer(model, config.optim, accelerator.device))
    if resume_from is not None:
        checkpoint.load_optimizer(resume_from, model, optimizer)
    if state.grad_scaler:
        accelerator.scaler.load_state_dict(state.grad_scaler)
    batches = TrainBatches(tokens, plan.order, plan.batches, accelerator.process_index)
    trainer = Trainer(accelerator, loss, optimizer, batches, config.optim.max_grad_norm, config.seed)
    hardware = describe(accelerator, setup, config.device)
    say("\n".join([f"Device:  {hardware}", *(f"         {note}" for note in setup.notes)]))
    say(f"Model:   {plan.describe_model()}, {model.num_parameters():,} parameters")
    say(f"Data:    {store.folder}, {plan.placement}: {plan.describe_data()}")
    say(f"Length:  {plan.describe_length()}")
    say(f"Run:     {folder.path}" + (f", going on after {resume_from.name}" if resume_from else ""))

    def save(step: int) -> None:
        snapshot = checkpoint.take_snapshot(model, optimizer, keep=main_process)
        if main_process:
            scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
            shell = checkpoint.shell_of(model)
            saved = checkpoint.save(folder.checkpoints, snapshot, shell, tokenizer, state.after(step, scaler))
            checkpoint.copy_model(saved, folder.model)
            checkpoint.prune(folder.checkpoints, config.checkpoint.save_total_limit, best_step(folder.metrics))
        accelerator.wait_for_everyone()

    def write_some_text(step: int, aloud: bool) -> list[tuple[str, str]]:
        with generating(model):
            samples = sample(model, tokenizer, prompts, config.sampling, config.seed)
        if not main_process:
            return []
        write_samples(folder.samples, step, samples)
        for prompt, text in samples if aloud else []:
            journal.say(f"--- step {step}: {prompt!r}\n{prompt}{text}")
        return samples

    def validate(step: int, last: bool) -> None:
        most = None if last else config.evaluation.max_eval_samples  # the last one scores everything
        split, context, micro_batch = store.metadata.val, plan.batches.context, plan.batches.micro_batch
        result = evaluate(loss, eval_tokens, split, context, micro_batch, accelerator, most)
        journal.log_evaluation(step, plan.epoch(step), result.metrics())
        samples = write_some_text(step, aloud=last)
        if main_process:
            write_report(folder, plan.model, model.num_parameters(), store.metadata, config.flat(), hardware, samples)

    # Train: learn, log, save, validate. Saved first: a validation that fails must not cost the steps before it.
    with Journal(folder.metrics, accelerator, plan.max_steps, state.step, setup.torch_compile) as journal:
        journal.start_trackers(folder.path.name, config.flat())
        if state.step == 0:
            write_some_text(0, aloud=True)
        for step in range(state.step, plan.max_steps):
            learning_rate = learning_rate_at(step, plan.max_steps, config.optim)
            step_loss, grad_norm = trainer.step(step, learning_rate)
            journal.count(step_loss, plan.tokens_per_step)
            done, last = step + 1, step + 1 == plan.max_steps
            if plan.is_due("steps", config.journal.logging_steps, done):
                journal.log(done, plan.epoch(done), learning_rate, grad_norm, done * plan.tokens_per_step)
            with journal.pause():
                if plan.is_due(config.checkpoint.save_strategy, config.checkpoint.save_steps, done):
                    journal.refuse_non_finite(done, learning_rate, step_loss, grad_norm)
                    save(done)
                if plan.is_due(config.evaluation.eval_strategy, config.evaluation.eval_steps, done):
                    validate(done, last)

    stop_accelerator(accelerator)
    say(f"\nDone: {folder.model} is the model, {folder.report} tells the run. Next:")
    say(f'  python generate.py {folder.path} --prompt "{prompts[0].splitlines()[0] if prompts[0].strip() else ""}"')
    say(f"  python push_to_hub.py {folder.path} --repo_id YOUR_NAME/{folder.path.name}")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
