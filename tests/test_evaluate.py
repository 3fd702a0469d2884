"""`python -m training.evaluate`: scores, standard errors, comparisons and memorization."""

import json
import math
import random
import shutil
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_corpus import write_records
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import TWO_PROCESSES, assert_user_error, checkpoint_of, logged, prose, tokenized, trained
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training import evaluate
from training.checkpoints.run_folder import RunFolder
from training.data import run_data
from training.evaluation import baselines, memorization, panel
from training.evaluation.baselines import NGram, compressed_bits
from training.evaluation.memorization import find_spans
from training.evaluation.scoring import ratio, units
from training.report.report import evaluation_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Token store whose validation split has enough documents for standard errors over documents."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(120):
        (folder / f"text{i}.txt").write_text(prose(i, 40 + 8 * (i % 7)), encoding="utf-8")
    return tokenized(folder, folder / "store", {"validation_fraction": 0.4}, vocab_size=300)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Token store of one document: 20,000 random characters out of three."""
    folder = tmp_path_factory.mktemp("letters")
    choice = random.Random(0).choice
    (folder / "text.txt").write_text("".join(choice("ab\n") for _ in range(20_000)), encoding="utf-8")
    return tokenized(folder, folder / "store", {"validation_fraction": 0.2}, tokenizer_type="character")


def saved(folder, store, is_uniform: bool = False) -> GPT2ScratchForCausalLM:
    """Save a model and the store's tokenizer; its weights are random, or give all tokens the same probability."""
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "initializer_range": 0.3}
    model = GPT2ScratchForCausalLM(GPT2ScratchConfig(vocab_size=store.metadata.vocab_size, **size)).eval()
    if is_uniform:
        torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    store.load_tokenizer().save_pretrained(folder)
    return model


def evaluated(capsys, *arguments) -> dict:
    capsys.readouterr()
    evaluate.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_standard_error_is_over_documents_or_over_blocks_if_documents_are_few():
    """By hand: deviations -0.5, -1 and 1.5 from 2.5 per unit of size: sqrt(3 / 2 * 3.5) / 6."""
    assert ratio(np.array([2.0, 4.0, 9.0]), np.array([1, 2, 3])) == (2.5, pytest.approx(0.3818813))
    assert units(np.arange(31) * 7) == (pytest.approx(np.arange(31) * 7), "30 documents")
    edges, unit = units(np.array([0, 10, 1000]))
    assert (edges[:3].tolist(), edges[-1], len(edges), unit) == ([0, 20, 40], 1000, 51, "50 blocks of the text")


def test_uniform_model_costs_the_logarithm_of_its_vocabulary(letters, tmp_path, capsys):
    """Three characters of one byte each: exactly log2(3) bits per byte. Texts have no start token, so the first costs
    the same."""
    saved(tmp_path / "model", letters, is_uniform=True)
    result = evaluated(capsys, tmp_path / "model", "--data", letters.folder, "--compare")
    values = [result[f"eval_{name}"] for name in ("bits_per_byte", "perplexity", "loss_stderr")]
    assert values == pytest.approx([1.5849625, 3, 0], abs=1e-6)
    facts = (result["eval_stderr_over"], result["eval_tokens"])
    assert facts == ("50 blocks of the text", letters.metadata.val.tokens - 1)
    rates = [row["bits_per_byte"] for row in result["panel"]["rows"] if row["kind"] == "model"]
    assert rates == [pytest.approx(1.5849625)]


