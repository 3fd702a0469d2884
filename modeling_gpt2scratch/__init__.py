"""GPT2Scratch: a GPT-2 implementation for Transformers.

Importing this package registers `model_type: gpt2scratch` with `AutoModel` and the other auto classes. Saved models
include the two files below, so that they load with `trust_remote_code=True` without this package.
"""

import transformers

from . import modeling_gpt2scratch
from .configuration_gpt2scratch import AUTO_MAP, GPT2ScratchConfig
from .modeling_gpt2scratch import GPT2ScratchForCausalLM, GPT2ScratchModel, GPT2ScratchPreTrainedModel

transformers.AutoConfig.register("gpt2scratch", GPT2ScratchConfig)
GPT2ScratchConfig.register_for_auto_class("AutoConfig")
for auto, name in list(AUTO_MAP.items())[1:]:
    model = getattr(modeling_gpt2scratch, name.split(".")[1])
    getattr(transformers, auto).register(GPT2ScratchConfig, model)
    model.register_for_auto_class(auto)  # without this, save_pretrained would not save the code

__all__ = ["GPT2ScratchConfig", "GPT2ScratchForCausalLM", "GPT2ScratchModel", "GPT2ScratchPreTrainedModel"]
