"""``terapipe_ds.initialize``: ``deepspeed.initialize`` with the ``"terapipe"`` block in force."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import torch.distributed
from deepspeed.pipe import PipelineModule

from ..config import BLOCK, TeraPipeConfig, read_block
from ..errors import ConfigError, TeraPipeError
from .agreement import agree
from .auxiliary import scale_auxiliary_losses
from .deepspeed_seams import check_seams, load_ds_config, pipeline_engine_is
from .device import use_own_device
from .engine import TokenSliceEngine


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """As ``deepspeed.initialize``: same arguments, same four results.

    Where the configuration has a ``"terapipe"`` block that is enabled, the engine is a
    ``TokenSliceEngine``; otherwise this is ``deepspeed.initialize``.

    Returns:
        engine, optimizer, training data loader, learning rate scheduler.

    Raises:
        ConfigError: on every rank, if the block is wrong, differs between ranks, or asks for
            something that cannot be sliced correctly.
    """
    arguments = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    block, error = _read(arguments)
    if torch.distributed.is_initialized():
        use_own_device()
        found = {BLOCK: "no block"} if block is None else {BLOCK: "a block", **block.describe()}
        agree(found, error)
    elif error is not None:
        raise error
    if block is None or not block.enabled:
        made = deepspeed.initialize(*args, **kwargs)
        # So that a model trains alike with and without the block.
        scale_auxiliary_losses(made[0])
        return made
    check_seams()
    with pipeline_engine_is(TokenSliceEngine):
        return deepspeed.initialize(*args, **kwargs)


def _read(arguments: dict[str, Any]) -> tuple[TeraPipeConfig | None, TeraPipeError | None]:
    """The block of this rank, and what is wrong with it or with its use here."""
    try:
        block = read_block(_ds_config(arguments))
        model = arguments.get("model")
        if block is not None and block.enabled and not isinstance(model, PipelineModule):
            raise ConfigError(
                f"model: found {type(model).__name__}, allowed is a deepspeed PipelineModule "
                '(terapipe_ds.models.gpt.gpt_pipeline builds one); or set "terapipe": '
                '{"enabled": false}'
            )
    except TeraPipeError as error:
        return None, error
    return block, None


def _ds_config(arguments: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration, from where ``deepspeed.initialize`` takes it."""
    config = arguments.get("config")
    if config is None:
        config = arguments.get("config_params")
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, dict):
        return config or {}
    return load_ds_config(config)
