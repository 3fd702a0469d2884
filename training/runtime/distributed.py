"""Processes of a run: start, results of the main process for all, and shutdown."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import TorchDynamoPlugin, gather_object
from torch import distributed
from transformers.utils import logging as transformers_logging

from common.errors import UserError
from common.machine import keep_freed_memory
from training.runtime.device import Setup, keep_accelerate_from_sharding
from training.runtime.restart import restarted

Result = TypeVar("Result")
LONGEST_WAIT = 30 * 24 * 3600  # seconds; the main process may tokenize a large text
RENDEZVOUS = "restart://"  # the init_method of the process group
_waits = False


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[distributed.Store, int, int]]:
    """Rendezvous like `env://`, with a key prefix per restart, by this project or by the launcher (max_restarts): the
    launcher's store keeps old addresses and orders. The launchers of several machines count separately."""
    store, rank, processes = next(distributed.rendezvous("env://", timeout=timeout))
    is_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    prefix = f"restart_{restarted().get('restarts', 0)}"
    prefix += f"_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}" * is_one_machine
    yield distributed.PrefixStore(prefix, store), rank, processes


distributed.register_rendezvous_handler(RENDEZVOUS.removesuffix("://"), _rendezvous)


def is_launched_on_cpu() -> bool:
    """Return whether a launcher started this process on a machine without an accelerator. Unless it is asked for the
    CPU, Accelerate does not connect such processes, and each would work alone."""
    return "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def interface_to(host: str) -> str | None:
    """Return the network interface that reaches another machine, or None for this one and if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((host, 1))  # sends nothing
        own, interfaces = link.getsockname()[0], psutil.net_if_addrs()
        names = [name for name, addresses in interfaces.items() if own in {address.address for address in addresses}]
        return names[0] if names and not own.startswith("127.") else None


def start_accelerator(setup: Setup, trackers: list[str] | None, output_dir: str, ddp_timeout: int) -> Accelerator:
    """Start Accelerate. Raise a `UserError` if the environment requests more processes than it created, or if they
    cannot connect. `ddp_timeout`: seconds that a process waits for the others."""
    torch.set_float32_matmul_precision("high")  # TF32 for fp32 matrix products on a GPU
    if setup.full_determinism:
        # Use kernels with a fixed order of additions: flash instead of cuDNN attention, one split of keys in
        # memory-efficient attention, and a fixed cuBLAS workspace. Other operations raise an error.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory before writing it
    torch.backends.cuda.enable_cudnn_sdp(setup.cudnn_attention)
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # hides "Not enough SMs" on small GPUs
    transformers_logging.disable_progress_bar()  # hides "model shards" for every checkpoint
    if not torch.accelerator.is_available():
        keep_freed_memory()
    keep_accelerate_from_sharding()
    # Gloo would publish the address of the host's name, which on Debian is 127.0.1.1.
    interface = interface_to(os.environ.get("MASTER_ADDR", "localhost"))
    if interface is None and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        interface = interface_to("192.0.2.1")  # an address of no machine: the way to other machines
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(init_method=RENDEZVOUS, timeout=timedelta(seconds=ddp_timeout)),
    ]
    try:
        accelerator = Accelerator(
            cpu=is_launched_on_cpu(),
            mixed_precision=setup.mixed_precision,
            dynamo_plugin=TorchDynamoPlugin(backend="no"),  # train_step.py compiles; ignores the launcher's backend
            log_with=trackers,
            project_dir=output_dir,
            kwargs_handlers=handlers,
        )
    except NotImplementedError as error:  # several RTX 40 GPUs with a driver that is too old for them
        raise UserError(" ".join(str(error).split())) from error
    except distributed.DistError as error:
        raise UserError(
            f"The processes of the job did not connect within {ddp_timeout} s (ddp_timeout): "
            f"{str(error).splitlines()[0]}"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise UserError(
            "The processes of the job cannot connect to each other: set --main_process_ip to an IP address, correct or "
            "unset GLOO_SOCKET_IFNAME, and open all TCP ports between the machines "
            f"({str(error).splitlines()[0][:300]})."
        ) from error
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != accelerator.num_processes:
        raise UserError(
            f"The environment requests {world_size} processes (WORLD_SIZE), but Accelerate sees "
            f"{accelerator.num_processes}; start them with accelerate launch, on CPU with --config_file "
            "launch/two_cpu_processes.yaml."
        )
    return accelerator


def on_main(accelerator: Accelerator, find: Callable[[], Result]) -> Result:
    """Call `find` on the main process and return its result, which can be pickled, on every process.
    An error of the main process is raised as a `UserError` on the others.
    The others wait without `ddp_timeout`, in a separate group, because the main process may wait for a disk. If it dies
    or freezes meanwhile, the watchdog stops all. The group's store cannot be used: it ends with the launcher."""
    global _waits  # noqa: PLW0603
    if accelerator.num_processes == 1:
        return find()
    group, answer, failure = _patient_group(), [None, None], None
    if accelerator.is_main_process:
        try:
            answer[0] = find()
        except Exception as error:
            answer[1], failure = str(error) or type(error).__name__, error
    _waits = not accelerator.is_main_process
    try:
        distributed.broadcast_object_list(answer, src=0, group=group)
    finally:
        _waits = False
    if failure is not None:
        raise failure
    result, problem = answer
    if problem is not None:
        error = UserError(problem)
        error.is_reported = True
        raise error
    return result


def waits_for_main() -> bool:
    """Return whether this process is waiting in `on_main`. Other threads call this."""
    return _waits


def wait_for_all(accelerator: Accelerator) -> None:
    """Wait until all processes call this, without `ddp_timeout`. If one of them fails, the watchdog stops all."""
    if accelerator.num_processes > 1:
        distributed.barrier(_patient_group())


@cache
def _patient_group() -> distributed.ProcessGroup:
    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=LONGEST_WAIT))


def check_same_command(settings: dict[str, Any]) -> None:
    """Raise a `UserError` if the processes of the group have different settings."""
    main_settings, *settings_of_ranks = gather_object([settings])
    if different := [rank for rank, values in enumerate(settings_of_ranks, start=1) if values != main_settings]:
        values = settings_of_ranks[different[0] - 1]
        names = [name for name in main_settings | values if main_settings.get(name) != values.get(name)]
        raise UserError(
            f"Rank {different[0]} has other settings than rank 0 ({', '.join(names)}): run the same command on all "
            "machines, set what they decide differently by flags, and stop processes of earlier runs that still run."
        )


def stop_accelerator(accelerator: Accelerator) -> None:
    """Close the trackers and the process group.
    Gloo's thread needs the interpreter lock to free the tensors of the last collective. If the main thread destroys the
    group at that moment, it holds the lock and waits for the thread: a deadlock. The sleep lets the thread finish."""
    # All processes wait, so that slow trackers finish sending before the launcher kills remaining processes.
    on_main(accelerator, lambda: _finish_trackers(accelerator))
    accelerator.trackers = []
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.2)
    _patient_group.cache_clear()
    accelerator.end_training()


def _finish_trackers(accelerator: Accelerator) -> None:
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:  # of its network or its own process
            print(f"WARNING: {tracker.name} did not finish ({error!r:.200}).")
