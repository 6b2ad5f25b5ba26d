"""Simulated timelines: as worked out by hand, and as a slow simulator finds them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.errors import ConfigError, ScheduleError
from terapipe_ds.schedule import Action, Order, Timeline, actions, simulate, simulate_order

Times = dict[tuple[int, Action], float]
Place = tuple[int, Action]


def read(text: str) -> list[Action]:
    """A stage's actions from a text such as ``F0.0 B0.0``."""
    return [
        Action(word[0], *map(int, word[1:].split(".")))  # type: ignore[arg-type]
        for word in text.split()
    ]


def starts(timeline: Timeline, stage: int) -> list[float]:
    return [event.start_ms for event in timeline.events[stage]]


def path(timeline: Timeline) -> list[str]:
    return [f"{event.action}@{event.stage}" for event in timeline.critical_path]


def by_kind(**ms: float) -> Callable[..., float]:
    """A duration for each kind of action, the same on all stages."""
    return lambda stage, kind, micro_batch, index: ms[kind]


@dataclass
class Case:
    """An order with a time for every action and every message."""

    order: Order
    times: Times
    messages: Times
    latency_ms: float
    overlap: bool

    def run(self, **changed: Any) -> Timeline:
        settings: dict[str, Any] = {
            "transfer": reader(self.messages),
            "latency_ms": self.latency_ms,
            "overlap": self.overlap,
        }
        times = changed.pop("times", self.times)
        return simulate_order(self.order, reader(times), **{**settings, **changed})


def reader(times: Times) -> Callable[..., float]:
    return lambda stage, *action: times[stage, Action(*action)]


@st.composite
def cases(draw: st.DrawFn, *, whole: bool = False) -> Case:
    """A named schedule with random times, many of them alike or 0; all integers if ``whole``."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "forward"]))
    stages = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rng = random.Random(draw(st.integers(0, 10**6)))
    order = actions(name, stages, len(counts), counts)
    places = [(stage, action) for stage, row in enumerate(order) for action in row]

    def some() -> float:
        kind = rng.randrange(4)
        value = (0.0, 1.0, float(rng.randint(0, 9)), rng.uniform(0, 9))[kind]
        return float(round(value)) if whole else value

    return Case(
        order=order,
        times={place: some() for place in places},
        messages={place: some() for place in places},
        latency_ms=some(),
        overlap=draw(st.booleans()),
    )


def relaxed(case: Case, rng: random.Random) -> tuple[Times, Times]:
    """Starts and stops: every action is pushed later, in a random order, until nothing moves."""
    before: dict[Place, Place] = {}
    message_before: dict[Place, Place] = {}
    for stage, row in enumerate(case.order):
        for earlier, action in pairwise(row):
            before[stage, action] = (stage, earlier)
        for kind in "FB":
            sends = [action for action in row if action.kind == kind]
            for earlier, action in pairwise(sends):
                message_before[stage, action] = (stage, earlier)
    places = list(case.times)
    rng.shuffle(places)
    start, stop, sent = (dict.fromkeys(places, 0.0) for _ in range(3))
    last = len(case.order) - 1
    moved = True
    while moved:
        moved = False
        for place in places:
            stage, action = place
            step = {"F": 1, "B": -1, "W": 0}[action.kind]
            source, target = stage - step, stage + step
            earliest = 0.0
            if place in before:
                earliest = stop[before[place]]
                if not case.overlap:
                    earliest = sent[before[place]]
            if step and 0 <= source <= last:
                earliest = max(earliest, sent[source, action] + case.latency_ms)
            ends = earliest + case.times[place]
            gone = ends
            if step and 0 <= target <= last:
                free = sent[message_before[place]] if place in message_before else 0.0
                gone = max(ends, free) + case.messages[place]
            if (start[place], stop[place], sent[place]) != (earliest, ends, gone):
                start[place], stop[place], sent[place] = earliest, ends, gone
                moved = True
    return start, stop


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(("micro_batches", "slices"), [(1, 1), (1, 4), (3, 2)])
def test_gpipe_of_equal_slices(stages: int, micro_batches: int, slices: int) -> None:
    forward, backward = 2.0, 3.0
    count = micro_batches * slices
    timeline = simulate("gpipe", [[(forward, backward)] * slices] * micro_batches, stages=stages)
    assert timeline.makespan_ms == (count + stages - 1) * (forward + backward)
    assert timeline.busy_ms == [count * (forward + backward)] * stages
    assert timeline.idle_ms == [(stages - 1) * (forward + backward)] * stages
    assert timeline.bubble == pytest.approx([(stages - 1) / (count + stages - 1)] * stages)
    assert timeline.peak_in_flight == [count] * stages


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_1f1b_without_slices(stages: int, micro_batches: int) -> None:
    timeline = simulate("1f1b", [[(1.0, 2.0)]] * micro_batches, stages=stages)
    assert timeline.makespan_ms == (micro_batches + stages - 1) * 3.0
    assert timeline.peak_in_flight == [min(micro_batches, stages - k) for k in range(stages)]


def test_1f1b_by_hand() -> None:
    """Two stages, two micro-batches, two slices; a backward takes twice as long as a forward."""
    timeline = simulate("1f1b", [[(1.0, 2.0)] * 2] * 2, stages=2)
    # F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
    assert starts(timeline, 0) == [0, 1, 2, 5, 7, 8, 11, 13]
    # F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0
    assert starts(timeline, 1) == [1, 2, 3, 5, 6, 8, 9, 11]
    assert timeline.makespan_ms == 15
    assert timeline.idle_ms == [3, 3]


def test_stages_that_differ_by_hand() -> None:
    """The slow last stage is busy without a break; the first one waits for it."""
    ms = {(0, "F"): 1.0, (0, "B"): 2.0, (1, "F"): 3.0, (1, "B"): 1.0}
    timeline = simulate(
        "gpipe",
        lambda stage, kind, micro_batch, index: ms[stage, kind],
        stages=2,
        micro_batches=2,
        slices=1,
    )
    assert starts(timeline, 0) == [0, 1, 8, 10]
    assert starts(timeline, 1) == [1, 4, 7, 8]
    assert timeline.makespan_ms == 12
    assert timeline.busy_ms == [6, 8]
    assert timeline.idle_ms == [6, 4]
    assert timeline.bubble == pytest.approx([6 / 12, 4 / 12])
    assert path(timeline) == ["F0.0@0", "F0.0@1", "F1.0@1", "B1.0@1", "B1.0@0", "B0.0@0"]


def test_slices_that_differ_by_hand() -> None:
    """Times are looked up by micro-batch and slice."""
    timeline = simulate("gpipe", [[(1, 2), (3, 4)], [(5, 6)]], stages=1)
    assert starts(timeline, 0) == [0, 1, 4, 9, 15, 19]
    assert [str(event.action) for event in timeline.events[0]] == [
        *("F0.0", "F0.1", "F1.0", "B1.0", "B0.1", "B0.0")
    ]
    assert timeline.makespan_ms == timeline.busy_ms[0] == 21
    assert timeline.bubble == [0]


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        ({}, [0, 1, 2], [1, 2, 3]),
        # A message waits until its channel is free.
        ({"transfer": 5.0}, [0, 1, 2], [6, 11, 16]),
        # Time on the way is added once; the next message follows at once.
        ({"latency_ms": 5.0}, [0, 1, 2], [6, 7, 8]),
        ({"transfer": 2.0, "latency_ms": 10.0}, [0, 1, 2], [13, 15, 17]),
        # The sender waits until its channel is free, not for the latency.
        ({"transfer": 5.0, "overlap": False}, [0, 6, 12], [6, 12, 18]),
        ({"latency_ms": 5.0, "overlap": False}, [0, 1, 2], [6, 7, 8]),
    ],
)
def test_transfers_by_hand(given: dict[str, Any], first: list[int], second: list[int]) -> None:
    """Three forwards of 1 ms on two stages."""
    timeline = simulate("forward", [[(1.0, 0.0)] * 3], stages=2, **given)
    assert starts(timeline, 0) == first
    assert starts(timeline, 1) == second
    assert timeline.makespan_ms == second[-1] + 1
    assert timeline.busy_ms == [3, 3], "sending is not computing"


def test_gradients_do_not_wait_for_activations() -> None:
    """Each direction has a channel of its own."""
    order = [read("F0.0 F1.0 B0.0"), read("F0.0 F1.0 B0.0"), read("F0.0 B0.0 F1.0")]
    timeline = simulate_order(
        order,
        by_kind(F=1.0, B=1.0),
        transfer=lambda stage, kind, micro_batch, index: 50.0 if micro_batch == 1 else 0.0,
    )
    # Stage 1 sends F1.0 down from 53 to 103, and meanwhile, at 54, B0.0 up.
    assert starts(timeline, 1) == [1, 52, 53]
    assert starts(timeline, 0) == [0, 1, 54]
    assert starts(timeline, 2) == [2, 3, 103]


def test_transfers_are_asked_of_senders_alone() -> None:
    asked = []

    def transfer(stage: int, kind: str, micro_batch: int, index: int) -> float:
        asked.append(f"{kind}{micro_batch}.{index}@{stage}")
        return 0.0

    simulate("gpipe", [[(1.0, 1.0)] * 2], stages=3, transfer=transfer)
    assert sorted(asked) == sorted(
        [f"F0.{s}@{k}" for s in (0, 1) for k in (0, 1)]
        + [f"B0.{s}@{k}" for s in (0, 1) for k in (1, 2)]
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_backward_that_is_not_split_takes_both_its_parts(name: str) -> None:
    split = simulate(name, [[(1.0, 2.0, 3.0)] * 2] * 2, stages=3)
    assert split == simulate(name, [[(1.0, 5.0)] * 2] * 2, stages=3)


def test_weight_gradients_by_hand() -> None:
    """The first stage gets its gradient before the last one computes weight gradients."""
    order = [
        read("F0.0 F1.0 B0.0 W0.0 B1.0 W1.0"),
        read("F0.0 B0.0 F1.0 B1.0 W0.0 W1.0"),
    ]
    timeline = simulate_order(order, by_kind(F=1.0, B=2.0, W=3.0))
    assert starts(timeline, 0) == [0, 1, 4, 6, 9, 11]
    assert starts(timeline, 1) == [1, 2, 4, 5, 7, 10]
    assert timeline.makespan_ms == 14
    assert timeline.busy_ms == [12, 12]
    assert timeline.peak_in_flight == [2, 2], "a slice is held until its W"
    assert path(timeline) == ["F0.0@0", "F0.0@1", "B0.0@1", "B0.0@0", "W0.0@0", "B1.0@0", "W1.0@0"]


def test_a_slice_is_held_until_its_weight_gradient() -> None:
    row = read("F0.0 B0.0 F1.0 B1.0 W1.0 F2.0 B2.0 W2.0 W0.0")
    assert simulate_order([row], by_kind(F=1.0, B=1.0, W=1.0)).peak_in_flight == [2]
    unsplit = [action for action in row if action.kind != "W"]
    assert simulate_order([unsplit], by_kind(F=1.0, B=1.0)).peak_in_flight == [1]


def test_a_named_schedule_that_splits_the_backward() -> None:
    """Three times of a slice go to its three actions; two are refused."""
    timeline = simulate("zb-h1", [[(1, 2, 4), (8, 16, 32)]], stages=1)
    assert [str(event.action) for event in timeline.events[0]] == [
        *("F0.0", "F0.1", "B0.1", "B0.0", "W0.1", "W0.0")
    ]
    assert starts(timeline, 0) == [0, 1, 9, 25, 27, 59]
    assert timeline.makespan_ms == 63
    with pytest.raises(ConfigError, match=r"found the times \(1, 2\) of a slice, allowed are"):
        simulate("zb-h1", [[(1, 2)] * 2], stages=1)


@pytest.mark.parametrize("stages", [2, 4])
def test_late_weight_gradients_fill_the_bubble(stages: int) -> None:
    """Of 1F1B's bubble, (K - 1) (F + B + W), those of W go; all kinds take 1 ms."""
    count = 3 * stages
    zero_bubble = simulate("zb-h1", [[(1.0, 1.0, 1.0)]] * count, stages=stages)
    assert zero_bubble.makespan_ms == 3 * count + (stages - 1)
    usual = simulate("1f1b", [[(1.0, 2.0)]] * count, stages=stages)
    assert usual.makespan_ms == 3 * count + 3 * (stages - 1)


