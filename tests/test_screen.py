"""Output of a run on a terminal and elsewhere."""

import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from conftest import REPOSITORY, TINY, flags
from training.log.screen import Screen, line_of, parts_of, sparkline
from training.runtime.console import clock, perplexity, wrapped
from training.runtime.price import Price

FREE = Price("", None, None, "")
ENTRY = {"step": 100, "loss": 3.2141, "learning_rate": 6e-4, "grad_norm": 0.4237, "tokens_per_second": 683_000.0}
ENTRY |= {"seconds_per_step": 0.76762, "mfu": 0.47, "data_share": 0.0004, "peak_memory_gb": 11.2}


def test_log_line_perplexity_and_clock_formats():
    entry_of_skips = {"learning_rate": 6e-4, "skipped_steps": 10, "peak_memory_gb": 1.0}
    start = "loss  3.214  norm  0.42  lr 6.00e-04  683,000 tok/s  0.7676 s/step  MFU 47%  data  0.0%  peak 11.2 GB  "
    end = "lr 6.00e-04  peak 1.0 GB  ETA 0:01"
    for arguments, line in (
        ((ENTRY, 120.0, 62.0, FREE), f"{start}ETA 1:02"),
        ((ENTRY, 1800.0, 5400.0, Price("", 2.0, None, "")), f"{start}ETA 1:30:00  $1.00 of $4.00"),
        ((ENTRY, 1800.0, None, Price("", 2.0, 8.0, "")), f"{start}$1.00  4.00 units"),
        ((entry_of_skips, 1.0, 1.0, FREE), f"no finite loss  (10 steps skipped: not finite)  {end}"),
    ):
        assert line_of(*parts_of(*arguments).values()) == line
    longer_entry = ENTRY | {"loss": 10.8, "grad_norm": 12.0, "seconds_per_step": 0.054, "mfu": 0.04, "data_share": 0.5}
    first, second = (line_of(*parts_of(entry, 1.0, None, FREE).values()) for entry in (ENTRY, longer_entry))
    assert len(first) == len(second)  # the columns do not shift
    assert [perplexity(value) for value in (44.3219, 6787.0, 1.139e108)] == ["44.32", "6,787.00", "1.1e+108"]
    assert [clock(seconds) for seconds in (0, 61, 3661.9, 360_000)] == ["0:00", "1:01", "1:01:01", "100:00:00"]


def test_a_validation_has_one_comparison_by_comparable_loss(capsys):
    first = {"step": 400, "eval_loss": 3.3, "eval_perplexity": 27.1126, "eval_bits_per_byte": 1.5}
    newest = first | {"step": 800, "eval_loss": 3.4, "eval_sampled_loss": 3.25}
    screen = Screen(800, 0, [], compiles=True, price=FREE)
    worse = first | {"step": 600, "eval_loss": 3.35}
    screen.validated(first, first, "")
    for entry, best in ((newest, newest), (worse, first), (newest | {"step": 900, "eval_sampled_loss": 3.35}, first)):
        screen.validated(entry, best, "above x")
    assert capsys.readouterr().out.splitlines() == [
        "Compiling before the first step; this may take minutes ...",
        "step 400: validation loss 3.3000, perplexity 27.11, 1.500 bits per byte (best)",
        "step 800: validation loss 3.4000, perplexity 27.11, 1.500 bits per byte on all held-out text (above x)",
        "step 600: validation loss 3.3500, perplexity 27.11, 1.500 bits per byte (best: 3.3000 at step 400)",
        "step 900: validation loss 3.4000, perplexity 27.11, 1.500 bits per byte on all held-out text (best on the "
        "sample: 3.3000 at step 400, now 3.3500)",
    ]


def test_lines_wrap_at_words_and_commands_stay_whole():
    text = "Memory:  0.52 GB of 23.3 a device, for 4 sequences\n  python generate.py runs/a-long-name --prompt 'def '"
    assert wrapped(text, 32).split("\n") == [
        "Memory:  0.52 GB of 23.3 a",
        "         device, for 4 sequences",
        "  python generate.py runs/a-long-name --prompt 'def '",
    ]
    assert wrapped("         (weights 0.00, gradients 0.00)", 30) == "         (weights 0.00,\n         gradients 0.00)"


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [([7, 6, 5, 4, 3, 2, 1, 0], 8, "█▇▆▅▄▃▂▁"), ([4.0, 2.0, 1, 1], 2, "█▁"), ([2.0], 8, "▁"), ([3.0, 3.0], 8, "▁▁")],
)
def test_sparkline(values, width, bars):
    assert sparkline(values, width) == bars


def shown_on_a_terminal(*command: str, **environment: str) -> str:
    """Return what a command prints on a terminal."""
    near_end, far_end = os.openpty()
    pipes = {"stdout": far_end, "stderr": far_end}
    process = subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, env=os.environ | environment, **pipes)
    os.close(far_end)
    output = b""
    with suppress(OSError):  # the other end is closed
        while True:
            output += os.read(near_end, 65536)
    os.close(near_end)
    assert process.wait() == 0
    return output.decode()


def test_terminal_lines_are_updated_in_place(store, tmp_path):
    settings = TINY | {"max_steps": 40, "eval_steps": 20, "hourly_price": 2.0, "sample_prompts": "the :x:"}
    arguments = flags(data=store.folder, output_dir=tmp_path / "run", **settings)
    environment = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1"}
    output = shown_on_a_terminal("train_accelerate.py", *arguments, **environment)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output)
    assert re.search(r"step 0/40 ━+ first step \.\.\. 0:0\d", text)
    assert "--- step 0" not in text
    newest = text[text.rindex("step 40/40 ━") :]
    for line in (
        r"train +loss +[\d.]+  █[▁-█]+  norm +[\d.]+  lr 0.00e\+00",
        r"validate +loss [\d.]+, [\d.]+ bits per byte at step 40 *\r",
        r"speed +[\d,]+ tok/s  [\d.]+ s/step  data +[\d.]+%  peak [\d.]+ GB",
        r"time +\d:\d\d so far  \$0.\d\d of \$0.\d\d",
    ):
        assert re.search(f"\n{line}", newest)
    assert "the :x:" in text  # not as an emoji
    assert output.endswith("\n")
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again


IS_LIVE = """
from common.command_line import run
from training.log.screen import Screen, say
run(lambda _: say(f"\u2581 {Screen(100, 0, [], False, None).live is not None}"))
"""


def test_a_dumb_terminal_gets_lines():
    assert shown_on_a_terminal("-c", IS_LIVE, TERM="dumb") == "▁ False\r\n"


def test_files_and_other_encodings_get_plain_lines(launch):
    track = "from common.progress import track\nlist(track('ab', 'Reading', True))"
    assert launch("-c", track, FORCE_COLOR="1").stderr == ""
    assert launch("-c", IS_LIVE, FORCE_COLOR="1", PYTHONIOENCODING="ascii").stdout == "? False\n"
