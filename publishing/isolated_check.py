"""Load and run a published model with only its own code and files.

verify.py runs this in a separate process, in a temporary folder, without a token and without network access. The
package of this repository cannot be imported there.

python isolated_check.py request
"""

import json
import os
import re
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

TOKENS = 2048  # maximum number of tokens whose logits are in memory
NEW_TOKENS = 24
CALLS = ("bind", "connect", "getaddrinfo", "gethostbyaddr", "gethostbyname", "sendmsg", "sendto")
NETWORK = {f"socket.{name}" for name in CALLS}
CHANGES = {"os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"}
CHANGES |= {"os.truncate", "sqlite3.connect"}


@torch.no_grad()
def scores(model, windows: dict[str, torch.Tensor]) -> tuple[list[float], list[int]]:
    """Return the total loss in nats and the number of targets per window."""
    nats, targets = [], []
    number, context = windows["inputs"].shape
    rows_per_pass = max(1, TOKENS // context)
    for start in range(0, number, rows_per_pass):
        rows = {name: tensor[start : start + rows_per_pass] for name, tensor in windows.items()}
        hidden = model.base_model(rows["inputs"], position_ids=rows.get("positions"), use_cache=False)[0].flatten(0, 1)
        pairs = zip(hidden.split(TOKENS), rows["targets"].flatten().split(TOKENS), strict=True)
        losses = [cross_entropy(model.lm_head(part), targets, reduction="none") for part, targets in pairs]
        nats += torch.cat(losses).view(rows["targets"].shape).sum(1).tolist()
        targets += (rows["targets"] != -100).sum(1).tolist()
    return nats, targets


def restrict(secrets: list[str]) -> None:
    """Refuse network access, other programs, changes outside the folder of this process and of the Hub's cache, and
    reading the token or another process, as far as a process can restrict itself. This stops careless code, except in
    libraries written in C, such as `torch.save`. Malicious code can bypass it by calling the C library."""

    def guard(event: str, arguments: tuple) -> None:
        if event in NETWORK:
            raise PermissionError("The model's code tries to use the network.")
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"):
            raise PermissionError("The model's code tries to start another program.")
        if event != "open" and event not in CHANGES:
            return
        changes = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        paths = {"os.rename": arguments[:2], "os.link": arguments[:2], "os.symlink": arguments[1:2]}
        for path in paths.get(event, arguments[:1]):
            real = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes) else ""
            if real in files:
                raise PermissionError("The model's code tries to read the Hub token.")
            if re.match(rf"/proc/(?!{os.getpid()}/)\d+/", real):
                raise PermissionError("The model's code tries to read another process.")
            if real and changes and real != os.devnull and not real.startswith(folders):
                raise PermissionError("The model's code tries to change a file outside its folder.")

    files = {os.path.realpath(path) for path in secrets}
    folders = tuple(os.path.join(os.path.realpath(path), "") for path in (".", os.environ.get("HF_HUB_CACHE", ".")))
    sys.addaudithook(guard)


def main(request: dict) -> None:
    restrict(request["secrets"])
    sys.modules["modeling_gpt2scratch"] = None  # importing this repository's package fails: only published code may run
    location = {name: request[name] for name in ("revision", "subfolder", "trust_remote_code")}
    options = location | {"output_loading_info": True, "dtype": torch.float32, "use_safetensors": True}
    _, base = AutoModel.from_pretrained(request["model"], **options)
    model, full = AutoModelForCausalLM.from_pretrained(request["model"], **options)
    tokenizer = AutoTokenizer.from_pretrained(request["model"], **location)
    files = load_file(request["files"])
    probe = files.pop("probe")  # (1, T)
    with torch.no_grad():
        beginning = model(probe[:, :-1], use_cache=True)
        name = "cache" if "cache" in vars(beginning) else "past_key_values"  # the name before Transformers 5.24
        end = model(probe[:, -1:], **{name: beginning[name]}).logits[0]  # (1, V), with cached keys and values
        logits = torch.cat([model(probe).logits[0], end])  # (T + 1, V)
    context = model.config.max_position_embeddings
    prompt = files["inputs"][:1, : min(16, context // 2)] if files else probe[:, :1]
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=min(NEW_TOKENS, context // 2), do_sample=False
    )
    nats, targets = scores(model, files) if files else ([], [])
    of_base = set(base["unexpected_keys"]) - {"lm_head.weight"}  # the base model has no head
    wrong = map(str, {*base["missing_keys"], *full["missing_keys"], *full["unexpected_keys"], *of_base})
    save_file({"logits": logits.float().contiguous()}, request["logits"])
    answer = {"wrong_keys": sorted(wrong), "vocabulary": len(tokenizer), "nats": nats, "targets": targets}
    answer |= {"prompt": tokenizer.decode(prompt[0]), "text": tokenizer.decode(text[0, prompt.shape[1] :])}
    with open(request["answer"], "w", encoding="utf-8") as file:  # not stdout: libraries print there
        json.dump(answer, file)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        main(json.load(file))
