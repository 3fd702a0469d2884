"""Handle Ctrl-C while a command imports its libraries, which takes seconds: exit code 130 and one word, no traceback.
Meanwhile, garbage is rarely collected, because that takes a sixth of the time.

Each command imports this module first. In others, such as tests and scripts next to the commands, it does nothing.
`common.command_line.run` takes over later.
"""

import gc
import os
import signal
import sys
from pathlib import Path

COMMANDS = "benchmarks examples generate.py publishing push_to_hub.py tokenizer train_accelerate.py training".split()
collection = gc.get_threshold()
_command = Path(getattr(sys.modules["__main__"], "__file__", None) or os.devnull).resolve()
_clone = Path(__file__).resolve().parents[1]
if _command.is_relative_to(_clone) and _command.relative_to(_clone).parts[0] in COMMANDS:
    gc.set_threshold(100_000)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's `&` ignores SIGINT
        signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))
