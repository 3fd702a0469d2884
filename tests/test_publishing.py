"""Tests of push_to_hub.py with a small real run and a local server that stands in for the Hub."""

import filecmp
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from filelock import FileLock
from huggingface_hub import HfApi, ModelCard, constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import push_to_hub
from common import schema
from conftest import MODERN_RUN, assert_one_sentence, error_of, metrics, online, prose, tokenized, trained, wait_until
from hub_server import TOKEN, File, serving
from modeling_gpt2scratch import GPT2ScratchConfig
from modeling_gpt2scratch.loading import INDEX
from publishing import demo, hub_folder, verify
from publishing.card import FolderArguments, model_card
from publishing.hub_folder import CODE, OUR_CODE, assemble
from publishing.published_model import PublishedModel, find_folder
from publishing.upload import SIGNATURE, Repository, download, published_files, upload
from tokenizer.encoding.vocabulary import VocabularyArguments, build
from training import evaluate
from training.checkpoints.checkpoint import WEIGHTS
from training.checkpoints.samples import fenced, read_samples, write_samples
from training.report import plots
from training.report.report import cell, environment, sections_of

MINE = Repository("me/tiny")
ALWAYS = {
    *("README.md", "loss.png", "course.png", "model.safetensors", "config.json", "generation_config.json"),
    *("modeling_gpt2scratch.py", "configuration_gpt2scratch.py", "tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, store):
    """A run with three checkpoints, all of them validated."""
    saves = {"eval_steps": 2, "save_steps": 2, "save_total_limit": 3}
    folder = trained(store, tmp_path_factory.mktemp("runs") / "tiny", hourly_price=2.5, notes="Does <b> help?", **saves)
    assert [entry["step"] for entry in metrics(folder) if "eval_loss" in entry] == [2, 4, 6]
    return folder


def change_losses(run: Path, losses: dict[int, float]) -> None:
    entries = [entry | ({"eval_loss": losses[entry["step"]]} if "eval_loss" in entry else {}) for entry in metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def push(run: Path, *options: str) -> None:
    push_to_hub.main([str(run), "--repo_id", "me/tiny", *options])


@pytest.fixture
def checks(monkeypatch) -> list[str]:
    """What would be verified, for tests of other statements: each verification starts a process."""
    names = []
    monkeypatch.setattr(push_to_hub, "verify", lambda release, target: names.append(release.name))
    return names


def assert_refused(run: Path, sentence: str, *options: str) -> None:
    """Check that a dry run of push_to_hub.py ends in one matching sentence."""
    assert_one_sentence(sentence, push, run, "--dry_run", *options)


def test_a_dry_run_assembles_only_allowed_files_of_the_checkpoint(a_copy, capsys):
    newest = a_copy / "checkpoints" / "step_00000006"
    (newest / ".env").write_text("HF_TOKEN=hf_secret")
    (newest / "notes.txt").write_text("private")
    (newest / "chat_template.jinja").write_text("allowed, but not a file of this checkpoint")
    push(a_copy, "--dry_run", "--license", "mit", "--language", "en")
    assert {path.name for path in (a_copy / "hub").iterdir()} == {*ALWAYS, ".gpt2scratch.json"}
    output = capsys.readouterr().out
    loss = metrics(a_copy)[-1]["eval_loss"]
    assert f"logits differ by 0.0e+00, validation loss {loss:.4f} (run: {loss:.4f})" in output
    assert f"{(newest / WEIGHTS).stat().st_size:>15,} bytes  model.safetensors" in output
    assert "Not uploaded (--dry_run)" in output


def test_the_requested_checkpoint_is_chosen(a_copy):
    change_losses(a_copy, {2: 5.0, 4: 4.0, 6: 4.5})
    steps = [f"step_0000000{step}" for step in (6, 6, 4, 2)]
    assert [find_folder(a_copy, choice).name for choice in (None, "last", "best", "2")] == steps
    assert find_folder(a_copy / "checkpoints" / "step_00000004", None).name == "step_00000004"
    assert find_folder(a_copy / "model", "best").name == "step_00000004"
    tuned = shutil.copytree(a_copy / "model", a_copy / "chats")  # fine-tuned there
    assert find_folder(tuned, None) == tuned
    sentence = "checkpoint is 3, but .* has these checkpoint steps: 2, 4, 6; use one"
    assert_one_sentence(sentence, find_folder, a_copy, "3")
    assert_one_sentence("remove --checkpoint best", find_folder, a_copy / "checkpoints" / "step_00000004", "best")
    (a_copy / "metrics.jsonl").write_text("")
    assert_one_sentence("none of them was validated", find_folder, a_copy, "best")


def test_nothing_is_published_if_a_checkpoint_is_damaged(a_copy, hub):
    for step, flag, remedy in ((2, "--revisions", "without --revisions"), (6, "--dry_run", "with --checkpoint STEP")):
        (a_copy / "checkpoints" / f"step_0000000{step}" / "config.json").write_text("{}")
        sentence = rf"step_0000000{step} is damaged: config\.json has 2 bytes instead of .* {remedy}\."
        assert_one_sentence(sentence, push, a_copy, flag)
        assert not hub.repositories


def test_an_existing_folder_of_the_user_is_not_overwritten(run, tmp_path, monkeypatch):
    folder, existing_folder = (shutil.copytree(run / "model", tmp_path / name) for name in ("merged", "merged-hub"))
    monkeypatch.chdir(folder)
    (existing_folder / "thesis.txt").write_text("The only copy.")
    original = sorted(existing_folder.iterdir())
    assert_refused(Path("."), "merged-hub exists and was not written by this command; move it")
    assert sorted(existing_folder.iterdir()) == original
    shutil.rmtree(existing_folder)
    existing_folder.symlink_to("elsewhere")
    assert_refused(Path("."), "merged-hub exists and was not written by this command")


@pytest.mark.parametrize("form", ["gpt2scratch", "native"])
def test_a_full_disk_is_reported_in_one_sentence(run, form):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # less than the size of the weights
    try:
        assert_refused(run, r"cannot be read or written \(File too large\); fix that and run", "--format", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_link_out_of_the_folder_is_not_followed(run, a_copy, tmp_path):
    (a_copy / "loss.png").unlink()
    (a_copy / "loss.png").symlink_to("/etc/hostname")
    assert_refused(a_copy, r"tiny cannot be published: loss\.png is a link out of the folder; replace the link")
    folder = shutil.copytree(run / "model", tmp_path / "linked")
    (folder / "chat_template.jinja").symlink_to("/etc/hostname")
    assert_refused(folder, r"linked cannot be published: chat_template\.jinja is a link out of the folder")


def test_a_run_is_published_by_one_process_at_a_time(a_copy):
    with FileLock(a_copy / ".hub.lock"):
        assert_refused(a_copy, "is being published by another process")


def without_some_weights(folder):
    weights = load_file(folder / WEIGHTS)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def with_other_code(folder):
    code = folder / "modeling_gpt2scratch.py"
    before, after = code.read_text().split("hidden_states = self.drop(")
    code.write_text(f"{before}hidden_states = 1.01 * self.drop({after}")


def with_code_that_needs_this_repository(folder):
    with (folder / "configuration_gpt2scratch.py").open("a") as code:
        code.write("\nimport modeling_gpt2scratch\n")


@pytest.mark.parametrize(
    ("change", "target"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), "its config.json names model_type 'None', which is"),
        (without_some_weights, r"transformer\.h\.1\.mlp\.c_fc\.weight is missing"),
        (with_other_code, r"computes logits that differ by \d\.\de-0\d in a fresh process"),
        (with_code_that_needs_this_repository, "does not load in a fresh process"),
    ],
)
def test_a_model_that_others_cannot_use_is_not_published(run, tmp_path, change, target):
    folder = shutil.copytree(run / "model", tmp_path / "broken")
    change(folder)
    assert_refused(folder, target, "--trust_folder_code")


NETWORK, PROGRAM, SECRET = "use the network", "start another program", "read the Hub token"
ATTEMPTS = {
    "socket.create_connection(('127.0.0.1', 9))": NETWORK,
    "socket.gethostbyname('localhost')": NETWORK,
    "socket.socket().bind(('127.0.0.1', 0))": NETWORK,
    "subprocess.run(['true'])": PROGRAM,
    "open(TOKEN)": SECRET,
    "os.link(TOKEN, 'copy')": SECRET,
    "open(f'/proc/{os.getppid()}/environ')": "read another process",
    "open(PARENT + '/new', 'w')": "change a file outside its folder",
    "os.rename('request', PARENT + '/new')": "change a file outside its folder",
    "os.symlink('request', PARENT + '/new')": "change a file outside its folder",
    "os.remove(PARENT + '/custom/README.md')": "change a file outside its folder",
}
TRY_ALL = f"""
refusals = []
for attempt in {[*ATTEMPTS]}:
    try:
        exec(attempt)
    except PermissionError as error:
        refusals.append(str(error))
raise PermissionError(' '.join(refusals))
"""
ISOLATED = """
assert not [name for name in os.environ if 'TOKEN' in name], os.environ
assert os.environ['HOME'] == str(Path.home()) != HOME
assert sorted(os.listdir(FOLDER)) == sorted(NAMES) and PARENT not in FOLDER
"""


def test_code_of_a_folder_runs_only_when_trusted_and_in_isolation(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "token").write_text("hf_secret")
    folder = shutil.copytree(run / "model", tmp_path / "custom")
    code = folder / "modeling_gpt2scratch.py"
    names = {"TOKEN": str(tmp_path / "token"), "HOME": str(Path.home()), "PARENT": str(tmp_path)}
    names |= {"NAMES": sorted(ALWAYS - {"loss.png", "course.png"})}
    definitions = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    location_code = "FOLDER = json.loads(Path(sys.argv[1]).read_text())['model']\n"
    head, remainder = code.read_text().split("import torch\n", 1)
    imports = "import json, os, socket, subprocess, sys\nfrom pathlib import Path\nimport torch\n"
    code.write_text(f"{head}{imports}{definitions}{location_code}{ISOLATED}{remainder}{TRY_ALL}")
    push(folder, "--dry_run")
    notice = f"modeling_gpt2scratch.py is this version's, not that of {folder}, which --trust_folder_code publishes."
    assert notice in capsys.readouterr().out
    assert filecmp.cmp(OUR_CODE / code.name, tmp_path / "custom-hub" / code.name, shallow=False)
    sentence = error_of(push, folder, "--dry_run", "--trust_folder_code")
    assert re.findall(r"The model's code tries to (.*?)\.", sentence) == [*ATTEMPTS.values()]


def test_the_current_code_replaces_older_code(run, tmp_path, checks):
    folder = shutil.copytree(run / "model", tmp_path / "older")
    (folder / "modeling_gpt2scratch.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "someone/else--their.Code"}}))
    push(folder, "--dry_run")
    release = tmp_path / "older-hub"
    assert [(release / name).read_bytes() for name in CODE] == [(OUR_CODE / name).read_bytes() for name in CODE]
    assert json.loads((release / "config.json").read_text()) == config
    tokenizer_settings = json.loads((folder / "tokenizer_config.json").read_text())
    own_code = {"auto_map": {"AutoTokenizer": ["someone/else--their.Code", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings | own_code))
    push(folder, "--dry_run")
    assert json.loads((release / "tokenizer_config.json").read_text()) == tokenizer_settings


def test_a_loss_that_differs_from_the_run_or_cannot_be_compared_is_reported(a_copy, monkeypatch, capsys):
    expected = verify.expect(PublishedModel.read(find_folder(a_copy, None)))
    answer = {"wrong_keys": [], "vocabulary": 300, "prompt": "a", "text": "b", "targets": [1, 1]}
    logits = torch.cat([expected.logits, expected.logits[-1:]])

    def check(expected, *changes: float) -> None:
        losses = {"nats": [expected.run_loss + change for change in changes]} if changes else {"targets": []}
        monkeypatch.setattr(verify, "_run_isolated", lambda *parts: (answer | losses, logits))
        verify.verify(verify.Location(str(a_copy), True), expected)

    check(expected, 0.009, 0.009)
    sentence = r"has a validation loss of [\d.]+ in a fresh process, but the run recorded"
    assert_one_sentence(sentence, check, expected, 0.02, 0.02)
    sample = replace(expected, is_sample=True)
    check(sample, -0.4, 0.5)  # within five standard errors
    assert_one_sentence(sentence, check, sample, 0.02, 0.02)
    config = a_copy / "config.yaml"
    config.write_text(re.sub(r"^data: .*$", f"data: {a_copy / 'gone'}", config.read_text(), flags=re.MULTILINE))
    check(verify.expect(PublishedModel.read(find_folder(a_copy, None))))
    sentence = f"no intact token store has the tokens of the run ({a_copy / 'gone'})"
    assert sentence in capsys.readouterr().out


def test_a_modern_model_with_an_untied_head_and_masked_documents_is_verified(train, tmp_path, capsys):
    flags = MODERN_RUN | {"tie_word_embeddings": "false", "max_steps": 2, "eval_steps": 2}
    run = train(tmp_path / "run", "--mask_documents", **flags)
    push(run, "--dry_run", "--format", "both")
    output, card = capsys.readouterr().out, (run / "hub" / "README.md").read_text()
    files = set(published_files(run / "hub"))
    assert files == ALWAYS | {f"native/{name}" for name in ALWAYS if name.endswith((".json", ".safetensors"))}
    assert "as Transformers' own Apertus" in card
    assert "optional package `xielu`: do not install it" in card
    assert re.search(r"logits differ by 0.0e\+00, validation loss ([\d.]+) \(run: \1\)", output)
    assert re.search(r"The native twin, without remote code: logits differ by (\d\.\de-0[6-9]|0\.0e\+00)\.", output)


def test_the_native_format_has_no_code_and_cannot_be_published_again(run, tmp_path, checks):
    push(run, "--dry_run", "--format", "native")
    folder = run / "hub"
    assert set(published_files(folder)) == {name for name in ALWAYS if not name.endswith("gpt2scratch.py")}
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is GPT2LMHeadModel
    assert "trust_remote_code" not in (folder / "README.md").read_text()
    GPT2ScratchConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(tmp_path / "mixture")
    for options in (["--format", "both"], ["--gguf", "f16"]):
        assert_refused(tmp_path / "mixture", r"Transformers' gpt2 does not support rope_parameters=\{", *options)
    twin = shutil.copytree(folder, tmp_path / "twin")
    assert_refused(twin, r"is a GPT2LMHeadModel, not a model of this project.*: python -m modeling_gpt2scratch\.conv")


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ([], "Name a run and a repository: python push_to_hub.py runs/x"),
        (["RUN"], "Name a repository: "),
        (["tests", "--repo_id", "me/tiny"], "is neither a run folder nor a checkpoint in one"),
        (["RUN", "--repo_id", "tiny"], "it must be user/name"),
        (["RUN", "--repo_id", "me/ti ny"], "is not a name that the Hub accepts"),
    ],
)
def test_wrong_arguments_are_refused(run, arguments, target):
    assert_one_sentence(target, push_to_hub.main, [argument.replace("RUN", str(run)) for argument in arguments])


def card_of(folder: Path, choice: str | None = None, repository=MINE, format=("gpt2scratch",), gguf=()) -> str:
    return model_card(PublishedModel.read(find_folder(folder, choice)), repository, FolderArguments([*format]), gguf)


def test_the_card_describes_the_run(run, checks):
    push(run, "--dry_run", "--license", "mit", "--language", "en", "--checkpoint", "4")
    card = ModelCard.load(run / "hub" / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["pipeline_tag"]) == ("mit", ["en"], "text-generation")
    assert (data["library_name"], data["tags"]) == ("transformers", ["gpt2scratch", "from-scratch"])
    [validation] = [entry for entry in metrics(run) if entry["step"] == 4 and "eval_loss" in entry]
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values == {name: round(validation[f"eval_{name}"], 4) for name in ("loss", "perplexity", "bits_per_byte")}
    sentence = "weights after step 4 (256 tokens). Their validation loss is {eval_loss:.4f}, on {eval_tokens:,} "
    for words in ("11,648 parameters", "\nNotes: Does \\<b\\> help?\n", "At 2.50 dollars per hour: 0.0", sentence):
        assert words.format(**validation) in card.text
    headings = re.findall(r"^## (.*)$", re.sub(r"```.*?```", "", card.text, flags=re.DOTALL), flags=re.MULTILINE)
    expected = "Use/Results/Samples/Data/Training/Speed/Estimate vs. actual/Cost/Limitations/License/Citation"
    assert headings == expected.split("/")
    first, _, _ = (row for row in card.text.splitlines() if re.match(r"\| [246] \|", row))
    assert "`the" in first
    assert str(run.parent) not in card.text


def test_a_model_trained_on_chats_ends_its_answers(tmp_path, checks, monkeypatch):
    chats = [[{"role": role, "content": prose(i, 40)} for role in ("user", "assistant")] for i in range(60)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    store = tokenized(path, tmp_path / "store", {"chat_template": "chatml", "validation_fraction": 0.2}, vocab_size=300)
    run = trained(store, tmp_path / "run", max_steps=1, sample_prompts=None)
    ends = [0, store.load_tokenizer().vocab["<|im_end|>"]]
    assert "Unless that text was chats, it was not trained to answer questions" in " ".join(card_of(run).split())
    old, hub = shutil.copytree(run / "model", tmp_path / "old"), tmp_path / "hub"
    settings = json.loads((old / "generation_config.json").read_text())
    assert settings["eos_token_id"] == ends

    def assembled(name: str, *format: str) -> dict:
        """Assemble the folder for the Hub, and return a file of it."""
        release = PublishedModel.read(old)
        assert release.model.generation_config.eos_token_id == ends
        assemble(release, MINE, FolderArguments([*format]), hub, verify.expect(release))
        return json.loads((hub / name).read_text())

    (old / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 0}))  # as older versions
    assert assembled("generation_config.json", "gpt2scratch")["eos_token_id"] == ends
    (old / "generation_config.json").unlink()
    template = Path("additional_chat_templates/tool_use.jinja")
    (old / template.parent).mkdir()
    (old / template).write_text("{{ messages[0].content }}")
    assert assembled("generation_config.json", "gpt2scratch")["eos_token_id"] == ends
    assert (hub / template).is_file()
    monkeypatch.setattr(hub_folder, "write_onnx", lambda *parts: [])
    inline = assembled("tokenizer_config.json", "onnx")["chat_template"]
    assert inline == (hub / "chat_template.jinja").read_text()  # which transformers.js does not read
    assert demo.find_all([str(run)])[1] == [*demo.EXAMPLES]  # not a part of a control token


def test_the_card_shows_only_evaluations_of_its_own_weights(run, tmp_path, capsys):
    run_copy = shutil.copytree(run, tmp_path / "run")
    evaluate.main([str(run_copy), "--compare_with", str(run_copy / "checkpoints" / "step_00000004")])
    sections = sections_of(card_of(run_copy, "last"))
    section = sections["Evaluation"]
    assert re.search(r"\n\| run \| \d\.\d{4} ± ", section)
    assert f"\n| {run_copy.name}-step_00000004 | " in section
    assert "\n| trigram | " in section
    assert str(tmp_path) not in section
    assert list(sections)[1:4] == ["Use", "Results", "Evaluation"]
    assert "## Evaluation" not in card_of(run_copy, "4")


def test_the_card_is_built_from_an_edited_report_or_a_report_of_an_older_version(a_copy):
    original = card_of(a_copy)
    report = a_copy / "report.md"
    page = report.read_text()
    notes = ("## Data", "## Notes\n\nMy words.\n\n## Data")
    report.write_text(edited_page := page.replace(*notes))
    assert card_of(a_copy) == original.replace(*notes)
    evaluate.main([str(a_copy), "--compare"])
    assert report.read_text() == edited_page
    samples = PublishedModel.read(find_folder(a_copy, None)).training.samples
    report.write_text(page[: page.index("## Results")])
    assert not any(text[:8] in card_of(a_copy) for text in samples)
    report.write_text(edited_page)
    assert {"Evaluation", "Notes"} < sections_of(card_of(a_copy)).keys()
    report.write_text(page)
    facts = schema.read(a_copy / "report.json")
    (a_copy / "report.json").write_text(schema.sealed(facts | {"format_version": 9}))
    assert_one_sentence(r"report\.json was written by a newer version of GPT2Scratch \(format 9; ", card_of, a_copy)
    (a_copy / "report.json").unlink()
    shutil.rmtree(a_copy / "evaluation")
    assert card_of(a_copy) == original


def test_a_card_names_its_branch_and_the_native_and_gguf_files(run):
    gguf = {"name": "tiny-F16.gguf", "kind": "F16", "logits": 1e-3, "loss": 1e-6, "tokens": 256}
    card = card_of(run, "2", replace(MINE, branch="step0000002-tokens128"), ["both"], [gguf])
    assert "as Transformers' own GPT-2" in card
    assert "xielu" not in card
    assert card.count('"me/tiny", revision="step0000002-tokens128", trust_remote_code=True') == 5
    assert '("me/tiny", revision="step0000002-tokens128", subfolder="native")' in card
    assert "--revision step0000002-tokens128 --local-dir .`, then `llama-completion -m tiny-F16.gguf -p" in card
    main_card = card_of(run, None, MINE, ["both"], [gguf])
    assert "for llama.cpp: `llama-completion -hf me/tiny:F16 -p ...`. On 256 tokens" in main_card
    assert "differ from the model's by at most 0.001 and its loss by +1.0e-06" in card


@pytest.mark.parametrize(
    ("prompt", "target"), [("of the and a to in is was", "of the a"), ('"a\\\n```é🙂', '"a\\\n```')]
)
def test_the_prompt_of_a_card_leaves_room_for_the_generated_text(a_copy, prompt, target):
    config = a_copy / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"sample_prompts": [prompt]}))
    assert card_of(a_copy).count(f"({json.dumps(target, ensure_ascii=False)}, max_new_tokens=8") == 1
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"sample_prompts": [""]}))
    assert 'tokenizer("",' not in card_of(a_copy)  # an empty prompt is not shown


