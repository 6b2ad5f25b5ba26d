"""Makes all ranks start with the same settings, or none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch.distributed

from .. import __version__
from ..config import TeraPipeConfig
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
                    "configuration and the same installation"
                )


def error_of(check: Callable[[], Any]) -> TeraPipeError | None:
    """What a check of this rank's own settings raises, to be shared with :func:`agree`."""
    try:
        check()
    except TeraPipeError as error:
        return error
    return None


def common_settings(block: TeraPipeConfig) -> dict[str, Any]:
    """What must be the same on all ranks whatever runs their slices, by name."""
    return {
        **block.describe(),
        "terapipe_ds version": __version__,
        "torch version": torch.__version__,
        "megatron-core version": metadata.version("megatron-core"),
    }


def settings(block: TeraPipeConfig, ds_config: Any) -> dict[str, Any]:
    """What must be the same on all ranks for their slices to meet under DeepSpeed, by name.

    Args:
        block: the ``"terapipe"`` block.
        ds_config: the ``DeepSpeedConfig``.
    """
    return {
        **common_settings(block),
        "deepspeed version": metadata.version("deepspeed"),
        "gradient_accumulation_steps": ds_config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": ds_config.train_micro_batch_size_per_gpu,
        "zero_optimization.stage": int(ds_config.zero_optimization_stage),
        "bf16.enabled": bool(ds_config.bfloat16_config.enabled),
        "gradient_clipping": ds_config.gradient_clipping,
        "pipeline": dict(ds_config.pipeline),
    }
