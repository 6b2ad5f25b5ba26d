"""The paper's dynamic program over slice lengths and its batch knapsack, solved to the optimum.

A step of ``K`` stages takes ``sum of all t + (K - 1) * max of all t`` (TeraPipe, equation 5), where
``t`` are the times of the slices of all groups. For a fixed limit on ``t`` the smallest sum is a
shortest path over token positions for each group size (Algorithm 1), and a knapsack over group
sizes (section 3.4). What remains is the choice of the limit.

The paper tries limits an epsilon apart. Here, with ``S(x)`` the smallest sum when all slices take
less than ``x``, limits step down from infinity: having solved for ``x``, every plan with a maximum
``m`` of at least ``(best - S(x)) / (K - 1)`` costs at least ``best``, since its sum is at least
``S(x)``; and the plan found serves every limit down to its own maximum. So the next limit is the
smaller of the two, no limit between can hold a better plan, and the result is the exact optimum for
any table of times, monotone or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..scheme import SliceScheme

Floats = NDArray[np.float64]

# Ranges of limits that step down side by side: numpy's cost of a call is shared between them.
_SEGMENTS = 8
# Rounds of looking for a good plan before the proof.
_REFINEMENTS = 5


class Cost(Protocol):
    """Anything that knows how long a slice takes on a stage."""

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        """Forward and backward of a slice, in ms; scalars or arrays, broadcast.

        Args:
            length: tokens of the slice.
            context: tokens before it.
            sequences: sequences that go together.
        """


@dataclass(frozen=True)
class Optimum:
    """What the solver found.

    Attributes:
        scheme: the groups of one micro-batch.
        latency_ms: of the step, by the paper's formula.
        proof: for each limit that was solved, ``(limit, smallest sum below it, down to)``: every
            plan with a maximum in ``[down to, limit)`` costs at least ``latency_ms - tolerance``,
            because its sum is at least the given one. Together they cover all maxima.
        tolerance_ms: 0, or what ``epsilon`` allows.
        others: more schemes that were met, best first.
    """

    scheme: SliceScheme
    latency_ms: float
    proof: list[tuple[float, float, float]]
    tolerance_ms: float
    others: list[SliceScheme]


def solve(
    cost: Cost,
    *,
    seq_length: int,
    stages: int,
    sequences: int,
    granularity: int,
    micro_batches: int = 1,
    epsilon: float = 0.0,
    keep: int = 0,
    group_sizes: Sequence[int] | None = None,
) -> Optimum:
    """The scheme that minimises ``micro_batches * sum of t + (stages - 1) * max of t``.

    Args:
        cost: times of slices.
        seq_length: tokens of a sequence.
        stages: the number of pipeline stages.
        sequences: sequences of a micro-batch, to be grouped.
        granularity: slices end at multiples of this many tokens, or at the end of the sequence.
        micro_batches: how often the scheme is repeated in a step.
        epsilon: in ms; the result is within ``stages * epsilon`` of the optimum (the paper's
            guarantee). 0 for the optimum itself.
        keep: how many other schemes to return.
        group_sizes: how many sequences may go together; any number if None.

    Raises:
        ConfigError: if a time is negative or not finite, or groups of these sizes cannot cover the
            sequences.
    """
    sizes = range(1, sequences + 1) if group_sizes is None else group_sizes
    tables = _Tables.of(
        cost,
        seq_length=seq_length,
        sequences=sequences,
        granularity=granularity,
        sizes=[size for size in sizes if 1 <= size <= sequences],
    )
    weight = stages - 1
    search = _Search(tables, micro_batches, weight, epsilon)
    search.run()
    order = sorted(search.met, key=lambda peak: search.met[peak])
    schemes: list[SliceScheme] = []
    for peak in order:
        if len(schemes) > keep:
            break
        scheme = tables.scheme(peak)
        if scheme not in schemes:
            schemes.append(scheme)
    return Optimum(
        scheme=schemes[0],
        latency_ms=search.best,
        proof=search.proof,
        tolerance_ms=weight * epsilon,
        others=schemes[1:],
    )


class _Search:
    """Steps limits down, in several ranges at once, until no range can hold a better plan."""

    def __init__(self, tables: _Tables, repeats: int, weight: int, epsilon: float) -> None:
        self.tables, self.repeats, self.weight, self.epsilon = tables, repeats, weight, epsilon
        self.best = math.inf
        self.met: dict[float, float] = {}
        """Maximum of a plan that was met -> its latency."""
        self.proof: list[tuple[float, float, float]] = []

    def run(self) -> None:
        sums, peaks = self._solved(np.array([math.inf]))
        if self.best == math.inf:
            raise ConfigError(
                f"plan: found group sizes that cannot cover {self.tables.sequences} sequences, "
                "allowed are sizes that add up to it; change group_sizes or the number of sequences"
            )
        if self.weight == 0:
            self._down_to(math.inf, sums[0], peaks[0])
            return
        low, high = self._approach(peaks[0])
        top = self._down_to(math.inf, sums[0], peaks[0])
        self._prove(min(low, top), min(high, top), top)

    def _approach(self, top: float) -> tuple[float, float]:
        """Finds a good plan, so that few limits are left; returns limits around it.

        Latency over the limit has more than one valley, so the best few places are all refined.
        """
        low = max(self.tables.fastest, 1e-3 * top)
        limits = np.geomspace(low, top, _SEGMENTS + 1) if low > 0 else np.zeros(1)
        latencies = self._latencies(limits)
        for _ in range(_REFINEMENTS):
            best = np.argsort(latencies)[: _SEGMENTS // 2]
            last = len(limits) - 1
            neighbours = np.concatenate([np.maximum(best - 1, 0), np.minimum(best + 1, last)])
            middles = np.setdiff1d((limits[np.tile(best, 2)] + limits[neighbours]) / 2, limits)
            if not len(middles):
                break
            limits = np.concatenate([limits, middles])
            latencies = np.concatenate([latencies, self._latencies(middles)])
            order = np.argsort(limits)
            limits, latencies = limits[order], latencies[order]
        place = int(np.argmin(latencies))
        return float(limits[max(place - 1, 0)]), float(limits[min(place + 1, len(limits) - 1)])

    def _latencies(self, limits: Floats) -> Floats:
        sums, peaks = self._solved(limits)
        latencies: Floats = self.repeats * sums + self.weight * peaks
        return latencies

    def _solved(self, limits: Floats) -> tuple[Floats, Floats]:
        sums, peaks = self.tables.solve(limits)
        for total, peak in zip(sums, peaks, strict=True):
            self._meet(total, peak)
        return sums, peaks

    def _prove(self, low: float, high: float, top: float) -> None:
        """Steps down from ``top``; half of the ranges lie around the best plan."""
        half = _SEGMENTS // 2
        edges = np.concatenate(
            [
                # The lowest range has no floor: it ends where there is no plan.
                [-math.inf],
                np.linspace(self.tables.fastest, low, half // 2, endpoint=False)[1:],
                np.linspace(low, high, half, endpoint=False),
                np.linspace(high, top, half // 2 + 1),
            ]
        )
        edges = np.unique(edges)
        limits, floors = edges[1:], edges[:-1]
        while len(limits):
            sums, peaks = self._solved(limits)
            following = np.array(
                [
                    self._down_to(limit, total, peak)
                    for limit, total, peak in zip(limits, sums, peaks, strict=True)
                ]
            )
            going = following > floors
            limits, floors = following[going], floors[going]

    def _meet(self, total: float, peak: float) -> None:
        if total == math.inf:
            return
        latency = self.repeats * total + self.weight * peak
        self.met[peak] = min(latency, self.met.get(peak, math.inf))
        self.best = min(self.best, latency)

    def _down_to(self, limit: float, total: float, peak: float) -> float:
        """The next limit below: nothing from there up to ``limit`` is better than the best."""
        if total == math.inf or self.weight == 0:
            following = -math.inf
        else:
            worth = (self.best - self.repeats * total) / self.weight - self.epsilon
            following = min(peak, worth)
        self.proof.append((float(limit), float(total), float(following)))
        return following


@dataclass(frozen=True)
class _Tables:
    """Times of all slices on the grid of token positions, for all group sizes.

    ``times[b - 1, j, i]`` is the time of the slice from position ``i`` to ``j`` for ``b``
    sequences, infinite for ``i >= j``. Positions are numbered; ``positions`` holds their tokens.
    """

    positions: NDArray[np.int64]
    times: Floats
    shortest: Floats
    """``shortest[b - 1, s]``: the least time of slices that span ``s`` positions or more."""

    @classmethod
    def of(
        cls,
        cost: Cost,
        *,
        seq_length: int,
        sequences: int,
        granularity: int,
        sizes: Sequence[int],
    ) -> _Tables:
        positions = np.append(np.arange(0, seq_length, granularity), seq_length)
        count = len(positions)
        j, i = np.tril_indices(count, -1)
        times = np.full((sequences, count, count), math.inf)
        lengths, contexts = positions[j] - positions[i], positions[i]
        shortest = np.full((sequences, count + 1), math.inf)
        for b in sizes:
            found = np.asarray(cost.time(lengths, contexts, b), dtype=np.float64)
            if not (np.isfinite(found).all() and (found >= 0).all()):
                raise ConfigError(
                    f"plan: found times of {found.min()} to {found.max()} ms for {b} sequences, "
                    "allowed are finite times of at least 0; profile again"
                )
            times[b - 1, j, i] = found
            np.minimum.at(shortest[b - 1], j - i, times[b - 1, j, i])
        shortest = np.minimum.accumulate(shortest[:, ::-1], axis=1)[:, ::-1]
        return cls(positions, times, shortest)

    @property
    def sequences(self) -> int:
        return len(self.times)

    @property
    def fastest(self) -> float:
        return float(self.times.min())

    def solve(self, limits: Floats) -> tuple[Floats, Floats]:
        """For each limit the smallest sum with all slices below it, and that plan's maximum."""
        sums = np.full((self.sequences, len(limits)), math.inf)
        peaks = np.full((self.sequences, len(limits)), math.inf)
        for first, last, span in self._blocks(float(limits.max())):
            paths = _shortest_paths(self.times[first:last], limits, span)
            sums[first:last], peaks[first:last], _ = paths
        total, peak, _ = _knapsack(sums, peaks)
        return total, peak

    def scheme(self, peak: float) -> SliceScheme:
        """The scheme of the smallest sum whose slices take at most ``peak``."""
        limits = np.array([np.nextafter(peak, math.inf)])
        sums = np.full((self.sequences, 1), math.inf)
        peaks = np.full((self.sequences, 1), math.inf)
        lengths: list[list[int]] = [[] for _ in range(self.sequences)]
        for first, last, span in self._blocks(float(limits[0])):
            found = _shortest_paths(self.times[first:last], limits, span)
            sums[first:last], peaks[first:last], parents = found
            for b in range(first, last):
                if sums[b, 0] < math.inf:
                    lengths[b] = self._lengths(parents[b - first, 0])
        _, _, sizes = _knapsack(sums, peaks)
        groups = []
        left = self.sequences
        while left:
            b = int(sizes[left, 0])
            groups.append((b, lengths[b - 1]))
            left -= b
        return SliceScheme(groups)

    def _lengths(self, parents: NDArray[np.int64]) -> list[int]:
        lengths = []
        j = len(self.positions) - 1
        while j:
            i = int(parents[j])
            lengths.append(int(self.positions[j] - self.positions[i]))
            j = i
        return lengths[::-1]

    def _blocks(self, limit: float) -> list[tuple[int, int, int]]:
        """Group sizes of similar reach together: (first, after last, longest span in positions).

        The more sequences go together, the shorter are their slices below a limit.
        """
        spans = (self.shortest[:, 1:] < limit).sum(axis=1)
        blocks = []
        first = 0
        while first < self.sequences:
            last = min(self.sequences, max(first + 1, 2 * first))
            span = int(spans[first:last].max())
            if span:
                blocks.append((first, last, span))
            first = last
        return blocks


