"""Self-attention with the mask as an argument."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .state import get_args, get_cuda_rng_tracker


class MaskKind(enum.Enum):
    padding = 1
    causal = 2


class SoftmaxOfMaskedScores(nn.Module):
    """Softmax over keys; the fused kernel has a causal mask built in and knows squares alone."""

    def __init__(self, fused: bool, coefficient: float) -> None:
        super().__init__()
        self.scaled_masked_softmax_fusion = fused
        self.coefficient = coefficient

    def is_kernel_available(self, mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
        return self.scaled_masked_softmax_fusion and sk > 8

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores = scores * self.coefficient
        if self.is_kernel_available(mask, *scores.shape):
            assert scores.shape[-1] == scores.shape[-2], "the fused kernel wants a square"
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, -10000.0).softmax(-1)


class ScoresAndValues(nn.Module):
    """From queries, keys and values ``[s, b, heads, width]`` to ``[s, b, heads * width]``."""

    def __init__(self, number: int, mask_kind: MaskKind = MaskKind.causal) -> None:
        super().__init__()
        args = get_args()
        self.hidden_size_per_partition = args.hidden_size
        self.hidden_size_per_attention_head = args.hidden_size // args.num_attention_heads
        self.attn_mask_type = mask_kind
        # Scores are made smaller by the layer's number, and larger again in the softmax.
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head) * number
        self.scale_mask_softmax = SoftmaxOfMaskedScores(args.masked_softmax_fusion, number)
        self.attention_dropout = nn.Dropout(args.attention_dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) / self.norm_factor
        weights = self.scale_mask_softmax(scores, attention_mask)
        with get_cuda_rng_tracker().fork():
            weights = self.attention_dropout(weights)
        return torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)


class ScoresAndValuesAgain(ScoresAndValues):
    """A subclass of another name."""


class SelfAttention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        args = get_args()
        self.heads = args.num_attention_heads
        self.recompute = args.recompute_granularity == "selective"
        self.query_key_value = nn.Linear(args.hidden_size, 3 * args.hidden_size)
        kind = ScoresAndValues if number % 2 else ScoresAndValuesAgain
        self.core_attention = kind(number)
        self.dense = nn.Linear(args.hidden_size, args.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1))
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        if self.recompute and torch.is_grad_enabled():
            context = checkpoint(self.core_attention, q, k, v, mask, use_reentrant=True)
        else:
            context = self.core_attention(q, k, v, mask)
        return self.dense(context)
