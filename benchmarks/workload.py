"""Workload of the benchmarks: the shape of a model, a batch size, and random tokens with the frequencies of words."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.results import REPOSITORY
from common.errors import UserError
from common.settings_file import read_yaml
from tokenizer.corpus.documents import Counts
from tokenizer.store.store import finish, index_file, tokens_file

SPLITS = {"train": 4_000_000, "val": 20_000}  # tokens


@dataclass(frozen=True)
class Workload:
    """Model of a preset, trained with `sequences` x `n_positions` tokens per step."""

    preset: str
    sequences: int
    dropout: float
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int = 32000  # of presets for any vocabulary
    activation_function: str = "gelu"
    tie_word_embeddings: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequences * self.n_positions

    @property
    def model(self) -> dict:
        """Fields of our model configuration."""
        shape = {name: value for name, value in asdict(self).items() if name not in ("preset", "sequences", "dropout")}
        return shape | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout)

    @classmethod
    def of_preset(cls, preset: str, sequences: int, dropout: float) -> "Workload":
        settings = read_yaml(REPOSITORY / "presets" / f"{preset}.yaml")
        if "n_layer" not in settings or "rope_theta" in settings:
            raise UserError(f"{preset} is not a preset of GPT-2, which all contestants train; use another one.")
        shape = {name: value for name, value in settings.items() if name in cls.__dataclass_fields__}
        return cls(preset, sequences, dropout, **shape)


def make_store(folder: Path, vocab_size: int) -> None:
    """Write a token store of random ids whose frequencies follow Zipf's law, as words do.

    Zeros or equal frequencies would distort the timing, because embeddings are read, and their gradients summed, by id.
    """
    folder.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(vocab_size)}, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "tokenizer")
    dtype = "uint16" if vocab_size < 65_500 else "uint32"
    shares = 1 / np.arange(1, vocab_size + 1)
    generator = np.random.default_rng(0)
    for split, size in SPLITS.items():
        ids = generator.choice(vocab_size, size, p=shares / shares.sum())
        ids.astype(dtype).tofile(folder / tokens_file(split))
        np.array([size], dtype="<i8").tofile(folder / index_file(split))
    finish(
        folder,
        {split: (size, 1, 4 * size) for split, size in SPLITS.items()},
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer_type="words",
        eos_token_id=None,
        sources=[],
        settings={"cleaning": [], "dedup": "no"},
        counts=asdict(Counts()) | {"links": 0},
        cleaning={},
        repeated_documents=0,
        command="",
    )
