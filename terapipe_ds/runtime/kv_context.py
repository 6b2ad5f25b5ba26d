"""Keys and values of the earlier slices, kept as context, and the gradient that flows back to them.

A slice's queries attend to the keys and values of its own tokens and of all tokens before. Each
layer therefore keeps one K and one V buffer of the full sequence for a micro-batch. An autograd
function around K and V writes the slice's own part and hands on an alias of the buffer, so nothing
is copied twice and any attention kernel may follow. In backward, slices run last to first: each
adds its share of dK and dV to the tokens before it and takes what the later slices added to its own
tokens, which is complete by then (TeraPipe, section 3.2). Every slice's autograd graph stands
alone, and a recomputed forward writes the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import ConfigError, TeraPipeError
from ..scheme import TokenRange

Kept = TypeVar("Kept")


class LayerKV:
    """One layer's K and V of a whole sequence, and the dK and dV of the context.

    Args:
        key: a slice's keys ``[length, sequences, heads, head_dim]``, for shape, dtype and device.
        value: its values; the last dimension may differ.
        total: the sequence length in tokens.
    """

    def __init__(self, key: Tensor, value: Tensor, *, total: int) -> None:
        self.key = key.new_empty((total, *key.shape[1:]))
        self.value = value.new_empty((total, *value.shape[1:]))
        self._gradients: list[Tensor | None] = [None, None]
        # Where the next slice to run backward must end: slices run last to first.
        self._backward_stop = total

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Stores a slice's own K and V at its tokens."""
        stop = start + key.shape[0]
        self.key[start:stop].copy_(key)
        self.value[start:stop].copy_(value)

    def exchange_gradients(
        self, start: int, stop: int, context: Sequence[Tensor | None], *, first: int = 0
    ) -> list[Tensor | None]:
        """Adds a slice's gradient to its context, returns what later slices left for its tokens.

        Args:
            start: the slice's first token.
            stop: the token after its last.
            context: dK and dV of tokens ``[first, start)``, each None where there is none.
            first: the first token of the context that the slice saw.

        Returns:
            dK and dV of tokens ``[start, stop)``, each None if no later slice had any.

        Raises:
            TeraPipeError: if a later slice has not run its backward yet.
        """
        if stop != self._backward_stop:
            raise TeraPipeError(
                f"backward of tokens [{start}, {stop}) came where the slice that ends at "
                f"{self._backward_stop} was due; slices must run backward last to first"
            )
        self._backward_stop = start
        own = [None if kept is None else kept[start:stop] for kept in self._gradients]
        for index, share in enumerate(context):
            kept = self._gradients[index]
            if share is None:
                continue
            if kept is None and first == 0:
                # A copy: a gradient that autograd hands out must not be written.
                self._gradients[index] = share.clone()
                continue
            if kept is None:
                kept = self._gradients[index] = share.new_zeros((start, *share.shape[1:]))
            kept[first:start].add_(share)
        return own


class SequenceContext:
    """What the layers of this stage keep for the sequences of one group: K and V, and more.

    Args:
        share: the group's share of the sequences of its micro-batch.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._layers: dict[int, LayerKV] = {}
        self._forwarded: dict[int, int] = {}
        self._kept: dict[Hashable, Any] = {}

    def layer(self, owner: object, key: Tensor, value: Tensor, current: CurrentSlice) -> LayerKV:
        """The buffers of one attention module, made when its first slice comes.

        Raises:
            ConfigError: if the module attends twice in one forward, as a tied layer may.
        """
        name = id(owner)
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = LayerKV(key, value, total=current.tokens.total)
        if not current.backward:
            if self._forwarded.get(name, -1) >= current.tokens.start:
                raise ConfigError(
                    f"model: found {type(owner).__name__} used twice by one stage, allowed is "
                    "once, since each use needs a context of its own; untie that layer, or place "
                    "its uses on different stages"
                )
            self._forwarded[name] = current.tokens.start
        return layer

    def keep(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Something of a layer's own that its slices share; made when it is first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Kept, self._kept[key])

    def layers(self) -> list[LayerKV]:
        """The buffers of all layers so far."""
        return list(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True)
class CurrentSlice:
    """The slice that is being computed: its tokens, and its micro-batch's context.

    ``backward`` tells a forward that is recomputed for a backward from the first one.
    """

    tokens: TokenRange
    context: SequenceContext
    backward: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the slice is a whole sequence."""
        return self.tokens.length == self.tokens.total

    @property
    def weight(self) -> float:
        """The slice's share of its micro-batch's tokens."""
        return self.context.share * self.tokens.length / self.tokens.total


