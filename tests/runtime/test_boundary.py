"""What crosses between stages: learnt from one slice, sent as numbers, right for any other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from terapipe_ds.errors import ConfigError, TeraPipeError
from terapipe_ds.runtime.adapter import Dims, TensorDims
from terapipe_ds.runtime.boundary import MESSAGE_SIZE, Boundary

TOKENS_FIRST = TensorDims(batch=1, sequence=0)
BATCH_FIRST = TensorDims(batch=0, sequence=1)
DIMS: Sequence[Dims] = (TOKENS_FIRST, BATCH_FIRST, None, None)
SEQUENCES, TOKENS = 3, 4


def outputs(sequences: int = SEQUENCES, tokens: int = TOKENS) -> list[Tensor]:
    """Hidden states, a mask without gradient, a constant table, and a constant number."""
    return [
        torch.zeros(tokens, sequences, 16, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(sequences, tokens, dtype=torch.bool),
        torch.zeros(64, 1, 8),
        torch.zeros((), dtype=torch.int64),
    ]


def boundary() -> Boundary:
    return Boundary.of(outputs(), DIMS, sequences=SEQUENCES, tokens=TOKENS)


def test_learns_dtypes_and_gradients() -> None:
    learnt = boundary().tensors
    assert [template.dtype for template in learnt] == [
        torch.bfloat16,
        torch.bool,
        torch.float32,
        torch.int64,
    ]
    assert [template.requires_grad for template in learnt] == [True, False, False, False]


@pytest.mark.parametrize(("sequences", "tokens"), [(SEQUENCES, TOKENS), (1, 7), (5, 1)])
def test_size_for_other_slices(sequences: int, tokens: int) -> None:
    sizes = [template.size(sequences, tokens) for template in boundary().tensors]
    assert sizes == [(tokens, sequences, 16), (sequences, tokens), (64, 1, 8), ()]


def test_round_trip() -> None:
    learnt = boundary()
    message = learnt.encode()
    assert (message.dtype, message.shape) == (torch.int64, (MESSAGE_SIZE,))
    assert Boundary.decode(message) == learnt


def test_round_trip_of_nothing() -> None:
    learnt = Boundary.of([], [], sequences=1, tokens=1)
    assert Boundary.decode(learnt.encode()) == learnt
    assert learnt.tensors == ()


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64],
    ids=str,
)
def test_round_trip_of_dtypes(dtype: torch.dtype) -> None:
    learnt = Boundary.of([torch.zeros(4, 2, dtype=dtype)], [TOKENS_FIRST], sequences=2, tokens=4)
    assert Boundary.decode(learnt.encode()) == learnt


def test_sequence_parallelism_holds_a_fraction_of_the_tokens() -> None:
    """Learnt from a rank that holds 2 of a slice's 4 tokens."""
    learnt = Boundary.of([torch.zeros(2, 3, 16)], [TOKENS_FIRST], sequences=3, tokens=4)
    decoded = Boundary.decode(learnt.encode())
    assert decoded == learnt
    (template,) = decoded.tensors
    assert template.size(1, 10) == (5, 1, 16)
    with pytest.raises(ConfigError) as caught:
        template.size(1, 7)
    assert str(caught.value).startswith(
        "slices: found a slice of 7 tokens, allowed are multiples of 2 here"
    )
    assert "terapipe.slices" in str(caught.value)


def test_gradients_are_of_tensors_that_have_one() -> None:
    learnt = boundary()
    assert learnt.gradients() == Boundary(learnt.tensors[:1])
    assert Boundary(learnt.tensors[1:]).gradients() == Boundary(())


def test_check_accepts_other_slices() -> None:
    boundary().check(outputs(1, 7), sequences=1, tokens=7)


@pytest.mark.parametrize(
    ("index", "tensor", "found", "allowed"),
    [
        (
            0,
            torch.zeros(4, 3, 17, dtype=torch.bfloat16),
            "found tensor 0 of shape (4, 3, 17) and torch.bfloat16",
            "allowed is (4, 3, 16) and torch.bfloat16",
        ),
        (
            0,
            torch.zeros(4, 3, 16),
            "found tensor 0 of shape (4, 3, 16) and torch.float32",
            "allowed is (4, 3, 16) and torch.bfloat16",
        ),
        (
            2,
            torch.zeros(32, 1, 8),
            "found tensor 2 of shape (32, 1, 8) and torch.float32",
            "allowed is (64, 1, 8) and torch.float32",
        ),
    ],
)
def test_check_refuses(index: int, tensor: Tensor, found: str, allowed: str) -> None:
    changed = outputs()
    changed[index] = tensor
    with pytest.raises(TeraPipeError) as caught:
        boundary().check(changed, sequences=SEQUENCES, tokens=TOKENS)
    assert str(caught.value).startswith(f"boundary: {found}, {allowed} ")
    assert "token_slice_adapter" in str(caught.value)


def test_check_refuses_a_slice_of_another_length() -> None:
    with pytest.raises(TeraPipeError, match=r"shape \(4, 3, 16\) .* allowed is \(5, 3, 16\)"):
        boundary().check(outputs(), sequences=SEQUENCES, tokens=5)


def test_of_refuses_another_number_of_tensors() -> None:
    with pytest.raises(ConfigError) as caught:
        Boundary.of(outputs(), DIMS[:2], sequences=SEQUENCES, tokens=TOKENS)
    assert str(caught.value).startswith(
        "adapter: found 4 tensors that cross to the next stage, allowed are 2; "
    )
    assert "token_slice_adapter" in str(caught.value)


def test_of_refuses_another_number_of_sequences() -> None:
    """As when the adapter takes the sequences for the tokens."""
    with pytest.raises(ConfigError) as caught:
        Boundary.of([torch.zeros(4, 3, 16)], [BATCH_FIRST], sequences=3, tokens=4)
    assert str(caught.value).startswith(
        "adapter: found a tensor of shape (4, 3, 16) that crosses to the next stage, allowed are "
        "3 sequences in dimension 0 and 4 tokens in dimension 1; "
    )


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(3), "of shape (3,)"),
        (torch.zeros(3, 5, 16), "of shape (3, 5, 16)"),
        (torch.zeros(3, 4, 16).to(torch.float8_e4m3fn), "found torch.float8_e4m3fn"),
    ],
)
def test_of_refuses_what_is_not_a_slice(tensor: Tensor, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Boundary.of([tensor], [BATCH_FIRST], sequences=3, tokens=4)
    assert named in str(caught.value)


def test_check_refuses_another_number_of_tensors_and_a_changed_requires_grad() -> None:
    boundary = Boundary.of([torch.zeros(3, 4, 16)], [BATCH_FIRST], sequences=3, tokens=4)
    with pytest.raises(TeraPipeError, match="found 2 tensors, allowed is 1"):
        boundary.check([torch.zeros(3, 4, 16)] * 2, sequences=3, tokens=4)
    with pytest.raises(TeraPipeError, match="requires_grad True, allowed is False"):
        boundary.check([torch.zeros(3, 4, 16, requires_grad=True)], sequences=3, tokens=4)


def test_encode_refuses_what_a_message_cannot_hold() -> None:
    dims = [TOKENS_FIRST] * 50
    learnt = Boundary.of([torch.zeros(4, 2)] * 50, dims, sequences=2, tokens=4)
    with pytest.raises(ConfigError, match=r"^boundary: found 50 tensors between two stages"):
        learnt.encode()
