"""The product: a GPT-2 that Transformers loads as one of its own.

Importing this package makes `AutoModel.from_pretrained` and the like know `model_type: gpt2scratch`. Whatever is saved
carries the two files below, so that others load it with `trust_remote_code=True` and without this package.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_gpt2scratch import GPT2ScratchConfig
from .modeling_gpt2scratch import GPT2ScratchForCausalLM, GPT2ScratchModel, GPT2ScratchPreTrainedModel

# Without this, save_pretrained would write a folder without its code.
GPT2ScratchConfig.register_for_auto_class("AutoConfig")
GPT2ScratchModel.register_for_auto_class("AutoModel")
GPT2ScratchForCausalLM.register_for_auto_class("AutoModelForCausalLM")

AutoConfig.register("gpt2scratch", GPT2ScratchConfig)
AutoModel.register(GPT2ScratchConfig, GPT2ScratchModel)
AutoModelForCausalLM.register(GPT2ScratchConfig, GPT2ScratchForCausalLM)

__all__ = ["GPT2ScratchConfig", "GPT2ScratchForCausalLM", "GPT2ScratchModel", "GPT2ScratchPreTrainedModel"]
