"""Hub datasets: their ids, and reading them from a local server that answers like the Hub."""

import ast
import io
import json
import re
import shlex
import shutil
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, Image, Value
from test_corpus import write
from test_merge import documents

from conftest import REPOSITORY, TINY, assert_user_error, flags, prose, trained
from hub_server import File, Repository, serving
from tokenizer.build.recipe import Recipe
from tokenizer.corpus.hub import HubDataset, open_dataset
from tokenizer.corpus.named_data import dataset_of, names
from tokenizer.encoding.vocabulary import save, train_bpe
from tokenizer.store.store import TokenStore
from training.checkpoints.run_folder import RunFolder


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        ("user/name", HubDataset("user/name")),
        ("User-1/my_data.v2", HubDataset("User-1/my_data.v2")),
        ("user/name:20231101.en:train", HubDataset("user/name", "20231101.en", "train")),
        ("user/name@v1.0", HubDataset("user/name", revision="v1.0")),
        ("user/name:config@refs/convert/parquet", HubDataset("user/name", "config", revision="refs/convert/parquet")),
        ("user/name::test@0123abc", HubDataset("user/name", None, "test", "0123abc")),
    ],
)
def test_hub_ids_have_optional_config_split_and_revision(tmp_path, monkeypatch, entry, target):
    monkeypatch.chdir(tmp_path)
    assert HubDataset.parse(entry) == target
    assert str(target) == entry
    assert open_dataset(entry) == target


def test_local_paths_are_not_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = "name a/b/c /user/name ./name ../name ~/name user/ user/*.txt user/** a.txt C:\\texts https://hub.co/a/b"
    for entry in (*paths.split(), "my user/name", "user/name:", "user/name@", "user/name:a:b:c", ""):
        assert HubDataset.parse(entry) is None
    (tmp_path / "user").mkdir()
    assert HubDataset.parse("user/name") is None
    assert open_dataset("user/name@main") == HubDataset("user/name", revision="main")  # a Hub id when it was planned


CARD = """---
configs:
- config_name: default
  default: true
  data_files:
  - {split: train, path: train/*.jsonl}
  - {split: test, path: test.jsonl}
- {config_name: chats, data_files: [{split: train, path: chats.jsonl}]}
- {config_name: shaky, data_files: [{split: train, path: shaky.jsonl}]}
- {config_name: secret, data_files: [{split: train, path: secret.jsonl}]}
- {config_name: broken, data_files: [{split: train, path: broken.jsonl}]}
---
"""
FIRST, NEWEST = "1" * 40, "2" * 40


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def parquet(*texts: str) -> bytes:
    """Return a table of texts, each with a picture that is not decoded, because it cannot be."""
    file, features = io.BytesIO(), Features({"content": Value("string"), "picture": Image()})
    columns = {"content": texts, "picture": [{"bytes": b"broken", "path": None}] * len(texts)}
    pq.write_table(pa.table(columns, schema=features.arrow_schema), file, row_group_size=2)
    return file.getvalue()


ROWS = [f"row {i}" for i in range(5)]
FILES = {
    "README.md": CARD.encode(),
    "train/0.jsonl": jsonl("one", "naïve 雪"),
    "train/1.jsonl": jsonl("three"),
    "test.jsonl": jsonl("held out"),
    "chats.jsonl": json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode(),
    "shaky.jsonl": jsonl("shaky"),
    "secret.jsonl": jsonl("secret"),
    "broken.jsonl": b'{"text": "one"}\n{"text": "tw\n',
}


@contextmanager
def serving_datasets(**datasets: dict[str, dict[str, bytes]]):
    """Serve a Hub with the commits of one user's datasets; yield it and its address."""
    with serving() as (hub, address):
        for name, commits in datasets.items():
            files = {sha: {path: File(content) for path, content in commits[sha].items()} for sha in commits}
            hub.repositories[f"datasets/user/{name}"] = Repository(False, files, {"main": NEWEST, "v1": FIRST})
        yield hub, address


def environment(address: str, home: Path) -> dict[str, str]:
    # Waits between retries are shortened.
    hasty = "import time\nsleep = time.sleep\ntime.sleep = lambda seconds: sleep(min(seconds, 0.001))\n"
    write(home / "hasty" / "sitecustomize.py", hasty)
    online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return online | {"PYTHONPATH": str(home / "hasty"), "USE_TORCH": "0"}  # otherwise `datasets` would import torch