def test_a_card_built_from_a_card_keeps_its_sections_and_has_one_marker(run, tmp_path):
    folder = shutil.copytree(run / "model", tmp_path / "again")
    old_sections = "## Example\n\nOne.\n\n## Example\n\nTwo.\n\n## Licence\n\nMIT, by me."
    (folder / "README.md").write_text(f"---\ntags: [a]\n---\n\n{SIGNATURE}\n\n# old\n\n{old_sections}\n")
    card = card_of(folder)
    assert card.count(SIGNATURE) == 1
    assert "# old" not in card
    assert "## Example\n\nOne.\n\nTwo." in card
    assert "## License\n\nMIT, by me." in card


def test_the_example_of_a_card_uses_characters_of_the_model(run, tmp_path):
    folder = shutil.copytree(run / "model", tmp_path / "characters")
    build(VocabularyArguments(tokenizer_type="character"), None, lambda: iter(["日本語"])).save_pretrained(folder)
    card = card_of(folder)
    assert 'text = "日本語"' in card
    assert "A GPT-2-class language model: 2 layers, 2 heads, width 16, a context of 16 tokens" in card


def test_harness_results_on_local_files_do_not_publish_their_paths(a_copy):
    results = a_copy / "lm_eval" / "results_1.json"
    results.parent.mkdir()
    task = {"dataset_path": "/home/me/secret", "test_split": "test"}
    content = {"model_name": str(a_copy / "model"), "configs": {"mine": task}, "results": {"mine": {"acc,none": 0.5}}}
    content |= {"n-shot": {"mine": 0}, "lm_eval_version": "0.4"}
    results.write_text(json.dumps(content))
    card = card_of(a_copy)
    assert "| mine | acc | 0.5000 |" in card
    assert "secret" not in card
    for seconds, is_own in ((1, True), (-1, False)):  # begun before the weights were saved: of earlier ones
        results.write_text(json.dumps(content | {"date": time.time() + seconds * 1e6}))
        assert ("| mine | acc | 0.5000 |" in card_of(a_copy)) is is_own
    results.write_text('{"model_name')
    assert_one_sentence(r"results_1\.json is incomplete or damaged; delete it", card_of, a_copy)


