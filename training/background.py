"""Work in threads of low priority while a run trains."""

import os
import sys
from collections.abc import Callable
from threading import Thread, get_native_id


class BackgroundTask(Thread):
    """A thread that keeps what its work raises for those that wait for it."""

    def __init__(self, work: Callable[[], None], name: str, niceness: int, daemon: bool = False):
        super().__init__(target=work, name=name, daemon=daemon)
        self.niceness = niceness
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            if sys.platform == "linux":  # where a thread has a priority of its own, which may not rise
                niceness = max(self.niceness, os.getpriority(os.PRIO_PROCESS, 0))
                os.setpriority(os.PRIO_PROCESS, get_native_id(), niceness)
            super().run()
        except Exception as error:
            self.failure = error

    def wait(self) -> None:
        """Wait until the work is done, if it was started; raise what it raised."""
        if self.is_alive():
            self.join()
        self.check()

    def check(self) -> None:
        """Raise what the work has raised by now."""
        if self.failure is not None:
            raise self.failure
