"""The processes of a run: started together, answered by the main one, stopped together."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import TorchDynamoPlugin
from torch import distributed
from transformers.utils import logging as transformers_logging

from errors import UserError
from training.device import Setup, keep_freed_memory, use_deterministic_kernels
from training.restart import restarted
from training.sharding import keep_accelerate_from_sharding

Found = TypeVar("Found")
LONGEST_WAIT = 6 * 3600  # seconds
MEETING = "restart://"  # the init_method of the process group
_waits = False


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[distributed.Store, int, int]]:
    """As `env://`, but after a restart the launcher's store still has the addresses of the processes before."""
    store, rank, processes = next(distributed.rendezvous("env://", timeout=timeout))
    yield distributed.PrefixStore(f"restart_{restarted().get('restarts', 0)}", store), rank, processes


distributed.register_rendezvous_handler(MEETING.removesuffix("://"), _meet)


def start_accelerator(setup: Setup, trackers: list[str] | None, output_dir: str, ddp_timeout: int) -> Accelerator:
    """Start Accelerate; raise a `UserError` where the environment asks for more processes than it made, or they do not come
    together. `ddp_timeout`: seconds that a process waits for the others."""
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU multiplies fp32
    if setup.full_determinism:
        use_deterministic_kernels()
    torch.backends.cuda.enable_cudnn_sdp(setup.cudnn_attention)
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # "Not enough SMs", on any small GPU
    transformers_logging.disable_progress_bar()  # of every checkpoint's "model shards"
    if not torch.accelerator.is_available():
        keep_freed_memory()
    keep_accelerate_from_sharding()
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(init_method=MEETING, timeout=timedelta(seconds=ddp_timeout)),
    ]
    try:
        accelerator = Accelerator(
            # Unasked, Accelerate groups no launched processes on a machine without a GPU: each would believe to be alone.
            cpu="LOCAL_RANK" in os.environ and not torch.accelerator.is_available(),
            mixed_precision=setup.mixed_precision,
            dynamo_plugin=TorchDynamoPlugin(
                backend="no"
            ),  # step.py compiles, also where the launcher exports a backend
            log_with=trackers,
            project_dir=output_dir,
            kwargs_handlers=handlers,
        )
    except distributed.DistError as error:
        raise UserError(
            f"The processes of the job did not come together within {ddp_timeout} s (ddp_timeout): {str(error).splitlines()[0]}"
        ) from error
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if asked != accelerator.num_processes:
        raise UserError(
            f"The environment asks for {asked} processes (WORLD_SIZE), but Accelerate sees {accelerator.num_processes}; "
            f"start them with accelerate launch, on CPU with --config_file launch/two_cpu_processes.yaml."
        )
    return accelerator


def on_main(accelerator: Accelerator, find: Callable[[], Found]) -> Found:
    """Return what the main process finds, on every process: anything that JSON can say. On the others, any error of the main
    one is a `UserError`.

    They wait for as long as it takes, in a group of its own, where no `ddp_timeout` counts: it may wait for a disk.
    Should it die or freeze meanwhile, the watchdog ends all. The group's store would do, but dies with the launcher.
    """
    global _waits  # noqa: PLW0603
    if accelerator.num_processes == 1:
        return find()
    group, answer, failure = _patient_group(), {}, None
    if accelerator.is_main_process:
        try:
            answer["found"] = find()
        except Exception as error:
            answer["problem"], failure = str(error) or type(error).__name__, error
    message = [json.dumps(answer)]
    _waits = not accelerator.is_main_process
    try:
        distributed.broadcast_object_list(message, src=0, group=group)
    finally:
        _waits = False
    if failure is not None:
        raise failure
    answer = json.loads(message[0])
    if "problem" in answer:
        error = UserError(answer["problem"])
        error.is_reported = True
        raise error
    return answer["found"]


def waits_for_main() -> bool:
    """Whether this process is inside `on_main`, for another thread that asks."""
    return _waits


@cache
def _patient_group() -> distributed.ProcessGroup:
    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=LONGEST_WAIT))


def check_same_command(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """Raise a `UserError` where the processes of the group are not of one run."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:7])], device=accelerator.device)
    everyones = accelerator.gather(mine).tolist()
    others = [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if others:
        raise UserError(
            f"Rank {others[0]} was started with other settings than rank 0. Give all machines the same command; if this one was "
            f"given to all, processes of an earlier run are still there: end them."
        )


def stop_accelerator(accelerator: Accelerator) -> None:
    """Closes the trackers and the process group.

    Gloo's own thread frees the tensors of the last collective, for which it needs the interpreter; a main thread that
    destroys the group at that moment holds the interpreter and waits for the thread, and both hang for good.
    """

    def close_trackers() -> None:  # the slow ones send what they have, before the launcher ends what is left
        for tracker in accelerator.trackers:
            tracker.finish()

    on_main(accelerator, close_trackers)
    accelerator.trackers = []
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.2)
    _patient_group.cache_clear()
    accelerator.end_training()
