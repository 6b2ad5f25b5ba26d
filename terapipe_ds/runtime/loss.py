"""The loss of a sequence from its slices.

A mean over valid tokens adds up: a slice's own mean, times the share of the micro-batch's valid
tokens that it holds, is its part, and can be computed when its forward is done. Any other loss has
to wait for the outputs of all slices.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, TeraPipeError
from ..scheme import SliceScheme
from .adapter import SequenceAdapter, Tensors

LossFunction = Callable[[Any, Any], Tensor]


def choose_loss(setting: str, adapter: SequenceAdapter) -> str:
    """``per_slice`` or ``whole_sequence``, from the block's setting and the model's adapter.

    Raises:
        ConfigError: if ``per_slice`` is asked of a loss that does not add up over slices.
    """
    if setting == "auto":
        return "per_slice" if adapter.mean_over_valid_tokens else "whole_sequence"
    if setting == "per_slice" and not adapter.mean_over_valid_tokens:
        raise ConfigError(
            'terapipe.loss: found "per_slice" for a loss_fn that is not declared a mean over valid '
            'tokens, allowed is "whole_sequence"; change terapipe.loss, or declare '
            "mean_over_valid_tokens in the model's adapter"
        )
    return setting


def check_loss_fits(mode: str, scheme: SliceScheme, *, balances_micro_batch: bool = False) -> None:
    """Raises where no order of slices allows the loss; every rank calls it.

    The first group's backward would need the last group's forward, for the loss of both.

    Raises:
        ConfigError: for a whole-sequence loss, or an auxiliary loss over the micro-batch, with
            several groups.
    """
    if balances_micro_batch and mode != "outputs" and len(scheme) > 1:
        raise ConfigError(
            f"terapipe.slices: found {len(scheme)} groups in a micro-batch, allowed is one group, "
            "since the experts' auxiliary loss compares all its sequences; let terapipe.slices be "
            "lengths or a count, lower train_micro_batch_size_per_gpu, or build the model with "
            'balance_over="slice"'
        )
    if mode == "whole_sequence" and len(scheme) > 1:
        raise ConfigError(
            f"terapipe.loss: found a whole-sequence loss with {len(scheme)} groups in a "
            "micro-batch, allowed is one group; let terapipe.slices be lengths or a count, or "
            "lower train_micro_batch_size_per_gpu"
        )


def slice_weights(token_weights: Tensor | None, scheme: SliceScheme) -> list[list[float]]:
    """Each slice's share of the micro-batch's valid tokens, by group and slice.

    Args:
        token_weights: ``[sequences, tokens]``, each token's weight in the mean; None if all count
            alike.
        scheme: how the micro-batch is cut.

    Returns:
        Numbers that add up to 1, or all 0 where no token is valid.
    """
    if token_weights is None:
        total = float(scheme.sequences * scheme.seq_length)
        return [
            [group.sequences * length / total for length in group.lengths]
            for group in scheme.groups
        ]
    weights = token_weights.detach().double()
    sums = [
        [weights[rows, tokens.start : tokens.stop].sum() for tokens in group.ranges()]
        for rows, group in zip(scheme.rows(), scheme.groups, strict=True)
    ]
    # One copy to the host for the whole micro-batch, not one a slice.
    flat = torch.stack([value for group in sums for value in group]).tolist()
    whole = math.fsum(flat)
    shares = iter([value / whole if whole > 0 else 0.0 for value in flat])
    return [[next(shares) for _ in group] for group in sums]


class MicroBatchLoss:
    """The loss of one loaded micro-batch on the last stage, as its slices come.

    Args:
        loss_fn: the model's loss function.
        adapter: the model's adapter.
        labels: the micro-batch's labels.
        scheme: how the micro-batch is cut.
        mode: ``per_slice``, ``whole_sequence``, or ``outputs`` (evaluation without a loss).
        keep_outputs: whether :meth:`take_outputs` will be called.
        additional_losses: the module's ``get_additional_losses``.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        adapter: SequenceAdapter,
        labels: Tensors,
        scheme: SliceScheme,
        *,
        mode: str,
        keep_outputs: bool,
        additional_losses: Callable[[], dict[str, Tensor] | None],
    ) -> None:
        self._loss_fn, self._adapter, self._labels, self._scheme = loss_fn, adapter, labels, scheme
        self._mode = mode
        self._keep_outputs = keep_outputs or mode == "outputs"
        self._get_additional_losses = additional_losses
        self._weights: list[list[float]] = []
        if mode == "per_slice":
            token_weights = adapter.token_weights(labels) if adapter.token_weights else None
            self._weights = slice_weights(token_weights, scheme)
        self._cuts = [
            [(rows, slice(tokens.start, tokens.stop)) for tokens in group.ranges()]
            for rows, group in zip(scheme.rows(), scheme.groups, strict=True)
        ]
        self._remaining = sum(scheme.slices)
        self._kept: dict[tuple[int, int], Tensor] = {}
        # What backward starts from: a slice's loss, or its output.
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._joined: Tensor | None = None
        self._output_grads: dict[tuple[int, int], Tensor] = {}
        self.value: Tensor | None = None
        """The loss so far, detached; None before the first slice."""
        self.additional: OrderedDict[str, Tensor] | None = None
        """The module's additional losses so far, weighted as the loss is."""

    @property
    def complete(self) -> bool:
        """Whether every slice's forward has come."""
        return self._remaining == 0

    def forward(self, group: int, index: int, output: Tensor) -> None:
        """Takes the output of a slice, computes what can be computed now."""
        self._remaining -= 1
        if self._keep_outputs:
            self._kept[group, index] = output.detach()
        if self._mode == "per_slice":
            self._per_slice(group, index, output)
        elif self._mode == "whole_sequence":
            self._outputs[group, index] = output
            if self.complete:
                self._whole_sequence()
        if self.complete and not torch.is_grad_enabled():
            # No backward will take these, and the step's other micro-batches are still to come.
            self._outputs.clear()
            self._losses.clear()
            self._joined = None

    def take_root(
        self, group: int, index: int, scale: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Where the backward of a slice starts, and the gradient there.

        Args:
            group: the slice's group in this micro-batch.
            index: the slice.
            scale: what is applied to a loss before its backward (accumulation, loss scaling).
        """
        key = (group, index)
        if key in self._losses:
            return scale(self._losses.pop(key)), None
        output = self._outputs.pop(key)
        if self._mode == "per_slice":
            return output, torch.zeros_like(output)
        if self._joined is not None:
            self._backward_to_outputs(scale)
        return output, self._output_grads.pop(key)

    def take_outputs(self) -> Tensor:
        """The micro-batch's outputs, joined; once, since the slices' own are not kept longer."""
        adapter = self._adapter
        return adapter.join_groups(
            [
                adapter.join([self._kept.pop((group, index)) for index in range(count)])
                for group, count in enumerate(self._scheme.slices)
            ]
        )

    def _per_slice(self, group: int, index: int, output: Tensor) -> None:
        weight = self._weights[group][index]
        if weight == 0.0:
            # A mean over no token is 0/0. Its part of the sum is 0, and so is its gradient, which
            # still has to run backward for the tokens before it.
            self._outputs[group, index] = output
            known = self._get_additional_losses() or {}
            self._add(
                output.new_zeros(()),
                {name: torch.zeros_like(value) for name, value in known.items()},
            )
            return
        rows, tokens = self._cuts[group][index]
        labels = self._adapter.cut(self._labels, self._adapter.labels, rows, tokens)
        loss = _scalar(self._loss_fn(output, labels), output) * weight
        self._losses[group, index] = loss
        additional = self._get_additional_losses() or {}
        self._add(loss, {name: value * weight for name, value in additional.items()})

    def _whole_sequence(self) -> None:
        """Runs the loss on the joined outputs; each slice's output gets its gradient later."""
        outputs = [self._outputs[key].detach() for key in sorted(self._outputs)]
        self._joined = self._adapter.join(outputs).requires_grad_(torch.is_grad_enabled())
        loss = _scalar(self._loss_fn(self._joined, self._labels), self._joined)
        self._losses[-1, -1] = loss
        self._add(loss, self._get_additional_losses() or {})

    def _backward_to_outputs(self, scale: Callable[[Tensor], Tensor]) -> None:
        assert self._joined is not None
        scale(self._losses.pop((-1, -1))).backward()
        keys = [(0, index) for index in range(self._scheme.slices[0])]
        dim = self._adapter.output.sequence
        grad = self._joined.grad
        if grad is None:
            raise TeraPipeError(_NO_GRADIENT)
        lengths = self._scheme.groups[0].lengths
        self._output_grads = dict(zip(keys, grad.split(lengths, dim=dim), strict=True))
        self._joined = None

    def _add(self, loss: Tensor, additional: dict[str, Tensor]) -> None:
        # Sums of many slices lose digits in half precision.
        loss = loss.detach()
        loss = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
        self.value = loss if self.value is None else self.value + loss
        for name, value in additional.items():
            if self.additional is None:
                self.additional = OrderedDict()
            value = value.detach()
            before = self.additional.get(name)
            self.additional[name] = value if before is None else before + value


_NO_GRADIENT = (
    "loss: found a loss_fn whose result has no gradient to the outputs, allowed is one that has; "
    "change loss_fn"
)


def _scalar(loss: Any, output: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TeraPipeError(
            f"loss: found a loss_fn that returns {type(loss).__name__}{shape}, allowed is a scalar "
            "tensor; change loss_fn"
        )
    if output.requires_grad and not loss.requires_grad:
        raise TeraPipeError(_NO_GRADIENT)
    return loss