@torch.no_grad()
def test_loss_and_standard_error_match_a_sum_over_documents(corpus, tmp_path, capsys):
    """The expected values add up each token's cost in its document."""
    model = saved(tmp_path / "model", corpus)
    result = evaluated(capsys, tmp_path / "model", "--data", corpus.folder)
    tokens = torch.from_numpy(corpus.in_memory("val").astype(np.int64))
    windows = [model(window[None]).logits[0] for window in tokens[:-1].split(16)]
    costs = [0.0, *cross_entropy(torch.cat(windows).double(), tokens[1:], reduction="none").tolist()]
    nats = np.array([sum(costs[a:b]) for a, b in pairwise(corpus.offsets("val"))])
    sizes = np.diff(corpus.offsets("val"))
    sizes[0] -= 1
    mean, stderr = ratio(nats, sizes)
    assert result["eval_loss"] == pytest.approx(mean, abs=1e-6)
    assert result["eval_loss_stderr"] == pytest.approx(stderr, rel=1e-4)
    assert result["eval_stderr_over"] == f"{len(sizes)} documents"
    split = corpus.metadata.val
    assert result["eval_bits_per_byte"] == pytest.approx(mean / math.log(2) * split.tokens / split.bytes, abs=1e-6)
    ends = corpus.offsets("val")[1:] - 1  # an end of text starts the next document
    edges = sorted({*range(0, len(tokens), 16), *ends.tolist()})
    parts = [model(tokens[None, a:b]).logits[0] for a, b in pairwise([*edges[:-1], len(tokens) - 1]) if a < b]
    masked = cross_entropy(torch.cat(parts), tokens[1:], reduction="none")
    result = evaluated(capsys, tmp_path / "model", "--data", corpus.folder, "--mask_documents")
    assert result["eval_loss"] == pytest.approx(masked.mean().item(), abs=1e-6)
    assert abs(result["eval_loss"] - mean) > 1e-3


def test_two_processes_give_the_same_results(corpus, tmp_path, capsys, launch):
    saved(tmp_path / "model", corpus)
    arguments = (tmp_path / "model", "--data", corpus.folder, "--compare")
    single = evaluated(capsys, *arguments)
    pair = launch(*TWO_PROCESSES, "-m", "training.evaluate", *arguments, "--json")
    assert pair.returncode == 0, pair.stderr

    def numbers(results: dict) -> dict[str, float]:
        rows = {row["name"]: row["bits_per_byte"] for row in results["panel"]["rows"]}
        return rows | {name: value for name, value in results.items() if isinstance(value, float)}

    assert numbers(json.loads(pair.stdout)) == pytest.approx(numbers(single), abs=1e-6)


