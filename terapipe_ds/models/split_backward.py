"""megatron-core's linear layers with their weights' gradients put off, for split backwards.

Read from megatron-core 0.16.1. The seam is ``_forward_impl`` of ``ColumnParallelLinear`` and
``RowParallelLinear``, the function that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from torch import Tensor

from ..runtime import weight_grads


def split_linear(
    inputs: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **_: Any,
) -> Tensor:
    """megatron's linear function, whose weight's gradient can be put off.

    Its forward, and what crosses tensor-parallel ranks, is that of ``linear_with_frozen_weight``.

    Args:
        inputs: ``[l, b, in]``.
        weight: ``[out, in]`` of this tensor-parallel rank.
        bias: ``[out]``.
        allreduce_dgrad: as in ``linear_with_grad_accumulation_and_async_allreduce``.
        sequence_parallel: as there.
        tp_group: as there.
    """

    def product() -> Tensor:
        return linear_with_frozen_weight(
            inputs, weight, None, False, allreduce_dgrad, sequence_parallel, tp_group
        )

    def gathered(kept: Tensor) -> Tensor:
        if not sequence_parallel:
            return kept
        with torch.no_grad():
            return gather_from_sequence_parallel_region(kept, group=tp_group)

    output = weight_grads.linear(product, inputs, weight, gathered)
    return output if bias is None else output + bias


def split_linear_layers(module: torch.nn.Module) -> None:
    """Lets all linear layers of a stage put their weights' gradients off."""
    weight_grads.split_linear_layers(module)
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = _split_forward_of(layer._forward_impl)


def _split_forward_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if not (weight.requires_grad and weight.is_leaf):
            return original(input, weight, **kwargs)
        return split_linear(input, weight, **kwargs)

    return forward
