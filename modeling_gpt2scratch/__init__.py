"""GPT2Scratch: a GPT-2 implementation for Transformers.

Importing this package registers `model_type: gpt2scratch` with `AutoModel` and the other auto classes. Saved models include the
two files below, so that they load with `trust_remote_code=True` without this package.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_gpt2scratch import GPT2ScratchConfig
from .modeling_gpt2scratch import GPT2ScratchForCausalLM, GPT2ScratchModel, GPT2ScratchPreTrainedModel

# Without this, save_pretrained would not save the code.
GPT2ScratchConfig.register_for_auto_class("AutoConfig")
GPT2ScratchModel.register_for_auto_class("AutoModel")
GPT2ScratchForCausalLM.register_for_auto_class("AutoModelForCausalLM")

AutoConfig.register("gpt2scratch", GPT2ScratchConfig)
AutoModel.register(GPT2ScratchConfig, GPT2ScratchModel)
AutoModelForCausalLM.register(GPT2ScratchConfig, GPT2ScratchForCausalLM)

__all__ = ["GPT2ScratchConfig", "GPT2ScratchForCausalLM", "GPT2ScratchModel", "GPT2ScratchPreTrainedModel"]
