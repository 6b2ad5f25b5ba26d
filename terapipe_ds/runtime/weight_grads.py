"""Puts the gradients of weights off, for schedules that split the backward.

A linear layer's backward does two independent products: the gradient of its input, which the layer
before waits for, and that of its weight, which nothing waits for until the optimizer. Linear
layers that :func:`linear` replaces leave the second as a piece of work while a slice's
``BackwardInput`` runs; ``BackwardWeight`` does it later, for slices that follow one another at
once. Gradients of all other parameters (norms,
biases, embeddings) are cheap and stay where they are. See ``docs/how-it-works.md`` for why it is
split here and not in autograd's graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
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
        product = _Product(ctx.weight, inputs, grad, ctx.gathered)
        if owe(product):
            return grad, None, None, None
        return grad, None, _weight_gradient([product]), None


class JointWork(ABC):
    """Work that is done for several slices at once.

    Attributes:
        weight: whose gradient it makes; work on one weight is done together.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self) -> None:
        self.do([self])

    @abstractmethod
    def do(self, works: list[Any]) -> None:
        """Does the work of several slices, itself among them; may empty the list meanwhile."""


class _Product(JointWork):
    """The gradient of a linear layer's weight by one slice.

    Args:
        weight: ``[out, in]``.
        inputs: ``[..., in]`` of the layer, as it kept them.
        grad: ``[..., out]``, the gradient of its output.
        gathered: as for :func:`linear`.
    """

    __slots__ = ("_gathered", "_grad", "_inputs")

    def __init__(
        self, weight: Tensor, inputs: Tensor, grad: Tensor, gathered: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(weight)
        self._inputs, self._grad, self._gathered = inputs, grad, gathered

    def do(self, works: list[_Product]) -> None:
        accumulate(self.weight, partial(_weight_gradient, works))

    def factors(self) -> tuple[Tensor, Tensor]:
        """``[tokens, in]`` and ``[tokens, out]``."""
        inputs, grad = self._gathered(self._inputs), self._grad
        # Under autocast the product was computed in the output's dtype.
        inputs = inputs.reshape(-1, inputs.shape[-1]).to(grad.dtype)
        return inputs, grad.reshape(-1, grad.shape[-1])


def _weight_gradient(products: list[_Product]) -> Tensor:
    """``[out, in]``, one product over the tokens of all; empties the list.

    In 16 bits a sum of slices' products would be rounded at each. And the products of short slices
    take less time than their sum, which reads and writes as much as the weights.
    """
    dtype = products[0].weight.dtype
    inputs, grads = zip(*(product.factors() for product in products), strict=True)
    products.clear()
    return _joined(grads).t().matmul(_joined(inputs)).to(dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def accumulate(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Adds to a leaf's gradient as autograd would, so that optimizers that listen hear of it.

    Args:
        weight: the leaf.
        gradient: computes what is added, of the weight's shape.
    """
    with torch.enable_grad():
        _Late.apply(weight, gradient).backward()


class _Late(torch.autograd.Function):
    """Computes a weight's gradient in its backward.

    Given to ``torch.autograd.backward`` instead, somebody would hold it, and the weight's first
    gradient, which could be this very tensor, would be a copy of it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(), None


def settle(owed: list[list[Work]]) -> None:
    """Does what slices owe, joint work together.

    Args:
        owed: for each slice its work. Left empty: each piece holds a layer's inputs, and is dropped
            when it is done.
    """
    by_weight: dict[int, list[Work]] = {}
    for work in chain.from_iterable(owed):
        key = id(work.weight) if isinstance(work, JointWork) else id(work)
        by_weight.setdefault(key, []).append(work)
    owed.clear()
    for key in list(by_weight):
        works = by_weight.pop(key)
        first = works[0]
        if isinstance(first, JointWork):
            first.do(works)
        else:
            first()


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


__all__ = ["JointWork", "accumulate", "linear", "owe", "put_off", "settle", "split_linear_layers"]
