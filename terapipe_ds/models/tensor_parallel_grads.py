"""Sums gradients over tensor-parallel ranks, where each rank's layers see a share of the work.

Under sequence parallelism the norms and the row-parallel biases see a share of the tokens, and with
tensor parallelism the norms of queries and keys see a share of the heads, while all ranks keep the
same parameters. megatron-core sums such gradients in ``finalize_model_grads`` (0.16.1,
``_allreduce_non_tensor_model_parallel_grads``); DeepSpeed, which steps these models here, does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed
from megatron.core import parallel_state
from torch import Tensor, nn

_QUERY_KEY_NORMS = ("q_layernorm", "k_layernorm")


def sum_over_tensor_ranks(module: nn.Module) -> None:
    """Makes every backward sum the gradients that need it, before any optimizer sees them."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    for parameter in _partial(module):
        parameter.register_hook(_summed)


def _partial(module: nn.Module) -> Iterator[nn.Parameter]:
    for name, parameter in module.named_parameters():
        of_heads = any(part in _QUERY_KEY_NORMS for part in name.split("."))
        if parameter.requires_grad and (getattr(parameter, "sequence_parallel", False) or of_heads):
            yield parameter


def _summed(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient
