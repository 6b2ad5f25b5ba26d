"""Causal attention on a rectangle: ``l`` queries, the last of ``t >= l`` tokens.

Query ``i`` sees keys ``0 .. t - l + i``: the diagonal ends in the lower right corner. torch's SDPA
puts it in the upper left one if asked for ``is_causal=True``, which is the same for squares alone.

Shapes in this file: ``l`` query tokens, ``t`` key tokens, ``b`` sequences, ``n`` query heads,
``g`` key/value heads (``n`` is a multiple of ``g``), ``d`` head width. Queries are
``[l, b, n, d]``, keys and values ``[t, b, g, d]``, as megatron-core's core attention receives them;
the result is ``[l, b, n, d]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from .kv_context import ContextKV, extend, extend_split, get_current_slice

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def causal_attention(
    owner: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    starts: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Causal self-attention of the current slice, its context included.

    Outside a slice (stock schedules, a sequence that is not cut) this is plain causal attention.

    Args:
        owner: the attention module, which names the KV context.
        query: ``[l, b, n, d]``, positions already applied.
        key: the slice's own keys ``[l, b, g, d]``.
        value: the slice's own values ``[l, b, g, d]``; their ``d`` may differ.
        scale: factor of the scores, ``1 / sqrt(d)`` if None.
        dropout_p: dropout probability of the attention weights.
        window: how many tokens before itself a token sees; all of them if None.
        starts: ``[b, l]``, for each token the first token of the sequence that it sees; 0 if None.
        bias: ``[1 or b, 1 or n, L, L]`` of the whole sequence, added to the scores.
        offset: ``[n]``, the logit of one more key, whose value is 0.

    Returns:
        ``[l, b, n, d]``, ``d`` as the values'.
    """
    current = get_current_slice()
    if current is None or current.is_whole:
        sight = Sight(window=window, starts=starts, bias=bias, offset=offset)
        return attend(query, key, value, sight, scale=scale, dropout_p=dropout_p)
    tokens = current.tokens
    if window is not None and window >= tokens.stop - 1:
        window = None
    is_plain = window is None and starts is None and bias is None and offset is None
    if tokens.start > 0 and is_plain and split_supports(query, value, dropout_p=dropout_p):
        return split(query, extend_split(owner, key, value, current), scale=scale)
    # The first token that any of the slice's tokens sees.
    first = 0 if window is None else max(0, tokens.start - window)
    keys, values = extend(owner, key, value, current, first=first)
    sight = Sight(
        window=window,
        starts=None if starts is None else starts - first,
        bias=None if bias is None else bias[..., tokens.as_slice, first : tokens.stop],
        offset=offset,
    )
    return attend(query, keys, values, sight, scale=scale, dropout_p=dropout_p)


@dataclass(frozen=True)
class Sight:
    """What queries see of the keys, beside causality.

    Attributes:
        window: how many keys before its own a query sees; all of them if None.
        starts: ``[b, l]``, the first key that a query sees; 0 if None.
        bias: ``[1 or b, 1 or n, l, t]``, added to the scores.
        offset: ``[n]``, the logit of one more key, whose value is 0.
    """

    window: int | None = None
    starts: Tensor | None = None
    bias: Tensor | None = None
    offset: Tensor | None = None

    def mask(self, length: int, total: int, device: torch.device) -> Tensor:
        """``[l, t]`` or ``[b, 1, l, t]``, true where a query may look."""
        mask = _bottom_right_mask(length, total, device, self.window)
        if self.starts is None:
            return mask
        keys = torch.arange(total, device=device)
        return mask & (keys >= self.starts[:, None, :, None])


_CAUSAL = Sight()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight = _CAUSAL,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The fastest kernel that can do it: torch's fused one, or plain math.

    Plain math where the softmax has an offset, or the bias a gradient: fused kernels have neither.
    """
    learns_bias = sight.bias is not None and sight.bias.requires_grad
    kernel = plain_math if sight.offset is not None or learns_bias else sdpa
    return kernel(query, key, value, sight, scale=scale, dropout_p=dropout_p)


def plain_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight = _CAUSAL,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The reference: scores, bottom-right causal mask, softmax, weighted values."""
    length, total = query.shape[0], key.shape[0]
    repeats = query.shape[2] // key.shape[2]
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if sight.bias is not None:
        scores = scores + sight.bias
    scores = scores.masked_fill(~sight.mask(length, total, query.device), -math.inf)
    if sight.offset is not None:
        one_more = sight.offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, one_more], dim=-1)
    weights = functional.dropout(scores.softmax(-1)[..., :total], dropout_p)
    return (weights @ v).permute(2, 0, 1, 3)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight = _CAUSAL,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """torch's fused attention; on CUDA its flash kernel is bottom-right causal without a mask."""
    mask = _fused_mask(query, key, sight)
    output = functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.permute(2, 0, 1, 3)


def _fused_mask(query: Tensor, key: Tensor, sight: Sight) -> Any:
    """The mask of torch's fused attention; None where it needs none."""
    length, total = query.shape[0], key.shape[0]
    if sight.bias is not None:
        hidden = ~sight.mask(length, total, query.device)
        return sight.bias.to(query.dtype).masked_fill(hidden, -math.inf)
    seen = sight.window is not None and sight.window < total - 1
    if seen or sight.starts is not None:
        return sight.mask(length, total, query.device)
    if length == total:
        return None
    if query.is_cuda:
        return causal_lower_right(length, total)
    return _bottom_right_mask(length, total, query.device)


def split_supports(query: Tensor, value: Tensor, *, dropout_p: float) -> bool:
    """Whether :func:`split` can run: on CPU, without dropout, K and V of one width."""
    return (
        query.device.type == "cpu"
        and query.dtype in _FLASH_CPU_DTYPES
        and dropout_p == 0.0
        and query.shape[-1] == value.shape[-1]
    )


def split(query: Tensor, kv: ContextKV, *, scale: float | None = None) -> Tensor:
    """Full attention on the context and causal attention on the own tokens, merged.

    No mask is built or read, which is what a masked kernel on CPU loses time on. The merge by
    log-sum-exp is exact, and so is the backward, since each part's kernel gets the merged output
    and log-sum-exp.
    """
    context, own = kv.context, kv.own
    tensors = (tensor.permute(1, 2, 0, 3) for tensor in (query, *context, *own))
    return _Split.apply(*tensors, scale).permute(2, 0, 1, 3)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        scale: float | None,
    ) -> Tensor:
        before, before_lse = _flash_cpu(query, context_key, context_value, 0.0, False, scale=scale)
        own, own_lse = _flash_cpu(query, own_key, own_value, 0.0, True, scale=scale)
        lse = torch.logaddexp(before_lse, own_lse)
        # In the log-sum-exp's dtype: fp32 where the tensors are bf16, a no-op otherwise.
        share = (before_lse - lse).exp_().unsqueeze(-1)
        output = torch.lerp(own.to(lse.dtype), before.to(lse.dtype), share).to(own.dtype)
        ctx.save_for_backward(query, context_key, context_value, own_key, own_value, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, own_key, own_value, output, lse = ctx.saved_tensors
        d_query, d_context_key, d_context_value = _flash_cpu_backward(
            grad, query, context_key, context_value, output, lse, 0.0, False, scale=ctx.scale
        )
        d_query_own, d_own_key, d_own_value = _flash_cpu_backward(
            grad, query, own_key, own_value, output, lse, 0.0, True, scale=ctx.scale
        )
        d_query += d_query_own
        return d_query, d_context_key, d_context_value, d_own_key, d_own_value, None


@lru_cache(maxsize=64)
def _bottom_right_mask(
    length: int, total: int, device: torch.device, window: int | None = None
) -> Tensor:
    """``[length, total]``, true where a query may look; one for all layers of a slice."""
    ones = torch.ones(length, total, dtype=torch.bool, device=device)
    mask = ones.tril(diagonal=total - length)
    return mask if window is None else mask.triu(diagonal=total - length - window)
