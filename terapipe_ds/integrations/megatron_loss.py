"""A micro-batch's loss from the outputs of its slices, by the script's own loss function.

megatron's loss functions may do anything with a model's output: weigh tokens, count them, reduce
over ranks. So the outputs of all slices are joined, and the function is called once, as megatron
calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import TeraPipeError

# The tokens of [b, L] losses, and of [b, L, v] logits.
_TOKENS = 1


class JoinedLoss:
    """The loss of one micro-batch on the last stage, as its slices come.

    Args:
        lengths: of the slices, in tokens.
        calculate: megatron's loss from the joined output.
    """

    def __init__(self, lengths: Sequence[int], calculate: Callable[[Tensor], Tensor]) -> None:
        self._lengths, self._calculate = list(lengths), calculate
        self._outputs: list[Tensor | None] = []
        self._joined: Tensor | None = None
        self._loss: Tensor | None = None
        self._grads: tuple[Tensor, ...] = ()

    @property
    def awaits_last(self) -> bool:
        """Whether only the last slice's forward is missing."""
        return len(self._outputs) == len(self._lengths) - 1

    def forward(self, output: Tensor) -> None:
        """Takes the output of the next slice; after the last one, computes the loss."""
        length = self._lengths[len(self._outputs)]
        if output.dim() < 2 or output.shape[_TOKENS] != length:
            raise TeraPipeError(
                f"model: found an output of shape {tuple(output.shape)} for a slice of {length} "
                "tokens, allowed is [sequences, tokens, ...]; change the model"
            )
        self._outputs.append(output)
        if len(self._outputs) < len(self._lengths):
            return
        parts = [part.detach() for part in self._outputs if part is not None]
        # A copy even of a single part: a loss function may work in place.
        joined = torch.cat(parts, dim=_TOKENS)
        if torch.is_grad_enabled() and output.requires_grad:
            joined.requires_grad_()
        self._joined, self._loss = joined, self._calculate(joined)

    def take_root(self, index: int, scale: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Where the backward of a slice starts, and the gradient there.

        Args:
            index: the slice.
            scale: what is applied to the loss before its backward.
        """
        if self._loss is not None:
            self._backward(scale)
        output = self._outputs[index]
        assert output is not None
        self._outputs[index] = None
        return output, self._grads[index]

    def _backward(self, scale: Callable[[Tensor], Tensor]) -> None:
        joined, loss = self._joined, self._loss
        assert joined is not None and loss is not None
        self._joined = self._loss = None
        if joined.requires_grad and loss.requires_grad:
            torch.autograd.backward(scale(loss))
        if joined.grad is None:
            raise TeraPipeError(
                "loss: found a loss function whose result has no gradient to the model's output, "
                "allowed is one that has; change the loss function"
            )
        self._grads = joined.grad.split(self._lengths, dim=_TOKENS)


__all__ = ["JoinedLoss"]
