"""Every private name of torch.distributed that this package relies on, in one place.

Read from torch 2.13.0. Apart from DeepSpeed's, so that other engines' stages meet through them too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ..errors import ConfigError
from .host_staged import HostStaged
from .refuse_settings import backend_refusal

__all__ = ["default_store", "pair_group"]


def pair_group(name: str, rank_in_pair: int, timeout_s: float, device: torch.device) -> Any:
    """A process group of two ranks that only these two take part in making.

    ``torch.distributed.new_group`` is no help here. It is collective over all ranks, so start-up
    would grow with them; with local synchronisation it names the group by how many groups this rank
    is in, on which two ranks need not agree (they then wait for each other for ever); and on an
    eagerly started NCCL it splits the world's communicator, which all ranks must take part in.

    Args:
        name: the same on both ranks, and used once.
        rank_in_pair: 0 or 1.
        timeout_s: after which a transfer fails.
        device: where the tensors live that are sent.

    Raises:
        ConfigError: for a backend other than gloo and nccl.
    """
    store = torch.distributed.PrefixStore(f"terapipe_ds/{name}", default_store())
    timeout = timedelta(seconds=timeout_s)
    backend = torch.distributed.get_backend()
    if backend == "gloo":
        group = torch.distributed.ProcessGroupGloo(store, rank_in_pair, 2, timeout=timeout)
        return group if device.type == "cpu" else HostStaged(group)
    if backend == "nccl":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank_in_pair, 2, options)
    raise ConfigError(backend_refusal(backend))


def default_store() -> torch.distributed.Store:
    """The store through which the ranks found each other."""
    return distributed_c10d._get_default_store()
