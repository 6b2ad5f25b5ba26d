"""Makes all ranks start with the same settings, or none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed

from ..errors import ConfigError, TeraPipeError


def agree(fields: Mapping[str, Any], error: TeraPipeError | None = None) -> None:
    """Compares settings over all ranks; every rank raises if any rank differs or has an error.

    Args:
        fields: this rank's settings by name.
        error: what this rank found wrong on its own, if anything.

    Raises:
        ConfigError: names the first rank that differs, the field and both values, or the first
            rank that found an error, and the error.
    """
    mine = (dict(fields), None if error is None else str(error))
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    # A rank whose own check failed says so itself; a different setting would only follow from it.
    for rank, (_, message) in enumerate(ranks):
        if message is not None:
            raise ConfigError(f"{message} (found on rank {rank})")
    reference = ranks[0][0]
    for rank, (other, _) in enumerate(ranks):
        for field in sorted({*reference, *other}):
            if reference.get(field) != other.get(field):
                raise ConfigError(
                    f"{field}: found {reference.get(field)!r} on rank 0 and {other.get(field)!r} "
                    f"on rank {rank}, allowed is the same on every rank; give all ranks the same "
                    "DeepSpeed configuration and the same installation"
                )


def error_of(check: Callable[[], Any]) -> TeraPipeError | None:
    """What a check of this rank's own settings raises, to be shared with :func:`agree`."""
    try:
        check()
    except TeraPipeError as error:
        return error
    return None
