"""Model card of a fine-tuned model."""

from importlib.metadata import version
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from examples.tuning.measurements import Learned
from examples.tuning.settings import Tuning


def card(
    model: PreTrainedModel,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    results: str,
    learned: Learned,
    record: dict[str, Any],
) -> str:
    """Return the model card, without local paths. Publishing replaces its section Use."""
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=record["base_model"],
        datasets=sorted(set(record["datasets"])) or None,
        tags=[model.config.model_type, "fine-tuned"],
    )
    method = f"LoRA of rank {tuning.lora_rank} on attention and MLP, merged" if tuning.lora_rank else "all weights"
    libraries = dict.fromkeys([type(trainer).__module__.split(".")[0], "transformers", "torch"])
    libraries |= {"peft": None} if tuning.lora_rank else {}
    context, replayed = model.config.max_position_embeddings, len(trainer.train_dataset) - learned.trained
    share = (
        f"{replayed:,} windows of {context} tokens, {tuning.replay_fraction:.0%} of examples" if replayed else "none"
    )
    name = tuning.folder.name if tuning.folder.is_absolute() else tuning.folder.as_posix()
    prompt = '[{"role": "user", "content": "Hello"}]' if tokenizer.chat_template else '"Once"'
    return f"""---
{metadata.to_yaml()}
---

# {tuning.folder.name}

{", ".join(record["steps"])}: {model.num_parameters():,}
parameters, a context of {context} tokens.

## Results

{results}

## Training

| | |
|---|---|
| method | {method} |
| learning rate, epochs, seed | {tuning.learning_rate:g}, {tuning.num_train_epochs:g}, {tuning.seed} |
| examples per step | {tuning.per_device_train_batch_size * trainer.accelerator.num_processes} |
| replayed original text | {share} |
| libraries | {", ".join(f"{name} {version(name)}" for name in libraries)} |

## Use

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{name}", trust_remote_code=True)
generator({prompt})
```
"""
