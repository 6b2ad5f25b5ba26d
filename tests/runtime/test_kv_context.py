"""The KV context: gradients to earlier slices, order of backward, recomputation, what is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from terapipe_ds.errors import ConfigError, TeraPipeError
from terapipe_ds.runtime.attention import causal_attention, plain_math
from terapipe_ds.runtime.kv_context import (
    LayerKV,
    SequenceContext,
    current_slice,
    extend,
    extend_split,
    get_current_slice,
)
from terapipe_ds.runtime.step import GroupState
from terapipe_ds.scheme import Group, SliceScheme, TokenRange

LENGTHS = [5, 3, 4]
TOTAL, SEQUENCES, HEADS, WIDTH = sum(LENGTHS), 2, 2, 4
RANGES = SliceScheme([(SEQUENCES, LENGTHS)]).groups[0].ranges()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kv(tokens: TokenRange, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A slice's own K and V as leaves."""
    whole = random(2, TOTAL, SEQUENCES, HEADS, WIDTH, seed=seed)
    key, value = whole[:, tokens.start : tokens.stop].clone()
    return key.requires_grad_(), value.requires_grad_()


class TwoLayers:
    """Two attention layers with a projection each, on ``[tokens, sequences, heads * width]``."""

    def __init__(self, wrap: Callable[..., Tensor] | None = None) -> None:
        self.weights = [
            (random(HEADS * WIDTH, 3 * HEADS * WIDTH, seed=seed) * 0.3).requires_grad_()
            for seed in (1, 2)
        ]
        self.owners = (object(), object())
        self.wrap = wrap
        self.calls = 0

    def layer(self, x: Tensor, weight: Tensor, owner: object) -> Tensor:
        self.calls += 1
        shape = (*x.shape[:2], HEADS, WIDTH)
        query, key, value = ((x @ part).view(shape) for part in weight.chunk(3, dim=1))
        return x + causal_attention(owner, query, key, value).flatten(2)

    def __call__(self, x: Tensor) -> Tensor:
        for weight, owner in zip(self.weights, self.owners, strict=True):
            x = (
                self.wrap(self.layer, x, weight, owner)
                if self.wrap
                else self.layer(x, weight, owner)
            )
        return x

    def run(self, lengths: list[int], x: Tensor, grad: Tensor) -> list[Tensor]:
        """Forward and backward in slices: the output, dX and the gradients of the weights."""
        context = SequenceContext()
        slices = []
        for tokens in SliceScheme([(SEQUENCES, lengths)]).groups[0].ranges():
            own = x[tokens.start : tokens.stop].clone().requires_grad_()
            with current_slice(tokens, context):
                slices.append((tokens, own, self(own)))
        for tokens, _, output in reversed(slices):
            with current_slice(tokens, context, backward=True):
                output.backward(grad[tokens.start : tokens.stop])
        output = torch.cat([output.detach() for _, _, output in slices])
        d_x = torch.cat([own.grad for _, own, _ in slices])
        return [output, d_x, *(weight.grad for weight in self.weights)]


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 11], [6, 6]], ids=str)
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_layers_in_slices_equal_the_whole(use_reentrant: bool | None, lengths: list[int]) -> None:
    """Without recomputation, and with each of torch's two kinds."""
    x, grad = random(2, TOTAL, SEQUENCES, HEADS * WIDTH)
    expected = TwoLayers().run([TOTAL], x, grad)

    def recomputed(*args: Any) -> Tensor:
        return checkpoint(*args, use_reentrant=use_reentrant)

    model = TwoLayers(None if use_reentrant is None else recomputed)
    found = model.run(lengths, x, grad)
    assert model.calls == 2 * len(lengths) * (1 if use_reentrant is None else 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-13


def test_recomputation_needs_the_slice_marked() -> None:
    """The test above would notice a recomputed forward that does not find its slice."""
    x, grad = random(2, TOTAL, SEQUENCES, HEADS * WIDTH)
    model = TwoLayers(lambda *args: checkpoint(*args, use_reentrant=True))
    last = RANGES[-1]
    expected = model.run(LENGTHS, x, grad)[1][last.start :]
    context = SequenceContext()
    for tokens in RANGES:
        own = x[tokens.start : tokens.stop].clone().requires_grad_()
        with current_slice(tokens, context):
            output = model(own)
    output.backward(grad[last.start :])
    assert (own.grad - expected).abs().max() > 1e-3


def test_a_module_may_attend_once_in_a_forward() -> None:
    """A layer that is used twice would mix the K and V of its two uses."""
    context, owner = SequenceContext(), torch.nn.Identity()
    for tokens in RANGES[:2]:
        with current_slice(tokens, context):
            extend(owner, *kv(tokens), get_current_slice())
    with (
        current_slice(RANGES[1], context),
        pytest.raises(ConfigError, match=r"^model: found Identity used twice by one stage"),
    ):
        extend(owner, *kv(RANGES[1]), get_current_slice())
    with current_slice(RANGES[1], context, backward=True):
        keys, _ = extend(owner, *kv(RANGES[1]), get_current_slice())
    assert keys.shape[0] == RANGES[1].stop


def test_context_has_one_entry_a_layer() -> None:
    context, owners = SequenceContext(), (object(), object())
    assert len(context) == 0
    for tokens in RANGES:
        with current_slice(tokens, context):
            for owner in owners:
                extend(owner, *kv(tokens), get_current_slice())
        assert len(context) == 2


def test_contexts_are_apart() -> None:
    """Two micro-batches of one module have a K and a V each."""
    owner, first, second = object(), SequenceContext(), SequenceContext()
    for context, seed in ((first, 1), (second, 2)):
        with current_slice(RANGES[0], context):
            extend(owner, *kv(RANGES[0], seed), get_current_slice())
    with current_slice(RANGES[1], first):
        keys, values = extend(owner, *kv(RANGES[1], 1), get_current_slice())
    stop = RANGES[1].stop
    whole = random(2, TOTAL, SEQUENCES, HEADS, WIDTH, seed=1)
    assert torch.equal(keys, whole[0, :stop])
    assert torch.equal(values, whole[1, :stop])


def test_extend_hands_on_the_buffer_itself() -> None:
    context, owner = SequenceContext(), object()
    shared = []
    for tokens in RANGES:
        with current_slice(tokens, context):
            keys, values = extend(owner, *kv(tokens), get_current_slice())
        assert keys.shape[0] == values.shape[0] == tokens.stop
        shared.append((keys.data_ptr(), values.data_ptr()))
    assert len(set(shared)) == 1


def test_extend_split_hands_on_context_and_own_tokens() -> None:
    context, owner = SequenceContext(), object()
    with current_slice(RANGES[0], context):
        first = kv(RANGES[0])
        extend(owner, *first, get_current_slice())
    with current_slice(RANGES[1], context):
        own = kv(RANGES[1])
        parts = extend_split(owner, *own, get_current_slice())
    for found, expected in ((parts.context, first), (parts.own, own)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_release_frees_the_buffers() -> None:
    """What the engine does after slice 0's backward and after evaluation."""
    group = GroupState(0, 0, slice(0, SEQUENCES), Group(SEQUENCES, tuple(LENGTHS)).ranges())
    owner = object()
    outputs = []
    for tokens in RANGES:
        with current_slice(tokens, group.context):
            query = random(tokens.length, SEQUENCES, HEADS, WIDTH).requires_grad_()
            outputs.append(causal_attention(owner, query, *kv(tokens)))
    with current_slice(RANGES[0], group.context, backward=True):
        layer = weakref.ref(group.context.layer(owner, *kv(RANGES[0]), get_current_slice()))
    buffer = weakref.ref(layer().key)
    while outputs:
        outputs.pop().sum().backward()
    assert len(group.context) == 1
    assert layer() is not None
    group.release()
    gc.collect()
    assert len(group.context) == 0
    assert layer() is None
    assert buffer() is None


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0], r"backward of tokens \[0, 5\) came where the slice that ends at 12 was due"),
        ([2, 0], r"backward of tokens \[0, 5\) came where the slice that ends at 8 was due"),
        ([1], r"backward of tokens \[5, 8\) came where the slice that ends at 12 was due"),
    ],
)
def test_backward_out_of_order_is_refused(order: list[int], message: str) -> None:
    context, owner = SequenceContext(), object()
    losses = []
    for tokens in RANGES:
        with current_slice(tokens, context):
            key, value = extend(owner, *kv(tokens), get_current_slice())
        losses.append((key * value).sum())
    *before, last = order
    for index in before:
        losses[index].backward()
    with pytest.raises(TeraPipeError, match=message):
        losses[last].backward()


