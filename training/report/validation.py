"""Validation during training: loss on held-out text, samples, and the report."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch

from common.errors import UserError
from common.terminal import CONTROL
from training.checkpoints.samples import write_samples
from training.evaluation.sampling import sample
from training.evaluation.scoring import evaluate
from training.log.run_log import RunLog
from training.plan.run import Run
from training.report.facts import begin_report
from training.report.report import write_report
from training.step.loss import DivergenceError
from training.step.sharding import generating
from training.step.train_step import TrainStep


class Validation:
    def __init__(self, run: Run, train_step: TrainStep, max_samples: int | None, compiles: bool):
        """Score `max_samples` windows before the last step, or all if None, and all windows after the last step.
        `compiles`: whether a compiled loss is also compiled for validations."""
        self.run, self.train_step, self.max_samples = run, train_step, max_samples
        self.stance = "default" if compiles or not run.setup.torch_compile else "force_eager"
        if run.accelerator.is_main_process:
            parameters = train_step.model.num_parameters()
            begin_report(run.folder, run.plan.model, parameters, run.data.store.metadata)

    def validate(self, step: int, log: RunLog, stop: Callable[[], object]) -> None:
        """Score the model after `step` steps: the average of its weights, if there is one.
        If `stop` returns true, end early and write nothing. The resumed run starts with this validation."""

        def watch(share: float) -> object:
            log.show_progress("validating", share)
            return stop()

        is_last = step == self.run.plan.max_steps
        with self.train_step.averaged():
            metrics = self._score(None if is_last else self.max_samples, watch)
            if metrics is None:
                return
            if not math.isfinite(loss := metrics["eval_loss"]):
                raise DivergenceError(f"The validation loss is {loss} after step {step:,}", step)
            if is_last and self.max_samples is not None:
                sampled = self._score(self.max_samples, watch)
                if sampled is None:
                    return
                metrics |= {"eval_sampled_loss": sampled["eval_loss"], "eval_sampled_tokens": sampled["eval_tokens"]}
        log.write(step, metrics)
        self.write_samples(step, log, prints=is_last)
        if self.run.accelerator.is_main_process:
            try:
                write_report(self.run.folder)
            except UserError as problem:  # config.yaml is being edited
                log.say(f"WARNING: No report was written: {problem}")

    def _score(self, limit: int | None, watch: Callable[[float], object]) -> dict[str, float] | None:
        run, loss = self.run, self.train_step.loss
        split, batches = run.data.store.metadata.val, run.plan.batches
        with torch.compiler.set_stance(self.stance):
            return evaluate(loss, run.data.val, split, batches, run.accelerator, limit, watch)

    def write_samples(self, step: int, log: RunLog, prints: bool) -> None:
        """Write prompts and continuations to samples.md, and print them if `prints`."""
        model, seed = self.train_step.model, self.run.plan.order.seed
        needs_half = self.run.setup.attn_implementation.startswith("flash_attention")
        with (
            self.train_step.averaged(),
            generating(model),
            self.run.accelerator.autocast() if needs_half else nullcontext(),
        ):
            samples = sample(model, self.run.data.tokenizer, self.run.sampling, seed)
        if not self.run.accelerator.is_main_process:
            return
        write_samples(self.run.folder.samples, step, samples)
        for prompt, text in samples if prints else []:
            log.say(f"--- step {step}:\n{prompt}{text}".translate(CONTROL))