READ = """
import json, sys
from common.errors import UserError
from tokenizer.corpus.chat import CHATML, ChatTemplate
from tokenizer.corpus.units import Corpus, CorpusArguments
from tokenizer.corpus.documents import Reader

for entry in sys.argv[1:]:
    try:
        reader = Reader(chat=ChatTemplate(CHATML, ()))
        units = Corpus([entry], CorpusArguments()).units()
        found = [[piece.text for part in unit.ranges for piece in reader.pieces(part)] for unit in units]
    except UserError as error:
        found = str(error)
    print(json.dumps(found))
"""
UNITS = {
    "user/name": [["one", "naïve 雪"], ["three"]],  # one unit per shard
    "user/name:default:test": [["held out"]],
    "user/name:default:test@v1": [["of the first version"]],
    f"user/name:default:test@{FIRST}": [["of the first version"]],
    "user/name:chats": [["<|im_start|>user\nHi<|im_end|>\n"]],
    "user/name:shaky": [["shaky"]],  # its connection is lost for a moment
}
UNREADABLE = {
    "user/nothing": r".* is not a local path, and the Hub has no such dataset, or it is private: log in with .*\.",
    "user/name@v9": r".*, and the Hub has no revision v9 of this dataset; omit the revision or choose another.*\.",
    "user/name:nothing": rf"user/name:nothing@{NEWEST} cannot be read from the Hub: .*'nothing' not found.*\.",
    "user/name:default:nothing": r".*:nothing@2+ cannot be read from the Hub: Bad split: nothing\. .*[^.]\.",
    "user/name:secret": r"user/name:secret@2+ cannot be read from the Hub: 403 Forbidden.*[^.]\.",
    "user/name:broken": r"Reading user/name:broken@2+ stopped: .*\. Run the same command again\.",
}


RUN_EACH = """
import importlib, shlex, sys
from common.errors import UserError

for command in sys.argv[1:]:
    try:
        name, *arguments = shlex.split(command)
        importlib.import_module(name).main(arguments)
        print("done")
    except UserError as error:
        print(error)
"""


def pretokenizing(texts: dict[str, str], folder: Path) -> list[str]:
    """Return the command of each store. `texts`: names of stores -> inputs and further flags."""
    return [f"tokenizer.pretokenize --output {folder / name} --vocab_size 300 --input {texts[name]}" for name in texts]


def output_of(launch, script: str, entries: list[str], environment: dict[str, str]) -> list[str]:
    job = launch("-c", script, *entries, **environment)
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()


