"""Static page whose models run in the visitor's browser: its files, for any web server or a static Space."""

import json
import os
import shutil
import tarfile
from base64 import b64encode
from contextlib import suppress
from hashlib import sha512
from http.client import HTTPException
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from transformers import AutoConfig, PreTrainedTokenizerBase

from common.atomic import file_sha256, unfinished_path
from common.errors import UserError
from common.removal import renew
from modeling_gpt2scratch.loading import CONFIG, GENERATION, TOKENIZER, load_tokenizer, read_json, read_model_config
from modeling_gpt2scratch.prompts import turn_end
from publishing.demo_models import DemoModel
from publishing.gguf_file import unusual_parts
from publishing.onnx_file import FILES as ONNX
from publishing.onnx_file import check_onnx, check_packages, write_onnx
from publishing.published_model import PublishedModel, find_folder
from publishing.upload import hub_errors
from publishing.verify import expect
from training.checkpoints.loading import model_errors

PAGE = {"index.html": ".html", "page.js": ".js", "page.css": ".css"}
VERSION = "1.30.0"  # of onnxruntime-web, with the SHA-512 that npm lists
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
REGISTRY = "https://registry.npmjs.org"  # npm's default; npm_config_registry names another, as for npm
CDN = "https://cdn.jsdelivr.net"
HUB_STORAGE = "https://*.hf.co"  # to which the Hub redirects requests for large files
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")  # and the same with WebGPU
RUNTIME += ("ort.webgpu.bundle.min.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
PACKAGE = CACHE / "gpt2scratch" / f"onnxruntime-web-{VERSION}.tgz"
MARK = "\U0010ffff"  # a message of a chat
MODEL_FILES = (*(f"models/*/{name}" for name in ONNX.values()), "models/*/tokenizer.json")
FILES = (*PAGE, "models.json", "README.md", "runtime/*", *MODEL_FILES)


def write_page(
    entries: list[DemoModel], destination: Path, title: str, examples: list[str], kind: str, use_cdn: bool
) -> None:
    """Write the page for models with ONNX files of type `kind`, replacing an earlier page. It loads models on the Hub
    from there, and with `use_cdn` onnxruntime-web from a CDN. Raise a `UserError` if a browser cannot run a model."""
    check_packages()
    models = [_local(entry, kind) if Path(entry.source).exists() else _on_hub(entry, kind) for entry in entries]
    package = None if use_cdn else runtime_package()  # downloaded before the earlier page is removed
    renew(destination, "static page", FILES)
    runtime = f"{CDN}/npm/onnxruntime-web@{VERSION}/dist/" if use_cdn else "runtime/"
    if package is not None:
        write_runtime(destination / "runtime", package)
    for name, suffix in PAGE.items():
        shutil.copy(Path(__file__).with_suffix(suffix), destination / name)
    page = (destination / "index.html").read_text(encoding="utf-8")
    page = page.replace("src 'self'", f"src 'self' {CDN}") if use_cdn else page
    if any(release is None for _, release in models):
        page = page.replace("connect-src", f"connect-src {constants.ENDPOINT} {HUB_STORAGE}")
    (destination / "index.html").write_text(page, encoding="utf-8")
    for i, (facts, release) in enumerate(models):
        if release is not None:
            (folder := destination / "models" / str(i)).mkdir(parents=True)
            write_onnx(release.model, expect(release), folder, [kind])
            release.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
            file = folder / ONNX[kind]
            facts |= _files(f"models/{i}", kind, file.stat().st_size, file_sha256(file))
    content = {"title": title, "runtime": runtime, "examples": examples, "models": [facts for facts, _ in models]}
    (destination / "models.json").write_text(json.dumps(content, indent=1) + "\n")


def _local(entry: DemoModel, kind: str) -> tuple[dict[str, Any], PublishedModel]:
    """Return what page.js must know about a model, and the model, whose files are still to be written."""
    folder = find_folder(Path(entry.source), None)
    check_onnx(folder, [kind])
    release = PublishedModel.read(folder)
    return _facts(entry, folder, [f"{release.model.num_parameters():,} parameters", *entry.facts]), release


def _on_hub(entry: DemoModel, kind: str) -> tuple[dict[str, Any], None]:
    """Return what page.js must know about a model that was published with ONNX files, at the revision's newest commit.
    Raise a `UserError` if visitors cannot load it."""
    name, _, revision = entry.source.partition("@")
    with hub_errors(f"read {entry.source}"):
        if not HfApi().file_exists(name, ONNX[kind], revision=revision or None, token=False):
            problem = f"{entry.source} has no {ONNX[kind]} on the Hub that everyone can read"
            raise UserError(f"{problem}; push it with --format onnx, without --private.")
        file = get_hf_file_metadata(hf_hub_url(name, ONNX[kind], revision=revision or None), token=False)
        names = (CONFIG, GENERATION, *TOKENIZER)
        folder = Path(snapshot_download(name, revision=file.commit_hash, allow_patterns=names, token=False))
    facts = _facts(entry, folder, [f"{file.size / 1e6:,.0f} MB", f"commit {file.commit_hash[:7]}"])
    address = f"{constants.ENDPOINT}/{name}/resolve/{file.commit_hash}"
    return facts | _files(address, kind, file.size, file.etag), None  # for a large file, the etag is its SHA-256


def _facts(entry: DemoModel, folder: Path, facts: list[str]) -> dict[str, Any]:
    """Return what page.js must know about a model, except its files, from its folder."""
    with model_errors(f"{entry.name} cannot run in a browser: {{}}."):
        tokenizer, config = load_tokenizer(folder), AutoConfig.for_model(**read_model_config(folder))
        generation = read_json(folder, GENERATION) if (folder / GENERATION).is_file() else {}
    ends = generation.get("eos_token_id")
    ends = config.eos_token_id if ends is None else ends
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"{entry.name} has {config.vocab_size:,} embeddings, but {len(tokenizer):,} tokens.")
    if parts := unusual_parts(tokenizer):
        raise UserError(
            f"{entry.name} cannot run in a browser: its tokenizer has {', '.join(parts)}, but the page supports "
            f"GPT-2's byte-level BPE and characters; show it with a page that runs on a server."
        )
    chat = chat_parts(tokenizer)
    return {
        "name": entry.name,
        "facts": facts,
        "context": config.max_position_embeddings,
        "bos": tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id,  # as in training
        "ends": [*(ends if isinstance(ends, list) else [ends]), turn_end(tokenizer) if chat else None],
        "chat": chat,
    }


