"""Draws a step's micro-batches, on the stages that stock DeepSpeed draws them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .adapter import SequenceAdapter, Tensors
from .header import BatchShape


def load(
    next_batch: Callable[[], Any],
    adapter: SequenceAdapter,
    micro_batches: int,
    *,
    first_stage: bool,
    last_stage: bool,
    device: torch.device,
) -> tuple[list[Tensors], list[Tensors], list[BatchShape] | None]:
    """Loads up to ``micro_batches`` micro-batches; fewer where the iterator ends.

    Args:
        next_batch: gives ``(inputs, labels)``; the engine's ``_next_batch``.
        adapter: the model's adapter.
        micro_batches: how many the step needs.
        first_stage: whether this stage takes the inputs.
        last_stage: whether this stage takes the labels.
        device: where they go.

    Returns:
        Inputs, labels, and (sequences, tokens) of each; None on stages that load nothing.

    Raises:
        ConfigError: if a micro-batch's tensors are not what the adapter says.
    """
    if not (first_stage or last_stage):
        return [], [], None
    inputs: list[Tensors] = []
    labels: list[Tensors] = []
    shapes: list[BatchShape] = []
    for _ in range(micro_batches):
        try:
            batch = next_batch()
        except StopIteration:
            break
        if first_stage:
            inputs.append(_copied(batch[0], device))
        if last_stage:
            labels.append(_copied(batch[1], device))
        shapes.append(
            adapter.batch_shape(inputs[-1], adapter.inputs)
            if first_stage
            else adapter.batch_shape(labels[-1], adapter.labels)
        )
    return inputs, labels, shapes


def _copied(tensors: Any, device: torch.device) -> Tensors:
    """A copy: the iterator may fill the same tensors again for the step's next micro-batch."""
    if torch.is_tensor(tensors):
        return tensors.detach().to(device, copy=True)
    return tuple(tensor.detach().to(device, copy=True) for tensor in tensors)
