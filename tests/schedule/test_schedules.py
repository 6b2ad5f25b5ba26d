"""Every schedule with random times: legal, within its bound, no shorter than it can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.schedule import actions, check_named, lower_bound, simulate, simulate_order
from terapipe_ds.schedule.order import Kind, in_flight_bound

TIMES = st.floats(0, 10, allow_nan=False)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 12 stages, 4 micro-batches, 8 slices each; different times for all."""
    stages = draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return {"stages": stages, "counts": counts, "random": draw(st.randoms(use_true_random=False))}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@given(problems())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_legal_and_no_shorter_than_the_lower_bound(name: str, problem: dict[str, Any]) -> None:
    stages, counts, random = problem["stages"], problem["counts"], problem["random"]
    order = actions(name, stages, len(counts), counts)
    check_named(name, order, micro_batches=len(counts), slices=counts)
    times = {
        (stage, *action): random.uniform(0, 10) for stage, row in enumerate(order) for action in row
    }

    def duration(stage: int, kind: Kind, micro_batch: int, index: int) -> float:
        return times[stage, kind, micro_batch, index]

    timeline = simulate_order(order, duration)
    assert timeline.makespan_ms >= lower_bound(order, duration) * (1 - 1e-12)
    for stage, peak in enumerate(timeline.peak_in_flight):
        assert peak <= in_flight_bound(
            name, stage=stage, stages=stages, micro_batches=len(counts), slices=counts
        )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [2, 4])
def test_slack_hides_slices_of_unequal_times(name: str, stages: int) -> None:
    """Late slices of even lengths take longer: without slack neighbours stop for each other."""
    times = [[(1.0, 1.0, 1.0), (2.0, 3.0, 1.0)]] * 8
    tight = simulate(name, times, stages=stages).makespan_ms
    slack = simulate(name, times, stages=stages, warmup=stages - 1).makespan_ms
    assert slack < 0.9 * tight


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("stages", "micro_batches", "slices"), [(1, 3, 2), (4, 2, 8), (8, 4, 8)])
def test_even_slices_reach_the_lower_bound_of_fused_backwards(
    name: str, stages: int, micro_batches: int, slices: int
) -> None:
    """``(D M + K - 1) (f + b)``; zb-h1 also saves the weight gradients of the last K - 1."""
    order = actions(name, stages, micro_batches, slices)
    products = {"F": 1.0, "B": 1.0, "W": 1.0}
    if name != "zb-h1":
        products["B"] = 2.0
    found = simulate_order(order, lambda stage, kind, micro_batch, index: products[kind])
    slots = micro_batches * slices
    expected = 3 * (slots + stages - 1)
    if name == "zb-h1":
        expected -= 2 * (stages - 1)
    assert found.makespan_ms == expected
    assert found.makespan_ms == lower_bound(order, lambda s, kind, d, i: products[kind])