def test_generated_text_cannot_end_its_code_block_in_the_report(tmp_path):
    path = tmp_path / "samples.md"
    texts = ["## step 9\n\n```\n## Use\n````\nx", "| `a` |\x1b"]
    write_samples(path, 3, [("", text) for text in texts])
    write_samples(path, 6, [("", "later")])
    assert read_samples(path) == {3: texts, 6: ["later"]}
    assert fenced(texts[0]).startswith("`````text\n")
    assert environment().filters["fenced"](texts[1]) == "```text\n| `a` |\ufffd\n```"  # could be an escape code
    assert cell("a\x00`b\n|") == "`a\ufffd'b \\|`"


def test_names_are_no_markdown_and_no_mathematics(tmp_path):
    names = ["__slots__ of my_model", "a|b", "cost_$5_to_$9", "_old", "中"]
    plain = [environment().filters["plain"](name) for name in names]
    assert plain == [r"\_\_slots\_\_ of my_model", r"a\|b", r"cost\_\$5_to\_\$9", r"\_old", "中"]
    rows = [{"name": name, "bits_per_byte": 1.0, "kind": "model"} for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda *parts: pytest.fail(str(parts)))
        assert plots.plot_panel(rows, tmp_path / "panel.png")


def test_publishing_works_end_to_end(launch, run, hub, tmp_path, capsys):
    """The upload contains no secret, no local path and no unrequested file, and the examples of the card work."""
    push(run, "--private")
    captured = capsys.readouterr()
    assert captured.out.count("Verified in a fresh process") == 2
    assert "(from the Hub)" in captured.out
    assert captured.out.endswith(f"Published: {constants.ENDPOINT}/me/tiny\n")
    assert TOKEN not in captured.out + captured.err
    files = hub["me/tiny"].files()
    assert files.keys() == ALWAYS | {".gitattributes"}
    assert hub["me/tiny"].private
    upload_bytes = b"".join(hub.bodies)
    for secret in (TOKEN, str(run), str(run.parent), str(Path.home()), "training_state", "optimizer.safetensors"):
        assert secret.encode() not in upload_bytes, secret
    blocks = re.findall(r"```python\n(.*?)```", files["README.md"].decode(), flags=re.DOTALL)
    assert len(blocks) == 3
    code = "import sys; sys.modules['modeling_gpt2scratch'] = None\n" + "\n".join(blocks)
    job = launch("-P", "-c", code, folder=tmp_path, **online(constants.ENDPOINT, tmp_path / "home"))
    assert job.returncode == 0, job.stderr
    assert 0 < float(job.stdout.splitlines()[-1]) < 8


