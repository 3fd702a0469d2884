"""Chat templates, rendered by a child process with limits of time, memory and output.

A template is a program of the person who made the model: nested loops, powers and products of text can take any time
and memory, also within one operation, which nothing in the same process can stop. Windows has no limits of a process;
macOS limits only the time.
"""

import atexit
import json
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Lock
from typing import Any

SECONDS = 5  # of CPU time per chat; an ordinary chat takes 0.1 ms
MEMORY = 1 << 29  # bytes
CHARACTERS = 10_000_000  # of a rendered chat, or twice as many as the chat has
_one_at_a_time = Lock()


class TemplateLimitError(Exception):
    """Error for a chat template that exceeds a limit, or cannot be rendered at all. It is not worth another try."""


@cache
def _child(process_id: int) -> Popen:
    """Return the child process of a process, because a forked process needs its own. In a session of its own, Ctrl-C
    does not end it."""
    options = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "encoding": "ascii", "errors": "replace"}
    child = Popen([sys.executable, __file__], start_new_session=True, **options)
    atexit.register(child.communicate)  # this also ends it
    return child


def render(conversations: list[Any], **options: Any) -> tuple[list[str], list[Any]]:
    """Render chats like `render_jinja_template` of Transformers. Raise a `jinja2.TemplateError` if the template fails,
    and a `TemplateLimitError` if it exceeds a limit or the child process cannot start."""
    from jinja2 import TemplateError, TemplateSyntaxError

    question = json.dumps([conversations, options])
    with _one_at_a_time:
        child, line, log = _child(os.getpid()), "", ""
        try:
            with suppress(BrokenPipeError):
                print(question, file=child.stdin, flush=True)
                line = child.stdout.readline()
        except BaseException:  # this process was interrupted
            child.kill()
            raise
        finally:
            if not line:
                _, log = child.communicate()
                _child.cache_clear()
    *_, reason = ["", *log.split("\n")[:-1]]
    if not line and child.returncode == 1 and reason != "MemoryError":  # a signal or status 0: it exceeded a limit
        raise TemplateLimitError(f"the process that renders it failed ({reason})")
    if not line:
        raise TemplateLimitError(
            f"it takes more than {SECONDS} s, {MEMORY >> 20} MiB of memory or {CHARACTERS:,} characters for one chat"
        )
    texts, problem, number = json.loads(line)
    if problem is not None:
        raise TemplateError(problem) if number is None else TemplateSyntaxError(problem, number)
    return texts


def limit_tokenizers() -> None:
    """Let all tokenizers of Transformers, also those in other libraries, render their chat templates with limits."""
    from transformers import tokenization_utils_base

    tokenization_utils_base.render_jinja_template = render


def main() -> None:
    """Answer each line of stdin: the arguments of `render_jinja_template`. Exceeding a limit ends this process."""
    import signal

    from transformers.utils.chat_template_utils import render_jinja_template

    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    set_timer = getattr(signal, "setitimer", lambda *_: None)
    for line in sys.stdin:
        set_timer(getattr(signal, "ITIMER_PROF", None), SECONDS)  # the signal's default action ends the process
        try:
            conversations, options = json.loads(line)
            texts, problem = render_jinja_template(conversations, **options), [None, None]
            if max(map(len, texts[0])) > max(CHARACTERS, 2 * len(line)):
                return
        except MemoryError:
            return
        except Exception as error:  # a template can raise any exception
            message, line_number = getattr(error, "message", None) or str(error), getattr(error, "lineno", None)
            texts, problem = None, [message[:1000], line_number]
        print(json.dumps([texts, *problem]), flush=True)
        set_timer(getattr(signal, "ITIMER_PROF", None), 0)


if __name__ == "__main__":
    main()
