"""Training with LoRA or of all weights, and the output folder."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainerState

from common.atomic import set_default_permissions, unfinished_path
from common.errors import UserError, disk_errors, require_room
from examples.tuning.base import RECORD, OriginalText, extend_record
from examples.tuning.card import card
from examples.tuning.measurements import Learned, explanation, table
from examples.tuning.settings import Tuning
from modeling_gpt2scratch.loading import CONFIG
from tokenizer.encoding import vocabulary
from training.checkpoints.checkpoint import MODEL_FILES
from training.checkpoints.run_folder import RunFolder
from training.guard.lock import locked
from training.runtime.distributed import on_main

FEW_STEPS = 20
FILES = (*MODEL_FILES, RECORD, "README.md", "adapter/*")  # of an output folder


class Progress(ProgressCallback):
    """Transformers' progress bar, with a line of the loss in place of a dict of all values."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            loss, norm, rate = (float(logs[name]) for name in ("loss", "grad_norm", "learning_rate"))
            values = f"loss {loss:.3f}  norm {norm:.2f}  lr {rate:.1e}"
            self.training_bar.write(f"step {state.global_step}/{state.max_steps}  {values}")


def lora(tuning: Tuning):
    """Return PEFT's configuration, or None for training all weights.
    PEFT knows default layers only for architectures in its own list. `all-linear` means the four matrices of each
    block, in attention and MLP, but not the head: a tied head stays tied."""
    if tuning.lora_rank == 0:
        return None
    from peft import LoraConfig

    return LoraConfig(r=tuning.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def shared_settings(tuning: Tuning) -> dict[str, Any]:
    """Return the settings shared by `TrainingArguments`, `SFTConfig` and `DPOConfig`."""
    return {
        "output_dir": str(tuning.folder),
        "learning_rate": tuning.learning_rate,
        "num_train_epochs": tuning.num_train_epochs,
        "per_device_train_batch_size": tuning.per_device_train_batch_size,
        "seed": tuning.seed,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # fraction of all steps
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        "logging_steps": 10,
        "save_strategy": "no",
        "ddp_find_unused_parameters": False,
        "use_cpu": not torch.accelerator.is_available(),  # otherwise, processes without a GPU would not be connected
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
    }


def train_and_save(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, tuning: Tuning, original: OriginalText, learned: Learned
) -> None:
    """Train, write the output folder, and print the measurements before and after, and the next commands. Of several
    processes, the first one measures and writes. Raise a `UserError` if the folder is in use, or if the weights are not
    finite."""
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    lock = ExitStack()

    def measure_first() -> dict[str, float]:
        lock.enter_context(locked(tuning.folder, lambda _: None, patience=0))
        tuning.check()  # another command may have written it
        parent = tuning.folder.absolute().parent
        require_room(parent, 4 * trainer.model.num_parameters(), "The model takes", "make room first")
        return learned.measure(trainer.model) | original.bits_per_byte(trainer.model)

    try:
        before = on_main(trainer.accelerator, measure_first)
        batch = trainer.args.train_batch_size * trainer.accelerator.num_processes
        if len(trainer.train_dataset) * tuning.num_train_epochs < FEW_STEPS * batch:
            trainer.args.warmup_steps = 0  # the first step of a warm-up has the rate 0
        trainer.train()
        if not trainer.is_world_process_zero():
            return
        with disk_errors(tuning.folder), unfinished_path(tuning.folder, patterns=FILES) as unfinished:
            model = save(trainer, tokenizer, tuning, unfinished)
            record = extend_record(tuning, learned, original, unfinished)
            after = learned.measure(model) | original.bits_per_byte(model)
            results = f"{table(before, after)}\n\n{explanation(before, learned)}"
            text = card(model, trainer, tokenizer, tuning, results, learned, record)
            (unfinished / "README.md").write_text(text, encoding="utf-8")
            set_default_permissions(unfinished)
        path = shlex.quote(str(tuning.folder))
        print(f"{table(before, after)}\nThe model is in {tuning.folder}. Next:")
        print(f"  python generate.py {path} {learned.use}")
        if model.config.model_type == "gpt2scratch":
            name = RunFolder(tuning.folder).repository_name
            print(f"  python push_to_hub.py {path} --repo_id YOUR_NAME/{name}")
    except KeyboardInterrupt:
        if not (tuning.folder / CONFIG).is_file():
            print("\nNothing is saved before the end. The same command starts again.")
        raise
    finally:
        lock.close()


def save(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, tuning: Tuning, folder: Path) -> PreTrainedModel:
    """Save the trained model, with its adapter merged into it, and the tokenizer to `folder`; return this model."""
    # Without autocast, so that both measurements are in fp32.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if not all(weights.isfinite().all() for weights in model.parameters()):
        raise UserError(
            f"The weights are not finite after training at a peak rate of {tuning.learning_rate:g}; "
            "set a lower --learning_rate."
        )
    if tuning.lora_rank:
        model.save_pretrained(folder / "adapter")
        model = model.merge_and_unload()
    model.config.use_cache = True  # Trainer turns it off, which would make generation slow
    model.save_pretrained(folder)
    vocabulary.save(tokenizer, folder, model.config.max_position_embeddings)
    return model
