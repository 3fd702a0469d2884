"""Settings that differ between a command and the run it resumes: refused, allowed by name, or reported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import UserError
from limits import setting
from modeling_gpt2scratch import GPT2ScratchConfig
from training import checkpoint as checkpoints
from training.checkpoint import TrainState
from training.data import find_cached

# No checkpoint survives a change of these: its tensors would not fit.
SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_inner", "tie_word_embeddings")
# These load without complaint and then compute something else.
MEANING = ("n_head", "activation_function", "layer_norm_epsilon")
# These change what the steps to come are trained on, or how.
IDENTITY = ("tokenizer", "data", "mixed_precision", "tokens_per_step", "seed", "mask_documents")
RECORDED_SINCE_2 = {"mixed_precision"}  # by checkpoints of format 2
ALLOWED = (*MEANING, *IDENTITY)
# Settings that may differ without a word.
NOT_THE_RUN = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "allow_change", "backup_dir", "data_placement"),
    *("report_to", "project", "logging_steps", "eval_strategy", "eval_steps", "max_eval_samples"),
    *("save_strategy", "save_steps", "save_total_limit", "max_hours", "ddp_timeout"),
    *("sample_prompts", "sample_tokens", "sample_temperature", "sample_top_k"),
    *("max_nonfinite_steps", "spike_z_score", "on_spike", "profile"),
    *("torch_compile", "torch_compile_mode", "per_device_train_batch_size", "gradient_checkpointing", "hourly_price"),
    "full_determinism",
    *("plan", "plan_device", "plan_steps"),
    "attn_implementation",
}


@dataclass
class ChangeArguments:
    allow_change: list[str] = setting(
        [], f"What may differ from the checkpoint that is resumed, of: {', '.join(ALLOWED)}."
    )

    @property
    def allowed(self) -> set[str]:
        return {name for names in self.allow_change for name in names.replace(",", " ").split()}

    def problems(self) -> list[str]:
        return [
            f"allow_change names {name}, but no checkpoint survives another {name}: its weights would not fit."
            if name in SHAPE
            else f"allow_change names {name!r}; it may name {', '.join(ALLOWED)}."
            for name in sorted(self.allowed - set(ALLOWED))
        ]


def compare(
    checkpoint: Path, model: GPT2ScratchConfig, settings: dict[str, Any], arguments: ChangeArguments
) -> tuple[TrainState, list[str]]:
    """Return the state to resume from, and the settings that change, one sentence each.

    Raises:
        UserError: everything that differs and may not, one difference a line.
    """
    saved = checkpoints.load_state(checkpoint)
    try:
        saved_model = GPT2ScratchConfig.from_json_file(checkpoint / "config.json")
    except Exception as error:  # of many kinds, if a stranger wrote it
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{checkpoint / 'config.json'} is not a configuration of this model: {problem}") from error
    if missing := sorted(set(IDENTITY) - RECORDED_SINCE_2 - set(saved.settings)):
        raise UserError(f"{checkpoint} does not tell the run's {', '.join(missing)}; resume from another checkpoint.")
    before = {name: getattr(saved_model, name) for name in (*SHAPE, *MEANING)} | saved.settings
    now = {name: getattr(model, name) for name in (*SHAPE, *MEANING)} | settings
    different = [name for name in now if name in before and now[name] != before[name]]
    refused = [
        f"{_named(name, now, before)}: its weights do not fit; start again in another --output_dir"
        for name in different
        if name in SHAPE
    ]
    refused += [
        f"{_named(name, now, before)}; if that is meant, add --allow_change {name}"
        for name in different
        if name in ALLOWED and name not in arguments.allowed
    ]
    if str(saved_model.dtype) not in ("None", "float32", "torch.float32"):
        refused.append(f"its weights are {saved_model.dtype}, and training keeps float32")
    if refused:
        raise UserError("\n".join(f"{checkpoint} cannot be resumed: {difference}." for difference in refused))
    changes = [_named(name, now, before) for name in different]
    return saved, [change for name, change in zip(different, changes, strict=True) if name not in NOT_THE_RUN]


def _named(name: str, now: dict[str, Any], before: dict[str, Any]) -> str:
    if name in ("tokenizer", "data"):
        kept = find_cached(before["data"])
        trained_on = f"; the run was trained on {kept}: --data {kept} resumes it" if kept is not None else ""
        what = (
            "the tokenizer of the token store is another"
            if name == "tokenizer"
            else "the token store holds other tokens"
        )
        return f"{what}, sha256 {now[name][:12]} instead of {before[name][:12]}{trained_on}"
    return f"{name} changed from {before[name]} to {now[name]}"
