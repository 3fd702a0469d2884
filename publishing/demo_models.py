"""Models of the demo page: loading, generation, and the loss of each token. A Space has a copy of this file."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RevisionNotFoundError
from torch.nn.functional import cross_entropy
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process

from modeling_gpt2scratch import loading, prompts
from modeling_gpt2scratch.modeling_gpt2scratch import CACHE

EXAMPLES = ("Once upon a time", "The most important thing", "In the beginning")  # prompts, if a run names none
MAX_MODELS = 4  # number of cards that fit side by side
CACHE_SIZE = 6  # number of loaded models that stay in memory
ALL_TOKENS = 10**9
FILES = (loading.CONFIG, loading.GENERATION, loading.ADAPTER, loading.WEIGHTS, loading.SHARDS, loading.INDEX)
FILES += (*loading.TOKENIZER, *loading.OLD_TOKENIZER)
_one_at_a_time = threading.Lock()


@dataclass
class DemoModel:
    """Model on the page. It is loaded when it is used."""

    name: str
    source: str  # a folder, a Hub id, or user/name@revision
    facts: list[str]  # such as the size, when it is loaded, and "step 300"

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model and its tokenizer. Raise a `ModelError` if they cannot be loaded."""
        with _one_at_a_time:
            model, tokenizer = _load(self.source)
            if (size := f"{model.num_parameters():,} parameters") not in self.facts:
                self.facts.insert(0, size)
        return model, tokenizer


@lru_cache(CACHE_SIZE)
def _load(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    name, _, revision = ("", "", "") if Path(source).exists() else source.partition("@")
    folder = source
    try:
        if revision:
            folder = snapshot_download(name, revision=revision, allow_patterns=FILES)
        model, tokenizer = prompts.load_with_tokenizer(folder)
        model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        loading.check_logits(source, model)
    except RevisionNotFoundError as error:
        raise loading.ModelError(f"{name} has no revision {revision} on the Hub.") from error
    except Exception as error:  # also of the Hub's HTTP library, and of a full device
        is_sentence = isinstance(error, loading.ModelError)
        problem = str(error) if is_sentence else f"{source} cannot be loaded: {_short(error)}."
        raise loading.ModelError(problem.replace(folder, source)) from error
    loading.arrange_weights(model)
    return model, tokenizer


def on_hub(source: str) -> list[DemoModel]:
    """Return the model `source` and the other branches of its repository, or only the revision of
    user/name@revision."""
    names = [source]
    if "@" not in source:
        with suppress(Exception):  # the Hub does not answer; its HTTP library, and so the exceptions, differ by version
            branches = [branch.name for branch in HfApi().list_repo_refs(source).branches]
            names += [f"{source}@{branch}" for branch in sorted(branches) if branch != "main"]
    return [DemoModel(name, name, []) for name in names]


def sentence(error: Exception, entry: DemoModel) -> str:
    """Return one sentence about an error of a model, with its name in place of its path, for visitors."""
    if isinstance(error, loading.ModelError):
        return str(error).replace(entry.source, entry.name)
    return f"{entry.name} stopped with an error: {_short(error)}."


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


@dataclass(frozen=True)
class GenerationSettings:
    """Sampling settings, with the names and meanings of generate.py's flags."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int

    @property
    def is_greedy(self) -> bool:
        return self.temperature < prompts.LOWEST_TEMPERATURE

    def processors(self) -> LogitsProcessorList:
        """Return the processors of logits, in the order of Transformers' `generate`."""
        chain = LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))])
        if not self.is_greedy:
            chain.append(logits_process.TemperatureLogitsWarper(float(self.temperature)))
            chain.append(logits_process.TopKLogitsWarper(int(self.top_k) or ALL_TOKENS))
            chain.append(logits_process.TopPLogitsWarper(float(self.top_p)))
        return chain


@torch.no_grad()
def new_tokens(model: PreTrainedModel, ids: list[int], settings: GenerationSettings) -> Iterator[int]:
    """Yield new tokens after `ids` until the model ends its text. When the context is full, its second half becomes the
    prompt. At temperature 0 these are the tokens of generate.py. Transformers' `generate` uses one random generator for
    all threads; here each text has its own, so that a seed gives the same text while others are generated."""
    context, ends = model.config.max_position_embeddings, prompts.end_tokens(model)
    generator = torch.Generator(model.device).manual_seed(settings.seed)
    process = settings.processors()
    window = ids[-context + 1 :]
    unread, cache = window, None
    for _ in range(int(settings.max_new_tokens)):
        if len(window) == context:
            window = window[-max(1, context // 2) :]
            unread, cache = window, None
        output = model(torch.tensor([unread], device=model.device), use_cache=True, **{CACHE: cache})
        logits = process(torch.tensor([window], device=model.device), output.logits[:, -1].float())  # (1, V)
        if settings.is_greedy:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        if token in ends:
            return
        yield token
        window = [*window, token]
        unread, cache = [token], output[CACHE]


@torch.no_grad()
def score(entry: DemoModel, text: str) -> dict:
    """Return the losses of the tokens of `text` within the context in nats, the number of all tokens, and the loss by
    end of a piece of the text (None for the first token); or the reason why there is none. A character of several
    tokens is one piece."""
    try:
        model, tokenizer = entry.load()
        whole = prompts.encode_prompt(tokenizer, text, model)  # checks the characters
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        n_added = len(whole) - len(encoding.input_ids)  # a beginning-of-text token
        ids = torch.tensor(whole[: model.config.max_position_embeddings], device=model.device)
        if len(ids) < 2 + n_added:
            raise loading.ModelError("The first token has no loss; enter a text of at least two tokens.")
        losses = cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:], reduction="none")[n_added:].tolist()
    except Exception as error:  # the other model is scored
        return {"problem": sentence(error, entry), "pieces": {}}
    pieces: dict[int, float | None] = {}
    for end, loss in zip(accumulate((end for _, end in encoding.offset_mapping), max), [None, *losses], strict=False):
        pieces[end] = loss if pieces.get(end) is None else pieces[end] + loss
    return {"losses": losses, "tokens": len(encoding.input_ids), "pieces": pieces}


def difference(first: dict[int, float | None], second: dict[int, float | None]) -> dict[int, float | None]:
    """Return the loss of the second model minus that of the first, by positions where a piece of both ends."""
    pairs = (first, second)
    sums = [dict(zip(losses, accumulate(x or 0.0 for x in losses.values()), strict=True)) for losses in pairs]
    ends = sorted(first.keys() & second.keys())
    changes = pairwise(sums[1][end] - sums[0][end] for end in ends)
    return dict(zip(ends, [None, *(total - base for base, total in changes)], strict=False))
