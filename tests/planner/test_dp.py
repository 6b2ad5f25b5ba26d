"""The solver: as good as trying everything, with a proof that a slow program can follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.errors import ConfigError
from terapipe_ds.planner import Optimum, paper_latency, solve

from .costs import KINDS, Formula, Table, cuts, random_table

# Positions of a sequence, few enough to try everything, for 1, 2 and 3 sequences.
STEPS = {1: 8, 2: 6, 3: 4}


@dataclass(frozen=True)
class Case:
    """A problem, small enough to try every plan."""

    cost: Table
    seq_length: int
    granularity: int
    sequences: int
    stages: int
    micro_batches: int
    group_sizes: tuple[int, ...] | None = None

    def solve(self, **more: Any) -> Optimum:
        fields = {name: value for name, value in vars(self).items() if name != "cost"}
        return solve(self.cost, **fields, **more)

    @property
    def sizes(self) -> Sequence[int]:
        return self.group_sizes or range(1, self.sequences + 1)

    def latency(self, total: float, peak: float) -> float:
        return self.micro_batches * total + (self.stages - 1) * peak

    def all_plans(self) -> set[tuple[float, float]]:
        """The sum and the maximum of the times of every plan there is."""
        groups = {
            size: {
                (math.fsum(times), max(times))
                for cut in cuts(self.seq_length, self.granularity)
                for times in [[float(self.cost.time(*slice_, size)) for slice_ in cut]]
            }
            for size in self.sizes
        }
        plans: list[set[tuple[float, float]]] = [{(0.0, 0.0)}]
        for n in range(1, self.sequences + 1):
            plans.append(
                {
                    (total + more, max(peak, another))
                    for size in self.sizes
                    if size <= n
                    for total, peak in groups[size]
                    for more, another in plans[n - size]
                }
            )
        return plans[-1]

    def smallest_sum(self, limit: float) -> float:
        """The smallest sum of times, all below the limit: the paper's two dynamic programs."""
        ends = [*range(0, self.seq_length, self.granularity), self.seq_length]
        groups = {}
        for size in self.sizes:
            best = {0: 0.0}
            for end in ends[1:]:
                best[end] = math.inf
                for start in ends[: ends.index(end)]:
                    ms = float(self.cost.time(end - start, start, size))
                    if ms < limit:
                        best[end] = min(best[end], best[start] + ms)
            groups[size] = best[self.seq_length]
        sums = [0.0]
        for n in range(1, self.sequences + 1):
            options = [groups[size] + sums[n - size] for size in self.sizes if size <= n]
            sums.append(min(options, default=math.inf))
        return sums[-1]


@st.composite
def cases(draw: st.DrawFn, *, sizes: bool = False) -> Case:
    sequences = draw(st.integers(1, 3))
    granularity = draw(st.integers(1, 4))
    rest = draw(st.integers(0, granularity - 1))
    # The last position takes the rest; a sequence may be shorter than the granularity.
    seq_length = draw(st.integers(0 if rest else 1, STEPS[sequences] - 1)) * granularity + rest
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 10**6))
    group_sizes = None
    if sizes:
        group_sizes = tuple(sorted(draw(st.sets(st.integers(1, 4), min_size=1))))
    return Case(
        cost=random_table(kind, seed, seq_length=seq_length, sequences=4),
        seq_length=seq_length,
        granularity=granularity,
        sequences=sequences,
        stages=draw(st.integers(1, 8)),
        micro_batches=draw(st.integers(1, 3)),
        group_sizes=group_sizes,
    )


def best(case: Case) -> float:
    return min(case.latency(*plan) for plan in case.all_plans())


def check_scheme(case: Case, found: Optimum) -> None:
    """The scheme is one of this problem, and takes what the solver says."""
    scheme = found.scheme
    assert (scheme.sequences, scheme.seq_length) == (case.sequences, case.seq_length)
    for group in scheme.groups:
        assert group.sequences in case.sizes
        assert all(
            tokens.is_last or tokens.stop % case.granularity == 0 for tokens in group.ranges()
        )
    latency = paper_latency(case.cost, scheme, case.stages, micro_batches=case.micro_batches)
    assert found.latency_ms == pytest.approx(latency, rel=1e-12)


@given(cases())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_as_good_as_trying_everything(case: Case) -> None:
    found = case.solve()
    check_scheme(case, found)
    assert found.latency_ms == pytest.approx(best(case), rel=1e-12)
    assert found.tolerance_ms == 0


@given(cases(sizes=True))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_group_sizes(case: Case) -> None:
    if not case.all_plans():
        with pytest.raises(ConfigError, match="found group sizes that cannot cover"):
            case.solve()
        return
    found = case.solve()
    check_scheme(case, found)
    assert found.latency_ms == pytest.approx(best(case), rel=1e-12)