def test_every_checkpoint_becomes_a_branch(a_copy, hub, checks):
    shutil.rmtree(a_copy / "checkpoints" / "step_00000004")
    push(a_copy, "--revisions")
    repository = hub["me/tiny"]
    names = ["step0000002-tokens128", "step0000006-tokens384"]
    assert list(repository.branches) == ["main", *names]
    for name, step in zip(names, ("02", "06"), strict=True):
        files = repository.files(name)
        assert files.keys() == ALWAYS | {".gitattributes"}  # the code, too
        assert files[WEIGHTS] == (a_copy / "checkpoints" / f"step_000000{step}" / WEIGHTS).read_bytes()
        assert f'revision="{name}"' in files["README.md"].decode()
    assert repository.files()[WEIGHTS] == repository.files(names[-1])[WEIGHTS]
    order = ["/branch/" in path for method, path in hub.requests if method == "PUT" or "/branch/" in path]
    assert order[-3:] == [False, True, True]  # a new branch has main's files, so it does not wait for its weights
    assert sorted(path.name for path in a_copy.glob("hub*")) == ["hub"]
    assert checks[1::2] == ["me/tiny"] * 3  # each after its folder
    assert [Path(name).name for name in checks[::2]] == ["hub", *(f"hub-{name}" for name in names)]


