"""Validation while training: the loss on held-out text, what the model writes now, and the report of both."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from modeling_gpt2scratch import GPT2ScratchForCausalLM
from tokenizer.store import Split
from training.config import TrainConfig
from training.evaluate import Evaluation, evaluate
from training.guard.health import DivergenceError
from training.log import Journal
from training.plan import Plan
from training.reporting.report import About, write_report
from training.run_folder import RunFolder
from training.sampling import sample, write_samples
from training.sharding import generating
from training.tokens import Tokens


@dataclass
class Validation:
    config: TrainConfig
    plan: Plan
    folder: RunFolder
    split: Split
    tokens: Tokens  # of the validation split
    tokenizer: PreTrainedTokenizerBase
    prompts: list[str]
    model: GPT2ScratchForCausalLM
    loss: nn.Module  # the prepared `NextTokenLoss` of the model
    accelerator: Accelerator
    about: About

    def run(self, step: int, journal: Journal, stop: Callable[[], object]) -> None:
        """Scores the model after `step` steps. Where `stop` says so, it ends early and leaves nothing: resumed, the run
        begins with this validation."""
        last = step == self.plan.max_steps

        def watch(share: float) -> object:
            journal.show_progress("validating", share)
            return stop()

        def score(most: int | None) -> Evaluation | None:
            batches = self.plan.batches
            return evaluate(
                self.loss,
                self.tokens,
                self.split,
                batches.context,
                batches.micro_batch,
                self.accelerator,
                most,
                watch,
            )

        most = self.config.evaluation.max_eval_samples
        result = score(None if last else most)  # the last one scores everything
        if result is None:
            return
        if not math.isfinite(result.loss):
            raise DivergenceError(f"The validation loss is {result.loss} after step {step:,}", step)
        metrics = result.metrics()
        if last and most is not None:
            sampled = score(most)
            if sampled is None:
                return
            metrics["eval_sampled_loss"] = sampled.loss
        journal.log_evaluation(step, self.plan.epoch(step), metrics)
        self.write_some_text(step, journal, aloud=last)
        if self.accelerator.is_main_process:
            write_report(self.folder, self.about)

    def write_some_text(self, step: int, journal: Journal, aloud: bool) -> None:
        """Writes prompts and their continuations to samples.md, and to the screen if `aloud`: before the first step, they are noise."""
        with generating(self.model):
            samples = sample(self.model, self.tokenizer, self.prompts, self.config.sampling, self.config.seed)
        if not self.accelerator.is_main_process:
            return
        write_samples(self.folder.samples, step, samples)
        for prompt, text in samples if aloud else []:
            journal.say(f"--- step {step}:\n{prompt}{text}")
