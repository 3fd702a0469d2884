"""Train a chat model to prefer the better of two answers with TRL's DPOTrainer, by default with LoRA.

python -m examples.finetune_preferences runs/x-chats --data pairs.jsonl    # lines of {"prompt", "chosen", "rejected"}
python -m examples.finetune_preferences runs/x-chats --data pairs.jsonl --lora_rank 0    # all weights
"""

import training.runtime.threads  # noqa: F401  (first: torch reads its settings; for Ctrl-C during other imports)

import copy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from common.errors import UserError
from common.limits import setting
from examples.tuning.base import load
from examples.tuning.measurements import MEASURED, Learned, score, until
from examples.tuning.records import UselessError, read_examples, splits, with_system
from examples.tuning.settings import Tuning, parse, start
from examples.tuning.template import give_template, template_errors, without_control_tokens
from examples.tuning.trainer import lora, shared_settings, train_and_save
from tokenizer.corpus.chat import normalized


@dataclass
class PreferenceTuning(Tuning):
    replay_fraction: float = setting(0.0, "Always 0: DPO trains on pairs only.", maximum=0)
    beta: float = setting(0.1, "A higher value keeps the model closer to the one before.", above=0, maximum=100)
    # Without it, DPO can lower the likelihood of both answers: measured in docs/finetuning.md.
    sft_weight: float = setting(1.0, "Weight of the chosen answer's own loss; 0 is plain DPO.", maximum=100)
    lora_factor = 1  # a tenth of the rate for chats


def pair_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return `prompt`, `chosen` and `rejected` of a record as messages; raise a `ValueError` if one is missing.
    Text with a prompt becomes turns of the user and the assistant. Without a prompt, or if the answers repeat it, the
    prompt is their common beginning; answers that are text then stay text."""
    from trl import extract_prompt

    if missing := [name for name in ("chosen", "rejected") if not record.get(name) and record.get("chosen") != ""]:
        hint = "; examples.finetune_chat reads chats" if "messages" in record else ""
        raise ValueError(f"has no {' and no '.join(missing)}; each record needs prompt, chosen and rejected{hint}")
    pair = {name: record.get(name) for name in ("prompt", "chosen", "rejected") if record.get(name) or name != "prompt"}
    if len(pair) == 3 and all(isinstance(part, str) for part in pair.values()) and " " in pair["prompt"]:
        answers = {name: pair[name].removeprefix(pair["prompt"]) for name in ("chosen", "rejected")}
        if all(answer[:1].isspace() and answer != pair[name] for name, answer in answers.items()):
            pair |= answers  # without the prompt that they repeat
    if "prompt" in pair:
        turns = {name: [{"role": "user" if name == "prompt" else "assistant", "content": pair[name]}] for name in pair}
        pair = {name: turns[name] if isinstance(pair[name], str) else pair[name] for name in pair}
    if not all(isinstance(part, str) for part in pair.values()):
        pair = {name: normalized(part) for name, part in pair.items()}
    if None in pair.values():
        raise ValueError("has a part that is neither text nor a list of messages with role and content")
    answer = pair["chosen"] if isinstance(pair["chosen"], str) else pair["chosen"][-1]["content"]
    if not answer.strip():
        raise UselessError("has an empty answer, chosen")
    if pair["chosen"] == pair["rejected"]:
        raise UselessError("has equal answers, chosen and rejected")
    if "prompt" not in pair or any(pair[name][0]["role"] in ("system", "user") for name in ("chosen", "rejected")):
        given = pair.get("prompt", [])
        pair = extract_prompt(pair) if pair["chosen"][:1] == pair["rejected"][:1] else {}
        if pair and given and given[-1]["role"] != "user" and pair["prompt"][: len(given)] != given:
            pair["prompt"] = given + pair["prompt"]  # the answers continue it, and do not repeat it
    if not pair.get("prompt"):
        raise ValueError("has no prompt, and its answers have no common beginning")
    if record.get("system") and isinstance(pair["prompt"], str):
        raise ValueError("has a system prompt, but its answers are text without messages; write all as messages")
    return pair | {"prompt": with_system(record, pair["prompt"])}


@template_errors()
def main(arguments: list[str]) -> None:
    tuning = parse(__doc__, arguments, "trl", kind=PreferenceTuning)
    from trl import DPOConfig, DPOTrainer

    pairs = read_examples(tuning, pair_of)
    if len({type(pair["prompt"]) for pair in pairs}) > 1:
        raise UserError(f"{tuning.data} has records with messages and records with text only; convert all to messages.")
    model, tokenizer, original = load(tuning)
    pairs = [{name: without_control_tokens(part, tokenizer) for name, part in pair.items()} for pair in pairs]
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    train, held_out = splits(pairs, [pair["prompt"] for pair in pairs], tuning, "pairs with different prompts")
    turn_end = give_template(tokenizer)
    model.generation_config.eos_token_id = sorted({turn_end, tokenizer.eos_token_id} - {None})
    context = model.config.max_position_embeddings
    settings = {"max_length": context, "gradient_checkpointing": False, "beta": tuning.beta, **shared_settings(tuning)}
    trainer = DPOTrainer(
        model,
        None if tuning.lora_rank else copy.deepcopy(model),  # with LoRA, the model without its adapter is the reference
        DPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, tuning.sft_weight], **settings),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora(tuning),
    )
    for part, remedy in ((trainer.train_dataset, ""), (trainer.eval_dataset, ", or choose another --seed")):
        if not len(part):  # TRL drops pairs whose prompt fills the context
            which = "held-out prompts" if remedy else "prompts"
            raise UserError(
                f"In {tuning.data}, the {which} fill the context of {context} tokens; shorten them{remedy}."
            )
    scored = trainer.eval_dataset[:MEASURED]
    answers = {name: [until(turn_end, ids) for ids in scored[f"{name}_ids"]] for name in ("chosen", "rejected")}

    def measure(model: PreTrainedModel) -> dict[str, float]:
        chosen, rejected = (score(model, zip(scored["prompt_ids"], ids, strict=True)) for ids in answers.values())
        wins = sum(good > bad for (good, _), (bad, _) in zip(chosen, rejected, strict=True))
        exact = sum(is_greedy for _, is_greedy in chosen)
        return {"preference accuracy": wins / len(chosen), "exact match": exact / len(chosen)}

    method = f"trained with DPO (beta {tuning.beta:g}, sft_weight {tuning.sft_weight:g})"
    sizes = len(trainer.train_dataset), len(trainer.eval_dataset)
    train_and_save(trainer, tokenizer, tuning, original, Learned(method, *sizes, "pairs", "--chat", measure))


if __name__ == "__main__":
    start(main)