def test_nothing_to_do_takes_no_time() -> None:
    timeline = simulate("gpipe", [[(0.0, 0.0)]], stages=2)
    assert timeline.makespan_ms == 0
    assert timeline.bubble == timeline.idle_ms == [0, 0]


def test_micro_batches_and_slices_may_be_given_with_times() -> None:
    times = [[(1.0, 2.0)] * 2, [(1.0, 2.0)]]
    expected = simulate("1f1b", times, stages=2)
    assert simulate("1f1b", times, stages=2, micro_batches=2, slices=[2, 1]) == expected


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_as_a_slow_simulator_that_visits_actions_in_any_order(
    case: Case, rng: random.Random
) -> None:
    timeline = case.run()
    start, stop = relaxed(case, rng)
    for row in timeline.events:
        for event in row:
            place = (event.stage, event.action)
            assert (event.start_ms, event.stop_ms) == (start[place], stop[place])
    assert timeline.makespan_ms == max(stop.values())


@given(cases())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_events_are_the_order_and_the_sums_add_up(case: Case) -> None:
    timeline = case.run()
    split = any(action.kind == "W" for action in case.order[0])
    released_by = "W" if split else "B"
    assert [[event.action for event in row] for row in timeline.events] == case.order
    for stage, row in enumerate(timeline.events):
        assert all(a.stop_ms <= b.start_ms for a, b in pairwise(row))
        busy = math.fsum(case.times[stage, action] for action in case.order[stage])
        assert timeline.busy_ms[stage] == pytest.approx(busy)
        total = timeline.busy_ms[stage] + timeline.idle_ms[stage]
        assert total == pytest.approx(timeline.makespan_ms)
        assert timeline.bubble[stage] * timeline.makespan_ms == pytest.approx(
            timeline.idle_ms[stage], abs=1e-9
        )
        in_flight = [0]
        for action in case.order[stage]:
            change = (action.kind == "F") - (action.kind == released_by)
            in_flight.append(in_flight[-1] + change)
        assert timeline.peak_in_flight[stage] == max(in_flight)


