"""Tells layers that add terms to the loss by themselves what the loss is multiplied with."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from .adapter import ATTRIBUTE, SequenceAdapter


def scale_auxiliary_losses(engine: Any) -> None:
    """Before every forward, hands the scale of the loss to the model's adapter, if it asks for it.

    megatron-core's schedules do so themselves (``MoEAuxLossAutoScaler.set_loss_scale``); DeepSpeed,
    whose engines run these models here, does not know of such losses.

    Args:
        engine: a ``PipelineEngine``, stock or sliced.
    """
    adapter = getattr(getattr(engine, "module", None), ATTRIBUTE, None)
    if not isinstance(adapter, SequenceAdapter) or adapter.scale_auxiliary_losses is None:
        return
    scale = adapter.scale_auxiliary_losses
    engine.module.register_forward_pre_hook(lambda *_: scale(loss_scale(engine)))


def loss_scale(engine: Any) -> Tensor:
    """What DeepSpeed multiplies a micro-batch's loss with: accumulation, and loss scaling."""
    # Scaling looks at whether it is given a loss, which has a graph.
    one = torch.ones((), device=engine.device, requires_grad=True)
    return scaled_loss(engine, one.clone()).detach()


def scaled_loss(engine: Any, loss: Tensor) -> Tensor:
    """As ``DeepSpeedEngine.backward`` does before it runs a loss's backward."""
    loss = loss / engine.gradient_accumulation_steps()
    if isinstance(engine.optimizer, ZeROOptimizer):
        return engine.optimizer.scale_if_loss(loss)
    return loss
