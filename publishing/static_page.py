"""Static page whose models run in the visitor's browser: its files, for any web server or a static Space."""

import json
import os
import shutil
import tarfile
from base64 import b64encode
from contextlib import suppress
from hashlib import sha512
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from transformers import PreTrainedTokenizerBase

from common.atomic import file_sha256, unfinished_path
from common.errors import UserError
from common.removal import renew
from modeling_gpt2scratch.prompts import end_tokens, turn_end
from publishing.demo_models import DemoModel
from publishing.gguf_file import unusual_parts
from publishing.onnx_file import FILES as ONNX
from publishing.onnx_file import check_onnx, write_onnx
from publishing.published_model import PublishedModel, find_folder
from publishing.verify import expect

PAGE = {"index.html": ".html", "page.js": ".js", "page.css": ".css"}
VERSION = "1.30.0"  # of onnxruntime-web, with the SHA-512 that npm lists
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
REGISTRY = "https://registry.npmjs.org"  # npm's default; npm_config_registry names another, as for npm
CDN = "https://cdn.jsdelivr.net"
WASM = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = ("ort.webgpu.bundle.min.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
PACKAGE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2scratch" / f"onnxruntime-web-{VERSION}.tgz"
)
MARK = "\U0010ffff"  # a message of a chat
FILES = (
    *PAGE,
    "models.json",
    "README.md",
    "runtime/*",
    *(f"models/*/{name}" for name in (*ONNX.values(), "tokenizer.json")),
)


def write_page(
    entries: list[DemoModel], destination: Path, title: str, examples: list[str], kind: str, use_cdn: bool
) -> None:
    """Write the page for models with ONNX files of type `kind`, replacing an earlier page. With `use_cdn`, it loads
    onnxruntime-web from a CDN. Raise a `UserError` if a model cannot run in a browser."""
    folders = [find_folder(Path(entry.source), None) for entry in entries]
    for folder in folders:
        check_onnx(folder, [kind])
    releases = [PublishedModel.read(folder) for folder in folders]
    for entry, release in zip(entries, releases, strict=True):
        if parts := unusual_parts(release.tokenizer):
            raise UserError(
                f"{entry.name} cannot run in a browser: its tokenizer has {', '.join(parts)}, but the page supports "
                f"GPT-2's byte-level BPE and characters; show it with a page that runs on a server."
            )
    renew(destination, "static page", FILES)
    runtime = f"{CDN}/npm/onnxruntime-web@{VERSION}/dist/" if use_cdn else "runtime/"
    if not use_cdn:
        write_runtime(destination / "runtime")
    for name, suffix in PAGE.items():
        shutil.copy(Path(__file__).with_suffix(suffix), destination / name)
    if use_cdn:
        page = destination / "index.html"
        text = page.read_text(encoding="utf-8").replace("src 'self'", f"src 'self' {CDN}")
        page.write_text(text, encoding="utf-8")
    models = [
        _write_model(entry, release, destination / "models" / str(i), kind)
        for i, (entry, release) in enumerate(zip(entries, releases, strict=True))
    ]
    kept = ["page.js", "page.css", *(runtime + name for name in WASM), *(model["tokenizerFile"] for model in models)]
    content = {"title": title, "runtime": runtime, "examples": examples, "files": kept, "models": models}
    (destination / "models.json").write_text(json.dumps(content, indent=1) + "\n")


def _write_model(entry: DemoModel, release: PublishedModel, folder: Path, kind: str) -> dict[str, Any]:
    """Write the files of a model, and return what page.js must know."""
    folder.mkdir(parents=True)
    model, tokenizer, config = release.model, release.tokenizer, release.model.config
    write_onnx(model, expect(release), folder, [kind])
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    ends, chat = end_tokens(model), chat_parts(tokenizer)
    return {
        "name": entry.name,
        "facts": [f"{model.num_parameters():,} parameters", *entry.facts],
        "file": f"models/{folder.name}/{ONNX[kind]}",
        "bytes": (folder / ONNX[kind]).stat().st_size,
        "sha256": file_sha256(folder / ONNX[kind]),
        "tokenizerFile": f"models/{folder.name}/tokenizer.json",
        "heads": config.n_head,
        "width": config.n_embd // config.n_head,
        "context": config.n_positions,
        "vocabulary": config.vocab_size,
        "bos": tokenizer.bos_token_id,
        "ends": [*ends, turn_end(tokenizer)] if chat else ends,
        "chat": chat,
    }


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the texts that the chat template writes before and after a message of each role, and the one that opens an
    answer. Return None if there is no template, or one that does not write a chat as a sequence of messages."""

    def rendered(*roles: str, is_open: bool = False) -> str:
        chat = [{"role": role, "content": MARK} for role in roles]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=is_open)

    with suppress(Exception):  # a template may raise anything
        user, both, three = rendered("user"), rendered("user", "assistant"), rendered("user", "assistant", "user")
        opening = rendered("user", is_open=True)
        if both.startswith(user) and three == both + user and opening.startswith(user):
            parts = {"user": user.split(MARK), "assistant": both.removeprefix(user).split(MARK)}
            return parts | {"open": opening.removeprefix(user)} if all(len(it) == 2 for it in parts.values()) else None
    return None


def write_runtime(folder: Path) -> None:
    """Write onnxruntime-web with its license to a new folder. The package from npm is kept in the user's cache.
    Raise a `UserError` if it cannot be downloaded, or is another one."""
    registry = os.environ.get("npm_config_registry") or REGISTRY  # noqa: SIM112 (npm's own name)
    is_kept = PACKAGE.is_file()
    source = str(PACKAGE) if is_kept else f"{registry.rstrip('/')}/onnxruntime-web/-/{PACKAGE.name}"
    try:
        with urlopen(PACKAGE.as_uri() if is_kept else source, timeout=60) as answer:
            package = answer.read()
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be loaded ({error}); try again, or add --cdn to use a CDN.") from error
    if b64encode(sha512(package).digest()).decode() != INTEGRITY:
        raise UserError(f"{source} is not onnxruntime-web {VERSION}: its SHA-512 differs; delete it, and try again.")
    if not is_kept:
        PACKAGE.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_path(PACKAGE, ".tmp") as draft:
            draft.write_bytes(package)
    folder.mkdir()
    with tarfile.open(fileobj=BytesIO(package)) as archive:
        for file in (*WASM, *WEBGPU):
            (folder / file).write_bytes(archive.extractfile(f"package/dist/{file}").read())
    for file in ("LICENSE", "ThirdPartyNotices.txt"):  # the npm package has none
        shutil.copy(Path(find_spec("onnxruntime").origin).with_name(file), folder / file)