@given(cases())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_makespan_is_at_least_what_no_schedule_avoids(case: Case) -> None:
    """The way to a stage, its work, and the way back; and each slice's way through all stages."""
    makespan = case.run().makespan_ms * (1 + 1e-12)
    last = len(case.order) - 1

    def way(action: Action, stages: range) -> float:
        """From the first of the stages, after its work, through all others."""
        return math.fsum(
            case.messages[here, action] + case.latency_ms + case.times[there, action]
            for here, there in pairwise(stages)
        )

    for stage, row in enumerate(case.order):
        first, final = row[0], row[-1]
        others = math.fsum(case.times[stage, action] for action in row[1:])
        bound = case.times[0, first] + way(first, range(stage + 1)) + others
        if final.kind == "B":
            bound += way(final, range(stage, -1, -1))
        assert makespan >= bound
    for forward in (action for action in case.order[0] if action.kind == "F"):
        backward = forward._replace(kind="B")
        bound = case.times[0, forward] + way(forward, range(last + 1))
        if backward in case.order[0]:
            bound += case.times[last, backward] + way(backward, range(last, -1, -1))
        assert makespan >= bound


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_makespan_grows_with_every_time(case: Case, rng: random.Random) -> None:
    before = case.run().makespan_ms
    place = rng.choice(list(case.times))
    longer = {**case.times, place: case.times[place] + rng.uniform(0, 5)}
    slower = {**case.messages, place: case.messages[place] + rng.uniform(0, 5)}
    assert case.run(times=longer).makespan_ms >= before
    assert case.run(transfer=reader(slower)).makespan_ms >= before
    assert case.run(latency_ms=case.latency_ms + 1).makespan_ms >= before
    assert case.run(overlap=False).makespan_ms >= case.run(overlap=True).makespan_ms


@given(cases())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_critical_path_has_no_gaps(case: Case) -> None:
    """Each action starts when the one before it stops, or when its message arrives."""
    timeline = case.run(transfer=0.0)
    chain = timeline.critical_path
    assert chain[0].start_ms == 0
    assert chain[-1].stop_ms == timeline.makespan_ms
    for earlier, later in pairwise(chain):
        if earlier.stage == later.stage:
            assert later.start_ms == earlier.stop_ms
        else:
            assert later.action == earlier.action
            assert later.stage - earlier.stage == (1 if later.action.kind == "F" else -1)
            assert later.start_ms == earlier.stop_ms + case.latency_ms
    transferred = case.run().critical_path
    assert transferred[0].start_ms == 0
    for earlier, later in pairwise(transferred):
        if earlier.stage != later.stage:
            message = case.messages[earlier.stage, earlier.action]
            assert later.start_ms >= earlier.stop_ms + message + case.latency_ms - 1e-9


