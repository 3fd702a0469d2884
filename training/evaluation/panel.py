"""Comparison of models, n-grams and compressors by bits per byte of the same text.

A model scores each document separately, with its own tokenizer, after its start token (bos, or eos if there is no bos;
eos for models of this project; without either, the first token costs as much as under a uniform distribution). Windows
of its context overlap by half, so all but the first tokens of a document are predicted from half a context or more. The
token that ends a document is not text and is not scored.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from accelerate import Accelerator
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError, counted
from common.progress import track
from tokenizer.store.store import TokenStore
from training.checkpoints.loading import find_model, load_any_model, rules
from training.evaluation.baselines import FITTED_TOKENS, NGram, compressed_bits, fitted_on
from training.evaluation.scoring import ratio, sum_of_processes, units

LONGEST_WINDOW = 2048  # tokens: few documents are longer, and few machines have memory for more
BYTES_OF_LOGITS = 1 << 27  # per batch, in fp32
ORDERS = {"unigram": 1, "trigram": 3}
BATCH_DOCUMENTS = 256
EncodedText = list[tuple[np.ndarray, np.ndarray]]  # per document: ids of one tokenizer, and the unit of each id


class HeldOut:
    """Documents of the validation split as text."""

    def __init__(self, store: TokenStore, limit: int | None):
        """`limit` is the number of evenly spaced documents to use, or None for all."""
        tokens, offsets, own = store.memory_map("val"), store.offsets("val"), store.load_tokenizer()
        self.rules, self.is_chat, rust = rules(own), own.chat_template is not None, own.backend_tokenizer
        ends = offsets[1:] - (store.metadata.eos_token_id is not None)
        number = len(ends) if limit is None else min(limit, len(ends))
        indices = np.linspace(0, len(ends) - 1, number).astype(np.int64)
        self.texts = [rust.decode(tokens[offsets[i] : ends[i]].tolist(), skip_special_tokens=False) for i in indices]
        self.starts = np.concatenate([[0], np.cumsum([len(text) for text in self.texts])])  # characters, with the end
        self.edges, self.units = units(self.starts)  # boundaries of the units of the standard error; description
        self.text = "".join(self.texts)
        sizes = [len(self.text[start:end].encode()) for start, end in pairwise(self.edges)]
        self.bytes = np.array(sizes, dtype=np.int64)  # (units,)

    def encoded(self, tokenizer: PreTrainedTokenizerBase, name: str) -> EncodedText:
        """Encode the text. Raise a `UserError` if the tokenizer cannot represent all of it. The store's own tokenizer
        encodes the control tokens of chats; for others, they are text."""
        rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        rust.encode_special_tokens = not self.is_chat or rules(tokenizer) != self.rules
        rust.no_truncation()
        rust.no_padding()
        unknown = getattr(rust.model, "unk_token", None)
        unknown = rust.token_to_id(unknown) if unknown else None
        problem = f"{name} cannot be compared: its tokenizer does not know every character of the text; remove it."
        documents = []
        for index in range(0, len(self.texts), BATCH_DOCUMENTS):
            try:
                batch = rust.encode_batch(self.texts[index : index + BATCH_DOCUMENTS], add_special_tokens=False)
            except Exception as error:  # the Rust library raises no narrower type
                raise UserError(problem) from error
            for start, encoding in zip(self.starts[index:], batch, strict=False):
                if unknown in encoding.ids:
                    raise UserError(problem)
                positions = start + np.array([begin for begin, _ in encoding.offsets], dtype=np.int64)
                places = np.searchsorted(self.edges, positions, side="right") - 1
                # A tokenizer that trims offsets places a last blank at the end of the text.
                places = np.minimum(places, len(self.edges) - 2)
                documents.append((np.array(encoding.ids, dtype=np.int64), places))
        return documents


@torch.no_grad()
def nats_of_model(
    model: PreTrainedModel, bos: int | None, text: EncodedText, n_units: int, accelerator: Accelerator, name: str
) -> np.ndarray:
    """Return the model's nats for each unit of the text, (units,) float64.
    All processes compute them together. `bos` is the start token of each document."""
    context = min(model.config.max_position_embeddings, LONGEST_WINDOW)
    sums = np.zeros(n_units)
    windows = []  # windows: tokens, and the units of the last tokens, which no earlier window scored
    for ids, unit in text:
        if bos is not None:
            ids = np.concatenate([[bos], ids])
        elif len(unit):
            sums[unit[0]] += math.log(model.config.vocab_size) * accelerator.is_main_process
            unit = unit[1:]
        start = end = 0
        while end < len(unit):
            windows.append((ids[start : start + context + 1], unit[end : start + context]))
            end = start + context
            start += max(1, context // 2)
    windows.sort(key=lambda window: -len(window[0]))  # longest first: less padding, and peak memory in the first batch
    rows = max(1, BYTES_OF_LOGITS // (context * model.config.vocab_size * 4))
    batches = [windows[at : at + rows] for at in range(0, len(windows), rows)]
    batches = batches[accelerator.process_index :: accelerator.num_processes]
    for batch in track(batches, name, accelerator.is_main_process):
        pieces = [torch.from_numpy(tokens) for tokens, _ in batch]
        token_rows = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(model.device)  # padding: not attended
        with accelerator.autocast():
            logits = model(input_ids=token_rows[:, :-1], use_cache=False).logits
        targets = token_rows[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        for row, (tokens, unit) in zip(nats.cpu().double().numpy(), batch, strict=True):
            np.add.at(sums, unit, row[len(tokens) - 1 - len(unit) : len(tokens) - 1])
    return sum_of_processes(sums, accelerator)


def nats_of_ngram(ngram: NGram, eos: int | None, text: EncodedText, n_units: int) -> np.ndarray:
    """Return an n-gram model's nats for each unit, (units,) float64. Each document follows an end of text."""
    prefix = [] if eos is None else [eos]
    stream = np.concatenate([part for ids, _ in text for part in (prefix, ids)]).astype(np.int64)
    nats = -np.log(ngram.probabilities(stream))
    is_text = np.concatenate([np.arange(len(prefix) + len(ids)) >= len(prefix) for ids, _ in text])
    return np.bincount(np.concatenate([units for _, units in text]), weights=nats[is_text], minlength=n_units)