@given(cases(), st.sampled_from([0.0, 0.0, 0.05, 1.0]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_proof_covers_every_maximum(case: Case, epsilon: float) -> None:
    """A slow program finds the same sums, which leave nothing better in any range of maxima."""
    found = case.solve(epsilon=epsilon)
    check_proof(case, found, (peak for _, peak in case.all_plans()))


def check_proof(case: Case, found: Optimum, peaks: Iterable[float]) -> None:
    reached = math.inf
    for limit, total, down_to in sorted(found.proof, reverse=True):
        assert limit >= reached, "a gap between two ranges"
        assert down_to < limit
        reached = min(reached, down_to)
        assert total == pytest.approx(case.smallest_sum(limit), rel=1e-12)
        if total < math.inf and case.stages > 1:
            least = found.latency_ms - found.tolerance_ms
            assert case.latency(total, down_to) >= least - 1e-9 * (1 + found.latency_ms)
    assert reached == -math.inf
    for peak in peaks:
        assert any(down_to <= peak < limit for limit, _, down_to in found.proof)


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.3, 2.0, 100.0, 1e9])
@given(case=cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_epsilon_keeps_its_guarantee(epsilon: float, case: Case) -> None:
    found = case.solve(epsilon=epsilon)
    optimum = best(case)
    slack = 1e-9 * (1 + optimum)
    assert found.tolerance_ms == (case.stages - 1) * epsilon
    assert optimum - slack <= found.latency_ms <= optimum + found.tolerance_ms + slack
    actual = paper_latency(case.cost, found.scheme, case.stages, micro_batches=case.micro_batches)
    assert actual <= found.latency_ms + slack


@given(cases(), st.integers(0, 5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_others_are_different_and_best_first(case: Case, keep: int) -> None:
    found = case.solve(keep=keep)
    schemes = [found.scheme, *found.others]
    assert len(schemes) <= keep + 1
    assert len({str(scheme) for scheme in schemes}) == len(schemes)
    latencies = [
        paper_latency(case.cost, scheme, case.stages, micro_batches=case.micro_batches)
        for scheme in schemes
    ]
    assert latencies == pytest.approx(sorted(latencies), rel=1e-12)


@pytest.mark.parametrize("kind", ["uniform", "wild", "paper"])
def test_more_positions_than_can_be_tried(kind: str) -> None:
    """The slow program's best over every limit that there is."""
    case = Case(
        cost=random_table(kind, 3, seq_length=31, sequences=2),
        seq_length=31,
        granularity=2,
        sequences=2,
        stages=6,
        micro_batches=2,
    )
    found = case.solve()
    check_scheme(case, found)
    check_proof(case, found, [])
    ends = [*range(0, 31, 2), 31]
    limits = {
        float(case.cost.time(stop - start, start, size))
        for start, stop in combinations(ends, 2)
        for size in case.sizes
    }
    slow = min(
        case.latency(case.smallest_sum(math.nextafter(limit, math.inf)), limit) for limit in limits
    )
    assert found.latency_ms == pytest.approx(slow, rel=1e-12)


def test_one_stage_has_no_bubble_to_avoid() -> None:
    """With an overhead per slice, one stage takes all sequences whole and together."""
    cost = Formula(lambda length, context, sequences: 5 + sequences * length)
    found = solve(cost, seq_length=8, stages=1, sequences=3, granularity=1)
    assert list(found.scheme) == [(3, [8])]
    assert found.latency_ms == 29
    assert found.proof == [(math.inf, 29.0, -math.inf)]


def test_many_stages_cut_as_finely_as_they_may() -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    found = solve(cost, seq_length=10, stages=8, sequences=1, granularity=4)
    assert list(found.scheme) == [(1, [4, 4, 2])]
    assert found.latency_ms == 10 + 7 * 4


def test_later_slices_are_shorter_where_context_costs() -> None:
    """Slices that take the same time are not equally long."""
    cost = Formula(lambda length, context, sequences: 4 + length + length * context / 16)
    found = solve(cost, seq_length=64, stages=8, sequences=1, granularity=4)
    (lengths,) = [lengths for _, lengths in found.scheme]
    assert lengths[0] == max(lengths) > lengths[-1] == 4


def test_a_sequence_shorter_than_the_granularity_stays_whole() -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    found = solve(cost, seq_length=5, stages=4, sequences=2, granularity=8)
    assert {lengths[0] for _, lengths in found.scheme} == {5}


def test_times_may_be_one_number_for_all() -> None:
    cost = Formula(lambda length, context, sequences: 3.0)
    found = solve(cost, seq_length=16, stages=3, sequences=2, granularity=4)
    assert (list(found.scheme), found.latency_ms) == ([(2, [16])], 9)


@pytest.mark.parametrize("ms", [math.nan, -1.0, math.inf])
def test_refuses_impossible_times(ms: float) -> None:
    values = np.ones((3, 9, 9))
    values[2, 4, 4] = ms
    problem = {"seq_length": 8, "stages": 2, "sequences": 2}
    with pytest.raises(ConfigError) as caught:
        solve(Table(values), granularity=4, **problem)
    message = str(caught.value)
    assert message.startswith("plan: found times of ")
    assert f"{ms}" in message
    assert "for 2 sequences, allowed are finite times of at least 0; profile again" in message
    assert "\n" not in message
    # Times that no slice asks for do not matter.
    assert solve(Table(values), granularity=3, **problem).latency_ms > 0
    assert solve(Table(values), granularity=4, group_sizes=[1], **problem).latency_ms > 0


@pytest.mark.parametrize("group_sizes", [[], [2], [4], [2, 7], [0], [-1]])
def test_refuses_group_sizes_that_cover_nothing(group_sizes: list[int]) -> None:
    cost = Formula(lambda length, context, sequences: sequences * length)
    with pytest.raises(ConfigError) as caught:
        solve(cost, seq_length=8, stages=2, sequences=3, granularity=4, group_sizes=group_sizes)
    assert str(caught.value) == (
        "plan: found group sizes that cannot cover 3 sequences, allowed are sizes that add up to "
        "it; change group_sizes or the number of sequences"
    )
