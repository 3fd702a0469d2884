"""Sharding settings of the launcher: `fsdp_*` in Accelerate's configuration, which it passes in the environment."""

import os
from dataclasses import dataclass

from common.errors import UserError

ASKED = "ACCELERATE_USE_FSDP"


@dataclass(frozen=True)
class Sharding:
    """Sharding settings of the launcher."""

    offload: bool = False  # keep shards and optimizer state in CPU memory


def sharding_asked(notes: list[str]) -> Sharding | None:
    """Return the sharding settings in the environment, if any. Add unused ones to `notes`. Refuse FSDP1."""
    if not _is_set(ASKED):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"The launcher's fsdp_version is {version}; set it to 2, as in launch/fsdp2.yaml.")
    if _is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        notes.append("The launcher's fsdp_activation_checkpointing is not used: set gradient_checkpointing instead.")
    if os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        notes.append("The launcher's fsdp_reshard_after_forward is not used: a block is freed after its forward pass.")
    return Sharding(offload=_is_set("FSDP_OFFLOAD_PARAMS"))


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1", "yes")


def keep_accelerate_from_sharding() -> None:
    """Clear the launcher's variable after it was read: Transformers would load weights in only one process."""
    os.environ[ASKED] = "false"
