"""The job around a run: its processes are started together, watched, and hold the lock of its folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from training.device import Setup
from training.distributed import check_same_command, on_main, start_accelerator, stop_accelerator, wait_for_main
from training.guard.lock import RunLock
from training.guard.stopping import StoppingArguments
from training.guard.watchdog import Watchdog
from training.run_folder import RunFolder


@contextmanager
def job(
    setup: Setup, folder: RunFolder, trackers: list[str] | None, stopping: StoppingArguments, settings: dict[str, Any]
) -> Iterator[tuple[Accelerator, Watchdog]]:
    """Start the processes; within, they are watched, and the folder is locked. `settings`: must be the same in all of them.

    Raises:
        UserError: the processes do not come together or were given different commands; another job trains in the folder.
    """
    accelerator = start_accelerator(setup, trackers, str(folder.path), stopping.ddp_timeout)
    lock = RunLock(folder.path)
    with Watchdog(accelerator.process_index, accelerator.num_processes, stopping.ddp_timeout, folder) as watchdog:
        try:
            check_same_command(accelerator, settings)
            on_main(accelerator, lock.acquire)
            yield accelerator, watchdog
        finally:
            lock.release()
        wait_for_main(accelerator)  # which may still be copying to the backup
        accelerator.wait_for_everyone()
    stop_accelerator(accelerator)
