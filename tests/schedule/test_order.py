"""The orders of slices: legal for all sizes, as tight as promised, and as worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.errors import ConfigError
from terapipe_ds.schedule import Action, actions, check, check_named, in_flight_bound
from terapipe_ds.schedule.order import joins_next

STAGES = st.integers(1, 12)
MICRO_BATCHES = st.integers(1, 8)
UNIFORM = st.tuples(MICRO_BATCHES, st.integers(1, 8))
WARMUPS = st.integers(0, 12)
ONE_EACH = st.lists(st.integers(1, 8), min_size=1, max_size=8).map(lambda each: (len(each), each))


def texts(stage_actions: list[Action]) -> str:
    return " ".join(map(str, stage_actions))


def peak_in_flight(stage_actions: list[Action]) -> int:
    in_flight = peak = 0
    for action in stage_actions:
        in_flight += 1 if action.kind == "F" else -1
        peak = max(peak, in_flight)
    return peak


def usual_1f1b(stage: int, stages: int, micro_batches: int) -> str:
    """1F1B without slices: forwards to fill the pipeline, then pairs, then what is left."""
    warmup = min(micro_batches, stages - 1 - stage)
    order = [f"F{d}.0" for d in range(warmup)]
    for d in range(micro_batches - warmup):
        order += [f"F{warmup + d}.0", f"B{d}.0"]
    order += [f"B{d}.0" for d in range(micro_batches - warmup, micro_batches)]
    return " ".join(order)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@given(STAGES, UNIFORM | ONE_EACH, WARMUPS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_orders_with_slack_are_legal(
    name: str, stages: int, cut: tuple[int, Any], warmup: int
) -> None:
    micro_batches, slices = cut
    order = actions(name, stages, micro_batches, slices, warmup=warmup)
    check_named(name, order, micro_batches=micro_batches, slices=slices, warmup=warmup)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@given(STAGES, UNIFORM | ONE_EACH, WARMUPS)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_slack_raises_the_bound_by_no_more(
    name: str, stages: int, cut: tuple[int, Any], warmup: int
) -> None:
    micro_batches, slices = cut
    for stage in range(stages):
        tight, slack = (
            in_flight_bound(
                name,
                stage=stage,
                stages=stages,
                micro_batches=micro_batches,
                slices=slices,
                warmup=allowed,
            )
            for allowed in (0, warmup)
        )
        assert tight <= slack <= tight + warmup


def test_slack_by_hand() -> None:
    """The first of three stages is two more forwards ahead, the second, with one hop left, one."""
    order = actions("1f1b", 3, 2, 3, warmup=2)
    assert texts(order[0]) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B0.2 B0.1 B0.0 B1.2 B1.1 B1.0"
    assert texts(order[1]) == "F0.0 F0.1 F0.2 F1.0 F1.1 B0.2 F1.2 B0.1 B0.0 B1.2 B1.1 B1.0"
    assert order[2] == actions("1f1b", 3, 2, 3)[2]
    first, last = actions("zb-h1", 2, 2, 2, warmup=1)
    assert texts(first) == "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0"
    assert texts(last) == "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 W0.1 W0.0 W1.1 W1.0"


@pytest.mark.parametrize(
    ("name", "warmup", "message"),
    [
        ("1f1b", -1, "warmup: found -1, allowed are integers of at least 0"),
        ("zb-h1", True, "warmup: found True, allowed are integers"),
        ("gpipe", 2, "warmup: found 2 with the schedule 'gpipe', which runs all forwards first"),
        ("forward", 1, "warmup: found 1 with the schedule 'forward'"),
    ],
)
def test_slack_that_is_refused(name: str, warmup: int, message: str) -> None:
    for refuse in (
        lambda: actions(name, 2, 2, 2, warmup=warmup),
        lambda: in_flight_bound(name, stage=0, stages=2, micro_batches=2, slices=2, warmup=warmup),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@given(STAGES, UNIFORM | ONE_EACH)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_training_orders_are_legal(name: str, stages: int, cut: tuple[int, Any]) -> None:
    micro_batches, slices = cut
    order = actions(name, stages, micro_batches, slices)
    assert len(order) == stages
    check_named(name, order, micro_batches=micro_batches, slices=slices)


@given(STAGES, UNIFORM | ONE_EACH)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_forward_order_is_legal_and_has_no_backward(stages: int, cut: tuple[int, Any]) -> None:
    micro_batches, slices = cut
    order = actions("forward", stages, micro_batches, slices)
    check(order, micro_batches=micro_batches, slices=slices)
    assert len(order) == stages
    assert {action.kind for stage_actions in order for action in stage_actions} == {"F"}


@given(STAGES, UNIFORM)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_1f1b_peak_is_exactly_the_bound(stages: int, cut: tuple[int, int]) -> None:
    micro_batches, slices = cut
    order = actions("1f1b", stages, micro_batches, slices)
    for stage, stage_actions in enumerate(order):
        expected = min(micro_batches * slices, stages - stage + slices - 1)
        assert peak_in_flight(stage_actions) == expected
        assert expected == in_flight_bound(
            "1f1b", stage=stage, stages=stages, micro_batches=micro_batches, slices=slices
        )


def test_1f1b_by_hand() -> None:
    """Two stages, two micro-batches, two slices.

    The last stage can go back as soon as micro-batch 0 is through, and goes forward once before
    each further backward; the first stage is one forward ahead of it.
    """
    first, last = actions("1f1b", 2, 2, 2)
    assert texts(first) == "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0"
    assert texts(last) == "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0"


def test_1f1b_by_hand_with_one_count_for_each_micro_batch() -> None:
    """Micro-batch 1 is cut in three, so its first backward waits for three forwards."""
    first, last = actions("1f1b", 2, 2, [1, 3])
    assert texts(first) == "F0.0 F1.0 B0.0 F1.1 F1.2 B1.2 B1.1 B1.0"
    assert texts(last) == "F0.0 B0.0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0"


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_1f1b_without_slices_is_the_usual_one(stages: int, micro_batches: int) -> None:
    order = actions("1f1b", stages, micro_batches, 1)
    assert [texts(stage_actions) for stage_actions in order] == [
        usual_1f1b(stage, stages, micro_batches) for stage in range(stages)
    ]


def test_zb_h1_by_hand() -> None:
    """As 1f1b; a micro-batch's weight gradients wait for the last of its backwards."""
    first, last = actions("zb-h1", 2, 2, 2)
    assert texts(first) == "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0"
    assert texts(last) == "F0.0 F0.1 B0.1 F1.0 B0.0 W0.1 W0.0 F1.1 B1.1 B1.0 W1.1 W1.0"