@given(cases(whole=True), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_longer_action_of_the_critical_path_delays_the_end(
    case: Case, rng: random.Random
) -> None:
    timeline = case.run(transfer=0.0)
    event = rng.choice(timeline.critical_path)
    place = (event.stage, event.action)
    longer = {**case.times, place: case.times[place] + 1}
    assert case.run(times=longer, transfer=0.0).makespan_ms == timeline.makespan_ms + 1


def test_critical_path_goes_back_to_the_message_that_occupied_the_channel() -> None:
    """The last of three forwards waits for two messages, not for its own forward."""
    timeline = simulate("forward", [[(1.0, 0.0)] * 3], stages=2, transfer=5.0)
    assert path(timeline) == ["F0.0@0", "F0.2@1"]


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        simulate(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("ms", [-1.0, math.nan, math.inf, -math.inf])
def test_refuses_impossible_times(ms: float) -> None:
    expected = f"simulate: found {ms} ms for F0.1, allowed are finite times of at least 0"
    assert refusal("gpipe", [[(1.0, 1.0), (ms, 1.0)]], stages=2) == expected

    def transfer(stage: int, kind: str, micro_batch: int, index: int) -> float:
        return ms if (kind, index) == ("F", 1) else 0.0

    assert refusal("gpipe", [[(1.0, 1.0)] * 2], stages=2, transfer=transfer) == expected
    assert refusal("1f1b", [[(1.0, 1.0)]], stages=2, transfer=ms).startswith(
        f"simulate: found {ms}"
    )


@pytest.mark.parametrize("ms", [-1.0, math.nan, math.inf])
def test_refuses_an_impossible_latency(ms: float) -> None:
    assert f"found {ms}" in refusal("gpipe", [[(1.0, 1.0)]], stages=2, latency_ms=ms)


@pytest.mark.parametrize("given", [{}, {"micro_batches": 2}, {"slices": 2}])
def test_a_function_needs_the_numbers(given: dict[str, int]) -> None:
    message = refusal("gpipe", by_kind(F=1.0, B=1.0), stages=2, **given)
    assert "give micro_batches= and slices=" in message


@pytest.mark.parametrize(
    "given",
    [{"micro_batches": 3}, {"slices": 2}, {"slices": [2, 1]}, {"micro_batches": 1, "slices": 1}],
)
def test_refuses_numbers_that_are_not_those_of_the_times(given: dict[str, Any]) -> None:
    message = refusal("gpipe", [[(1.0, 1.0)], [(1.0, 1.0)] * 2], stages=2, **given)
    assert message.startswith("simulate: found times of [1, 2] slices for micro_batches=")


@pytest.mark.parametrize(
    ("name", "times", "stages", "message"),
    [
        ("zigzag", [[(1.0, 1.0)]], 2, "schedule: found 'zigzag'"),
        ("gpipe", [], 2, "schedule: found 0 micro-batches"),
        ("gpipe", [[(1.0, 1.0)], []], 2, "schedule: found 2 micro-batches with [1, 0] slices"),
        ("gpipe", [[(1.0, 1.0)]], 0, "schedule: found 0 stages"),
        ("gpipe", [[(1.0,)]], 2, "simulate: found the times (1.0,) of a slice"),
        ("gpipe", [[(1.0,) * 4]], 2, "simulate: found the times (1.0, 1.0, 1.0, 1.0) of a slice"),
    ],
)
def test_refuses_impossible_shapes(name: str, times: Any, stages: int, message: str) -> None:
    assert refusal(name, times, stages=stages).startswith(message)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        # Each waits for the other.
        (["B0.0 F0.0", "F0.0 B0.0"], "stage 0: B0.0 never gets its input"),
        (["F0.0", "F0.0 F0.1"], "stage 1: F0.1 never gets its input"),
        (["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1"], "stage 0: B0.1 never gets its input"),
    ],
)
def test_refuses_a_deadlock(order: list[str], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate_order([read(row) for row in order], by_kind(F=1.0, B=1.0))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
