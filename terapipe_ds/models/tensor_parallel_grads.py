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
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn


def sum_over_tensor_ranks(module: nn.Module) -> None:
    """Makes every backward sum the gradients that need it, before any optimizer sees them."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    for parameter in _partial(module):
        parameter.register_hook(summed)


def _partial(module: nn.Module) -> Iterator[nn.Parameter]:
    of_heads = {
        parameter
        for layer in module.modules()
        # Latent attention's norms see all of a token, whatever the rank's heads are.
        if isinstance(layer, SelfAttention)
        for norm in (layer.q_layernorm, layer.k_layernorm)
        if norm is not None
        for parameter in norm.parameters()
    }
    for parameter in module.parameters():
        shares_tokens = getattr(parameter, "sequence_parallel", False)
        if parameter.requires_grad and (shares_tokens or parameter in of_heads):
            yield parameter


def summed(gradient: Tensor) -> Tensor:
    """A gradient, summed over tensor-parallel ranks."""
    gradient = gradient.clone()
    torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient
