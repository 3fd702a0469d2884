"""Shared parts of the recipes. A recipe writes this folder:

OUT/
    config.json, model.safetensors, tokenizer.json ...   a complete model; a LoRA adapter is merged into it
    README.md      model card: base model, data, method, and measurements before and after
    adapter/       with LoRA: the adapter as saved by PEFT
    finetuning.json    the steps so far and the store of the original text, for the next recipe; never published
"""