def compare_models(
    model: PreTrainedModel,
    name: str,
    names: list[str],
    store: TokenStore,
    most_documents: int | None,
    accelerator: Accelerator,
) -> dict[str, Any] | None:
    """Return the rows of the comparison, best first, and the method, for JSON. Raise a `UserError` if a model cannot be
    loaded, or its tokenizer cannot represent the text. Only the main process fits n-grams and compresses."""
    text = HeldOut(store, most_documents)
    nats: dict[str, np.ndarray] = {}
    for title in (name, *names):
        scorer, tokenizer = model, store.load_tokenizer()
        if title != name:
            scorer, tokenizer = load_any_model(find_model(title), torch.float32)
            scorer = scorer.to(accelerator.device)
        is_own = title == name or scorer.config.model_type == "gpt2scratch"  # in training, documents follow the eos
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        start, other = (eos, bos) if is_own else (bos, eos)
        start = other if start is None else start
        encoding = text.encoded(tokenizer, title)
        nats[title] = nats_of_model(scorer, start, encoding, len(text.bytes), accelerator, title)
        if title == name:
            own_encoding = encoding
        del scorer  # before the next model is loaded
    if not accelerator.is_main_process:
        return None
    train_tokens, eos = fitted_on(store), store.metadata.eos_token_id
    for title, order in track(ORDERS.items(), "n-grams", is_shown=True):
        ngram = NGram(train_tokens, store.metadata.vocab_size, order)
        nats[title] = nats_of_ngram(ngram, eos, own_encoding, len(text.bytes))
    bits_per_byte = compressed_bits(text.text.encode())
    rows = [{"name": title, "kind": "compressor", "bits_per_byte": value} for title, value in bits_per_byte.items()]
    for title, values in nats.items():
        bits, stderr = ratio(values / math.log(2), text.bytes)
        row = {"name": title, "kind": "n-gram" if title in ORDERS else "model", "bits_per_byte": bits}
        if not math.isnan(stderr):  # NaN is not valid in JSON
            row["bits_per_byte_stderr"] = stderr
        if title != name:  # differences are paired by unit
            row["difference"], row["difference_stderr"] = ratio((values - nats[name]) / math.log(2), text.bytes)
        rows.append(row)
    split = store.metadata.train
    on = f"the training split's {split.tokens:,} tokens"
    if split.tokens > FITTED_TOKENS:
        on = f"{FITTED_TOKENS:,} of the training split's {split.tokens:,} tokens, evenly spaced"
    method = (
        f"All rows use the same {text.bytes.sum():,} bytes of {counted(len(text.texts), 'document')}. Models score "
        "each document separately, in windows of their context that overlap by half. ±: standard error over "
        f"{text.units}, paired for differences. N-grams (Kneser-Ney) are fitted on {on}; compressors read all "
        "documents as one file."
    )
    return {"rows": sorted(rows, key=lambda row: row["bits_per_byte"]), "how": method}