def test_exchange_gradients() -> None:
    """Each slice adds to the tokens before it, and takes what the later ones left for its own."""
    layer = LayerKV(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), total=6)

    def share(tokens: int, value: float) -> tuple[Tensor, Tensor]:
        return torch.full((tokens, 1, 1, 1), value), torch.full((tokens, 1, 1, 1), -value)

    assert layer.exchange_gradients(4, 6, share(4, 1.0)) == [None, None]
    later = layer.exchange_gradients(2, 4, share(2, 10.0))
    assert [part.flatten().tolist() for part in later] == [[1.0, 1.0], [-1.0, -1.0]]
    later = layer.exchange_gradients(0, 2, (None, None))
    assert [part.flatten().tolist() for part in later] == [[11.0, 11.0], [-11.0, -11.0]]
    with pytest.raises(TeraPipeError, match="the slice that ends at 0 was due"):
        layer.exchange_gradients(0, 2, (None, None))


def test_no_later_gradient_is_no_gradient() -> None:
    layer = LayerKV(torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), total=6)
    assert layer.exchange_gradients(3, 6, (None, None)) == [None, None]
    assert layer.exchange_gradients(0, 3, (None, None)) == [None, None]


@pytest.mark.parametrize(
    "attend",
    [
        lambda key, value: (key + value).sum(),  # one gradient tensor for both
        lambda key, value: (key.detach() * value).sum(),  # none for K
        lambda key, value: (key * value.detach()).sum(),  # none for V
        lambda key, value: (key * value).sum(),
    ],
)
def test_any_use_of_k_and_v_gets_the_gradient_of_the_whole(attend: Any) -> None:
    context, owner = SequenceContext(), object()
    leaves, losses = [], []
    for tokens in RANGES:
        own = kv(tokens)
        with current_slice(tokens, context):
            losses.append(attend(*extend(owner, *own, get_current_slice())))
        leaves.append(own)
    for loss in reversed(losses):
        loss.backward()
    whole = [torch.cat([own[i].detach() for own in leaves]).requires_grad_() for i in (0, 1)]
    sum(attend(*(part[: tokens.stop] for part in whole)) for tokens in RANGES).backward()
    for index, part in enumerate(whole):
        found = torch.cat(
            [
                torch.zeros_like(own[index]) if own[index].grad is None else own[index].grad
                for own in leaves
            ]
        )
        expected = torch.zeros_like(part) if part.grad is None else part.grad
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_callers_gradient_is_not_written() -> None:
    context, owner = SequenceContext(), object()
    outputs = []
    for tokens in RANGES:
        with current_slice(tokens, context):
            outputs.append(extend(owner, *kv(tokens), get_current_slice()))
    given = [tuple(torch.ones_like(part) for part in parts) for parts in outputs]
    for parts, grads in zip(reversed(outputs), reversed(given), strict=True):
        torch.autograd.backward(parts, grads)
    for grads in given:
        assert all(bool((grad == 1).all()) for grad in grads)


