"""Puts the gradients of weights off, for schedules that split the backward.

A linear layer's backward does two independent products: the gradient of its input, which the layer
before waits for, and that of its weight, which nothing waits for until the optimizer. Linear
layers that :func:`linear` replaces leave the second as a piece of work while a slice's
``BackwardInput`` runs; ``BackwardWeight`` does it later. Gradients of all other parameters (norms,
biases, embeddings) are cheap and stay where they are. See ``docs/how-it-works.md`` for why it is
split here and not in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Work = Callable[[], None]

# A global, not a thread-local: on CUDA, autograd runs backward in a thread of its own.
_owed: list[Work] | None = None


@contextmanager
def put_off(owed: list[Work]) -> Iterator[None]:
    """Inside, weight gradients are added to ``owed`` instead of being computed."""
    global _owed
    before = _owed
    _owed = owed
    try:
        yield
    finally:
        _owed = before


def owe(work: Work) -> bool:
    """Puts a piece of a backward off, where a schedule wants that.

    Returns:
        Whether it was put off; otherwise the caller does it now.
    """
    if _owed is None:
        return False
    _owed.append(work)
    return True


def linear(
    product: Callable[[], Tensor],
    inputs: Tensor,
    weight: Tensor,
    gathered: Callable[[Tensor], Tensor] = lambda inputs: inputs,
) -> Tensor:
    """A linear layer's output, whose weight's gradient can be put off.

    Args:
        product: computes the output ``[..., out]``, with a graph to its input, not to its weight.
        inputs: ``[..., in]``.
        weight: ``[out, in]``, a leaf.
        gathered: from ``inputs`` what the product multiplied, where that is not the same.

    Returns:
        ``[..., out]``.
    """
    output = product()
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return output
    return _WithWeight.apply(output, inputs.detach(), weight, gathered)


class _WithWeight(torch.autograd.Function):
    """Hands an output on; in backward makes, or owes, the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        weight: Tensor,
        gathered: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved as the inputs are: activation checkpointing would give another tensor back, and
        # the gradient has to reach this leaf.
        ctx.weight = weight
        ctx.gathered = gathered
        # An alias that is no view to autograd: what follows may work in place, as megatron's cross
        # entropy does, and no product saves its output.
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        weight, gathered = ctx.weight, ctx.gathered

        def work() -> None:
            accumulate(weight, _weight_gradient(gathered(inputs), grad, weight))

        if owe(work):
            return grad, None, None, None
        return grad, None, _weight_gradient(gathered(inputs), grad, weight), None


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Adds to a leaf's gradient as autograd would, so that optimizers that listen hear of it."""
    with torch.enable_grad():
        torch.autograd.backward([weight.view_as(weight)], [gradient])


def _weight_gradient(inputs: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    # Under autocast the product was computed in the output's dtype.
    inputs = inputs.reshape(-1, inputs.shape[-1]).to(grad.dtype)
    return grad.reshape(-1, grad.shape[-1]).t().matmul(inputs).to(weight.dtype)


def split_linear_layers(module: nn.Module) -> None:
    """Lets every plain ``torch.nn.Linear`` put its weight's gradient off."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layer.forward = _forward_of(layer)  # type: ignore[method-assign]


def _forward_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        # Once: a parametrization computes it anew each time.
        weight = layer.weight
        if not weight.is_leaf:
            return functional.linear(inputs, weight, layer.bias)

        def product() -> Tensor:
            return functional.linear(inputs, weight.detach(), layer.bias)

        return linear(product, inputs, weight)

    return forward


__all__ = ["accumulate", "linear", "owe", "put_off", "split_linear_layers"]
