"""Bytes that a stage needs, counted by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.planner import StageMemory
from terapipe_ds.planner.memory import optimizer_bytes
from terapipe_ds.schedule import Action, actions
from terapipe_ds.scheme import Group

MEMORY = StageMemory(
    parameters=100_000,
    gradients=20_000,
    optimizer=3_000,
    activation_per_token=10,
    kv_per_token=1,
)
FIXED = 123_000
CUT = Group(1, (3, 5))
WHOLE = Group(1, (8,))


def peaks(name: str, groups: list[Group], *, stages: int = 1) -> list[float]:
    """The peak of each stage, on top of what lives through the step."""
    order = actions(name, stages, len(groups), [len(group.lengths) for group in groups])
    return [MEMORY.peak(row, groups) - FIXED for row in order]


def test_fixed() -> None:
    assert MEMORY.fixed == FIXED
    assert MEMORY.peak([], []) == FIXED


def test_gpipe_without_slices_holds_activations_and_kv_of_all() -> None:
    """There is no context, so no gradients of K and V apart."""
    assert peaks("gpipe", [WHOLE] * 3, stages=2) == [3 * (80 + 8)] * 2


def test_gpipe_with_slices_adds_the_gradients_of_kv_at_the_first_backward() -> None:
    assert peaks("gpipe", [CUT], stages=3) == [80 + 8 + 8] * 3
    # Those of the last micro-batch alone: by then no other one's backward has begun.
    assert peaks("gpipe", [CUT] * 3) == [3 * (80 + 8) + 8]


def test_gradients_of_kv_may_be_the_peak_later() -> None:
    """B1.0 frees little, and the gradients of micro-batch 0 are much larger."""
    memory = StageMemory(0, 0, 0, activation_per_token=1, kv_per_token=100)
    groups = [Group(4, (4, 4)), Group(1, (4, 4))]
    (row,) = actions("gpipe", 1, 2, 2)
    # Micro-batch 1 is gone: activations of 32 tokens, and K, V, dK and dV of these.
    assert memory.peak(row, groups) == 32 + 6400


def test_1f1b_by_hand() -> None:
    """Two stages, two micro-batches of slices of 3 and 5 tokens.

    The first runs F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0. Most is held at B0.1, all but F1.1's
    activations, and again at F1.1. The last runs F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0.
    """
    first = (30 + 50 + 30) + (8 + 8) + 8
    last = (30 + 50) + 8 + 8
    assert peaks("1f1b", [CUT, CUT], stages=2) == [first, last]


def test_1f1b_without_slices_holds_fewer_later() -> None:
    assert peaks("1f1b", [WHOLE] * 8, stages=4) == [n * (80 + 8) for n in (4, 3, 2, 1)]


def test_sequences_go_together() -> None:
    assert peaks("gpipe", [Group(3, (3, 5))]) == [3 * 96]
    assert peaks("1f1b", [Group(3, (8,)), WHOLE]) == [3 * 88]


def test_a_slice_is_held_until_its_weight_gradient() -> None:
    """K and V, and their gradients, go with the first slice's B all the same."""
    row = [Action("F", d, 0) for d in (0, 1)]
    row += [Action("B", 0, 0), Action("B", 1, 0), Action("W", 0, 0), Action("W", 1, 0)]
    assert MEMORY.peak(row, [WHOLE, WHOLE]) - FIXED == 2 * 88
    early = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)]
    assert MEMORY.peak(early, [WHOLE, WHOLE]) - FIXED == 88
    late = [*early, Action("W", 0, 0), Action("W", 1, 0)]
    assert MEMORY.peak(late, [WHOLE, WHOLE]) - FIXED == 80 + 88


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 5),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_everything_is_given_back(
    name: str, stages: int, lengths: list[int], micro_batches: int
) -> None:
    """Steps that follow one another need no more than one alone."""
    groups = [Group(2, tuple(lengths))] * micro_batches
    for row in actions(name, stages, micro_batches, len(lengths)):
        again = [action._replace(micro_batch=action.micro_batch + micro_batches) for action in row]
        assert MEMORY.peak(row + again, groups * 2) == MEMORY.peak(row, groups)


def test_optimizer_bytes() -> None:
    assert optimizer_bytes(1000, half=False) == 8000
    assert optimizer_bytes(1000, half=True) == 16000
    assert optimizer_bytes(1000, half=True, replicas=4) == 4000
    assert optimizer_bytes(0, half=True) == 0
