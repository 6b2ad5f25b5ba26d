"""``terapipe_ds.initialize``: ``deepspeed.initialize`` with the ``"terapipe"`` block in force."""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from typing import Any

import torch.distributed
from deepspeed.pipe import PipelineModule

from .. import versions
from ..config import BLOCK, SWITCH, TeraPipeConfig, read_block, switched_off
from ..errors import ConfigError, TeraPipeError
from .adapter import ATTRIBUTE
from .agreement import agree
from .auxiliary import scale_auxiliary_losses
from .deepspeed_seams import (
    check_seams,
    load_ds_config,
    pipeline_engine_is,
    stock_initialize,
)
from .device import use_own_device
from .engine import TokenSliceEngine

# Asked, by their function ``adapt``, for a model that brings no adapter. By name: what knows
# scripts is built on this package's runtime, not the other way.
_RECOGNISERS = ("terapipe_ds.integrations.megatron_deepspeed",)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """As ``deepspeed.initialize``: same arguments, same four results.

    Where the configuration has a ``"terapipe"`` block that is enabled, the engine is a
    ``TokenSliceEngine``; otherwise, and with ``TERAPIPE=0`` in the environment, this is
    ``deepspeed.initialize``. A model that brings no adapter but is one of a script that
    ``terapipe_ds.integrations`` knows is given one.

    Returns:
        engine, optimizer, training data loader, learning rate scheduler.

    Raises:
        ConfigError: on every rank, if the block is wrong, differs between ranks, or asks for
            something that cannot be sliced correctly.
    """
    stock = stock_initialize()
    arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    block, error = _read(arguments)
    if torch.distributed.is_initialized():
        use_own_device()
        found = {BLOCK: "no block"} if block is None else {BLOCK: "a block", **block.describe()}
        agree(found, error)
    elif error is not None:
        raise error
    if block is None or not block.enabled:
        made = stock(*args, **kwargs)
        # So that a model trains alike with and without the block.
        scale_auxiliary_losses(made[0])
        return made
    check_seams()
    versions.warn(_rank())
    _adapt(arguments["model"])
    with pipeline_engine_is(TokenSliceEngine):
        return stock(*args, **kwargs)


def _rank() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def has_block(*args: Any, **kwargs: Any) -> bool:
    """Whether the configuration in these arguments of ``deepspeed.initialize`` has a block.

    Not if they are wrong: DeepSpeed itself will say so.
    """
    try:
        arguments = inspect.signature(stock_initialize()).bind(*args, **kwargs).arguments
        return BLOCK in _ds_config(arguments)
    except (OSError, TypeError, ValueError):
        return False


def _read(arguments: dict[str, Any]) -> tuple[TeraPipeConfig | None, TeraPipeError | None]:
    """The block of this rank, and what is wrong with it or with its use here."""
    try:
        block = read_block(_ds_config(arguments))
        if block is None or not block.enabled:
            return block, None
        if switched_off():
            return block.model_copy(update={"enabled": False}), None
        model = arguments.get("model")
        if not isinstance(model, PipelineModule):
            raise ConfigError(
                f"model: found {type(model).__name__}, allowed is a deepspeed PipelineModule "
                "(terapipe_ds.models.gpt.gpt_pipeline builds one, and so does Megatron-DeepSpeed "
                'without --no-pipeline-parallel); or set "terapipe": {"enabled": false}, or '
                f"{SWITCH}=0"
            )
    except TeraPipeError as error:
        return None, error
    return block, None


def _adapt(model: PipelineModule) -> None:
    """Lets integrations recognise a model that brings no adapter; otherwise the engine refuses it.

    All ranks come here together: a model may be tried out with collectives.
    """
    if getattr(model, ATTRIBUTE, None) is None:
        for name in _RECOGNISERS:
            if import_module(name).adapt(model):
                return


def _ds_config(arguments: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration, from where ``deepspeed.initialize`` takes it."""
    config = arguments.get("config")
    if config is None:
        config = arguments.get("config_params")
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, dict):
        return config or {}
    return load_ds_config(os.fspath(config))