def _files(folder: str, kind: str, size: int, sha256: str) -> dict[str, Any]:
    return {
        "file": f"{folder}/{ONNX[kind]}", "bytes": size, "sha256": sha256, "tokenizerFile": f"{folder}/tokenizer.json",
    }  # fmt: skip


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the texts that the chat template writes around messages: before the first one of the user, before and
    after a system message, before and after an answer, and before an answer to write; and whether it trims messages.
    Return None without a template, or with one that does not write a chat as a sequence of messages."""

    def rendered(roles: str, content: str = MARK) -> list[str]:
        chat = [{"role": role, "content": content} for role in roles.split()]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(MARK)

    with suppress(Exception):  # a template may raise anything
        start, before, after, end = rendered("user assistant user")
        longer = rendered("user assistant user assistant user")
        if rendered("user") == [start, end] and longer == [start, before, after, before, after, end]:
            trims = rendered("user", f" {MARK} ") == [start, end]
            parts = {"start": start, "before": before, "after": after, "open": end, "trims": trims}
            with suppress(Exception):  # some templates refuse system messages
                opening, separator, *remainder = rendered("system user assistant user")
                parts |= {"system": [opening, separator]} if remainder == [before, after, end] else {}
            return parts
    return None


def runtime_package() -> bytes:
    """Return the package of onnxruntime-web from npm, which is kept in the user's cache.
    Raise a `UserError` if it cannot be downloaded, or is another one."""
    registry = os.environ.get("npm_config_registry") or REGISTRY  # noqa: SIM112 (npm's own name)
    is_kept = PACKAGE.is_file()
    source = str(PACKAGE) if is_kept else f"{registry.rstrip('/')}/onnxruntime-web/-/{PACKAGE.name}"
    try:
        with urlopen(PACKAGE.as_uri() if is_kept else source, timeout=60) as answer:
            package = answer.read()
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(f"{source} cannot be loaded ({error}); try again, or add --cdn to use a CDN.") from error
    if b64encode(sha512(package).digest()).decode() != INTEGRITY:
        raise UserError(f"{source} is not onnxruntime-web {VERSION}: its SHA-512 differs; delete it, and try again.")
    if not is_kept:
        PACKAGE.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_path(PACKAGE, ".tmp") as draft:
            draft.write_bytes(package)
    return package


def write_runtime(folder: Path, package: bytes) -> None:
    """Write onnxruntime-web from its package, and its license, to a new folder."""
    folder.mkdir()
    with tarfile.open(fileobj=BytesIO(package)) as archive:
        for file in RUNTIME:
            (folder / file).write_bytes(archive.extractfile(f"package/dist/{file}").read())
    for file in ("LICENSE", "ThirdPartyNotices.txt"):  # the npm package has none
        shutil.copy(Path(find_spec("onnxruntime").origin).with_name(file), folder / file)
