"""What ranks run in the tests of megatron-core's schedules."""

from __future__ import annotations

from typing import Any

import pytest

from terapipe_ds.integrations.megatron_core import forward_backward_func
from terapipe_ds.runtime import kv_context

from .megatron_lm import Setting, compare, initialize, prepare_stock
from .standin import pretrain_megatron


def compared(settings: dict[str, Setting]) -> dict[str, dict[str, float]]:
    """How far each setting is from megatron's own schedule."""
    prepare_stock()
    found = {}
    for name, setting in settings.items():
        initialize(setting)
        print(name, flush=True)
        found[name] = compare(setting, forward_backward_func(setting.block))
    return found


def without_context_gradients(setting: Setting) -> dict[str, float]:
    """As :func:`compared`, with the gradient to earlier slices dropped."""
    patch = pytest.MonkeyPatch()
    patch.setattr(kv_context.LayerKV, "exchange_gradients", lambda *_, **__: [None, None])
    try:
        return compared({"broken": setting})["broken"]
    finally:
        patch.undo()


def script(arguments: list[str]) -> dict[str, Any]:
    """What the stand-in for megatron's scripts prints, with megatron's own schedule."""
    return pretrain_megatron.pretrain(pretrain_megatron.parse(arguments))
