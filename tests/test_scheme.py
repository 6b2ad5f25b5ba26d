"""SliceScheme: what it accepts, its text and JSON forms, and that it partitions a micro-batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.errors import ConfigError
from terapipe_ds.scheme import Group, SliceScheme, TokenRange

PAPER = "[(1, [776, 640, 632])] * 16"


@st.composite
def schemes(draw: st.DrawFn) -> SliceScheme:
    """Groups of one sequence length, each cut at its own places."""
    seq_length = draw(st.integers(1, 24))
    groups = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = draw(st.sets(st.integers(1, seq_length), max_size=6)) - {seq_length}
        stops = [*sorted(cuts), seq_length]
        lengths = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        groups.append((draw(st.integers(1, 4)), lengths))
    return SliceScheme(groups)


def refusal(*args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SliceScheme(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([], "found an empty scheme, allowed is at least one group"),
        ([8], "found the group 8, allowed is (sequences, [lengths...])"),
        ([(1, [8], 2)], "found the group (1, [8], 2), allowed is (sequences, [lengths...])"),
        ([(1, 8)], "found 8, allowed is a list of slice lengths"),
        ([(1, [])], "found [], allowed is a list of slice lengths"),
        ([(1, [8, 0])], "found 0 in [8, 0], allowed are integers of at least 1"),
        ([(1, [8, -3])], "found -3 in [8, -3], allowed are integers of at least 1"),
        ([(0, [8])], "found 0 in (0, [8]), allowed are integers of at least 1"),
        ([(1, [2.5])], "found 2.5 in [2.5], allowed are integers of at least 1"),
        ([(True, [8])], "found True in (True, [8]), allowed are integers of at least 1"),
        ([(1, [8]), (2, [4, 5])], "found groups whose lengths sum to [8, 9], allowed is one sum"),
    ],
)
def test_refuses_impossible_groups(groups: list[Any], found: str) -> None:
    assert refusal(groups).startswith(f"slices: {found}")


def test_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="empty scheme"):
        SliceScheme([])


def test_counts() -> None:
    scheme = SliceScheme([(2, [3, 3, 2]), (1, (8,))])
    assert (scheme.sequences, scheme.seq_length, scheme.slices, len(scheme)) == (3, 8, [3, 1], 2)
    assert list(scheme) == [(2, [3, 3, 2]), (1, [8])]
    assert scheme.groups == (Group(2, (3, 3, 2)), Group(1, (8,)))


def test_ranges_and_rows() -> None:
    scheme = SliceScheme([(2, [3, 3, 2]), (1, [8])])
    ranges = scheme.groups[0].ranges()
    assert ranges == [TokenRange(0, 3, 8), TokenRange(3, 3, 8), TokenRange(6, 2, 8)]
    assert [tokens.stop for tokens in ranges] == [3, 6, 8]
    assert [tokens.is_last for tokens in ranges] == [False, False, True]
    assert scheme.rows() == [slice(0, 2), slice(2, 3)]


@given(schemes())
@settings(deadline=None, derandomize=True)
def test_ranges_and_rows_partition_the_micro_batch(scheme: SliceScheme) -> None:
    cells = [
        (row, token)
        for rows, group in zip(scheme.rows(), scheme.groups, strict=True)
        for row in range(rows.start, rows.stop)
        for tokens in group.ranges()
        for token in range(tokens.start, tokens.stop)
    ]
    assert cells == [(r, t) for r in range(scheme.sequences) for t in range(scheme.seq_length)]
    assert all(
        [tokens.length for tokens in group.ranges()] == list(group.lengths)
        for group in scheme.groups
    )


def test_equal_by_value_and_immutable() -> None:
    scheme = SliceScheme([(1, [4, 4])])
    assert scheme == SliceScheme([(1, (4, 4))]) == SliceScheme(scheme.groups)
    assert hash(scheme) == hash(SliceScheme([(1, [4, 4])]))
    assert scheme != SliceScheme([(1, [5, 3])])
    assert scheme != [(1, [4, 4])]
    with pytest.raises(AttributeError, match="cannot assign to field 'groups'"):
        scheme.groups = ()
    with pytest.raises(AttributeError, match="cannot assign"):
        scheme.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        scheme.groups[0].sequences = 2  # type: ignore[misc]
    assert list(scheme) == [(1, [4, 4])]


def test_does_not_share_lists_with_its_caller() -> None:
    lengths = [4, 4]
    scheme = SliceScheme([(1, lengths)])
    lengths[0] = 1
    next(iter(scheme))[1][0] = 1
    assert scheme.groups[0].lengths == (4, 4)


def test_reads_the_papers_notation() -> None:
    scheme = SliceScheme.from_text(PAPER)
    assert list(scheme) == [(1, [776, 640, 632])] * 16
    assert str(scheme) == PAPER
    assert repr(scheme) == f"SliceScheme({PAPER})"


def test_reads_lists_joined_with_plus() -> None:
    text = "[(1, [4, 4])] * 2 + [(2, [8])] + [(1, [4, 4])]"
    scheme = SliceScheme.from_text(f"\n  {text} ")
    assert list(scheme) == [(1, [4, 4]), (1, [4, 4]), (2, [8]), (1, [4, 4])]
    assert str(scheme) == text


@given(schemes())
@settings(deadline=None, derandomize=True)
def test_text_and_json_round_trip(scheme: SliceScheme) -> None:
    assert SliceScheme.from_text(str(scheme)) == scheme
    assert SliceScheme.from_json(scheme.to_json()) == scheme


def test_json_form() -> None:
    assert SliceScheme([(1, [5, 3]), (2, [8])]).to_json() == "[[1, [5, 3]], [2, [8]]]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[(1, [8])",
        "16 * [(1, [8])]",
        "[(1, [8])] * -1",
        "[(1, [8])] - [(1, [8])]",
        "[(1, [8.0])]",
        "[(1, [True])]",
        "[(1, ['8'])]",
        "[(n, [8]) for n in (1, 2)]",
        "__import__('os')",
        "8",
    ],
)
def test_from_text_refuses_everything_else(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SliceScheme.from_text(text)
    assert str(caught.value) == (
        f"slices: found the text {text!r}, allowed is the form '{PAPER}', joined with +"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1, [8]]", "slices: found text that is not JSON"),
        ('{"a": 1}', "slices: found {'a': 1}, allowed is a list of groups"),
        ("[[1, [8.5]]]", "slices: found 8.5 in [8.5]"),
    ],
)
def test_from_json_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SliceScheme.from_json(text)
    assert str(caught.value).startswith(message)


@given(st.integers(1, 60), st.data())
@settings(deadline=None, derandomize=True)
def test_even_differs_by_at_most_one_longer_first(seq_length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, seq_length))
    scheme = SliceScheme.even(sequences=3, seq_length=seq_length, count=count)
    (lengths,) = [lengths for sequences, lengths in scheme]
    assert scheme.sequences == 3
    assert (len(lengths), sum(lengths)) == (count, seq_length)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_even_example() -> None:
    assert list(SliceScheme.even(sequences=1, seq_length=14, count=4)) == [(1, [4, 4, 3, 3])]


def test_resolves_a_count_lengths_and_a_scheme() -> None:
    micro_batch = {"sequences": 2, "seq_length": 8}
    assert list(SliceScheme.resolve(3, **micro_batch)) == [(2, [3, 3, 2])]
    assert list(SliceScheme.resolve((5, 3), **micro_batch)) == [(2, [5, 3])]
    scheme = SliceScheme([(1, [8]), (1, [4, 4])])
    assert SliceScheme.resolve(scheme, **micro_batch) == scheme


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (9, "slices: found 9 slices for a sequence of 8 tokens, allowed are 1 to 8"),
        (
            (4, 3),
            "slices: found lengths that sum to 7, but the micro-batch has 8 tokens a sequence; "
            "change terapipe.slices (a count fits every length) or the sequence length",
        ),
        (
            SliceScheme([(2, [4, 5])]),
            "slices: found lengths that sum to 9, but the micro-batch has 8 tokens a sequence; "
            "change terapipe.slices (a count fits every length) or the sequence length",
        ),
        (
            SliceScheme([(1, [8]), (2, [8])]),
            "slices: found groups that cover 3 sequences, but the micro-batch has 2; "
            "change terapipe.slices or train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_resolve_refuses_what_does_not_fit(slices: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SliceScheme.resolve(slices, sequences=2, seq_length=8)
    assert str(caught.value) == message


def test_copies_and_pickles() -> None:
    scheme = SliceScheme([(1, [776, 640, 632])] * 2)
    assert copy.deepcopy(scheme) == pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize("count", [0, -1])
def test_even_refuses_no_slices(count: int) -> None:
    with pytest.raises(ConfigError, match=f"found {count} slices .* allowed are 1 to 8"):
        SliceScheme.even(sequences=1, seq_length=8, count=count)


@pytest.mark.parametrize("groups", [8, None, "8"])
def test_refuses_what_is_no_list(groups: Any) -> None:
    with pytest.raises(ConfigError, match="allowed is a list of groups"):
        SliceScheme(groups)
