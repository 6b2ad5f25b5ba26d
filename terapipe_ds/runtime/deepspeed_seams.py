"""Every private name of DeepSpeed that this package relies on, in one place.

Read from DeepSpeed 0.19.8; torch's are in ``torch_seams.py``. ``check_seams`` fails loudly where
one has moved; ``tests/runtime/test_seams.py`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.zero.config import ZeroStageEnum

from ..errors import TeraPipeError

__all__ = [
    "PIPELINE_ENGINE_SEAMS",
    "ZeroStageEnum",
    "autocast_if_enabled",
    "check_seams",
    "load_ds_config",
    "pipeline_engine_is",
    "stock_initialize",
    "without_gradient_hooks",
]

# What the engine overrides or calls: a schedule for each kind of step, the map from instructions to
# methods, and the hooks around a backward that zero and mixed-precision optimizers rely on.
PIPELINE_ENGINE_SEAMS = (
    (PipelineEngine, "_train_schedule"),
    (PipelineEngine, "_inference_schedule"),
    (PipelineEngine, "_exec_schedule"),
    (PipelineEngine, "_INSTRUCTION_MAP"),
    (PipelineEngine, "_next_batch"),
    (PipelineEngine, "_aggregate_total_loss"),
    (PipelineEngine, "_reduce_outputs"),
    (PipelineEngine, "_bcast_pipe_scalar"),
    (PipelineEngine, "_reentrant_activation_checkpointing"),
    (DeepSpeedEngine, "_backward_prologue"),
    (DeepSpeedEngine, "_backward_epilogue"),
)


def check_seams() -> None:
    """Raises where the installed DeepSpeed lacks a name that this package overrides or calls.

    Raises:
        TeraPipeError: names what is missing and the version that is known to work.
    """
    missing = [
        f"{owner.__name__}.{name}"
        for owner, name in PIPELINE_ENGINE_SEAMS
        if not hasattr(owner, name)
    ]
    if not hasattr(deepspeed, "PipelineEngine"):
        missing.append("deepspeed.PipelineEngine")
    if missing:
        raise TeraPipeError(
            f"deepspeed: found version {deepspeed.__version__} without {', '.join(missing)}, "
            "allowed is 0.19.8; install that version"
        )


@contextmanager
def pipeline_engine_is(engine_class: type[PipelineEngine]) -> Iterator[None]:
    """Inside, ``deepspeed.initialize`` builds ``engine_class`` for a ``PipelineModule``.

    ``deepspeed.initialize`` has no registry of engines; it looks this name up when it is called.
    """
    before = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = before


# Where the integrations' ``deepspeed.initialize`` keeps DeepSpeed's own.
STOCK = "terapipe_ds_stock"


def stock_initialize() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """DeepSpeed's own ``initialize``, whatever the name ``deepspeed.initialize`` stands for now."""
    return getattr(deepspeed.initialize, STOCK, deepspeed.initialize)


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, gradients accumulate without telling the optimizers that listen to them.

    ZeRO and DeepSpeed's BF16 optimizer listen by ``register_post_accumulate_grad_hook``
    (``deepspeed/utils/torch.py``).
    """
    kept = []
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