def test_an_expanded_gradient_is_not_written_in_place() -> None:
    """A sum's gradient is one number seen many times; each slice must add to it apart."""
    context, owner = SequenceContext(), object()
    leaves, losses = [], []
    for tokens in RANGES:
        own = kv(tokens)
        with current_slice(tokens, context):
            key, value = extend(owner, *own, get_current_slice())
        leaves.append(own)
        losses.append((key, value))
    one = torch.ones((), dtype=torch.float64)
    for parts in reversed(losses):
        torch.autograd.backward(parts, [one.expand(part.shape) for part in parts])
    assert one == 1
    # Slice 0 is seen by three slices, slice 1 by two, slice 2 by itself.
    for seen_by, own in zip((3, 2, 1), leaves, strict=True):
        for leaf in own:
            assert torch.equal(leaf.grad, torch.full_like(leaf, seen_by))


def leaves_of(output: Tensor) -> set[int]:
    """The ids of the leaves in an output's autograd graph."""
    found, stack, seen = set(), [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack += [following for following, _ in node.next_functions]
    return found


def test_every_slice_has_a_graph_of_its_own() -> None:
    context, owner = SequenceContext(), object()
    for tokens in RANGES:
        own = [random(tokens.length, SEQUENCES, HEADS, WIDTH).requires_grad_(), *kv(tokens)]
        with current_slice(tokens, context):
            output = causal_attention(owner, *own)
        assert leaves_of(output) == {id(leaf) for leaf in own}


def test_each_backward_frees_its_own_graph() -> None:
    context, owner = SequenceContext(), object()
    outputs, activations = [], []
    for tokens in RANGES:
        leaf = random(tokens.length, SEQUENCES, HEADS, WIDTH).requires_grad_()
        query = leaf * 2
        activations.append(weakref.ref(query))
        with current_slice(tokens, context):
            outputs.append(causal_attention(owner, query, *kv(tokens)))
        del query
    alive = [True, True, True]
    assert [ref() is not None for ref in activations] == alive
    for index in reversed(range(3)):
        outputs[index].sum().backward()
        alive[index] = False
        assert [ref() is not None for ref in activations] == alive


def test_slices_are_marked_inside_and_restored_outside() -> None:
    context = SequenceContext()
    assert get_current_slice() is None
    with current_slice(RANGES[0], context):
        with current_slice(RANGES[1], context):
            assert get_current_slice().tokens == RANGES[1]
        with current_slice(RANGES[1], context, backward=True):
            assert get_current_slice().backward
        outer = get_current_slice()
        assert outer.tokens == RANGES[0]
        assert outer.context is context
        assert not outer.backward
    assert get_current_slice() is None


def test_mark_is_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), current_slice(RANGES[0], SequenceContext()):
        raise KeyError
    assert get_current_slice() is None


def test_a_slice_that_is_the_whole_sequence_keeps_no_context() -> None:
    context = SequenceContext()
    query, key, value = random(3, TOTAL, SEQUENCES, HEADS, WIDTH)
    with current_slice(TokenRange(0, TOTAL, TOTAL), context):
        output = causal_attention(object(), query, key, value)
    assert len(context) == 0
    assert (output - plain_math(query, key, value)).abs().max() <= 1e-14