def _shortest_paths(
    times: Floats, limits: Floats, span: int
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Algorithm 1 for several group sizes and limits at once.

    Args:
        times: ``[sizes, positions, positions]``.
        limits: ``[limits]``; slices take less.
        span: no slice below the largest limit spans more positions.

    Returns:
        Sums and maxima ``[sizes, limits]``, and ``[sizes, limits, positions]`` where each
        position's last slice starts.
    """
    sizes, count = times.shape[:2]
    shape = (sizes, len(limits), count)
    sums, peaks = np.full(shape, math.inf), np.zeros(shape)
    parents = np.zeros(shape, dtype=np.int64)
    sums[:, :, 0] = 0.0
    bound = limits[None, :, None]
    size, limit = np.ogrid[:sizes, : len(limits)]
    for j in range(1, count):
        start = max(0, j - span)
        row = times[:, None, j, start:j]
        candidates = np.where(row < bound, row, math.inf)
        candidates += sums[:, :, start:j]
        best = candidates.argmin(axis=-1)
        sums[:, :, j] = candidates[size, limit, best]
        best += start
        peaks[:, :, j] = np.maximum(peaks[size, limit, best], times[size, j, best])
        parents[:, :, j] = best
    return sums[:, :, -1], peaks[:, :, -1], parents


def _knapsack(sums: Floats, peaks: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Covers all sequences with groups (section 3.4).

    Args:
        sums: ``[sizes, limits]``, of one group of 1, 2, ... sequences.
        peaks: the same for the maxima.

    Returns:
        Sum and maximum ``[limits]``, and ``[sequences + 1, limits]`` the size of the last group.
    """
    sequences, count = sums.shape
    totals, highest = np.full((sequences + 1, count), math.inf), np.zeros((sequences + 1, count))
    sizes = np.zeros((sequences + 1, count), dtype=np.int64)
    totals[0] = 0.0
    limit = np.arange(count)
    for n in range(1, sequences + 1):
        candidates = sums[:n] + totals[n - 1 :: -1][:n]
        best = candidates.argmin(axis=0)
        totals[n] = candidates[best, limit]
        sizes[n] = best + 1
        highest[n] = np.maximum(peaks[best, limit], highest[n - 1 - best, limit])
    return totals[-1], highest[-1], sizes


__all__ = ["Cost", "Optimum", "solve"]
