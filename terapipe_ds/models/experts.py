"""megatron-core's expert router on token slices, whose auxiliary losses are the micro-batch's.

Where a token is sent depends on the token alone. Its auxiliary losses do not: they weigh the
router's probabilities by how often each expert was chosen in the whole micro-batch or sequence. The
counts have no gradient, so slices add them up as they run forward; they are complete before the
first slice runs backward, and only there they are needed. Read from megatron-core 0.16.1,
``moe/router.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..errors import ConfigError
from ..runtime.kv_context import CurrentSlice, get_current_slice
from .megatron_seams import log_auxiliary_loss

BalanceOver = Literal["micro_batch", "slice"]


class _Kind(NamedTuple):
    """One of megatron's auxiliary losses."""

    name: str
    logged_as: str
    by_sequence: bool = False
    over_replicas: bool = False


_AUX = _Kind("aux_loss", "load_balancing_loss")
_SEQUENCE_AUX = _Kind("seq_aux_loss", "seq_load_balancing_loss", by_sequence=True)
_GLOBAL_AUX = _Kind("global_aux_loss", "global_load_balancing_loss", over_replicas=True)


class TokenSliceRouter(TopKRouter):
    """``TopKRouter`` whose auxiliary losses over slices add up to those of the micro-batch.

    The engine marks the slice; outside of slices this is ``TopKRouter``.

    Args:
        config: megatron's configuration.
        pg_collection: megatron's process groups.
        balance_over: ``"micro_batch"``: exactly the loss, and the gradients, of the micro-batch
            that is not cut. ``"slice"``: every slice balances its own tokens, weighted by its share
            of them; another loss, which needs nothing of other slices, so that a micro-batch's
            sequences may be cut into groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: Any = None,
        *,
        balance_over: BalanceOver = "micro_batch",
    ) -> None:
        super().__init__(config, pg_collection)
        self.balance_over = balance_over

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``TopKRouter.routing``.

        Args:
            logits: ``[l, b, experts]``, of the slice's tokens.

        Raises:
            ConfigError: for a padding mask, which is not cut into slices.
        """
        current = get_current_slice()
        if current is None or not self.training:
            return super().routing(logits, *_given(padding_mask))
        if padding_mask is not None:
            raise ConfigError(
                "padding_mask: found one for the router, allowed is none with token slices; drop "
                'it, or set "terapipe": {"enabled": false}'
            )
        if not torch.is_grad_enabled() and not current.backward and self._collects:
            self._count(logits, current)
        return super().routing(logits)

    @property
    def _collects(self) -> bool:
        return self.balance_over == "micro_batch" and self.is_aux_loss_enabled()

    def _count(self, logits: Tensor, current: CurrentSlice) -> None:
        """Counts in a forward that will be recomputed, where megatron leaves these losses out."""
        length, sequences = logits.shape[:2]
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, logits.shape[-1]),
            self.topk,
            self.score_function,
            fused=self.config.moe_router_fusion,
        )
        for kind in (_AUX, _SEQUENCE_AUX, _GLOBAL_AUX):
            if self.get_aux_loss_coeff(kind.name) > 0:
                sizes = (length, sequences) if kind.by_sequence else (length * sequences, 1)
                self._balance(kind, sizes[1], scores, chosen, current)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *args: Any, **_: Any
    ) -> Tensor:
        return self._attach(
            _AUX, 1, probs, scores_for_aux_loss, routing_map, super()._apply_aux_loss
        )

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        **_: Any,
    ) -> Tensor:
        def whole(probs: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            return TopKRouter._apply_seq_aux_loss(self, probs, scores, chosen, seq_length, bsz)

        return self._attach(_SEQUENCE_AUX, bsz, probs, scores_for_aux_loss, routing_map, whole)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *args: Any, **_: Any
    ) -> Tensor:
        return self._attach(
            _GLOBAL_AUX, 1, probs, scores_for_aux_loss, routing_map, super()._apply_global_aux_loss
        )

    def _attach(
        self,
        kind: _Kind,
        columns: int,
        probs: Tensor,
        scores: Tensor,
        chosen: Tensor,
        whole: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Attaches one auxiliary loss to the probabilities, which are returned."""
        current = get_current_slice()
        if current is None or self.balance_over == "slice":
            return whole(probs, scores, chosen)
        if self.get_aux_loss_coeff(kind.name) == 0:
            return probs
        balance = self._balance(kind, columns, scores, chosen, current)
        return _Balanced.apply(probs, scores, balance)

    def _balance(
        self,
        kind: _Kind,
        columns: int,
        scores: Tensor,
        chosen: Tensor,
        current: CurrentSlice,
    ) -> _Balance:
        """What the slices of a micro-batch have chosen so far, this one's choice included."""
        if not kind.by_sequence and current.context.share != 1.0:
            # Refused before the step where the model says how its experts balance; a layer_spec
            # may say otherwise.
            raise ConfigError(
                f"balance_over: found 'micro_batch' with {kind.name} for a group of some of a "
                "micro-batch's sequences, allowed is 'slice'; change balance_over of the layer "
                "spec, or let terapipe.slices be lengths or a count"
            )
        balance = current.context.keep((id(self), kind.name), _Balance)
        if current.backward:
            return balance
        width = columns * scores.shape[-1]
        balance.add(scores.detach().view(-1, width), chosen.view(-1, width))
        if current.tokens.is_last:
            # seq_aux_loss is a mean over the micro-batch's sequences.
            mean = current.context.share / columns if kind.by_sequence else 1.0
            self._finish(kind, balance, mean)
        return balance

    def _finish(self, kind: _Kind, balance: _Balance, mean: float) -> None:
        """The micro-batch's loss and its gradient, from the counts of all slices."""
        coefficient = self.get_aux_loss_coeff(kind.name)
        group = self.tp_dp_cp_group if kind.over_replicas else self.tp_cp_group
        counts = balance.counts
        assert counts is not None and balance.scores is not None
        torch.distributed.all_reduce(counts, group=group)
        if kind.over_replicas:
            self.global_tokens_per_expert += counts
            self.ga_steps += 1
            counts = self.global_tokens_per_expert / self.ga_steps
        tokens = balance.rows * group.size()
        # As in switch_load_balancing_loss_func.
        factor = self.config.num_moe_experts * coefficient / (self.topk * tokens * tokens)
        balance.gradient = counts * (factor * mean)
        value = (balance.scores * balance.gradient).sum()
        self._log(kind.logged_as, value / coefficient, group, kind.over_replicas)

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As ``TopKRouter``'s; a slice's own loss counts by its share of the tokens."""
        current = get_current_slice()
        if current is not None:
            aux_loss = aux_loss * current.weight
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, *args, **kwargs
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As ``TopKRouter.apply_z_loss``: a mean over tokens, of which a slice adds its share."""
        current = get_current_slice()
        coefficient = self.config.moe_z_loss_coeff
        trains = self.training and torch.is_grad_enabled()
        if current is None or coefficient is None or not trains:
            return super().apply_z_loss(logits, *_given(padding_mask))
        coefficient /= self.tp_cp_group.size()
        loss = z_loss_func(logits, coefficient) * current.weight
        self._log("z_loss", loss / coefficient, None, False)
        return MoEAuxLossAutoScaler.apply(logits, loss)

    def _log(self, name: str, value: Tensor, group: Any, over_replicas: bool) -> None:
        log_auxiliary_loss(
            name,
            value,
            self.layer_number,
            self.config.num_layers,
            group=group,
            over_replicas=over_replicas,
        )


def _given(padding_mask: Tensor | None) -> tuple[Tensor, ...]:
    """The mask as an argument: megatron-core before 0.16 takes none."""
    return () if padding_mask is None else (padding_mask,)


def balances_micro_batch(config: TransformerConfig) -> bool:
    """Whether an auxiliary loss compares all sequences of a micro-batch."""
    if config.num_moe_experts is None:
        return False
    types, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(types, str):
        types, weights = [types], [weights]
    return any(
        kind in (_AUX.name, _GLOBAL_AUX.name) and weight > 0
        for kind, weight in zip(types, weights, strict=True)
    )


class _Balance:
    """What the slices of a micro-batch have chosen.

    Attributes:
        rows: rows so far; a row is a token, or with a loss by sequence a token of each sequence.
        counts: how often each expert was chosen, ``[experts]`` or ``[b * experts]``.
        scores: the sums of the experts' scores, likewise.
        gradient: of the loss with respect to a row's scores; known after the last slice.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.counts: Tensor | None = None
        self.scores: Tensor | None = None
        self.gradient: Tensor | None = None

    def add(self, scores: Tensor, chosen: Tensor) -> None:
        self.rows += len(scores)
        counts, sums = chosen.sum(0), scores.sum(0)
        self.counts = counts if self.counts is None else self.counts + counts
        self.scores = sums if self.scores is None else self.scores + sums


class _Balanced(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss to the scores, as ``MoEAuxLossAutoScaler`` does."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, scores: Tensor, balance: _Balance) -> Tensor:
        ctx.balance, ctx.shape, ctx.dtype = balance, scores.shape, scores.dtype
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = ctx.balance.gradient.to(ctx.dtype)
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        if scale is not None:
            gradient = gradient * scale
        rows = gradient.numel() // ctx.shape[-1]
        gradient = gradient.view(rows, -1).repeat(ctx.shape[0] // rows, 1)
        return grad, gradient, None


__all__ = ["BalanceOver", "TokenSliceRouter"]
