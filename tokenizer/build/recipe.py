"""Recipe of a token store: all settings that determine its tokens."""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from tokenizer.cleaning import cleaning
from tokenizer.cleaning.cleaning import CleaningArguments
from tokenizer.cleaning.dedup import DedupArguments
from tokenizer.corpus.chat import TURN_MARK, ChatTemplate
from tokenizer.corpus.given import GivenDataset
from tokenizer.corpus.named_data import find
from tokenizer.corpus.units import CorpusArguments
from tokenizer.encoding import vocabulary
from tokenizer.encoding.vocabulary import SavedTokenizer, VocabularyArguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 1337
FINE_TUNING = "train on chats with python -m examples.finetune_chat"


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the tokens of a store."""

    inputs: list[str]
    corpus: CorpusArguments = field(default_factory=CorpusArguments)
    vocabulary: VocabularyArguments = field(default_factory=VocabularyArguments)
    cleaning: CleaningArguments = field(default_factory=CleaningArguments)
    dedup: DedupArguments = field(default_factory=DedupArguments)
    seed: int = SEED
    weights: list[float] = field(default_factory=list)
    given: dict[str, GivenDataset] = field(default_factory=dict)  # datasets of this process, by their name in `inputs`
    vocab_size_must_fit: bool = True  # False if a run's YAML file sets the size: the tokenizer's own size overrides it

    def problems(self) -> list[str]:
        sentences = cleaning.problems(self.cleaning) + vocabulary.problems(self.vocabulary) + [*self.corpus.problems()]
        if self.weights and len(self.weights) != (count := len(self.inputs)):
            sentences.append(f"There are {len(self.weights)} weights for {count} inputs: give one per input, in order.")
        return sentences

    @cached_property
    def existing_tokenizer(self) -> "PreTrainedTokenizerBase | SavedTokenizer | None":
        """Tokenizer that the `tokenizer` setting names, or None if the setting is empty."""
        if (name := self.vocabulary.tokenizer) is None:
            return None
        name = os.path.expanduser(name)
        return SavedTokenizer.read(Path(name)) or vocabulary.load(name)

    def settings(self) -> dict[str, Any]:
        """Return all settings by flag name, and the content of the files that some of them name."""
        parts = (self.corpus, self.vocabulary, self.cleaning, self.dedup)
        settings = {name: value for part in parts for name, value in asdict(part).items()}
        for name in ("exclude", "revision", "max_bytes", "max_documents"):
            if not settings[name]:  # newer settings: without them, older stores and cached names stay valid
                del settings[name]
        settings |= {"input": self.inputs, "weights": self.weights, "seed": self.seed}
        files = {entry: data for entry in self.inputs if entry.endswith(".yaml") and (data := find(entry)) is not None}
        if files:
            settings["named_data"] = {entry: data.selection for entry, data in files.items()}
        names = {entry: data.chat_template for entry, data in files.items()}
        if own := {entry: ChatTemplate.read(name) for entry, name in names.items() if name not in (None, "chatml")}:
            settings["named_templates"] = own
        if self.existing_tokenizer is not None:
            content = self.existing_tokenizer.backend_tokenizer.to_str()
            settings["tokenizer_json"] = hashlib.sha256(content.encode()).hexdigest()
        if (name := self.corpus.chat_template) is not None:
            settings["chat_template_source"] = ChatTemplate.read(name)
        return settings

    def chat_template(self) -> tuple[str, list[str], dict[str, str]]:
        """Return source, control tokens and variables of the template that renders chats.
        Raise a `UserError` if no template is known, or the tokenizer lacks its tokens."""
        name, tokenizer = self.corpus.chat_template, self.existing_tokenizer
        source = None if name is not None else getattr(tokenizer, "chat_template", None)
        source = source.get("default") if isinstance(source, dict) else source  # the others have other names
        named = (data.chat_template for data in map(find, self.inputs) if data is not None)
        name = name or next(filter(None, named), None)
        if source is None and name is not None:
            source = ChatTemplate.read(name)
        if source is None:
            remedy = "give --chat_template chatml or a file" + f", or {FINE_TUNING}" * (tokenizer is not None)
            raise UserError(f"The text has chats, but no chat template is known; {remedy}.")
        marks = list(dict.fromkeys(TURN_MARK.findall(source)))  # such as those that end a turn
        if tokenizer is not None:
            added_tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
            special = [token.content for token in added_tokens if token.special]
            missing, variables = [mark for mark in marks if mark not in special], tokenizer.special_tokens_map
            if missing and not ChatTemplate(source, tuple(special), variables).ends_turns:
                raise UserError(
                    f"The tokenizer {self.vocabulary.tokenizer} lacks {' and '.join(missing)}, which end the turns of "
                    f"{name or 'its chat template'}; {FINE_TUNING}, which needs no such tokens."
                )
            return source, special, variables
        if self.vocabulary.tokenizer_type == "character":
            raise UserError("Chats need control tokens, but a character tokenizer has none; use --tokenizer_type bpe.")
        variables = dict.fromkeys(["bos_token", "eos_token"], vocabulary.END_OF_TEXT)
        marks += ChatTemplate(source, (), variables).marks
        return source, list(dict.fromkeys([vocabulary.END_OF_TEXT, *marks, *self.vocabulary.special_tokens])), variables