@pytest.fixture(scope="module")
def results(tmp_path_factory, launch) -> dict[str, list[list[str]] | str]:
    """Texts of every unit per entry, or the error sentence."""
    texts = {FIRST: FILES | {"test.jsonl": jsonl("of the first version")}, NEWEST: FILES}
    with serving_datasets(name=texts, tables={NEWEST: {"rows.parquet": parquet(*ROWS)}}) as (hub, address):
        hub.lost["shaky.jsonl"] = 2
        hub.secret.add("secret.jsonl")
        entries = ["user/tables", *UNITS, *UNREADABLE]
        lines = output_of(launch, READ, entries, environment(address, tmp_path_factory.mktemp("home")))
    return dict(zip(entries, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("entry", UNITS)
def test_configs_splits_revisions_tables_and_chats_are_read(results, entry):
    assert results[entry] == UNITS[entry]
    assert [text for unit in results["user/tables"] for text in unit] == ROWS  # the only text column is used


@pytest.mark.parametrize("entry", UNREADABLE)
def test_unreadable_datasets_end_in_one_sentence(results, entry):
    assert re.fullmatch(UNREADABLE[entry], results[entry]), results[entry]


def test_lost_connection_ends_in_one_sentence_and_the_command_resumes_at_the_same_commit(launch, tmp_path):
    texts = [prose(i, 80) for i in range(300)]
    files = {"data/train-0.parquet": parquet(*texts[:250]), "data/train-1.parquet": parquet(*texts[250:])}
    save(train_bpe(texts, 300), tmp_path / "tokenizer")
    settings = {"input": "user/name", "output": tmp_path / "store", "tokenizer": tmp_path / "tokenizer"}
    command = ("-m", "tokenizer.pretokenize", *flags(**settings, cleaning="none", num_proc=1))
    with serving_datasets(name={FIRST: files, NEWEST: {"data/train-0.parquet": parquet("changed")}}) as (hub, address):
        hub["datasets/user/name"].branches["main"] = FIRST
        hub.lost["data/train-1.parquet"] = 10_000
        first = launch(*command, **environment(address, tmp_path / "home"))
        hub.lost.clear()
        hub["datasets/user/name"].branches["main"] = NEWEST
        rerun = launch(*command, **environment(address, tmp_path / "home"))
    assert (first.returncode, "Traceback" in first.stderr) == (1, False), first.stderr
    [error] = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(rf"error: Reading user/name@{FIRST} stopped: .*\. Run the same command again\.", error)
    assert rerun.returncode == 0, rerun.stderr
    assert "store: 1 of 2 units of work are done." in rerun.stdout
    store = TokenStore(tmp_path / "store")
    text = "".join(store.load_tokenizer().decode(store.memory_map(split)) for split in ("train", "val"))
    assert sorted(text.split("<|endoftext|>")) == sorted([*texts, ""])


def test_a_run_on_a_hub_dataset_continues_with_its_commit_without_the_hub(launch, tmp_path):
    texts = [prose(i, 40) for i in range(60)]
    code = f"from pathlib import Path\nfrom training.data import run_data\nrun_data.CACHE = Path({str(tmp_path)!r})\n"
    settings = TINY | {"data": "user/name", "vocab_size": 300, "output_dir": tmp_path / "run"}
    settings |= {"max_steps": None, "tokens_per_step": 1024, "eval_steps": 50, "save_steps": 50}
    first = shlex.join(["train_accelerate", *flags(**settings)])
    resume = f"train_accelerate --resume_from_checkpoint {tmp_path}/run --max_steps 100"
    with serving_datasets(name={NEWEST: {"train.parquet": parquet(*texts)}}) as (_, address):
        variables = environment(address, tmp_path / "home") | {"USE_TORCH": "1"}
        output_of(launch, code + RUN_EACH, [first], variables)
    steps = RunFolder(tmp_path / "run").newest_step()
    commands = [f"{resume} --plan --plan_steps 0", first, resume, f"{resume[:-3]}101 --dedup near"]
    output = output_of(launch, code + RUN_EACH, commands, variables | {"HF_HUB_OFFLINE": "1"})
    assert f"{tmp_path}/run is finished ({steps} steps)." in "\n".join(output)
    assert (RunFolder(tmp_path / "run").newest_step(), output.count("done")) == (100, 3)
    assert output[-1].startswith("user/name is not a local path, and the Hub cannot be reached (HF_HUB_OFFLINE is set)")


ESTIMATE = """
import sys, tempfile
from pathlib import Path
from common.errors import UserError
from tokenizer.build import estimate
from tokenizer.build.recipe import Recipe
from tokenizer.encoding.vocabulary import VocabularyArguments

estimate.SAMPLE_BYTES = 20_000
for entry in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe([entry], vocabulary=VocabularyArguments(vocab_size=300))
        try:
            found = estimate.estimate(recipe, Path(folder), lambda line: None)
            print(found and (found.amount, found.whole.metadata.train.tokens + found.whole.metadata.val.tokens))
        except UserError as error:
            print(error)
"""


def test_named_data_are_read_at_a_commit_that_the_store_records(tmp_path, launch):
    chat = json.dumps({"messages": [{"role": "user", "content": prose(5, 400)}] * 2}).encode()
    (tmp_path / "mine.yaml").write_text("# My chats.\ndataset: user/name\nchat_template: chatml\n")
    with serving_datasets(name={NEWEST: {"0.jsonl": chat}}) as (hub, address):
        story = {sha: {"0.jsonl": File(jsonl(prose(int(sha[0]), 800)))} for sha in (FIRST, NEWEST)}
        hub.repositories["datasets/roneneldan/TinyStories"] = Repository(False, story, {"main": NEWEST, "v1": FIRST})
        inputs = {"mine": f"{tmp_path}/mine.yaml", "tinystories": "tinystories --revision v1"}
        output_of(launch, RUN_EACH, pretokenizing(inputs, tmp_path), environment(address, tmp_path))
    chats, stories = (TokenStore(tmp_path / name).metadata for name in inputs)
    assert chats.commits == {"user/name": NEWEST}
    assert "<|im_start|>" in TokenStore(tmp_path / "mine").load_tokenizer().get_vocab()
    assert stories.commits == {"roneneldan/TinyStories": FIRST}
    (tmp_path / "mine.yaml").write_text(f"dataset: user/name\nchat_template: {tmp_path}/own.jinja\n")
    settings = []
    for template in ("a", "b"):
        (tmp_path / "own.jinja").write_text("{{ messages }}" + template)
        settings.append(Recipe([f"{tmp_path}/mine.yaml"]).settings())
    assert settings[0] != settings[1]
    assert (stories.sources, stories.hub_datasets) == (["tinystories"], ["roneneldan/TinyStories"])
    report = (trained(TokenStore(tmp_path / "tinystories"), tmp_path / "run", max_steps=1) / "report.md").read_text()
    sources = f"- sources: tinystories; roneneldan/TinyStories at commit {FIRST[:12]}\n"
    assert f"{sources}- please cite: Eldan and Li 2023, " in report
    assert "arXiv:2305.07759 (license: cdla-sharing-1.0)\n- tokenizer: " in report


def test_split_validation_of_a_dataset_is_its_validation_text(tmp_path, launch):
    train, validation = [prose(i, 80) for i in range(60)], [prose(i, 80) for i in range(100, 130)]
    texts = {"train-0": train[:40], "train-1": train[40:], "validation-0": validation}
    chats = [json.dumps({"messages": [{"role": "user", "content": prose(i, 80)}]}).encode() for i in range(2)]
    commits = {"name": {f"data/{name}.parquet": parquet(*of_file) for name, of_file in texts.items()}}
    commits |= {"chat": {"train.jsonl": chats[0], "validation.jsonl": chats[1]}, "test": {"test.jsonl": chats[0]}}
    stores = {"one": "user/name --num_proc 1", "two": "user/name --num_proc 2", "train": "user/name::train"}
    stores |= {"cut": "user/name --max_documents 45", "chat": "user/chat --chat_template chatml"}
    with serving_datasets(**{name: {NEWEST: files} for name, files in commits.items()}) as (_, address):
        output = "\n".join(output_of(launch, RUN_EACH, pretokenizing(stores, tmp_path), environment(address, tmp_path)))
        taken = ["for validation from user/" in part for part in output.split("\ndone")[:-1]]
        assert taken == [name != "train" for name in stores], output
        [refusal] = output_of(launch, READ, ["user/test"], environment(address, tmp_path))
    assert "it has no split train; name one of its splits, test." in refusal
    one, two, _, short_store, chat = (TokenStore(tmp_path / name) for name in stores)
    assert (documents(one, "train"), documents(one, "val")) == (train, validation)
    assert one.metadata.identity == two.metadata.identity
    assert (documents(short_store, "train"), documents(short_store, "val")) == (train[:45], validation[:1])
    assert "validation_splits" not in (tmp_path / "train" / "metadata.json").read_text()
    assert (chat.metadata.train.documents, chat.metadata.val.documents) == (1, 1)
    assert "validation text is user/chat::validation; no other" in (tmp_path / "chat" / "report.md").read_text()


def test_names_lose_to_local_paths_and_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(dataset_of("wikipedia:de")) == "wikimedia/wikipedia:20231101.de"
    assert str(dataset_of("shakespeare")) == "karpathy/tiny_shakespeare@refs/convert/parquet"
    for name in names():
        dataset = dataset_of(f"{name}:simple" if name == "wikipedia" else name)
        assert dataset is None or open_dataset(str(dataset)) == dataset  # plans contain the text
    assert_user_error("wikipedia needs a language, such as wikipedia:de", dataset_of, "wikipedia")
    assert_user_error("tinystories:de has no languages", dataset_of, "tinystories:de")
    write(tmp_path / "wrong.yaml", "dataset: user/name\nspilt: train\n")
    assert_user_error("wrong.yaml: it has the unknown key 'spilt'", dataset_of, "wrong.yaml")
    columns = []
    for column in ("question", "answer"):
        write(tmp_path / "mine.yaml", f"dataset: user/name\ntext_column: {column}\n")
        columns.append(Recipe(["mine.yaml"]).settings()["named_data"]["mine.yaml"]["text_column"])
    assert columns == ["question", "answer"]  # the recipe of a store has the content of the file
    write(tmp_path / "text.yaml", "key: value\n")
    write(tmp_path / "tinystories", "my own text")
    assert dataset_of("text.yaml") is dataset_of("tinystories") is None


def test_a_limit_stops_streaming_early(tmp_path, launch):
    shards = {f"{shard}.jsonl": jsonl(*(prose(100 * shard + i, 80) for i in range(150))) for shard in range(4)}
    inputs = {"bytes": "user/bytes --max_bytes 30KB", "documents": "user/documents --max_documents 170"}
    with serving_datasets(**{name: {NEWEST: shards} for name in inputs}) as (hub, address):
        output_of(launch, RUN_EACH, pretokenizing(inputs, tmp_path), environment(address, tmp_path))
    paths = [path for method, path in hub.requests if method == "GET" and ".jsonl" in path]
    for name, files in (("bytes", {"0.jsonl"}), ("documents", {"0.jsonl", "1.jsonl"})):
        assert {path.rsplit("/", 1)[1] for path in paths if f"user/{name}/" in path} == files
    metadata = TokenStore(tmp_path / "documents").metadata
    assert metadata.train.documents + metadata.val.documents == 170


def test_large_datasets_are_estimated_from_their_number_of_records(tmp_path, launch):
    """The large one has two shards with 100 records of 10 sentences; one without a count is refused."""
    shards = {f"{shard}.jsonl": jsonl(*(prose(100 * shard + i, 80) for i in range(100))) for shard in range(2)}
    known = b"---\ndataset_info:\n  splits:\n  - {name: train, num_bytes: 1, num_examples: 200}\n---\n"
    datasets = {"large": {"README.md": known, **shards}, "unsaid": shards, "small": {"0.jsonl": jsonl("one", "two")}}
    with serving_datasets(**{name: {NEWEST: files} for name, files in datasets.items()}) as (_, address):
        entries = [f"user/{name}" for name in datasets]
        large, unsaid, small = output_of(launch, ESTIMATE, entries, environment(address, tmp_path))
    read, tokens = ast.literal_eval(large)
    assert read == "68 of 200 records"
    assert tokens == pytest.approx(25_523, rel=0.02)
    assert "user/unsaid does not state its number of records, so its size cannot be estimated; tokenize it" in unsaid
    assert small == "None"


SAMPLE = """
import sys
from tokenizer.build.store_builder import Sample
from tokenizer.build.worker import DocumentSettings
from tokenizer.corpus.units import Corpus, CorpusArguments
from tokenizer.encoding.vocabulary import VocabularyArguments

for entry in sys.argv[1:]:
    corpus = Corpus([entry], CorpusArguments())
    settings = DocumentSettings("document", ["none"], "no", 0.1, 1, None, [], {})
    sample = Sample(corpus.units(), settings, VocabularyArguments(sample_bytes=1000), corpus)
    print([len(text) for text in sample.texts()])
"""


def test_a_tokenizer_is_trained_on_few_shards_of_a_dataset_that_states_its_size(tmp_path, launch):
    shards = {f"{shard}.jsonl": jsonl("some text " * 100) for shard in range(8)}
    stated = b"---\ndataset_info:\n  splits:\n  - {name: train, num_bytes: 4000, num_examples: 8}\n---\n"
    datasets = {"stated": {NEWEST: {"README.md": stated, **shards}}, "unsaid": {NEWEST: shards}}
    with serving_datasets(**datasets) as (_, address):
        samples = output_of(launch, SAMPLE, ["user/stated", "user/unsaid"], environment(address, tmp_path))
    assert samples == ["[501, 501]", str([126] * 8)]


# Nothing listens on port 9. HF_HUB_OFFLINE keeps only the tests' own process from the Hub.
NO_NETWORK = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}
RUN = REPOSITORY / "tests" / "formats" / "run_v2"


def test_missing_network_is_reported_in_one_sentence_and_the_cache_is_used_without_it(launch, tmp_path):
    """The Hub cache contains the model me/cached, as links to blobs."""
    cache_folder = tmp_path / "hub" / "models--me--cached"
    shutil.copytree(RUN / "checkpoints" / "step_00000004", cache_folder / "blobs")
    snapshot = write(cache_folder / "refs" / "main", "0" * 40).parents[1] / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in (cache_folder / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    pretokenize = f"tokenizer.pretokenize --output {tmp_path}/out --quiet --input"
    with_tokenizer = f"{pretokenize} tests/formats/unfinished_v1/text --tokenizer"
    hints = {
        f"{pretokenize} me/other": "",
        f"{with_tokenizer} me/other": "the local Hub cache lacks a tokenizer with this name",
        "generate me/other --prompt The": "the local Hub cache lacks a model with this name",
    }
    conversion = f"modeling_gpt2scratch.conversion_gpt2scratch me/other {tmp_path}/converted"  # prints the error itself
    known = [f"{with_tokenizer} me/cached", "generate me/cached --prompt The --max_new_tokens 2"]
    job = launch("-c", RUN_EACH, *hints, conversion, *known, **NO_NETWORK, HF_HOME=str(tmp_path))
    lines = job.stdout.splitlines()
    assert ([*lines[3:5], lines[-1]], "Retrying" in job.stderr) == (["done"] * 3, False), job.stdout + job.stderr
    assert job.stderr.startswith(f"error: {lines[2].split(' (')[0]} (")  # by now, it is offline
    for hint, line in zip(hints.values(), lines[:3], strict=True):
        assert line.startswith("me/other is not a local path, ")
        assert hint in line
        assert "the Hub cannot be reached (http://127.0.0.1:9: [Errno 111] Connection refused)" in line