# A global, not a thread-local: on CUDA, autograd runs a recomputed forward in a thread of its own.
_current: CurrentSlice | None = None


def get_current_slice() -> CurrentSlice | None:
    """The slice that is being computed, or None where sequences are not cut."""
    return _current


class current_slice:  # noqa: N801 - used as a context manager, cheaper than a generator
    """Marks the slice for the forward, or the backward with its recomputation, inside.

    Args:
        tokens: of the slice.
        context: the K and V of its micro-batch.
        backward: whether what runs inside is a backward.
    """

    __slots__ = ("_before", "_slice")

    def __init__(
        self, tokens: TokenRange, context: SequenceContext, *, backward: bool = False
    ) -> None:
        self._slice = CurrentSlice(tokens, context, backward)

    def __enter__(self) -> None:
        global _current
        self._before, _current = _current, self._slice

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before


@dataclass(frozen=True)
class ContextKV:
    """K and V for a slice's attention, as aliases of the layer's buffers.

    ``context`` is ``(K, V)`` of the tokens before the slice, ``own`` of the slice's own tokens.
    """

    context: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor]


def extend(
    owner: object, key: Tensor, value: Tensor, current: CurrentSlice, *, first: int = 0
) -> tuple[Tensor, Tensor]:
    """K and V of all tokens up to this slice's last.

    Args:
        owner: the attention module; it names the buffers.
        key: the slice's keys ``[length, sequences, heads, head_dim]``.
        value: the slice's values.
        current: the slice.
        first: the first token that is wanted, at most the slice's own first.

    Returns:
        K and V ``[start + length - first, sequences, heads, head_dim]``; their gradient reaches
        this and the earlier slices.
    """
    layer = current.context.layer(owner, key, value, current)
    return _Extend.apply(key, value, layer, current.tokens.start, False, first)


def extend_split(owner: object, key: Tensor, value: Tensor, current: CurrentSlice) -> ContextKV:
    """As :func:`extend`, with context and own tokens apart, for a kernel that treats them apart."""
    layer = current.context.layer(owner, key, value, current)
    parts = _Extend.apply(key, value, layer, current.tokens.start, True, 0)
    return ContextKV(context=(parts[0], parts[1]), own=(parts[2], parts[3]))


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, layer: LayerKV, start: int, split: bool, first: int
    ) -> tuple[Tensor, ...]:
        stop = start + key.shape[0]
        layer.write(key, value, start)
        ctx.layer, ctx.start, ctx.stop, ctx.split, ctx.first = layer, start, stop, split, first
        ctx.set_materialize_grads(False)
        # .data gives the alias a version counter of its own: the next slice writes past this
        # alias's end, which autograd would otherwise take for a change of what it saved.
        keys, values = layer.key.data, layer.value.data
        if split:
            return keys[:start], values[:start], keys[start:stop], values[start:stop]
        return keys[first:stop], values[first:stop]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        start, first = ctx.start, ctx.first
        if ctx.split:
            context, own = gradients[:2], gradients[2:]
        else:
            context = [None if grad is None else grad[: start - first] for grad in gradients]
            own = [None if grad is None else grad[start - first :] for grad in gradients]
        if start == first:
            context = (None, None)
        later = ctx.layer.exchange_gradients(start, ctx.stop, context, first=first)
        total = [_sum(*shares) for shares in zip(own, later, strict=True)]
        return (*total, None, None, None, None)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


__all__ = [
    "ContextKV",
    "CurrentSlice",
    "LayerKV",
    "SequenceContext",
    "current_slice",
    "extend",
    "extend_split",
    "get_current_slice",
]