def test_zb_h1_with_fewer_micro_batches_than_stages_by_hand() -> None:
    """Weight gradients one by one; the third of three stages owes two until the end."""
    order = actions("zb-h1", 3, 2, [2, 1])
    assert [texts(row) for row in order] == [
        "F0.0 F0.1 F1.0 B0.1 W0.1 B0.0 W0.0 B1.0 W1.0",
        "F0.0 F0.1 F1.0 B0.1 B0.0 W0.1 B1.0 W0.0 W1.0",
        "F0.0 F0.1 B0.1 F1.0 B0.0 B1.0 W0.1 W0.0 W1.0",
    ]


@given(STAGES, UNIFORM | ONE_EACH)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_zb_h1_joins_a_micro_batch(stages: int, cut: tuple[int, Any]) -> None:
    """With one micro-batch, or one for each stage, all its slices are done together."""
    micro_batches, _ = cut
    for row in actions("zb-h1", stages, *cut):
        joins = joins_next(row)
        within = [
            joined
            for action, joined in zip(row, joins, strict=True)
            if action.kind == "W" and action.slice > 0
        ]
        if micro_batches == 1 or micro_batches >= stages:
            assert all(within)


def test_only_weight_gradients_that_follow_one_another_join() -> None:
    row = actions("zb-h1", 2, 2, 2)[1]
    joined = [str(action) for action, joins in zip(row, joins_next(row), strict=True) if joins]
    assert joined == ["W0.1", "W1.1"]
    assert not any(joins_next(actions("1f1b", 2, 2, 2)[1]))


@given(STAGES, UNIFORM | ONE_EACH)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_zb_h1_without_weight_gradients_is_1f1b(stages: int, cut: tuple[int, Any]) -> None:
    split, fused = actions("zb-h1", stages, *cut), actions("1f1b", stages, *cut)
    for stage, row in enumerate(split):
        assert [action for action in row if action.kind != "W"] == fused[stage]


def test_gpipe_is_all_forwards_then_their_reverse() -> None:
    expected = "F0.0 F0.1 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0 B0.1 B0.0"
    assert [texts(row) for row in actions("gpipe", 3, 2, [2, 3])] == [expected] * 3


def test_gpipe_holds_every_slice() -> None:
    for stage, stage_actions in enumerate(actions("gpipe", 3, 2, 4)):
        assert peak_in_flight(stage_actions) == 8
        bound = in_flight_bound("gpipe", stage=stage, stages=3, micro_batches=2, slices=4)
        assert bound == 8


def test_forward_by_hand() -> None:
    assert [texts(row) for row in actions("forward", 2, 2, [1, 2])] == ["F0.0 F1.0 F1.1"] * 2


def test_an_action_is_a_plain_tuple() -> None:
    assert actions("1f1b", 1, 1, 2) == [[("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2, 2), "found 'zigzag', allowed are '1f1b', 'forward', 'gpipe', 'zb-h1'"),
        (("1f1b", 0, 2, 2), "found 0 stages, allowed is at least 1"),
        (("1f1b", 2, 0, 2), "found 0 micro-batches with 2 slices"),
        (("gpipe", 2, 2, 0), "found 2 micro-batches with 0 slices"),
        (("gpipe", 2, 2, [1]), "found 2 micro-batches with [1] slices"),
        (("gpipe", 2, 2, [1, 0]), "found 2 micro-batches with [1, 0] slices"),
        (("forward", 2, 2, [1, 1, 1]), "found 2 micro-batches with [1, 1, 1] slices"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        actions(*arguments)
    assert str(caught.value).startswith(f"schedule: {message}")
    assert "\n" not in str(caught.value)


def test_bound_refuses_the_same() -> None:
    with pytest.raises(ConfigError, match="found 'zigzag'"):
        in_flight_bound("zigzag", stage=0, stages=1, micro_batches=1, slices=1)
    with pytest.raises(ConfigError, match="found 1 micro-batches with 0 slices"):
        in_flight_bound("1f1b", stage=0, stages=1, micro_batches=1, slices=0)


def test_pure_modules_load_neither_torch_nor_deepspeed() -> None:
    program = (
        "import sys, terapipe_ds.schedule, terapipe_ds.scheme, terapipe_ds.config\n"
        "print(sorted({'torch', 'deepspeed', 'megatron'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
