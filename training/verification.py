"""Verification of the token store while a run trains: no checkpoint is completed before the store's files have the hashes
that its metadata state."""

import os
import sys
from threading import Thread, get_native_id

from accelerate import Accelerator

from tokenizer.store import TokenStore

NICENESS = 10  # a tenth of the time of a core that training keeps busy


class StoreVerification:
    """Hashes the files of a store in a thread, in one process per machine.

    Size and time of change would not show a bit that flipped. The tokens are read once more for this, at the speed of
    SHA-256: about 1.5 GB/s on one core.
    """

    def __init__(self, store: TokenStore, accelerator: Accelerator):
        self.store = store
        self.problem: Exception | None = None
        self._thread = Thread(target=self._hash, name="verification", daemon=True)  # must not delay an exit
        if accelerator.is_local_main_process:
            self._thread.start()

    def wait(self) -> None:
        """Wait until all files are hashed.

        Raises:
            UserError: a file was changed, or cannot be read.
        """
        if self._thread.is_alive():
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise a `UserError` where a file that has been hashed by now was changed."""
        if self.problem is not None:
            raise self.problem

    def _hash(self) -> None:
        try:
            if sys.platform == "linux":  # where a thread has a priority of its own, which may not rise
                niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
                os.setpriority(os.PRIO_PROCESS, get_native_id(), niceness)
            self.store.check_hashes()
        except Exception as error:  # raised where the run waits: nothing is completed that was not verified
            self.problem = error
