"""Causal attention on rectangles and in slices: outputs and gradients equal plain math."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from terapipe_ds.runtime import attention
from terapipe_ds.runtime.attention import (
    Sight,
    causal_attention,
    plain_math,
    sdpa,
    split,
    split_supports,
)
from terapipe_ds.runtime.kv_context import ContextKV, SequenceContext, current_slice
from terapipe_ds.scheme import SliceScheme

SEQUENCES, WIDTH, TOTAL = 2, 8, 12
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
LENGTHS = [[5, 3, 4], [1, 11], [11, 1], [2, 7, 1, 2], [1] * 12]

heads = pytest.mark.parametrize("heads", list(HEADS.values()), ids=list(HEADS))
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp64", "fp32"])
scales = pytest.mark.parametrize("scale", [None, 0.7])


def tensors(
    heads: tuple[int, int],
    dtype: torch.dtype,
    *,
    queries: int = TOTAL,
    value_width: int = WIDTH,
) -> list[Tensor]:
    """Q of the last ``queries`` tokens, K and V of all, and the gradient of the output."""
    generator = torch.Generator().manual_seed(7)
    n, g = heads
    shapes = [
        (queries, n, WIDTH),
        (TOTAL, g, WIDTH),
        (TOTAL, g, value_width),
        (queries, n, value_width),
    ]
    return [
        torch.randn(tokens, SEQUENCES, count, width, generator=generator, dtype=dtype)
        for tokens, count, width in shapes
    ]


def run(kernel: Callable[..., Tensor], qkv: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The kernel's output and the gradients of Q, K and V."""
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    output = kernel(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def run_slices(
    lengths: list[int],
    qkv: list[Tensor],
    grad: Tensor,
    starts: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """As :func:`run`, slice by slice: forward first to last, backward last to first."""
    ranges = SliceScheme([(SEQUENCES, lengths)]).groups[0].ranges()
    context, owner = SequenceContext(), object()
    leaves = [
        [tensor[tokens.start : tokens.stop].clone().requires_grad_() for tensor in qkv]
        for tokens in ranges
    ]
    outputs = []
    for tokens, own in zip(ranges, leaves, strict=True):
        if starts is not None:
            options["starts"] = starts[:, tokens.as_slice]
        with current_slice(tokens, context):
            outputs.append(causal_attention(owner, *own, **options))
    for tokens, output in reversed(list(zip(ranges, outputs, strict=True))):
        with current_slice(tokens, context, backward=True):
            output.backward(grad[tokens.start : tokens.stop])
    gradients = [torch.cat([own[which].grad for own in leaves]) for which in range(3)]
    return [torch.cat(outputs).detach(), *gradients]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, ours, theirs in zip(("output", "dQ", "dK", "dV"), found, expected, strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"


def by_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention spelled out: each query sees the keys up to its own token, no mask."""
    context, repeats = key.shape[0] - query.shape[0], query.shape[2] // key.shape[2]
    rows = []
    for index, row in enumerate(query):
        seen_keys = key[: context + index + 1].repeat_interleave(repeats, dim=2)
        seen_values = value[: context + index + 1].repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bnd,tbnd->tbn", row, seen_keys) / math.sqrt(query.shape[-1])
        rows.append(torch.einsum("tbn,tbnd->bnd", scores.softmax(0), seen_values))
    return torch.stack(rows)


@heads
@pytest.mark.parametrize("queries", [1, 5, TOTAL])
def test_plain_math_is_bottom_right_causal(heads: tuple[int, int], queries: int) -> None:
    *qkv, grad = tensors(heads, torch.float64, queries=queries)
    assert_close(run(plain_math, qkv, grad), run(by_rows, qkv, grad), 1e-13)


@heads
@dtypes
@scales
@pytest.mark.parametrize("queries", [1, 5, TOTAL])
def test_sdpa(
    heads: tuple[int, int], dtype: torch.dtype, scale: float | None, queries: int
) -> None:
    *qkv, grad = tensors(heads, dtype, queries=queries)
    expected = run(lambda *args: plain_math(*args, scale=scale), qkv, grad)
    found = run(lambda *args: sdpa(*args, scale=scale), qkv, grad)
    assert_close(found, expected, TOLERANCE[dtype])


@heads
@dtypes
@scales
@pytest.mark.parametrize("queries", [1, 5, TOTAL - 1])
def test_split(
    heads: tuple[int, int], dtype: torch.dtype, scale: float | None, queries: int
) -> None:
    *qkv, grad = tensors(heads, dtype, queries=queries)
    start = TOTAL - queries

    def apart(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kv = ContextKV((key[:start], value[:start]), (key[start:], value[start:]))
        return split(query, kv, scale=scale)

    expected = run(lambda *args: plain_math(*args, scale=scale), qkv, grad)
    assert_close(run(apart, qkv, grad), expected, TOLERANCE[dtype])


@heads
@dtypes
@scales
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_slices(
    heads: tuple[int, int], dtype: torch.dtype, scale: float | None, lengths: list[int]
) -> None:
    *qkv, grad = tensors(heads, dtype)
    expected = run(lambda *args: plain_math(*args, scale=scale), qkv, grad)
    assert_close(run_slices(lengths, qkv, grad, scale=scale), expected, TOLERANCE[dtype])


@heads
@pytest.mark.parametrize("window", [1, 4, 7, TOTAL - 1, TOTAL])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_slices_in_a_window(heads: tuple[int, int], window: int, lengths: list[int]) -> None:
    *qkv, grad = tensors(heads, torch.float64)
    expected = run(lambda *args: plain_math(*args, Sight(window=window)), qkv, grad)
    assert_close(run_slices(lengths, qkv, grad, window=window), expected, 1e-13)
    whole = run(lambda *args: causal_attention(object(), *args, window=window), qkv, grad)
    assert_close(whole, expected, 1e-13)


@pytest.mark.parametrize("window", [0, 1, 4, TOTAL])
def test_a_window_is_that_of_megatron(window: int) -> None:
    """``get_sliding_window_causal_mask`` of (window, 0): its own token and so many before."""
    queries = 5
    query, key, value, _ = tensors((4, 4), torch.float64, queries=queries)
    found = plain_math(query, key, value, Sight(window=window))
    for row in range(queries):
        token = TOTAL - queries + row
        seen = slice(max(0, token - window), token + 1)
        alone = plain_math(query[row : row + 1], key[seen], value[seen])
        assert (found[row] - alone[0]).abs().max() <= 1e-14


def test_a_slice_reads_no_more_context_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(key.shape[0])
        return sdpa(query, key, *args, **kwargs)

    monkeypatch.setattr(attention, "sdpa", counted)
    *qkv, grad = tensors((4, 2), torch.float64)
    run_slices([5, 3, 4], qkv, grad, window=2)
    assert seen == [5, 2 + 3, 2 + 4]


def seen_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    starts: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Attention of whole sequences spelled out, a token, a sequence and a head at a time."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    repeats = query.shape[2] // key.shape[2]
    rows = []
    for row, b, head in itertools.product(*map(range, query.shape[:3])):
        first = 0 if starts is None else int(starts[b, row])
        if window is not None:
            first = max(first, row - window)
        seen = slice(first, row + 1)
        scores = key[seen, b, head // repeats] @ query[row, b, head] / math.sqrt(query.shape[-1])
        if bias is not None:
            scores = scores + bias[b % len(bias), head % bias.shape[1], row, seen]
        weights = scores.exp()
        total = weights.sum() + (0 if offset is None else offset[head].exp())
        rows.append((weights / total) @ value[seen, b, head // repeats])
    return torch.stack(rows).view_as(output)


STARTS = torch.tensor([[0] * 4 + [4] * 5 + [9] * 3, [0] * 6 + [6] * 6])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(
    "sight",
    [
        {"starts": STARTS},
        {"starts": STARTS, "window": 3},
        {"bias": torch.linspace(-2, 2, 4 * TOTAL * TOTAL).view(1, 4, TOTAL, TOTAL).double()},
        {"bias": torch.linspace(-2, 2, 2 * TOTAL * TOTAL).view(2, 1, TOTAL, TOTAL).double()},
        {"offset": torch.tensor([0.0, 1.0, -1.0, 2.0]).double(), "window": 4},
        {
            "starts": STARTS,
            "bias": torch.linspace(2, -2, TOTAL * TOTAL).view(1, 1, TOTAL, TOTAL).double(),
            "offset": torch.tensor([0.0, 1.0, -1.0, 2.0]).double(),
        },
    ],
    ids=lambda sight: "+".join(sight),
)
def test_what_a_slice_sees(
    sight: dict[str, Any], heads: tuple[int, int], lengths: list[int]
) -> None:
    *qkv, grad = tensors(heads, torch.float64)
    expected = run(lambda *args: seen_by_rows(*args, **sight), qkv, grad)
    assert_close(run_slices(lengths, qkv, grad, **sight), expected, 1e-13)
    whole = run(lambda *args: causal_attention(object(), *args, **sight), qkv, grad)
    assert_close(whole, expected, 1e-13)


@pytest.mark.parametrize("name", ["bias", "offset"])
def test_what_is_learnt_of_a_slices_sight(name: str) -> None:
    """The gradients of a bias and of an offset, which all slices share, add up."""
    *qkv, grad = tensors((4, 2), torch.float64)
    shape = (1, 4, TOTAL, TOTAL) if name == "bias" else (4,)
    learnt = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    seen_by_rows(*qkv, **{name: learnt}).backward(grad)
    expected, learnt.grad = learnt.grad, None
    run_slices([5, 3, 4], qkv, grad, **{name: learnt})
    assert (learnt.grad - expected).abs().max() <= 1e-13


def test_slices_with_large_scores() -> None:
    """Where context or own tokens take all of the weight, the merge must not lose the rest."""
    *qkv, grad = tensors((4, 4), torch.float64)
    expected = run(lambda *args: plain_math(*args, scale=40.0), qkv, grad)
    assert_close(run_slices([5, 3, 4], qkv, grad, scale=40.0), expected, 1e-11)


def test_a_slice_has_the_rows_of_full_attention() -> None:
    query, key, value, _ = tensors((4, 2), torch.float64)
    full = plain_math(query, key, value)
    context, owner = SequenceContext(), object()
    for tokens in SliceScheme([(SEQUENCES, [5, 3, 4])]).groups[0].ranges():
        own = slice(tokens.start, tokens.stop)
        with torch.no_grad(), current_slice(tokens, context):
            output = causal_attention(owner, query[own], key[own], value[own])
        assert (output - full[own]).abs().max() <= 1e-14


def test_top_left_causal_would_differ() -> None:
    """What torch's ``is_causal=True`` means on a rectangle; the tests above would notice it."""
    query, key, value, _ = tensors((4, 4), torch.float64, queries=5)
    top_left = functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), is_causal=True
    ).permute(2, 0, 1, 3)
    assert (top_left - sdpa(query, key, value)).abs().max() > 0.1


def test_outside_a_slice_is_plain_causal_attention() -> None:
    *qkv, grad = tensors((4, 2), torch.float64)
    found = run(lambda *args: causal_attention(object(), *args), qkv, grad)
    assert_close(found, run(plain_math, qkv, grad), 1e-13)


@heads
def test_bf16(heads: tuple[int, int]) -> None:
    *qkv, grad = tensors(heads, torch.bfloat16)
    exact = plain_math(*(tensor.double() for tensor in qkv))
    sliced = run_slices([5, 3, 4], qkv, grad)
    assert all(tensor.dtype == torch.bfloat16 for tensor in sliced)
    assert (sliced[0].double() - exact).abs().max() / exact.abs().max() <= 2e-2


def test_dropout_in_slices() -> None:
    *qkv, grad = tensors((4, 2), torch.float32)
    torch.manual_seed(3)
    dropped = run_slices([5, 3, 4], qkv, grad, dropout_p=0.5)
    assert all(tensor.isfinite().all() for tensor in dropped)
    kept = run_slices([5, 3, 4], qkv, grad)
    # Every slice must drop, the first (a square) and the later ones (rectangles).
    for rows in (slice(0, 5), slice(5, 8), slice(8, 12)):
        assert (dropped[0][rows] - kept[0][rows]).abs().max() > 0.1


def test_dropout_keeps_the_mean() -> None:
    """With values of 1 the output is the sum of the kept weights, whose mean is 1."""
    query, key, value, grad = tensors((4, 4), torch.float64)
    torch.manual_seed(3)
    ones = torch.ones_like(value)
    outputs = [run_slices([5, 7], [query, key, ones], grad, dropout_p=0.2)[0] for _ in range(30)]
    assert torch.stack(outputs).mean() == pytest.approx(1.0, abs=0.03)


@dtypes
def test_values_of_another_width(dtype: torch.dtype) -> None:
    *qkv, grad = tensors((4, 2), dtype, value_width=5)
    assert_close(run_slices([5, 3, 4], qkv, grad), run(plain_math, qkv, grad), TOLERANCE[dtype])


def test_what_split_supports() -> None:
    query, wide = torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 9)
    assert split_supports(query, query, dropout_p=0.0)
    assert split_supports(query.bfloat16(), query.bfloat16(), dropout_p=0.0)
    assert not split_supports(query, wide, dropout_p=0.0)
    assert not split_supports(query, query, dropout_p=0.1)
    assert not split_supports(query.to("meta"), query.to("meta"), dropout_p=0.0)
    assert not split_supports(query.int(), query.int(), dropout_p=0.0)


@pytest.mark.parametrize(
    ("options", "value_width", "times"), [({}, 8, 2), ({}, 5, 0), ({"dropout_p": 0.1}, 8, 0)]
)
def test_split_serves_all_slices_but_the_first(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], value_width: int, times: int
) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return split(*args, **kwargs)

    monkeypatch.setattr(attention, "split", counted)
    *qkv, grad = tensors((4, 2), torch.float32, value_width=value_width)
    run_slices([5, 3, 4], qkv, grad, **options)
    assert len(calls) == times