@torch.no_grad()
def bits_of_documents(model, tokenizer, texts: list[str], context: int) -> list[float]:
    """Compute bits per document by definition: each token separately, with its own window."""
    bits = []
    for text in texts:
        stream = torch.tensor([tokenizer.bos_token_id, *tokenizer(text)["input_ids"]])
        nats = 0.0
        for place in range(1, len(stream)):
            start = max(0, -(-(place - context) // (context // 2))) * (context // 2)
            logits = model(stream[None, start:place]).logits[0, -1]
            nats -= logits.double().log_softmax(-1)[stream[place]].item()
        bits.append(nats / math.log(2))
    return bits


def test_gpt2_with_another_tokenizer_is_scored_on_the_same_bytes(corpus, store, tmp_path, capsys):
    model = saved(tmp_path / "model", corpus)
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=300, n_layer=1, n_head=2, n_embd=16, n_positions=12, initializer_range=0.3)
    gpt2, gpt2_tokenizer = GPT2LMHeadModel(config).eval(), store.load_tokenizer()
    for part in (gpt2, gpt2_tokenizer):
        part.save_pretrained(tmp_path / "gpt2")
    arguments = (tmp_path / "model", "--data", corpus.folder, "--compare_with", tmp_path / "gpt2")
    panel = evaluated(capsys, *arguments, "--compare_documents", 31)["panel"]
    rows = {row["name"]: row for row in panel["rows"]}
    tokens, offsets, own_tokenizer = corpus.memory_map("val"), corpus.offsets("val"), corpus.load_tokenizer()
    chosen = np.linspace(0, len(offsets) - 2, 31).astype(int)
    texts = [own_tokenizer.decode(tokens[offsets[i] : offsets[i + 1] - 1].tolist()) for i in chosen]
    sizes = np.array([len(text.encode()) for text in texts])
    bits = {"model": bits_of_documents(model, own_tokenizer, texts, 16)}
    bits |= {"gpt2": bits_of_documents(gpt2, gpt2_tokenizer, texts, 12)}
    for name, values in bits.items():
        row = rows[str(tmp_path / name)]
        result = (row["bits_per_byte"], row["bits_per_byte_stderr"])
        assert result == pytest.approx(ratio(np.array(values), sizes), abs=1e-6)
    row, difference = rows[str(tmp_path / "gpt2")], ratio(np.subtract(bits["gpt2"], bits["model"]), sizes)
    assert (row["difference"], row["difference_stderr"]) == pytest.approx(difference, abs=1e-6)
    assert panel["how"].startswith(f"All rows use the same {sizes.sum():,} bytes of 31 documents")
    assert [row["bits_per_byte"] for row in panel["rows"]] == sorted(row["bits_per_byte"] for row in panel["rows"])
    assert set(rows) - {str(tmp_path / name) for name in bits} == {"unigram", "trigram", *baselines.COMPRESSORS}


def test_a_chat_is_compared_as_the_store_has_it(tmp_path):
    chats = [[{"role": role, "content": prose(i, 24)} for role in ("user", "assistant")] for i in range(40)]
    path = write_records(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    store = tokenized(path, tmp_path / "store", {"chat_template": "chatml", "validation_fraction": 0.3}, vocab_size=300)
    text, tokens = panel.HeldOut(store, None), store.memory_map("val")
    documents = [ids.tolist() for ids, _ in text.encoded(store.load_tokenizer(), "own")]
    ends = (store.offsets("val")[1:] - 1).tolist()
    assert documents == [tokens[start:end].tolist() for start, end in zip(store.offsets("val"), ends, strict=False)]
    other = tokenized(path, tmp_path / "other", {"chat_template": "chatml"}, vocab_size=310).load_tokenizer()
    assert other.vocab["<|im_start|>"] not in text.encoded(other, "other")[0][0]


def test_a_run_is_scored_on_the_tokens_that_it_recorded(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(prose(0))
    monkeypatch.setattr(run_data, "CACHE", tmp_path / "data")
    run = trained(SimpleNamespace(folder=tmp_path / "text.txt"), tmp_path / "run", max_steps=1, vocab_size=300)
    [recorded] = (tmp_path / "data").glob("text-*")
    (tmp_path / "text.txt").unlink()
    trained(SimpleNamespace(folder=None), None, resume_from_checkpoint=run, max_steps=2)
    (tmp_path / "text.txt").write_text(prose(1))
    assert evaluate.store_and_masking(str(run), None)[0].folder == recorded
    assert "WARNING" not in capsys.readouterr().err
    shutil.rmtree(recorded)
    sentence = "run no longer exists; name one with --original_data"
    assert_user_error(sentence, evaluate.store_and_masking, str(run), None, "original_data", may_build=False)
    assert evaluate.store_and_masking(str(run), None)[0].folder != recorded  # of the text as it is now
    assert f"WARNING: The tokens of {run} no longer exist" in capsys.readouterr().err


def test_ngrams_match_hand_computations_and_sum_to_one():
    # Counts 3, 1 and 0 of 4; a discount of 0.75 from two kinds of tokens: 1.5 / 4, divided among three.
    unigram = NGram(np.array([0, 0, 0, 1], dtype=np.uint16), 3, 1)
    assert unigram.probabilities(np.array([0, 1, 2])) == pytest.approx([0.6875, 0.1875, 0.125])
    # 0 follows one kind of token, 1 follows two: 1/3 and 2/3, weighted 0.75 / 2 after 0 and 0.75 after 1.
    bigram = NGram(np.array([0, 1, 0, 1, 1]), 2, 2)
    assert bigram.probabilities(np.array([0, 0]))[1] == pytest.approx(0.75 / 2 * (1 / 3))
    assert bigram.probabilities(np.array([0, 1])) == pytest.approx([1 / 3, 1.25 / 2 + 0.75 / 2 * (2 / 3)])
    assert bigram.probabilities(np.array([1, 0])) == pytest.approx([2 / 3, 0.25 / 2 + 0.75 * (1 / 3)])
    assert NGram(np.array([0]), 2, 3).probabilities(np.array([0, 1])) == pytest.approx([0.625, 0.375])
    tokens = np.random.default_rng(0).integers(0, 6, 200)  # 6 never occurs
    trigram = NGram(np.concatenate([[5, 4], tokens[tokens < 5], [5]]), 7, 3)
    for history in product(range(7), repeat=2):
        probabilities = [trigram.probabilities(np.array([*history, third]))[2] for third in range(7)]
        assert sum(probabilities) == pytest.approx(1)
        assert min(probabilities) > 0


def test_baselines_are_ngrams_on_a_subset_and_compressors(store, monkeypatch):
    monkeypatch.setattr(baselines, "FITTED_TOKENS", 1000)
    tokens, subset = store.in_memory("train"), baselines.fitted_on(store)
    assert len(subset) == 1000
    assert [*subset[:50], *subset[-50:]] == [*tokens[:50], *tokens[-50:]]
    sizes = {"bzip2 -9": 47, "xz -9": 148, "gzip -9": 133}  # that the command of this name gives
    bits = {name: 8 * size / 100_000 for name, size in sizes.items()}
    assert compressed_bits(b"a" * 100_000) == pytest.approx(bits, rel=0.1)  # depends on the version of zlib


def test_planted_span_is_found_at_its_position_and_an_absent_one_is_not(monkeypatch):
    monkeypatch.setattr(memorization, "BLOCK", 1000)
    tokens = np.random.default_rng(0).integers(0, 50_000, 5000).astype(np.uint16)
    span, edge = tokens[1234:1284].copy(), tokens[980:1030].copy()  # within a block and across its edge
    changes = span.copy()
    changes[-1] += 1
    rows = np.stack([span, edge, changes, tokens[-50:], span]).astype(np.int64)
    assert find_spans(tokens, rows).tolist() == [1234, 980, -1, 4950, 1234]
    assert find_spans(tokens[:40], rows).tolist() == [-1] * 5


def test_memorization_looks_up_generated_text(letters, tmp_path, capsys):
    """All 27 spans of length 3 over three characters occur in 16,000 random characters, but no generated span of 60."""
    saved(tmp_path / "model", letters, is_uniform=True)
    arguments = (tmp_path / "model", "--data", letters.folder, "--memorization", "--memorization_texts", 4)
    result = evaluated(capsys, *arguments, "--memorization_span", 3)["memorization"]
    assert (result["share"], result["held_out_share"]) == (1.0, 1.0)
    assert result["spans"] == result["held_out_spans"] == 4 * 254
    assert evaluated(capsys, *arguments[:-1], 99, "--memorization_span", 3)["memorization"]["held_out_texts"] == 15
    place = result["example"]["token"]
    text = letters.load_tokenizer().decode(letters.memory_map("train")[place : place + 3].tolist())
    assert (result["example"]["text"], result["example"]["document"]) == (text, 0)
    results = [evaluated(capsys, *arguments, "--memorization_span", 60)["memorization"] for _ in range(2)]
    assert (results[0]["share"], results[0]["share_stderr"], results[0]["example"]) == (0.0, 0.0, None)
    assert results[0] == results[1]


def test_a_small_validation_split_is_divided_at_the_ends_of_its_documents():
    tokens = np.arange(163)
    pieces = memorization.held_out_pieces(tokens, np.array([0, 41, 122, 163]))
    assert [len(piece) for piece in pieces] == [41, 81, 41]
    assert [len(piece) for piece in memorization.held_out_pieces(tokens, np.array([0, 163]))] == [81, 82]
    pieces = memorization.held_out_pieces(np.arange(600), np.array([0, 1, 600]))
    assert [(piece[0], len(piece)) for piece in pieces] == [(0, 256), (256, 256)]


def test_spans_end_at_the_end_of_a_document(corpus, tmp_path, capsys):
    saved(tmp_path / "model", corpus, is_uniform=True)
    arguments = (tmp_path / "model", "--data", corpus.folder, "--memorization", "--memorization_span", 3)
    result = evaluated(capsys, *arguments)["memorization"]
    assert result["share"] < 0.01 < 0.1 < result["held_out_share"]
    assert 64 * 50 < result["spans"] < 64 * 254  # one in 300 tokens is an end of text


def test_run_keeps_evaluation_results(finished_copy, capsys, monkeypatch):
    run = finished_copy
    evaluated(capsys, run, "--compare", "--compare_with", checkpoint_of(run, 3))
    file, panel = run / "evaluation" / "evaluation.json", run / "evaluation" / "panel.png"
    assert panel.read_bytes().startswith(b"\x89PNG")
    memorization = ("--memorization", "--memorization_texts", 2, "--memorization_span", 4)
    results = evaluated(capsys, run, *memorization)
    assert {"panel", "memorization", "eval_loss", "weights_sha256"} <= json.loads(file.read_text()).keys()
    page = file.with_suffix(".md").read_text()
    assert all(words in page for words in ("| trigram |", "![Bits per byte, compared](panel.png)", "## Memorization"))
    assert str(run) not in str(evaluation_of(RunFolder(run), run / "model"))
    assert evaluation_of(RunFolder(run), checkpoint_of(run, 3)) is None
    evaluate.main([str(run)])  # not a terminal
    text = capsys.readouterr().out
    assert all(word in text for word in ("perplexity", "standard error", f"{results['eval_loss']:.4f}"))
    content = file.read_bytes()
    evaluate.main(list(map(str, (run, "--checkpoint", 3, *memorization))))
    assert f"Not saved: {file.parent} has results of {run}/model; delete it to save these." in capsys.readouterr().err
    assert file.read_bytes() == content
    tasks = {key: {} for key in ("configs", "results", "n-shot", "lm_eval_version")}  # once without cut_requests
    results = json.loads(content) | {"tasks": tasks, "tokens_sha256": "of another text"}
    del results["mask_documents"], results["memorization"]["held_out_texts"]  # as in older versions
    file.write_text(json.dumps(results))
    evaluated(capsys, run, *memorization)
    results = json.loads(file.read_text())
    assert {"tasks", "memorization"} <= results.keys()  # tasks have their own text
    assert ("panel" in results, panel.exists()) == (False, False)
    file.write_text(json.dumps(results | {"weights_sha256": ["of another run"]}))
    evaluated(capsys, run, *memorization)
    assert "tasks" not in json.loads(file.read_text())
    for broken in ('{"cut o', "[]", "\xff"):
        file.write_text(broken, encoding="latin-1")
        assert evaluation_of(RunFolder(run), run / "model") is None
    shutil.rmtree(file.parent)
    with monkeypatch.context() as only_readable:  # such as the run of a colleague
        only_readable.setattr("os.access", lambda path, mode: path != run)
        evaluate.main(list(map(str, (run, *memorization))))
    assert f"The results will not be saved: {run} cannot be written.\n" in capsys.readouterr().err
    assert not file.parent.exists()
    file.parent.write_text("in the way")
    assert_user_error(r"evaluation\S* cannot be read or written", evaluate.main, [str(run), "--compare"])


def test_checkpoint_option_chooses_last_best_or_a_step(finished_copy, capsys):
    evaluations = {entry["step"]: entry for entry in logged(finished_copy, "eval_loss")}
    best = min((6, 3), key=lambda step: evaluations[step]["eval_loss"])
    for target, step in {"last": 6, "3": 3, "best": best}.items():
        result = evaluated(capsys, finished_copy, "--checkpoint", target)
        assert result["model"] == str(checkpoint_of(finished_copy, step))
        for name in ("eval_loss", "eval_bits_per_byte", "eval_tokens"):  # the run scored itself the same way
            assert result[name] == pytest.approx(evaluations[step][name], abs=1e-5)


def test_invalid_inputs_are_refused_with_one_sentence(corpus, letters, tmp_path):
    saved(tmp_path / "model", corpus)
    saved(tmp_path / "letters", letters)
    arguments = [str(tmp_path / "model"), "--data", str(corpus.folder)]
    for options, sentence in (
        (["--compare_with", arguments[0]], r"compare_with names a model twice"),
        (["--compare_with", "runs/none"], r"runs/none is neither a local folder nor a Hub id"),
        (["--compare_with", str(tmp_path / "letters")], r"its tokenizer does not know every character of the text"),
        (["--memorization", "--memorization_span", "200"], r"No piece of .* has 200 tokens of one document; use"),
        (["--checkpoint", "best"], r"is neither a run folder nor a checkpoint in one"),
    ):
        assert_user_error(sentence, evaluate.main, [*arguments, *options])


def test_model_is_scored_only_on_a_store_with_its_own_tokenizer(corpus, store, tmp_path):
    assert store.metadata.vocab_size == corpus.metadata.vocab_size
    model = saved(folder := tmp_path / "model", corpus)
    sentence = f"{store.folder} have different tokenizers; use a store that was made"
    assert_user_error(sentence, evaluate.main, [str(folder), "--data", str(store.folder)])
    arguments = [str(folder), "--data", str(corpus.folder)]
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(folder)
    assert_user_error("has a loss of nan; its weights or its config.json are damaged.", evaluate.main, arguments)
    (folder / "tokenizer.json").unlink()
    assert_user_error("has neither tokenizer.json nor vocab.json", evaluate.main, arguments)