@pytest.fixture(scope="module")
def folder(run):
    """Assembled folder, ready to upload."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push_to_hub, "verify", lambda release, target: None)
        push(run, "--dry_run")
    return shutil.copytree(run / "hub", run.parent / "assembled")


def test_a_second_upload_sends_nothing_new_deletes_stale_files_and_keeps_others(folder, hub, tmp_path, capsys):
    first, repository = upload(folder, MINE), hub["me/tiny"]
    commits = len(repository.commits)
    assert upload(folder, MINE).oid == first.oid
    assert (len(repository.commits), hub.uploads()) == (commits, 3)  # the weights and two plots, each sent once
    user_files = {"notes.md", "tiny-Q4_K_M.gguf", "Other-7B-F16.gguf", "imatrix/mine-Q8_0.gguf"}
    stale = {"native/config.json", "tiny-F16.gguf"}
    new_files = dict.fromkeys(user_files | stale, File(b"x"))
    repository.commit("main", repository.commits[repository.branches["main"]] | new_files)
    commit = upload(folder, MINE).oid
    assert repository.files().keys() == ALWAYS | {".gitattributes"} | user_files
    hub.requests.clear()
    download("me/tiny", commit, tmp_path, folder)
    names = {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}
    assert names == {Path(name).name for name in ALWAYS} | {".gitattributes", "notes.md"}
    sentence = f"Deleted from me/tiny, because {folder} lacks them: native/config.json, tiny-F16.gguf."
    assert capsys.readouterr().out.splitlines() == [sentence]


def test_an_edited_card_on_the_hub_is_kept(folder, hub, capsys):
    upload(folder, MINE)
    repository = hub["me/tiny"]
    own_card = repository.files()["README.md"]
    by_hub = b"---\nlicense: mit\n---\n"  # for a repository that was created there with a license
    for card, target in ((b"My words. \xff", None), (own_card + b"old", own_card), (by_hub, own_card)):
        files = repository.commits[repository.branches["main"]]
        repository.commit("main", files | {"README.md": File(card)})
        upload(folder, MINE)
        assert repository.files()["README.md"] == (target or card)
    assert capsys.readouterr().out.count("The README.md of me/tiny was edited and is kept; delete it there") == 1
    repository.commit("main", files | {"README.md": File(b"My words.")})
    HfApi().create_branch("me/tiny", branch="step-2")  # as if the connection was lost then
    upload(folder, replace(MINE, branch="step-2"))
    assert repository.files("step-2")["README.md"] == own_card


def test_a_commit_made_during_an_upload_is_kept(folder, hub):
    hub.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(upload, folder, MINE)
        wait_until(lambda: hub.uploads() or outcome.done())
        hub["me/tiny"].commit("main", {"README.md": File(b"My words.")})
        hub.hold.set()
        sentence = str(outcome.exception())
    assert re.search("Could not upload to me/tiny: the Hub refused: .*412.*; run this command again", sentence)
    assert hub["me/tiny"].files() == {"README.md": b"My words."}


def test_an_upload_that_lost_its_connection_changes_nothing_and_resumes(folder, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.cut_uploads = 100
    sentence = r"Could not upload to me/tiny: .*run this command again; files that arrived are not sent"
    assert_one_sentence(sentence, upload, folder, MINE)
    assert hub["me/tiny"].files().keys() == {".gitattributes"}
    hub.cut_uploads = 0
    plot = folder / "loss.png"
    hub.large[hashlib.sha256(plot.read_bytes()).hexdigest()] = plot.read_bytes()  # was uploaded before
    original = hub.uploads()
    upload(folder, MINE)
    assert hub.uploads() - original == 2
    assert hub["me/tiny"].files().keys() == ALWAYS | {".gitattributes"}


def test_an_interrupted_upload_reports_how_to_resume(spawn, run, tmp_path):
    with serving() as (hub, address):
        hub.hold.clear()
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
        process = spawn("push_to_hub.py", run, "--repo_id", "me/tiny", **online(address, tmp_path) | ascii_only)
        wait_until(lambda: hub.uploads() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        hub.hold.set()
        _, output = process.communicate(timeout=600)
    assert process.returncode == 130
    notice = "Interrupted, could not upload to me/tiny; run this command again; files that arrived are not sent twice."
    assert f"\n{notice}" in output  # progress bars may be before and after it
    assert hub["me/tiny"].files().keys() == {".gitattributes"}


DENIED, REPLACED = "Could not access me/tiny:", "which would be replaced; use another name"
ADAPTER = "me/tiny holds an adapter (adapter_config.json), with which the model would not load"


def with_token(token: str):
    return lambda hub, patch: patch.setenv("HF_TOKEN", token)


def switched_off(hub, patch):
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()


def with_file(name: str, content: bytes):
    def create(hub, patch):
        HfApi().create_repo("me/tiny", private=True)
        hub["me/tiny"].commit("main", {name: File(content)})

    return create


@pytest.mark.parametrize(
    ("trouble", "target"),
    [
        (with_file("config.json", b'{"model_type": "llama"}'), f"me/tiny holds a model of type llama, {REPLACED}"),
        (with_file("config.json", b'{"model_type": "gpt2"}'), f"me/tiny holds a model of type gpt2, {REPLACED}"),
        (with_file("adapter_config.json", b"{}"), ADAPTER),
        (lambda hub, patch: patch.delenv("HF_TOKEN"), "You are not logged in to the Hub, or the token contains"),
        (with_token("hf_" + "w" * 34), f"{DENIED} the Hub refused: Invalid user token. The token from HF_TOKEN"),
        (with_token("é"), "the token contains invalid characters: run `hf auth login`"),
        (lambda hub, patch: hub.user["auth"]["accessToken"].update(role="read"), "The token of me is read-only"),
        (lambda hub, patch: hub.user.update(name="other", orgs=[]), "to me, but you are logged in as other; use a"),
        (lambda hub, patch: patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"), f"{DENIED} the Hub cannot be"),
        (switched_off, f"{DENIED} the Hub cannot be reached (Cannot reach http"),
        (lambda hub, patch: HfApi().create_repo("me/tiny"), "me/tiny exists and is public, so --private has no effect"),
    ],
)
def test_problems_with_the_hub_are_reported_before_any_work(run, hub, monkeypatch, trouble, target):
    shutil.rmtree(run / "hub", ignore_errors=True)
    trouble(hub, monkeypatch)
    [sentence] = error_of(push, run, "--private").splitlines()
    assert target in sentence
    assert os.environ.get("HF_TOKEN", "none") not in sentence
    assert not (run / "hub").exists()
    assert not hub.large


def test_a_refusal_of_the_hub_is_one_sentence(folder, hub, tmp_path):
    hub.read_only.add("us")
    hub.taken.add("our/tiny")
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    (wrong / "README.md").write_text("---\nlicense: my own\n---\n")
    for source, repo_id, target in (
        (folder, "us/tiny", r"Could not upload to us/tiny: the Hub refused: [^\n]*$"),
        (folder, "our/tiny", r"Could not upload to our/tiny: the Hub refused: .*409 Conflict[^\n]*$"),
        (wrong, "me/tiny", r"does not accept the metadata of .*README\.md: .*license.* must be one of[^\n]*$"),
    ):
        assert_one_sentence(target, upload, source, Repository(repo_id))
        assert not hub.large
    assert not {"models/us/tiny", "models/our/tiny"} & {*hub.repositories}


def test_what_the_owner_set_on_the_hub_is_kept_and_the_prompt_is_that_of_the_widget(run, hub, checks):
    push(run, "--license", "mit")
    repository = hub["me/tiny"]
    card = ModelCard(repository.files()["README.md"].decode())
    card.data["license"], card.data["base_model"], card.data["extra_gated_prompt"] = "apache-2.0", "me/old", "Agree."
    card.data["tags"] = [*card.data["tags"], "mine"]
    card.data["widget"] = [{"text": "the and"}]
    repository.commit("main", repository.commits[repository.branches["main"]] | {"README.md": File(str(card).encode())})
    push(run)
    card = ModelCard(repository.files()["README.md"].decode())
    data = card.data.to_dict()
    assert (data["license"], data["extra_gated_prompt"]) == ("apache-2.0", "Agree.")
    assert (data["tags"], data["widget"]) == (["gpt2scratch", "from-scratch", "mine"], [{"text": "the and"}])
    assert "base_model" not in data  # of a model that was there before
    assert "apache-2.0" in card.text
    assert '("the and", ' in card.text


def test_a_native_twin_replaces_only_one_of_this_program(run, hub, checks):
    push(run, "--format", "native")
    push(run, "--format", "native", "--license", "mit")
    assert ModelCard(hub["me/tiny"].files()["README.md"].decode()).data.license == "mit"


def test_a_folder_without_a_run_is_published_with_its_own_card(run, tmp_path, hub, checks, capsys):
    folder = shutil.copytree(run / "model", tmp_path / "merged")
    card = "---\nlibrary_name: peft\n---\n# merged\n\nTaught to chat.\n\n## How\n\nWith LoRA.\n"
    (folder / "README.md").write_text(card)
    (folder / INDEX).write_text("{}")  # of an earlier model in shards, which Transformers leaves; vLLM would read it
    push(folder, "--license", "mit")
    card = ModelCard(hub["me/tiny"].files()["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert "Taught to chat.\n\n## Use" in card.text
    assert "## How\n\nWith LoRA." in card.text
    assert (tmp_path / "merged-hub" / WEIGHTS).is_file()
    assert INDEX not in hub["me/tiny"].files()
    (folder / "README.md").write_text("---\nbase_model: me/old\n---\n# merged\n")
    push(folder)
    (folder / "README.md").write_text("# merged\n")
    push(folder)
    assert "Kept from the card on the Hub: base_model me/old; if that is wrong, delete it" in capsys.readouterr().out
    assert ModelCard(hub["me/tiny"].files()["README.md"].decode()).data.base_model == "me/old"
    assert_refused(folder, "a model without a run, so it has no checkpoints for --revisions", "--revisions")
