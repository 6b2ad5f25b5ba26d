"""This rank's device, before there is an engine."""

from __future__ import annotations

import os

from deepspeed.accelerator import get_accelerator


def use_own_device() -> None:
    """Makes the device that ``LOCAL_RANK`` names the current one.

    DeepSpeed does so when it builds an engine (``DeepSpeedEngine._set_distributed_vars``). That is
    too late for megatron-core, which allocates layers and rotary tables on the current device, and
    for the exchange of settings, which goes through the current device under NCCL: on a node of
    several GPUs, all ranks would use the first.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None:
        get_accelerator().set_device(int(local_rank))


__all__ = ["use_own_device"]
