"""Tokens -> checkpoints: the whole run, told from top to bottom.

accelerate launch --quiet train_accelerate.py                                  # the quickstart: nothing to download
accelerate launch --quiet train_accelerate.py --data my.txt                    # your own text, or a token store
accelerate launch --quiet train_accelerate.py --config presets/gpt2.yaml --data data/my
accelerate launch --quiet train_accelerate.py --resume_from_checkpoint runs/x  # go on where it stopped
"""

import torch
from transformers.utils import logging as transformers_logging

from command_line import run
from modeling_gpt2scratch import GPT2ScratchForCausalLM
from training import checkpoint as checkpoints
from training.batches import TrainBatches
from training.checkpoint import TrainState
from training.config import read_config, write_config
from training.data import open_store, place_tokens
from training.device import decide, describe, start_accelerator
from training.evaluate import evaluate
from training.journal import Journal, best_step, forget_after
from training.model import build_model
from training.optim import build_optimizer, learning_rate_at
from training.plan import make_plan
from training.report import write_report
from training.run_folder import RunFolder, begin, check_same_run, open_run
from training.sampling import forget_samples_after, prompts_of, sample, write_samples
from training.step import NextTokenLoss, Trainer


def main(arguments: list[str]) -> None:
    # ---- decide: whatever can be wrong is found here, before the first step ----------------------------------------
    config = read_config(arguments)
    setup = decide(config.device)
    accelerator = start_accelerator(setup, config.device, config.journal.trackers(), config.run.output_dir)
    say = accelerator.print
    store = open_store(config.data.data, config.corpus, config.vocabulary, say)
    tokenizer = store.load_tokenizer()
    plan = make_plan(config, store, tokenizer, accelerator)
    folder = RunFolder(config.run.output_dir)
    resume_from = open_run(config.run, config.flat(), say)
    state = TrainState(
        0, 0, config.seed, plan.tokens_per_step, store.metadata.identity, store.metadata.tokenizer_sha256
    )
    if resume_from is not None:
        state = check_same_run(resume_from, plan.model, state)
        if state.step >= plan.max_steps:
            say(
                f"{folder.path} is finished ({state.step:,} steps). To train it anew, add --overwrite_output_dir; to train "
                f"it longer, --resume_from_checkpoint {folder.path} --max_steps N."
            )
            return

    accelerator.wait_for_everyone()  # all have read the run folder before it changes

    # ---- build --------------------------------------------------------------------------------------------------
    if accelerator.is_main_process:
        begin(folder, resume_from)
        write_config(config, folder.config)
    torch.manual_seed(config.seed)
    if resume_from is None:
        model = build_model(plan.model, config.device.attn_implementation)
    else:
        model = GPT2ScratchForCausalLM.from_pretrained(
            resume_from, attn_implementation=config.device.attn_implementation
        )
    if config.device.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = build_optimizer(model, config.optim, accelerator.device)
    if resume_from is not None:
        checkpoints.load_optimizer(resume_from, model, optimizer)
    accelerator.gradient_accumulation_steps = plan.batches.accumulation
    loss, optimizer = accelerator.prepare(NextTokenLoss(model).train(), optimizer)
    if accelerator.scaler is not None and state.grad_scaler:
        accelerator.scaler.load_state_dict(state.grad_scaler)
    processes = accelerator.num_processes
    train_tokens, where = place_tokens(store, "train", config.data.data_placement, processes)
    eval_tokens, _ = place_tokens(store, "val", config.data.data_placement, processes)
    batches = TrainBatches(train_tokens, plan.order, plan.batches, accelerator.process_index, accelerator.device)
    trainer = Trainer(accelerator, loss, optimizer, batches, config.optim.max_grad_norm, config.seed)
    prompts = prompts_of(config.sampling, store, tokenizer)

    # ---- say what is about to happen ------------------------------------------------------------------------------
    hardware = describe(accelerator, setup, config.device)
    parameters = model.num_parameters()
    say(f"Device:  {hardware}")
    for note in setup.notes:
        say(f"         {note}")
    say(f"Model:   {parameters:,} parameters ({plan.describe_model()})")
    say(
        f"Data:    {store.folder}: {store.metadata.train.tokens:,} tokens, {where}; {plan.order.windows:,} windows an epoch"
    )
    say(f"Length:  {plan.describe_length()}")
    say(f"Run:     {folder.path}" + (f", going on after {resume_from.name}" if resume_from else ""))

    journal = Journal(folder.metrics, accelerator, plan.max_steps, state.step)
    journal.start_trackers(folder.path.name, config.flat())
    if resume_from is not None and accelerator.is_main_process:
        forget_after(folder.metrics, state.step)
        forget_samples_after(folder.samples, state.step)

    def show_samples(step: int, aloud: bool) -> list[tuple[str, str]]:
        """What the model makes of the same prompts, to samples.md and, where `aloud`, to the screen."""
        samples = []
        if accelerator.is_main_process:
            samples = sample(model, tokenizer, prompts, config.sampling, config.seed)
            write_samples(folder.samples, step, samples)
        for prompt, text in samples if aloud else []:
            journal.say(f"--- step {step}: {prompt!r}\n{prompt}{text}")
        return samples

    def save(step: int) -> None:
        if accelerator.is_main_process:
            scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
            now = state.after(step, grad_scaler=scaler)
            saved = checkpoints.save(folder.checkpoints, model, tokenizer, optimizer.optimizer, now)
            checkpoints.copy_model(saved, folder.model)
            checkpoints.prune(folder.checkpoints, config.checkpoint.save_total_limit, best_step(folder.metrics))
        accelerator.wait_for_everyone()

    # ---- train --------------------------------------------------------------------------------------------------
    if state.step == 0:
        show_samples(0, aloud=True)
    for step in range(state.step, plan.max_steps):
        learning_rate = learning_rate_at(step, plan.max_steps, config.optim)
        step_loss, grad_norm = trainer.step(step, learning_rate)
        journal.count(step_loss, plan.tokens_per_step)
        done, last = step + 1, step + 1 == plan.max_steps
        if step == state.step:
            journal.first_step_done()
        if done % config.journal.logging_steps == 0 or last:
            journal.log(done, plan.epoch(done), learning_rate, grad_norm, done * plan.tokens_per_step)
        with journal.pause():
            # Saved before it is evaluated: an evaluation that fails must not cost the steps before it.
            if plan.is_due(config.checkpoint.save_strategy, config.checkpoint.save_steps, done):
                save(done)
            if plan.is_due(config.evaluation.eval_strategy, config.evaluation.eval_steps, done):
                limit = None if last else config.evaluation.max_eval_samples
                result = evaluate(
                    loss,
                    eval_tokens,
                    store.metadata.val,
                    plan.model.n_positions,
                    plan.batches.micro_batch,
                    accelerator,
                    limit,
                )
                journal.log_evaluation(done, plan.epoch(done), result.metrics())
                samples = show_samples(done, aloud=last)
                if accelerator.is_main_process:
                    write_report(folder, plan.model, parameters, store.metadata, config.flat(), hardware, samples)

    # ---- say what to do next ------------------------------------------------------------------------------------
    journal.close()
    say(f"\nDone: {folder.model} is the model, {folder.report} tells the run. Next:")
    say(f'  python generate.py {folder.path} --prompt "{prompts[0].splitlines()[0] if prompts[0].strip() else "The"}"')
    say(f"  python push_to_hub.py {folder.path} --repo_id YOUR_NAME/{folder.path.name}")


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    run(main)
