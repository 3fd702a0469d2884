"""Takes a packed token store out of its file, and verifies it.

python -m tokenizer.unpack data/my.tar.zst
python -m tokenizer.unpack data/my.tar.zst --output data/elsewhere
"""

import interrupt  # noqa: F401  (first: for Ctrl-C during the other imports)

# isort: split
from dataclasses import dataclass
from pathlib import Path

from command_line import FlagParser, run
from errors import UserError
from limits import setting
from tokenizer import archive


@dataclass
class UnpackArguments:
    archive: str | None = setting(None, "The packed store; may be given without its flag.")
    output: str | None = setting(None, "Folder to write; by default the archive's name without .tar.zst.")


def main(arguments: list[str]) -> None:
    (options,), _ = FlagParser((UnpackArguments,), __doc__.splitlines()[0], positional="archive").parse(arguments)
    if options.archive is None:
        raise UserError("Name a packed store: python -m tokenizer.unpack data/my.tar.zst")
    if options.output is None and not options.archive.endswith(archive.SUFFIX):
        raise UserError(f"{options.archive} does not end in {archive.SUFFIX}; name a folder with --output.")
    path = Path(options.archive).expanduser()
    store = archive.unpack(path, Path(options.output or str(path).removesuffix(archive.SUFFIX)).expanduser())
    print(
        f"{store.folder} holds {store.metadata.train.tokens:,} tokens to train on and {store.metadata.val.tokens:,} to "
        f"validate with; every hash is right."
    )


if __name__ == "__main__":
    run(main)
